"""What the viewer's pages say, and what comes of their forms: read as a program reads them, over HTTP."""

from __future__ import annotations

import asyncio
import html
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from agent_runtime import Message, Reply, RunContext, Runs, ToolRegistry, ToolSpec
from agent_runtime.cli import main
from agent_runtime.errors import StoreUnavailable
from agent_runtime.redaction import HIDDEN, UNREDACTED, Part, redact_all, redact_names, redact_pattern
from agent_runtime.runs import STATUSES
from agent_runtime.viewer import Identity, make_app
from tests.bench import KEY, Delegate, Place, Script, Worker
from tests.viewer import stage
from tests.viewer.serving import TOKEN, Viewer, serving, viewing

MARK = "sk-TEST-123"


def operator(place: Place, **options: Any) -> Runs:
    return Runs(place.open(), checkpoint_key=KEY, **options)


@pytest.fixture
def viewer(shelf: Place) -> Iterator[Viewer]:
    with serving(make_app(operator(shelf), token=TOKEN)) as viewer:
        viewer.log_in()
        yield viewer


def listed(viewer: Viewer, query: str = "") -> dict[str, str]:
    """The runs of a list and the status that it shows of each."""
    page = viewer.get(f"/{query}").text
    rows = re.findall(r'<tr role="row">\s*<td.*?</tr>', page, re.S)
    told = {}
    for row in rows:
        status, run = re.search(r'class="pill s-[a-z-]+">([a-z-]+)<', row), re.search(r'data-row href="[^"]+">([^<]+)<', row)
        assert status is not None
        assert run is not None
        told[html.unescape(run[1])] = status[1]
    return told


def text(page: str) -> str:
    """A page as somebody reads it."""
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", page)).split())


# The list.


async def test_the_list_says_of_each_run_what_is_true_of_it(viewer: Viewer, shelf: Place) -> None:
    stage.corrupt(shelf, "order-4")
    assert listed(viewer) == {
        "import-1": "quarantined", "mail-5": "in-doubt", "order-3": "cancelled", "order-4": "done", "order-7": "done",
        "order-9": "interrupted", "refund-12": "paused", "search-2": "failed", "tickets-8": "done",
    }  # fmt: skip
    page = text(viewer.get("/").text)
    assert 'waiting for approval: refund order="B-2" amount=900' in page
    assert "in doubt: email_tickets" in page
    assert "cancelled by ana: the customer called it off" in page
    for status in STATUSES:
        assert set(listed(viewer, f"?status={status}").values()) <= {status}
    assert listed(viewer, "?status=paused") == {"refund-12": "paused"}
    assert viewer.get("/?status=nonsense").status == 400


async def test_a_search_finds_ids_by_their_beginning_and_else_programs_by_their_name(viewer: Viewer, shelf: Place) -> None:
    assert list(listed(viewer, "?q=order-")) == ["order-3", "order-4", "order-7", "order-9"]
    assert list(listed(viewer, "?q=order-7")) == ["order-7"], "the whole id, too"
    assert list(listed(viewer, "?q=order-&status=done")) == ["order-4", "order-7"]
    assert list(listed(viewer, "?q=tickets")) == ["tickets-8"], "an id that begins so goes before a name"
    await stage.walk(shelf, "8-again")
    assert list(listed(viewer, "?name=tickets")) == ["8-again", "tickets-8"]
    await operator(shelf).delete("tickets-8", by="ana")
    assert list(listed(viewer, "?q=tickets")) == ["8-again"], "no id begins so"
    assert listed(viewer, "?q=nothing-like-it") == {}
    assert "No run is like that" in viewer.get("/?q=nothing-like-it").text
    shown = viewer.get("/?q=%3Cb%3E").text
    assert "&lt;b&gt;" in shown
    assert "<b>" not in shown


async def test_a_long_list_is_read_page_by_page(shelf: Place) -> None:
    box = stage.Box().registry
    worker = Worker(shelf)
    await asyncio.gather(*(worker.run(Script("done"), box, f"many-{i:03}") for i in range(120)))
    with serving(make_app(operator(shelf), token=TOKEN)) as viewer:
        viewer.log_in()
        found, query = list[str](), "?q=many-"
        while query:
            page = viewer.get(f"/{query}").text
            found += re.findall(r'data-row href="/runs/(many-\d+)"', page)
            link = re.search(r'rel="next" href="/([^"]+)"', page)
            query = "" if link is None else html.unescape(link[1])
        assert found == [f"many-{i:03}" for i in range(120)]


