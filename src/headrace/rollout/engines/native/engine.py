"""Turns an engine's config and a model folder into the embedded engine that samples from it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from headrace.errors import ModelError
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
        builder = partial(llama.build, llama.shape_of(model, context_length), form)
        return builder(dict(model.state_dict()), None), builder
    if form not in ("plain", "packed"):
        kind = read_config(folder).model_type
        raise ModelError(
            f'rollout.engine.weights: found "{form}", which Llama, Qwen2 and Qwen3 have; {kind} needs "model"'
        )
    generic.register()
    model = load_model(folder, dtype, generic.ATTENTION)
    return generic.GenericWeights(model), partial(generic.build, ModelPlan(model))
