"""Which configs are refused, and which are warned of: impossible pairs, what would be passed over in silence, what cannot start."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal
from urllib.parse import urlsplit

from headrace.config import RunConfig, ahead, from_clients, resolve, stays_on_device
from headrace.errors import ConfigError
from headrace.exchange.config import split_address, steps_ahead
from headrace.rollout.config import COLDEST
from headrace.training.config import AlgorithmConfig, TrainingConfig


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
    if weights.address:
        split_address(weights.address)
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
    scored = config.reward.functions or config.rollout.function or from_clients(config)
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
    if not from_clients(config):
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
    whole = policy.recurrent != "none"
    parts = env.count * config.training.groups * (1 if whole else env.steps)
    if config.training.minibatches > parts:
        cut = (
            "between environments with policy.recurrent: env.count" if whole else "between steps: env.count * env.steps"
        )
        raise ConfigError(
            "training.minibatches",
            f"found {config.training.minibatches}, and a batch is cut {cut} * training.groups = {parts}; use at most so many",
        )
    if env.device != "cpu" and not stays_on_device(config):
        raise ConfigError(
            "env.device",
            f'found "{env.device}"; other devices are for env.id = "sim:...", placement = "sync", runtime = "local" and ppo, appo or impala '
            "without a memory",
        )
    if from_clients(config):
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
