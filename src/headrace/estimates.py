"""Turns a config and a model's shape into what a step consists of, in words, and what each part keeps in memory, in bytes."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.config import RunConfig, ahead
from headrace.errors import ModelError
from headrace.training.config import LoraConfig

DEFAULT_KV_TOKENS = 32_768
"""The engine's own bound where the config names none."""
PROCESS_BYTES = 450_000_000
"""A Python process with torch loaded, measured; a reward worker without it takes a sixth."""
BYTES_PER_DTYPE = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """parameters counts tied weights once; context is 0 where the model names no limit."""

    parameters: int
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    context: int


def model_shape(folder: Path) -> ModelShape:
    """The shape of the model in a Hugging Face folder, from its config and the headers of its weight files."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError and its own for one bad file
        raise ModelError(f"model.path: {folder} has no config that can be read: {error}") from error
    text = config.get_text_config()
    return ModelShape(
        parameters=_parameters(folder, config),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        inner=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        heads=text.num_attention_heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        head_size=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        vocabulary=text.vocab_size,
        context=getattr(text, "max_position_embeddings", 0) or 0,
    )


def _parameters(folder: Path, config: Any) -> int:
    """How many numbers the weight files hold; tied ones are stored once."""
    files = sorted(folder.glob("model*.safetensors"))
    if files:
        return sum(math.prod(tensor["shape"]) for file in files for tensor in _safetensors_header(file))
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())


def _safetensors_header(file: Path) -> list[dict[str, Any]]:
    """Name, type and shape of every tensor, without the tensors."""
    try:
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            if size > file.stat().st_size:
                raise ValueError("its header is longer than the file")
            header = json.loads(opened.read(size))
        return [tensor for name, tensor in header.items() if name != "__metadata__"]
    except (OSError, ValueError) as error:
        raise ModelError(f"model.path: {file} is no whole safetensors file: {error}") from None


def context_length(config: RunConfig, shape: ModelShape) -> int:
    """The longest prompt plus completion; 0 where nothing bounds it."""
    bounds = [bound for bound in (config.rollout.engine.context_length, shape.context) if bound]
    return min(bounds, default=0)


def kv_tokens(config: RunConfig, shape: ModelShape) -> int:
    """Tokens that one engine's cache of keys and values holds."""
    engine = config.rollout.engine
    full = engine.max_running * (context_length(config, shape) or DEFAULT_KV_TOKENS)
    return engine.kv_tokens or min(full, DEFAULT_KV_TOKENS)


