"""Whole GRPO steps beside TRL's `GRPOTrainer`: same model, prompts, reward and hyperparameters, interleaved rounds.

    python benchmarks/grpo_vs_trl.py [--work sums tiny] [--steps 20] [--rounds 3] [--placements sync separate]

TRL gets a virtual environment of its own (made on first use in `.venv-trl`) and all cores, as has headrace in `sync`; in
`separate` engine and trainer have a core each. Both call the reward function in their own process. The first step of every
run is left out. A round has its own seed and prompts, the same in the same order for both, so that rewards are compared step
by step: the difference is given over the second half of the steps, with its standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv-trl"
PACKAGES = ("trl==1.16.*", "datasets", "accelerate")
SAMPLES = 8
"""In a group."""


@dataclass(frozen=True, slots=True)
class Work:
    """What is learned, by both: `matched` is the regular expression that takes the answer out of a completion; warmup: steps
    over which the learning rate rises."""

    model: str
    groups: int
    max_tokens: int
    lr: float
    matched: str
    overrides: tuple[str, ...]
    warmup: int = 0

    @property
    def samples(self) -> int:
        """In a batch."""
        return self.groups * SAMPLES


WORKS = {
    "sums": Work("smollm2", 8, 8, 1e-5, r"-?[0-9]+", ("reward.functions=[{use='first_number'}]",)),
    "tiny": Work(
        "tiny",
        128,
        4,
        1.5e-3,
        r"^.*$",
        ("reward.functions=[{use='exact'}]", "rollout.engine.max_running=512"),
        # Adam's first steps at this rate would unlearn half of what the model can do, one way or another with each seed.
        warmup=10,
    ),
}

# Runs in TRL's environment. One line of JSON: seconds since the start and mean reward at the end of each step.
PEER = r"""
import json, re, sys, time
import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

job = json.loads(sys.argv[1])
torch.set_num_threads(job["threads"])
rows = [json.loads(line) for line in open(job["tasks"])]

def reward(prompts, completions, answer, **columns):
    found = [re.search(job["matched"], text) for text in completions]
    return [float(bool(f) and f.group().strip() == a) for f, a in zip(found, answer)]

class Clock(TrainerCallback):
    ends, rewards = [], []
    def on_step_end(self, args, state, control, **kwargs):
        self.ends.append(time.perf_counter())
    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "reward" in logs:
            self.rewards.append(logs["reward"])

n = job["groups"] * job["samples"]
config = GRPOConfig(
    output_dir=job["out"], max_steps=job["steps"], per_device_train_batch_size=n, num_generations=job["samples"],
    max_completion_length=job["max_tokens"], temperature=1.0, learning_rate=job["lr"], lr_scheduler_type="linear",
    warmup_steps=0, adam_beta1=0.9, adam_beta2=0.999, weight_decay=0.0, max_grad_norm=1.0, beta=0.0, epsilon=0.2,
    epsilon_high=0.28, loss_type="dapo", scale_rewards="group", mask_truncated_completions=False, use_cpu=True, bf16=False,
    gradient_checkpointing=False, logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
    shuffle_dataset=False, seed=job["seed"], dataloader_pin_memory=False, model_init_kwargs={"dtype": "float32"},
)
clock = Clock()
trainer = GRPOTrainer(job["model"], reward_funcs=reward, args=config, train_dataset=Dataset.from_list(rows), callbacks=[clock])
if rising := job["warmup"]:  # transformers' own schedule begins with a step at rate 0, and would stay one behind
    falling = max(job["steps"] - rising, 1)
    trainer.create_optimizer()
    trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
        trainer.optimizer, lambda k: (k + 1) / rising if k < rising else max(0.0, 1 - (k - rising) / falling)
    )
