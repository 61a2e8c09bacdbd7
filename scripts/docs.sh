#!/usr/bin/env bash
# The documentation as a site, in site/: open site/index.html. Warnings, pages that are not in the nav of mkdocs.yml and
# links that lead nowhere are errors; the notebook is run. Arguments go to `mkdocs build` (not --quiet: under it mkdocs
# does not count warnings).
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # the notebook's numbers are those of one thread
exec env NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build --strict "$@"