def memory_parts(config: RunConfig, shape: ModelShape, prompt_tokens: int) -> dict[str, int]:
    """Part -> bytes, over all processes of the (resolved) config, for prompts of that length.

    The larger terms only: expect some tens of percent more or less.
    """
    training, engines = config.training, config.rollout.engine.count
    weights = shape.parameters * BYTES_PER_DTYPE[config.model.dtype]
    per_token = shape.hidden * 12 + shape.inner * 3 + shape.heads * shape.head_size * 4
    kept_layers = 1 if training.gradient_checkpointing else shape.layers
    # Siblings share their prompt, so an update's tokens are one prompt and `size` answers for each of its groups.
    answers = config.group.size * config.rollout.sampling.max_tokens
    tokens = min(training.micro_tokens, training.groups // training.minibatches * (prompt_tokens + answers))
    activations = tokens * 4 * (kept_layers * per_token + shape.layers * shape.hidden)
    processes = 2 + engines if config.runtime in ("processes", "ray") else 1
    lora = training.lora.kind
    # Adapters are float32 whatever the base is, and the base itself is the reference.
    adapters = 4 * adapter_parameters(training.lora, shape) if lora != "off" else 0
    sent = adapters if lora == "adapter" else weights
    parts = {
        "trainer: weights": weights,
        "trainer: adapters": adapters,
        "trainer: gradients": adapters or weights,
        "trainer: AdamW moments": 2 * (adapters or weights),
        "trainer: reference model": weights if training.loss.kl_coef > 0 and lora == "off" else 0,
        "trainer: merged weights, at a sync": weights if lora == "merged" else 0,
        f"trainer: activations of {tokens:,} tokens": activations,
        f"trainer: logits of {training.logits_chunk:,} tokens": training.logits_chunk * shape.vocabulary * 4 * 3,
        f"engine: live and staged weights, {engines}x": (weights + sent) * engines,
        f"engine: {kv_tokens(config, shape):,} tokens of keys and values, {engines}x": engines
        * kv_tokens(config, shape)
        * shape.layers
        * 2
        * shape.kv_heads
        * shape.head_size
        * BYTES_PER_DTYPE[config.model.dtype],
        f"weight channel: {config.weights.channel}": sent * _copies(config.weights.channel, engines),
        f"processes: {processes} with torch, {config.reward.workers} reward workers": PROCESS_BYTES * processes
        + PROCESS_BYTES // 6 * config.reward.workers,
    }
    return {part: size for part, size in parts.items() if size}


def adapter_parameters(lora: LoraConfig, shape: ModelShape) -> int:
    """Of a model whose layers are the usual seven; names of others count nothing."""
    heads, kv_heads = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    sides = {
        "q_proj": shape.hidden + heads,
        "k_proj": shape.hidden + kv_heads,
        "v_proj": shape.hidden + kv_heads,
        "o_proj": heads + shape.hidden,
        "gate_proj": shape.hidden + shape.inner,
        "up_proj": shape.hidden + shape.inner,
        "down_proj": shape.inner + shape.hidden,
    }
    return shape.layers * lora.rank * sum(sides.get(name, 0) for name in lora.target_modules or sides)


def _copies(channel: str, engines: int) -> int:
    """Sets of weights that a channel holds: the publisher's two versions, and one at each receiver that gets a copy."""
    if channel in ("collective", "ipc", "http"):
        return 2 + engines
    return 1 if channel == "filesystem" else 2


def count(number: int, word: str) -> str:
    """`1 batch`, `2 batches`, `2 trajectories`."""
    plural = f"{word}es" if word.endswith(("s", "ch", "x")) else f"{word}s"
    plural = f"{word[:-1]}ies" if word.endswith("ory") else plural
    return f"{number:,} {word if number == 1 else plural}"


def batch_arithmetic(config: RunConfig) -> list[str]:
    """What a step of the (resolved) config consists of, in sentences."""
    training, group, weights, rollout = config.training, config.group, config.weights, config.rollout
    samples = training.groups * group.size
    updates = training.epochs * training.minibatches
    per_update = training.groups // training.minibatches
    bound, lag = ahead(config), config.staleness.max_version_lag
    lines = [
        f"A step trains on {count(training.groups, 'group')} of {count(group.size, 'answer')}: {count(samples, 'sample')} "
        f"of at most {count(rollout.sampling.max_tokens, 'token')}, in {count(training.epochs, 'pass')} of "
        f"{count(training.minibatches, 'optimiser step')} over {count(per_update, 'group')} each"
        f"{f' ({updates} updates a batch)' if updates > 1 else ''}.",
        f"{count(training.steps, 'step')} train on {count(training.steps * training.groups, 'group')}, "
        f"{count(training.steps * samples, 'sample')}.",
    ]
    running = min(rollout.max_in_flight, _room(config) or rollout.max_in_flight)
    seats = rollout.engine.count * rollout.engine.max_running
    together = running * group.size
    waiting = f"; {together - seats:,} of them wait their turn" if together > seats else ""
    lines.append(
        f"At most {count(running, 'group')} ({count(together, 'sample')}) run at a time; {count(rollout.engine.count, 'engine')} "
        f"decode{'s' if rollout.engine.count == 1 else ''} {seats:,} side by side{waiting}."
    )
    if bound is None:
        lines.append("Rollout may run ahead of training without a bound on batches.")
    elif bound == 0:
        lines.append("Generation and training alternate: every sample comes from the newest weights.")
    else:
        held = _room(config)
        lines.append(
            f"Rollout may run {count(bound, 'batch')} ahead: {held:,} groups are held at most, from admission until the weights "
            "trained on them are live."
        )
    lines.append(
        f"New weights go to the engines after every {'step' if weights.every_steps == 1 else f'{weights.every_steps} steps'} "
        f"by {weights.channel}; what is being generated then: {weights.interruption}, {weights.partial}."
    )
    if lag is not None:
        lines.append(
            f"Samples with a token more than {count(lag, 'version')} old are {'dropped' if config.staleness.on_stale == 'drop' else 'recycled'}."
        )
    return lines


def _room(config: RunConfig) -> int | None:
    """Groups that may be held at one time; None: no bound."""
    bound = ahead(config)
    return None if bound is None else (1 + bound) * config.training.groups + config.rollout.oversample


def readable_bytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
