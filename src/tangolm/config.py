"""Frozen dataclasses to and from JSON, strictly; dotted overrides; a stable fingerprint.

Machinery only: it knows no configuration of the project. A field's type decides what is accepted: `int`, `float` (a
whole number is taken too), `bool`, `str`, `Literal`, `X | None`, `tuple`, `dict[str, X]`, nested dataclasses. Unknown
keys, wrong types and non-finite numbers are refused by name. A class that stands for several (the model configurations)
is resolved by a function the caller passes, so that the list of them stays where it belongs.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

T = TypeVar("T")
Resolve = Mapping[type, Callable[[Mapping[str, Any]], type]]


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names the field, the value and what would do."""


def to_dict(config: Any) -> dict[str, Any]:
    """The dataclass as plain JSON data, nested dataclasses included; tuples become lists."""
    return {field.name: _plain(getattr(config, field.name)) for field in dataclasses.fields(config)}


def from_dict(cls: type[T], data: Mapping[str, Any], *, resolve: Resolve | None = None, where: str = "") -> T:
    """Build `cls` from JSON data.

    Args:
        cls: a dataclass.
        data: its fields by name; a field without a default must be there.
        resolve: for a class that stands for several, a function from its data to the class meant.
        where: dotted path of `data` in the whole, for messages.

    Raises:
        ConfigError: an unknown or missing key, a wrong type, or a value that the dataclass itself refuses.
    """
    resolve = resolve or {}
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where or cls.__name__} must be a mapping of fields, got {data!r}")
    if cls in resolve:
        cls = resolve[cls](data)
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in data:
        if key not in fields:
            raise ConfigError(f"unknown key {_join(where, key)!r}{suggest(key, fields)}")
    values = {}
    for name, field in fields.items():
        if name in data:
            values[name] = _parse(hints[name], data[name], resolve, _join(where, name))
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"missing key {_join(where, name)!r}: it has no default")
    try:
        return cls(**values)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{where}: {error}" if where else str(error)) from error


def override(config: T, assignments: Iterable[str], *, resolve: Resolve | None = None) -> T:
    """A copy of `config` with dotted assignments such as `optimizer.peak_lr=1e-3` applied in order.

    The right side is read as JSON, and as a plain string where it is not JSON.

    Raises:
        ConfigError: an assignment without `=`, a path that does not exist, a value of the wrong type.
    """
    data = to_dict(config)
    for assignment in assignments:
        path, separator, text = assignment.partition("=")
        if not separator:
            raise ConfigError(f"override {assignment!r} has no '='; write path.to.field=value")
        *parents, last = path.strip().split(".")
        node: Any = data
        for parent in parents:
            node = _child(node, parent, path)
        _child(node, last, path)
        node[last] = _value(text.strip())
    return from_dict(type(config), data, resolve=resolve)


def fingerprint(config: Any) -> str:
    """Twelve hexadecimal digits that depend on the values alone (of a dataclass or of JSON data), on nothing else."""
    text = json.dumps(_plain(config), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def suggest(name: str, known: Iterable[str]) -> str:
    """The tail of an error message about an unknown name: the nearest known one, or all of them."""
    known = [str(item) for item in known]
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; known: {', '.join(known)}" if known else ""


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_dict(value)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return value


def _parse(hint: Any, value: Any, resolve: Resolve, where: str) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        errors = []
        for option in arguments:
            if option is type(None):
                continue
            try:
                return _parse(option, value, resolve, where)
            except ConfigError as error:
                errors.append(error)
        raise errors[0]
    if origin is Literal:
        if not any(value == option and type(value) is type(option) for option in arguments):
            raise ConfigError(f"{where} must be one of {', '.join(map(repr, arguments))}, got {value!r}")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{where} must be a list, got {value!r}")
        kinds = [arguments[0]] * len(value) if arguments[-1:] == (Ellipsis,) else list(arguments)
        if len(kinds) != len(value):
            raise ConfigError(f"{where} must have {len(kinds)} items, got {len(value)}: {value!r}")
        return tuple(
            _parse(kind, item, resolve, f"{where}[{i}]")
            for i, (kind, item) in enumerate(zip(kinds, value, strict=True))
        )
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where} must be a mapping, got {value!r}")
        return {str(key): _parse(arguments[1], item, resolve, _join(where, str(key))) for key, item in value.items()}
    if isinstance(hint, type) and (hint in resolve or dataclasses.is_dataclass(hint)):
        return value if isinstance(value, hint) else from_dict(hint, value, resolve=resolve, where=where)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not hint:
        raise ConfigError(f"{where} must be {hint.__name__}, got {value!r}")
    if hint is float and not math.isfinite(value):
        raise ConfigError(f"{where} must be finite, got {value!r}")
    return value


def _child(node: Any, key: str, path: str) -> Any:
    if not isinstance(node, dict):
        raise ConfigError(f"unknown key {path.strip()!r}; {key!r} is looked up in a plain value")
    if key not in node:
        raise ConfigError(f"unknown key {path.strip()!r}{suggest(key, node)}")
    return node[key]


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name