# One run.


def test_the_page_of_a_run_tells_what_happened_and_what_was_saved(viewer: Viewer) -> None:
    page = viewer.get("/runs/order-7").text
    told = text(page)
    assert "recovered" in told
    assert "2 decisions of the model and 1 finished call were not made again: 560 input, 75 output tokens." in told
    assert "Two seats for Hamlet, please." in told
    assert "The tickets are in your mail." in told
    assert '{"receipt": "r-7", "amount": 80, "currency": "EUR"}' in told
    assert "nobody, for 47.4 s" in told
    assert "never said how it ended" in told
    assert "Model requests 4" in told
    assert '<svg class="picture"' in page
    assert "recovered" not in text(viewer.get("/runs/order-4").text)


def test_the_page_of_a_flow_shows_its_graph_with_the_way_it_went_and_what_it_was_given(viewer: Viewer) -> None:
    page = viewer.get("/runs/tickets-8").text
    boxes = re.findall(r'<g class="node([^"]*)"><title>(\w+):', page)
    assert {name: "visited" in look for look, name in boxes} == {"look": True, "pay": True, "mail": True, "sorry": False}
    assert "What it was given" in page
    assert "Othello" in page
    assert "sent to bo@example.org" in page


def test_a_large_value_is_folded_with_its_size_and_has_an_address_for_the_whole(viewer: Viewer) -> None:
    page = viewer.get("/runs/order-7").text
    assert '<details class="fold"' in page
    assert "3.9 kB" in text(page)
    whole = viewer.get("/value/order-7?call=0")
    assert whole.headers["content-type"] == "text/plain; charset=utf-8"
    assert json.loads(whole.text)["about"] == stage.LONG_TEXT
    assert json.loads(viewer.get("/value/order-7?call=1&part=args").text) == {"order": "7", "amount": 80}
    assert viewer.get("/value/order-7?call=99").status == 404


async def test_a_run_of_many_records_shows_its_end_first_and_more_when_asked(viewer: Viewer, shelf: Place) -> None:
    steps: list[Any] = [[("seats_left", {"show": f"show {i}"})] for i in range(60)]
    await Worker(shelf).run(Script(*steps, "all seen"), stage.Box().registry, "long", max_steps=100)
    first = viewer.get("/runs/long").text
    assert "show 59" in first
    assert "show 5&" not in first
    assert "the last 40 of 121" in text(first)
    more = re.search(r'href="(\?calls=[^"#]+)#calls"', first)
    assert more is not None
    assert "the last" not in text(viewer.get("/runs/long" + html.unescape(more[1])).text).split("Conversation")[0]
    assert viewer.get("/runs/long?calls=-1&talk=x").status == 200


async def test_an_id_of_any_form_has_an_address(viewer: Viewer, shelf: Place) -> None:
    ids = [
        "order-7/undo",
        "..",
        "a/../b",
        "/",
        "?q=1#x",
        "100%",
        "%2e%2e",
        "名前",
        "<script>alert(1)</script>",
        "a b&c\"'",
        "-v",
    ]
    for run_id in ids:
        await Worker(shelf).run(Script("done"), ToolRegistry(), run_id)
    page = viewer.get("/").text
    links = dict(re.findall(r'data-row href="([^"]+)">([^<]+)<', page))
    told = {html.unescape(name): html.unescape(link) for link, name in links.items()}
    for run_id in ids:
        answer = viewer.get(told[run_id])
        assert answer.status == 200, run_id
        assert f'<h1 class="run-id">{html.escape(run_id, quote=False)}</h1>' in answer.text.replace("&#34;", '"').replace(
            "&#39;", "'"
        )
        live = re.search(r'hx-get="([^"]+)" hx-trigger="changed" hx-swap="none"', answer.text)
        assert live is not None
        assert viewer.get(html.unescape(live[1])).status == 200, run_id


# What is wrong is said.


