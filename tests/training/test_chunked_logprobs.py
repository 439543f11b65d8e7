"""Chunked log-probabilities against the plain softmax: values, gradients, supports, and how much memory they take."""

import dataclasses
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from headrace.training.batching import make_batches
from headrace.training.config import TrainingConfig
from headrace.training.logprobs import Head, logit_rows, target_logprobs
from training.helpers import VOCAB, group_of, random_group, sample_of, samples_in


def batch_of(temperatures=(1.0, 0.7), seed=0):
    rng = np.random.default_rng(seed)
    groups = [random_group(rng, f"g{i}", temperature=t) for i, t in enumerate(temperatures)]
    ((batch,),) = make_batches(groups, [rng.normal(size=4) for _ in groups], TrainingConfig(), max_length=8)
    return batch


@pytest.mark.parametrize("chunk", [3, 1000])
@pytest.mark.parametrize("extra", ["plain", "bias", "softcap", "scale"])
def test_values_and_gradients_are_those_of_the_plain_softmax(chunk, extra):
    torch.manual_seed(0)
    batch = batch_of()
    hidden = torch.randn(len(batch.token_ids), 6, requires_grad=True)
    weight = torch.randn(VOCAB, 6, requires_grad=True)
    bias = torch.randn(VOCAB, requires_grad=True) if extra == "bias" else None
    head = Head(weight, bias, 3.0 if extra == "softcap" else None, 0.3 if extra == "scale" else 1.0)
    logits = torch.nn.functional.linear(hidden, weight, bias)[torch.from_numpy(batch.target_rows)] * head.scale
    if head.softcap:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    every = torch.log_softmax(logits / torch.from_numpy(batch.temperatures[batch.target_samples])[:, None], dim=1)
    right = every.gather(1, torch.from_numpy(batch.target_ids)[:, None]).flatten()
    got, entropy = target_logprobs(hidden, head, logit_rows(batch), chunk=chunk)
    torch.testing.assert_close(got, right, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, -(every.exp() * every).sum(1).detach(), atol=1e-5, rtol=1e-5)
    upstream = torch.randn(len(got))
    leaves = [t for t in (hidden, weight, bias) if t is not None]
    for a, b in zip(
        torch.autograd.grad(got @ upstream, leaves), torch.autograd.grad(right @ upstream, leaves), strict=True
    ):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("chunk", [3, 1000])
def test_penalties_and_biases_are_part_of_the_sampled_distribution(chunk, softcap):
    """Siblings of one tree that were sampled in different ways, each target's logits shaped by all that stands before it."""
    torch.manual_seed(0)
    rng = np.random.default_rng(1)
    ways = [dict(repetition_penalty=1.7), {}, dict(logit_bias=((3, 2.0), (5, -1.0), (3, 0.5))), dict(repetition_penalty=0.6, logit_bias=((9, 1.5),))]  # fmt: skip
    groups = [random_group(rng, f"g{i}", temperature=0.7, multi_turn=i == 1) for i in range(2)]
    samples = [
        dataclasses.replace(one, sampling=dataclasses.replace(one.sampling, **way))
        for group in groups
        for one, way in zip(samples_in([group]), ways, strict=True)
    ]
    groups = [group_of(samples[4 * i : 4 * i + 4], rng.normal(size=4).tolist(), f"g{i}") for i in range(2)]
    ((batch,),) = make_batches(groups, [rng.normal(size=4) for _ in groups], TrainingConfig(), max_length=8)
    hidden = torch.randn(len(batch.token_ids), 6, requires_grad=True)
    weight = torch.randn(VOCAB, 6, requires_grad=True)
    by_id = {one.sample_id: one for one in samples}
    right = []
    for m, row in enumerate(batch.target_rows):
        sample = by_id[batch.sample_ids[batch.target_samples[m]]]
        at = (np.flatnonzero(sample.loss_mask[1:]) + 1)[batch.target_positions[m]]
        logits = hidden[row] @ weight.t()
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        seen = torch.zeros(VOCAB, dtype=torch.bool)
        seen[torch.from_numpy(np.asarray(sample.token_ids[:at]))] = True
        penalty = sample.sampling.repetition_penalty
        logits = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
        added = torch.zeros(VOCAB)
        for token, bias in sample.sampling.logit_bias:
            added[token] += bias
        every = torch.log_softmax((logits + added) / 0.7, dim=0)
        right.append(every[batch.target_ids[m]])
    right = torch.stack(right)
    got, _ = target_logprobs(hidden, Head(weight, softcap=softcap), logit_rows(batch), chunk=chunk)
    torch.testing.assert_close(got, right, atol=1e-5, rtol=1e-5)
    upstream = torch.randn(len(got))
    for a, b in zip(
        torch.autograd.grad(got @ upstream, [hidden, weight]),
        torch.autograd.grad(right @ upstream, [hidden, weight]),
        strict=True,
    ):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("chunk", [3, 1000])
