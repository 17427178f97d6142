"""What a store keeps of a body, as it is or as a stub, stands for that body and for no other."""

from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.stores.blob_stub import MARK, Stub, pack_held, stub_of, unpack

STUBS = st.binary().map(lambda body: stub_of(body).pack())
BODIES = st.one_of(st.binary(), st.binary().map(MARK.__add__), STUBS, STUBS.map(pack_held), STUBS.map(lambda stub: stub[:-1]))


@given(BODIES)
def test_whatever_a_body_begins_with_it_comes_back_as_it_was(body: bytes) -> None:
    assert unpack(pack_held(body)) == body


@given(BODIES)
def test_a_stub_comes_back_as_what_it_stands_for_and_fits_nothing_else(body: bytes) -> None:
    stub = unpack(stub_of(body).pack())
    assert isinstance(stub, Stub)
    assert stub == stub_of(body)
    assert stub.fits(body)
    assert not stub.fits(body + b"x")
    assert not stub.fits(bytes([*body[:-1], body[-1] ^ 1]) if body else b"x")


@given(BODIES, BODIES)
def test_no_two_bodies_are_kept_alike_and_none_is_kept_like_a_stub(one: bytes, other: bytes) -> None:
    assert (pack_held(one) == pack_held(other)) is (one == other)
    assert pack_held(one) != stub_of(other).pack()


@given(st.binary())
def test_what_was_changed_into_neither_is_refused_or_another_body(rest: bytes) -> None:
    try:
        found = unpack(MARK + rest)
    except ValueError:
        return
    again = found.pack() if isinstance(found, Stub) else pack_held(found)
    assert again == MARK + rest
