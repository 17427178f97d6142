#!/bin/sh
# Prints the path of a pgbouncer, for the tests: the one on PATH, else one unpacked from the system's package into .cache
# of this checkout. Nothing is installed and no service is started. Fails where there is none to be had.
set -eu
cd "$(dirname "$0")/.."
. scripts/unpacked.sh

found_or_unpacked /usr/sbin/pgbouncer pgbouncer 'event|c-ares|ssl|systemd|ldap'
