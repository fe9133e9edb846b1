#!/usr/bin/env bash
# Makes the data folder at the first start, as docker.io/library/postgres does, then becomes the server.
set -euo pipefail

# `-c key=value` alone are the server's options.
case "${1:-}" in
    -*) set -- postgres "$@" ;;
esac
[ "${1:-}" = postgres ] || exec "$@"

setting() { # NAME: the value of $NAME, or of the file that $NAME_FILE names
    local value=${!1:-} file=$1_FILE
    file=${!file:-}
    if [ -n "$file" ]; then
        [ -z "$value" ] || { echo "error: both $1 and ${1}_FILE are set" >&2; return 1; }
        value=$(< "$file")
    fi
    printf '%s' "$value"
}

if [ ! -s "$PGDATA/PG_VERSION" ]; then
    user=$(setting POSTGRES_USER)
    user=${user:-postgres}
    password=$(setting POSTGRES_PASSWORD)
    database=$(setting POSTGRES_DB)
    database=${database:-$user}
    auth=${POSTGRES_HOST_AUTH_METHOD:-scram-sha-256}
    if [ -z "$password" ] && [ "$auth" != trust ]; then
        echo "error: POSTGRES_PASSWORD is not set; it is the password of the superuser $user" >&2
        exit 1
    fi
    # Beside its place, moved there when whole: a pod that is cut in between begins anew. A volume that is mounted at
    # PGDATA itself leaves no room beside it.
    new="$PGDATA.new"
    rm -rf "$new"
    mkdir -p "$new" 2> /dev/null || { new=$PGDATA && mkdir -p "$new"; }
    chmod 700 "$new"
    printf '%s\n' "$password" | initdb --pgdata "$new" --username "$user" --pwfile /dev/stdin --encoding UTF8 --locale C \
        --no-instructions
    printf 'host all all all %s\n' "$auth" >> "$new/pg_hba.conf"
    printf "listen_addresses = '*'\nunix_socket_directories = '/var/run/postgresql'\n" >> "$new/postgresql.conf"
    if [ "$database" != postgres ]; then
        printf 'CREATE DATABASE "%s";\n' "$(printf '%s' "$database" | sed 's/"/""/g')" |
            postgres --single -D "$new" -j postgres > /dev/null
    fi
    if [ "$new" != "$PGDATA" ]; then
        rmdir "$PGDATA" 2> /dev/null || true
        mv "$new" "$PGDATA"
    fi
fi

# As PID 1 in a container the pid in a left-over file may be ours: no other server has this data folder.
rm -f "$PGDATA/postmaster.pid"
exec "$@"
