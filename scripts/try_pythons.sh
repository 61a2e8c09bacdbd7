#!/usr/bin/env bash
# Tries the quick form of the demo on the interpreters given: bash scripts/try_pythons.sh python3.12 /opt/python3.13/bin/python
# Each gets a copy of the clone and an environment of its own (pip's torch may be a CUDA build of 5 GB), removed afterwards.
set -uo pipefail
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || { echo "usage: bash scripts/try_pythons.sh PYTHON ..." >&2; exit 2; }
failed=0
for python in "$@"; do
    copy=$(mktemp -d)
    git archive HEAD | tar -x -C "$copy"
    start=$SECONDS
    if PYTHON=$python bash "$copy/scripts/demo.sh" --quick > "$copy/log" 2>&1; then
        echo "$python: the demo ran, $((SECONDS - start)) s with the set-up: $(tail -1 "$copy/log")"
    else
        echo "$python: failed: $(tail -1 "$copy/log")"
        failed=1
    fi
    rm -rf "$copy"
done
exit $failed
