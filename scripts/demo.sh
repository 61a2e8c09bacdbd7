#!/usr/bin/env bash
# From a bare clone to the finished demo. Arguments go to `fairseq-icl demo`.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
exec .venv/bin/fairseq-icl demo "$@"
