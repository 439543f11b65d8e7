"""Turns an engine's config and a model folder into the embedded engine that samples from it."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from headrace.errors import ModelError
from headrace.policies.routers import Routers
from headrace.protocols import WorkerContext
from headrace.rollout.config import EngineConfig
from headrace.rollout.engines.driver import EngineDriver
from headrace.rollout.engines.models import ModelPlan, load_model, read_config, read_facts
from headrace.rollout.engines.native import generic, llama
from headrace.rollout.engines.native.core import NativeCore

if TYPE_CHECKING:
    from headrace.protocols import WeightChannel


class NativeEngine(EngineDriver):
    """The embedded engine behind `protocols.TextEngine`."""

    core: NativeCore


def build_native(
    context: WorkerContext,
    engine: EngineConfig,
    model_folder: str,
    dtype: str,
    channel: WeightChannel | None,
    kv_on_swap: str,
    *,
    inline: bool = False,
) -> NativeEngine:
    """The factory that runtimes call. `inline` runs passes in the event loop, for runs that must repeat bit for bit."""
    threads = 0 if inline else context.resources.threads
    if threads:
        torch.set_num_threads(threads)
    facts = read_facts(model_folder, engine.context_length)
    if engine.kv_tokens:
        _check_room(model_folder, dtype, engine.kv_tokens)
    read = partial(_weights, model_folder, dtype, facts.context_length, _form(engine))
    weights, builder = read()
    core = NativeCore(context, facts, weights, builder, channel, kv_on_swap, engine, dtype, lambda: read()[0])
    return NativeEngine(core, inline=inline, threads=threads)


def _form(engine: EngineConfig) -> str:
    """How linear layers keep their weights. A packed product may sum in another order for another number of rows, so
    fixed shapes go without."""
    if engine.weights != "model":
        return engine.weights
    return "plain" if engine.deterministic else "packed"


@torch.inference_mode()
def _weights(folder: str, dtype: str, context_length: int, form: str) -> tuple[Any, Any]:
    """The folder's weights, and the function that builds others of the same model."""
    if llama.fits(read_config(folder)):
        model = load_model(folder, dtype, "eager")
        shape = llama.shape_of(model, context_length, form)
        builder = partial(llama.build, shape, form)
        return builder(dict(model.state_dict()), None), builder
    return _generic_weights(folder, dtype, form)


def _generic_weights(folder: str, dtype: str, form: str) -> tuple[Any, Any]:
    generic.register()
    model = load_model(folder, dtype, generic.ATTENTION)
    if form not in ("plain", "packed") and Routers.of(model):
        raise ModelError(
            f'rollout.engine.weights: found "{form}", which models with experts do not have (nearly all their weights are '
            'no linear layers); use "model"'
        )
    if form == "plain" and Routers.of(model):
        # Otherwise the tokens of one expert are multiplied together, so how many they are changes their bits.
        model.set_experts_implementation("batched_mm")
    return generic.GenericWeights(model, form), partial(generic.build, ModelPlan(model), form)


def _check_room(folder: str, dtype: str, tokens: int) -> None:
    """Keys and values beyond all memory would fail in the first pass, or end the process."""
    text = read_config(folder).get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    needed = 2 * tokens * text.num_hidden_layers * heads * width * torch.finfo(getattr(torch, dtype)).bits // 8
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        raise ModelError(
            f"rollout.engine.kv_tokens: keys and values of {tokens} tokens take {needed / 1e9:.1f} GB, and this machine has "
            f"{there / 1e9:.1f} GB"
        )
