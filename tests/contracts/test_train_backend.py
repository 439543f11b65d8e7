"""What every TrainBackend that holds real weights keeps to."""

import dataclasses
import json
import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from headrace.errors import ConfigError, RunDirError, StaleTicket
from headrace.exchange.channels.in_process import InProcessChannel
from headrace.policies.config import PolicyConfig
from headrace.policies.spaces import ActionSpec, Leaf, Spaces
from headrace.training.advantages import group_advantages
from headrace.training.backends.control_device import build_control_device
from headrace.training.backends.single_device import build_single_device
from headrace.training.batching import make_batches
from headrace.training.config import AlgorithmConfig, LoraConfig, LossConfig, OptimizerConfig, TrainingConfig
from headrace.types import BUSY_KINDS, StepBatch
from training.helpers import Recorder, context, padded_logprobs, random_group, samples_in, save_tiny

BUILDERS = {"single_device": build_single_device}
LORAS = {"off": LoraConfig(), **{kind: LoraConfig(kind=kind, rank=4, alpha=16) for kind in ("adapter", "merged")}}
CONFIG = TrainingConfig(
    steps=6, micro_tokens=40, optimizer=OptimizerConfig(lr=0.01, schedule="linear"), loss=LossConfig(kl_coef=0.05)
)


class Language:
    """What the shared tests need of a backend for groups of answers."""

    weights, lora = "model.safetensors", "off"

    def __init__(self, folder) -> None:
        self.folder = save_tiny(folder / "model")

    async def build(self, channel=None, recorder=None):
        config = msgspec.structs.replace(CONFIG, lora=LORAS[self.lora])
        return build_single_device(context(recorder), config, self.folder, "float32", channel, 8)

    async def gradient(self, backend, seed, spoil=False):
        batch = await backend.annotate(micros_of(seed)[0], ["reference"])
        if spoil:
            batch = dataclasses.replace(batch, advantages=np.full_like(batch.advantages, np.inf))
        await backend.forward_backward(batch)


class Adapter(Language):
    """The same with adapters, which travel alone."""

    weights, lora = "adapter_model.safetensors", "adapter"


class Merged(Language):
    """The same with adapters, which travel in the weights."""

    weights, lora = "adapter_model.safetensors", "merged"


class Control:
    """The same for steps of environments, with running figures and a memory beside the weights."""

    weights = "policy.safetensors"

    def __init__(self, folder) -> None:
        self.spaces = Spaces((Leaf("obs", "vector", (3,), "float32"),), ActionSpec("discrete", (), (2,), (0,)))

    async def build(self, channel=None, recorder=None):
        policy = PolicyConfig(hidden=(8,), recurrent="gru", recurrent_size=8, normalise_observations=True)
        algorithm = AlgorithmConfig(normalise_returns=True, normalise_advantages=False)
        backend = build_control_device(context(recorder), CONFIG, algorithm, policy, channel, 0)
        await backend.begin(self.spaces)
        return backend

    async def gradient(self, backend, seed, spoil=False):
        batch = await backend.annotate(random_steps(seed), ["values"])
        if spoil:
            batch = dataclasses.replace(batch, advantages=np.full_like(batch.advantages, np.inf))
        await backend.forward_backward(batch)


@pytest.fixture(params=[Language, Adapter, Merged, Control])
def kind(request, tmp_path):
    torch.set_num_threads(1)
    return request.param(tmp_path)


async def one_step(kind, backend, seed):
    await kind.gradient(backend, seed)
    return await backend.optimizer_step()


async def test_weights_change_at_the_step_alone(kind):
    backend = await kind.build()
    start = await backend.fingerprint()
    await kind.gradient(backend, 0)
    assert await backend.fingerprint() == start
    metrics = await backend.optimizer_step()
    assert await backend.fingerprint() != start
    assert metrics["optimizer/grad_norm"].mean > 0 and metrics["optimizer/skipped"].mean == 0
    assert metrics["optimizer/lr"].mean == 0.01
    await backend.close()


async def test_equal_work_gives_equal_weights_and_a_resumed_run_the_same(kind, tmp_path):
    """Saved after two steps and loaded into a fresh backend, the third and fourth step end at the same hash."""
    straight, stopped, resumed = [await kind.build() for _ in range(3)]
    for seed in range(4):
        await one_step(kind, straight, seed)
    for seed in range(2):
        await one_step(kind, stopped, seed)
    await stopped.save(str(tmp_path / "ckpt"))
    middle = await stopped.fingerprint()
    await one_step(kind, resumed, 77)  # whatever it did before, load replaces it
    await resumed.load(str(tmp_path / "ckpt"))
    assert await resumed.fingerprint() == middle
    for seed in range(2, 4):
        rates = [(await one_step(kind, b, seed))["optimizer/lr"].mean for b in (resumed, stopped)]
        assert rates[0] == rates[1] < 0.01
    assert await resumed.fingerprint() == await stopped.fingerprint() == await straight.fingerprint()


