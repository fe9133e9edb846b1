#!/usr/bin/env bash
# The browser client of clients/web: build the page, compare the committed one with a fresh build, run its tests.
#   build   libs/plato/web from clients/web
#   check   types, then a build beside it: exit code 1 when libs/plato/web is not what clients/web builds
#   test    types and unit tests
# Exit code 2: Node 20 or later is missing, or its packages cannot be installed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../clients/web"

command -v node >/dev/null && command -v npm >/dev/null || { echo "node and npm are missing (Node 20 or later): the browser client cannot be built here" >&2; exit 2; }
[ "$(node -p 'parseInt(process.versions.node)')" -ge 20 ] || { echo "Node $(node -v) is too old: 20 or later is needed" >&2; exit 2; }
if [ ! -f node_modules/.done ] || [ package-lock.json -nt node_modules/.done ]; then
    npm ci --no-audit --no-fund --loglevel=error || { echo "npm ci failed: the packages of clients/web cannot be installed here" >&2; exit 2; }
    touch node_modules/.done
fi

case "${1:-}" in
build)
    node_modules/.bin/tsc
    node tools/build.mjs
    ;;
check)
    node_modules/.bin/tsc
    fresh=$(mktemp -d)
    trap 'rm -rf "$fresh"' EXIT
    node tools/build.mjs "$fresh/web"
    diff -rq "$fresh/web" ../../libs/plato/web || { echo "libs/plato/web is not what clients/web builds: run \`make web\` and commit it" >&2; exit 1; }
    ;;
test)
    node_modules/.bin/tsc
    node_modules/.bin/vitest run
    ;;
*)
    echo "usage: tools/web.sh build|check|test" >&2
    exit 64
    ;;
esac
