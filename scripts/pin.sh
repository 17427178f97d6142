#!/bin/sh
# Pins every distribution we install, with hashes, for each Python and platform that we support.
#
# requirements/dev.txt   everything: the core, every extra, the build backend, the tests, the checks
# requirements/core.txt  what the package itself needs, at the versions of dev.txt
#
# Needs uv. UPGRADE=1 takes the newest versions; without it the versions already pinned stay where they can.
set -eu
cd "$(dirname "$0")/.."
unset UV_INDEX UV_INDEX_URL UV_DEFAULT_INDEX UV_EXTRA_INDEX_URL UV_FIND_LINKS || true

compile() {
    uv pip compile --quiet --no-config --universal --python-version 3.11 --generate-hashes --no-header \
        --no-emit-index-url --no-emit-find-links ${UPGRADE:+--upgrade} "$@" >/dev/null
}

compile pyproject.toml requirements/build.in --all-extras \
    --output-file requirements/dev.txt
compile pyproject.toml requirements/build.in --constraints requirements/dev.txt --output-file requirements/core.txt
echo "pinned: requirements/dev.txt, requirements/core.txt"
