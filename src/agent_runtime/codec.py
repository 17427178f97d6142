"""Values to bytes and back: plain data strictly, other types as they are declared; names the path of what cannot go.

Rules of this file:

* One format, JSON in UTF-8, one encoder, no fallback decoder. A class is never named by stored bytes.
* Plain data is None, bool, int, finite float, str, list and dict with text keys, of exactly these types. Anything else is
  refused here, with its path, unless its type is declared.
* A declared type is written by pydantic, read back and compared, type and value, before it counts as recorded.
* A lone surrogate, which UTF-8 cannot hold, is written as a JSON escape: it comes back as it was. The two halves of one
  character side by side would come back as the character: they are refused.
* Sizes and depths are bounded before anything is parsed.
"""

from __future__ import annotations

import json
import re
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable
from datetime import datetime, time, tzinfo
from enum import Enum
from math import isfinite
from typing import Any, Literal, Union, get_args, get_origin

from agent_runtime.errors import TooLarge, Unrecordable

MAX_DEPTH = 100
MAX_BYTES = 256 * 1024 * 1024
"""What no record is larger than, whatever is set: nothing larger is parsed."""
MAX_INT_BITS = 13_000
"""A little under the 4,300 digits that Python converts to and from text."""


def _writer(*, ensure_ascii: bool) -> Callable[[object], str]:
    """The standard library's encoder, its C part made once instead of once a call where there is one."""
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, allow_nan=False, check_circular=False, separators=(",", ":"))
    make = getattr(json.encoder, "c_make_encoder", None)
    if make is None:
        return encoder.encode
    escape = json.encoder.encode_basestring_ascii if ensure_ascii else json.encoder.encode_basestring
    write = make(None, encoder.default, escape, None, ":", ",", False, False, False)
    return lambda value: "".join(write(value, 0))


quote: Callable[[str], str] = json.encoder.encode_basestring
"""A text as `encode_readable` writes it."""
_as_utf8 = _writer(ensure_ascii=False)
_as_ascii = _writer(ensure_ascii=True)
_scan: Callable[[str, int], tuple[Any, int]] = vars(json.JSONDecoder())["scan_once"]
"""The standard library's parser without the look for white space around the value, of which we write none."""


def encode(value: object, most: int = MAX_BYTES) -> bytes:
    """Plain data as bytes; `Unrecordable` names the path of what is not plain, `TooLarge` says that it takes too many."""
    check_size(value, most)
    return encode_checked(value, most)


def encode_checked(value: object, most: int = MAX_BYTES) -> bytes:
    """The same for a value whose parts have been checked already."""
    text = quote(value) if type(value) is str else _as_utf8(value)
    if len(text) > most:
        raise TooLarge(_size_of(value), most)
    try:
        data = text.encode()
    except UnicodeEncodeError:
        data = _as_ascii(value).encode()
        _check_halves(value, data)
    if len(data) > most:
        raise TooLarge(len(data), most)
    return data


def check_size(value: Any, most: int) -> None:
    """Refuse what is not plain, and plain data whose texts alone take more than may be recorded: before a copy is made."""
    size = least_size(value)
    if size == NOT_PLAIN:
        check_plain(value)
    if size > most:
        raise TooLarge(_size_of(value), most)


_PIECE = 1 << 20


def _size_of(value: Any) -> int:
    """How many bytes plain data takes as it is recorded, found piece by piece."""
    match value:
        case str():
            pieces = (value[at : at + _PIECE] for at in range(0, len(value), _PIECE))
            return 2 + sum(len(_as_utf8(piece).encode("utf-8", "surrogatepass")) - 2 for piece in pieces)
        case dict():
            return 1 + sum(_size_of(key) + _size_of(item) + 2 for key, item in value.items()) + (not value)
        case list():
            return 1 + sum(_size_of(item) + 1 for item in value) + (not value)
        case _:
            return len(_as_utf8(value))


def _check_halves(value: object, data: bytes) -> None:
    where = difference(value, decode(data))
    if where is not None:
        raise Unrecordable(where, "text that holds the two halves of one character, which would come back as the character")


def readable(value: Any) -> Any:
    """Plain data without lone surrogates, which no request can hold: each is shown as U+FFFD. Others come back as given."""
    if type(value) is str:
        return value if value.isascii() else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if type(value) is dict:
        return {readable(key): readable(item) for key, item in value.items()}
    return [readable(item) for item in value] if type(value) is list else value


def encode_readable(value: object) -> str:
    """Plain data as the text that `encode` would write if UTF-8 could hold every character."""
    return _as_utf8(value)


def decode(data: bytes) -> Any:
    """The plain data that `encode` was given. For bytes whose seal has been checked."""
    if len(data) > MAX_BYTES:
        raise ValueError(f"{len(data)} bytes are more than one record holds")
    return parse(data.decode())


