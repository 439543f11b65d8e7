"""Engines and trainer in turns on one set of devices: what each gives up, and that nothing is lost by it."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from headrace.exchange.channels.in_process import InProcessChannel
from headrace.exchange.interruption import INTERRUPTIONS
from headrace.orchestrator.dispatcher import Dispatcher, EngineSlot
from headrace.orchestrator.learner import TokenLearner
from headrace.orchestrator.runtimes.local import LocalRuntime
from headrace.orchestrator.turns import Turns
from headrace.orchestrator.weight_sync import WeightSync
from headrace.rollout.config import EngineConfig
from headrace.rollout.engines.hf import build_hf
from headrace.training.backends.single_device import build_single_device
from headrace.training.config import OptimizerConfig, TrainingConfig
from rollout.engines.engine_models import char_tokenizer
from training.helpers import context, random_group, save_tiny

CONFIG = TrainingConfig(groups=2, optimizer=OptimizerConfig(lr=0.01))


def checksum(tensors) -> str:
    """sha256 over named tensors, by name."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors, key=lambda pair: pair[0]):
        digest.update(name.encode())
        digest.update(tensor.detach().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


async def test_engines_sleep_while_the_trainer_works_and_wake_with_its_weights(tmp_path):
    torch.set_num_threads(1)
    folder, channel = save_tiny(tmp_path / "model"), InProcessChannel()
    char_tokenizer().save_pretrained(folder)
    runtime = LocalRuntime(lambda event: None)
    trainer = await runtime.spawn("trainer", build_single_device, CONFIG, folder, "float32", channel, 8)
    engine = await runtime.spawn("engine-0", build_hf, EngineConfig(), folder, "float32", channel, "keep")
    dispatcher = Dispatcher(generate_timeout_s=30.0, rejoin_timeout_s=1.0)
    dispatcher.join(EngineSlot("engine-0", engine))
    sync = WeightSync(
        dispatcher, INTERRUPTIONS["drain"], prepare_timeout_s=30.0, commit_timeout_s=30.0, drain_timeout_s=1.0, scoring=None
    )  # fmt: skip
    turns, learner = Turns(sync, trainer), TokenLearner(trainer, CONFIG, max_length=8)
    rng, backend, core = np.random.default_rng(0), trainer._part, engine._part.core
    await sync.sync(await learner.publish(0))
    for version in (1, 2):
        await turns.to_training()
        assert core.weights is None and not dispatcher.gate_open
        await learner.train([random_group(rng, f"{version}.{i}") for i in range(2)])
        ticket = await learner.publish(version)
        await turns.to_generation()
        flat, moments = backend._flat, backend._optimizer.state()
        assert flat.grads.numel() == 0 and "exp_avg" not in moments, "gradients and moments are away"
        await sync.sync(ticket)
        assert dispatcher.gate_open and core.version == version
        assert checksum(core.weights.named_parameters()) == checksum(backend.named_tensors())
    peaks = {name: stat.mean for name, stat in turns.metrics().items()}
    assert set(peaks) == {"memory/generation_peak_gb", "memory/training_peak_gb"}
    assert all(0.01 < peak < 100 for peak in peaks.values())
    await runtime.close()


async def test_a_trainer_that_gave_its_state_away_makes_the_same_weights(tmp_path):
    torch.set_num_threads(1)
    folder = save_tiny(tmp_path / "model")
    fingerprints = []
    for give_way in (False, True):
        rng = np.random.default_rng(0)
        backend = build_single_device(context(), CONFIG, folder, "float32", None, 8)
        learner = TokenLearner(backend, CONFIG, max_length=8)
        for step in range(3):
            await learner.train([random_group(rng, f"{step}.{i}") for i in range(2)])
            if give_way:
                await backend.offload()
                await backend.save(str(tmp_path / f"checkpoint-{step}"))
                await backend.onload()
        fingerprints.append(await backend.fingerprint())
    assert fingerprints[0] == fingerprints[1]
    again = build_single_device(context(), CONFIG, folder, "float32", None, 8)
    await again.load(str(tmp_path / "checkpoint-2"))
    assert await again.fingerprint() == fingerprints[1]
    assert torch.equal(again._optimizer.state()["exp_avg"], backend._optimizer.state()["exp_avg"])


@pytest.mark.slow
@pytest.mark.parametrize("interruption, partial", [("hold", "continue"), ("abort", "resume_prefix"), ("drain", "none")])
def test_a_colocated_run_trains_and_reports_its_peaks(lab, interruption, partial):
    ran = lab.here(
        "placement=colocated", f"weights.interruption={interruption}", f"weights.partial={partial}",
        "rollout.oversample=2", "training.steps=4",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert "memory/training_peak_gb" in ran.steps[-1] and "memory/generation_peak_gb" in ran.steps[-1]
