"""What everything that acts keeps to as a receiver of weights: the engine itself, an actor and a policy worker around it."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest
import torch

from headrace.errors import ConfigError, PartFailed, StaleTicket
from headrace.exchange.channels.in_process import InProcessChannel
from headrace.orchestrator.runtimes.processes import ProcessRuntime
from headrace.policies.config import PolicyConfig
from headrace.policies.networks import build_network
from headrace.protocols import ActionEngine, TrajectoryRequest, WeightReceiver
from headrace.rollout.config import EnvConfig
from headrace.rollout.control_rollout import build_actor
from headrace.rollout.engines.policy_network import PolicyNetworkEngine
from headrace.rollout.policy_worker import build_policy_worker
from headrace.types import NO_VERSION, RequestKey
from rollout.control_helpers import ENVS
from training.helpers import context

POLICY = PolicyConfig(hidden=(8,))


class Lab:
    """A channel with a publisher, and one receiver."""

    def __init__(self, kind: str, channel=True) -> None:
        self.channel = InProcessChannel() if channel else None
        env = EnvConfig(id=f"{ENVS}make_counter", count=2, steps=4)
        made = context(None)
        made = type(made)(name="engine-0", record=made.record, resources=made.resources)
        if kind == "policy_worker":
            env = msgspec.structs.replace(env, workers=1)
        build = build_policy_worker if kind == "policy_worker" else build_actor
        acting = build(made, env, POLICY, self.channel, 0)
        spaces = acting.engine.spaces
        self.receiver = PolicyNetworkEngine(spaces, POLICY, self.channel, 0) if kind == "policy_network" else acting
        self.engine = self.receiver if kind == "policy_network" else acting.engine
        self.network = build_network(spaces, POLICY, 2, seed=99)

    def publish(self, version: int):
        with torch.no_grad():
            for parameter in self.network.parameters():
                parameter.add_(0.1)
        return self.channel.publish(self.network.state_dict().items(), version)

    def runs_published(self) -> bool:
        own = self.engine.network.state_dict()
        return all(torch.equal(own[name], tensor) for name, tensor in self.network.state_dict().items())


KINDS = ["policy_network", "actor", "policy_worker"]


@pytest.fixture(params=KINDS)
def lab(request):
    return Lab(request.param)


async def test_a_version_is_staged_beside_the_live_one_and_swapped_at_the_commit(lab):
    assert isinstance(lab.receiver, WeightReceiver)
    ticket = lab.publish(1)
    await lab.receiver.prepare(ticket)
    stats = await lab.receiver.stats()
    assert (stats.version, stats.staged_version) == (NO_VERSION, 1) and not lab.runs_published()
    await lab.receiver.commit(ticket)
    stats = await lab.receiver.stats()
    assert (stats.version, stats.staged_version, stats.swaps) == (1, NO_VERSION, 1) and lab.runs_published()


async def test_prepare_and_commit_may_be_repeated(lab):
    ticket = lab.publish(1)
    for _ in range(2):
        await lab.receiver.prepare(ticket)
    for _ in range(2):
        await lab.receiver.commit(ticket)
    await lab.receiver.prepare(ticket)
    stats = await lab.receiver.stats()
    assert stats.swaps == 1 and stats.staged_version == NO_VERSION


async def test_a_newer_ticket_replaces_a_staged_one_and_none_goes_back(lab):
    old = lab.publish(1)
    await lab.receiver.prepare(old)
    new = lab.publish(2)
    await lab.receiver.prepare(new)
    await lab.receiver.commit(new)
    assert lab.runs_published()
    with pytest.raises(StaleTicket):
        await lab.receiver.commit(old)
    assert (await lab.receiver.stats()).version == 2


async def test_a_commit_without_prepare_loads_at_once(lab):
    await lab.receiver.commit(lab.publish(3))
    assert lab.runs_published()


async def test_the_publishers_memory_is_free_once_staged(lab):
    """Two slots: if a lease were kept, the third version would need fresh memory."""
    for version in range(1, 5):
        ticket = lab.publish(version)
        await lab.receiver.prepare(ticket)
        await lab.receiver.commit(ticket)
    assert lab.channel.reclaimed == 0


@pytest.mark.parametrize("kind", KINDS)
async def test_weights_of_another_policy_and_a_missing_channel_are_refused(kind):
    lab = Lab(kind)
    other = build_network(lab.engine.spaces, PolicyConfig(hidden=(8, 8)), 2, 0)
    ticket = lab.channel.publish(other.state_dict().items(), 1)
    with pytest.raises(PartFailed, match="other tensors"):
        await lab.receiver.prepare(ticket)
    ticket = lab.publish(2)
    with pytest.raises(ConfigError, match=r"weights\.channel"):
        await Lab(kind, channel=False).receiver.prepare(ticket)


async def test_act_names_the_version_and_the_sampled_actions_log_probabilities():
    lab = Lab("policy_network")
    assert isinstance(lab.receiver, ActionEngine)
    await lab.receiver.commit(lab.publish(5))
    shown = {"obs": np.random.default_rng(0).normal(size=(64, 2)).astype(np.float32)}
    found = await lab.receiver.act(shown)
    outputs, _ = lab.network.act({"obs": torch.from_numpy(shown["obs"])}, {})
    logs = torch.log_softmax(outputs.detach(), -1).numpy()
    np.testing.assert_allclose(found.logprobs, logs[np.arange(64), found.actions], atol=1e-6)
    assert found.version == 5 and set(found.actions) == {0, 1}


async def test_a_swap_within_a_trajectory_is_between_two_steps_and_each_step_names_its_version(monkeypatch):
    monkeypatch.setattr("headrace.rollout.acting.TURN_S", 0.0)
    lab = Lab("actor")
    await lab.receiver.commit(lab.publish(1))
    before = {name: t.clone() for name, t in lab.network.state_dict().items()}
    request = TrajectoryRequest(key=RequestKey(lease_id="0-0"))
    running = asyncio.create_task(lab.receiver.generate(request))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await lab.receiver.commit(lab.publish(2))
    unit = await running
    versions = unit.policy_versions[:, 0].tolist()
    assert versions == sorted(versions) and set(versions) == {1, 2} and unit.oldest_version == 1
    newer = lab.network
    older = build_network(lab.engine.spaces, POLICY, 2, seed=0)
    older.load_state_dict(before)
    for t, version in enumerate(versions):
        outputs, _ = (older if version == 1 else newer).act({"obs": torch.from_numpy(unit.observations["obs"][t])}, {})
        logs = torch.log_softmax(outputs.detach(), -1)
        expected = logs[torch.arange(2), torch.from_numpy(unit.actions[t])]
        np.testing.assert_allclose(unit.behavior_logprobs[t], expected.numpy(), atol=1e-6)


async def test_a_call_from_another_process_waits_for_a_step_or_two_of_a_loop_that_steps():
    """A sync is two calls. Counted in steps: with one turn of the event loop after each, a call would take four of them."""
    runtime = ProcessRuntime(lambda event: None)
    env = EnvConfig(id=f"{ENVS}make_slow", mode="sync", count=1, steps=400)
    actor = await runtime.spawn("engine-0", build_actor, env, POLICY, None, 0)
    running = asyncio.create_task(actor.generate(TrajectoryRequest(key=RequestKey(lease_id="0-0"))))
    try:
        while not (await actor.stats()).progress:
            await asyncio.sleep(0)
        at = [(await actor.stats()).generated_tokens for _ in range(24)]
    finally:
        running.cancel()
        await runtime.close()
    assert at[-1] < 400
    assert np.median(np.diff(at)) <= 2, np.diff(at)


async def test_an_aborted_request_ends_and_the_next_one_is_served(monkeypatch):
    monkeypatch.setattr("headrace.rollout.acting.TURN_S", 0.0)
    lab = Lab("actor")
    waiting = [TrajectoryRequest(key=RequestKey(lease_id=f"0-{n}")) for n in range(3)]
    async with asyncio.timeout(10):
        tasks = [asyncio.create_task(lab.receiver.generate(request)) for request in waiting]
        await asyncio.sleep(0)
        await lab.receiver.abort(waiting[1].request_id)
        first, second, third = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(second, PartFailed)
    assert first.sample_id == "0-0" and third.sample_id == "0-2"
    assert (await lab.receiver.stats()).progress == {}
