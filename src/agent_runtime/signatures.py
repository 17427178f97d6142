"""What a function's signature says of its arguments: the check that they pass, and the JSON schema that a model sees.

Arguments are checked by pydantic, in its lax mode for JSON, and unknown ones are refused. A signature of plain types alone
is given to pydantic's core directly, by the schema that pydantic would make of it: loading the rest of pydantic takes
longer than everything else that a short run does. Arguments that are each of the very scalar type that is declared are what
pydantic would give back, so that not even its core is loaded for them; any others it sees.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import isfinite
from typing import Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

from agent_runtime import codec
from agent_runtime.errors import InvalidArguments, ToolDefinitionError

ArgumentCheck: TypeAlias = Callable[[bytes, "Mapping[str, object] | None"], dict[str, Any]]
"""From recorded arguments, and the same as plain data where the caller has them, to the keyword arguments to call with;
`InvalidArguments` says what does not fit."""

_NO_DEFAULT = inspect.Parameter.empty
_SIMPLE_DEFAULTS = (type(None), bool, int, float, str)


def read_hints(function: Callable[..., Any], name: str) -> dict[str, Any]:
    """The annotations of a function or a callable object, each as a type."""
    target = function if inspect.isroutine(function) else type(function).__call__
    try:
        return get_type_hints(target, include_extras=True)
    except NameError as error:
        raise ToolDefinitionError(f"tool {name!r} has an annotation that cannot be read: {error}; import the type") from error


def read_arguments(
    function: Callable[..., Any], name: str, hints: Mapping[str, Any]
) -> tuple[ArgumentCheck, dict[str, object]]:
    """What checks the arguments of a tool, and their JSON schema."""
    parameters = list(inspect.signature(function).parameters.values())
    for parameter in parameters:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ToolDefinitionError(f"tool {name!r} has parameter {parameter}; a tool takes named parameters only")
    if all(_is_simple(parameter, hints) for parameter in parameters):
        return _plain_check(name, parameters, hints), _plain_schema(parameters, hints)
    return _declared_check(name, parameters, hints)


def _is_simple(parameter: inspect.Parameter, hints: Mapping[str, Any]) -> bool:
    has_simple_default = parameter.default is _NO_DEFAULT or type(parameter.default) in _SIMPLE_DEFAULTS
    return has_simple_default and codec.is_plain_type(hints.get(parameter.name, Any))


# Signatures of plain types.


def _plain_check(name: str, parameters: Sequence[inspect.Parameter], hints: Mapping[str, Any]) -> ArgumentCheck:
    kinds = {each.name: hints.get(each.name, Any) for each in parameters}
    is_scalar = all(kind in _SCALARS for kind in kinds.values())

    @cache
    def core() -> Callable[[bytes], dict[str, Any]]:
        return _core_check(name, parameters, hints)

    def check(args: bytes, plain: Mapping[str, object] | None = None) -> dict[str, Any]:
        exact = _read_exact(args, plain, kinds) if is_scalar else None
        return core()(args) if exact is None else exact

    return check


_SCALARS = (str, int, bool, float)


def _read_exact(args: bytes, plain: Mapping[str, object] | None, kinds: Mapping[str, object]) -> dict[str, Any] | None:
    """The arguments, where each that is declared is there, of its very type, and no other; else None, and pydantic is asked.

    Half a character is text for Python and none for pydantic, which refuses it.
    """
    if b"\\ud" in args:
        return None
    if plain is None:
        try:
            plain = codec.decode(args)
        except (ValueError, RecursionError):
            return None
        if not isinstance(plain, dict):
            return None
    is_exact = {name: type(value) for name, value in plain.items()} == kinds
    return {name: plain[name] for name in kinds} if is_exact else None


def _core_check(
    name: str, parameters: Sequence[inspect.Parameter], hints: Mapping[str, Any]
) -> Callable[[bytes], dict[str, Any]]:
    from pydantic_core import SchemaValidator, ValidationError

    fields = {each.name: _core_field(each, hints.get(each.name, Any)) for each in parameters}
    whole: Any = {"type": "typed-dict", "fields": fields, "extra_behavior": "forbid"}
    validate = SchemaValidator(whole).validate_json

    def check(args: bytes) -> dict[str, Any]:
        try:
            values: dict[str, Any] = validate(args)
        except ValidationError as error:
            raise InvalidArguments(_explain(name, error)) from error
        return values

    return check


def _core_field(parameter: inspect.Parameter, annotation: object) -> dict[str, object]:
    schema = _core_schema(annotation)
    if parameter.default is _NO_DEFAULT:
        return {"type": "typed-dict-field", "schema": schema, "required": True}
    with_default = {"type": "default", "schema": schema, "default": parameter.default}
    return {"type": "typed-dict-field", "schema": with_default, "required": False}


_CORE_NAMES: dict[object, str] = {str: "str", bool: "bool", int: "int", float: "float", type(None): "none", None: "none"}
_JSON_NAMES = {"str": "string", "bool": "boolean", "int": "integer", "float": "number", "none": "null"}


def _core_schema(annotation: object) -> dict[str, object]:
    """The schema that pydantic makes of a plain type, for its core."""
    if annotation in (Any, object):
        return {"type": "any"}
    if annotation in _CORE_NAMES:
        return {"type": _CORE_NAMES[annotation]}
    origin, parts = get_origin(annotation) or annotation, get_args(annotation)
    if origin is list:
        return {"type": "list", "items_schema": _core_schema(parts[0] if parts else Any)}
    if origin is dict:
        keys, values = parts or (str, Any)
        return {"type": "dict", "keys_schema": _core_schema(keys), "values_schema": _core_schema(values)}
    if origin is Literal:
        return {"type": "literal", "expected": list(parts)}
    assert origin in (Union, types.UnionType), f"{annotation!r} is no plain type"
    return _core_union(parts)


def _core_union(parts: Sequence[object]) -> dict[str, object]:
    others = [_core_schema(part) for part in parts if part not in (None, type(None))]
    inner: dict[str, object] = others[0] if len(others) == 1 else {"type": "union", "choices": others}
    return inner if len(others) == len(parts) else {"type": "nullable", "schema": inner}


def _plain_schema(parameters: Sequence[inspect.Parameter], hints: Mapping[str, Any]) -> dict[str, object]:
    """The JSON schema of a signature of plain types."""
    required = [each.name for each in parameters if each.default is _NO_DEFAULT]
    properties = {each.name: _json_property(each, hints.get(each.name, Any)) for each in parameters}
    schema: dict[str, object] = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**schema, "required": required} if required else schema


def _json_property(parameter: inspect.Parameter, annotation: object) -> dict[str, object]:
    schema, default = _json_schema(annotation), parameter.default
    return schema if default is _NO_DEFAULT or _is_endless(default) else {**schema, "default": default}


def _is_endless(default: object) -> bool:
    """Whether a default is a number that JSON does not have."""
    return isinstance(default, float) and not isfinite(default)


def _json_schema(annotation: object) -> dict[str, object]:
    if annotation in (Any, object):
        return {}
    if annotation in _CORE_NAMES:
        return {"type": _JSON_NAMES[_CORE_NAMES[annotation]]}
    origin, parts = get_origin(annotation) or annotation, get_args(annotation)
    if origin is list:
        return {"type": "array", "items": _json_schema(parts[0]) if parts else {}}
    if origin is dict:
        return {"type": "object", "additionalProperties": _json_schema(parts[1]) if parts else True}
    if origin is Literal:
        return {"enum": list(parts)}
    return {"anyOf": [_json_schema(part) for part in parts]}


# Signatures that declare other types.


def _declared_check(
    name: str, parameters: Sequence[inspect.Parameter], hints: Mapping[str, Any]
) -> tuple[ArgumentCheck, dict[str, object]]:
    """A pydantic model of the arguments, whose fields have names of ours: an argument may be called as no field may."""
    from pydantic import ConfigDict, Field, ValidationError, create_model
    from pydantic.errors import PydanticUserError
    from pydantic.fields import FieldInfo

    fields: dict[str, Any] = {}
    names: list[tuple[str, str]] = []
    for at, parameter in enumerate(parameters):
        required = parameter.default is _NO_DEFAULT
        if isinstance(parameter.default, FieldInfo):
            raise ToolDefinitionError(
                f"parameter {parameter.name!r} of tool {name!r} has a Field for its default, which no caller but pydantic "
                "understands; write Annotated[type, Field(…)] = default"
            )
        default = Field(alias=parameter.name) if required else Field(default=parameter.default, alias=parameter.name)
        fields[f"arg_{at}"] = (hints.get(parameter.name, Any), default)
        names.append((f"arg_{at}", parameter.name))
    try:
        model = create_model(name, __config__=ConfigDict(extra="forbid", arbitrary_types_allowed=False), **fields)
        schema = model.model_json_schema(by_alias=True)
    except PydanticUserError as error:
        raise ToolDefinitionError(f"the parameters of tool {name!r} cannot come from JSON: {error}") from error
    for parameter in parameters:
        if _holds_secret(schema["properties"][parameter.name], schema.get("$defs", {})):
            raise ToolDefinitionError(
                f"parameter {parameter.name!r} of tool {name!r} takes a secret, and arguments come from a model and are "
                "stored: give the tool its secret from outside of the call, as from a closure"
            )
        if _is_endless(parameter.default):
            schema["properties"][parameter.name].pop("default", None)
    validate = model.__pydantic_validator__.validate_json

    def check(args: bytes, _plain: Mapping[str, object] | None = None) -> dict[str, Any]:
        try:
            values = validate(args).__dict__
        except ValidationError as error:
            raise InvalidArguments(_explain(name, error)) from error
        return {argument: values[field] for field, argument in names}

    return check, schema


def _holds_secret(schema: object, parts: Mapping[str, object], seen: frozenset[str] = frozenset()) -> bool:
    """Whether a type is, or holds, one of pydantic's secrets, whose schema says so."""
    if isinstance(schema, list):
        return any(_holds_secret(each, parts, seen) for each in schema)
    if not isinstance(schema, dict):
        return False
    if schema.get("format") == "password" and schema.get("writeOnly") is True:
        return True
    part = str(schema.get("$ref", "")).removeprefix("#/$defs/")
    if part and part not in seen and _holds_secret(parts.get(part), parts, seen | {part}):
        return True
    return any(_holds_secret(each, parts, seen) for each in schema.values())


def _explain(name: str, error: Any) -> str:
    faults = "; ".join(f"{'.'.join(map(str, fault['loc'])) or 'arguments'}: {fault['msg']}" for fault in error.errors())
    return f"the arguments do not fit tool {name!r}: {faults}"
