#!/bin/sh
# Prints the path of a strace, for the tests: the one on PATH, else one unpacked from the system's package into .cache
# of this checkout. Nothing is installed. Fails where there is none to be had.
set -eu
cd "$(dirname "$0")/.."
. scripts/unpacked.sh

# What is traced is not to see the libraries of the tracer: they are named to the tracer alone.
found_or_unpacked /usr/bin/strace strace 'unwind|dw|elf' '-E LD_LIBRARY_PATH '
