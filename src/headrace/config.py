"""Turns a TOML file or preset and dotted overrides into one `RunConfig`, makes its autos concrete and refuses what cannot work."""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from headrace.configbase import Config, apply_override, build, config_to_dict, did_you_mean
from headrace.errors import ConfigError
from headrace.exchange.config import BufferConfig, ReplayConfig, StalenessConfig, WeightsConfig, steps_ahead
from headrace.observability.config import ObservabilityConfig
from headrace.orchestrator.config import CheckpointConfig, EvaluationConfig, LimitsConfig
from headrace.policies.config import PolicyConfig
from headrace.reward.config import RewardConfig
from headrace.rollout.config import COLDEST, ClientsConfig, EnvConfig, GroupConfig, RolloutConfig, TasksConfig
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
    seed: Annotated[int, Meta(ge=0)] = 0
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
        paths = [find_source(part) for part in source.split("+")]
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
        if _from_clients(config) and not config.tasks.source
        else config.tasks,
        group=replace(config.group, min_complete=config.group.min_complete or config.group.size),
        rollout=replace(
            config.rollout,
            max_in_flight=config.rollout.max_in_flight or config.training.groups + config.rollout.oversample,
        ),
        limits=replace(config.limits, max_dropped=config.limits.max_dropped or 16 * config.training.groups),
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


def _from_clients(config: RunConfig) -> bool:
    return config.rollout.source == "http"


def is_served(config: RunConfig, only: str | None) -> bool:
    """Whether clients produce the run's episodes."""
    return _from_clients(config) and only != "train"


# ---------------------------------------------------------------------------------------------------- validating


def available() -> dict[str, tuple[str, ...]]:
    """The axes of which some choices are designed but not built yet, and the choices that are."""
    from headrace.exchange.channels import AVAILABLE as channels
    from headrace.exchange.stores import AVAILABLE as stores

    return {
        "placement": ("sync", "colocated", "separate"),
        "runtime": ("local", "processes", "ray"),
        "buffer.store": stores,
        "weights.channel": channels,
        "training.backend": ("single_device",),
        "training.lora.kind": ("off", "adapter", "merged"),
    }


Only = Literal["rollout", "train"]


def validate(config: RunConfig, *, only: Only | None = None) -> list[str]:
    """Raise ConfigError for the first thing that cannot work, else return warnings. `only` names the half that will run."""
    config = resolve(config)
    _check_flow(config)
    _check_lora(config)
    _check_ranges(config)
    _check_inputs(config, only)
    for path, choices in available().items():
        found = _at(config, path)
        if found not in choices:
            raise ConfigError(path, f'found "{found}", which is not available in this version; use {_or(choices)}')
    return _warnings(config)


def _is_loopback(netloc: str) -> bool:
    """Of HOST, HOST:PORT or USER:PASSWORD@HOST:PORT."""
    host = urlsplit(f"//{netloc}").hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


def _at(config: Any, path: str) -> Any:
    for part in path.split("."):
        config = getattr(config, part)
    return config


def _or(choices: Sequence[str]) -> str:
    return " or ".join(choices)


