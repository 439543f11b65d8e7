"""Turns an engine's config and a model folder into the plain reference: one full Hugging Face forward pass for each token.

Slow on purpose. Nothing is batched, nothing is cached, so there is nothing that could be stale or mixed up: what the
native engine is compared with.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from headrace.errors import ModelError
from headrace.policies.routers import Routers
from headrace.protocols import WorkerContext
from headrace.rollout.config import EngineConfig
from headrace.rollout.engines.core import Core
from headrace.rollout.engines.driver import EngineDriver
from headrace.rollout.engines.models import ModelPlan, copy_into, load_model, named_weights, read_facts

if TYPE_CHECKING:
    from headrace.protocols import WeightChannel


class HfCore(Core):
    """One pass: every running sequence, one after another, is computed from its first token on. `weights` is a model."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._plan = ModelPlan(self.weights)
        self.has_experts = bool(Routers.of(self.weights))

    @torch.inference_mode()
    def advance(self) -> None:
        start = time.perf_counter()
        for sequence in [one for one in self.waiting if self.admissible(one)]:
            if len(self.running) < self.max_running:
                self.waiting.remove(sequence)
                self.running.append(sequence)
                self.prompt_tokens += sequence.prompt_length
        for sequence in list(self.running):
            sequence.started = True
            logits = self.weights(input_ids=torch.tensor([sequence.ids]), use_cache=False, logits_to_keep=1).logits
            routers = Routers.of(self.weights)
            if sequence.routes is not None and sequence.prompt_routes is None:
                sequence.prompt_routes = routers.rows(slice(sequence.prompt_length - 1))
            self.draw([sequence], logits[0], routers.rows(slice(-1, None)) if routers else None)
        self.decode_s += time.perf_counter() - start

    @torch.inference_mode()
    def build(self, tensors: Any, spare: Any) -> Any:
        model = spare if spare is not None else self._plan.empty()
        copy_into(model, tensors)
        return model

    def named(self) -> Any:
        return named_weights(self.weights)

    def weights_changed(self, recompute: bool) -> None:
        """Every token is computed anew in each pass: nothing of the old weights is kept."""

    def drop_cache(self) -> None:
        """There is none."""


class HfEngine(EngineDriver):
    """The reference engine behind `protocols.TextEngine`."""

    core: HfCore


def build_hf(
    context: WorkerContext,
    engine: EngineConfig,
    model_folder: str,
    dtype: str,
    channel: WeightChannel | None,
    kv_on_swap: str,
    *,
    inline: bool = False,
) -> HfEngine:
    """The factory that runtimes call; its arguments are those of the native engine's."""
    if engine.weights != "model":
        raise ModelError(f'rollout.engine.weights: found "{engine.weights}", the hf engine has "model" only')
    threads = 0 if inline else context.resources.threads
    if threads:
        torch.set_num_threads(threads)
    facts = read_facts(model_folder, engine.context_length)
    with torch.inference_mode():
        model = load_model(model_folder, dtype, "eager")
    core = HfCore(context, facts, model, channel, kv_on_swap, engine.max_running)
    return HfEngine(core, inline=inline, threads=threads)
