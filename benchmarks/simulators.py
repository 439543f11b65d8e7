"""How fast the simulators step: classic control beside Gymnasium's vector classes, MuJoCo beside its bare open-loop rollout
and beside EnvPool.

python benchmarks/simulators.py [--count 1024] [--threads 2] [--rounds 7] [--only mujoco]

All sides of one comparison are timed in turn; a figure is the median over the rounds, with the smallest and the largest.
EnvPool gets a virtual environment of its own (made on first use in `.venv-envpool`, a gigabyte) and as many threads.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from headrace.rollout.environments.simulators import make_simulator

VENV = Path(__file__).parents[1] / ".venv-envpool"
PEER = """
import sys, time
import envpool, numpy
name, count, threads, steps = sys.argv[1], *map(int, sys.argv[2:])
pool = envpool.make(name, env_type="gymnasium", num_envs=count, num_threads=threads)
low, high = pool.action_space.low, pool.action_space.high
actions = numpy.random.default_rng(0).uniform(low, high, (steps, count, *low.shape)).astype(pool.action_space.dtype)
for _ in sys.stdin:
    pool.reset()
    began = time.perf_counter()
    for action in actions:
        pool.step(action)
    print(time.perf_counter() - began, flush=True)
"""
"""Plays random actions for one round a line of input, and says how many seconds they took."""


def rates(sides: dict[str, Callable[[], float]], steps: int, rounds: int) -> dict[str, list[float]]:
    """Environment steps a second of each side, once a round; the first round warms up and does not count."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, run in sides.items():
            seconds = run()
            if number:
                found[name].append(steps / seconds)
    return found


def timed(run: Callable[[], None]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def show(title: str, found: dict[str, list[float]]) -> None:
    """Rates of all sides, and the first one's over each of the others."""
    first = next(iter(found.values()))
    for name, values in found.items():
        low, middle, high = min(values), statistics.median(values), max(values)
        line = f"{title:28} {name:24} {middle:12,.0f} steps/s ({low:,.0f} to {high:,.0f})"
        if values is not first:
            ratios = [a / b for a, b in zip(first, values, strict=True)]
            line += f"   ours / it: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(line, flush=True)


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

    def run_ours() -> None:
        with torch.inference_mode():
            for _ in range(steps):
                ours.step(tensors)

    def run_theirs() -> None:
        for _ in range(steps):
            theirs.step(arrays)

    sides = {"simulator": lambda: timed(run_ours), f"Gymnasium ({mode})": lambda: timed(run_theirs)}
    show(f"{name}, N = {count}", rates(sides, steps * count, rounds))


def mujoco(name: str, peer: str, count: int, threads: int, rounds: int, steps: int) -> None:
    """Serving an observation and taking an action at every step, beside EnvPool, which does the same; for what goes through
    `mujoco.rollout` also beside the same physics in one open-loop call."""
    ours = make_simulator(name, count, threads=threads)
    generator = torch.Generator().manual_seed(0)
    low, high = (torch.tensor(bound) for bound in (ours.actions.low, ours.actions.high))
    actions = torch.rand(steps, count, len(low), generator=generator) * (high - low) + low

    def run_ours() -> None:
        with torch.inference_mode():
            for action in actions:
                ours.step(action)

    def served() -> float:
        ours.reset()
        return timed(run_ours)

    sides = {"served every step": served}
    if hasattr(ours, "path"):
        skip = ours.frame_skip
        controls = np.ascontiguousarray(np.repeat(actions.double().numpy().transpose(1, 0, 2), skip, axis=1))
        path = np.zeros((count, steps * skip, ours.now.shape[1]))
        sensors = np.zeros((count, steps * skip, ours.model.nsensordata))

        def run_bare() -> None:
            ours._pool.rollout(
                ours._models, ours._data, ours.now.numpy(), controls, skip_checks=True, nstep=steps * skip,
                initial_warmstart=ours.warm_start.numpy(), state=path, sensordata=sensors, control_spec=ours._spec,
            )  # fmt: skip

        def bare() -> float:
            ours.reset()
            return timed(run_bare)

        sides["bare rollout"] = bare
    words = [str(VENV / "bin" / "python"), "-c", PEER, peer, str(count), str(threads), str(steps)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        talk, answers = process.stdin, process.stdout

        def envpool() -> float:
            print(file=talk, flush=True)
            return float(answers.readline())

        sides[f"EnvPool {peer}"] = envpool
        show(f"{name}, N = {count}, {threads} threads", rates(sides, steps * count, rounds))
        talk.close()
    ours.close()


def install_envpool() -> None:
    if not (VENV / "bin" / "python").exists():
        subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
        words = ["-m", "pip", "install", "--quiet", "envpool==1.2.5", "gymnasium", "numpy"]
        subprocess.run([str(VENV / "bin" / "python"), *words], check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1024, help="environments of classic control")
    parser.add_argument("--bodies", type=int, default=64, help="environments of MuJoCo")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", choices=["classic", "mujoco"])
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.only != "mujoco":
        classic("CartPole-v1", given.count, given.rounds)
        classic("Pendulum-v1", given.count, given.rounds)
    if given.only != "classic":
        install_envpool()
        for name, peer, steps in (
            ("HalfCheetah-v4", "HalfCheetah-v4", 100),
            ("Ant-v4", "Ant-v4", 40),
            ("Humanoid-v4", "Humanoid-v4", 20),
            ("Ant-v5", "Ant-v5", 40),
        ):
            mujoco(name, peer, given.bodies, given.threads, given.rounds, steps)
