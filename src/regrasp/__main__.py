"""``python -m regrasp``: the command line, wherever the script is not on the PATH."""

import sys

from regrasp.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
