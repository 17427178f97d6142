#!/bin/sh
# Prints the path of a tmux, for the tests: the one on PATH, else one unpacked from the system's package into .cache
# of this checkout. Nothing is installed. Fails where there is none to be had.
set -eu
cd "$(dirname "$0")/.."
. scripts/unpacked.sh

# What runs in one unpacked is not to see its libraries: it gets none by `env -u`.
found_or_unpacked /usr/bin/tmux tmux 'event|utempter|tinfo'
