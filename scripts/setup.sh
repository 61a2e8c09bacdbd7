#!/usr/bin/env bash
# Makes .venv and installs the project into it, once: later calls see that setup.py has not changed and return at once.
set -euo pipefail
cd "$(dirname "$0")/.."

stamp=.venv/installed-$(cat setup.py pyproject.toml scripts/setup.sh | sha256sum | cut -c1-16)
[ -e "$stamp" ] && exit 0

python=${PYTHON:-python3}
echo "Setting up .venv (a few minutes the first time, most of them for compiling fairseq)"
[ -x .venv/bin/python ] || "$python" -m venv .venv
# fairseq ships as source and its isolated build would download a second torch of several gigabytes. What the build
# needs is installed first, so that it can be built without isolation.
.venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 cython==3.3.1 setuptools==80.9.0 wheel==0.48.0
.venv/bin/pip install --quiet --no-build-isolation -e '.[test]'
rm -f .venv/installed-*
touch "$stamp"
