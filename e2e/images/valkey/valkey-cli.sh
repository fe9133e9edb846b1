#!/usr/bin/env bash
# The little of valkey-cli that probes and scripts use: valkey-cli [-h HOST] [-p PORT] [-a PASSWORD] WORD …
set -euo pipefail

fail() { echo "valkey-cli: $*" >&2; exit 1; }

host=127.0.0.1 port=6379 user=default password=${VALKEYCLI_AUTH:-${REDISCLI_AUTH:-}}
while [ $# -gt 0 ]; do
    case "$1" in
        -h) host=$2; shift 2 ;;
        -p) port=$2; shift 2 ;;
        -a | --pass) password=$2; shift 2 ;;
        --user) user=$2; shift 2 ;;
        --no-auth-warning) shift ;;
        -*) fail "this stand-in knows no $1" ;;
        *) break ;;
    esac
done
[ $# -gt 0 ] || set -- PING

LC_ALL=C # lengths are bytes
send() { # WORD …: one command
    printf '*%d\r\n' $# >&3
    local word
    for word; do printf '$%d\r\n%s\r\n' "${#word}" "$word" >&3; done
}

answer() { # prints one answer
    local line
    IFS= read -r -t 5 line <&3 || fail "no answer from $host:$port"
    line=${line%$'\r'}
    case "$line" in
        -*) fail "${line#-}" ;;
        '$-1' | '*-1' | _) echo "(nil)" ;;
        \$*) IFS= read -r -t 5 -N "$((${line#\$} + 2))" line <&3 || fail "half an answer"; printf '%s\n' "${line%$'\r\n'}" ;;
        '*'*) for ((i = ${line#\*}; i > 0; i--)); do answer; done ;;
        *) echo "${line:1}" ;;
    esac
}

exec 3<> "/dev/tcp/$host/$port" || fail "$host:$port does not answer"
if [ -n "$password" ]; then
    send AUTH "$user" "$password"
    answer > /dev/null
fi
send "$@"
answer
