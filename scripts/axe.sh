#!/bin/sh
# Prints the path of axe-core's script, for the tests of the viewer: it looks at pages for those who cannot see, or use no
# mouse. AXE names one; else it is npm's package, of one version and by its hash, unpacked into .cache of this checkout.
# It is under the MPL 2.0, and no part of this package. Fails where it is not to be had.
set -eu
cd "$(dirname "$0")/.."
. scripts/unpacked.sh

version=4.14.1
sha512=1477dafa598d8d065f273d6af302aa203c02e83131707b7fa648cd41bd3d6b734f8c22a0dab86ee6a6f64b8afbe804b214d36db85a2826965edfb3a0b9d546b5
if [ -n "${AXE:-}" ]; then
    echo "$AXE"
    exit 0
fi
cache=$(pwd -P)/.cache/axe-$version
if [ ! -f "$cache/axe.min.js" ]; then
    begin
    (cd "$fresh" && npm pack --silent "axe-core@$version" >&2) || {
        echo "axe.sh: axe-core $version cannot be downloaded with npm; name its axe.min.js with AXE=/path/to/axe.min.js" >&2
        exit 1
    }
    echo "$sha512  $fresh/axe-core-$version.tgz" | sha512sum -c - >&2
    tar -xzf "$fresh/axe-core-$version.tgz" -C "$made" --strip-components=1 package/axe.min.js package/LICENSE
    keep axe.min.js
fi
echo "$cache/axe.min.js"
