"""Control RL beside a hand-written torch PPO loop, Stable-Baselines3 and Sample Factory: steps a second with learning, and time to learn.

    python benchmarks/control.py                        # vectorised, learning, plain, one after the other
    python benchmarks/control.py vectorised --rounds 3  # CartPole, 1,024 at once, one update of 32,768 steps
    python benchmarks/control.py learning               # CartPole to a mean return of 475
    python benchmarks/control.py plain                  # CartPole made one by one with gymnasium.make
    python benchmarks/control.py sleeping               # environments that sleep 1 to 20 ms a step, heavy-tailed
    python benchmarks/control.py profile                # where the time goes, and the limits; --svg FILE draws it

Peers run in virtual environments of their own, made on first use beside the repository's root (.venv-sb3, .venv-sample_factory).
Programs alternate within a round, each in a fresh process; clocks start after imports, rates are taken after the first second.
Beside wall time there is processor time, of all processes of a program together, which a busy machine disturbs less.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from control_peers import TARGET, Marks, by_hand

ROOT = Path(__file__).resolve().parents[1]
PEERS = {
    "sb3": ["stable-baselines3==2.9.2", "gymnasium", "torch==2.13.0"],
    "sample_factory": ["sample-factory==2.1.1", "numpy==1.26.4", "gymnasium==0.29.1", "torch==2.13.0"],
}
ONCE = ["training.epochs=1", "training.minibatches=1"]
PLAIN = ["env.mode=sync", "env.count=128", *ONCE]
WIDE = ["env.mode=sync", "env.count=1024", "env.steps=64", "buffer.steps=3", "buffer.store=shared_memory", *ONCE]
SLEEPY = [f"env.id={Path(__file__).resolve()}:make_sleeping", *ONCE, "env.step_timeout_s=60"]

SCENARIOS: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "vectorised": {
        "ppo_sync, 1 thread": ("headrace", {"preset": "ppo_sync", "words": ONCE, "threads": 1}),
        "ppo_sync, 2 threads": ("headrace", {"preset": "ppo_sync", "words": ONCE, "threads": 2}),
        "ppo_sync overlapped": ("headrace", {"preset": "ppo_sync", "words": [*ONCE, "placement=separate", "training.threads=2"]}),
        "by hand, 1 thread": ("by_hand", {"threads": 1}),
        "by hand, 2 threads": ("by_hand", {"threads": 2}),
        "sample_factory, batched": ("sample_factory", {"batched": True}),
    },
    "plain": {
        "ppo_sync": ("headrace", {"preset": "ppo_sync", "words": PLAIN}),
        "impala": ("headrace", {"preset": "impala", "words": WIDE}),
        "impala, 128": ("headrace", {"preset": "impala", "words": PLAIN}),
        "sample_factory here": ("headrace", {"preset": "sample_factory", "words": [*PLAIN, "training.groups=1"]}),
        "sample_factory": ("sample_factory", {"batched": False}),
        "sb3 as it learns, 64, four epochs": ("sb3", {"epochs": 4, "batch": 512}),
        "sb3 at its quickest, 1,024, one epoch": ("sb3", {"count": 1024, "steps": 16, "batch": 16384}),
        "stepping alone, on all cores": ("stepping", {}),
    },
    "learning": {
        "cartpole": ("headrace", {"preset": "cartpole", "learn": True}),
        "by hand": ("by_hand", {"learn": True, "count": 64, "epochs": 4, "minibatches": 4, "lr": 2.5e-3}),
        "sb3": ("sb3", {"learn": True, "epochs": 4, "batch": 512}),
    },
    "sleeping": {
        "ppo_sync, 8 in turn": ("headrace", {"preset": "ppo_sync", "words": [*SLEEPY, "env.count=8"]}),
        "ppo_sync, 8 at once (async)": ("headrace", {"preset": "ppo_sync", "words": [*SLEEPY, "env.count=8", "env.mode=async"]}),
        "impala, 4 actors x 2": ("headrace", {
            "preset": "impala", "words": [*SLEEPY, "env.count=2", "rollout.engine.count=4", "training.groups=4",
            "rollout.max_in_flight=16"]}),
        "sample_factory, 4 workers x 2 x 1": ("headrace", {
            "preset": "sample_factory", "words": [*SLEEPY, "env.count=1", "env.workers=4", "training.groups=8",
            "rollout.max_in_flight=32"]}),
    },
}  # fmt: skip
RATIOS = {
    "vectorised": [
        (own, peer) for own in ("ppo_sync", "ppo_sync overlapped") for peer in ("by hand", "sample_factory")
    ],
    "plain": [("impala", "stepping alone")]
    + [
        (own, peer)
        for own in ("impala", "sample_factory here", "ppo_sync")
        for peer in ("sample_factory", "sb3 as it learns", "sb3 at its quickest")
    ],
    "learning": [("by hand", "cartpole"), ("sb3", "cartpole")],
    "sleeping": [(own, "ppo_sync, 8 in turn") for own in ("ppo_sync, 8 at once", "impala", "sample_factory")],
}


# ------------------------------------------------------------------------------------------------------------ headrace


def headrace(
    seconds: float, preset: str, words: Any = (), threads: int = 1, seed: int = 0, learn: bool = False
) -> dict:
    """A preset through assembly, ledger, weight sync and recording, as `headrace run` does it. learn: up to its target."""
    import gymnasium  # noqa: F401  (imports before clocks)

    import headrace.assemble_control
    import headrace.rollout.control_rollout
    import headrace.training.backends.control_device  # noqa: F401
    from headrace.config import load_config, resolve
    from headrace.orchestrator.narrator import Narrator
    from headrace.session import run

    step, total, marks = Narrator.step, 0.0, Marks()

    def marked(self, report) -> None:
        nonlocal total
        step(self, report)
        total += report.metrics["batch/steps"].mean
        if not learn:
            marks.add(total)
            if marks.seen[-1][0] - marks.seen[0][0] > seconds:
                os.kill(os.getpid(), signal.SIGINT)  # as a user's Ctrl-C: finishes the step, closes all
        elif report.metrics.get("reward/mean") and report.metrics["reward/mean"].mean >= TARGET:
            marks.add(total)

    Narrator.step = marked
    words = [f"seed={seed}", f"training.threads={threads}", f"rollout.engine.threads={threads}", *words]
    if not learn:
        words += ["training.steps=1000000", "env.target_return=none"]
    config = resolve(load_config(preset, [*words, 'observability.sinks=["jsonl"]']))
    with tempfile.TemporaryDirectory() as folder:
        marks.began = time.perf_counter()
        run(config, Path(folder) / "run", display="none")
    if learn:
        # None: it never got there within the preset's steps.
        return {"seconds": marks.seen[0][0] - marks.began if marks.seen else None, "steps": total}
    return marks.rates()


def make_sleeping(alpha: float = 1.2):
    """CartPole whose steps take 1 to 20 ms without work: Pareto, so that most are short and a few hold a batch up."""
    import gymnasium
    import numpy as np
    from gymnasium.envs.classic_control import CartPoleEnv
    from gymnasium.wrappers import TimeLimit

    class Sleeping(gymnasium.Wrapper):
        def __init__(self) -> None:
            super().__init__(TimeLimit(CartPoleEnv(), 500))
            self.random = np.random.default_rng()

        def step(self, action):
            time.sleep(min(0.020, 0.001 * (1 + self.random.pareto(alpha))))
            return self.env.step(action)

    return Sleeping()


# ------------------------------------------------------------------------------------------------------------- profile

ARCHITECTURES = {
    "ppo_sync": ("ppo_sync", ONCE),
    "ppo_sync overlapped": ("ppo_sync", [*ONCE, "placement=separate"]),
    "tensor_sim": ("tensor_sim", ONCE),
    "ppo_sync, plain": ("ppo_sync", PLAIN),
    "impala, plain": ("impala", PLAIN),
    "sample_factory, plain": ("sample_factory", [*PLAIN, "env.count=64", "training.groups=1"]),
}
PARTS = ("stepping", "acting", "learning")


def pure(preset: str, words: Any) -> dict[str, float]:
    """Processor microseconds a step of stepping alone, acting alone and learning alone, in the preset's own shapes."""
    import torch

    from headrace.config import load_config, resolve
    from headrace.policies.spaces import describe_spaces  # noqa: F401  (imports before clocks)
    from headrace.protocols import Resources, TrajectoryRequest, WorkerContext
    from headrace.rollout.control_rollout import Actor
    from headrace.training.backends.control_device import ControlDevice
    from headrace.training.steps import step_batch
    from headrace.types import RequestKey

    torch.set_num_threads(1)
    config = resolve(load_config(preset, list(words)))
    context = WorkerContext(name="engine-0", record=lambda event: None, resources=Resources(threads=0))

    async def measure() -> dict[str, float]:
        actor = Actor(context, config.env, config.policy, None, 0)
        units = [
            await actor.generate(TrajectoryRequest(key=RequestKey(lease_id=str(n))))
            for n in range(config.training.groups)
        ]
        batch = step_batch(units, config.algorithm.gamma)
        device = ControlDevice(context, config.training, config.algorithm, config.policy, None, 0)
        await device.begin(actor.engine.spaces)
        taken = actor.engine.distribution.to_environment(units[0].actions[0])
        noise = actor.engine.noise(1, config.env.count)[0]
        shown = {name: torch.from_numpy(leaf[0]) for name, leaf in units[0].observations.items()}
        state = actor.engine.network.initial_state(config.env.count)

        def step() -> None:
            actor.environments.step(taken)

        def act() -> None:
            with torch.inference_mode():
                actor.engine.step(shown, state, noise)

        loop = asyncio.get_running_loop()

        async def learn() -> None:
            await device.update(batch)

        found = {}
        for name, work, size in (("stepping", step, config.env.count), ("acting", act, config.env.count)):
            found[name] = least(work, size)
        best = float("inf")
        until = loop.time() + 2
        while loop.time() < until:
            began = time.thread_time()
            await learn()
            best = min(best, (time.thread_time() - began) / batch.rewards.size)
        found["learning"] = best * 1e6
        await actor.close()
        return found

    return asyncio.run(measure())


