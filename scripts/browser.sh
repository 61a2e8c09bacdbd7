#!/usr/bin/env bash
# A Chromium for the tests of the report's page: Debian's, installed where that is possible. Where it is not, says so, and
# those tests are skipped.
set -euo pipefail
for name in chromium chromium-browser google-chrome; do
    command -v "$name" > /dev/null && exit 0
done
if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
    echo "Installing Debian's chromium for the tests of the report's page"
    if apt-get update -qq > /dev/null 2>&1 && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium > /dev/null 2>&1; then
        exit 0
    fi
fi
echo "No Chromium here and none could be installed: the tests of the report's page in a browser are skipped"
