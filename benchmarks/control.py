"""CartPole with learning: steps a second of `headrace run ppo_sync` (with one update a batch) beside a hand-written torch PPO loop of the same size.

    python benchmarks/control.py --rounds 3

Both step Gymnasium's vectorised CartPole (N = 1,024, T = 32), learn by one update a batch with separate networks of 2 x 64 and
run one thread. Rounds alternate, each in a fresh process; clocks start after the first batches. Beside wall time there are
steps per second of processor time, which a busy machine disturbs less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

COUNT, STEPS, WARMUP = 1024, 32, 5


def measure_headrace(batches: int, threads: int, extra: list[str]) -> dict[str, float]:
    """The preset, through assembly, ledger, weight sync and recording, as `headrace run` does it."""
    from headrace.config import load_config, resolve
    from headrace.orchestrator.narrator import Narrator
    from headrace.session import run

    marks: list[tuple[float, float, float]] = []
    step = Narrator.step

    def marked(self, report):
        step(self, report)
        marks.append((time.perf_counter(), time.process_time(), report.metrics["batch/steps"].mean))

    Narrator.step = marked
    words = [
        f"training.steps={batches}",
        "training.epochs=1",
        "training.minibatches=1",
        "env.target_return=none",
        f"training.threads={threads}",
    ]
    words += [f"rollout.engine.threads={threads}", 'observability.sinks=["jsonl"]', *extra]
    config = resolve(load_config("ppo_sync", words))
    with tempfile.TemporaryDirectory() as folder:
        run(config, Path(folder) / "run", display="none")
    return rates(marks)


def measure_by_hand(batches: int, threads: int) -> dict[str, float]:
    """The usual loop over a vector environment, nothing around it."""
    import gymnasium
    import numpy as np
    import torch
    from torch import nn

    torch.manual_seed(0)
    torch.set_num_threads(threads)
    environments = gymnasium.make_vec("CartPole-v1", num_envs=COUNT, vectorization_mode="vector_entry_point")

    def network(outputs: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))

    actor, critic = network(2), network(1)
    parameters = [*actor.parameters(), *critic.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=4e-3, eps=1e-5)
    shown = torch.from_numpy(environments.reset(seed=0)[0])
    after_end = torch.zeros(COUNT)
    marks = []
    for _ in range(batches):
        observations, actions = torch.zeros(STEPS, COUNT, 4), torch.zeros(STEPS, COUNT, dtype=torch.int64)
        logprobs, rewards, dones, values, resets = (torch.zeros(STEPS, COUNT) for _ in range(5))
        for t in range(STEPS):
            observations[t], resets[t] = shown, after_end
            with torch.no_grad():
                chosen = torch.distributions.Categorical(logits=actor(shown))
                action = chosen.sample()
                logprobs[t], values[t] = chosen.log_prob(action), critic(shown)[:, 0]
            actions[t] = action
            now, reward, terminated, truncated, _ = environments.step(action.numpy())
            shown, rewards[t] = torch.from_numpy(now), torch.from_numpy(reward)
            dones[t] = after_end = torch.from_numpy(np.logical_or(terminated, truncated)).float()
        with torch.no_grad():
            following, running = critic(shown)[:, 0], torch.zeros(COUNT)
            advantages = torch.zeros(STEPS, COUNT)
            for t in reversed(range(STEPS)):
                error = rewards[t] + 0.99 * following * (1 - dones[t]) - values[t]
                running = error + 0.99 * 0.95 * (1 - dones[t]) * running
                advantages[t], following = running, values[t]
            targets = advantages + values
        valid = (1 - resets).flatten().bool()
        flat = observations.flatten(0, 1)[valid]
        chosen = torch.distributions.Categorical(logits=actor(flat))
        ratio = (chosen.log_prob(actions.flatten()[valid]) - logprobs.flatten()[valid]).exp()
        advantage = advantages.flatten()[valid]
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        surrogate = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        value_loss = (critic(flat)[:, 0] - targets.flatten()[valid]).square().mean()
        loss = -surrogate + 0.25 * value_loss - 0.01 * chosen.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        marks.append((time.perf_counter(), time.process_time(), float(valid.sum())))
    return rates(marks)


def rates(marks: list[tuple[float, float, float]]) -> dict[str, float]:
    """Valid steps a second after the first batches: of wall time and of processor time."""
    steps = sum(mark[2] for mark in marks[WARMUP:])
    first, last = marks[WARMUP - 1], marks[-1]
    return {"wall": steps / (last[0] - first[0]), "cpu": steps / (last[1] - first[1])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--one", choices=["headrace", "by_hand"], help=argparse.SUPPRESS)
    parser.add_argument("extra", nargs="*", help="overrides of the preset")
    args = parser.parse_args()
    if args.one:
        found = (
            measure_headrace(args.batches, args.threads, args.extra)
            if args.one == "headrace"
            else measure_by_hand(args.batches, args.threads)
        )
        print(json.dumps(found))
        return
    results: dict[str, list[dict[str, float]]] = {"headrace": [], "by_hand": []}
    for _ in range(args.rounds):
        for name, found in results.items():
            words = ["--one", name, "--batches", str(args.batches), "--threads", str(args.threads), *args.extra]
            done = subprocess.run([sys.executable, __file__, *words], capture_output=True, text=True, check=True)
            found.append(json.loads(done.stdout.splitlines()[-1]))
            print(
                f"{name:9} {found[-1]['wall']:10,.0f} steps/s   {found[-1]['cpu']:10,.0f} steps/processor second",
                flush=True,
            )
    for clock in ("wall", "cpu"):
        middle = {name: statistics.median(f[clock] for f in found) for name, found in results.items()}
        print(f"{clock}: headrace / by hand = {middle['headrace'] / middle['by_hand']:.2f}")


if __name__ == "__main__":
    main()
