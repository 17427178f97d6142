#!/bin/sh
# Prints the path of a Chromium, for the tests of the viewer and its pictures: CHROMIUM, the one on PATH, else, for root on
# Debian and Ubuntu, the system's package, installed. Fails where there is none to be had. The headless shell, where there
# is one, takes two thirds of the time.
set -eu

if [ -n "${CHROMIUM:-}" ]; then
    echo "$CHROMIUM"
    exit 0
fi
find_one() {
    command -v chromium-headless-shell || command -v chromium || command -v chromium-browser || command -v google-chrome || command -v google-chrome-stable
}
if find_one; then
    exit 0
fi

get() { apt-get install -q -y --no-install-recommends "$1" >&2; }
install() { get chromium-headless-shell || get chromium; }
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    export DEBIAN_FRONTEND=noninteractive
    install || { apt-get update -q >&2 && install; } || true
fi
find_one || {
    echo "chromium.sh: no Chromium on PATH, and it cannot be installed from here; next: apt-get install chromium (as root)," >&2
    echo "or name one with CHROMIUM=/path/to/chromium" >&2
    exit 1
}
