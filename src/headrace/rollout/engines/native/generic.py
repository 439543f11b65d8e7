"""Turns any Hugging Face causal LM into an engine's weights, through the library's own hook for attention functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from headrace.errors import ModelError
from headrace.policies.routers import Routers
from headrace.rollout.engines.models import ModelPlan, copy_into, named_weights
from headrace.rollout.engines.native.attention import KeyValues, Pass, attend
from headrace.rollout.engines.native.linear import FORMS, Linear

ATTENTION = "headrace_blocks"
ROUTES = -1
"""The layer of the store under which the experts of each token lie, [slots, layers, top_k]."""


def register() -> None:
    """Make the name known to transformers. Repeating it changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: None)


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    headrace_pass: Pass | None = None,
    headrace_store: KeyValues | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, heads, N, D], key and value [1, kv_heads, N, D] into [1, N, heads, D]."""
    if s_aux is not None:
        raise ModelError("this model's attention has sink terms, which the native engine does not compute")
    if headrace_pass is None:
        raise ModelError("this model does not hand keyword arguments on to its attention function")
    out = attend(
        module.layer_idx,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        headrace_pass,
        headrace_store,
        scaling if scaling is not None else query.shape[-1] ** -0.5,
        sliding_window,
        softcap,
    )
    return out[None], None


class GenericWeights:
    """One version of the whole model.

    form: of the copies that linear layers compute from (`linear.FORMS`); error: the largest relative one of these
    """

    def __init__(self, model: Any, form: str) -> None:
        self.model = model
        self.routers = Routers.of(model)
        self.error = 0.0
        if form != "plain":
            for layer in model.modules():
                if type(layer) is nn.Linear:
                    product = FORMS[form](layer.weight, layer.bias)
                    layer.forward = partial(_through, product)
                    self.error = max(self.error, product.error)

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors as they were published."""
        return named_weights(self.model)

    def forward(self, batch: Pass, store: KeyValues) -> torch.Tensor:
        """[R, V] logits of the rows that the pass asks for."""
        logits = self.model(
            input_ids=batch.token_ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            logits_to_keep=batch.logit_rows,
            headrace_pass=batch,
            headrace_store=store,
        ).logits[0]
        if self.routers:
            taken = self.routers.rows(slice(None))
            batch.routes = taken[batch.logit_rows.numpy()]  # numpy reads a tensor of one index as a number
            # Beside keys and values, so that whoever shares or takes those over knows them too.
            kept = torch.from_numpy(taken if taken.dtype == np.uint8 else taken.astype(np.int16))
            store.write(ROUTES, batch.slots, kept, kept[:, :0])
        return logits


def _through(product: Linear, x: torch.Tensor) -> torch.Tensor:
    return product(x.flatten(0, -2)).unflatten(0, x.shape[:-1])


def build(
    plan: ModelPlan, form: str, tensors: Mapping[str, torch.Tensor], spare: GenericWeights | None
) -> GenericWeights:
    """Named tensors into a model of the planned kind, in the memory of `spare`."""
    model = spare.model if spare is not None else plan.empty()
    copy_into(model, tensors)
    return GenericWeights(model, form)
