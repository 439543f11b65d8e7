"""Turns a model folder into a policy: packed batch in, log-probabilities of its targets out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from headrace.errors import ModelError
from headrace.policies.routers import Routers
from headrace.training.logprobs import Head, logit_rows, target_logprobs
from headrace.training.packed import ATTENTION_NAME, register, tree_attention
from headrace.types import BatchCounts, TokenBatch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def dtype_name(dtype: torch.dtype) -> str:
    return next(name for name, known in DTYPES.items() if known == dtype)


class Policy:
    """A causal LM that runs packed batches. Dropout is off: the ratio must compare the same network."""

    def __init__(self, model: nn.Module, *, logits_chunk: int, gradient_checkpointing: bool = False) -> None:
        self.model = model
        self.logits_chunk = logits_chunk
        self.gradient_checkpointing = gradient_checkpointing
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        if gradient_checkpointing:
            # The method has its new name since transformers 5.2x.
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False})
        add_in_place(model)
        # Checkpointing acts in training mode only; nothing else depends on the mode once dropout is off.
        model.train(gradient_checkpointing)
        self._routers = Routers.of(model)
        self._scale = _logit_scale(model.config)
        self._softcap = getattr(model.config, "final_logit_softcapping", None)

    @property
    def device(self) -> torch.device:
        return self.model.device

    def head(self) -> Head:
        layer = self.model.get_output_embeddings()
        into = layer.weight.grad if layer.weight.requires_grad else None
        return Head(layer.weight, getattr(layer, "bias", None), self._softcap, self._scale, into)

    def hidden(self, batch: TokenBatch) -> Tensor:
        """[N, D] last hidden states of all input rows."""
        ids = torch.from_numpy(np.asarray(batch.token_ids, dtype=np.int64)).to(self.device)
        positions = torch.from_numpy(np.asarray(batch.position_ids, dtype=np.int64)).to(self.device)
        tree = tree_attention(batch, self.device)
        if self._routers:
            routes = batch.expert_routing
            # It stays until the next batch: gradient checkpointing computes this one again.
            self._routers.forced = torch.from_numpy(routes).to(self.device, torch.int64) if routes is not None else None
        output = self.model.base_model(
            input_ids=ids[None], position_ids=positions[None], use_cache=False, tree=tree, attention_mask=None
        )
        return output.last_hidden_state[0]

    def logprobs(self, batch: TokenBatch, *, entropy: bool = True) -> tuple[Tensor, Tensor | None]:
        """[M] log-probabilities of the targets under the sampled distribution, and entropies [M]."""
        rows = logit_rows(batch, self.device)
        return target_logprobs(self.hidden(batch), self.head(), rows, chunk=self.logits_chunk, entropy=entropy)


class _Linear(torch.autograd.Function):
    """`nn.Linear` whose product in the backward pass adds to the weight's gradient where that stands."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x)
        ctx.weight = weight
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (x,), weight = ctx.saved_tensors, ctx.weight
        rows, inputs = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        grad_weight = weight.grad.addmm_(rows.t(), inputs) if weight.grad is not None else rows.t() @ inputs
        return (
            grad @ weight if ctx.needs_input_grad[0] else None,
            grad_weight if weight.grad is None else None,
            rows.sum(dim=0) if ctx.needs_input_grad[2] else None,
        )


class _Embedding(torch.autograd.Function):
    """`nn.Embedding` that adds to the gradient of the rows it looked up, and makes no gradient of all rows."""

    @staticmethod
    def forward(ctx, ids, weight, padding):
        ctx.save_for_backward(ids)
        ctx.weight, ctx.padding = weight, padding
        return F.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (ids,), weight = ctx.saved_tensors, ctx.weight
        ids, rows = ids.reshape(-1), grad.reshape(-1, grad.shape[-1])
        if ctx.padding is not None:
            rows = rows.masked_fill((ids == ctx.padding)[:, None], 0.0)
        into = weight.grad if weight.grad is not None else torch.zeros_like(weight)
        into.index_add_(0, ids, rows)
        return None, into if weight.grad is None else None, None


