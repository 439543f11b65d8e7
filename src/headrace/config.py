"""Turns a TOML file or preset name and dotted overrides into one checked `RunConfig`, and back into TOML."""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Iterator, Sequence
from datetime import date, datetime, time
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from headrace.configbase import Config
from headrace.errors import ConfigError
from headrace.exchange.config import BufferConfig, StalenessConfig, WeightsConfig, steps_ahead
from headrace.observability.config import ObservabilityConfig
from headrace.orchestrator.config import CheckpointConfig, EvaluationConfig, LimitsConfig
from headrace.reward.config import RewardConfig
from headrace.rollout.config import GroupConfig, RolloutConfig, TasksConfig
from headrace.training.config import TrainingConfig

PRESETS_FOLDER = Path(__file__).parent / "presets"


class ModelConfig(Config):
    """[model]: the policy at the start."""

    path: str = ""
    """A local Hugging Face folder of a causal LM, or `smollm2` or `tiny` (built in, cached)."""
    dtype: Literal["float32", "bfloat16"] = "float32"


class RunConfig(Config):
    """One run. Every table and key may be left out."""

    name: str = "run"
    seed: Annotated[int, Meta(ge=0)] = 0
    placement: Literal["sync", "colocated", "separate"] = "separate"
    """sync: generation and training alternate; separate: both run all the time."""
    runtime: Literal["auto", "local", "processes", "simulated", "ray"] = "auto"
    """auto: local for sync, processes for separate."""
    model: ModelConfig = ModelConfig()
    tasks: TasksConfig = TasksConfig()
    rollout: RolloutConfig = RolloutConfig()
    group: GroupConfig = GroupConfig()
    reward: RewardConfig = RewardConfig()
    buffer: BufferConfig = BufferConfig()
    staleness: StalenessConfig = StalenessConfig()
    weights: WeightsConfig = WeightsConfig()
    training: TrainingConfig = TrainingConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    limits: LimitsConfig = LimitsConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    observability: ObservabilityConfig = ObservabilityConfig()


# -------------------------------------------------------------------------------------------------- reading


