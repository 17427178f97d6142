#!/bin/sh
# Kills the provisioning agent between act and record, lets a second process pick the run up, and shows what the
# remotes saw. Everything happens in a temporary folder that is gone afterwards; nothing is configured or left.
# The exit code is 0 only if all of it came true.
set -eu
cd "$(dirname "$0")/.."
checkout=$(pwd -P)
python=${PYTHON:-$checkout/.venv/bin/python}

folder=$(mktemp -d "${TMPDIR:-/tmp}/agent-runtime-demo.XXXXXX")
trap 'rm -rf "$folder"' EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 141' PIPE
trap 'exit 143' TERM
cd "$folder"

# The story is the default one, whatever the caller's environment says.
unset DATABASE_URL RUN_ID GOAL PLANNER MOCK_CLOUD_URL MOCK_LLM_URL CHECKPOINT_KEY LEASE POLL HEARTBEAT MAX_ATTEMPTS || true
unset CRASH_AT CRASH_SEQ CRASH_IN STALL_AT STALL_MS || true
RUN_ID=demo
export RUN_ID

say() { printf '\n%s\n\n' "$*"; }

fail() {
    printf '\ndemo: %s\n' "$*" >&2
    exit 1
}

# Shows what a worker printed, and says of the lines that matter what they mean.
explain() {
    awk '
        { print "   " $0 }
        /^INFO decided/ && /seq=0/     { note("the mock model counts its answers in the names: deciding twice would give srv-2") }
        /^!!! CRASH_AT/                { note("the server exists at the remote, and nobody has written that down") }
        /^INFO replayed/               { note("read from the journal: the model is not asked again") }
        /^INFO calling/ && /attempt=2/ { note("it was begun and has no ending, so it is sent again, under the same key") }
        /already_done$/                { note("the remote knows the key and answers with the same server") }
        function note(text) { print "        └─ " text }
    ' "$1"
}

die_in_the_middle() {
    printf '   $ CRASH_AT=after_call RUN_ID=demo python -m agent_runtime\n\n'
    status=0
    CRASH_AT=after_call "$python" -m agent_runtime >first.txt 2>&1 || status=$?
    explain first.txt
    [ "$status" -eq 1 ] || fail "expected the first worker to die with exit code 1, found $status"
}

pick_the_run_up() {
    printf '   $ RUN_ID=demo python -m agent_runtime\n\n'
    status=0
    "$python" -m agent_runtime >second.txt 2>&1 || status=$?
    explain second.txt
    [ "$status" -eq 0 ] || fail "expected the second worker to end the run with exit code 0, found $status"
    grep -q '^INFO done run=demo steps=3 llm_calls=4$' second.txt || fail "expected the run to be done after 4 model calls"
}

# The mocks keep their state in one file beside the store; it outlives every worker, as a real remote would.
what_the_remotes_saw() {
    [ -f agent_runtime.mock.db ] || fail "expected the state file of the mocks in $folder, found: $(ls -A)"
    "$python" "$checkout/scripts/remote_saw.py" agent_runtime.mock.db demo
}

cat <<'PICTURE'

An agent is to stand up a server, a database and a DNS record. Its worker dies at the worst moment.

   worker 1    decide ─▶ write that down ─▶ write the call down ─▶ send it ─┐         ╳ dies: the result is
                                                                            ▼         │ written down nowhere
   remote                                                          makes i-0000001 ───┘
                                                                            ▲
   worker 2               read the decision, and a call without result ─▶ send it again ─▶ "already_done"
PICTURE

say "1. The worker dies after the remote acted, before it could write that down"
die_in_the_middle

say "2. Another worker picks the run up, and goes on where the journal ends"
pick_the_run_up

say "3. What the remotes saw, by their own counters"
what_the_remotes_saw

cat <<'NEXT'

Now you: die at another point (before_decide, after_decide, after_intent, after_confirm, …), then pick it up again.

   $ CRASH_AT=after_decide RUN_ID=mine .venv/bin/python -m agent_runtime
   $ RUN_ID=mine .venv/bin/python -m agent_runtime
NEXT