def test_a_weights_gradient_can_be_added_in_place(chunk):
    torch.manual_seed(0)
    batch = batch_of()
    hidden, weight = torch.randn(len(batch.token_ids), 6), torch.randn(VOCAB, 6, requires_grad=True)
    plain, _ = target_logprobs(hidden, Head(weight), logit_rows(batch), chunk=chunk)
    (right,) = torch.autograd.grad(plain.sum(), weight)
    into = torch.ones_like(weight)
    added, _ = target_logprobs(hidden, Head(weight, grad_into=into), logit_rows(batch), chunk=chunk)
    added.sum().backward()
    assert weight.grad is None
    torch.testing.assert_close(into, 1 + right)


def test_siblings_first_tokens_share_one_row_of_logits():
    group = group_of([sample_of([5, 6], [7 + i, 8]) for i in range(4)], [0.0, 1.0] * 2)
    ((batch,),) = make_batches([group], [np.ones(4)], TrainingConfig(), max_length=4)
    assert len(logit_rows(batch).input_rows) == 5 and len(batch.target_ids) == 8


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_a_recorded_support_gives_ratio_one_under_top_p(softcap):
    """At top-p 0.8 the engine's log-probability is that of the renormalised support, and the trainer's must be."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(3, 6, requires_grad=True), torch.randn(VOCAB, 6)
    logits = hidden.detach() @ weight.t()
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    kept, ids, sampled = [], [], []
    for row in (1, 2):
        probs, order = torch.softmax(logits[row], 0).sort(descending=True)
        support = order[: int((probs.cumsum(0) < 0.8).sum()) + 1]
        kept.append(support.numpy())
        ids.append(int(support[-1]))
        sampled.append(float(torch.log_softmax(logits[row][support], 0)[-1]))
    sample = sample_of([5, 6], ids, kept=kept, logprobs=sampled)
    ((batch,),) = make_batches([group_of([sample], [1.0])], [np.ones(1)], TrainingConfig(), max_length=4)
    padded = torch.stack([hidden[0], hidden[1], hidden[2]])
    got, _ = target_logprobs(padded, Head(weight, softcap=softcap), logit_rows(batch), chunk=2)
    np.testing.assert_allclose(got.detach().numpy(), batch.behavior_logprobs, atol=1e-5)
    grad = torch.autograd.grad(got.sum(), hidden)[0]
    raw = (hidden @ weight.t())[1:]
    raw = softcap * torch.tanh(raw / softcap) if softcap else raw
    right = sum(torch.log_softmax(raw[i][torch.from_numpy(kept[i])], 0)[-1] for i in range(2))
    torch.testing.assert_close(grad, torch.autograd.grad(right, hidden)[0], atol=1e-5, rtol=1e-4)


MEMORY = """
import resource, sys, torch
sys.path[:0] = sys.argv[1:]
torch.set_num_threads(1)
import numpy as np
from headrace.training.logprobs import Head, logit_rows, target_logprobs
from training.helpers import group_of, sample_of
from headrace.training.batching import make_batches
from headrace.training.config import TrainingConfig
vocab, width, tokens = 49152, 576, 8192
rng = np.random.default_rng(0)
sample = sample_of([5], rng.integers(0, vocab, tokens))
((batch,),) = make_batches([group_of([sample], [1.0])], [np.ones(1)], TrainingConfig(), max_length=tokens)
weight = torch.randn(vocab, width, requires_grad=True)
weight.grad = torch.zeros_like(weight)
hidden = torch.randn(tokens, width, requires_grad=True)
rows = logit_rows(batch)
(torch.randn(64, width) @ torch.randn(width, 64)).exp()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
logprobs, _ = target_logprobs(hidden, Head(weight), rows, chunk=512)
logprobs.sum().backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20)
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_8192_tokens_of_a_49k_vocabulary_take_less_than_half_a_gigabyte():
    """A whole [tokens, vocab] tensor would be 1.6 GB."""
    paths = [p for p in sys.path if p]
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, *paths], capture_output=True, text=True, check=True, env={**os.environ}
    )
    assert float(done.stdout) < 0.5
