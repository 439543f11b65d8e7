"""Builds tiny models, samples and groups, and the plain padded forward pass that the packed one is held against."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from headrace.protocols import Resources, WorkerContext
from headrace.types import Episode, Group, SamplingMask, SamplingParams, Score, Task, TokenSample

VOCAB = 61


def config_of(family: str, **changes):
    """The smallest config of a family that still has grouped heads, several layers, and its own peculiarities."""
    import transformers

    base = dict(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    per_family = {
        "llama": (transformers.LlamaConfig, {}),
        "qwen2": (transformers.Qwen2Config, {}),
        "qwen3": (transformers.Qwen3Config, {"head_dim": 16}),
        "qwen3_moe": (
            transformers.Qwen3MoeConfig,
            {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        ),
        "gemma": (transformers.GemmaConfig, {"head_dim": 16}),
        "gemma2": (transformers.Gemma2Config, {"head_dim": 16, "sliding_window": 4, "query_pre_attn_scalar": 16}),
        "gemma3": (transformers.Gemma3TextConfig, {"head_dim": 16, "sliding_window": 4, "query_pre_attn_scalar": 16}),
    }
    cls, extra = per_family[family]
    return cls(**{**base, **extra, **changes})


def save_tiny(folder: Path, family: str = "llama", seed: int = 0, **changes) -> str:
    """A random model of the family in a folder, far enough from uniform that mistakes show."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config_of(family, **changes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)
    model.save_pretrained(folder)
    (Path(folder) / "tokenizer_config.json").write_text('{"model_max_length": 512}')
    return str(folder)


def attach_random(model, config, seed: int = 0):
    """Adapters that do something: their second factor is random, not zero (and small, or rounding errors grow on their way)."""
    from headrace.training.lora import adapted_layers, attach

    handle = attach(model, config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, layer in adapted_layers(model):
            layer.lora_B["default"].weight.normal_(std=0.05, generator=generator)
    return handle


def sample_of(
    prompt,
    completion,
    *,
    sample_id="s",
    mask=None,
    logprobs=None,
    versions=None,
    temperature=1.0,
    finish="stop",
    kept=None,
):
    """One sample: prompt and completion, `mask` [len(completion)] telling tool tokens from sampled ones."""
    p, c = len(prompt), len(completion)
    mask = np.ones(c, dtype=np.int8) if mask is None else np.asarray(mask, dtype=np.int8)
    logprobs = np.full(c, -1.0) if logprobs is None else np.asarray(logprobs, dtype=np.float64)
    versions = np.zeros(c, dtype=np.int64) if versions is None else np.asarray(versions)
    sampling_mask = None
    if kept is not None:
        rows = [np.zeros(0, np.int64)] * p + [np.asarray(k) for k in kept]
        offsets = np.concatenate([[0], np.cumsum([len(r) for r in rows])])
        sampling_mask = SamplingMask(token_ids=np.concatenate(rows).astype(np.int32), offsets=offsets)
    return TokenSample(
        sample_id=sample_id,
        token_ids=np.array([*prompt, *completion], dtype=np.int32),
        loss_mask=np.concatenate([np.zeros(p, dtype=np.int8), mask]),
        behavior_logprobs=np.concatenate([np.full(p, np.nan), np.where(mask, logprobs, np.nan)]).astype(np.float32),
        policy_versions=np.concatenate([np.full(p, -1), np.where(mask, versions, -1)]),
        sampling=SamplingParams(max_tokens=64, temperature=temperature),
        finish_reason=finish,
        sampling_mask=sampling_mask,
    )


def group_of(samples, rewards, group_id="g", expected=None, parts=None):
    """A group whose i-th episode is samples[i] (one sample, or the segments of one attempt)."""
    episodes = tuple(
        Episode(episode_id=f"{group_id}/{i}", samples=tuple(s) if isinstance(s, (list, tuple)) else (s,))
        for i, s in enumerate(samples)
    )
    scores = tuple(Score(reward=r, parts={} if parts is None else parts[i]) for i, r in enumerate(rewards))
    task = Task(task_id=group_id, source="test", payload={})
    return Group(
        group_id=group_id, task=task, expected_size=expected or len(episodes), episodes=episodes, scores=scores
    )


def random_group(rng, group_id="g", size=4, prompt=6, longest=7, multi_turn=False, temperature=1.0):
    """A group of `size` random samples of 1 to `longest` tokens on one random prompt, rewards random."""
    prompt_ids = rng.integers(3, VOCAB, prompt)
    samples = []
    for i in range(size):
        length = int(rng.integers(1, longest + 1))
        mask = np.ones(length, dtype=np.int8)
        if multi_turn and length > 3:
            mask[length // 3 : length // 2 + 1] = 0
        samples.append(
            sample_of(
                prompt_ids,
                rng.integers(3, VOCAB, length),
                sample_id=f"{group_id}/{i}",
                mask=mask,
                logprobs=rng.normal(-3, 0.3, length),
                temperature=temperature,
            )
        )
    return group_of(samples, rng.normal(size=size).tolist(), group_id)


def padded_logprobs(model, samples, side="right", attention="eager"):
    """Each sample's target log-probabilities from a plain padded batch, without chunks or packing: list of [m] tensors."""
    longest = max(len(s.token_ids) for s in samples)
    ids = torch.zeros(len(samples), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, s in enumerate(samples):
        at = slice(0, len(s.token_ids)) if side == "right" else slice(longest - len(s.token_ids), longest)
        ids[i, at] = torch.from_numpy(np.asarray(s.token_ids, dtype=np.int64))
        mask[i, at] = 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    before = model.config._attn_implementation
    model.set_attn_implementation(attention)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits.float()
    model.set_attn_implementation(before)
    temperatures = torch.tensor([s.sampling.temperature for s in samples])[:, None, None]
    every = torch.log_softmax(logits / temperatures, dim=-1)
    found = []
    for i, s in enumerate(samples):
        start = 0 if side == "right" else longest - len(s.token_ids)
        targets = np.flatnonzero(s.loss_mask[1:]) + 1
        rows = torch.from_numpy(start + targets - 1)
        found.append(every[i, rows, torch.from_numpy(np.asarray(s.token_ids, dtype=np.int64)[targets])])
    return found


class Recorder:
    """A context's event sink that keeps what it is given."""

    def __init__(self):
        self.events = []

    def __call__(self, event):
        self.events.append(event)


def context(recorder=None, threads=1):
    return WorkerContext(name="trainer", record=recorder or Recorder(), resources=Resources(threads=threads))


def samples_in(groups):
    return [s for g in groups for e in g.episodes for s in e.samples]
