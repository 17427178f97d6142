#!/bin/sh
# The worker of a chaos run: the very command that the supervisor starts by itself. Only a poison run that nobody has
# mended yet has its crash point armed, so that it kills each of its workers at the same place.
case $RUN_ID in
poison-*)
    if [ ! -e "$CHAOS_MENDED/$RUN_ID" ]; then
        export CRASH_AT=after_intent CRASH_SEQ=1
    fi
    ;;
esac
exec "$1" -m agent_runtime provision --resume