def parse(text: str) -> Any:
    """The plain data that `encode_readable` was given."""
    try:
        value, end = _scan(text, 0)
    except StopIteration:
        value, end = None, -1
    if end != len(text):
        raise ValueError("this is not one JSON value as `encode` writes it")
    return value


def check_plain(value: object) -> None:
    """Refuse anything that is not plain data of exactly the plain types."""
    if least_size(value) == NOT_PLAIN:
        _refuse(value, "$", 0)
        raise AssertionError(f"{value!r} is not plain, and nothing in it is to blame")


def least_size(value: Any, depth: int = 0) -> int:
    """How many bytes plain data takes at the least: its texts, and one for each entry. `NOT_PLAIN` for any other value.

    The path of what is not plain is made only for a value that fails: see `_refuse`.
    """
    kind = type(value)
    if kind is str:
        return len(value)
    if kind is dict:
        return _dict_size(value, depth + 1) if depth < MAX_DEPTH else NOT_PLAIN
    if kind is list:
        return _list_size(value, depth + 1) if depth < MAX_DEPTH else NOT_PLAIN
    if kind is int:
        return 0 if value.bit_length() <= MAX_INT_BITS else NOT_PLAIN
    return 0 if value is None or kind is bool or (kind is float and isfinite(value)) else NOT_PLAIN


NOT_PLAIN = -1


def _dict_size(value: dict[Any, Any], depth: int) -> int:
    size = len(value)
    for key, item in value.items():
        if type(key) is not str:
            return NOT_PLAIN
        size += len(key)
        kind = type(item)
        if kind is str:
            size += len(item)
        elif kind is not int or not -_SHORT < item < _SHORT:
            part = least_size(item, depth)
            if part == NOT_PLAIN:
                return NOT_PLAIN
            size += part
    return size


_SHORT = 1 << 62


def _list_size(value: list[Any], depth: int) -> int:
    size = len(value)
    for item in value:
        part = len(item) if type(item) is str else least_size(item, depth)
        if part == NOT_PLAIN:
            return NOT_PLAIN
        size += part
    return size


def _refuse(value: Any, path: str, depth: int) -> None:
    """Raise `Unrecordable` at the first place where a value is not plain."""
    kind = type(value)
    if kind is dict or kind is list:
        if depth >= MAX_DEPTH:
            raise Unrecordable(path, f"data nested more than {MAX_DEPTH} deep, or holding itself")
        for key, item in value.items() if kind is dict else enumerate(value):
            if kind is dict and type(key) is not str:
                raise Unrecordable(path, f"the key {key!r} of type {type(key).__name__}")
            _refuse(item, f"{path}.{key}" if kind is dict else f"{path}[{key}]", depth + 1)
    elif least_size(value, depth) == NOT_PLAIN:
        raise Unrecordable(path, _what_is(value))


def _what_is(value: object) -> str:
    if type(value) is int:
        return "an integer of more than 3,900 digits"
    if type(value) is float:
        return f"the float {value!r}"
    return f"a value of type {type(value).__module__}.{type(value).__qualname__}"


_AT = b',"at":'


def timed(body: bytes, at_ms: int) -> bytes:
    """The bytes of an object with one more field, its last: when it was written, in milliseconds UTC."""
    return b'%b,"at":%d}' % (body[:-1], at_ms)


def untimed(body: bytes) -> bytes:
    """The bytes without what `timed` added; as they are where it added nothing."""
    at = body.rfind(_AT, -_LONGEST_AT)
    return body[:at] + b"}" if at >= 0 and body[at + len(_AT) : -1].isdigit() else body


_LONGEST_AT = len(_AT) + 20


class Shape:
    """How values of one declared type are recorded."""

    __slots__ = ("_adapter", "annotation", "is_plain")

    def __init__(self, annotation: object) -> None:
        self.annotation = annotation
        self.is_plain = is_plain_type(annotation)
        """Whether its values are plain data, as `decode` gives them."""
        self._adapter = None if self.is_plain else _adapter(annotation)

    def encode(self, value: object, most: int = MAX_BYTES) -> bytes:
        """The value as bytes that give it back equal and of the same types; else `Unrecordable`, past `most` `TooLarge`."""
        try:
            if self._adapter is not None:
                return self._encode_declared(value, most)
            if type(value) is not str:
                return encode(value, most)
            if len(value) > most:
                raise TooLarge(_size_of(value), most)
            return encode_checked(value, most)
        except Unrecordable:
            raise
        except Exception as error:  # the tool has acted: whatever keeps its result from being written, it is that
            raise Unrecordable("$", f"a {type(value).__name__} that raised {type(error).__name__} on the way") from error

    def decode(self, data: bytes) -> Any:
        """The value that `encode` was given."""
        if self._adapter is None:
            return decode(data)
        return self._adapter.validate_python(decode(data)) if _has_surrogate(data) else self._adapter.validate_json(data)

    def fits(self, data: bytes) -> bool:
        """Whether the bytes hold a value of the type."""
        try:
            self.decode(data)
        except Exception:  # of a type's own validators, too
            return False
        return True

    def _encode_declared(self, value: object, most: int) -> bytes:
        from pydantic import ValidationError
        from pydantic_core import PydanticSerializationError

        assert self._adapter is not None
        try:
            data = encode(self._adapter.dump_python(value, mode="json", warnings="error", by_alias=True), most)
            again = self.decode(data)
        except (PydanticSerializationError, ValidationError, UnicodeError, ValueError, TypeError) as error:
            what = f"{type(value).__name__} that its declared type does not give back ({told(error)})"
            raise Unrecordable("$", what) from error
        where = difference(value, again)
        if where is not None:
            raise Unrecordable(where, f"a value of declared type {self.annotation!r} that comes back as another one")
        return data