def add_in_place(model: nn.Module) -> None:
    """Weights' gradients that are there already (`optimizer.FlatParameters`) are added to by the product that computes
    them: one of its own for each weight, written, read and added, costs as much as an optimiser step. Equal but for the
    order of sums; layers of other kinds, and weights that are not trained, stay as they are."""
    for layer in model.modules():
        if type(layer) is nn.Linear and layer.weight.requires_grad:
            layer.forward = lambda x, own=layer: _Linear.apply(x, own.weight, own.bias)
        elif type(layer) is nn.Embedding and layer.weight.requires_grad:
            plain = layer.max_norm is None and not layer.scale_grad_by_freq and not layer.sparse
            if plain:
                layer.forward = lambda ids, own=layer: _Embedding.apply(ids, own.weight, own.padding_idx)


def _logit_scale(config: Any) -> float:
    """Families that scale their logits: Cohere multiplies, Granite divides."""
    scale = getattr(config, "logit_scale", None)
    divisor = getattr(config, "logits_scaling", None)
    return float(scale) if scale is not None else 1.0 / float(divisor) if divisor is not None else 1.0


def load_model(folder: str, dtype: str, device: str = "cpu", *, check: bool = True) -> nn.Module:
    """The causal LM in `folder`, with the packed attention. `check` compares it with the plain forward pass first."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    # Its bars would be drawn over the live display.
    transformers_logging.disable_progress_bar()
    if not (Path(folder) / "config.json").is_file():
        raise ModelError(f"model.path: {folder!r} is no Hugging Face model folder (it has no config.json)")
    register()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=DTYPES[dtype], attn_implementation=ATTENTION_NAME, local_files_only=True
        )
    except (OSError, ValueError, ImportError) as problem:
        raise ModelError(f"model.path: cannot load a causal LM from {folder!r}: {problem}") from problem
    model.to(device).eval()
    if check:
        _check_family(model, folder, 1e-3 if dtype == "float32" else 0.25)
    return model


def _check_family(model: nn.Module, folder: str, tolerance: float) -> None:
    """A family whose attention or head does more than we know of would train on wrong log-probabilities in silence."""
    vocab = model.config.vocab_size
    sequences = np.arange(10, dtype=np.int64).reshape(2, 5) * 7 % vocab
    sequences[:, :2] = sequences[0, :2]
    batch = probe_batch(sequences, shared=2)
    with torch.no_grad():
        got, _ = Policy(model, logits_chunk=64).logprobs(batch, entropy=False)
        model.set_attn_implementation("eager")
        logits = model(input_ids=torch.from_numpy(sequences).to(model.device), use_cache=False).logits.float()
        model.set_attn_implementation(ATTENTION_NAME)
    plain = torch.log_softmax(logits, dim=-1)[:, 1:-1].gather(
        2, torch.from_numpy(sequences[:, 2:, None]).to(model.device)
    )
    worst = float((got - plain.flatten()).abs().max())
    if not worst <= tolerance:
        raise ModelError(
            f"model.path: the packed forward pass of {type(model).__name__} in {folder!r} is off its plain one by {worst:.2g} "
            "nats: this family is not supported (Llama, Qwen2, Qwen3, Qwen3-MoE and Gemma are)"
        )


def probe_batch(sequences: np.ndarray, shared: int) -> TokenBatch:
    """[B, T] sequences with a common start of `shared` tokens as one packed tree, all later tokens targets."""
    b, t = sequences.shape
    own = t - 1 - shared
    firsts = np.full((b, 1), shared - 1)
    rest = shared + np.arange(b)[:, None] * own + np.arange(own)[None]
    n = b * (t - shared)
    return TokenBatch(
        token_ids=np.concatenate([sequences[0, :shared], sequences[:, shared:-1].reshape(-1)]),
        position_ids=np.concatenate([np.arange(shared), np.tile(np.arange(shared, t - 1), b)]),
        segment_ids=np.repeat(np.arange(b + 1), [shared] + [own] * b),
        segment_parents=np.array([-1] + [0] * b),
        target_ids=sequences[:, shared:].reshape(-1),
        target_rows=np.concatenate([firsts, rest], axis=1).reshape(-1),
        target_samples=np.repeat(np.arange(b), t - shared),
        target_positions=np.tile(np.arange(t - shared), b),
        target_versions=np.zeros(n, dtype=np.int64),
        behavior_logprobs=np.zeros(n, dtype=np.float32),
        advantages=np.zeros(n, dtype=np.float32),
        sample_ids=tuple(f"probe-{i}" for i in range(b)),
        sample_weights=np.ones(b, dtype=np.float32),
        sample_groups=np.zeros(b, dtype=np.int64),
        temperatures=np.ones(b, dtype=np.float32),
        counts=BatchCounts(tokens=n, sequences=b, groups=1, max_length=t),
    )
