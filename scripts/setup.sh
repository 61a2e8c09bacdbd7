#!/usr/bin/env bash
# Makes .venv and installs the project into it, once: later calls see that nothing about the installation has changed
# and return at once.
set -euo pipefail
cd "$(dirname "$0")/.."

stamp=.venv/installed-$(cat pyproject.toml setup.py constraints.txt scripts/setup.sh | sha256sum | cut -c1-16)
[ -e "$stamp" ] && exit 0

# What cannot work is said before anything is made.
refuse() {
    echo "setup: $1" >&2
    exit 2
}
version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>&1 || true; }

python=${PYTHON:-python3}
[ -x .venv/bin/python ] && case $(version_of .venv/bin/python) in 3.11 | 3.12 | 3.13) ;; *) rm -rf .venv ;; esac
if [ ! -x .venv/bin/python ]; then
    command -v "$python" > /dev/null || refuse "$python: not found; give one: PYTHON=/path/to/python3.11 bash scripts/setup.sh"
    case $(version_of "$python") in 3.11 | 3.12 | 3.13) ;; *)
        refuse "$python is Python $(version_of "$python"), 3.11 to 3.13 is needed: PYTHON=/path/to/python3.11 bash scripts/setup.sh" ;;
    esac
    headers=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')
    echo '#include <Python.h>' | "${CXX:-c++}" -x c++ -fsyntax-only -I "$headers" - > /dev/null 2>&1 ||
        refuse "${CXX:-c++}: no C++ compiler, or no Python.h for $python; fairseq is compiled (Debian: apt install g++ python3-dev)"
fi
echo "Setting up .venv (a few minutes the first time, most of them for compiling fairseq)"
[ -x .venv/bin/python ] || "$python" -m venv .venv
# fairseq ships as source and its isolated build would download a second torch of several gigabytes. What the build
# needs is installed first, so that it can be built without isolation.
.venv/bin/pip install --quiet -c constraints.txt torch numpy cython setuptools wheel
.venv/bin/pip install --quiet -c constraints.txt --no-build-isolation -e '.[test,cluster,notebook,hf,hub]'
# The documentation's tools are no part of the package: where they cannot be had, everything else still works.
.venv/bin/pip install --quiet -c constraints.txt --no-build-isolation -e '.[docs]' ||
    echo "The extra [docs] could not be installed: scripts/docs.sh will not work, and its test is skipped"
rm -f .venv/installed-*
touch "$stamp"