async def test_what_is_wrong_with_a_run_is_said_plainly(viewer: Viewer, shelf: Place) -> None:
    missing = viewer.get("/runs/nothing")
    assert missing.status == 404
    assert "nothing is stored for run 'nothing'" in text(missing.text)
    await operator(shelf).delete("order-4", by="ana")
    gone = viewer.get("/runs/order-4")
    assert gone.status == 410
    assert "was deleted" in text(gone.text)
    stage.corrupt(shelf, "order-7")
    corrupt = viewer.get("/runs/order-7")
    assert "What is stored is not what was written" in text(corrupt.text)
    assert "record 5" in text(corrupt.text)
    assert "records 1 to 4; from record 5 on none can be believed" in text(corrupt.text)
    assert "Two seats for Hamlet, please." in text(corrupt.text), "what holds is there to be read"
    assert "The tickets are in your mail." not in text(corrupt.text)
    assert '<svg class="picture"' in corrupt.text
    assert '<form method="post"' not in corrupt.text, "nothing can be decided about it"
    assert viewer.get("/parts/order-7").status == 200
    assert viewer.get("/value/order-7?call=0/model").status == 200
    assert viewer.get("/runs/" + "x" * 600).status == 400
    assert viewer.get("/nowhere").status == 404


class Leaving(Delegate):
    """A store that is away while it is told to be."""

    is_away = False

    def check(self, verb: str) -> None:
        if self.is_away:
            raise StoreUnavailable("the store does not answer: connection refused")


async def test_a_store_that_is_away_is_said_to_be_and_the_page_tries_again(shelf: Place) -> None:
    store = Leaving(shelf.open())
    with serving(make_app(Runs(store, checkpoint_key=KEY), token=TOKEN)) as viewer:
        viewer.log_in()
        store.is_away = True
        for path in ("/", "/inbox", "/runs/order-7"):
            answer = viewer.get(path)
            assert answer.status == 503
            assert "connection refused" in answer.text
            assert 'http-equiv="refresh"' in answer.text
        answer = viewer.post("/act/cancel/order-9", {"by": "ana", "why": "x", "form_token": "0"})
        assert answer.status == 403
        store.is_away = False
        assert viewer.get("/").status == 200


# Deciding.


async def test_what_people_decide_is_recorded_with_who_and_why(viewer: Viewer, shelf: Place) -> None:
    await stage.pause(shelf, "refund-13")
    await stage.pause(shelf, "refund-14")
    assert "by the key mail-5:0 , then say" in text(viewer.get("/inbox").text)
    done = viewer.post("/act/approve/refund-12", {"call": "0", "by": "ana", "note": "called them"})
    assert done.status == 303
    assert done.headers["location"] == "/runs/refund-12?said=approved"
    assert "agent_runtime_by=ana" in done.headers["set-cookie"]
    assert viewer.post("/act/deny/refund-13", {"call": "0", "by": "bo", "note": "too much"}).status == 303
    edited = {"call": "0", "by": "cy", "args": '{"order": "B-2", "amount": 50}', "back": "inbox"}
    assert viewer.post("/act/edit/refund-14", edited).headers["location"] == "/inbox?said=edited"
    inbox = text(viewer.get("/inbox").text)
    for said in (
        "ana answered first: approved",
        "bo answered first: denied",
        "cy answered first: approved with other arguments",
    ):
        assert said in inbox
    box = stage.Box().registry
    talk = stage.Talk(("", [stage.refund("B-2", 900)]), ("It is so.", []))
    results = {}
    for run_id in ("refund-12", "refund-13", "refund-14"):
        results[run_id] = (await Worker(shelf).recover(talk, box, run_id)).messages[-2].content
    assert results["refund-12"] == "refunded 900 for B-2"
    assert "bo did not approve this call: too much" in results["refund-13"]
    assert results["refund-14"] == "refunded 50 for B-2"
    assert "ana approved" in text(viewer.get("/runs/refund-12").text)
    assert viewer.post("/act/settle/mail-5", {"call": "0", "by": "ana", "why": "it is in the outbox", "how": "done",
                                              "result": '"mail-8"'}).status == 303  # fmt: skip
    assert "ana settled it: done" in text(viewer.get("/runs/mail-5").text)
    assert viewer.post("/act/release/import-1", {"by": "ana"}).headers["location"].endswith("said=released")
    assert viewer.post("/act/cancel/import-1", {"by": "ana", "why": "no use"}).headers["location"].endswith("said=cancelled")
    assert "cancelled by ana: no use" in text(viewer.get("/runs/import-1").text)
    assert viewer.post("/act/cancel/import-1", {"by": "ana", "why": "no use"}).headers["location"].endswith("said=ended")


