#!/usr/bin/env bash
# Sees to a Chromium for the tests of the chat page. Exit code 0: there is one; 1: there is none and it could not be installed.
set -euo pipefail
for name in chromium chromium-browser google-chrome; do
    if command -v "$name" >/dev/null; then exit 0; fi
done
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "Chromium is missing, and only root can install it (apt-get install chromium): the chat page is not tried" >&2
    exit 1
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium fonts-liberation >/dev/null || {
    echo "apt-get could not install chromium: the chat page is not tried" >&2
    exit 1
}
