"""Builds actors for tests and takes trajectories apart into transitions."""

from __future__ import annotations

from headrace.policies.config import PolicyConfig
from headrace.protocols import Resources, TrajectoryRequest, WorkerContext
from headrace.rollout.config import EnvConfig
from headrace.rollout.control_rollout import Actor
from headrace.types import RequestKey, Trajectory

ENVS = "rollout.control_envs:"


def actor(
    name: str, *, policy: PolicyConfig = PolicyConfig(), seed: int = 0, index: int = 0, events=None, **env
) -> Actor:
    """An actor on `control_envs.make_NAME`, or on the Gymnasium id `name`."""
    place = name if "-v" in name else f"{ENVS}make_{name}"
    record = (lambda event: None) if events is None else events.append
    context = WorkerContext(name=f"engine-{index}", record=record, resources=Resources(threads=0))
    return Actor(context, EnvConfig(id=place, **{"count": 2, "steps": 8, **env}), policy, None, seed)


async def collect(made: Actor, count: int = 1) -> list[Trajectory]:
    return [await made.generate(TrajectoryRequest(key=RequestKey(lease_id=f"0-{number}"))) for number in range(count)]


def transitions(trajectories: list[Trajectory], n: int) -> list[tuple]:
    """(observation, reward, next observation, terminated, truncated) of one environment, by the type's own rules."""
    found = []
    for unit in trajectories:
        shown = unit.observations["obs"]
        final = {(t, m): unit.final_observations["obs"][k] for k, (t, m) in enumerate(unit.ended.tolist())}
        for t in range(len(unit.rewards)):
            if unit.valid[t, n]:
                after = final.get((t, n), shown[t + 1, n])
                found.append(
                    (*shown[t, n].tolist(), float(unit.rewards[t, n]), *after.tolist(),
                     bool(unit.terminated[t, n]), bool(unit.truncated[t, n]))
                )  # fmt: skip
    return found


def counter_transitions(length: int, count: int) -> list[tuple]:
    """What `Counter` really does."""
    found = []
    for k in range(count):
        episode, t = divmod(k, length)
        last = t == length - 1
        found.append(
            (float(episode), float(t), float(last), float(episode), float(t + 1),
             last and episode % 2 == 0, last and episode % 2 == 1)
        )  # fmt: skip
    return found
