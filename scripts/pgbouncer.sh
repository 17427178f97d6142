#!/bin/sh
# Prints the path of a pgbouncer, for the tests: the one on PATH, else one unpacked from the system's package into .cache
# of this checkout. Nothing is installed and no service is started. Fails where there is none to be had.
set -eu
cd "$(dirname "$0")/.."

found=$(command -v pgbouncer || command -v /usr/sbin/pgbouncer || true)
if [ -n "$found" ]; then
    echo "$found"
    exit 0
fi

cache=$(pwd -P)/.cache/pgbouncer
if [ ! -x "$cache/start" ]; then
    fresh=$(mktemp -d "${TMPDIR:-/tmp}/agent-runtime-pgbouncer.XXXXXX")
    trap 'rm -rf "$fresh"' EXIT
    needed() { apt-cache depends pgbouncer | awk '/Depends: lib(event|c-ares|ssl|systemd|ldap)/ { print $2 }'; }
    download() { (cd "$fresh" && apt-get download -q pgbouncer $(needed) >&2); }
    download || { [ "$(id -u)" = 0 ] && apt-get update -q >&2 && download; } || {
        echo "pgbouncer.sh: no pgbouncer on PATH, and its package cannot be downloaded; apt-get install pgbouncer" >&2
        exit 1
    }
    mkdir -p "$cache.$$"
    for package in "$fresh"/*.deb; do dpkg -x "$package" "$cache.$$"; done
    (cd "$cache.$$" && find . -name '*.so.*' -exec dirname {} \; | sort -u >libraries)
    cat >"$cache.$$/start" <<'START'
#!/bin/sh
# From its own place, wherever that is copied to.
here=$(cd "$(dirname "$0")" && pwd -P)
LD_LIBRARY_PATH=$(sed "s|^|$here/|" "$here/libraries" | paste -s -d: -) exec "$here/usr/sbin/pgbouncer" "$@"
START
    chmod -R a+rX "$cache.$$"
    chmod 755 "$cache.$$/start"
    rm -rf "$cache"
    mv "$cache.$$" "$cache" || [ -x "$cache/start" ] # another process was quicker
fi
echo "$cache/start"