async def test_a_damaged_checkpoint_is_refused_and_changes_nothing(kind, tmp_path):
    backend = await kind.build()
    await backend.save(str(tmp_path / "ckpt"))
    assert not any(path.suffix in (".bin", ".pt", ".pkl") for path in (tmp_path / "ckpt").iterdir())
    await one_step(kind, backend, 0)
    before = await backend.fingerprint()
    path = tmp_path / "ckpt" / kind.weights
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(RunDirError, match=kind.weights):
        await backend.load(str(tmp_path / "ckpt"))
    assert await backend.fingerprint() == before
    with pytest.raises(RunDirError, match=r"manifest\.json"):
        await backend.load(str(tmp_path / "nothing"))


async def test_a_non_finite_gradient_skips_the_step_and_is_counted(kind):
    backend = await kind.build()
    await one_step(kind, backend, 0)
    before = await backend.fingerprint()
    await kind.gradient(backend, 1, spoil=True)
    metrics = await backend.optimizer_step()
    assert metrics["optimizer/skipped"].mean == 1 and "optimizer/grad_norm" not in metrics
    assert await backend.fingerprint() == before
    assert (await one_step(kind, backend, 1))["optimizer/skipped"].mean == 0
    assert await backend.fingerprint() != before


async def test_versions_are_published_whole_and_in_order(kind):
    channel = InProcessChannel()
    backend = await kind.build(channel=channel)
    ticket = await backend.publish(7)
    sent = {name: tensor.clone() for name, tensor in channel.read(ticket).items()}
    await one_step(kind, backend, 1)
    with pytest.raises(StaleTicket):
        await backend.publish(7)
    newer = channel.read(await backend.publish(8))
    assert set(sent) == set(newer) and any(not torch.equal(sent[name], newer[name]) for name in newer)
    with pytest.raises(ConfigError, match=r"weights\.channel"):
        await (await kind.build()).publish(1)


async def test_its_work_is_on_the_timeline(kind):
    recorder = Recorder()
    backend = await kind.build(channel=InProcessChannel(), recorder=recorder)
    await one_step(kind, backend, 0)
    await backend.publish(1)
    kinds = [event.kind for event in recorder.events]
    assert {"annotate", "forward_backward", "optimizer_step", "publish"} == set(kinds)
    assert set(kinds) <= set(BUSY_KINDS["trainer"])
    assert all(event.duration_ns > 0 and event.source == "trainer" for event in recorder.events)
    assert recorder.events[-1].version == 1


# -------------------------------------------------------------------------------------------- language models alone


@pytest.fixture(params=[(backend, lora) for backend in BUILDERS for lora in LORAS], ids="-".join)
def build(request, tmp_path):
    torch.set_num_threads(1)
    folder = save_tiny(tmp_path / "model")
    backend, lora = request.param

    def make(config=CONFIG, channel=None, recorder=None, dtype="float32"):
        config = msgspec.structs.replace(config, lora=LORAS[lora])
        return BUILDERS[backend](context(recorder), config, folder, dtype, channel, 8)

    make.folder, make.lora = folder, lora
    return make


def groups_of(seed, count=3):
    rng = np.random.default_rng(seed)
    return [random_group(rng, f"{seed}.{i}") for i in range(count)]


def random_steps(seed, steps=5, count=4) -> StepBatch:
    """Steps with ends, cuts, reset rows and final observations in them."""
    rng = np.random.default_rng(seed)
    done = rng.random((steps, count)) < 0.3
    cut = done & (rng.random((steps, count)) < 0.5)
    return StepBatch(
        observations={"obs": rng.normal(size=(steps + 1, count, 3)).astype(np.float32)},
        actions=rng.integers(2, size=(steps, count)),
        rewards=rng.normal(size=(steps, count)).astype(np.float32),
        discounts=np.where(done & ~cut, 0.0, 0.9).astype(np.float32),
        cut=cut,
        valid=rng.random((steps, count)) < 0.9,
        resets=np.vstack([np.zeros((1, count), bool), done[:-1]]),
        behavior_logprobs=np.full((steps, count), -0.7, np.float32),
        policy_versions=np.zeros((steps, count), np.int32),
        ended=np.argwhere(cut),
        final_observations={"obs": rng.normal(size=(int(cut.sum()), 3)).astype(np.float32)},
        initial_state={"h": rng.normal(size=(count, 8)).astype(np.float32)},
    )


def micros_of(seed, config=CONFIG):
    groups = groups_of(seed)
    (micros,) = make_batches(groups, group_advantages(groups, config.advantage), config, max_length=8)
    assert len(micros) > 1
    return micros


