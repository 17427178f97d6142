#!/bin/sh
# Kills the provisioning agent between act and record, lets a second process pick the run up, and shows what the
# remote saw. Everything happens in a temporary folder that is gone afterwards; nothing is configured or left.
set -eu
cd "$(dirname "$0")/.."
checkout=$(pwd -P)
python=$checkout/.venv/bin/python
crash_at=${CRASH_AT:-after_call}

folder=$(mktemp -d "${TMPDIR:-/tmp}/agent-runtime-demo.XXXXXX")
trap 'rm -rf "$folder"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
cd "$folder"

# The story is the default one, whatever the caller's environment says.
unset DATABASE_URL RUN_ID GOAL PLANNER MOCK_CLOUD_URL MOCK_LLM_URL CHECKPOINT_KEY || true
unset CRASH_AT CRASH_SEQ CRASH_IN STALL_AT STALL_MS || true
RUN_ID=demo
export RUN_ID

say() { printf '\n%s\n' "$*"; }
command_line() { printf '   $ %s\n\n' "$*"; }

die_in_the_middle() {
    command_line "CRASH_AT=$crash_at RUN_ID=demo python -m agent_runtime"
    status=0
    CRASH_AT=$crash_at "$python" -m agent_runtime 2>&1 || status=$?
    if [ "$status" -ne 1 ]; then
        echo "demo: expected the worker to die with exit code 1, found $status" >&2
        exit 1
    fi
}

pick_the_run_up() {
    command_line "RUN_ID=demo python -m agent_runtime"
    "$python" -m agent_runtime 2>&1
}

# The mocks keep their state in one file beside the store; it outlives every worker, as a real remote would.
what_the_remote_saw() {
    set -- *mock*.db
    if [ ! -f "$1" ] || [ $# -ne 1 ]; then
        echo "demo: expected one state file of the mocks in $folder, found: $(ls -A)" >&2
        exit 1
    fi
    "$python" "$checkout/scripts/remote_saw.py" "$1"
}

cat <<'PICTURE'
One agent, three tool calls: a server, a database, a DNS record. A worker dies in the middle.

   model decides ──> decision written ──> call written ──> REMOTE ACTS ──╳──> result written
                                                                         │
                                                          the worker dies here
PICTURE

say "1. The worker dies after the remote acted, before it could write that down"
die_in_the_middle

say "2. Another worker picks the run up: it replays the decision and sends the call again, under the same key"
pick_the_run_up

say "3. What the remote saw"
what_the_remote_saw
