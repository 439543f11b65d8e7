"""Turns the tensors of a Llama-like model (Llama, Qwen2, Qwen3) into fused weights, and a pass over them into logits.

Written out: one matrix product for query, key and value, one for gate and up, no module calls. Everything else a model
may have (experts, sliding windows, scaled embeddings) goes through `generic`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from headrace.cores import copy_beside
from headrace.pages import LargePages
from headrace.rollout.engines.models import check_fit
from headrace.rollout.engines.native.attention import KeyValues, Pass, attend
from headrace.rollout.engines.native.linear import FORMS, Linear

if TYPE_CHECKING:
    from headrace.rollout.engines.native.compiled import CompiledSteps


ROOM = 110
"""Per cent of the weights' bytes that their copies have: some are padded."""


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
    size: int
    """Numbers in it."""
    steps: TorchSteps | CompiledSteps
    """How passes run, of this one engine."""


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


def shape_of(model: Any, context_length: int, form: str) -> LlamaShape:
    config = model.config
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    cos, sin = model.model.rotary_emb(torch.zeros(1, dtype=torch.float32), torch.arange(context_length)[None])
    return LlamaShape(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        eps=config.rms_norm_eps,
        cos=cos[0].to(model.dtype),
        # The first half is negated: rotating is then x * cos + roll(x) * sin, with no sign change of its own.
        sin=_signed(sin[0]).to(model.dtype),
        dtype=model.dtype,
        tied=bool(config.tie_word_embeddings),
        published={name: tensor.shape for name, tensor in model.state_dict().items()},
        size=sum(tensor.numel() for tensor in model.state_dict().values()),
        steps=steps_for(model.dtype, head_dim, heads // kv_heads, form),  # before anybody waits for a token
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
        self.copies: dict[str, torch.Tensor] = {}
        """What products run from, where it is not that."""
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
        with self.shape.steps.gathered(self.shape.size * batch.token_ids.numel()):
            return self._forward(batch, store, self.shape.steps)

    def _forward(self, batch: Pass, store: KeyValues, steps: TorchSteps | CompiledSteps) -> torch.Tensor:
        s = self.shape
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
    """The steps of a pass as operations of torch, on any device and in any precision."""

    def gathered(self, multiplications: int) -> AbstractContextManager[None]:
        """For the time of a pass of so many."""
        return nullcontext()

    def linear(
        self, form: str, weight: torch.Tensor, bias: torch.Tensor | None, memory: torch.Tensor | None, pages: LargePages
    ) -> Linear:
        """The product with a weight, from a copy in one of `linear.FORMS`. memory: where the last such copy was; pages: for one
        where there was none"""
        return FORMS[form](weight, bias)

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


def steps_for(dtype: torch.dtype, size: int, shared: int, form: str = "packed") -> TorchSteps | CompiledSteps:
    """Those that this machine can run, for one engine; compiled ones are compiled here, or read from where they were kept.

    size: of a head; shared: heads that have one key; form: of the copies that products run from (`linear.FORMS`)
    """
    if dtype != torch.float32:
        return TorchSteps()
    try:
        from headrace.rollout.engines.native.compiled import CompiledSteps

        return CompiledSteps(size, shared, form)
    except Exception as error:  # a processor without numba, nowhere to keep what it compiles, a full disk, ...
        warnings.warn(f"the loops of a pass are not compiled, so passes are slower: {error!r}", stacklevel=2)
        return TorchSteps()


def build(
    shape: LlamaShape, form: str, tensors: Mapping[str, torch.Tensor], spare: LlamaWeights | None
) -> LlamaWeights:
    """Named tensors into fused weights, in the memory of `spare`: fresh memory costs more than the copying.

    form: of the copies that products run from (`linear.FORMS`)
    """
    weights = LlamaWeights(shape)
    if spare is not None:
        weights.memory, weights.copies = spare.memory, spare.copies
    check_fit(tensors, shape.published, ("lm_head.weight",) if shape.tied else ())
    pages = LargePages(0 if weights.copies else ROOM * shape.size * shape.dtype.itemsize // 100)

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
            copy_beside(memory[at : at + part.shape[0]], part)
            at += part.shape[0]
        return memory

    def product(name: str, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        made = shape.steps.linear(form, weight, bias, weights.copies.get(name), pages)
        if made.panels is not None:
            weights.copies[name] = made.panels
        return made

    def linear(*names: str) -> Linear:
        weight = take(*(f"{name}.weight" for name in names))
        return product(names[0], weight, take(*(f"{name}.bias" for name in names), optional=True))

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
    weights.head = product("lm_head", weights.embedding if shape.tied else take("lm_head.weight"))
    return weights