def least(work: Any, size: int, seconds: float = 1.5) -> float:
    """Processor microseconds of one of `size` steps, the least of many calls."""
    best, until = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < until:
        began = time.thread_time()
        work()
        best = min(best, time.thread_time() - began)
    return best / size * 1e6


def profile(seconds: float, svg: Path | None) -> None:
    """Of every architecture: what a step costs where, beside what the parts cost alone."""
    rows = {}
    print("| | steps/s | processor µs a step | stepping | acting | learning | all else | cores busy |")
    print("|---|---|---|---|---|---|---|---|")
    for name, (preset, words) in ARCHITECTURES.items():
        try:
            whole = call("headrace", {"preset": preset, "words": words, "seconds": seconds})
        except ProgramFailed as failure:
            print(failure, flush=True)
            continue
        shape = ("ppo_sync", [*words, "env.id=CartPole-v1"]) if preset == "tensor_sim" else (preset, words)
        parts = call("pure", {"preset": shape[0], "words": shape[1]})
        if preset == "tensor_sim":
            parts["stepping"] = call("simulator", {"count": 1024})["stepping"]
        total = 1e6 / whole["processor"]
        parts["all else"] = max(0.0, total - sum(parts.values()))
        rows[name] = parts
        cells = " | ".join(f"{parts[part]:.2f}" for part in (*PARTS, "all else"))
        print(
            f"| {name} | {whole['wall']:,.0f} | {total:.2f} | {cells} | {whole['wall'] * total / 1e6:.2f} |", flush=True
        )
    print("\nLimits on one core, steps/s, of stepping alone and of learning alone:")
    for name, parts in rows.items():
        print(f"    {name:24} {1e6 / parts['stepping']:12,.0f} {1e6 / parts['learning']:12,.0f}")
    grown = call("crowding", {})["grown"]
    print(
        f"\nA step of a plain environment takes {grown:.2f} times the processor time while another core is busy, too."
    )
    if svg is not None:
        svg.write_text(drawing(rows), encoding="utf-8")