def _check_flow(config: RunConfig) -> None:
    """Pairs of axes that hang, starve or contradict each other."""
    from headrace.rollout.partial import VALID_PAIRS

    weights, staleness, bound = config.weights, config.staleness, steps_ahead(config.buffer, config.staleness)
    placement, depth = config.placement, config.buffer.depth
    fitting = VALID_PAIRS[weights.interruption]
    if weights.partial not in fitting:
        raise ConfigError(
            "weights.partial",
            f'found "{weights.partial}" with weights.interruption = "{weights.interruption}", which goes with {_or(fitting)}',
        )
    if placement == "colocated" and weights.interruption == "never":
        raise ConfigError(
            "weights.interruption",
            'found "never" with placement = "colocated", where the engine sleeps while the trainer works; use hold, abort, drain or barrier',
        )
    if placement in ("sync", "colocated") and depth != "none":
        raise ConfigError(
            "buffer.depth",
            f'found "{depth}" with placement = "{placement}", which never runs ahead; use none (or leave it out), or placement = "separate"',
        )
    if placement == "colocated" and config.training.stream_groups:
        raise ConfigError(
            "training.stream_groups",
            f'found {config.training.stream_groups} with placement = "colocated", where the engine sleeps while the trainer works; use 0',
        )
    if depth == "stream" and _no_staleness_switch(config):
        raise ConfigError(
            "buffer.depth",
            'found "stream" without a bound on staleness; set staleness.max_version_lag, staleness.max_steps_ahead or training.correction.kind',
        )
    if bound is not None and weights.every_steps > 1 + bound:
        raise ConfigError(
            "weights.every_steps",
            f"found {weights.every_steps}, but rollout may run only {bound} batches ahead and would wait for weights for ever; use at most {1 + bound}",
        )
    if staleness.max_version_lag is not None and staleness.max_version_lag < weights.every_steps - 1:
        raise ConfigError(
            "staleness.max_version_lag",
            f"found {staleness.max_version_lag} with weights.every_steps = {weights.every_steps}, so that fresh samples are too old already; use at least {weights.every_steps - 1}",
        )
    if staleness.cancel_group and staleness.max_version_lag is None:
        raise ConfigError(
            "staleness.cancel_group", "found true without staleness.max_version_lag, which says how old is too old"
        )
    if config.runtime in ("processes", "ray") and weights.channel == "in_process":
        raise ConfigError(
            "weights.channel",
            f'found "in_process" with runtime = "{config.runtime}"; use shared_memory, or runtime = "local"',
        )


def _no_staleness_switch(config: RunConfig) -> bool:
    staleness = config.staleness
    return (
        staleness.max_version_lag is None
        and staleness.max_steps_ahead is None
        and config.training.correction.kind == "none"
    )


def _check_lora(config: RunConfig) -> None:
    """What adapters need of the other parts."""
    lora, weights, engine = config.training.lora, config.weights, config.rollout.engine
    adapter = lora.kind == "adapter"
    if config.env.id and lora.kind != "off":
        raise ConfigError("training.lora.kind", f'found "{lora.kind}" with env.id; adapters are for language models')
    for index, name in enumerate(lora.target_modules):
        if name.endswith(("lm_head", "embed_tokens")):
            raise ConfigError(
                f"training.lora.target_modules.{index}",
                f'found "{name}"; head and embedding take no adapter, name linear layers of the blocks',
            )
    if adapter and engine.kind == "hf":
        raise ConfigError(
            "rollout.engine.kind", 'found "hf" with training.lora.kind = "adapter"; use native, or kind = "merged"'
        )
    if adapter and weights.scope == "changed":
        raise ConfigError(
            "weights.scope",
            'found "changed" with training.lora.kind = "adapter", of which little travels anyway; use full',
        )
    if weights.kv_on_swap != "finish":
        return
    found = 'found "finish"'
    if not adapter:
        raise ConfigError(
            "weights.kv_on_swap",
            f'{found} with training.lora.kind = "{lora.kind}"; only adapters are small enough to keep several: use adapter, or keep or recompute',
        )
    if weights.interruption != "never":
        raise ConfigError(
            "weights.kv_on_swap",
            f'{found} with weights.interruption = "{weights.interruption}", which stops what runs; use never, or keep or recompute',
        )
    if engine.deterministic:
        raise ConfigError(
            "weights.kv_on_swap", f"{found} with rollout.engine.deterministic, whose passes have one adapter; use keep"
        )


