#!/bin/sh
# Prints the path of a tmux, for the tests: the one on PATH, else one unpacked from the system's package into .cache
# of this checkout. Nothing is installed. Fails where there is none to be had.
set -eu
cd "$(dirname "$0")/.."

found=$(command -v tmux || command -v /usr/bin/tmux || true)
if [ -n "$found" ]; then
    echo "$found"
    exit 0
fi

cache=$(pwd -P)/.cache/tmux
if [ ! -x "$cache/start" ]; then
    fresh=$(mktemp -d "${TMPDIR:-/tmp}/agent-runtime-tmux.XXXXXX")
    trap 'rm -rf "$fresh"' EXIT
    needed() { apt-cache depends tmux | awk '/Depends: lib(event|utempter|tinfo)/ { print $2 }'; }
    download() { (cd "$fresh" && apt-get download -q tmux $(needed) >&2); }
    download || { [ "$(id -u)" = 0 ] && apt-get update -q >&2 && download; } || {
        echo "tmux.sh: no tmux on PATH, and its package cannot be downloaded; apt-get install tmux" >&2
        exit 1
    }
    mkdir -p "$cache.$$"
    for package in "$fresh"/*.deb; do dpkg -x "$package" "$cache.$$"; done
    (cd "$cache.$$" && find . -name '*.so.*' -exec dirname {} \; | sort -u >libraries)
    cat >"$cache.$$/start" <<'START'
#!/bin/sh
# From its own place, wherever that is copied to. What runs in it is not to see its libraries: it gets none by `env -u`.
here=$(cd "$(dirname "$0")" && pwd -P)
LD_LIBRARY_PATH=$(sed "s|^|$here/|" "$here/libraries" | paste -s -d: -)
export LD_LIBRARY_PATH
exec "$here/usr/bin/tmux" "$@"
START
    chmod -R a+rX "$cache.$$"
    chmod 755 "$cache.$$/start"
    rm -rf "$cache"
    mv "$cache.$$" "$cache" || [ -x "$cache/start" ] # another process was quicker
fi
echo "$cache/start"
