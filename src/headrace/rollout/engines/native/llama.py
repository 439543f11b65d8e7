"""Turns the tensors of a Llama-like model (Llama, Qwen2, Qwen3) into fused weights, and a pass over them into logits.

Written out: one matrix product for query, key and value, one for gate and up, no module calls. Everything else a model
may have (experts, sliding windows, scaled embeddings) goes through `generic`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from headrace.rollout.engines.models import check_fit
from headrace.rollout.engines.native.attention import KeyValues, Pass, attend, attend_stretch
from headrace.rollout.engines.native.linear import FORMS, Linear


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """What the forward pass needs to know besides the weights."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    cos: torch.Tensor
    """[context, head_dim]"""
    sin: torch.Tensor
    dtype: torch.dtype
    tied: bool
    """The output head is the embedding, whether or not it is published twice."""
    published: Mapping[str, torch.Size]
    """Names and shapes of a publication."""


def fits(config: Any) -> bool:
    """Whether the written-out pass computes what this model does."""
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        config.model_type in ("llama", "qwen2", "qwen3")
        and config.hidden_act == "silu"
        and rope.get("rope_type", "default") in ("default", "linear", "llama3", "yarn")
        and rope.get("partial_rotary_factor", 1.0) == 1.0
        and not any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ())
    )


def shape_of(model: Any, context_length: int) -> LlamaShape:
    config = model.config
    cos, sin = model.model.rotary_emb(torch.zeros(1, dtype=torch.float32), torch.arange(context_length)[None])
    return LlamaShape(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        eps=config.rms_norm_eps,
        cos=cos[0].to(model.dtype),
        # The first half is negated: rotating is then x * cos + roll(x) * sin, with no sign change of its own.
        sin=_signed(sin[0]).to(model.dtype),
        dtype=model.dtype,
        tied=bool(config.tie_word_embeddings),
        published={name: tensor.shape for name, tensor in model.state_dict().items()},
    )


def _signed(sin: torch.Tensor) -> torch.Tensor:
    half = sin.shape[-1] // 2
    return torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)


@dataclass(slots=True)
class Layer:
    """One layer's weights; a norm that the model has not is None."""

    before: torch.Tensor
    qkv: Linear
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    out: Linear
    after: torch.Tensor
    gate_up: Linear
    down: Linear


