"""Processes that only step and a policy that acts for all of them: the same transitions, and no part's death is a hang."""

from __future__ import annotations

import asyncio
import os
import signal

import numpy as np
import pytest
import torch

from headrace.errors import PartFailed
from headrace.policies.config import PolicyConfig
from headrace.protocols import Resources, TrajectoryRequest, WorkerContext
from headrace.rollout.config import EnvConfig
from headrace.rollout.policy_worker import PolicyWorker
from headrace.types import RequestKey
from rollout.control_helpers import ENVS, counter_transitions, transitions


def worker(name: str, *, policy: PolicyConfig = PolicyConfig(), **env) -> PolicyWorker:
    context = WorkerContext(name="engine-0", record=lambda event: None, resources=Resources(threads=0))
    options = {"count": 2, "steps": 7, "workers": 1, "splits": 2, **env}
    return PolicyWorker(context, EnvConfig(id=f"{ENVS}make_{name}", **options), policy, None, 0)


async def collect(made: PolicyWorker, count: int) -> list:
    async with asyncio.timeout(60):
        keys = [RequestKey(lease_id=f"0-{number}") for number in range(count)]
        return await asyncio.gather(
            *(made.generate(TrajectoryRequest(key=key)) for key in keys), return_exceptions=True
        )


@pytest.fixture
async def start():
    made: list[PolicyWorker] = []

    def begin(name: str, **options) -> PolicyWorker:
        made.append(worker(name, **options))
        return made[-1]

    yield begin
    for one in made:
        await one.close()


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
async def test_slots_give_the_transitions_and_episodes_that_happened(start, autoreset):
    """Six trajectories from two slots: within a slot they join without a gap."""
    made = start("counter", autoreset=autoreset)
    units = await collect(made, 6)
    # A slot's trajectories follow one another: the last row of one is the first of the next.
    chains: list[list] = []
    for unit in units:
        first = unit.observations["obs"][0]
        chain = next((c for c in chains if np.array_equal(c[-1].observations["obs"][-1], first)), None)
        (chains.append([unit]) if chain is None else chain.append(unit))
    assert sum(len(chain) for chain in chains) == 6
    for chain in chains:
        for n in range(2):
            found = transitions(chain, n)
            start_at = int(found[0][0]) * 3 + int(found[0][1])
            assert found == counter_transitions(3, start_at + len(found))[start_at:]
    returns = np.concatenate([unit.episode_returns for unit in units])
    lengths = np.concatenate([unit.episode_lengths for unit in units])
    ends = sum(int((unit.terminated | unit.truncated).sum()) for unit in units)
    assert len(returns) == ends >= 16 and (returns == 1).all() and (lengths == 3).all()


async def test_a_memory_is_kept_for_each_slot_and_log_probabilities_are_those_of_the_network(start):
    made = start("counter", policy=PolicyConfig(hidden=(8,), recurrent="lstm", recurrent_size=8), autoreset="same_step")
    units = await collect(made, 5)
    network = made.engine.network
    for unit in units:
        state = {name: torch.from_numpy(value) for name, value in unit.initial_state.items()}
        done = unit.terminated | unit.truncated
        resets = np.vstack([np.zeros((1, 2), bool), done[:-1]])
        shown = {"obs": torch.from_numpy(unit.observations["obs"][:-1])}
        outputs, _, _ = network.unroll(shown, torch.from_numpy(resets), state)
        logs = made.engine.distribution.logprobs(outputs, torch.from_numpy(unit.actions))
        np.testing.assert_allclose(unit.behavior_logprobs, logs.numpy(), atol=1e-5)
    assert any(np.abs(unit.initial_state["h"]).max() > 0 for unit in units)


async def test_all_kinds_of_leaves_and_actions_pass_through_the_arena(start):
    made = start("everything", options={"action": "box"})
    (unit,) = await collect(made, 1)
    assert set(unit.observations) == {"bits", "image", "many", "pair/0", "pair/1"}
    assert unit.observations["image"].max() > 0 and unit.actions.shape == (7, 2, 4)


async def test_without_a_request_nothing_is_stepped(start):
    made = start("counter")
    await collect(made, 2)
    steps = made._steps
    await asyncio.sleep(0.1)
    assert made._steps == steps == 2 * 7 * 2


async def test_a_killed_rollout_worker_fails_its_trajectories_and_is_replaced(start):
    made = start("counter", steps=300)
    running = asyncio.gather(
        *(made.generate(TrajectoryRequest(key=RequestKey(lease_id=str(n)))) for n in range(2)), return_exceptions=True
    )
    async with asyncio.timeout(60):
        while not made._steps:
            await asyncio.sleep(0.01)
        os.kill(made.workers[0].process.pid, signal.SIGKILL)
        failed = await running
    # The second request may still have waited for its slot's first observations: then the new worker serves it.
    assert isinstance(failed[0], PartFailed) and "is gone" in str(failed[0])
    assert isinstance(failed[1], PartFailed) or failed[1].size == 2 * 300 - (~failed[1].valid).sum()
    units = await collect(made, 2)
    assert made.starts == 2
    for unit in units:  # from the new worker's first step on: nothing of what the dead one had begun is in them
        assert unit.valid.all()
        for n in range(2):
            found = transitions([unit], n)
            start_at = int(found[0][0]) * 3 + int(found[0][1])
            assert found == counter_transitions(3, start_at + len(found))[start_at:]


async def test_one_that_hangs_is_killed_and_one_that_raises_says_why(start):
    made = start("misbehaving", options={"how": "hangs", "after": 3}, step_timeout_s=5.0)
    failed = await collect(made, 1)
    assert "no step within 5 s" in str(failed[0])
    made = start("misbehaving", options={"how": "raises", "after": 3})
    failed = await collect(made, 2)
    assert all("the wheel is stuck" in str(error) for error in failed)


async def test_an_environment_that_never_gets_started_fails_the_requests(start):
    made = start("counter", workers=1)
    made.env = EnvConfig(id=f"{ENVS}make_nothing", count=2, steps=7, workers=1)
    failed = await collect(made, 3)
    assert all("has no 'make_nothing'" in str(error) for error in failed), failed


async def test_aborted_requests_end_whether_they_run_or_wait(start):
    made = start("counter", steps=400)
    requests = [TrajectoryRequest(key=RequestKey(lease_id=str(n))) for n in range(4)]
    tasks = [asyncio.create_task(made.generate(request)) for request in requests]
    async with asyncio.timeout(60):
        while not made._steps:
            await asyncio.sleep(0.01)
        await made.abort(requests[0].request_id)
        await made.abort(requests[3].request_id)
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(end, PartFailed) for end in ended] == [True, False, False, True]