def test_the_second_of_two_people_sees_who_answered_first(viewer: Viewer) -> None:
    assert viewer.post("/act/approve/refund-12", {"call": "0", "by": "ana", "note": "fine"}).status == 303
    second = viewer.post("/act/deny/refund-12", {"call": "0", "by": "bo", "note": "no"})
    assert second.status == 409
    assert "was answered already: approve, by ana; the first answer stands" in text(second.text)
    assert "ana answered first: approved , “fine”. It waits for a worker" in text(viewer.get("/inbox").text)


@pytest.mark.parametrize(
    ("verb", "run_id", "form", "message"),
    [
        ("approve", "refund-12", {"by": " "}, "Say who you are"),
        ("edit", "refund-12", {"by": "a", "args": "{amount: 1}"}, "Expected JSON"),
        ("edit", "refund-12", {"by": "a", "args": "[1]"}, "Expected a JSON object"),
        ("edit", "refund-12", {"by": "a", "args": '{"order": "B-2"}'}, "removes none; missing: amount"),
        ("edit", "refund-12", {"by": "a", "args": '{"amount": 900, "order": "B-2"}'}, "Nothing is changed"),
        ("settle", "mail-5", {"by": "a", "why": "x"}, "Say what became of it"),
        ("settle", "mail-5", {"by": "a", "why": "", "how": "rerun"}, "Say how you know"),
        ("settle", "mail-5", {"by": "a", "why": "x", "how": "done", "result": "mail"}, "Text stands in quotes"),
        ("cancel", "order-9", {"by": "a", "why": " "}, "Say why"),
    ],
)
def test_what_cannot_be_meant_is_said_at_its_field_and_what_was_typed_stays(
    viewer: Viewer, verb: str, run_id: str, form: dict[str, str], message: str
) -> None:
    call = {"call": "0"} if verb in ("approve", "edit", "settle") else {}
    for back in ("", "inbox") if verb != "cancel" else ("",):
        answer = viewer.post(f"/act/{verb}/{run_id}", {**call, **form, "back": back})
        assert answer.status == 400
        assert [said for said in re.findall(r'class="why-not"[^>]*>(.*?)</p>', answer.text) if message in said], text(
            answer.text
        )
        for typed in form.values():
            assert html.escape(typed).replace("&quot;", "&#34;") in answer.text or not typed.strip()


def test_what_the_run_refuses_is_said_where_it_was_asked(viewer: Viewer) -> None:
    answer = viewer.post("/act/settle/order-9", {"call": "7", "by": "ana", "why": "x", "how": "rerun"})
    assert answer.status == 409
    gone = viewer.post("/act/approve/refund-12", {"call": "9", "by": "ana"})
    assert gone.status == 409
    assert viewer.post("/act/cancel/nothing", {"by": "ana", "why": "x"}).status == 404


# Whose runs.


async def test_behind_a_proxy_each_sees_their_own_runs_alone(shelf: Place) -> None:
    await stage.pause(shelf, "of-ana", user="ana")
    await stage.pause(shelf, "of-bo", user="bo")
    app = make_app(operator(shelf), token=TOKEN, identity=Identity("X-User"))
    with serving(app) as viewer:
        viewer.headers = {"X-User": "ana"}
        viewer.log_in()
        assert list(listed(viewer)) == ["of-ana"]
        assert list(listed(viewer, "?q=of-")) == ["of-ana"]
        assert "of-bo" not in viewer.get("/inbox").text
        other, none = viewer.get("/runs/of-bo"), viewer.get("/runs/of-nobody")
        assert (other.status, none.status) == (404, 404)
        assert other.text == none.text, "nobody learns that there is one"
        for path in ("/parts/of-bo", "/value/of-bo?call=0"):
            assert viewer.get(path).status == 404
        assert "gone" in viewer.get("/live/runs/of-bo").text
        page = viewer.get("/runs/of-ana").text
        form = re.search(r'name="form_token" value="([0-9a-f]+)"', page)
        assert form is not None
        answer = viewer.post("/act/approve/of-bo", {"call": "0", "by": "bo", "form_token": form[1]})
        assert answer.status == 404
        assert viewer.post("/act/approve/of-ana", {"call": "0", "by": "bo", "form_token": form[1]}).status == 303
        assert "ana answered first" in text(viewer.get("/runs/of-ana").text), "who is there is who the proxy says"
        viewer.headers = {}
        assert viewer.get("/").status == 403
        assert "X-User" in viewer.get("/").text


