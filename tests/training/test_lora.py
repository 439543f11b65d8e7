"""Adapters on the trainer: they alone are trained, the base is its own reference, merging never touches it."""

from __future__ import annotations

import gc
import json

import numpy as np
import pytest
import torch

from headrace.errors import ConfigError, MissingExtra, RunDirError
from headrace.estimates import adapter_parameters, model_shape
from headrace.training.advantages import group_advantages
from headrace.training.backends.single_device import build_single_device
from headrace.training.batching import make_batches
from headrace.training.config import LoraConfig, LossConfig, OptimizerConfig, TrainingConfig
from headrace.training.lora import Adapters, adapted_layers, attach
from headrace.training.policy import load_model
from training.helpers import context, random_group, save_tiny

LORA = LoraConfig(kind="adapter", rank=4, alpha=8)


def build(folder, lora=LORA, kl_coef=0.05, dtype="float32"):
    torch.set_num_threads(1)
    config = TrainingConfig(
        steps=50, lora=lora, loss=LossConfig(kl_coef=kl_coef), optimizer=OptimizerConfig(lr=0.02), micro_tokens=40
    )
    return build_single_device(context(), config, folder, dtype)


def batches(seed):
    groups = [random_group(np.random.default_rng(seed), f"{seed}.{i}") for i in range(2)]
    config = TrainingConfig(micro_tokens=40)
    (micros,) = make_batches(groups, group_advantages(groups, config.advantage), config, max_length=8)
    return micros


async def train(backend, seed, what=("reference",)):
    for batch in batches(seed):
        await backend.forward_backward(await backend.annotate(batch, list(what)))
    await backend.optimizer_step()


def base_of(backend):
    return {name: t for name, t in backend._policy.model.state_dict().items() if ".lora_" not in name}


def memory_of(backend) -> int:
    """Bytes of all tensors that hang on it, memory that several share counted once."""
    seen, storages, left = set(), {}, [backend]
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, type):
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            storages[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
            left.append(one.grad)
        elif isinstance(one, (dict, list, tuple, set)) or type(one).__module__.startswith(
            ("headrace", "torch", "peft", "transformers")
        ):
            left.extend(gc.get_referents(one))
    return sum(storages.values())


@pytest.mark.parametrize("kind", ["adapter", "merged"])
async def test_the_base_stays_bit_for_bit_whatever_is_trained_and_published(tmp_path, kind):
    backend = build(save_tiny(tmp_path / "m"), LoraConfig(kind=kind, rank=4))
    before = {name: tensor.clone() for name, tensor in base_of(backend).items()}
    for seed in range(4):
        await train(backend, seed)
        dict(backend.named_tensors())
    after = base_of(backend)
    assert all(torch.equal(before[name], after[name]) for name in before)
    trained = [name for name, p in backend._policy.model.named_parameters() if p.requires_grad]
    assert trained and all(".lora_" in name for name in trained)


async def test_merging_adds_the_product_to_a_copy_and_never_drifts(tmp_path):
    backend = build(save_tiny(tmp_path / "m"), LoraConfig(kind="merged", rank=4, alpha=8))
    await train(backend, 0)
    first = {name: tensor.clone() for name, tensor in backend.named_tensors()}
    for _ in range(50):
        again = dict(backend.named_tensors())
    assert all(torch.equal(first[name], again[name]) for name in first)
    base, layers = base_of(backend), dict(adapted_layers(backend._policy.model))
    for name, layer in layers.items():
        expected = base[f"{name}.base_layer.weight"] + 2.0 * (
            layer.lora_B["default"].weight @ layer.lora_A["default"].weight
        )
        torch.testing.assert_close(first[f"{name}.weight"], expected.detach(), rtol=0, atol=1e-6)
        assert first[f"{name}.weight"].data_ptr() != base[f"{name}.base_layer.weight"].data_ptr()
    assert set(first) == {name for name, _ in load_model(str(tmp_path / "m"), "float32").named_parameters()}


async def test_the_reference_is_the_base_in_the_same_memory(tmp_path):
    """A model with a reference holds two; adapters need their own gradients and moments and nothing else."""
    folder = save_tiny(tmp_path / "m", hidden_size=128, intermediate_size=256)
    used = {}
    for name, lora, kl_coef in (("plain", LoraConfig(), 0.0), ("whole", LoraConfig(), 0.05), ("lora", LORA, 0.05)):
        backend = build(folder, lora, kl_coef)
        await train(backend, 0, ["reference"] if kl_coef else [])
        used[name] = memory_of(backend)
        if name == "plain":
            model = sum(p.nbytes for p in backend._policy.model.parameters())
        trained = backend._flat.values.nbytes
    assert used["plain"] == pytest.approx(4 * model, rel=0.02), "weights, gradients, two moments"
    assert used["whole"] == pytest.approx(5 * model, rel=0.02)
    assert used["lora"] == pytest.approx(model + 4 * trained, rel=0.02) and trained < model / 10


async def test_the_reference_is_the_model_at_the_start(tmp_path):
    folder = save_tiny(tmp_path / "m")
    backend, plain = build(folder), build(folder, LoraConfig())
    await train(backend, 0)
    await train(backend, 1)
    (batch, *_) = batches(2)
    filled = await backend.annotate(batch, ["reference", "proximal"])
    expected = await plain.annotate(batch, ["reference"])
    np.testing.assert_array_equal(filled.reference_logprobs, expected.reference_logprobs)
    assert np.abs(filled.proximal_logprobs - filled.reference_logprobs).max() > 1e-3
    again = await backend.annotate(batch, ["proximal"])
    np.testing.assert_array_equal(again.proximal_logprobs, filled.proximal_logprobs)  # the adapters are on again


def test_adapters_are_float32_over_a_bfloat16_base(tmp_path):
    model = load_model(save_tiny(tmp_path / "m"), "bfloat16")
    attach(model, LORA)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}


