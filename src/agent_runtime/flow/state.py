"""A flow's state: a pydantic model, checked whenever it changes, and its fields as bytes that give it back equal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, Generic, TypeAlias, TypeVar

from pydantic import BaseModel, RootModel, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic_core import PydanticSerializationError

from agent_runtime import codec
from agent_runtime.errors import FlowError, Unrecordable

S = TypeVar("S", bound=BaseModel)

Reducer: TypeAlias = Callable[[Any, Any], Any]
"""From what a field holds and what a node writes to what it holds then."""
Fields: TypeAlias = dict[str, bytes]
"""Each part of a state as recorded, by the name under which it is dumped."""


def append(held: list[Any], item: Any) -> list[Any]:
    """A reducer: the list with the item at its end."""
    return [*held, item]


def extend(held: list[Any], items: list[Any]) -> list[Any]:
    """A reducer: the list with the items at its end."""
    return [*held, *items]


class StateShape(Generic[S]):
    """How states of one model are checked, recorded and read."""

    def __init__(self, model: type[S]) -> None:
        if not is_model(model):
            raise FlowError(f"the state of a flow is a pydantic model, found {model!r}; pass state=YourModel")
        try:
            self._adapter = TypeAdapter(model)
        except PydanticUserError as error:
            raise FlowError(f"the state {model.__name__} cannot be recorded: {error}") from error
        self.model = model
        self.fields: Mapping[str, Any] = model.model_fields
        """The fields of the model, by name."""
        self._names = _Names()
        self.reducers: Mapping[str, Reducer] = {
            name: reducer for name, info in model.model_fields.items() if (reducer := _reducer(info.metadata)) is not None
        }

    def check(self, state: object) -> S:
        """The state given, checked anew; `FlowError` says what is wrong with it."""
        if not isinstance(state, self.model):
            raise FlowError(f"the flow starts from a {self.model.__name__}, found {type(state).__name__}")
        return self.change(state, {}, by="the state that was given")

    def build(self, values: object, *, by: str) -> S:
        """A state from a state or from its fields by name."""
        if isinstance(values, self.model):
            return self.change(values, {}, by=by)
        if not isinstance(values, Mapping):
            raise FlowError(f"{by}: expected a {self.model.__name__} or its fields, found {type(values).__name__}")
        return self._validate(dict(values), by)

    def change(self, state: S, values: Mapping[str, object], *, by: str) -> S:
        """The state with other values, validated; `FlowError` names the field that does not fit, and who wrote it."""
        held = {name: value for name, value in state.__dict__.items() if name in self.fields}
        return self._validate({**held, **(state.__pydantic_extra__ or {}), **values}, by)

    def copy(self, state: S) -> S:
        """An equal state that shares nothing that can be changed: what code does to it changes no other."""
        copied = state.model_copy()
        own = copied.__dict__
        for name, value in own.items():
            if type(value) not in _ATOMS:
                own[name] = type(value)() if not value and type(value) in _CONTAINERS else deepcopy(value)
        return copied

    def freeze(self, state: S) -> tuple[Fields, S]:
        """Each field as bytes, and the state that they give back, which is equal; else `Unrecordable`."""
        try:
            plain = self._adapter.dump_python(
                state, mode="json", warnings="error", by_alias=True, exclude_computed_fields=True
            )
            codec.check_plain(plain)
            fields = {name: codec.encode_checked(value) for name, value in plain.items()}
            again = self._read(fields)
        except (PydanticSerializationError, ValidationError, UnicodeError, ValueError, TypeError) as error:
            what = f"a {self.model.__name__} that its declared types do not give back ({codec.told(error)})"
            raise Unrecordable("$", what) from error
        where = self._difference(state, again)
        if where is not None:
            raise Unrecordable(where, f"a part of {self.model.__name__} that comes back as another one")
        return fields, again

    def thaw(self, fields: Fields) -> S:
        """The state that was frozen; `FlowError` where the model has changed so that it does not fit any more."""
        try:
            return self._read(fields)
        except (ValidationError, ValueError, TypeError) as error:
            what = codec.told(error)
            raise FlowError(f"the stored state does not fit {self.model.__name__} as it is now: {what}") from error

    def join(self, fields: Fields) -> bytes:
        """Fields as one object."""
        names = self._names
        return b"{%b}" % b",".join([names[name] + data for name, data in fields.items()])

    def _difference(self, state: S, again: S) -> str | None:
        """What `codec.difference` says, which looks more closely than most fields need."""
        ours, theirs = state.__dict__, again.__dict__
        for name in self.fields:
            value, other = ours[name], theirs[name]
            if value is other:
                continue
            kind = type(value)
            if kind is type(other) and (kind in _ATOMS or (kind in _CONTAINERS and not value)) and value == other:
                continue
            where = codec.difference(value, other, f"$.{name}")
            if where is not None:
                return where
        extra, other_extra = state.__pydantic_extra__, again.__pydantic_extra__
        return None if extra is other_extra else codec.difference(extra, other_extra)

    def _read(self, fields: Fields) -> S:
        data = self.join(fields)
        if b"\\ud" in data:
            return self._adapter.validate_python(codec.decode(data))
        return self._adapter.validate_json(data)

    def _validate(self, values: dict[str, object], by: str) -> S:
        try:
            return self._adapter.validate_python(values, by_name=True, by_alias=True)
        except ValidationError as error:
            raise FlowError(f"{by} does not fit {self.model.__name__}: {codec.told(error)}") from error


class _Names(dict[str, bytes]):
    """Names of fields as they stand before their values."""

    def __missing__(self, name: str) -> bytes:
        written = self[name] = codec.encode_checked(name) + b":"
        return written


_ATOMS = frozenset({str, int, float, bool, type(None)})
_CONTAINERS = frozenset({list, dict, set})


def is_model(value: object) -> bool:
    """Whether it is a model of pydantic's that has fields."""
    return isinstance(value, type) and issubclass(value, BaseModel) and not issubclass(value, RootModel)


def _reducer(metadata: list[Any]) -> Reducer | None:
    return next((each for each in metadata if callable(each) and not isinstance(each, type)), None)