class LlamaWeights:
    """One version of all weights. Never changed while it is live."""

    def __init__(self, shape: LlamaShape) -> None:
        self.shape = shape
        self.layers: list[Layer] = []
        self.embedding = self.norm = torch.empty(0)
        self.head = Linear(torch.empty(0))
        self.memory: dict[str, torch.Tensor] = {}
        self.parts: dict[str, list[tuple[str, int]]] = {}
        """What lies together under one name of `memory`: names as published, and their rows."""

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors as they were published."""
        for first, parts in self.parts.items():
            sizes = [rows for _, rows in parts]
            yield from zip([name for name, _ in parts], self.memory[first].split(sizes), strict=True)

    @property
    def error(self) -> float:
        """Largest relative error of the weights that products run from."""
        linears = [one for layer in self.layers for one in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        return max(one.error for one in (*linears, self.head))

    def forward(self, batch: Pass, store: KeyValues) -> torch.Tensor:
        """[R, V] logits of the rows that the pass asks for."""
        s = self.shape
        steps = steps_for(s.dtype, s.head_dim, s.heads // s.kv_heads)
        x = F.embedding(batch.token_ids, self.embedding)
        due = torch.zeros_like(x)
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv(steps.norm(x, due, layer.before, s.eps))
            mixed = steps.mix(index, qkv, layer, s, batch, store)
            if index == s.layers - 1 and batch.logit_rows.numel() < x.shape[0] and not batch.one_by_one:
                # Nothing after the last attention is needed of rows whose logits nobody reads.
                mixed, x = mixed[batch.logit_rows], x[batch.logit_rows]
            due = layer.out(mixed)
            gate_up = layer.gate_up(steps.norm(x, due, layer.after, s.eps))
            due = layer.down(steps.gate(gate_up))
        normed = steps.norm(x, due, self.norm, s.eps)
        return self.head(normed if normed.shape[0] == batch.logit_rows.numel() else normed[batch.logit_rows])


class TorchSteps:
    """What stands between the matrix products of a pass, on any device and in any precision."""

    def norm(self, x: torch.Tensor, due: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Add what is due to `x`, in place, and return the RMS norm of the sum."""
        x += due
        return F.rms_norm(x, (x.shape[1],), weight, eps)

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[N, 2 W] into [N, W]"""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def mix(
        self, index: int, qkv: torch.Tensor, layer: Layer, s: LlamaShape, batch: Pass, store: KeyValues
    ) -> torch.Tensor:
        """[N, (heads + 2 kv_heads) D] into what attention makes of it [N, heads * D]; keys and values are kept."""
        rows, turned = qkv.shape[0], s.heads + s.kv_heads
        qkv = qkv.view(rows, turned + s.kv_heads, s.head_dim)
        qk, values = qkv[:, :turned], qkv[:, turned:]
        if layer.query_norm is not None:
            norms = ((qk[:, : s.heads], layer.query_norm), (qk[:, s.heads :], layer.key_norm))
            qk = torch.cat([F.rms_norm(part, (s.head_dim,), weight, s.eps) for part, weight in norms], dim=1)
        cos, sin = s.cos[batch.positions][:, None], s.sin[batch.positions][:, None]
        qk = torch.addcmul(qk * cos, qk.roll(s.head_dim // 2, dims=-1), sin)
        mixed = attend(index, qk[:, : s.heads], qk[:, s.heads :], values, batch, store, s.head_dim**-0.5)
        return mixed.reshape(rows, -1)


class CompiledSteps:
    """The same as loops of `kernels`, for float32 on a processor."""

    def __init__(self, kernels: Any, size: int, shared: int) -> None:
        self._kernels = kernels
        self._attend = kernels.attend_for(size, shared)

    def norm(self, x: torch.Tensor, due: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty_like(x)
        self._kernels.add_norm(x.numpy(), due.numpy(), weight.numpy(), np.float32(eps), out.numpy())
        return out

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        self._kernels.gate(gate_up.numpy(), out.numpy())
        return out

    def mix(
        self, index: int, qkv: torch.Tensor, layer: Layer, s: LlamaShape, batch: Pass, store: KeyValues
    ) -> torch.Tensor:
        rows = qkv.shape[0]
        qkv = qkv.view(rows, s.heads + 2 * s.kv_heads, s.head_dim)
        keys, values = store.of(index, qkv[:, s.heads : s.heads + s.kv_heads])
        norms = [_NONE if norm is None else norm.numpy() for norm in (layer.query_norm, layer.key_norm)]
        self._kernels.place(
            qkv.numpy(), s.cos.numpy(), s.sin.numpy(), batch.positions.numpy(), batch.slots.numpy(), *norms,
            np.float32(s.eps), keys.numpy(), values.numpy(),
        )  # fmt: skip
        out = qkv.new_zeros(rows, s.heads * s.head_dim)
        scale = s.head_dim**-0.5
        for stretch in batch.stretches:
            part = slice(stretch.start, stretch.stop)
            out[part] = attend_stretch(qkv[part, : s.heads], keys, values, stretch.slots, scale).flatten(1)
        if batch.tables is not None:
            self._attend(
                qkv.numpy(), batch.decode_start, batch.tables.numpy(), batch.lengths.numpy(), keys.numpy(),
                values.numpy(), np.float32(scale), out.numpy(),
            )  # fmt: skip
        return out


_NONE = np.zeros(0, np.float32)


@cache
def steps_for(dtype: torch.dtype, size: int, shared: int) -> TorchSteps | CompiledSteps:
    """Those that this machine can run; compiled ones are compiled here, or read from where they were kept.

    size: of a head; shared: heads that have one key
    """
    if dtype != torch.float32:
        return TorchSteps()
    try:
        from headrace.rollout.engines.native import kernels

        kernels.compile_all(size, shared)
    except Exception as error:  # a processor without numba, nowhere to keep what it compiles, a full disk, ...
        warnings.warn(f"the loops between products are not compiled, so passes are slower: {error!r}", stacklevel=2)
        return TorchSteps()
    return CompiledSteps(kernels, size, shared)


def build(
    shape: LlamaShape, form: str, tensors: Mapping[str, torch.Tensor], spare: LlamaWeights | None
) -> LlamaWeights:
    """Named tensors into fused weights, in the memory of `spare`: fresh memory costs more than the copying.

    form: of the copies that products run from (`linear.FORMS`)
    """
    product = FORMS[form]
    weights = LlamaWeights(shape)
    weights.memory = spare.memory if spare is not None else {}
    check_fit(tensors, shape.published, ("lm_head.weight",) if shape.tied else ())

    def take(*names: str, optional: bool = False) -> torch.Tensor | None:
        if optional and names[0] not in tensors:
            return None
        found = [tensors[name] for name in names]
        size = (sum(part.shape[0] for part in found), *found[0].shape[1:])
        memory = weights.memory.get(names[0])
        if memory is None or memory.shape != size:
            memory = weights.memory[names[0]] = torch.empty(size, dtype=shape.dtype)
        weights.parts[names[0]] = [(name, part.shape[0]) for name, part in zip(names, found, strict=True)]
        at = 0
        for part in found:
            memory[at : at + part.shape[0]].copy_(part)
            at += part.shape[0]
        return memory

    def linear(*names: str) -> Linear:
        weight = take(*(f"{name}.weight" for name in names))
        return product(weight, take(*(f"{name}.bias" for name in names), optional=True))

    for index in range(shape.layers):
        at = f"model.layers.{index}."
        weights.layers.append(
            Layer(
                before=take(f"{at}input_layernorm.weight"),
                qkv=linear(*(f"{at}self_attn.{name}_proj" for name in "qkv")),
                query_norm=take(f"{at}self_attn.q_norm.weight", optional=True),
                key_norm=take(f"{at}self_attn.k_norm.weight", optional=True),
                out=linear(f"{at}self_attn.o_proj"),
                after=take(f"{at}post_attention_layernorm.weight"),
                gate_up=linear(f"{at}mlp.gate_proj", f"{at}mlp.up_proj"),
                down=linear(f"{at}mlp.down_proj"),
            )
        )
    weights.embedding = take("model.embed_tokens.weight")
    weights.norm = take("model.norm.weight")
    weights.head = product(weights.embedding if shape.tied else take("lm_head.weight"))
    return weights