_INPUT = re.compile(r"input_value=.*?(?=, input_type|\\])", re.DOTALL)


def told(error: Exception) -> str:
    """What is wrong with a value, place by place; never the value, which may be nobody's business."""
    from pydantic import ValidationError

    if not isinstance(error, ValidationError):
        return _INPUT.sub("input_value=…", str(error))
    return "; ".join(f"{'.'.join(map(str, each['loc'])) or '$'}: {each['msg']}" for each in error.errors(include_url=False))


def _has_surrogate(data: bytes) -> bool:
    return b"\\ud" in data


def _adapter(annotation: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(annotation)


_PLAIN_TYPES: frozenset[object] = frozenset({None, type(None), bool, int, float, str, list, dict, object, Any})


def is_plain_type(annotation: object) -> bool:
    """Whether every value of the type that can be recorded is plain data, so that no schema is needed."""
    if annotation in (None, Any, object):
        return True
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is None:
        return isinstance(annotation, type) and annotation in _PLAIN_TYPES
    if origin in (Union, types.UnionType, list):
        return all(is_plain_type(part) for part in parts)
    if origin is dict:
        return parts[0] is str and is_plain_type(parts[1])
    return origin is Literal and all(type(part) in _PLAIN_TYPES for part in parts)


def difference(left: object, right: object, path: str = "$") -> str | None:
    """The path of the first place where two values differ in type or value; None where they are the same."""
    if type(left) is not type(right):
        return path
    match left:
        case Enum():
            return None if left is right else path
        case dict():
            assert isinstance(right, dict)
            return _dict_difference(left, right, path)
        case list() | tuple() | deque():
            assert isinstance(right, list | tuple | deque)
            return _sequence_difference(list(left), list(right), path)
        case set() | frozenset():
            assert isinstance(right, set | frozenset)
            return _set_difference(left, right, path)
        case datetime() | time():
            assert isinstance(right, datetime | time)
            return None if left == right and left.fold == right.fold and _is_fixed(left.tzinfo) else path
        case _ if hasattr(left, "get_secret_value"):
            raise Unrecordable(path, f"a {type(left).__name__}; no secret is stored: give it to whoever needs it past the run")
        case _:
            return _attribute_difference(left, right, path) or (None if left == right else path)


def _dict_difference(left: dict[Any, Any], right: dict[Any, Any], path: str) -> str | None:
    keys = _sequence_difference(list(left), list(right), path)
    return path if keys is not None else _first(_compare(left[key], right[key], f"{path}.{key}") for key in left)


def _sequence_difference(left: list[Any], right: list[Any], path: str) -> str | None:
    pairs = enumerate(zip(left, right, strict=False))
    where = _first(_compare(a, b, f"{path}[{i}]") for i, (a, b) in pairs)
    return where if where is not None or len(left) == len(right) else path


def _set_difference(left: Collection[Any], right: Collection[Any], path: str) -> str | None:
    """Equal elements may still be of different types, as 1 and True are."""
    twins = {item: item for item in right}
    same = len(left) == len(right) and all(item in twins and difference(item, twins[item]) is None for item in left)
    return None if same else path


def _attribute_difference(left: object, right: object, path: str) -> str | None:
    return _first(
        _compare(getattr(left, name, None), getattr(right, name, None), f"{path}.{name}") for name in _attributes(left)
    )


def _attributes(value: object) -> Iterable[str]:
    """The names under which a value keeps what it is made of."""
    fields = getattr(type(value), "__dataclass_fields__", None) or getattr(type(value), "model_fields", None)
    return vars(value) if fields is None and hasattr(value, "__dict__") else fields or ()


def _is_fixed(zone: tzinfo | None) -> bool:
    """Whether a zone is no more than its offset, which is all that is written of it."""
    return zone is None or zone.utcoffset(None) is not None


def _compare(left: object, right: object, path: str) -> Callable[[], str | None]:
    return lambda: difference(left, right, path)


def _first(looks: Iterable[Callable[[], str | None]]) -> str | None:
    return next((found for look in looks if (found := look()) is not None), None)
