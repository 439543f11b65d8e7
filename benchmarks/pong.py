"""Atari Pong with learning: steps a second of `headrace run` beside a plain PPO loop over the same vector environment.

    python benchmarks/pong.py --rounds 3

Both step ALE's `AtariVectorEnv` (N = 64, T = 16, frames of 84 x 84, four stacked, frame skip 4) and learn with the network of
Mnih et al. 2015 by one update a batch. The loop runs with its layout of images as given and with channels last; the better
one counts. Rounds alternate, each in a fresh process; clocks start after the first batches. Beside them stand the emulator
alone, the rate of a matrix product, and the steps a second that these two allow: 19 MFLOP for acting and 56 for learning a
step (acting's pass again, and twice that going back), or 56 in all where acting's pass is kept.
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

COUNT, STEPS, WARMUP = 64, 16, 2
FORWARD_MFLOP = 18.7
"""2 x (3.28 + 2.65 + 1.81 + 1.61) million multiplications: three convolutions and the layer of 512."""


def measure_headrace(args: argparse.Namespace) -> dict[str, float]:
    """Through assembly, ledger, weight sync and recording, as `headrace run` does it."""
    import torch

    from headrace.config import load_config, resolve
    from headrace.orchestrator.narrator import Narrator
    from headrace.session import run

    torch.set_num_threads(args.threads)
    marks: list[tuple[float, float, float]] = []
    step = Narrator.step

    def marked(self, report):
        step(self, report)
        marks.append((time.perf_counter(), time.process_time(), report.metrics["batch/steps"].mean))

    Narrator.step = marked
    options = f"{{ num_threads = {args.threads}, repeat_action_probability = 0.0 }}"
    words = [
        f"env.count={COUNT}", f"env.steps={STEPS}", "env.frame_stack=4", f"env.options={options}", "env.target_return=none",
        "policy.convolutions=[]", "policy.normalise_observations=false", "training.epochs=1", "training.minibatches=1",
        f"training.steps={args.batches}", f"training.threads={args.threads}", f"rollout.engine.threads={args.threads}",
        "checkpoint.every_steps=0", 'observability.sinks=["jsonl"]', *args.extra,
    ]  # fmt: skip
    config = resolve(load_config("pong", words))
    with tempfile.TemporaryDirectory() as folder:
        run(config, Path(folder) / "run", display="none")
    return rates(marks)


def environments(threads: int):
    from ale_py.vector_env import AtariVectorEnv

    return AtariVectorEnv("pong", COUNT, num_threads=threads)


def measure_by_hand(args: argparse.Namespace, channels_last: bool) -> dict[str, float]:
    """The usual loop, nothing around it. Policy and value share their layers, as there."""
    import numpy as np
    import torch
    from torch import nn

    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    made = environments(args.threads)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    body = nn.Sequential(
        nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(3136, 512), nn.ReLU(),
    ).to(memory_format=layout)  # fmt: skip
    actor, critic = nn.Linear(512, 6), nn.Linear(512, 1)
    parameters = [*body.parameters(), *actor.parameters(), *critic.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=2.5e-4, eps=1e-5, fused=True)

    def evaluate(frames):
        features = body((frames.float() / 255).contiguous(memory_format=layout))
        return torch.distributions.Categorical(logits=actor(features)), critic(features)[:, 0]

    shown = torch.from_numpy(made.reset(seed=0)[0])
    after_end = torch.zeros(COUNT)
    marks = []
    for _ in range(args.batches):
        observations = torch.zeros(STEPS, COUNT, 4, 84, 84, dtype=torch.uint8)
        actions = torch.zeros(STEPS, COUNT, dtype=torch.int64)
        logprobs, rewards, dones, values, resets = (torch.zeros(STEPS, COUNT) for _ in range(5))
        for t in range(STEPS):
            observations[t], resets[t] = shown, after_end
            with torch.no_grad():
                chosen, values[t] = evaluate(shown)
                actions[t] = chosen.sample()
                logprobs[t] = chosen.log_prob(actions[t])
            now, reward, terminated, truncated, _ = made.step(actions[t].numpy())
            shown, rewards[t] = torch.from_numpy(now), torch.from_numpy(reward)
            dones[t] = after_end = torch.from_numpy(np.logical_or(terminated, truncated)).float()
        with torch.no_grad():
            following, running = evaluate(shown)[1], torch.zeros(COUNT)
            advantages = torch.zeros(STEPS, COUNT)
            for t in reversed(range(STEPS)):
                error = rewards[t] + 0.99 * following * (1 - dones[t]) - values[t]
                running = error + 0.99 * 0.95 * (1 - dones[t]) * running
                advantages[t], following = running, values[t]
            targets = advantages + values
        valid = (1 - resets).flatten()
        chosen, value = evaluate(observations.flatten(0, 1))
        ratio = (chosen.log_prob(actions.flatten()) - logprobs.flatten()).exp()
        advantage = advantages.flatten()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        surrogate = (torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) * valid).sum() / valid.sum()
        value_loss = ((value - targets.flatten()).square() * valid).sum() / valid.sum()
        loss = -surrogate + 0.25 * value_loss - 0.01 * chosen.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        marks.append((time.perf_counter(), time.process_time(), float(valid.sum())))
    return rates(marks)


def measure_limits(args: argparse.Namespace) -> dict[str, float]:
    """Steps a second of the emulator alone, and GFLOP/s of a matrix product."""
    import numpy as np
    import torch

    torch.set_num_threads(args.threads)
    made = environments(args.threads)
    made.reset(seed=0)
    actions = np.random.default_rng(0).integers(6, size=(60, COUNT))
    for t in range(10):
        made.step(actions[t])
    began = time.perf_counter()
    for t in range(10, 60):
        made.step(actions[t])
    emulator = 50 * COUNT / (time.perf_counter() - began)
    one, other, best = torch.randn(1024, 1024), torch.randn(1024, 1024), 0.0
    for _ in range(10):
        began = time.perf_counter()
        one @ other
        best = max(best, 2 * 1024**3 / (time.perf_counter() - began) / 1e9)
    return {"wall": emulator, "cpu": best}


def rates(marks: list[tuple[float, float, float]]) -> dict[str, float]:
    """Valid steps a second after the first batches: of wall time and of processor time."""
    steps = sum(mark[2] for mark in marks[WARMUP:])
    first, last = marks[WARMUP - 1], marks[-1]
    return {"wall": steps / (last[0] - first[0]), "cpu": steps / (last[1] - first[1])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2, help="of the emulator and of torch, which take turns")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("extra", nargs="*", help="overrides of the run's config")
    args = parser.parse_args()
    measures = {
        "headrace": measure_headrace,
        "by hand": lambda args: measure_by_hand(args, False),
        "by hand, channels last": lambda args: measure_by_hand(args, True),
        "limits": measure_limits,
    }
    if args.one:
        print(json.dumps(measures[args.one](args)))
        return
    results: dict[str, list[dict[str, float]]] = {name: [] for name in measures}
    for _ in range(args.rounds):
        for name, found in results.items():
            words = ["--one", name, "--batches", str(args.batches), "--threads", str(args.threads), *args.extra]
            done = subprocess.run([sys.executable, __file__, *words], capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"{name} failed:\n{done.stderr[-2000:]}")
            found.append(json.loads(done.stdout.splitlines()[-1]))
            units = ("emulator steps/s", "GFLOP/s") if name == "limits" else ("steps/s", "steps/processor second")
            print(f"{name:24} {found[-1]['wall']:8,.0f} {units[0]}   {found[-1]['cpu']:8,.0f} {units[1]}", flush=True)
    for clock in ("wall", "cpu"):
        middle = {name: statistics.median(f[clock] for f in found) for name, found in results.items()}
        best = max(middle["by hand"], middle["by hand, channels last"])
        print(f"{clock}: headrace / the better loop = {middle['headrace'] / best:.2f}")
    emulator, gflops = (statistics.median(f[clock] for f in results["limits"]) for clock in ("wall", "cpu"))
    for words, passes in (("acting and learning", 4), ("with acting's pass kept", 3)):
        limit = 1 / (1 / emulator + passes * FORWARD_MFLOP / 1000 / gflops)
        print(f"limit {words}: {limit:,.0f} steps/s ({passes * FORWARD_MFLOP:.0f} MFLOP a step, and the emulator)")


if __name__ == "__main__":
    main()
