"""What an operator is shown of runs goes through the hook, and what they decide means the true values."""

from __future__ import annotations

import io
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from agent_runtime import Runs
from agent_runtime.approvals import ApprovalRequest
from agent_runtime.cli.drawn import draw_text
from agent_runtime.errors import VerdictRefused
from agent_runtime.picture import draw
from agent_runtime.redaction import HIDDEN, UNREDACTED, Part, Redact, redact_names, redact_pattern
from agent_runtime.runs import report_of_archive
from agent_runtime.stores.memory import MemoryCheckpointStore
from agent_runtime.tools import ToolRegistry
from tests.bench import KEY, Place, Script, Worker, results_in
from tests.keys.rings import STILL_OLD
from tests.keys.story import MARKER, tell

PAY = {"card": {"number": "4111-1111", "owner": "ana"}, "amount": 5}


async def everything(runs: Runs) -> dict[str, str]:
    """All that is said of each run, but for the one whose tool is called like the secret."""
    said: dict[str, str] = {}
    for info in await runs.list():
        if info.run_id != "e":
            report = await runs.show(info.run_id)
            said[info.run_id] = f"{info} {asdict(report.timeline)} {report} {await runs.pending(info.run_id)}"
    async for report in runs.waiting_each():
        said[f"waiting: {report.info.run_id}"] = str(report)
    return said


async def test_nothing_that_is_said_of_runs_shows_what_a_hook_hides() -> None:
    store = MemoryCheckpointStore()
    await tell(store, STILL_OLD)
    parts: set[Part] = set()

    def redact(value: Any, part: Part) -> Any:
        parts.add(part)
        return redact_pattern(MARKER)(value, part)

    clear = await everything(Runs(store, checkpoint_key=STILL_OLD))
    told = await everything(Runs(store, checkpoint_key=STILL_OLD, redact=redact))
    assert sum(MARKER in each for each in clear.values()) > 3, "else there would be nothing to hide"
    assert told.keys() == clear.keys()
    assert not [run for run, each in told.items() if MARKER in each]
    assert parts == set(Part)


async def test_an_archived_run_is_shown_through_the_hook_too(place: Place, tmp_path: Path) -> None:
    tools = ToolRegistry()
    tools.tool(name="echo", pure=True)(lambda text: text)
    await Worker(place).run(Script([("echo", {"text": MARKER})], "done"), tools)
    file = io.BytesIO()
    await Runs(place.open(), checkpoint_key=KEY).archive("run", file)
    path = tmp_path / "run.archive"
    path.write_bytes(file.getvalue())
    assert MARKER in str(report_of_archive(path, checkpoint_key=KEY))
    assert MARKER not in str(report_of_archive(path, checkpoint_key=KEY, redact=redact_pattern(MARKER)))


def _fails(value: Any, part: Part) -> Any:
    raise ValueError(value)


@pytest.mark.parametrize("redact", [_fails, lambda value, part: [1], lambda value, part: None, lambda value, part: {}])
async def test_whatever_a_hook_gives_a_run_is_shown_as_it_stands(redact: Redact) -> None:
    store = MemoryCheckpointStore()
    await tell(store, STILL_OLD)
    clear, told = (Runs(store, checkpoint_key=STILL_OLD, redact=each) for each in (None, redact))
    assert [info.status for info in await told.list()] == [info.status for info in await clear.list()]
    for info in await told.list():
        if info.status != "corrupt":
            report, as_it_is = await told.show(info.run_id), await clear.show(info.run_id)
            assert [call.state for call in report.timeline.calls.values()] == [
                call.state for call in as_it_is.timeline.calls.values()
            ]
            picture = draw(report.timeline, now_ms=0)
            assert picture is not None
            assert draw_text(picture, width=80)


# Deciding on what was seen redacted.


def _tools(sent: list[object]) -> ToolRegistry:
    tools = ToolRegistry()

    @tools.tool(needs_approval=True)
    async def pay(card: dict[str, str], amount: int) -> str:
        sent.append({"card": card, "amount": amount})
        return "paid"

    return tools


async def asked(place: Place) -> tuple[Runs, ApprovalRequest, list[object]]:
    sent: list[object] = []
    await Worker(place).run(Script([("pay", PAY)], "done"), _tools(sent))
    runs = Runs(place.open(), checkpoint_key=KEY, redact=redact_names("number"))
    [request] = await runs.pending("run")
    return runs, request, sent


async def goes_on(place: Place, sent: list[object]) -> list[str]:
    return results_in((await Worker(place).recover(Script([("pay", PAY)], "done"), _tools(sent))).messages)


async def test_a_request_is_shown_redacted_and_its_approval_lets_the_true_arguments_out(place: Place) -> None:
    runs, request, sent = await asked(place)
    [true] = await Runs(place.open(), checkpoint_key=KEY).pending()
    assert request.args == {"card": {"number": HIDDEN, "owner": "ana"}, "amount": 5}
    assert (request.digest, request.is_redacted, true.is_redacted) == (true.digest, True, False)
    assert ApprovalRequest.from_json(request.to_json()) == request
    [info] = await runs.list(status="paused")
    assert "4111" not in info.why
    assert HIDDEN in info.why
    await runs.approve(request, by="ben")
    assert (await goes_on(place, sent), sent) == (["paid"], [PAY])


async def test_an_edit_of_a_redacted_request_sends_what_it_leaves_out_as_it_truly_is(place: Place) -> None:
    runs, request, sent = await asked(place)
    await runs.edit(request, {"amount": 6}, by="ben")
    assert (await goes_on(place, sent), sent) == (["paid"], [{**PAY, "amount": 6}])


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("mark", [HIDDEN, UNREDACTED])
async def test_what_stands_in_place_of_a_value_is_never_sent_as_one(place: Place, named: bool, mark: str) -> None:
    runs, request, sent = await asked(place)
    which = ("run", request.id) if named else request
    for changes in ({"card": {"number": mark, "owner": "ben"}}, {"card": mark}, {"amount": 6, "card": {mark: "x"}}):
        with pytest.raises(VerdictRefused, match="only shown in place"):
            await runs.edit(which, changes, by="ben")
    with pytest.raises(VerdictRefused, match=r"shown redacted.*Runs\.edit"):
        request.edit({"amount": 6}, by="ben")
    with pytest.raises(VerdictRefused, match="only shown in place"):  # by an operator who is shown everything
        await Runs(place.open(), checkpoint_key=KEY).edit(request, {"card": {"number": HIDDEN}}, by="ben")
    await runs.edit(which, {"card": {"number": "5", "owner": "ben"}}, by="ben")
    assert (await goes_on(place, sent), sent) == (["paid"], [{"card": {"number": "5", "owner": "ben"}, "amount": 5}])


async def test_a_mark_of_a_hook_of_ones_own_is_not_sent_either(place: Place) -> None:
    _, _, sent = await asked(place)

    def stars(value: Any, part: Part) -> Any:
        return redact_pattern(r"\d{4}-")(value, part) if part is not Part.ARGUMENT else {**value, "card": "****"}

    runs = Runs(place.open(), checkpoint_key=KEY, redact=stars)
    [request] = await runs.pending()
    with pytest.raises(VerdictRefused, match="only shown in place"):
        await runs.edit(request, {"card": {"number": "****"}}, by="ben")
    assert sent == []


async def test_an_edit_is_bound_to_the_request_that_was_seen(place: Place) -> None:
    runs, request, _ = await asked(place)
    with pytest.raises(VerdictRefused, match="other arguments"):
        await runs.edit(request._replace(digest="another"), {"amount": 6}, by="ben")
