"""The embedded engine alone, on random weights: tokens a second by number of requests, and where a decoding step's time goes.

    python benchmarks/engine_profile.py [--size smollm2|tiny] [--rounds 5] [--threads 1] [--requests 1 8 64] [--profile]

`smollm2` has the shape of SmolLM2-135M, `tiny` that of the built-in model. Prompts have 20 to 120 tokens, answers 48, all at
temperature 1; groups are 8 siblings where there are so many requests. `--profile` times the parts of a step inside
real runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections import defaultdict

import numpy as np
import torch

from headrace.protocols import Resources, WorkerContext
from headrace.rollout.config import EngineConfig
from headrace.rollout.engines.native import batches, engine
from headrace.types import GenerateRequest, RequestKey, SamplingParams

SHAPES = {
    "smollm2": dict(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, tie_word_embeddings=True,
    ),
    "tiny": dict(
        vocab_size=64, hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, tie_word_embeddings=True,
    ),
}  # fmt: skip
NEW_TOKENS = 48


def make_model(size: str, layers: int) -> str:
    import transformers

    torch.manual_seed(0)
    shape = {**SHAPES[size], **({"num_hidden_layers": layers} if layers else {})}
    config = transformers.LlamaConfig(**shape, max_position_embeddings=2048, eos_token_id=1)
    folder = tempfile.mkdtemp(prefix="headrace-bench-")
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def requests_of(count: int, vocab: int, round_: int) -> list[GenerateRequest]:
    rng = np.random.default_rng(round_)
    siblings = min(8, count)
    made = []
    for group in range(-(-count // siblings)):
        prompt = rng.integers(2, vocab, size=int(rng.integers(20, 121)))
        for member in range(siblings):
            key = RequestKey(lease_id=f"{round_}.{count}.{group}", member=member)
            params = SamplingParams(max_tokens=NEW_TOKENS, min_tokens=NEW_TOKENS, seed=97 * group + member)
            made.append(GenerateRequest(key=key, group_id=str(group), prompt_ids=prompt, sampling=params))
    return made[:count]


async def generate_all(made: engine.NativeEngine, requests: list[GenerateRequest]) -> tuple[float, float]:
    """Seconds on the wall, and of processor time: the second does not see what else the machine does."""
    start, busy = time.perf_counter(), time.process_time()
    got = await asyncio.gather(*map(made.generate, requests))
    assert all(one.token_ids.size == NEW_TOKENS for one in got)
    return time.perf_counter() - start, time.process_time() - busy


class Clock:
    """Adds up the seconds spent in functions that it wraps; a wrapped function inside another counts for itself alone."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self.stack: list[float] = []

    def wrap(self, owner: object, name: str, label: str) -> None:
        inner = getattr(owner, name)

        def timed(*args, **more):
            self.stack.append(0.0)
            start = time.perf_counter()
            try:
                return inner(*args, **more)
            finally:
                took = time.perf_counter() - start
                self.spent[label] += took - self.stack.pop()
                if self.stack:
                    self.stack[-1] += took

        setattr(owner, name, timed)


def watch() -> Clock:
    """Every part of a pass under a clock. For the rest of the process."""
    from headrace.rollout.engines.native import attention, compiled, core, linear, llama

    clock = Clock()
    clock.wrap(core.NativeCore, "advance", "scheduling")
    clock.wrap(batches.Batcher, "ragged", "batch arrays")
    clock.wrap(core.NativeCore, "draw", "stamping tokens")
    clock.wrap(core.NativeCore, "sample", "sampling")
    clock.wrap(llama.LlamaWeights, "forward", "embedding")
    for product in linear.FORMS.values():
        clock.wrap(product, "__call__", "matrix products")
    for product in (compiled.PanelLinear, compiled.TileLinear):
        clock.wrap(product, "__call__", "matrix products")
    for steps in (compiled.CompiledSteps, llama.TorchSteps):
        clock.wrap(steps, "norm", "norms, residuals")
        clock.wrap(steps, "gate", "gates")
        clock.wrap(steps, "mix", "rotary embedding, writing keys and values, attention")
    clock.wrap(attention, "_product", "attention of prompts, or with torch")
    return clock


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SHAPES, default="smollm2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--weights", default="model", help="rollout.engine.weights")
    parser.add_argument("--layers", type=int, default=0, help="0: as many as the model has")
    parser.add_argument("--torch", action="store_true", help="no compiled steps between the products")
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    clock = watch() if given.profile else None
    context = WorkerContext(name="engine-0", record=lambda event: None, resources=Resources(threads=given.threads))
    more = {} if given.weights == "model" else {"weights": given.weights}
    config = EngineConfig(max_running=64, threads=given.threads, **more)
    if given.torch:
        from headrace.rollout.engines.native import llama

        llama.steps_for = lambda *shape: llama.TorchSteps()
    made = engine.build_native(
        context, config, make_model(given.size, given.layers), "float32", None, "keep", inline=True
    )
    vocab = SHAPES[given.size]["vocab_size"]
    for count in given.requests:
        await generate_all(made, requests_of(count, vocab, 10_000))
        if clock:
            clock.spent.clear()
        took = [await generate_all(made, requests_of(count, vocab, r)) for r in range(given.rounds)]
        rates = sorted(count * NEW_TOKENS / wall for wall, _ in took)
        busy = statistics.median(cpu for _, cpu in took)
        row = {
            "size": given.size, "threads": given.threads, "requests": count, "rounds": given.rounds, "weights": given.weights,
            "tokens_per_s": round(statistics.median(rates), 1), "lowest": round(rates[0], 1), "highest": round(rates[-1], 1),
            "tokens_per_cpu_s": round(count * NEW_TOKENS / busy, 1),
        }  # fmt: skip
        if clock:
            total = sum(clock.spent.values())
            parts = sorted(clock.spent.items(), key=lambda part: -part[1])
            row["share"] = {name: round(seconds / total, 3) for name, seconds in parts}
        print(json.dumps(row), flush=True)
    await made.close()


if __name__ == "__main__":
    asyncio.run(main())
