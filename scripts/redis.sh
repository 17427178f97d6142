#!/bin/sh
# Prints the path of a redis-server, for the tests: the one on PATH, else one unpacked from the system's packages into .cache
# of this checkout. Nothing is installed and no service is started. Fails where there is none to be had.
set -eu
cd "$(dirname "$0")/.."
. scripts/unpacked.sh

found_or_unpacked /usr/bin/redis-server 'redis-server redis-tools' 'atomic|jemalloc|lzf|ssl|systemd|hiredis|lua'
