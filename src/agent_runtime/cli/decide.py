"""`agent-runtime approvals`, `approve`, `deny`, `settle`, `cancel`, `delete`: what a person decides about a run."""

from __future__ import annotations

import argparse
import getpass
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress

from agent_runtime.approvals import ApprovalRequest
from agent_runtime.cli.tables import json_line, print_table, printable, told_at
from agent_runtime.described import Left
from agent_runtime.errors import CheckpointConflict
from agent_runtime.runs import Runs
from agent_runtime.settlements import Outcome, Rerun, Settling

HEAD = ("RUN", "REQUEST", "TOOL", "STEP", "ASKED", "EXPIRES", "ANSWERED", "ARGUMENTS")
COMMANDS = ("approvals", "approve", "deny", "settle", "cancel", "delete")
UNSAID = "no reason was given"
NOTHING = object()
"""What `--done` says without JSON: by a value that is not the default, or the option would count as not given."""


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The commands of whoever decides, and their options."""
    approvals = add_command(commands, "approvals", "list the calls that wait for somebody's approval")
    approvals.add_argument("run", metavar="RUN", nargs="?")
    add_redact(approvals)
    for name, does in (("approve", "let a call go out"), ("deny", "do not let a call go out; the model is told")):
        answer = _add_deciding(commands, name, does)
        answer.add_argument("request", metavar="REQUEST", help="its request, as `approvals` lists it")
        answer.add_argument("--note", metavar="TEXT", default="", help="a word with it, which the model sees of a denial")
        if name == "approve":
            answer.add_argument("--edit", metavar="JSON", type=_json_object, help="an object: the arguments to change")
    settle = _add_deciding(commands, "settle", "say what became of a call in doubt")
    settle.add_argument("call", metavar="CALL", help="the call, as `show` lists it")
    how = settle.add_mutually_exclusive_group(required=True)
    how.add_argument("--done", metavar="JSON", type=_json, nargs="?", const=NOTHING, help="it happened: its result, if any")
    how.add_argument("--not-done", action="store_true", help="it did not happen, and will not any more")
    how.add_argument("--rerun", action="store_true", help="run it again, whatever became of it")
    settle.add_argument("--why", metavar="TEXT", required=True, help="how you know; it is recorded")
    cancel = _add_deciding(commands, "cancel", "end a run; one whose worker lives is ended by that worker")
    cancel.add_argument("--why", metavar="TEXT", default=UNSAID, help="the reason; it is recorded")
    delete = _add_deciding(commands, "delete", "remove all of a run; its id is not used again")
    delete.add_argument("--force", action="store_true", help="also one that waits for a decision, or has a call in doubt")


def add_command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, does: str
) -> argparse.ArgumentParser:
    """A command that looks at a store."""
    command = commands.add_parser(name, help=does)
    command.add_argument("--store", metavar="URL", help="the store to look at (default: DATABASE_URL)")
    command.add_argument("--json", action="store_true", help="one JSON line an item, for programs")
    return command


def add_redact(command: argparse.ArgumentParser) -> None:
    """The option of each command that shows values."""
    command.add_argument("--redact", metavar="NAME", action="append", help="hide what stands under this name; may be repeated")


def _add_deciding(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, does: str
) -> argparse.ArgumentParser:
    command = add_command(commands, name, does)
    command.add_argument("run", metavar="RUN")
    command.add_argument("--by", metavar="NAME", help="who says so; it is recorded (default: the user)")
    return command


def user_name() -> str:
    """Who runs this command, as far as the system tells."""
    with suppress(KeyError, OSError, ImportError):  # a user without a name
        return getpass.getuser()
    return "unknown"


async def decide(runs: Runs, chosen: argparse.Namespace) -> int:
    """Run one of the commands; gives its exit code."""
    match chosen.command:
        case "approvals":
            await _list(runs, chosen)
        case "approve" | "deny":
            await _answer(runs, chosen)
        case "settle":
            await _settle(runs, chosen)
        case "cancel":
            await _cancel(runs, chosen)
        case _:
            await runs.delete(chosen.run, by=_by(chosen), force=chosen.force)
            _say(chosen, {"deleted": True}, "is deleted, and its id is not used again")
    return 0


def _by(chosen: argparse.Namespace) -> str:
    return user_name() if chosen.by is None else str(chosen.by)


def _say(chosen: argparse.Namespace, plain: dict[str, object], said: str) -> None:
    print(json_line({"run": chosen.run, **plain}) if chosen.json else printable(f"run {chosen.run} {said}"))


# Approvals.


async def _list(runs: Runs, chosen: argparse.Namespace) -> None:
    found = runs.asked_each(chosen.run)
    if not chosen.json:
        await print_table(HEAD, _cells(found))
        return
    async for request, left in found:
        plain = {"run": request.run_id, "request": request.id, **request._asdict()}
        plain["answered"] = None if left is None else {"decision": left.how, "by": left.by, "note": left.why}
        print(json_line({name: value for name, value in plain.items() if name not in ("run_id", "id")}))


async def _cells(found: AsyncIterator[tuple[ApprovalRequest, Left | None]]) -> AsyncIterator[Sequence[str]]:
    async for request, left in found:
        times = (told_at(request.asked_at), told_at(request.expires_at))
        said = "" if left is None else f"{left.how}, by {left.by}"
        yield request.run_id, request.id, request.tool, str(request.step), *times, said, json_line(request.args)


async def _answer(runs: Runs, chosen: argparse.Namespace) -> None:
    which, said = (chosen.run, chosen.request), {"by": _by(chosen), "note": chosen.note}
    checked = ""
    if chosen.command == "deny":
        answer = "denied"
        await runs.deny(which, **said)
    elif chosen.edit is not None:
        answer, checked = "approved with other arguments", ", which whoever has the tools checks"
        await runs.edit(which, chosen.edit, **said)
    else:
        answer = "approved"
        await runs.approve(which, **said)
    _say(chosen, {"request": chosen.request, "answered": answer}, f"is told: request {chosen.request} is {answer}{checked}")


# Settling and cancelling.


async def _settle(runs: Runs, chosen: argparse.Namespace) -> None:
    settling, how = _settling(chosen)
    recorded = await runs.settle(chosen.run, chosen.call, settling, by=_by(chosen), why=chosen.why)
    told = "is settled" if recorded else "is settled for when its worker stops, which may be alive"
    _say(chosen, {"call": chosen.call, "settled": how, "recorded": recorded}, f"call {chosen.call} {told}: {how}")


def _settling(chosen: argparse.Namespace) -> tuple[Settling, str]:
    if chosen.rerun:
        return Rerun(), "rerun"
    return (Outcome.not_done(), "not done") if chosen.not_done else (_done(chosen.done), "done")


def _done(result: object) -> Outcome:
    return Outcome.done() if result is NOTHING else Outcome.done(result)


async def _cancel(runs: Runs, chosen: argparse.Namespace) -> None:
    changed = await runs.cancel(chosen.run, by=_by(chosen), why=chosen.why)
    status = ""
    with suppress(CheckpointConflict):  # deleted since
        status = (await runs.show(chosen.run)).info.status
    if not changed:
        said = f"is {status}; nothing was changed" if status in ("done", "failed", "cancelled") else "was told so already"
    else:
        said = "is cancelled" if status == "cancelled" else "is told to end: its worker may be alive, and ends it"
    _say(chosen, {"cancelled": changed, "status": status}, said)


# Arguments.


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(
            f"expected JSON, found {text!r:.100} ({error}); quote it, as in '\"text\"'"
        ) from error


def _json_object(text: str) -> dict[str, object]:
    value = _json(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object of arguments, found {text!r:.100}")
    return value
