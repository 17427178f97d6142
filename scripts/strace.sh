#!/bin/sh
# Prints the path of a strace, for the tests: the one on PATH, else one unpacked from the system's package into .cache
# of this checkout. Nothing is installed. Fails where there is none to be had.
set -eu
cd "$(dirname "$0")/.."

found=$(command -v strace || command -v /usr/bin/strace || true)
if [ -n "$found" ]; then
    echo "$found"
    exit 0
fi

cache=$(pwd -P)/.cache/strace
if [ ! -x "$cache/start" ]; then
    fresh=$(mktemp -d "${TMPDIR:-/tmp}/agent-runtime-strace.XXXXXX")
    trap 'rm -rf "$fresh"' EXIT
    needed() { apt-cache depends strace | awk '/Depends: lib(unwind|dw|elf)/ { print $2 }'; }
    download() { (cd "$fresh" && apt-get download -q strace $(needed) >&2); }
    download || { [ "$(id -u)" = 0 ] && apt-get update -q >&2 && download; } || {
        echo "strace.sh: no strace on PATH, and its package cannot be downloaded; apt-get install strace" >&2
        exit 1
    }
    mkdir -p "$cache.$$"
    for package in "$fresh"/*.deb; do dpkg -x "$package" "$cache.$$"; done
    (cd "$cache.$$" && find . -name '*.so.*' -exec dirname {} \; | sort -u >libraries)
    cat >"$cache.$$/start" <<'START'
#!/bin/sh
# From its own place, wherever that is copied to.
here=$(cd "$(dirname "$0")" && pwd -P)
libraries=$(sed "s|^|$here/|" "$here/libraries" | paste -s -d: -)
exec "$here/usr/bin/strace" -E LD_LIBRARY_PATH "$@"
START
    # What is traced is not to see the libraries of the tracer: they are named to the tracer alone.
    sed -i 's|^exec |LD_LIBRARY_PATH=$libraries exec |' "$cache.$$/start"
    chmod -R a+rX "$cache.$$"
    chmod 755 "$cache.$$/start"
    rm -rf "$cache"
    mv "$cache.$$" "$cache" || [ -x "$cache/start" ] # another process was quicker
fi
echo "$cache/start"
