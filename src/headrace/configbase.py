"""The base of every config struct, and how TOML tables become structs with errors that name the key, the value and the valid ones."""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Iterator
from datetime import date, datetime, time
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from headrace.errors import ConfigError

LARGEST = 2**53
"""Of whole numbers: what tensors, floats and JSON hold exactly."""
Positive = Annotated[int, Meta(ge=1, le=LARGEST)]
NonNegative = Annotated[int, Meta(ge=0, le=LARGEST)]


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the TOML file. The docstring of a field is the string after it; the config reference is made of them."""


def apply_override(root: type[Config], tables: dict[str, Any], override: str) -> None:
    """Write one `key.path=value` into the tables. A number in the path picks an item of an array."""
    key, equals, text = override.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or not all(parts):
        raise ConfigError("", f"override {override!r} is not of the form key.path=value")
    target: Any = tables
    annotation: Any = root
    for depth, part in enumerate(parts):
        here = ".".join(parts[:depth])
        last = depth == len(parts) - 1
        if isinstance(target, list):
            if not part.isdigit() or int(part) >= len(target):
                raise ConfigError(here, f"has {len(target)} items, {part!r} is not the index of one (the first is 0)")
            slot: Any = int(part)
            annotation = get_args(annotation)[0] if get_args(annotation) else Any
        elif isinstance(target, dict):
            slot = part
            annotation = field_types(annotation).get(part, Any) if is_config(annotation) else Any
        else:
            raise ConfigError(here, f"found {_show(target)}, which has no key {part!r}")
        if last:
            target[slot] = _parse_value(text.strip(), annotation, key)
        else:
            target = target[slot] if isinstance(target, list) else target.setdefault(slot, {})


def _parse_value(text: str, annotation: Any, path: str) -> Any:
    """A TOML value, or the text itself where it is none (or where the key holds text)."""
    if annotation is str and text[:1] not in ('"', "'"):
        return text
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError as error:
        if text[:1] in ("[", "{", '"', "'"):
            raise ConfigError(path, f"{text!r} is not a valid TOML value: {error}") from None
        return text
    if list(parsed) != ["value"] or isinstance(parsed["value"], date | datetime | time):
        return text
    return parsed["value"]


# ---------------------------------------------------------------------------------------------------- checking types


def is_config(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Config)


def field_types(struct: type[Config]) -> dict[str, Any]:
    return get_type_hints(struct, include_extras=True)


def build(annotation: Any, value: Any, path: str) -> Any:
    """`value` as the annotated type; a ConfigError that names the innermost key at fault."""
    if is_config(annotation):
        if not isinstance(value, dict):
            raise ConfigError(path, f"found {_show(value)}, expected a table with {', '.join(field_types(annotation))}")
        hints = field_types(annotation)
        for key in value:
            if key not in hints:
                raise ConfigError(
                    _join(path, key), f"unknown key{did_you_mean(key, hints)}; {_valid_keys(path, hints)}"
                )
        fields = {key: build(hints[key], item, _join(path, key)) for key, item in value.items()}
        for field in msgspec.structs.fields(annotation):
            if field.required and field.name not in fields:
                raise ConfigError(_join(path, field.name), f"missing; expected {describe(hints[field.name])}")
        return annotation(**fields)
    item_type = _config_item(annotation)
    if item_type is not None:
        if not isinstance(value, list):
            raise ConfigError(path, f"found {_show(value)}, expected an array of tables ([[{path}]])")
        return tuple(build(item_type, item, f"{path}.{index}") for index, item in enumerate(value))
    if value == "none" and type(None) in get_args(annotation):
        value = None
    try:
        built = msgspec.convert(value, annotation)
    except msgspec.ValidationError:
        choices = _choices(annotation)
        hint = did_you_mean(value, choices) if isinstance(value, str) else ""
        expected = describe(annotation)
        if isinstance(value, int) and value > LARGEST and expected.startswith("a whole number"):
            hint = " and at most 2^53"
        raise ConfigError(path, f"found {_show(value)}, expected {expected}{hint}") from None
    if any(isinstance(number, float) and math.isnan(number) for number in _leaves(built)):
        raise ConfigError(path, f"found {_show(value)}, expected {describe(annotation)}")
    return built


def _config_item(annotation: Any) -> type[Config] | None:
    """The struct in `tuple[Struct, ...]`."""
    if get_origin(annotation) is tuple and is_config(get_args(annotation)[0]):
        return get_args(annotation)[0]
    return None


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | list):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        yield from _leaves(list(value.values()))
    else:
        yield value


def describe(annotation: Any) -> str:
    """An annotation in the words of an error message: `a whole number >= 1`, `one of never, hold`."""
    return _describe(msgspec.inspect.type_info(annotation), _choices(annotation))


def _describe(info: Any, choices: list[str]) -> str:
    """`choices` are the annotation's literals in the order of the source; msgspec sorts them."""
    match info:
        case msgspec.inspect.IntType() | msgspec.inspect.FloatType():
            word = "a whole number" if isinstance(info, msgspec.inspect.IntType) else "a number"
            signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
            bounds = [
                f"{sign} {getattr(info, key):g}"
                for key, sign in signs.items()
                if getattr(info, key) not in (None, LARGEST)
            ]
            return " ".join([word, " and ".join(bounds)]).strip()
        case msgspec.inspect.StrType():
            return "text"
        case msgspec.inspect.BoolType():
            return "true or false"
        case msgspec.inspect.NoneType():
            return '"none"'
        case msgspec.inspect.LiteralType():
            return f"one of {', '.join(sorted(map(str, info.values), key=choices.index))}"
        case msgspec.inspect.UnionType():
            return " or ".join(_describe(part, choices) for part in info.types)
        case msgspec.inspect.VarTupleType():
            return f"an array of {_describe(info.item_type, choices)}"
        case msgspec.inspect.TupleType():
            return (
                f"an array of {len(info.item_types)}: {', '.join(_describe(item, choices) for item in info.item_types)}"
            )
        case msgspec.inspect.DictType():
            return f"a table of {_describe(info.value_type, choices)}"
        case msgspec.inspect.StructType():
            return "a table"
    return str(info)


def _choices(annotation: Any) -> list[str]:
    """Every literal that the annotation names."""
    if get_origin(annotation) is Literal:
        return [str(choice) for choice in get_args(annotation)]
    return [choice for part in get_args(annotation) for choice in _choices(part)]


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _show(value: Any) -> str:
    """A value as the user would have written it, on one line and not too long."""
    match value:
        case bool():
            text = str(value).lower()
        case str():
            text = '"' + value.replace("\n", "\\n") + '"'
        case dict():
            text = "a table with " + (", ".join(value) or "no keys")
        case _:
            text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def did_you_mean(word: Any, choices: Any) -> str:
    close = difflib.get_close_matches(str(word), list(choices), n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _valid_keys(path: str, hints: dict[str, Any]) -> str:
    return f"valid{f' in [{path}]' if path else ''}: {', '.join(hints)}"


def config_to_dict(config: Config) -> dict[str, Any]:
    """Plain tables; keys that hold None are left out, as TOML has no null."""

    def plain(value: Any) -> Any:
        if isinstance(value, Config):
            items = ((name, getattr(value, name)) for name in value.__struct_fields__)
            return {name: plain(item) for name, item in items if item is not None}
        if isinstance(value, tuple | list):
            return [plain(item) for item in value]
        return dict(value) if isinstance(value, dict) else value

    return plain(config)