def _check_ranges(config: RunConfig) -> None:
    """Numbers that are fine alone but not with another one."""
    training, group, engine, sampling = config.training, config.group, config.rollout.engine, config.rollout.sampling
    if group.min_complete > group.size:
        raise ConfigError("group.min_complete", f"found {group.min_complete}, more than group.size = {group.size}")
    if not config.env.id and training.groups % training.minibatches:
        raise ConfigError(
            "training.minibatches",
            f"found {training.minibatches}, which does not divide training.groups = {training.groups}; use one of {_divisors(training.groups)}",
        )
    if sampling.min_tokens > sampling.max_tokens:
        raise ConfigError(
            "rollout.sampling.min_tokens", f"found {sampling.min_tokens}, more than max_tokens = {sampling.max_tokens}"
        )
    if engine.context_length and sampling.max_tokens >= engine.context_length:
        raise ConfigError(
            "rollout.sampling.max_tokens",
            f"found {sampling.max_tokens}, which leaves no room for a prompt in rollout.engine.context_length = {engine.context_length}",
        )
    if engine.kv_tokens and engine.kv_tokens <= sampling.max_tokens:
        raise ConfigError(
            "rollout.engine.kv_tokens",
            f"found {engine.kv_tokens}, too few for one answer of rollout.sampling.max_tokens = {sampling.max_tokens} and its prompt",
        )
    if 0 < engine.kv_tokens < engine.block_size:
        raise ConfigError(
            "rollout.engine.kv_tokens",
            f"found {engine.kv_tokens}, less than one block of rollout.engine.block_size = {engine.block_size} tokens",
        )
    if engine.deterministic and engine.max_running > 1024:
        raise ConfigError(
            "rollout.engine.max_running",
            f"found {engine.max_running} with deterministic, which computes so many rows in every pass; use at most 1024",
        )
    _check_streaming(training)
    if 0 < sampling.temperature < COLDEST:
        raise ConfigError(
            "rollout.sampling.temperature", f"found {sampling.temperature:g}, expected 0 or at least {COLDEST:g}"
        )
    if "" in sampling.stop:
        raise ConfigError("rollout.sampling.stop", "found an empty text, which would end every answer at once")
    for index, token_id in enumerate(sampling.stop_token_ids):
        if token_id < 0:
            raise ConfigError(f"rollout.sampling.stop_token_ids.{index}", f"found {token_id}, expected a token id >= 0")
    for index, token_id in enumerate(sampling.allowed_token_ids):
        if token_id < 0:
            raise ConfigError(
                f"rollout.sampling.allowed_token_ids.{index}", f"found {token_id}, expected a token id >= 0"
            )
    for token_id, bias in sampling.logit_bias.items():
        if not token_id.isdecimal():
            raise ConfigError("rollout.sampling.logit_bias", f'found the key "{token_id}", expected a token id >= 0')
        if not math.isfinite(bias):
            raise ConfigError(
                f"rollout.sampling.logit_bias.{token_id}",
                f"found {bias}, expected a finite number; allowed_token_ids rules tokens out",
            )
    for index, beta in enumerate(training.optimizer.betas):
        if not 0 <= beta < 1:
            raise ConfigError(f"training.optimizer.betas.{index}", f"found {beta}, expected a number >= 0 and < 1")
    if training.correction.low > training.correction.high:
        raise ConfigError(
            "training.correction.low",
            f"found {training.correction.low}, above training.correction.high = {training.correction.high}",
        )
    if config.limits.stall_stop_s < config.limits.stall_warning_s:
        raise ConfigError(
            "limits.stall_stop_s",
            f"found {config.limits.stall_stop_s:g}, below limits.stall_warning_s = {config.limits.stall_warning_s:g}",
        )