def test_they_begin_alike_and_leave_the_random_state_alone(tmp_path):
    folder = save_tiny(tmp_path / "m")
    starts = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        state, model = torch.get_rng_state(), load_model(folder, "float32")
        attach(model, LORA)
        assert torch.equal(torch.get_rng_state(), state)
        starts.append([layer.lora_A["default"].weight.detach() for _, layer in adapted_layers(model)])
    assert all(torch.equal(a, b) for a, b in zip(*starts, strict=True))


def test_only_the_layers_that_are_named_get_one(tmp_path):
    model = load_model(save_tiny(tmp_path / "m"), "float32")
    attach(model, LoraConfig(kind="adapter", target_modules=("q_proj", "down_proj")))
    assert {name.rpartition(".")[2] for name, _ in adapted_layers(model)} == {"q_proj", "down_proj"}
    with pytest.raises(ConfigError, match=r'target_modules\.1: found "gate".*q_proj'):
        attach(
            load_model(str(tmp_path / "m"), "float32"), LoraConfig(kind="adapter", target_modules=("q_proj", "gate"))
        )


@pytest.mark.parametrize("targets", [(), ("q_proj", "down_proj")])
def test_the_estimate_counts_what_is_trained(tmp_path, targets):
    folder, lora = tmp_path / "m", LoraConfig(kind="adapter", rank=5, target_modules=targets)
    model = load_model(save_tiny(folder), "float32")
    attach(model, lora)
    assert adapter_parameters(lora, model_shape(folder)) == sum(
        p.numel() for p in model.parameters() if p.requires_grad
    )


def test_experts_routers_and_the_head_get_none(tmp_path):
    model = load_model(save_tiny(tmp_path / "m", "qwen3_moe", tie_word_embeddings=False), "float32")
    attach(model, LORA)
    assert {name.rpartition(".")[2] for name, _ in adapted_layers(model)} == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_without_peft_there_is_one_line(tmp_path, monkeypatch):
    model = load_model(save_tiny(tmp_path / "m"), "float32")
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(MissingExtra, match=r"headrace\[lora\]"):
        attach(model, LORA)


async def test_adapters_of_another_base_alpha_or_layers_are_refused(tmp_path):
    folder = save_tiny(tmp_path / "m")
    backend = build(folder)
    await train(backend, 0)
    await backend.save(str(tmp_path / "ckpt"))
    before = await backend.fingerprint()
    for other, words in (
        (build(save_tiny(tmp_path / "n", seed=1)), "another model"),
        (build(folder, LoraConfig(kind="adapter", rank=4, alpha=9)), r"alpha 8.*training\.lora\.alpha is 9"),
        (build(folder, LoraConfig(kind="adapter", rank=5)), "trained weights"),
        (build(folder, LoraConfig()), "trained weights"),
    ):
        start = await other.fingerprint()
        with pytest.raises(RunDirError, match=words):
            await other.load(str(tmp_path / "ckpt"))
        assert await other.fingerprint() == start != before


def test_as_many_weights_on_other_layers_are_refused(tmp_path):
    folder = tmp_path / "m"
    save_tiny(folder)
    one, other = (
        Adapters(load_model(str(folder), "float32"), folder, LoraConfig(kind="adapter", target_modules=(layer,)))
        for layer in ("gate_proj", "up_proj")
    )
    (tmp_path / "ckpt").mkdir()
    facts = one.save(tmp_path / "ckpt")
    with pytest.raises(RunDirError, match=r"other layers.*gate_proj"):
        other.load(tmp_path / "ckpt", facts)
    assert json.loads((tmp_path / "ckpt" / "adapter_config.json").read_text())["r"] == 16


def test_what_is_published_has_the_scale_in_it(tmp_path):
    folder = tmp_path / "m"
    save_tiny(folder)
    held = Adapters(load_model(str(folder), "float32"), folder, LORA)
    generator = torch.Generator().manual_seed(0)
    for name, tensor in held.tensors():
        assert not tensor.any() or name.endswith("lora_A"), "nothing is changed at the start"
    with torch.no_grad():
        for _, layer in adapted_layers(held._model):
            layer.lora_B["default"].weight.normal_(generator=generator)
    for name, tensor in held.tensors():
        layer, _, factor = name.rpartition(".")
        own = getattr(held._model.get_submodule(layer), factor)["default"].weight
        torch.testing.assert_close(tensor, own.detach() * (2.0 if factor == "lora_B" else 1.0))
