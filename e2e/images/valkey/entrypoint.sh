#!/usr/bin/env bash
# Becomes the server, as docker.io/valkey/valkey does: options or a *.conf alone are the server's.
set -euo pipefail

case "${1:-}" in
    -* | *.conf) set -- valkey-server "$@" ;;
esac
[ "${1:-}" = valkey-server ] || exec "$@"
shift
config=()
case "${1:-}" in
    *.conf | -) config=("$1"); shift ;;
esac
# The public image is built with protected mode off, so that other pods reach a server without a password.
# shellcheck disable=SC2086 # words on purpose
exec valkey-server "${config[@]}" --protected-mode no "$@" ${VALKEY_EXTRA_FLAGS:-}