async def step(backend, seed, config=CONFIG):
    for batch in micros_of(seed, config):
        await backend.forward_backward(await backend.annotate(batch, ["reference"]))
    return await backend.optimizer_step()


async def test_weights_change_at_the_step_and_only_there(build):
    backend = build()
    start = await backend.fingerprint()
    batch = micros_of(0)[0]
    filled = await backend.annotate(batch, ["reference", "proximal"])
    assert batch.reference_logprobs is None and filled.values is None
    assert filled.reference_logprobs.shape == filled.proximal_logprobs.shape == batch.target_ids.shape
    np.testing.assert_allclose(filled.reference_logprobs, filled.proximal_logprobs, atol=1e-6)
    await backend.forward_backward(filled)
    assert await backend.fingerprint() == start
    metrics = await backend.optimizer_step()
    assert await backend.fingerprint() != start
    assert metrics["optimizer/grad_norm"].mean > 0 and metrics["optimizer/skipped"].mean == 0
    assert metrics["optimizer/lr"].mean == 0.01
    await backend.close()


async def test_the_reference_stays_the_model_at_the_start(build):
    backend = build()
    batch = micros_of(0)[0]
    before = (await backend.annotate(batch, ["reference"])).reference_logprobs
    await step(backend, 1)
    filled = await backend.annotate(batch, ["reference", "proximal"])
    np.testing.assert_array_equal(filled.reference_logprobs, before)
    assert np.abs(filled.proximal_logprobs - before).max() > 1e-3


async def test_a_checkpoint_is_a_plain_folder_of_a_model_or_of_its_adapter(build, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    backend, folder, off = build(), tmp_path / "ckpt", build.lora == "off"
    await step(backend, 0)
    await backend.save(str(folder))
    config, weights = ("config.json", "model") if off else ("adapter_config.json", "adapter_model")
    names = {path.name for path in folder.iterdir()}
    assert {config, f"{weights}.safetensors", "tokenizer_config.json", "trainer.json", "manifest.json"} <= names
    assert ("config.json" in names) == ("model.safetensors" in names) == off
    written = json.loads((folder / config).read_text())
    assert written.get("attn_implementation") is None and off == ("base_model_name_or_path" not in written)
    model = AutoModelForCausalLM.from_pretrained(folder if off else written["base_model_name_or_path"]).eval()
    if not off:
        PeftModel.from_pretrained(model, folder)
    groups = groups_of(5)
    credit = [np.ones(g.size) for g in groups]
    (micros,) = make_batches(groups, credit, TrainingConfig(), max_length=8)
    filled = await backend.annotate(micros[0], ["proximal"])
    with torch.no_grad():
        plain = torch.cat(padded_logprobs(model, samples_in(groups)))
    np.testing.assert_allclose(filled.proximal_logprobs, plain.numpy(), atol=3e-5)


async def test_publish_sends_each_weight_once_under_its_hugging_face_name(build):
    from safetensors import safe_open

    channel = InProcessChannel()
    backend = build(channel=channel)
    await step(backend, 0)
    ticket = await backend.publish(7)
    await step(backend, 1)
    sent = channel.read(ticket)
    with safe_open(str(Path(build.folder) / "model.safetensors"), "pt") as saved:
        expected = set(saved.keys())
    if build.lora == "adapter":
        layers = [name.removesuffix(".weight") for name in expected if name.endswith("proj.weight")]
        expected = {f"{layer}.lora_{factor}" for layer in layers for factor in "AB"}
    assert set(sent) == expected and ticket.scope == ("adapter" if build.lora == "adapter" else "full")
    assert "lm_head.weight" not in sent and ticket.version == 7
    with pytest.raises(StaleTicket):
        await backend.publish(7)
    newer = channel.read(await backend.publish(8))
    assert any(not torch.equal(sent[name], newer[name]) for name in newer)


async def test_metrics_are_finite_and_known_by_name(build):
    backend = build()
    batch = await backend.annotate(micros_of(0)[0], ["reference"])
    metrics = await backend.forward_backward(batch)
    expected = {
        "loss/total", "loss/clip_share", "loss/ratio_max", "loss/kl", "loss/entropy", "correction/ess",
        "mismatch/logprob_diff_mean", "mismatch/logprob_diff_max", "mismatch/k3", "mismatch/mixed/k3",
    }  # fmt: skip
    assert expected <= set(metrics)
    assert all(math.isfinite(stat.mean) for stat in metrics.values())


async def test_bfloat16_trains_and_resumes(build, tmp_path):
    one, two = build(dtype="bfloat16"), build(dtype="bfloat16")
    await step(one, 0)
    await one.save(str(tmp_path / "ckpt"))
    await two.load(str(tmp_path / "ckpt"))
    for backend in (one, two):
        assert (await step(backend, 1))["optimizer/skipped"].mean == 0
    assert await one.fingerprint() == await two.fingerprint()
