#!/bin/sh
# Make the environment of this project: requirements/make_venv.sh FOLDER REQUIREMENTS...
# Python 3.11 is what the lock was tested on. The lock is whole, so nothing is resolved and nothing else comes in.
set -eu
venv=$1
shift

say() { printf 'vime: %s\n' "$*" >&2; }

as_root_install() {
    # A bare Debian has Python but not the part that makes environments.
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "installing $* with apt-get"
        # An old package list names versions that the mirror no longer has.
        apt-get update -qq >/dev/null && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$@" >/dev/null
    else
        return 1
    fi
}

is_311() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; }

find_python() {
    for candidate in ${PYTHON:-} python3.11 python3 /usr/bin/python3.11 "$HOME"/.pyenv/versions/3.11.*/bin/python3.11; do
        if is_311 "$candidate"; then
            echo "$candidate"
            return 0
        fi
    done
    return 1
}

if ! is_311 "$venv/bin/python" || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    python=$(find_python) || { as_root_install python3.11 python3.11-venv && python=$(find_python); } || {
        say "needs Python 3.11 and found none. Install it (Debian 12: apt-get install python3.11-venv; elsewhere: pyenv or" \
            "uv python install 3.11) and run: make venv PYTHON=/path/to/python3.11"
        exit 1
    }
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        as_root_install python3.11-venv && "$python" -c 'import ensurepip, venv' 2>/dev/null || {
            say "$python cannot make environments: as root, apt-get install python3.11-venv; or give another one:" \
                "make venv PYTHON=/path/to/python3.11"
            exit 1
        }
    fi
    say "making $venv with $("$python" --version)"
    rm -rf "$venv"
    "$python" -m venv "$venv"
fi

# One package of the lock (pycosat, which reasoning_gym imports) has no wheel and is compiled.
if ! command -v cc >/dev/null && ! command -v gcc >/dev/null; then
    as_root_install gcc libc6-dev python3.11-dev || {
        say "needs a C compiler and found none: as root, apt-get install gcc libc6-dev python3.11-dev"
        exit 1
    }
fi

pip() { "$venv/bin/python" -m pip --disable-pip-version-check -qq --no-input "$@"; }

for list in "$@"; do
    say "installing $(grep -c '==' "$list") packages of $list"
    # Errors only: pip also warns once a package about an index that it could not read.
    pip install --no-deps -r "$list"
done
pip install --no-deps --no-build-isolation -e .
