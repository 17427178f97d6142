#!/bin/sh
# Prints the path of a redis-server, for the tests: the one on PATH, else one unpacked from the system's packages into .cache
# of this checkout. Nothing is installed and no service is started. Fails where there is none to be had.
set -eu
cd "$(dirname "$0")/.."

found=$(command -v redis-server || command -v /usr/bin/redis-server || true)
if [ -n "$found" ]; then
    echo "$found"
    exit 0
fi

cache=$(pwd -P)/.cache/redis
if [ ! -x "$cache/start" ]; then
    fresh=$(mktemp -d "${TMPDIR:-/tmp}/agent-runtime-redis.XXXXXX")
    trap 'rm -rf "$fresh"' EXIT
    needed() { apt-cache depends redis-tools | awk '/Depends: lib(atomic|jemalloc|lzf|ssl|systemd|hiredis|lua)/ { print $2 }'; }
    download() { (cd "$fresh" && apt-get download -q redis-server redis-tools $(needed) >&2); }
    download || { [ "$(id -u)" = 0 ] && apt-get update -q >&2 && download; } || {
        echo "redis.sh: no redis-server on PATH, and its package cannot be downloaded; apt-get install redis-server" >&2
        exit 1
    }
    mkdir -p "$cache.$$"
    for package in "$fresh"/*.deb; do dpkg -x "$package" "$cache.$$"; done
    (cd "$cache.$$" && find . -name '*.so.*' -exec dirname {} \; | sort -u >libraries)
    cat >"$cache.$$/start" <<'START'
#!/bin/sh
# From its own place, wherever that is copied to.
here=$(cd "$(dirname "$0")" && pwd -P)
LD_LIBRARY_PATH=$(sed "s|^|$here/|" "$here/libraries" | paste -s -d: -) exec "$here/usr/bin/redis-server" "$@"
START
    chmod -R a+rX "$cache.$$"
    chmod 755 "$cache.$$/start"
    rm -rf "$cache"
    mv "$cache.$$" "$cache" || [ -x "$cache/start" ] # another process was quicker
fi
echo "$cache/start"
