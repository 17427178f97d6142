"""Who may ask the viewer: the token, the names it goes by, the origin of a change, and what every answer forbids a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from agent_runtime import InvalidSetting, Runs
from agent_runtime.viewer import make_app
from agent_runtime.viewer.guard import HEADERS
from tests.bench import KEY, Place
from tests.viewer.serving import TOKEN, Viewer, serving

PAGES = (
    "/", "/inbox", "/runs/order-7", "/parts/order-7", "/value/order-7?call=1", "/live", "/live/runs/order-7", "/live/inbox",
    "/static/viewer.js",
)  # fmt: skip
CHANGES = ("approve", "deny", "edit", "settle", "cancel", "release")
WORDS = {"call": "0", "by": "eve", "why": "because", "note": "", "how": "rerun"}


@pytest.fixture
def viewer(shelf: Place) -> Iterator[Viewer]:
    with serving(make_app(Runs(shelf.open(), checkpoint_key=KEY), token=TOKEN)) as viewer:
        viewer.log_in()
        yield viewer


def test_the_printed_address_itself_answers_with_the_page_and_its_cookie_opens_the_others(viewer: Viewer) -> None:
    first = viewer.log_in()
    assert first.status == 200
    assert "refund-12" in first.text
    cookie = first.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert TOKEN not in cookie, "the cookie is made of the token and does not tell it"
    assert viewer.get("/runs/refund-12").status == 200
    assert viewer.get("/inbox", cookie="", headers={"Authorization": f"Bearer {TOKEN}"}).status == 200


def test_nothing_is_told_without_the_token(viewer: Viewer) -> None:
    for path in PAGES:
        mark = "&" if "?" in path else "?"
        for given in ({}, {"Authorization": "Bearer wrong"}, {"Cookie": viewer.cookie[:-1] + "z"}):
            answer = viewer.ask("GET", path, cookie="", headers=given)
            assert answer.status == 401, (path, given)
            assert "order" not in answer.text
            assert answer.headers["set-cookie"] is None
        assert viewer.ask("GET", f"{path}{mark}token={TOKEN[:-1]}", cookie="").status == 401
    assert viewer.ask("GET", f"/?token={TOKEN[:-1]}").status == 401, "a wrong token is wrong beside a right cookie, too"


def test_a_name_that_is_not_ours_is_refused(viewer: Viewer) -> None:
    for host in (
        "evil.example",
        f"evil.example:{viewer.port}",
        "127.0.0.1.evil.example",
        "",
        "[::1",
        "127.0.0.1@evil.example/",
    ):
        for path in (*PAGES, f"/?token={TOKEN}"):
            assert viewer.get(path, headers={"Host": host or "x"}).status == 403, host
    for host in (f"localhost:{viewer.port}", f"127.0.0.1:{viewer.port}", "LOCALHOST"):
        assert viewer.get("/inbox", headers={"Host": host}).status == 200


def test_a_change_comes_from_a_page_of_ours_with_the_token_of_its_form(viewer: Viewer, shelf: Place) -> None:
    refused: list[tuple[str, Mapping[str, str], Mapping[str, str]]] = [
        ("a foreign origin", {"Origin": "http://evil.example"}, {}),
        ("another port of this machine", {"Origin": "http://127.0.0.1:1"}, {}),
        ("no origin that says anything", {"Origin": "null"}, {}),
        ("a foreign page of which the browser tells", {"Origin": "", "Sec-Fetch-Site": "cross-site"}, {}),
        ("no origin at all", {"Origin": ""}, {}),
        ("no token of the form", {}, {"form_token": ""}),
        ("another token of the form", {}, {"form_token": "0" * 64}),
        ("the token of the address for that of the form", {}, {"form_token": TOKEN}),
    ]
    for verb in CHANGES:
        for why, headers, words in refused:
            answer = viewer.post(f"/act/{verb}/refund-12", {**WORDS, **words}, headers=headers)
            assert answer.status == 403, (verb, why)
        for method in ("GET", "HEAD", "PUT", "DELETE", "PATCH"):
            assert viewer.ask(method, f"/act/{verb}/refund-12?call=0&by=eve", headers={"Origin": viewer.base}).status == 405
        assert viewer.post(f"/act/{verb}/refund-12", WORDS, cookie="").status == 401
    page = viewer.get("/runs/refund-12").text
    assert "Approve" in page, "nothing was changed by any of it"
    assert "answered first" not in page


def test_every_answer_forbids_what_a_page_does_not_need(viewer: Viewer) -> None:
    answers = [viewer.get(path) for path in ("/", "/runs/nothing", "/static/viewer.js", "/nowhere", "/act/cancel/order-7")]
    answers += [viewer.ask("GET", "/", cookie=""), viewer.get("/", headers={"Host": "evil.example"})]
    for answer in answers:
        assert {name: answer.headers[name] for name in HEADERS} == HEADERS, answer.status
        policy = answer.headers["content-security-policy"]
        assert "unsafe" not in policy
        assert "default-src 'none'" in policy
        assert answer.headers["access-control-allow-origin"] is None


def test_no_script_and_no_style_stands_in_a_page(viewer: Viewer) -> None:
    for path in ("/", "/inbox", "/runs/order-7", "/runs/refund-12", "/runs/mail-5"):
        page = viewer.get(path).text
        assert "<style" not in page
        assert " style=" not in page
        assert " onclick=" not in page
        assert page.count("<script") == page.count("<script src=") == 2
        assert "http://" not in page.replace("http://www.w3.org", ""), "nothing is asked of anybody else"
        assert "https://" not in page


def test_one_who_only_shows_lets_nobody_decide(shelf: Place) -> None:
    with serving(make_app(Runs(shelf.open(), checkpoint_key=KEY), token=TOKEN, read_only=True)) as viewer:
        viewer.log_in()
        page = viewer.get("/runs/refund-12").text
        assert '<form method="post"' not in page
        assert "read-only" in page
        assert "agent-runtime approve" in page, "the command stays: whoever may use it has the key"
        for verb in CHANGES:
            answer = viewer.post(f"/act/{verb}/refund-12", {**WORDS, "form_token": "x"})
            assert answer.status == 403
            assert "only shows" in answer.text


def test_a_token_that_can_be_guessed_is_refused(shelf: Place) -> None:
    with pytest.raises(InvalidSetting, match="at least 16 characters"):
        make_app(Runs(shelf.open(), checkpoint_key=KEY), token="short")
