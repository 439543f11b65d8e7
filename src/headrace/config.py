"""Turns a TOML file or preset and dotted overrides into one `RunConfig`, and makes its autos concrete."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from headrace.configbase import LARGEST, Config, NonNegative, apply_override, build, config_to_dict, did_you_mean
from headrace.errors import ConfigError
from headrace.exchange.config import BufferConfig, ReplayConfig, StalenessConfig, WeightsConfig, steps_ahead
from headrace.observability.config import ObservabilityConfig
from headrace.orchestrator.config import CheckpointConfig, EvaluationConfig, LimitsConfig
from headrace.policies.config import PolicyConfig
from headrace.reward.config import RewardConfig
from headrace.rollout.config import ClientsConfig, EnvConfig, GroupConfig, RolloutConfig, TasksConfig
from headrace.training.config import AlgorithmConfig, TrainingConfig

PRESETS_FOLDER = Path(__file__).parent / "presets"
LIBRARIES_FOLDER = PRESETS_FOLDER / "libraries"
"""Presets that choose the axes as a library was surveyed to, and no work."""
DEFAULT_WORK = "tiny"
"""What a library's preset that stands alone is run on."""


class ModelConfig(Config):
    """[model]: the policy at the start."""

    path: str = ""
    """A local Hugging Face folder of a causal LM, or `smollm2` or `tiny` (built in, cached)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights, in trainer and engine."""


class RunConfig(Config):
    """One run. Every table and key may be left out."""

    name: str = "run"
    """Of the folder under runs/."""
    seed: NonNegative = 0
    """Decides the order of tasks, sampling and the built-in `tiny` model."""
    placement: Literal["sync", "colocated", "separate"] = "separate"
    """sync: generation and training alternate; colocated: the same, on one set of devices, so that each gives its memory
    up for the other; separate: both run all the time."""
    runtime: Literal["auto", "local", "processes", "simulated", "ray"] = "auto"
    """auto: local for sync, processes for separate. ray: actors, on the cluster that RAY_ADDRESS names or one of this machine."""
    model: ModelConfig = ModelConfig()
    env: EnvConfig = EnvConfig()
    policy: PolicyConfig = PolicyConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    tasks: TasksConfig = TasksConfig()
    rollout: RolloutConfig = RolloutConfig()
    clients: ClientsConfig = ClientsConfig()
    group: GroupConfig = GroupConfig()
    reward: RewardConfig = RewardConfig()
    buffer: BufferConfig = BufferConfig()
    replay: ReplayConfig = ReplayConfig()
    staleness: StalenessConfig = StalenessConfig()
    weights: WeightsConfig = WeightsConfig()
    training: TrainingConfig = TrainingConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    limits: LimitsConfig = LimitsConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    observability: ObservabilityConfig = ObservabilityConfig()


# -------------------------------------------------------------------------------------------------- reading