def stepping(seconds: float) -> dict[str, float]:
    """The limit of plain environments: a process a core that only steps, with actions that it knows, and resets."""
    import multiprocessing

    import gymnasium

    def run(pipe: Any) -> None:
        environment = gymnasium.make("CartPole-v1").unwrapped
        environment.reset(seed=os.getpid())
        done, used, until = 0, time.process_time(), time.perf_counter() + seconds
        while time.perf_counter() < until:
            for turn in range(200):
                if environment.step(turn % 2)[2]:
                    environment.reset()
            done += 200
        pipe.send((done, time.process_time() - used))

    ends = []
    for _ in range(len(os.sched_getaffinity(0))):
        ours, theirs = multiprocessing.Pipe(duplex=False)
        multiprocessing.get_context("fork").Process(target=run, args=(theirs,), daemon=True).start()
        theirs.close()
        ends.append(ours)
    steps, used = (sum(column) for column in zip(*(end.recv() for end in ends), strict=True))
    return {"wall": steps / seconds, "processor": steps / used, "seconds": seconds}


def crowding(seconds: float = 1.5) -> dict[str, float]:
    """How much more processor time the same steps take while another process steps, too: cores that are two threads of
    one core share what computes."""
    import multiprocessing

    import gymnasium

    environment = gymnasium.make("CartPole-v1").unwrapped
    environment.reset(seed=0)

    def steps() -> None:
        for _ in range(200):
            if environment.step(1)[2]:
                environment.reset()

    def middle() -> float:
        took, until = [], time.perf_counter() + seconds
        while time.perf_counter() < until:
            began = time.thread_time()
            steps()
            took.append(time.thread_time() - began)
        return statistics.median(took)

    def for_ever() -> None:
        while True:
            steps()

    alone = middle()
    other = multiprocessing.get_context("fork").Process(target=for_ever, daemon=True)
    other.start()
    try:
        return {"grown": middle() / alone}
    finally:
        other.kill()