def _check_streaming(training: TrainingConfig) -> None:
    """What a trainer that starts on a batch before it is complete cannot know."""
    found = f"found {training.stream_groups}"
    if training.stream_groups > training.groups:
        raise ConfigError("training.stream_groups", f"{found}, more than training.groups = {training.groups}")
    if training.stream_groups and training.epochs * training.minibatches > 1:
        raise ConfigError(
            "training.stream_groups",
            f"{found} with {training.epochs * training.minibatches} updates a batch, which need it whole; use training.epochs = 1 and training.minibatches = 1",
        )
    if training.stream_groups and training.loss.function:
        raise ConfigError(
            "training.stream_groups",
            f"{found} with training.loss.function, of which nobody knows that it divides by the batch's size last; use 0",
        )


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def _check_inputs(config: RunConfig, only: Only | None) -> None:
    """What a run cannot start without."""
    if not config.name or "/" in config.name or config.name in (".", ".."):
        raise ConfigError("name", f'found "{config.name}", expected the name of a folder')
    if config.evaluation.every_steps and not config.evaluation.source:
        raise ConfigError("evaluation.every_steps", f"found {config.evaluation.every_steps} without evaluation.source")
    if config.env.id:
        _check_control(config, only)
        return
    if not config.model.path:
        raise ConfigError("model.path", "missing; give a Hugging Face folder of a causal LM, smollm2 or tiny")
    if only != "train" and not config.tasks.source:
        raise ConfigError(
            "tasks.source",
            "missing; give sums, largest, jsonl:PATH, hf:FOLDER, reasoning_gym:TASK or pkg.module:object",
        )
    _check_clients(config, only)
    scored = config.reward.functions or config.rollout.function or _from_clients(config)
    if only != "train" and not scored:
        raise ConfigError(
            "reward.functions",
            'missing; add [[reward.functions]] with use = "exact" or another rule, or a function of your own',
        )
    if only != "rollout" and config.rollout.sampling.temperature == 0:
        raise ConfigError(
            "rollout.sampling.temperature",
            "found 0 (greedy), where siblings are all alike and nothing can be learned; use more than 0",
        )
    if config.evaluation.source == "episodes":
        raise ConfigError("evaluation.source", 'found "episodes", which goes with env.id')
    seen: dict[str, int] = {}
    for index, function in enumerate(config.reward.functions):
        name = function.name or function.use
        if name in seen:
            raise ConfigError(
                f"reward.functions.{index}.name",
                f'found "{name}", the name of reward.functions.{seen[name]} too; give each its own',
            )
        seen[name] = index


def _check_remote_actors(config: RunConfig) -> None:
    """What actors that know nothing but an address cannot do: they pull weights between two trajectories."""
    weights = config.weights
    if config.rollout.source != "redis":
        return
    for path, found, wanted in (
        ("weights.interruption", weights.interruption, ("never",)),
        ("weights.channel", weights.channel, ("http", "filesystem")),
        ("weights.scope", weights.scope, ("full",)),
        ("env.workers", config.env.workers, (0,)),
        ("runtime", config.runtime, ("local", "processes")),
        ("evaluation.source", config.evaluation.source, ("",)),
    ):
        if found not in wanted:
            shown = f'"{found}"' if isinstance(found, str) else found
            instead = _or([str(choice) for choice in wanted if choice != ""])
            raise ConfigError(
                path, f'found {shown} with rollout.source = "redis"; {f"use {instead}" if instead else "leave it out"}'
            )


def _check_clients(config: RunConfig, only: Only | None) -> None:
    """What clients of the HTTP API cannot be asked to do."""
    weights = config.weights
    if config.rollout.source == "redis":
        raise ConfigError(
            "rollout.source", 'found "redis" without env.id; only actors that step environments can be had elsewhere'
        )
    if not _from_clients(config):
        if config.tasks.source == "clients" and only != "train":
            raise ConfigError("tasks.source", 'found "clients", which goes with rollout.source = "http"')
        return
    if config.rollout.function:
        raise ConfigError(
            "rollout.function", 'found with rollout.source = "http", where clients are the rollout; leave one out'
        )
    if weights.partial in ("recycle", "restart") or (weights.interruption, weights.partial) == ("abort", "none"):
        raise ConfigError(
            "weights.partial",
            f'found "{weights.partial}" with rollout.source = "http", whose clients cannot begin anew; '
            "use continue, resume_prefix or restore, or weights.interruption = drain",
        )


