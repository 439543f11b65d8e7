"""The packed forward pass against the plain padded one, family by family: log-probabilities and gradients."""

import numpy as np
import pytest
import torch

from headrace.errors import ModelError
from headrace.training import packed
from headrace.training.batching import make_batches
from headrace.training.config import LoraConfig, TrainingConfig
from headrace.training.policy import Policy, load_model
from training.helpers import attach_random, padded_logprobs, random_group, samples_in, save_tiny

FAMILIES = ["llama", "qwen2", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3"]


def flat_grads(model):
    return torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in model.parameters()])


def compare(folder, groups, config, **options):
    """(largest log-probability difference, relative L2 difference of the gradient of a random weighting)."""
    torch.set_num_threads(1)
    model = load_model(folder, "float32")
    if config.lora.kind != "off":
        attach_random(model, config.lora)
    policy = Policy(model, logits_chunk=16, **options)
    rng = np.random.default_rng(1)
    credit = [rng.normal(size=g.size) for g in groups]
    (micros,) = make_batches(groups, credit, config, max_length=8)
    found, policy_loss = {}, 0.0
    weights = {s.sample_id: torch.from_numpy(rng.normal(size=s.completion_length)).float() for s in samples_in(groups)}
    for batch in micros:
        logprobs, _ = policy.logprobs(batch)
        for i, name in enumerate(batch.sample_ids):
            found[name] = logprobs[torch.from_numpy(batch.target_samples == i)]
    policy_loss = sum((found[name] * weights[name]).sum() for name in found)
    policy_loss.backward()
    mine = flat_grads(policy.model)
    policy.model.zero_grad(set_to_none=True)
    policy.model.eval()  # or checkpointing would run the plain pass again with the packed attention
    plain = padded_logprobs(policy.model, samples_in(groups))
    names = [s.sample_id for s in samples_in(groups)]
    sum((p * weights[n]).sum() for p, n in zip(plain, names, strict=True)).backward()
    right = flat_grads(policy.model)
    worst = max(float((found[n] - p).abs().max()) for n, p in zip(names, plain, strict=True))
    return worst, float((mine - right).norm() / right.norm())


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_padded(tmp_path, family):
    rng = np.random.default_rng(0)
    groups = [random_group(rng, f"g{i}", prompt=4 + 3 * i, longest=9, multi_turn=i == 1) for i in range(3)]
    worst, gradient = compare(save_tiny(tmp_path, family), groups, TrainingConfig())
    assert worst < 3e-5 and gradient < 1e-5


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma2"])
def test_packed_equals_padded_with_adapters(tmp_path, family, checkpointing):
    rng = np.random.default_rng(0)
    groups = [random_group(rng, f"g{i}", prompt=4 + 3 * i, longest=9, multi_turn=i == 1) for i in range(3)]
    config = TrainingConfig(lora=LoraConfig(kind="adapter", rank=3))
    worst, gradient = compare(save_tiny(tmp_path, family), groups, config, gradient_checkpointing=checkpointing)
    assert worst < 3e-5 and gradient < 1e-5


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3"])
def test_large_trees_are_cut_by_segment_and_stay_equal(tmp_path, family, monkeypatch):
    """Above WHOLE_TREE_TOKENS a segment attends to its ancestors in a block of its own; windows count positions."""
    monkeypatch.setattr(packed, "WHOLE_TREE_TOKENS", 8)
    rng = np.random.default_rng(0)
    groups = [random_group(rng, f"g{i}", prompt=9, longest=9) for i in range(2)]
    worst, gradient = compare(save_tiny(tmp_path, family), groups, TrainingConfig())
    assert worst < 3e-5 and gradient < 1e-5


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3"])
def test_one_sample_alone_needs_no_mask(tmp_path, family):
    groups = [random_group(np.random.default_rng(0), "g", size=1, prompt=9, longest=9)]
    worst, gradient = compare(save_tiny(tmp_path, family), groups, TrainingConfig())
    assert worst < 3e-5 and gradient < 1e-5


def test_gradient_checkpointing_changes_nothing(tmp_path):
    rng = np.random.default_rng(0)
    groups = [random_group(rng, "g", prompt=5)]
    worst, gradient = compare(save_tiny(tmp_path, "llama"), groups, TrainingConfig(), gradient_checkpointing=True)
    assert worst < 3e-5 and gradient < 1e-5


def test_no_block_is_as_large_as_the_batch():
    """100 groups of 36 tokens: the scores are 100 small squares, not one of 3600 x 3600."""
    rng = np.random.default_rng(0)
    groups = [random_group(rng, f"g{i}", prompt=8, longest=8) for i in range(100)]
    ((batch,),) = make_batches(
        groups, [rng.normal(size=4) for _ in groups], TrainingConfig(micro_tokens=100_000), max_length=8
    )
    tree = packed.tree_attention(batch)
    scores = sum(b * q * k for b, q, k in (bucket.shape for bucket in tree.buckets))
    assert scores < 0.05 * len(batch.token_ids) ** 2
    assert len(tree.buckets) < 20


def test_grandchildren_see_their_whole_line(tmp_path):
    """A tree of three levels, as an environment with branches would make it, against each path run alone."""
    torch.set_num_threads(1)
    import dataclasses

    from headrace.training.policy import probe_batch

    policy = Policy(load_model(save_tiny(tmp_path, "llama"), "float32"), logits_chunk=16)
    # Root 5 6; child 7 8; grandchildren 9 and 10 11; a second child 12. One target at the end of each leaf.
    batch = dataclasses.replace(
        probe_batch(np.array([[5, 6, 7]]), 2),
        token_ids=np.array([5, 6, 7, 8, 9, 10, 11, 12]),
        position_ids=np.array([0, 1, 2, 3, 4, 4, 5, 2]),
        segment_ids=np.array([0, 0, 1, 1, 2, 3, 3, 4]),
        segment_parents=np.array([-1, 0, 1, 1, 0]),
        target_ids=np.array([20, 21, 22]),
        target_rows=np.array([4, 6, 7]),
        target_samples=np.array([0, 0, 0]),
    )
    with torch.no_grad():
        got, _ = policy.logprobs(batch)
        policy.model.set_attn_implementation("eager")
        for value, path, target in zip(
            got, ([5, 6, 7, 8, 9], [5, 6, 7, 8, 10, 11], [5, 6, 12]), (20, 21, 22), strict=True
        ):
            logits = policy.model(input_ids=torch.tensor([path]), use_cache=False).logits[0, -1]
            assert float(torch.log_softmax(logits, 0)[target]) == pytest.approx(float(value), abs=3e-5)


def test_a_family_that_we_run_wrongly_is_refused(tmp_path, monkeypatch):
    folder = save_tiny(tmp_path, "gemma2", attn_logit_softcapping=0.5)
    right = packed.attend
    from transformers import AttentionInterface

    def forgets_the_softcap(*args, softcap=None, **kwargs):
        return right(*args, **kwargs)

    monkeypatch.setattr(packed, "attend", forgets_the_softcap)
    try:
        with pytest.raises(ModelError, match="this family is not supported"):
            load_model(folder, "float32")
    finally:
        AttentionInterface.register(packed.ATTENTION_NAME, right)


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json"):
        load_model(str(tmp_path), "float32")
