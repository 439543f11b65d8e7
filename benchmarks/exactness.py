"""How near log-probabilities of float32 are to those of a pass in float64: the embedded engine's, in each way in which this
processor can run its products, and Hugging Face's.

    python benchmarks/exactness.py [--requests 16] [--threads 2]

SmolLM2-135M at temperature 1, eight groups of eight requests as in `engine.py`; some are scored.
"""

from __future__ import annotations

import argparse
import os

import torch
from engine import make, native

from headrace.config import ModelConfig
from headrace.models import resolve_model
from headrace.rollout.engines.native import tiles


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=16, help="that are scored")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    from transformers import AutoModelForCausalLM

    folder = str(resolve_model(ModelConfig(path="smollm2"), progress=print))
    plain = {
        dtype: AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        for dtype in (torch.float64, torch.float32)
    }
    end = plain[torch.float64].generation_config.eos_token_id
    work = make("groups", 3)

    def score(dtype: torch.dtype, prompt: list[int], ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            logits = plain[dtype](torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
            # The engine holds end tokens back, as it was told.
            logits = logits.index_fill(1, torch.tensor(end).view(-1), float("-inf"))
            return logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0].double()

    ways = {"by panels": lambda: False}
    if tiles.available():
        ways = {"in the matrix unit": lambda: True, **ways}
    for way, available in ways.items():
        tiles.available = available
        answers, said = native(folder, options.threads)(work)
        chosen = range(0, len(answers), max(1, len(answers) // options.requests))
        exact = {at: score(torch.float64, work.requests[at][0], answers[at]) for at in chosen}
        report(f"engine, {way}", [torch.tensor(said[at]).double() - exact[at] for at in chosen])
        theirs = [score(torch.float32, work.requests[at][0], answers[at]) - exact[at] for at in chosen]
        report("  Hugging Face, the same answers", theirs)


def report(who: str, errors: list[torch.Tensor]) -> None:
    found = torch.cat(errors)
    print(
        f"{who}: root mean square error {found.square().mean().sqrt():.1e}, at most {found.abs().max():.1e}, {found.numel()} tokens"
    )


if __name__ == "__main__":
    main()