# Secrets.


async def test_what_the_hook_hides_stands_on_no_page(shelf: Place) -> None:
    redact = redact_all(redact_pattern(MARK), redact_names("amount"))

    async def model(messages: list[Message], tools: list[ToolSpec]) -> Reply:
        return await stage.Talk((f"the key is {MARK}", [("refund", {"order": MARK, "amount": 77_123})]), ("x", [])).reply(
            messages, tools
        )

    box = stage.Box().registry
    await Worker(shelf).run(model, box, "secret", messages=f"use {MARK}", ctx=RunContext(user=MARK))  # type: ignore[arg-type]
    with serving(make_app(operator(shelf, redact=redact), token=TOKEN)) as viewer:
        viewer.log_in()
        paths = (
            "/",
            "/inbox",
            "/runs/secret",
            "/parts/secret",
            "/value/secret?call=0&part=args",
            "/value/secret?call=0/model",
        )
        for path in paths:
            page = viewer.get(path).text
            assert HIDDEN in page, path
            assert MARK not in page, path
            assert "77123" not in page, path
        answer = viewer.post("/act/edit/secret", {"call": "0", "by": "ana", "args": '{"order": "[redacted]", "amount": 5}'})
        assert answer.status == 303
        assert "refund order=" in text(viewer.get("/").text), "a list tells the rest of what it waits for"
    [left] = (await operator(shelf).show("secret")).left
    assert left.how == "edit"
    result = await Worker(shelf).recover(model, box, "secret", ctx=RunContext(user=MARK))  # type: ignore[arg-type]
    assert result.messages[-2].content == f"refunded 5 for {MARK}", "what is hidden on the page is not sent as it is shown"


def test_a_hook_that_fails_hides_the_value(shelf: Place) -> None:
    def redact(value: object, part: Part) -> object:
        raise RuntimeError("cannot look at it")

    with serving(make_app(operator(shelf, redact=redact), token=TOKEN)) as viewer:
        viewer.log_in()
        page = viewer.get("/runs/order-7").text
        assert "Hamlet" not in page
        assert UNREDACTED in page
        for path in ("/", "/inbox", "/runs/refund-12", "/runs/mail-5", "/runs/tickets-8", "/runs/import-1"):
            answer = viewer.get(path)
            assert answer.status == 200, path
            assert "B-2" not in answer.text


# The command.


def test_the_command_prints_an_address_that_answers_and_writes_no_token_to_its_log(shelf: Place) -> None:
    with viewing(shelf.path) as viewer:
        token = viewer.url.partition("token=")[2]
        assert len(token) >= 32
        assert viewer.log_in().status == 200
        assert viewer.get("/runs/order-7").status == 200
        assert viewer.get(f"/runs/nothing?token={token}").status == 404
    assert token not in shelf.path.with_name("view.log").read_text()


def test_the_command_hides_what_stands_under_the_names_that_it_is_given(shelf: Place) -> None:
    with viewing(shelf.path, "--redact", "order", "--redact", "receipt") as viewer:
        viewer.log_in()
        for path in ("/", "/inbox", "/runs/refund-12", "/runs/order-7"):
            page = text(viewer.get(path).text)
            assert '"B-2"' not in page, "a name hides what stands under it, and not what somebody said"
            assert "r-7" not in page.replace("order-7", ""), path
        assert 'refund order="[redacted]" amount=900' in text(viewer.get("/").text)


def test_the_command_says_what_is_missing(shelf: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", "--store", f"sqlite:///{shelf.path}-not-there"]) == 1
    assert "there is no store at" in capsys.readouterr().err
