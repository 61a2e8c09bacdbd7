#!/usr/bin/env bash
# From a bare clone to the finished test run. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
bash scripts/browser.sh
bash scripts/slurm.sh install
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
.venv/bin/lint-imports
# Two workers with a thread each are faster than one with two: matrices are small here.
export OMP_NUM_THREADS=1
# SIMULATED_GPUS=1 bash scripts/test.sh: every Python process of the tests has a simulated GPU (tests/gpu/at_start).
if [ -n "${SIMULATED_GPUS:-}" ]; then export PYTHONPATH="$PWD/tests/gpu/at_start"; fi
# In the order of their names commands come early and short files last, so that no worker is left alone with a long one;
# xdist's own order is by number of tests.
exec .venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
