#!/usr/bin/env bash
# Makes .venv and installs the project into it, once: later calls see that nothing about the installation has changed
# and return at once.
set -euo pipefail
cd "$(dirname "$0")/.."

stamp=.venv/installed-$(cat pyproject.toml setup.py constraints.txt scripts/setup.sh | sha256sum | cut -c1-16)
[ -e "$stamp" ] && exit 0

python=${PYTHON:-python3}
echo "Setting up .venv (a few minutes the first time, most of them for compiling fairseq)"
[ -x .venv/bin/python ] || "$python" -m venv .venv
# fairseq ships as source and its isolated build would download a second torch of several gigabytes. What the build
# needs is installed first, so that it can be built without isolation.
.venv/bin/pip install --quiet -c constraints.txt torch numpy cython setuptools wheel
.venv/bin/pip install --quiet -c constraints.txt --no-build-isolation -e '.[test,joblib,slurm,notebook,hub]'
# The documentation's tools are no part of the package: where they cannot be had, everything else still works.
.venv/bin/pip install --quiet -c constraints.txt --no-build-isolation -e '.[docs]' ||
    echo "The extra [docs] could not be installed: scripts/docs.sh will not work, and its test is skipped"
rm -f .venv/installed-*
touch "$stamp"
