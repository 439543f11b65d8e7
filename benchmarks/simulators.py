"""How fast the simulators step: classic control beside Gymnasium's vector classes, MuJoCo beside its bare open-loop rollout.

python benchmarks/simulators.py [--count 1024] [--threads 2] [--rounds 7]

The two sides of a pair are timed in turn; the figure is the median over the rounds, with the smallest and the largest.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from headrace.rollout.environments.simulators import make_simulator


def rates(sides: dict[str, Callable[[], int]], rounds: int) -> dict[str, list[float]]:
    """Environment steps a second of each side, once a round; the first round warms up and does not count."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, run in sides.items():
            began = time.perf_counter()
            steps = run()
            if number:
                found[name].append(steps / (time.perf_counter() - began))
    return found


def show(title: str, found: dict[str, list[float]]) -> None:
    for name, values in found.items():
        low, middle, high = min(values), statistics.median(values), max(values)
        print(f"{title:28} {name:34} {middle:12,.0f} steps/s ({low:,.0f} to {high:,.0f})")
    first, second = (values for values in found.values())
    ratios = [a / b for a, b in zip(first, second, strict=True)]
    print(f"{'':28} {'ratio':34} {statistics.median(ratios):12.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


def classic(name: str, count: int, rounds: int) -> None:
    import gymnasium

    mode = "vector_entry_point" if gymnasium.spec(name).vector_entry_point else "sync"
    theirs = gymnasium.make_vec(name, num_envs=count, vectorization_mode=mode)
    theirs.reset(seed=0)
    ours = make_simulator(name, count)
    ours.reset()
    arrays = theirs.action_space.sample()
    tensors = torch.from_numpy(np.asarray(arrays))
    steps = 100 if mode == "vector_entry_point" else 10

    def run_ours() -> int:
        with torch.inference_mode():
            for _ in range(100):
                ours.step(tensors)
        return 100 * count

    def run_theirs() -> int:
        for _ in range(steps):
            theirs.step(arrays)
        return steps * count

    show(f"{name}, N = {count}", rates({"simulator": run_ours, f"Gymnasium ({mode})": run_theirs}, rounds))


def mujoco(name: str, count: int, threads: int, rounds: int, steps: int) -> None:
    """Serving an observation and taking an action at every step, beside the same physics in one open-loop call."""
    ours = make_simulator(name, count, threads=threads)
    size, skip = len(ours.actions.low), ours.frame_skip
    actions = torch.rand(steps, count, size, generator=torch.Generator().manual_seed(0)) * 2 - 1
    controls = np.ascontiguousarray(np.repeat(actions.double().numpy().transpose(1, 0, 2), skip, axis=1))
    path = np.zeros((count, steps * skip, ours.now.shape[1]))
    sensors = np.zeros((count, steps * skip, ours.model.nsensordata))

    def run_ours() -> int:
        ours.reset()
        for action in actions:
            ours.step(action)
        return steps * count

    def run_bare() -> int:
        ours.reset()
        ours._pool.rollout(
            ours._models, ours._data, ours.now.numpy(), controls, skip_checks=True, nstep=steps * skip,
            initial_warmstart=ours.warm_start.numpy(), state=path, sensordata=sensors, control_spec=ours._spec,
        )  # fmt: skip
        return steps * count

    show(
        f"{name}, N = {count}, {threads} threads",
        rates({"served every step": run_ours, "bare rollout": run_bare}, rounds),
    )
    ours.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    torch.set_num_threads(1)
    classic("CartPole-v1", given.count, given.rounds)
    classic("Pendulum-v1", given.count, given.rounds)
    mujoco("HalfCheetah-v4", 64, given.threads, given.rounds, steps=25)
    mujoco("Ant-v4", 64, given.threads, given.rounds, steps=8)
