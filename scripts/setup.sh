#!/bin/sh
# Builds .venv with Python 3.12 or newer and everything that Regrasp's tests, checks and demo need.
# Does nothing, in a tenth of a second, when .venv is up to date. `make` calls it; it can be run by hand too.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
cd "$root"
unset PYTHONHOME PYTHONPATH VIRTUAL_ENV
export UV_HTTP_TIMEOUT="${UV_HTTP_TIMEOUT:-300}"  # torch's wheels are large; uv's own default is half a minute

stamp=.venv/.regrasp-setup
incomplete='incomplete: a set-up began and did not end'

say() { printf 'setup: %s\n' "$*" >&2; }

die() {
    say "$*"
    exit 2
}

# What .venv was built from. Printed by .venv's own Python, so a broken one prints nothing and never matches.
current_key() {
    .venv/bin/python -I -S -c '
import hashlib, sys
digest = hashlib.sha256(f"{sys.version_info[:2]} {sys.argv[1]}".encode())
for name in ("pyproject.toml", "constraints.txt", "scripts/setup.sh"):
    digest.update(open(name, "rb").read())
print(digest.hexdigest())
' "$root" 2>/dev/null || true
}

is_current() {
    [ -f "$stamp" ] || return 1
    key=$(current_key)
    [ -n "$key" ] && [ "$key" = "$(cat "$stamp")" ]
}

# Two set-ups at once take turns. The lock lives as long as descriptor 9 is open, here or in a child.
take_lock() {
    exec 9>.venv.lock
    if command -v flock >/dev/null 2>&1; then
        flock 9
    elif command -v perl >/dev/null 2>&1; then
        perl -MFcntl=:flock -e 'open(LOCK, ">&=", 9) && flock(LOCK, LOCK_EX) or exit 1'
    fi
}

# Every place where a Python may lie, one path a line. pyenv's shims answer only for the version that is switched on,
# so its folders are read themselves.
python_candidates() {
    printf '%s\n' "$PATH" | tr ':' '\n' | while IFS= read -r folder; do
        for name in python3.12 python3.13 python3.14 python3 python; do
            printf '%s\n' "$folder/$name"
        done
    done
    for pyenv in "${PYENV_ROOT:-}" "${HOME:-}/.pyenv"; do
        for candidate in "$pyenv"/versions/*/bin/python3; do
            printf '%s\n' "$candidate"
        done
    done
}

# "3.12 /path/to/python" for every candidate that runs and could carry Regrasp or uv: a released CPython with the
# usual threads, since the pinned packages have wheels for no other.
probe_pythons() {
    python_candidates | while IFS= read -r candidate; do
        [ -x "$candidate" ] && [ ! -d "$candidate" ] || continue
        "$candidate" -I -c '
import sys, sysconfig
usual = sys.implementation.name == "cpython" and sys.version_info[3] == "final"
if usual and not sysconfig.get_config_var("Py_GIL_DISABLED"):
    print("%d.%d %s" % (sys.version_info[:2] + (getattr(sys, "_base_executable", None) or sys.executable,)))
' </dev/null 2>/dev/null || true
    done
}

# The first Python of one of the given versions, in the order the versions are given.
choose_python() {
    for version in "$@"; do
        chosen=$(printf '%s\n' "$pythons" | sed -n "s/^$version //p" | head -n 1)
        if [ -n "$chosen" ]; then
            printf '%s\n' "$chosen"
            return
        fi
    done
}

# uv learned dependency groups in 2025; an older one cannot install this project.
uv_works() { "$1" pip install --help 2>/dev/null </dev/null | grep -q -e '--group'; }

find_uv() {
    for candidate in "$(command -v uv || true)" "${HOME:-}/.local/bin/uv" "${HOME:-}/.cargo/bin/uv" "$root/.uv/bin/uv"; do
        if [ -n "$candidate" ] && [ -x "$candidate" ] && uv_works "$candidate"; then
            printf '%s\n' "$candidate"
            return
        fi
    done
}

# uv into .uv, by whichever way this machine has: a virtual environment, pip alone, or uv's own installer.
install_uv() {
    say 'uv was not found; installing it into .uv'
    python=$(choose_python 3.12 3.13 3.14 3.11 3.10 3.9 3.8)
    rm -rf .uv
    if [ -n "$python" ]; then
        if "$python" -m venv .uv >/dev/null 2>&1; then
            .uv/bin/python -m pip install --quiet --disable-pip-version-check uv >&2 || rm -rf .uv
        else
            rm -rf .uv  # Debian and Ubuntu ship a Python whose venv module cannot make a pip
            "$python" -m pip install --quiet --disable-pip-version-check --target .uv uv >&2 || rm -rf .uv
        fi
    fi
    if [ ! -x .uv/bin/uv ] && command -v curl >/dev/null 2>&1; then
        curl -LsSf --max-time 120 https://astral.sh/uv/install.sh | UV_UNMANAGED_INSTALL="$root/.uv/bin" sh >&2 || true
    fi
}

# An environment that still has a working Python 3.12 or newer and was not left half-built is kept and brought up to date.
make_environment() {
    if [ "$(cat "$stamp" 2>/dev/null)" != "$incomplete" ] \
        && .venv/bin/python -I -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
        return
    fi
    python=$(choose_python 3.12 3.13)
    rm -rf .venv
    if [ -n "$python" ] && "$uv" venv --quiet --python "$python" .venv; then
        return
    fi
    say 'no Python 3.12 or 3.13 was found on this machine; asking uv to fetch one'
    if "$uv" venv --quiet --python 3.12 .venv; then
        return
    fi
    rm -rf .venv
    python=$(choose_python 3.14)
    if [ -n "$python" ] && "$uv" venv --quiet --python "$python" .venv; then
        return
    fi
    rm -rf .venv
    found=$(printf '%s\n' "$pythons" | cut -d ' ' -f 1 | sort -u | paste -s -d ' ' -)
    die "Regrasp needs Python 3.12 or newer. The PATH and pyenv's versions folders have: ${found:-no Python at all};" \
        "and uv could fetch none (its own words are above). Install one, then run make again." \
        "Debian or Ubuntu: apt install python3.12 python3.12-venv.  macOS: brew install python@3.12." \
        "Anywhere: pyenv install 3.12."
}

install_packages() {
    printf '%s\n' "$incomplete" >"$stamp"
    say "installing into .venv ($(.venv/bin/python --version 2>&1)); the first time takes some minutes"
    "$uv" pip install --quiet --python .venv/bin/python --constraint constraints.txt --build-constraint constraints.txt \
        --group dev --editable '.[metaworld,pusht,judge,ray]' \
        || die 'the packages could not be installed: the reason is above. Mend it and run make again; the half-built' \
            '.venv is then made anew. If it persists, `make clean` removes .venv and .uv.'
    current_key >"$stamp.new"
    mv -f "$stamp.new" "$stamp"
    say 'done'
}

is_current && exit 0
take_lock
is_current && exit 0
pythons=$(probe_pythons)
uv=$(find_uv)
if [ -z "$uv" ]; then
    install_uv
    uv=$(find_uv)
fi
[ -n "$uv" ] || die 'uv, which builds the environment, was not found and could not be installed (the reason is above, if' \
    'there was one to try). Install it with `pip install uv` or as https://docs.astral.sh/uv says, then run make again.'
make_environment
install_packages
