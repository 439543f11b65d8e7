"""What the flow itself costs: processor time a group in the controller's process, and how near two balanced parts come to
the slower one's pace.

    python benchmarks/controller.py [--groups 2000] [--repeats 5]

Processor time is of the whole process: controller, dispatcher, buffer, ledger, rollouts, and the scripted engine,
environment and scorer that stand in for the real parts. What these cost alone, asked for the same samples by nothing but a
loop, and what the rollout function costs with nothing but them, is measured beside it, run by run; the differences are the
rollout function's and the controller's.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import numpy as np

from headrace.exchange.staleness import Capacity
from headrace.orchestrator.flow import FlowSettings
from headrace.orchestrator.runtimes.simulated import run_simulated
from headrace.orchestrator.runtimes.worker import calm_garbage_collection
from headrace.protocols import Lease, RewardRequest, WorkerContext
from headrace.rollout.config import GroupConfig
from headrace.rollout.engines.scripted import ScriptedCosts
from headrace.rollout.partial import PARTIAL_POLICIES
from headrace.rollout.token_rollout import TokenRollout
from headrace.simulation.parts import FlakyEngine, LearnerCosts, OneTurn, ScoreCosts, TimedLearner, TimedScorer, Watcher
from headrace.simulation.run import Flow, Outcome, simulate_flow
from headrace.types import GenerateRequest, RequestKey, SamplingParams, Task

BATCH, SIZE, TOKENS = 16, 8, 64


def balanced(
    steps: int, *, ahead: int = 1, sigma: float = 0.0, train_s: float = TOKENS, keep: bool = True, seed: int = 0
) -> Outcome:
    """Each token takes a second whatever runs beside it, as in an engine that waits for its memory; so a batch of equal
    answers takes `TOKENS` seconds to generate, and `train_s` to train on."""
    return simulate_flow(
        Flow(
            settings=FlowSettings(batch=BATCH, steps=steps),
            capacity=Capacity(batch=BATCH, ahead=ahead),
            costs=ScriptedCosts(token_s=1.0, prefill_s=0.0, prepare_s=0.05, length=TOKENS, length_sigma=sigma),
            learner=TimedLearner(LearnerCosts(step_s=train_s, publish_s=0.01), lambda units: [False] * len(units)),
            seed=seed,
            group=GroupConfig(size=SIZE, timeout_s=1e6),
            max_tokens=1024,
            generate_timeout_s=600.0,
            watcher=Watcher(keep=keep),
        )
    )


def balance(outcome: Outcome) -> tuple[float, float]:
    """(throughput / the trainer's alone, its idle share), from the first batch in hand to the last trained on. Balanced parts
    are equally quick alone, so the first is the throughput over that of the quicker one too."""
    reports = outcome.flow.watcher.reports
    trained_s = sum(report.train_s for report in reports)
    idle_s = sum(report.wait_batch_s + report.wait_sync_s for report in reports[1:])
    seconds = sum(report.step_s for report in reports) - reports[0].wait_batch_s
    return trained_s / seconds, idle_s / seconds


def milliseconds_a_group(groups: int) -> float:
    started = time.process_time()
    outcome = balanced(groups // BATCH, keep=False)  # what was trained on is let go, as in a run
    assert outcome.error is None, outcome.error
    return 1e3 * (time.process_time() - started) / outcome.controller.ledger.trained


def scripted_engine() -> FlakyEngine:
    costs = ScriptedCosts(token_s=1.0, prefill_s=0.0, prepare_s=0.05, length=TOKENS, length_sigma=0.0)
    return FlakyEngine(WorkerContext(name="engine-0", record=lambda event: None), costs, 0.0, random.Random(0))


def tasks(groups: int) -> Iterator[list[Task]]:
    for start in range(0, groups, BATCH):
        yield [Task(task_id=f"g{start + number}", source="numbers", payload={}) for number in range(BATCH)]


async def stand_ins(groups: int) -> None:
    """The same samples from the engine, the environment and the scorer alone, a batch at a time."""
    engine, scorer, sampling = scripted_engine(), TimedScorer(ScoreCosts(), 0), SamplingParams(max_tokens=1024)

    async def sample(task: Task, member: int) -> None:
        environment = OneTurn()
        turn = await environment.reset(task)
        request = GenerateRequest(
            key=RequestKey(lease_id=task.task_id, member=member),
            group_id=task.task_id,
            prompt_ids=np.asarray(turn.prompt_ids),
            sampling=sampling,
        )
        generation = await engine.generate(request)
        await environment.step(generation)
        await environment.close()
        tokens = tuple(generation.token_ids.tolist())
        await scorer.score(
            [RewardRequest(task=task, prompt="x", completion="", token_ids=tokens, finish_reason="stop")]
        )

    for batch in tasks(groups):
        await asyncio.gather(*(sample(task, member) for task in batch for member in range(SIZE)))


async def rollouts(groups: int) -> None:
    """The same groups from the rollout function, with nothing between it and the engine."""
    rollout = TokenRollout(
        scripted_engine(),
        OneTurn,
        TimedScorer(ScoreCosts(), 0),
        sampling=SamplingParams(max_tokens=1024),
        group=GroupConfig(size=SIZE, timeout_s=1e6),
        partial=PARTIAL_POLICIES["continue"],
        open_time=asyncio.get_running_loop().time,
    )
    for number, batch in enumerate(tasks(groups)):
        await asyncio.gather(*(rollout(Lease(task.task_id, number * BATCH + i, task)) for i, task in enumerate(batch)))


def milliseconds_alone(part: Callable[[int], Coroutine[Any, Any, None]], groups: int) -> float:
    started = time.process_time()
    run_simulated(part(groups))
    return 1e3 * (time.process_time() - started) / groups


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    milliseconds_a_group(200)
    calm_garbage_collection()
    for ahead, sigma, train_s in ((0, 0.0, TOKENS), (1, 0.0, TOKENS), (1, 0.05, 74.0), (2, 0.05, 74.0)):
        throughput, idle = balance(balanced(40, ahead=ahead, sigma=sigma, train_s=train_s))
        print(f"{ahead} ahead, spread {sigma}: {throughput:.1%} of the trainer alone, idle {idle:.1%}")
    rounds = [
        (
            milliseconds_a_group(arguments.groups),
            milliseconds_alone(rollouts, arguments.groups),
            milliseconds_alone(stand_ins, arguments.groups),
        )
        for _ in range(arguments.repeats)
    ]
    for name, times in (
        ("all", [whole for whole, _, _ in rounds]),
        ("stand-ins alone", [alone for _, _, alone in rounds]),
        ("the rollout function", [rolled - alone for _, rolled, alone in rounds]),
        ("controller, dispatcher, buffer, ledger", [whole - rolled for whole, rolled, _ in rounds]),
    ):
        print(
            f"groups of {SIZE}, {name}: median {statistics.median(times):.2f} ms of processor time a group "
            f"({min(times):.2f} to {max(times):.2f} over {arguments.repeats})"
        )


if __name__ == "__main__":
    main()
