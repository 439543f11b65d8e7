"""GRPO in one file, from top to bottom: a character-level decoder learns to add, generation and training alternating.

    python recipes/01_grpo_in_one_file.py --steps 60

Every step of `headrace run tiny` is here, one after the other and without the parts that make it asynchronous: no
leases, no processes, no queue. What is reused of the library is what one would not want to write twice: the rollout
engine, the packing of a batch, the chunked log-probabilities, the flat optimiser. The algorithm itself is spelled out.
"""

from __future__ import annotations

import argparse
import asyncio
import time
import zlib
from pathlib import Path

import numpy as np
import torch

from headrace.config import ModelConfig
from headrace.exchange.channels.in_process import InProcessChannel
from headrace.models.catalog import load_tokenizer, resolve_model
from headrace.protocols import WorkerContext
from headrace.rollout.config import EngineConfig, TasksConfig
from headrace.rollout.engines.native.engine import build_native
from headrace.rollout.environments.single_turn import SingleTurn
from headrace.rollout.tasks import heldout_source, open_source
from headrace.training.batching import make_batches
from headrace.training.config import OptimizerConfig, TrainingConfig
from headrace.training.optimizer import FlatAdamW, FlatParameters
from headrace.training.policy import Policy, load_model
from headrace.types import (
    NO_VERSION,
    Episode,
    GenerateRequest,
    Group,
    RequestKey,
    SamplingParams,
    Score,
    Task,
    TokenSample,
)

CLIP_LOW, CLIP_HIGH = 0.2, 0.28


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="batches to train on")
    parser.add_argument("--prompts", type=int, default=64, help="prompts in a batch")
    parser.add_argument("--group", type=int, default=8, help="answers to each prompt")
    parser.add_argument("--minibatches", type=int, default=2, help="optimiser steps a batch")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--warmup", type=int, default=10, help="optimiser steps of rising learning rate")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


# ------------------------------------------------------------------------------------------------- 1. generate


async def answer(engine, environment: SingleTurn, task: Task, member: int, sampling: SamplingParams) -> TokenSample:
    """One completion of a task's prompt, with what the trainer must know of it: ids, log-probabilities, versions, mask."""
    prompt = environment.render(task)
    request = GenerateRequest(
        key=RequestKey(lease_id=task.task_id, member=member),
        group_id=task.task_id,  # siblings share it, so the engine computes their prompt once
        prompt_ids=np.array(prompt),
        sampling=sampling,
    )
    generation = await engine.generate(request)
    before = len(prompt)
    return TokenSample(
        sample_id=request.request_id,
        token_ids=np.concatenate([np.array(prompt), generation.token_ids]),
        loss_mask=np.concatenate([np.zeros(before, np.int8), np.ones(len(generation.token_ids), np.int8)]),
        behavior_logprobs=np.concatenate([np.zeros(before, np.float32), generation.logprobs]),
        policy_versions=np.concatenate([np.full(before, NO_VERSION), generation.policy_versions]),
        sampling=sampling,
        finish_reason=generation.finish_reason,
    )


# ---------------------------------------------------------------------------------------------------- 2. score


def reward(task: Task, completion: str) -> float:
    """1 for the right sum, else 0."""
    return float(completion.strip() == str(task.payload["answer"]))


async def roll_out(engine, environment: SingleTurn, task: Task, size: int, max_tokens: int, seed: int) -> Group:
    """A task's group: all siblings at once, each scored."""
    seeds = np.random.default_rng([seed, zlib.crc32(task.task_id.encode())]).integers(2**62, size=size)
    samples = await asyncio.gather(
        *(
            answer(engine, environment, task, member, SamplingParams(max_tokens=max_tokens, seed=int(seeds[member])))
            for member in range(size)
        )
    )
    scores = [
        Score(reward=reward(task, environment.decode(sample.token_ids[sample.loss_mask == 1]))) for sample in samples
    ]
    episodes = tuple(Episode(episode_id=sample.sample_id, samples=(sample,)) for sample in samples)
    return Group(group_id=task.task_id, task=task, expected_size=size, episodes=episodes, scores=tuple(scores))


# ----------------------------------------------------------------------------------------------- 3. advantages


def advantages(group: Group) -> np.ndarray:
    """[E] each answer's reward against its siblings': (r - mean) / std. Shao et al. 2024, DeepSeekMath, section 4.1."""
    rewards = np.array([score.reward for score in group.scores], np.float64)
    if np.ptp(rewards) == 0:
        return np.zeros(len(rewards), np.float32)  # all alike: nothing to learn, and no division by a residue
    return ((rewards - rewards.mean()) / (rewards.std() + 1e-6)).astype(np.float32)


# ----------------------------------------------------------------------------------------------------- 4. loss


