#!/usr/bin/env bash
# Makes the project's virtual environment from the lock. Says in words what is missing if it cannot.
set -euo pipefail
venv=${1:?usage: setup.sh VENV}

fail() { echo "plato setup: $*" >&2; exit 1; }

python=""
for candidate in ${PYTHON:-} python3 python3.14 python3.13 python3.12 python3.11; do
    if command -v "$candidate" >/dev/null 2>&1 &&
        "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null; then
        python=$candidate
        break
    fi
done
[ -n "$python" ] || fail "Python 3.11 to 3.14 was not found. Install it (Debian, Ubuntu: apt-get install python3 python3-venv) or name one: make PYTHON=/path/to/python3 setup"
"$python" -c 'import venv, ensurepip' 2>/dev/null ||
    fail "$python has no venv module. Install it (Debian, Ubuntu: apt-get install python3-venv) and run the command again"

case "$(uname -s)-$(uname -m)" in
    Linux-x86_64 | Linux-aarch64) ;;
    *) fail "the embedded servers run on Linux x86-64 and arm64; this is $(uname -s) $(uname -m)" ;;
esac

# A venv that broke off half-way is made again from nothing.
if [ ! -x "$venv/bin/python" ] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    rm -rf "$venv"
    "$python" -m venv "$venv" || fail "could not make the virtual environment in $venv (is the folder writable?)"
fi

echo "plato setup: installing the pinned packages into $venv" >&2
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes --only-binary :all: -r requirements.lock ||
    fail "the packages could not be installed: see pip's message above (no network, or a package index that lacks them?)"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable . ||
    fail "the project itself could not be installed: see pip's message above"
touch "$venv/.done"
