"""Whole episodes of a policy: how many, of which length, by which actions, and that trajectories do not notice them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.errors import PartFailed
from headrace.policies.config import PolicyConfig
from headrace.protocols import EpisodesWanted, Resources, TrajectoryRequest, WorkerContext
from headrace.rollout.config import EnvConfig
from headrace.rollout.control_rollout import build_actor
from headrace.rollout.episodes import shares
from headrace.rollout.policy_worker import build_policy_worker
from headrace.rollout.tensor_rollout import build_tensor_actor
from headrace.types import Episodes, RequestKey
from rollout.control_helpers import ENVS

POLICY = PolicyConfig(hidden=(8,))


def make(kind: str = "actor", name: str = "counter", policy: PolicyConfig = POLICY, **env):
    """Something that acts in `control_envs.make_NAME`, or in the environment of this id."""
    place = name if "-v" in name else f"{ENVS}make_{name}"
    config = EnvConfig(id=place, **{"count": 2, "steps": 4, **env})
    build = {"actor": build_actor, "policy_worker": build_policy_worker, "tensor": build_tensor_actor}[kind]
    context = WorkerContext(name="engine-0", record=lambda event: None, resources=Resources(threads=0))
    return build(context, config, policy, None, 0)


async def episodes(made, count: int, *, greedy: bool = True, seed: int = 5) -> Episodes:
    wanted = EpisodesWanted(count=count, greedy=greedy, seed=seed)
    return await made.generate(TrajectoryRequest(key=RequestKey(lease_id="evaluation"), episodes=wanted))


@pytest.mark.parametrize("autoreset", ["next_step", "same_step", "disabled"])
async def test_each_environment_plays_its_share_of_whole_episodes(autoreset):
    found = await episodes(make(autoreset=autoreset, options={"length": 3}), 5)
    assert found.returns.tolist() == [1.0] * 5 and found.lengths.tolist() == [3] * 5
    assert found.policy_versions.tolist() == [-1] * 5


def test_shares_are_fixed_before_anything_is_played():
    """Else the first to end, the short ones, would be the ones that count."""
    assert shares(5, 2).tolist() == [3, 2] and shares(2, 2).tolist() == [1, 1]


async def test_greedy_takes_the_likeliest_action_and_sampled_draws_it():
    made = make(name="choice", options={"length": 50})
    with torch.no_grad():
        made.engine.network.policy_head.weight.zero_()
        made.engine.network.policy_head.bias.copy_(torch.tensor([0.0, 0.4055]))  # chances 0.4 and 0.6
    assert (await episodes(made, 4)).returns.tolist() == [50.0] * 4
    drawn = await episodes(made, 40, greedy=False)
    assert drawn.returns.mean() == pytest.approx(30, abs=3) and len(set(drawn.returns)) > 3
    assert (await episodes(made, 40, greedy=False)).returns.tolist() == drawn.returns.tolist()


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
async def test_a_memory_is_empty_where_an_episode_begins(autoreset, monkeypatch):
    made = make(policy=PolicyConfig(hidden=(8,), recurrent="gru", recurrent_size=4), autoreset=autoreset)
    network, seen = made.engine.network, []
    act = network.act

    def watched(observations, state):
        seen.extend(zip(observations["obs"][:, 1].tolist(), state["h"].abs().sum(1).tolist(), strict=True))
        return act(observations, state)

    monkeypatch.setattr(network, "act", watched)
    await episodes(made, 6)
    assert all((size == 0) == (t == 0) for t, size in seen) and sum(t == 0 for t, _ in seen) >= 6


@pytest.mark.parametrize(
    ("kind", "env"),
    [("actor", {}), ("policy_worker", {"workers": 1, "splits": 1}), ("tensor", {"name": "sim:CartPole-v1"})],
)
async def test_trajectories_are_the_same_with_and_without_them(kind, env):
    async def two(between: bool) -> list:
        made = make(kind, **env)
        units = []
        for number in range(2):
            units.append(await made.generate(TrajectoryRequest(key=RequestKey(lease_id=f"0-{number}"))))
            if between:
                assert len((await episodes(made, 3)).returns) == 3
        await made.close()
        return units

    for plain, beside in zip(await two(False), await two(True), strict=True):
        assert np.array_equal(plain.actions, beside.actions) and np.array_equal(plain.rewards, beside.rewards)
        name = next(iter(plain.observations))
        assert np.array_equal(plain.observations[name], beside.observations[name])


@pytest.mark.parametrize(("how", "words"), [("raises", "the wheel is stuck"), ("reward", "not finite")])
async def test_an_environment_that_misbehaves_fails_the_request_alone(how, words):
    made = make(name="misbehaving", options={"how": how, "after": 60})
    with pytest.raises(PartFailed, match=words):
        await episodes(made, 2)
    unit = await made.generate(TrajectoryRequest(key=RequestKey(lease_id="0-0")))
    assert unit.size == 8
