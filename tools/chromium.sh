#!/usr/bin/env bash
# Sees to a Chromium for the tests of the chat page. Exit code 0: there is one; 1: there is none and it could not be installed.
set -uo pipefail
command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null && exit 0
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "Chromium is missing, and only root can install it (apt-get install chromium): the chat page is not tried" >&2
    exit 1
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium fonts-liberation >/dev/null || {
    echo "apt-get could not install chromium: the chat page is not tried" >&2
    exit 1
}