trainer.train()
print("RESULT " + json.dumps({"ends": clock.ends, "rewards": clock.rewards}))
"""


@dataclass(frozen=True, slots=True)
class Ran:
    """samples_per_s after the first step; mean reward of each step; share of what the cores can compute."""

    samples_per_s: float
    rewards: list[float]
    share: float | None = None


def peer_python() -> Path:
    """The interpreter of TRL's environment, which is made on first use."""
    python = VENV / "bin" / "python"
    if not (VENV / ".installed").exists():
        print(f"making {VENV.name} (some minutes)", flush=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt")]
        subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
        subprocess.run([*pip, "torch"], check=True)
        subprocess.run([*pip, "transformers", *PACKAGES], check=True)
        (VENV / ".installed").touch()
    return python


def run_trl(work: Work, model: Path, tasks: Path, steps: int, seed: int, threads: int) -> Ran:
    with tempfile.TemporaryDirectory() as out:
        job = {
            **{name: getattr(work, name) for name in ("groups", "max_tokens", "lr", "matched", "warmup")},
            "model": str(model),
            "tasks": str(tasks),
            "steps": steps,
            "seed": seed,
            "samples": SAMPLES,
            "threads": threads,
            "out": out,
        }
        command = [str(peer_python()), "-c", PEER, json.dumps(job)]
        done = subprocess.run(command, capture_output=True, text=True, env=_environment(threads))
    line = next((text for text in done.stdout.splitlines() if text.startswith("RESULT ")), None)
    if line is None:
        raise SystemExit(f"TRL failed:\n{done.stderr[-2000:]}")
    found = json.loads(line.removeprefix("RESULT "))
    return Ran(_rate(found["ends"], work), found["rewards"])


def run_headrace(work: Work, placement: str, tasks: Path, steps: int, seed: int, threads: int, peak: float) -> Ran:
    own = 1 if placement == "separate" else threads
    with tempfile.TemporaryDirectory() as out:
        command = [
            *(sys.executable, "-m", "headrace.cli", "run", "quickstart", "--name", "bench", "--display", "none"),
            *(f"placement={placement}", f"model.path={work.model}", f"tasks.source=jsonl:{tasks}"),
            *("tasks.shuffle=false", f"seed={seed}"),
            *(f"group.size={SAMPLES}", f"training.groups={work.groups}", f"training.steps={steps}"),
            *(
                "rollout.sampling.stop=[]",
                "rollout.sampling.temperature=1",
                f"rollout.sampling.max_tokens={work.max_tokens}",
            ),
            f"training.optimizer={{lr={work.lr}, schedule='linear', betas=[0.9, 0.999], warmup_steps={work.warmup}}}",
            "observability.sinks=['jsonl']",  # TRL reports to nobody, either
            *(f"training.threads={own}", f"rollout.engine.threads={own}", "evaluation.source="),
            *("training.micro_tokens=8192", "reward.workers=0", *work.overrides),
        ]
        # Alternating parts share the cores best in one process: there is one pool of threads.
        command += ["runtime=local"] if placement == "sync" else []
        done = subprocess.run(command, capture_output=True, text=True, cwd=out, env=_environment(own))
        if done.returncode:
            raise SystemExit(f"headrace failed:\n{done.stderr[-2000:]}")
        folder = Path(out) / "runs" / "bench"
        events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    ends: dict[int, float] = {}
    for time_ns, _, kind, _, version, _ in events:
        if kind == "trained":
            ends[version] = max(ends.get(version, 0), time_ns / 1e9)
    rate = _rate([ends[version] for version in sorted(ends)], work)
    rows = [row for row in rows if "reward/mean" in row]
    flops = statistics.mean(_flops(work, row) for row in rows[1:])
    seconds = work.samples / rate
    return Ran(rate, [row["reward/mean"] for row in rows], flops / seconds / peak)


def _rate(ends: list[float], work: Work) -> float:
    return work.samples * (len(ends) - 1) / (ends[-1] - ends[0])


def compare_rewards(ours: list[Ran], peers: list[Ran]) -> str:
    """Mean rewards of the second half of the steps, and how far they are apart: mean and standard error of the differences
    between steps on the same prompts."""
    halves = [
        (run.rewards[len(run.rewards) // 2 :], peer.rewards[len(run.rewards) // 2 :])
        for run, peer in zip(ours, peers, strict=True)
    ]
    pairs = [pair for half in halves for pair in zip(*half, strict=False)]
    apart = [own - other for own, other in pairs]
    error = statistics.stdev(apart) / len(apart) ** 0.5 if len(apart) > 1 else float("nan")
    own, other = (statistics.mean(values) for values in zip(*pairs, strict=True))
    return f"{own:.3f}, TRL's {other:.3f}: apart by {statistics.mean(apart):+.3f} (standard error {error:.3f})"


def _flops(work: Work, row: dict[str, float]) -> float:
    """Multiply-adds of one step, counted once each: prompts once a group, generated tokens, trained inputs, logits."""
    from headrace.config import ModelConfig
    from headrace.models import resolve_model

    config = json.loads((resolve_model(ModelConfig(path=work.model)) / "config.json").read_text())
    width, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    layer = width * width * (2 + 2 * kv / heads) + 3 * width * inner
    head = width * config["vocab_size"]
    generated = row["length/mean"] * work.samples
    forward = layers * layer * (row["length/prompt_mean"] * work.groups + generated) + head * generated
    trained = row.get("batch/inputs", 0.0)
    return 2 * forward + 6 * (layers * layer + head) * trained


def measure_peak(threads: int) -> float:
    """FLOP/s of a large matrix product with these threads, in a process of its own."""
    code = f"""
import time, torch
torch.set_num_threads({threads})
a, best = torch.randn(1024, 1024), 0
for _ in range(40):
    started = time.perf_counter()
    a @ a
    best = max(best, 2 * 1024**3 / (time.perf_counter() - started))
print(best)
"""
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def _environment(threads: int) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}


def write_tasks(work: Work, steps: int, seed: int, folder: Path) -> Path:
    """The prompts of a round, for both."""
    import numpy as np

    from headrace.rollout.sources.arithmetic import sums

    rows = sums({"style": "plain"} if work.model == "tiny" else {"max_sum": 99}, heldout=False)
    order = np.random.default_rng(seed).permutation(rows.length)[: steps * work.groups * 2]
    path = folder / "tasks.jsonl"
    with path.open("w") as file:
        for index in order:
            payload = rows.get(int(index))[1]
            file.write(json.dumps({"prompt": payload["prompt"], "answer": payload["answer"]}) + "\n")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--placements", nargs="+", choices=("sync", "separate"), default=["sync", "separate"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    threads = len(os.sched_getaffinity(0))

    from headrace.config import ModelConfig
    from headrace.models import resolve_model

    peer_python()
    for name in options.work:
        work = WORKS[name]
        if options.steps <= work.warmup:
            parser.error(f"--steps {options.steps} ends before the warm-up of {name}: take more than {work.warmup}")
        model = resolve_model(ModelConfig(path=work.model), progress=print)
        ran: dict[str, list[Ran]] = {key: [] for key in ("trl", *options.placements)}
        for seed in range(options.rounds):
            peak = measure_peak(threads)
            with tempfile.TemporaryDirectory() as folder:
                tasks = write_tasks(work, options.steps, seed, Path(folder))
                ran["trl"].append(run_trl(work, model, tasks, options.steps, seed, threads))
                for placement in options.placements:
                    ran[placement].append(run_headrace(work, placement, tasks, options.steps, seed, threads, peak))
            for key, rounds in ran.items():
                last = rounds[-1]
                share = f", {last.share:.0%} of {peak / 1e9:.0f} GFLOP/s" if last.share is not None else ""
                rewards = " ".join(f"{reward:.2f}" for reward in last.rewards)
                print(f"{name} round {seed} {key:9} {last.samples_per_s:8.1f} samples/s{share}  {rewards}", flush=True)
        for placement in options.placements:
            ratios = [
                ours.samples_per_s / peer.samples_per_s for ours, peer in zip(ran[placement], ran["trl"], strict=True)
            ]
            print(
                f"{name} {placement}: {statistics.median(ratios):.2f} times TRL "
                f"({min(ratios):.2f} to {max(ratios):.2f} over {options.rounds} rounds); "
                f"mean reward {compare_rewards(ran[placement], ran['trl'])}"
            )


if __name__ == "__main__":
    main()
