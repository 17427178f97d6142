#!/bin/sh
# Makes .venv in this checkout and installs the package into it, editable, with pinned dependencies.
#
#   sh scripts/setup.sh core    what the package needs to run (the demo)
#   sh scripts/setup.sh dev     that, and what the tests and checks need
#
# Uses uv where it is present, else `python3 -m venv` and pip. A stamp in the venv names what was installed and
# where, so that a second call returns at once; after a change of the pins, of pyproject.toml or of the folder it
# installs again. A venv that works is never thrown away. PYTHON=/path/to/python chooses the interpreter.
set -eu
cd "$(dirname "$0")/.."

profile=${1:-dev}
venv=.venv
python=$venv/bin/python
requirements=requirements/$profile.txt

if [ ! -f "$requirements" ]; then
    echo "setup: no such profile: $profile (expected core or dev)" >&2
    exit 2
fi

# One line that is the same for as long as nothing that is installed has to change.
signature() {
    echo "$1 $(pwd -P) $(cat pyproject.toml "requirements/$1.txt" | cksum)"
}

is_installed() {
    [ -x "$python" ] && [ -f "$venv/.stamp-$1" ] && [ "$(cat "$venv/.stamp-$1")" = "$(signature "$1")" ]
}

# True for a Python that starts and is new enough; `import venv, ensurepip` asks that it can make a venv as well.
is_usable() {
    "$1" -c "
import sys
if sys.version_info < (3, 11):
    sys.exit(1)
${2:-}
" >/dev/null 2>&1
}

find_python() {
    for candidate in ${PYTHON:-python3.13 python3.12 python3.11 python3}; do
        if is_usable "$candidate" "$needs"; then
            # The real file and not the name: a shim may resolve to another version elsewhere.
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
}

refuse() {
    {
        echo "setup: no usable Python found."
        echo "  expected: Python 3.11 or newer that can make a virtual environment (modules venv and ensurepip)"
        echo "  tried:    ${PYTHON:-python3.13, python3.12, python3.11, python3}"
        echo "  next:     install one (Debian and Ubuntu: apt-get install python3 python3-venv), name one with"
        echo "            PYTHON=/path/to/python3.12, or install uv, which brings its own"
    } >&2
    exit 1
}

make_venv() {
    found=$(find_python)
    [ -n "$found$uv" ] || refuse
    rm -rf "$venv"
    if [ -n "$uv" ]; then
        # Without a Python on this machine, uv finds one itself.
        "$uv" venv --quiet --no-cache --python "${found:-3.13}" "$venv"
    else
        "$found" -m venv "$venv"
    fi
}

install() {
    if [ -n "$uv" ]; then
        "$uv" pip install --quiet --python "$python" "$@"
    else
        "$python" -m pip install --quiet --disable-pip-version-check --no-cache-dir "$@"
    fi
}

if is_installed "$profile" || { [ "$profile" = core ] && is_installed dev; }; then
    exit 0
fi

uv=$(command -v uv || true)
needs=
[ -n "$uv" ] || needs="import venv, ensurepip"
# The cache lives and dies with the venv: nothing is written to HOME.
UV_CACHE_DIR=${UV_CACHE_DIR:-$(pwd -P)/$venv/.cache}
export UV_CACHE_DIR
# As root in a container pip warns about the system's Python; this is a venv.
PIP_ROOT_USER_ACTION=ignore
export PIP_ROOT_USER_ACTION
unset PYTHONPATH PYTHONHOME VIRTUAL_ENV || true

is_usable "$python" || make_venv
# A venv that uv made has no pip; where uv is gone since, pip is what we have.
[ -n "$uv" ] || "$python" -m pip --version >/dev/null 2>&1 || "$python" -m ensurepip >/dev/null
echo "setup: installing $requirements into $venv with ${uv:-pip} and $("$python" --version)"
install --require-hashes -r "$requirements"
# The build backend is among the pins, so the build needs no environment, and no download, of its own.
install --no-deps --no-build-isolation --editable .
signature "$profile" >"$venv/.stamp-$profile"