def simulator(count: int) -> dict[str, float]:
    """Processor microseconds a step of the simulated CartPole."""
    import torch

    from headrace.rollout.environments.simulators import make_simulator

    torch.set_num_threads(1)
    made = make_simulator("CartPole-v1", count)
    made.reset()
    actions = torch.zeros(count, dtype=torch.int64)
    return {"stepping": least(lambda: made.step(actions), count)}


def drawing(rows: dict[str, dict[str, float]]) -> str:
    """Stacked bars: processor microseconds a step, one bar an architecture."""
    colours = {"stepping": "#4c78a8", "acting": "#f58518", "learning": "#54a24b", "all else": "#bab0ac"}
    widest = max(sum(parts.values()) for parts in rows.values())
    scale, height = 480 / widest, 60 + 34 * len(rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {height}" font-family="sans-serif" font-size="13">'
    ]
    parts.append(f'<rect width="760" height="{height}" fill="#fff"/>')
    for index, (name, colour) in enumerate(colours.items()):
        parts.append(f'<rect x="{180 + 110 * index}" y="12" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{197 + 110 * index}" y="23">{name}</text>')
    for index, (name, found) in enumerate(rows.items()):
        y, x = 40 + 34 * index, 180.0
        parts.append(f'<text x="172" y="{y + 16}" text-anchor="end">{name}</text>')
        for part, colour in colours.items():
            width = found[part] * scale
            parts.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="22" fill="{colour}"/>')
            x += width
        parts.append(f'<text x="{x + 6:.1f}" y="{y + 16}">{sum(found.values()):.1f} µs</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


# ------------------------------------------------------------------------------------------------------------- running

OWN = {
    "headrace": headrace,
    "by_hand": by_hand,
    "pure": pure,
    "simulator": simulator,
    "crowding": crowding,
    "stepping": stepping,
}


class ProgramFailed(Exception):
    """One program's end without an answer; the others go on."""


def call(program: str, words: dict[str, Any]) -> dict:
    """Run a program in a fresh process, a peer's in its own virtual environment; its last line is the answer."""
    if program in PEERS:
        command = [
            str(peer_python(program)),
            str(Path(__file__).with_name("control_peers.py")),
            program,
            json.dumps(words),
        ]
    else:
        command = [sys.executable, __file__, "--one", program, json.dumps(words)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise ProgramFailed(f"{program} {words} failed:\n{done.stdout[-600:]}\n{done.stderr[-1500:]}")
    return json.loads(lines[-1])


def peer_python(name: str) -> Path:
    folder = ROOT / f".venv-{name}"
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        print(f"making {folder.name}", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", *PEERS[name]], check=True)
        (folder / "ready").touch()
    return python


def compare(scenario: str, rounds: int, seconds: float) -> None:
    """All programs of a scenario, round after round; medians, spread and ratios."""
    key = "seconds" if scenario == "learning" else "wall"
    found: dict[str, list[dict]] = {name: [] for name in SCENARIOS[scenario]}
    print(f"\n{scenario}", flush=True)
    for number in range(rounds):
        for name, (program, words) in SCENARIOS[scenario].items():
            try:
                one = call(
                    program, {"seconds": seconds, **words, **({"seed": number} if scenario == "learning" else {})}
                )
            except ProgramFailed as failure:
                print(f"    {failure}", flush=True)
                continue
            found[name].append(one)
            print(
                f"    {name:36} " + "  ".join(f"{k} {v:,.2f}" if v else f"{k} none" for k, v in one.items()), flush=True
            )
    middle = {}
    for name, runs in found.items():
        if not runs:
            continue
        values = [run[key] for run in runs]
        if any(value is None for value in values):
            print(f"{name}: {sum(v is None for v in values)} of {len(values)} never reached {TARGET:g}")
            continue
        middle[name] = statistics.median(values)
        unit = "s" if key == "seconds" else "steps/s"
        print(f"{name:40} {middle[name]:12,.1f} {unit} ({min(values):,.1f} to {max(values):,.1f})")
    for one, other in RATIOS[scenario]:
        ours, theirs = (max((v for n, v in middle.items() if is_of(n, k, scenario)), default=0.0) for k in (one, other))
        if ours and theirs:
            print(f"{one} / {other} = {ours / theirs:.2f}")


def is_of(name: str, key: str, scenario: str) -> bool:
    """Whether a program is one that a ratio names: the best of its kind counts, whatever its number of threads."""
    return name == key or name.startswith(f"{key},") or name.startswith(f"{key} (")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", metavar="WHAT", help="default: vectorised learning plain")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each measurement of a rate")
    parser.add_argument("--svg", type=Path, help="where profile draws")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(OWN[args.one[0]](**json.loads(args.one[1]))))
        return
    if unknown := set(args.what) - {*SCENARIOS, "profile"}:
        parser.error(f"{', '.join(unknown)}: use {', '.join(SCENARIOS)} or profile")
    for what in args.what or ["vectorised", "learning", "plain"]:
        if what == "profile":
            profile(args.seconds, args.svg)
        else:
            compare(what, args.rounds, args.seconds)


if __name__ == "__main__":
    main()