def _check_control(config: RunConfig, only: Only | None) -> None:
    """What control RL cannot do, or not without something else."""
    env, policy, weights = config.env, config.policy, config.weights
    if only is not None:
        raise ConfigError(
            "env.id", f'found "{env.id}" with --only {only}, which is for groups of answers; leave it out'
        )
    if env.splits > 64:
        raise ConfigError("env.splits", f"found {env.splits}, use at most 64 (2 keep both sides busy)")
    if weights.interruption == "abort":
        raise ConfigError(
            "weights.interruption", 'found "abort" with env.id: half a trajectory is none; use never, drain or barrier'
        )
    if config.placement == "colocated":
        raise ConfigError(
            "placement", 'found "colocated" with env.id, whose policies have no memory to give up; use sync'
        )
    if config.training.stream_groups:
        raise ConfigError("training.stream_groups", f"found {config.training.stream_groups} with env.id; use 0")
    if policy.recurrent != "none" and policy.shared == "no":
        raise ConfigError("policy.shared", 'found "no" with policy.recurrent, whose memory both need; use auto or yes')
    if policy.recurrent != "none" and policy.network != "auto":
        raise ConfigError("policy.recurrent", "found with policy.network; a module of your own has no memory yet")
    if policy.normalise_observations and policy.network != "auto":
        raise ConfigError(
            "policy.normalise_observations",
            "found true with policy.network, whose module sees observations as they are; leave one out",
        )
    batched = env.id.startswith(("sim:", "envpool:"))
    if batched and env.frame_skip > 1:
        raise ConfigError(
            "env.frame_skip",
            f"found {env.frame_skip} with {env.id!r}, which makes whole vectors; use 1, or its own option",
        )
    if env.id.startswith("sim:") and env.frame_stack > 1:
        raise ConfigError(
            "env.frame_stack", f"found {env.frame_stack} with {env.id!r}, whose steps stay tensors; use 1"
        )
    if len(env.image_size) not in (0, 2):
        raise ConfigError("env.image_size", f"found {list(env.image_size)}; use [height, width]")
    if batched and (env.mode, env.autoreset) != ("auto", "auto"):
        key = "mode" if env.mode != "auto" else "autoreset"
        raise ConfigError(f"env.{key}", f'found "{getattr(env, key)}" with {env.id!r}, which has its own; use auto')
    parts = env.count * config.training.groups
    if policy.recurrent != "none" and config.training.minibatches > parts:
        raise ConfigError(
            "training.minibatches",
            f"found {config.training.minibatches} with policy.recurrent, whose batches are cut between environments: use at "
            f"most env.count * training.groups = {parts}",
        )
    if env.device != "cpu" and not stays_on_device(config):
        raise ConfigError(
            "env.device",
            f'found "{env.device}"; other devices are for env.id = "sim:...", placement = "sync", runtime = "local" and ppo, appo or impala '
            "without a memory",
        )
    if _from_clients(config):
        raise ConfigError("rollout.source", 'found "http" with env.id, whose environments are stepped here; use engine')
    source = config.evaluation.source
    if source not in ("", "episodes"):
        raise ConfigError("evaluation.source", f'found "{source}" with env.id, which has no tasks; use episodes')
    _check_algorithm(config)
    _check_remote_actors(config)
    _check_replay(config)


_ON_POLICY = ("ppo", "appo", "impala")
_READ_BY: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("value_clip", "value_coef", "entropy_coef", "normalise_advantages", "target_kl"), _ON_POLICY),
    "normalise_returns": _ON_POLICY,
    "lam": _ON_POLICY,
    "clip": ("ppo", "appo"),
    **dict.fromkeys(("clip_rho", "clip_c"), ("appo", "impala")),
    **dict.fromkeys(("double", "huber", "epsilon", "epsilon_share"), ("dqn",)),
    **dict.fromkeys(("target_rate", "target_every"), ("dqn", "sac")),
    **dict.fromkeys(("temperature", "target_entropy"), ("sac",)),
}
"""Keys of [algorithm] that only some kinds read."""


def _check_algorithm(config: RunConfig) -> None:
    """A key that the chosen algorithm would pass over in silence."""
    algorithm, default = config.algorithm, AlgorithmConfig()
    for key, kinds in _READ_BY.items():
        found = getattr(algorithm, key)
        if algorithm.kind not in kinds and found != getattr(default, key):
            raise ConfigError(
                f"algorithm.{key}",
                f'found {found} with algorithm.kind = "{algorithm.kind}", which does not read it (it is of {", ".join(kinds)}); leave it out',
            )
    for key in ("epochs", "minibatches"):
        found = getattr(config.training, key)
        if algorithm.kind not in _ON_POLICY and found != 1:
            raise ConfigError(
                f"training.{key}",
                f'found {found} with algorithm.kind = "{algorithm.kind}", whose updates replay.updates_per_step and replay.draw decide; use 1',
            )


