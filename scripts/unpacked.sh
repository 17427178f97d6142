# Sourced, at the top of the checkout, by the scripts that print the path of a program for the tests: finds it on PATH, or
# unpacks it from the system's packages into .cache of this checkout. Nothing is installed and no service is started.

# found_or_unpacked PROGRAM PACKAGES LIBRARIES [OPTIONS]: prints the path of that program, which its packages keep at
# PROGRAM. Of what they depend on, they bring the libraries whose names begin with one of LIBRARIES, parted by a bar.
# A program unpacked is given OPTIONS before those of whoever starts it.
found_or_unpacked() {
    program=$1 packages=$2 libraries=$3 options=${4:-}
    name=$(basename "$program")
    if command -v "$name" || command -v "$program"; then
        return
    fi
    cache=$(pwd -P)/.cache/$(basename "$0" .sh)
    if [ ! -x "$cache/start" ]; then
        begin
        download || { [ "$(id -u)" = 0 ] && apt-get update -q >&2 && download; } || {
            echo "$(basename "$0"): no $name on PATH, and its package cannot be downloaded; apt-get install ${packages%% *}" >&2
            exit 1
        }
        for package in "$fresh"/*.deb; do dpkg -x "$package" "$made"; done
        (cd "$made" && find . -name '*.so.*' -exec dirname {} \; | sort -u >libraries)
        write_start >"$made/start"
        chmod -R a+rX "$made"
        chmod 755 "$made/start"
        keep start
    fi
    echo "$cache/start"
}

# begin: a folder $fresh for what is downloaded, and $made for what is to be kept as $cache; both are gone at the end.
begin() {
    fresh=$(mktemp -d "${TMPDIR:-/tmp}/agent-runtime-$(basename "$0" .sh).XXXXXX")
    made=$cache.$$
    trap 'rm -rf "$fresh" "$made"' EXIT
    mkdir -p "$made"
}

# keep FILE: from now on $made is found as $cache; FILE is one of what is in it.
keep() {
    rm -rf "$cache"
    mv "$made" "$cache" || [ -f "$cache/$1" ] # another process was quicker
}

download() { (cd "$fresh" && apt-get download -q $packages $(needed) >&2); }

needed() { apt-cache depends $packages | awk -v names="Depends: lib($libraries)" '$0 ~ names { print $2 }' | sort -u; }

write_start() {
    cat <<START
#!/bin/sh
# From its own place, wherever that is copied to.
here=\$(cd "\$(dirname "\$0")" && pwd -P)
LD_LIBRARY_PATH=\$(sed "s|^|\$here/|" "\$here/libraries" | paste -s -d: -) exec "\$here$program" $options"\$@"
START
}
