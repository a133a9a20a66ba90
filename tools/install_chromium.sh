#!/usr/bin/env bash
# Installs Debian's Chromium for the playground tests if it is missing. Without it those tests are skipped.
set -euo pipefail
if command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null; then
    exit 0
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "no Chromium here: the playground tests will be skipped (apt-get install chromium)"
    exit 0
fi
echo "installing Chromium for the playground tests"
export DEBIAN_FRONTEND=noninteractive
if ! { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } >/dev/null 2>&1; then
    echo "Chromium could not be installed: the playground tests will be skipped"
fi