def load_config(source: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The config in a TOML file, or of a preset, with `key.path=value` overrides on top. Not yet resolved or validated.

    Several joined by `+` are laid one over another, the last on top: `tiny+verl` is the work of tiny under verl's axes.
    Relative paths in a file start at the file's folder, those in an override at the current one; both become absolute,
    so that a run can be resumed from anywhere.
    """
    tables: dict[str, Any] = {}
    for path in find_sources(source):
        layer = read_toml(path)
        if not path.is_relative_to(PRESETS_FOLDER):
            _anchor_paths(layer, path.parent)
        _lay_over(tables, layer)
    return config_from_dict(tables, overrides)


def find_sources(source: str | Path) -> list[Path]:
    """The files that a CONFIG argument means, bottom first. Libraries' presets alone are laid over `tiny`."""
    if not isinstance(source, str) or "+" not in source or Path(source).expanduser().is_file():
        paths = [find_source(source)]
    else:
        if not all(parts := source.split("+")):
            raise ConfigError("", f"found {source!r}; a preset or file is wanted on either side of '+'")
        paths = [find_source(part) for part in parts]
    if all(path.parent == LIBRARIES_FOLDER for path in paths):
        paths.insert(0, find_source(DEFAULT_WORK))
    return paths


def _lay_over(tables: dict[str, Any], layer: dict[str, Any]) -> None:
    """Keys of `layer` win; tables are joined key by key, anything else is replaced."""
    for key, value in layer.items():
        if isinstance(value, dict) and isinstance(tables.get(key), dict):
            _lay_over(tables[key], value)
        else:
            tables[key] = value


def config_from_dict(tables: dict[str, Any], overrides: Sequence[str] = ()) -> RunConfig:
    """The same from tables that are read already (and are changed). Relative paths start at the current folder."""
    for override in overrides:
        apply_override(RunConfig, tables, override)
    _anchor_paths(tables, Path.cwd())
    return build(RunConfig, tables, "")


def preset_names() -> list[str]:
    """Names that `load_config` knows without a file."""
    return sorted(file.stem for file in PRESETS_FOLDER.glob("*.toml"))


def library_names() -> list[str]:
    """Presets that choose the axes of a library."""
    return sorted(file.stem for file in LIBRARIES_FOLDER.glob("*.toml"))


def find_source(source: str | Path) -> Path:
    """The file that a CONFIG argument means: a bare word is a preset, anything else a path."""
    text = str(source)
    path = Path(text).expanduser()
    if isinstance(source, str) and "/" not in text and not text.endswith(".toml"):
        for folder in (PRESETS_FOLDER, LIBRARIES_FOLDER):
            if (folder / f"{text}.toml").is_file():
                return folder / f"{text}.toml"
        if not path.is_file():
            raise ConfigError(
                "",
                f"no preset named {text!r}{did_you_mean(text, preset_names() + library_names())}; presets: {', '.join(preset_names())}, a library's (see `headrace presets`), or give a .toml file",
            )
    if not path.is_file():
        found = "is a folder" if path.is_dir() else "does not exist"
        raise ConfigError(
            "", f"config file {text!r} {found}; give a .toml file or a preset: {', '.join(preset_names())}"
        )
    return path


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError("", f"{path}: not valid TOML: {error}") from None
    except UnicodeDecodeError:
        raise ConfigError("", f"{path}: not a text file in UTF-8") from None
    except OSError as error:
        raise ConfigError("", f"{path}: cannot be read: {error.strerror}") from None


def _anchor_paths(tables: dict[str, Any], folder: Path) -> None:
    """Make relative paths absolute: model folders, `jsonl:` and `hf:` sources, and `file.py:name` objects."""
    for path in (
        "model.path",
        "env.id",
        "policy.network",
        "tasks.source",
        "evaluation.source",
        "rollout.function",
        "rollout.engine.kv_folder",
        "reward.functions",
    ):
        *parents, key = path.split(".")
        table: Any = tables
        for parent in parents:
            table = table.get(parent) if isinstance(table, dict) else None
        if not isinstance(table, dict):
            continue
        slots = [(table, key)]
        if key == "functions":
            items = table.get(key)
            slots = [(item, "use") for item in items if isinstance(item, dict)] if isinstance(items, list) else []
        for slot, name in slots:
            if isinstance(slot.get(name), str):
                slot[name] = _anchored(slot[name], path, folder)


def _anchored(text: str, path: str, folder: Path) -> str:
    if path == "model.path":
        return text if text in ("", "smollm2", "tiny") else str(folder.resolve() / Path(text).expanduser())
    if path == "rollout.engine.kv_folder":
        return str(folder.resolve() / Path(text).expanduser()) if text else text
    head, colon, rest = text.partition(":")
    if colon and head in ("jsonl", "hf"):
        return f"{head}:{folder.resolve() / Path(rest).expanduser()}" if rest else text
    if colon and head.endswith(".py"):
        return f"{folder.resolve() / Path(head).expanduser()}:{rest}"
    return text


# ------------------------------------------------------------------------------------------------------ writing


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
    if channel == "auto" and config.rollout.source == "redis":
        channel = "http"
    elif channel == "auto":
        channel = "in_process" if runtime == "local" else "shared_memory"
    return replace(
        config,
        policy=resolve_policy(config),
        runtime=runtime,
        buffer=replace(config.buffer, depth=depth),
        weights=replace(config.weights, channel=channel),
        tasks=replace(config.tasks, source="clients")
        if from_clients(config) and not config.tasks.source
        else config.tasks,
        group=replace(config.group, min_complete=config.group.min_complete or config.group.size),
        rollout=replace(
            config.rollout,
            max_in_flight=config.rollout.max_in_flight
            or min(config.training.groups + config.rollout.oversample, LARGEST),
        ),
        limits=replace(
            config.limits, max_dropped=config.limits.max_dropped or min(16 * config.training.groups, LARGEST)
        ),
    )


def resolve_policy(config: RunConfig) -> PolicyConfig:
    """[policy] as the algorithm needs it."""
    needed = {"dqn": "q", "sac": "soft_actor"}.get(config.algorithm.kind, "actor_critic")
    kind = needed if config.policy.kind == "auto" else config.policy.kind
    return msgspec.structs.replace(config.policy, kind=kind, squash=config.policy.squash or kind == "soft_actor")


def cores() -> int:
    """Of this machine, that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def stays_on_device(config: RunConfig) -> bool:
    """Whether simulator, policy and learner share one device, and steps stay on it as tensors."""
    together = config.env.id.startswith("sim:") and config.runtime == "local" and config.placement == "sync"
    plain = config.policy.kind == "actor_critic" and config.policy.recurrent == "none" and not config.env.workers
    together = together and config.rollout.source == "engine"
    return together and plain


def from_clients(config: RunConfig) -> bool:
    return config.rollout.source == "http"


def is_served(config: RunConfig, only: str | None) -> bool:
    """Whether clients produce the run's episodes."""
    return from_clients(config) and only != "train"


# ---------------------------------------------------------------------------------------------------- validating
