"""The stages: typed functions from files to new files."""
