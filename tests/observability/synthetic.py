"""Delays of the parts into the events and files of a run that never ran: what the observability tests read."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headrace.observability.config import ObservabilityConfig
from headrace.observability.metrics import DropTally, lag_metrics
from headrace.observability.recorder import RunRecorder
from headrace.types import Episode, Event, Group, SamplingParams, Score, Task, TokenSample


@dataclass(frozen=True)
class Delays:
    """Seconds that each part needs for one batch of `groups` groups; scoring has one worker."""

    generate_s: float = 1.0
    score_s: float = 0.1
    train_s: float = 1.0
    publish_s: float = 0.02
    groups: int = 8
    ahead: int = 1
    in_flight: int = 8


def flow_events(delays: Delays, steps: int = 12, start_ns: int = 5_000_000_000, seed: int = 0) -> list[Event]:
    """The events of a first-in first-out flow with leases: a closed form of who waits for whom."""
    random_ = random.Random(seed)
    events: list[Event] = []

    def add(
        source: str, kind: str, start: float, end: float | None = None, subject: str = "", version: int = -1
    ) -> None:
        duration = 0 if end is None else int((end - start) * 1e9)
        if end is None or duration > 0:
            events.append(Event(start_ns + int(start * 1e9), source, kind, subject, version, duration))

    puts: list[float] = []
    live: list[float] = []
    engine_free = reward_free = trainer_free = 0.0
    per_group = delays.generate_s / delays.groups
    for step in range(steps):
        for member in range(delays.groups):
            index, lease = len(puts), f"{step}-{member}"
            room = puts[index - delays.in_flight] if index >= delays.in_flight else 0.0
            oldest = step - 1 - delays.ahead
            room = max(room, live[oldest] if oldest >= 0 else 0.0)
            add("controller", "wait_room", engine_free, max(engine_free, room))
            admitted = max(engine_free, room)
            version = sum(1 for at in live if at <= admitted)
            add("controller", "admitted", admitted, subject=lease)
            engine_free = admitted + per_group * random_.uniform(0.9, 1.1)
            add("engine-0", "generate", admitted, engine_free, version=version)
            scored = max(engine_free, reward_free)
            reward_free = scored + delays.score_s / delays.groups
            add("reward-0", "score", scored, reward_free, subject=lease)
            add("controller", "put", reward_free, subject=lease)
            puts.append(reward_free)
        begin = max(trainer_free, puts[-1])
        add("controller", "wait_batch", trainer_free, begin)
        trained = begin + delays.train_s * 0.9
        add("controller", "taken", begin, version=step)
        add("trainer", "forward_backward", begin, trained, version=step)
        add("trainer", "optimizer_step", trained, begin + delays.train_s, version=step)
        published = begin + delays.train_s + delays.publish_s
        add("trainer", "publish", begin + delays.train_s, published, version=step + 1)
        for member in range(delays.groups):
            add("controller", "trained", published, subject=f"{step}-{member}", version=step + 1)
        add("engine-0", "prepare", published, published + 0.01, version=step + 1)
        add("controller", "live", published + 0.012, version=step + 1)
        live.append(published + 0.012)
        trainer_free = published
    return sorted(events, key=lambda event: event.time_ns)


def token_sample(sample_id: str, versions: list[int], finish: str = "stop", prompt: int = 10) -> TokenSample:
    """`prompt` prompt tokens 1000, 1001, ... and one sampled token for each version."""
    n = len(versions)
    return TokenSample(
        sample_id=sample_id,
        token_ids=np.array([1000 + i for i in range(prompt)] + [ord("a") + i % 26 for i in range(n)]),
        loss_mask=np.array([0] * prompt + [1] * n),
        behavior_logprobs=np.array([math.nan] * prompt + [-0.5] * n),
        policy_versions=np.array([-1] * prompt + versions),
        sampling=SamplingParams(),
        finish_reason=finish,
    )


def group(group_id: str, rewards: list[float | None], versions: list[list[int]], finish: str = "stop") -> Group:
    episodes = tuple(
        Episode(episode_id=f"{group_id}/{i}", samples=(token_sample(f"{group_id}/{i}.0", v, finish),))
        for i, v in enumerate(versions)
    )
    scores = tuple(Score(reward=r, parts={"exact": r}) for r in rewards)
    task = Task(task_id=f"task-{group_id}", source="sums", payload={"prompt": "13 + 35 ="})
    return Group(group_id=group_id, task=task, expected_size=len(rewards), episodes=episodes, scores=scores)


def decode(ids: list[int]) -> str:
    return "".join("13 + 35 = "[i - 1000] if i >= 1000 else chr(i) for i in ids)


CONFIG = """name = "sums"
seed = 0
placement = "separate"
[model]
path = "smollm2"
[buffer]
depth = "double"
[training]
groups = 8
"""


def write_run(folder: Path, delays: Delays, steps: int = 60, finished: bool = True) -> Path:
    """A plausible run on disk, written by the recorder itself."""
    rng = np.random.default_rng(0)
    recorder = RunRecorder(folder, ObservabilityConfig(sinks=("jsonl",)))
    (folder / "config.toml").write_text(CONFIG)
    events = flow_events(delays, steps)
    for event in events:
        recorder.event(event)
    borders = [0.0, *sorted({(e.time_ns - 5e9) / 1e9 for e in events if e.kind == "trained"})]
    tally = DropTally()
    evaluation = []
    for step in range(1, steps + 1):
        progress = 1 / (1 + math.exp(-(step - steps * 0.3) / (steps * 0.09)))
        reward = float(np.clip(0.13 + 0.68 * progress + rng.normal(0, 0.05), 0, 1))
        step_s = borders[step] - borders[step - 1]
        waited = max(0.0, step_s - delays.train_s - delays.publish_s)
        groups = [group(f"g{step}-{i}", [1.0 if rng.random() < reward else 0.0 for _ in range(4)],
                        [[step - 1] * int(rng.integers(3, 9)) for _ in range(4)]) for i in range(2)]  # fmt: skip
        for _ in groups:
            tally.trained(int(x) for x in rng.gamma(2.0, 18, 32))
        if rng.random() < 0.2:
            tally.dropped("lag", [int(x) for x in rng.gamma(3.0, 40, 8)])
        if rng.random() < 0.05:
            tally.dropped("retries", [20])
        p50 = 14 + 22 * progress + rng.normal(0, 1)
        lags = [int(x) for x in rng.choice([0, 1, 1, 1, 2], 8)] if step > 2 else [0] * 8
        truncated = float(np.clip(0.22 - 0.2 * progress + rng.normal(0, 0.02), 0, 1))
        recorder.step(step, {
            "reward/mean": reward, "reward/std": math.sqrt(reward * (1 - reward)),
            "group/zero_variance_share": float(np.clip(0.1 + 0.3 * abs(progress - 0.5) + rng.normal(0, 0.05), 0, 1)),
            "loss/clip_share": abs(rng.normal(0.01, 0.005)), "loss/entropy": 1.4 - 0.9 * progress + rng.normal(0, 0.03),
            "loss/ratio_max": 1.3, "optimizer/grad_norm": abs(rng.normal(0.8, 0.2)), "optimizer/lr": 1e-5,
            "mismatch/logprob_diff_mean": abs(rng.normal(2e-3, 3e-4)), "mismatch/logprob_diff_max": abs(rng.normal(0.06, 0.02)),
            "mismatch/mixed/logprob_diff_mean": abs(rng.normal(9e-3, 2e-3)), "correction/ess": 0.97 - abs(rng.normal(0, 0.01)),
            "length/mean": p50 + 2, "length/p50": p50, "length/p99": p50 * 2.4 + rng.normal(0, 3),
            "length/truncated_share": truncated, "finish/stop": 1 - truncated, "finish/length": truncated, "finish/abort": 0.0,
            "rate/samples_per_s": 64 / step_s, "rate/tokens_per_s": 64 * p50 / step_s,
            "queue/running": 8.0, "queue/ready": float(rng.integers(0, 6)), "queue/held": 15.0,
            "sync/seconds": abs(rng.normal(0.42, 0.05)), "sync/standstill_s": abs(rng.normal(0.004, 0.001)),
            "sync/to_first_token_s": abs(rng.normal(0.6, 0.05)),
            "time/step_s": step_s, "time/wait_batch_s": waited, "time/forward_backward_s": delays.train_s * 0.9,
            "time/optimizer_step_s": delays.train_s * 0.1, "time/publish_s": delays.publish_s,
        } | lag_metrics(lags) | tally.row())  # fmt: skip
        recorder.samples(step, groups, decode)
        if step in (1, steps // 2, steps):
            score = 0.1 + 0.75 * progress
            evaluation.append({"step": step, "greedy": score, "sampled": score - 0.06, "count": 100})
    recorder.close()
    (folder / "evaluation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in evaluation))
    state = {
        "state": "finished" if finished else "running",
        "steps": steps,
        "elapsed_s": borders[-1],
        "counts": {"trained": 8 * steps},
    }
    (folder / "run.json").write_text(json.dumps(state))
    return folder