def _check_replay(config: RunConfig) -> None:
    """What learning from a replay needs, and what it cannot do."""
    algorithm, policy, replay = config.algorithm, config.policy, config.replay
    needed = {"dqn": "q", "sac": "soft_actor"}.get(algorithm.kind, "actor_critic")
    if policy.kind != needed:
        raise ConfigError("policy.kind", f'found "{policy.kind}" with algorithm.kind = "{algorithm.kind}"; use auto')
    if algorithm.kind not in ("dqn", "sac"):
        return
    for key, found, needed_value in (
        ("policy.network", policy.network, "auto"),
        ("policy.recurrent", policy.recurrent, "none"),
        ("policy.normalise_observations", policy.normalise_observations, False),
        ("training.optimizer.schedule", config.training.optimizer.schedule, "constant"),
    ):
        if found != needed_value:
            shown = str(needed_value).lower()
            raise ConfigError(
                key, f"found {found!r} with algorithm.kind = {algorithm.kind!r}; only {shown} goes with it"
            )
    unit = config.env.count * config.env.steps
    bound = steps_ahead(config.buffer, config.staleness)
    fresh = (2 + (bound or 0)) * config.training.groups * unit
    if replay.capacity < max(fresh, replay.learning_starts):
        raise ConfigError(
            "replay.capacity",
            f"found {replay.capacity}; it must hold the trajectories that are not trained yet ({fresh} steps) and "
            f"replay.learning_starts ({replay.learning_starts})",
        )
    if replay.n_steps > config.env.steps:
        raise ConfigError(
            "replay.n_steps", f"found {replay.n_steps}, more than a trajectory has: env.steps = {config.env.steps}"
        )


def _warnings(config: RunConfig) -> list[str]:
    """What works, but not as one may think."""
    warnings = []
    lag, bound, training, sampling = (
        config.staleness.max_version_lag,
        ahead(config),
        config.training,
        config.rollout.sampling,
    )
    if lag is not None and (bound is None or lag < bound):
        distance = "without bound" if bound is None else f"{bound} batches"
        warnings.append(
            f"staleness.max_version_lag: {lag} is below how far rollout may run ahead ({distance}), so that samples will be dropped, long ones first"
        )
    elsewhere = config.rollout.source == "redis" and not _is_loopback(urlsplit(config.buffer.url).netloc)
    if elsewhere and config.weights.channel == "http" and _is_loopback(config.weights.address):
        warnings.append(
            f"weights.address: {config.weights.address} is reached from this machine alone, so that actors on others get "
            "no weights; give the address by which they reach it"
        )
    if config.env.id:
        return warnings
    if config.group.size == 1:
        warnings.append(f"group.size: 1 leaves {training.advantage.kind} nothing to compare with, every advantage is 0")
    if config.placement == "separate" and config.runtime == "local":
        warnings.append('runtime: "local" keeps engine and trainer in one process, where they do not overlap')
    truncated = sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0
    truncated = truncated or sampling.min_tokens > 0 or sampling.allowed_token_ids
    if truncated and not sampling.record_sampling_mask:
        warnings.append(
            "rollout.sampling: top_p, top_k, min_p, min_tokens and allowed_token_ids leave tokens out of the sampled distribution, and the trainer does not know which: set record_sampling_mask = true, or expect a larger log-probability difference"
        )
    if config.reward.functions and all(function.weight == 0 for function in config.reward.functions):
        warnings.append("reward.functions: every weight is 0, so that every reward is 0")
    if config.reward.workers == 0:
        warnings.append("reward.workers: 0 runs the functions in the controller, where one that hangs cannot be killed")
    if training.loss.kind == "reinforce" and training.epochs * training.minibatches > 1:
        warnings.append(
            f"training.loss.kind: reinforce has no ratio, yet a batch is used for {training.epochs * training.minibatches} updates; clipped allows for that"
        )
    if training.optimizer.warmup_steps >= training.steps:
        warnings.append(
            f"training.optimizer.warmup_steps: {training.optimizer.warmup_steps} lasts the whole run of {training.steps} steps"
        )
    return warnings