def train_minibatch(policy: Policy, optimizer: FlatAdamW, micros) -> dict[str, float]:
    """One optimiser step of the clipped surrogate, as a mean over all tokens of the minibatch.

    Each micro-batch's sum is divided by the *whole* minibatch's token count, so that cutting it smaller changes nothing.
    """
    clipped_share, tokens = 0.0, 0
    for micro in micros:
        current, _ = policy.logprobs(micro, entropy=False)  # [M] one for each sampled token
        behavior = torch.from_numpy(micro.behavior_logprobs)
        advantage = torch.from_numpy(micro.advantages)
        ratio = torch.exp(current - behavior)
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * advantage)
        loss = -surrogate.sum() / micro.counts.tokens
        loss.backward()
        outside = (ratio < 1 - CLIP_LOW) | (ratio > 1 + CLIP_HIGH)
        clipped_share += float(outside.sum())
        tokens += len(current)
    norm, rate, _ = optimizer.step()
    return {"clip share": clipped_share / max(tokens, 1), "grad norm": norm, "lr": rate}


# ------------------------------------------------------------------------------------------- 5. new weights back


async def send_weights(model: torch.nn.Module, channel: InProcessChannel, engine, version: int) -> None:
    """Publish, prepare beside the live weights, commit between two forward passes; every later token names the version."""
    ticket = channel.publish(((name, tensor.detach()) for name, tensor in model.named_parameters()), version)
    await engine.prepare(ticket)
    await engine.commit(ticket)


# ---------------------------------------------------------------------------------------------------- evaluation


async def greedy_accuracy(engine, environment: SingleTurn, tasks: list[Task], max_tokens: int) -> float:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    samples = await asyncio.gather(*(answer(engine, environment, task, 0, sampling) for task in tasks))
    right = [
        reward(task, environment.decode(sample.token_ids[sample.loss_mask == 1]))
        for task, sample in zip(tasks, samples, strict=True)
    ]
    return float(np.mean(right))


def take(source, count: int) -> list[Task]:
    """The next `count` tasks of a source."""
    return [task for task in (source.next() for _ in range(count)) if task is not None]


# ---------------------------------------------------------------------------------------------------- the loop


async def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)  # on a model this small one thread beats two
    torch.manual_seed(args.seed)
    max_tokens = 8
    folder = resolve_model(ModelConfig(path="tiny"), seed=args.seed, progress=print)
    tokenizer = load_tokenizer(folder)
    tasks_config = TasksConfig(source="sums", options={"style": "plain"})
    tasks = open_source(tasks_config, seed=args.seed, folder=Path.cwd())
    heldout = take(heldout_source(tasks_config, folder=Path.cwd()), 200)

    model = load_model(str(folder), "float32", "cpu")
    policy = Policy(model, logits_chunk=4096)
    config = TrainingConfig(
        groups=args.prompts,
        minibatches=args.minibatches,
        micro_tokens=16_384,
        optimizer=OptimizerConfig(lr=args.lr, warmup_steps=args.warmup),
    )
    optimizer = FlatAdamW(FlatParameters(model), config.optimizer, args.steps * args.minibatches)

    channel = InProcessChannel()
    context = WorkerContext(name="engine-0", record=lambda event: None)
    engine = build_native(context, EngineConfig(max_running=512), str(folder), "float32", channel, "keep", inline=True)
    environment = SingleTurn(tokenizer, tasks_config, end_token_ids=(tokenizer.eos_token_id,))

    await send_weights(model, channel, engine, version=0)
    print(f"held-out greedy accuracy before: {await greedy_accuracy(engine, environment, heldout, max_tokens):.1%}")
    for step in range(1, args.steps + 1):
        started = time.perf_counter()
        batch = take(tasks, args.prompts)
        groups = await asyncio.gather(
            *(roll_out(engine, environment, task, args.group, max_tokens, args.seed) for task in batch)
        )
        generated = time.perf_counter()
        credit = [advantages(group) for group in groups]
        for micros in make_batches(groups, credit, config, max_length=max_tokens):
            figures = train_minibatch(policy, optimizer, micros)
        await send_weights(model, channel, engine, version=step)
        mean = np.mean([score.reward for group in groups for score in group.scores])
        print(
            f"step {step:3}  reward {mean:.3f}  clip {figures['clip share']:.3f}  grad {figures['grad norm']:.2f}  "
            f"generate {generated - started:.2f} s  train {time.perf_counter() - generated:.2f} s",
            flush=True,
        )
    print(f"held-out greedy accuracy after: {await greedy_accuracy(engine, environment, heldout, max_tokens):.1%}")
    await engine.close()


if __name__ == "__main__":
    asyncio.run(main(arguments()))
