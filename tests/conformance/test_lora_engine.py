"""L2 with adapters: what the engine serves after one, two and three syncs is what the trainer computes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from conformance.test_engine_against_trainer import groups_of, siblings
from headrace.exchange.channels.in_process import InProcessChannel
from headrace.training.backends.single_device import build_single_device
from headrace.training.batching import make_batches
from headrace.training.config import LoraConfig, LossConfig, OptimizerConfig, TrainingConfig
from rollout.engines.engine_models import build_engine, folder_of
from training.helpers import context


@pytest.mark.parametrize("targets", [(), ("q_proj", "v_proj")], ids=["all", "some"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma"])
@pytest.mark.parametrize("kind", ["adapter", "merged"])
async def test_after_each_sync_engine_and_trainer_agree(kind, family, targets):
    torch.set_num_threads(1)
    folder, channel = folder_of(family), InProcessChannel()
    config = TrainingConfig(
        steps=9,
        micro_tokens=64,
        loss=LossConfig(kl_coef=0.01),
        optimizer=OptimizerConfig(lr=0.05),
        lora=LoraConfig(kind=kind, rank=4, target_modules=targets),
    )
    trainer = build_single_device(context(), config, folder, "float32", channel)
    engine = build_engine(folder=folder, channel=channel)
    moved = []
    for version in (1, 2, 3):
        await engine.commit(await trainer.publish(version))
        groups = await groups_of(engine, siblings())
        advantages = [np.linspace(-1, 1, len(group.episodes)).astype(np.float32) for group in groups]
        (micros,) = make_batches(groups, advantages, config, max_length=64)
        for batch in micros:
            filled = await trainer.annotate(batch, ["proximal", "reference"])
            assert set(batch.target_versions.tolist()) == {version}
            assert np.abs(filled.proximal_logprobs - batch.behavior_logprobs).max() < 1e-4
            moved.append(np.abs(filled.proximal_logprobs - filled.reference_logprobs).max())
            await trainer.forward_backward(filled)
        await trainer.optimizer_step()
    assert moved[0] < 1e-6 and moved[-1] > 0.05, "the adapters did something"
    await engine.close()