def load_config(source: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The config in a TOML file, or of a preset, with `key.path=value` overrides on top. Not yet resolved or validated."""
    return config_from_dict(read_toml(source), overrides)


def config_from_dict(tables: dict[str, Any], overrides: Sequence[str] = ()) -> RunConfig:
    """The same from tables that are read already."""
    for override in overrides:
        _apply_override(tables, override)
    return _build(RunConfig, tables, "")


def preset_names() -> list[str]:
    """Names that `load_config` knows without a file."""
    return sorted(file.stem for file in PRESETS_FOLDER.glob("*.toml"))


def find_source(source: str | Path) -> Path:
    """The file that a CONFIG argument means: a bare word is a preset, anything else a path."""
    text = str(source)
    path = Path(text).expanduser()
    if isinstance(source, str) and "/" not in text and not text.endswith(".toml"):
        preset = PRESETS_FOLDER / f"{text}.toml"
        if preset.is_file():
            return preset
        if not path.is_file():
            raise ConfigError(
                "",
                f"no preset named {text!r}{_did_you_mean(text, preset_names())}; presets: {', '.join(preset_names())}, or give a .toml file",
            )
    if not path.is_file():
        found = "is a folder" if path.is_dir() else "does not exist"
        raise ConfigError(
            "", f"config file {text!r} {found}; give a .toml file or a preset: {', '.join(preset_names())}"
        )
    return path


def read_toml(source: str | Path) -> dict[str, Any]:
    """The tables of a file or preset."""
    path = find_source(source)
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError("", f"{path}: not valid TOML: {error}") from None
    except UnicodeDecodeError:
        raise ConfigError("", f"{path}: not a text file in UTF-8") from None
    except OSError as error:
        raise ConfigError("", f"{path}: cannot be read: {error.strerror}") from None


def _apply_override(tables: dict[str, Any], override: str) -> None:
    """Write one `key.path=value` into the tables. A number in the path picks an item of an array."""
    key, equals, text = override.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or not all(parts):
        raise ConfigError("", f"override {override!r} is not of the form key.path=value")
    target: Any = tables
    annotation: Any = RunConfig
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
            annotation = _hints(annotation).get(part, Any) if _is_config(annotation) else Any
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


def _is_config(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Config)


def _hints(struct: type[Config]) -> dict[str, Any]:
    return get_type_hints(struct, include_extras=True)


def _build(annotation: Any, value: Any, path: str) -> Any:
    """`value` as the annotated type; a ConfigError that names the innermost key at fault."""
    if _is_config(annotation):
        if not isinstance(value, dict):
            raise ConfigError(path, f"found {_show(value)}, expected a table with {', '.join(_hints(annotation))}")
        hints = _hints(annotation)
        for key in value:
            if key not in hints:
                raise ConfigError(
                    _join(path, key), f"unknown key{_did_you_mean(key, hints)}; {_valid_keys(path, hints)}"
                )
        fields = {key: _build(hints[key], item, _join(path, key)) for key, item in value.items()}
        for field in msgspec.structs.fields(annotation):
            if field.required and field.name not in fields:
                raise ConfigError(_join(path, field.name), f"missing; expected {describe(hints[field.name])}")
        return annotation(**fields)
    item_type = _config_item(annotation)
    if item_type is not None:
        if not isinstance(value, list):
            raise ConfigError(path, f"found {_show(value)}, expected an array of tables ([[{path}]])")
        return tuple(_build(item_type, item, f"{path}.{index}") for index, item in enumerate(value))
    if value == "none" and type(None) in get_args(annotation):
        value = None
    try:
        built = msgspec.convert(value, annotation)
    except msgspec.ValidationError:
        choices = _choices(annotation)
        hint = _did_you_mean(value, choices) if isinstance(value, str) else ""
        raise ConfigError(path, f"found {_show(value)}, expected {describe(annotation)}{hint}") from None
    if any(isinstance(number, float) and math.isnan(number) for number in _leaves(built)):
        raise ConfigError(path, f"found {_show(value)}, expected {describe(annotation)}")
    return built


def _config_item(annotation: Any) -> type[Config] | None:
    """The struct in `tuple[Struct, ...]`."""
    if get_origin(annotation) is tuple and _is_config(get_args(annotation)[0]):
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
            bounds = [f"{sign} {getattr(info, key):g}" for key, sign in signs.items() if getattr(info, key) is not None]
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


def _did_you_mean(word: Any, choices: Any) -> str:
    close = difflib.get_close_matches(str(word), list(choices), n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _valid_keys(path: str, hints: dict[str, Any]) -> str:
    return f"valid{f' in [{path}]' if path else ''}: {', '.join(hints)}"


# ------------------------------------------------------------------------------------------------------ writing


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


def dump_config(config: RunConfig) -> str:
    """TOML that loads again equal."""
    import tomli_w

    return tomli_w.dumps(config_to_dict(config))


# ----------------------------------------------------------------------------------------------------- resolving


def ahead(config: RunConfig) -> int | None:
    """How many batches rollout may run ahead of training; None: no bound."""
    resolved = resolve(config)
    return steps_ahead(resolved.buffer, resolved.staleness)


def resolve(config: RunConfig) -> RunConfig:
    """The config with every "auto" made concrete. What depends on the model (0 in [rollout.engine]) stays for the engine."""
    replace = msgspec.structs.replace
    together = config.placement in ("sync", "colocated")
    runtime = config.runtime if config.runtime != "auto" else ("local" if together else "processes")
    depth = config.buffer.depth if config.buffer.depth != "auto" else ("none" if together else "double")
    channel = config.weights.channel
    if channel == "auto":
        channel = "shared_memory" if runtime == "processes" else "in_process"
    return replace(
        config,
        runtime=runtime,
        buffer=replace(config.buffer, depth=depth),
        weights=replace(config.weights, channel=channel),
        group=replace(config.group, min_complete=config.group.min_complete or config.group.size),
        rollout=replace(
            config.rollout,
            max_in_flight=config.rollout.max_in_flight or config.training.groups + config.rollout.oversample,
        ),
        limits=replace(config.limits, max_dropped=config.limits.max_dropped or 16 * config.training.groups),
    )
