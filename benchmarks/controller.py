"""What the flow itself costs: processor time a group in the controller's process, and how near two balanced parts come to
the slower one's pace.

    python benchmarks/controller.py [--groups 2000] [--repeats 5]

Processor time is of the whole process: controller, dispatcher, buffer, ledger, rollouts, and the scripted engine and scorer
that stand in for the real parts. What these two cost alone, asked for the same samples by nothing but a loop, is measured
beside it, run by run; the difference is the controller's.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time

import numpy as np

from headrace.exchange.staleness import Capacity
from headrace.orchestrator.flow import FlowSettings
from headrace.orchestrator.runtimes.simulated import run_simulated
from headrace.orchestrator.runtimes.worker import calm_garbage_collection
from headrace.protocols import RewardRequest, WorkerContext
from headrace.rollout.config import GroupConfig
from headrace.rollout.engines.scripted import ScriptedCosts, ScriptedEngine
from headrace.simulation.parts import LearnerCosts, ScoreCosts, TimedLearner, TimedScorer, Watcher
from headrace.simulation.run import Flow, Outcome, simulate_flow
from headrace.types import GenerateRequest, RequestKey, SamplingParams, Task

BATCH, SIZE, TOKENS = 16, 8, 64


def balanced(steps: int, *, ahead: int = 1, sigma: float = 0.0, train_s: float = TOKENS, seed: int = 0) -> Outcome:
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
            watcher=Watcher(),
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
    outcome = balanced(groups // BATCH)
    assert outcome.error is None, outcome.error
    return 1e3 * (time.process_time() - started) / outcome.controller.ledger.trained


async def stand_ins(groups: int) -> None:
    """The same samples from the engine and the scorer alone, a batch at a time."""
    engine = ScriptedEngine(
        WorkerContext(name="engine-0", record=lambda event: None),
        ScriptedCosts(token_s=1.0, prefill_s=0.0, prepare_s=0.05, length=TOKENS, length_sigma=0.0),
    )
    scorer, sampling, prompt = TimedScorer(ScoreCosts(), 0), SamplingParams(max_tokens=1024), np.array([1])

    async def sample(group: str, member: int) -> None:
        request = GenerateRequest(
            key=RequestKey(lease_id=group, member=member), group_id=group, prompt_ids=prompt, sampling=sampling
        )
        generation = await engine.generate(request)
        task = Task(task_id=group, source="numbers", payload={})
        tokens = tuple(generation.token_ids.tolist())
        await scorer.score(
            [RewardRequest(task=task, prompt="x", completion="", token_ids=tokens, finish_reason="stop")]
        )

    for start in range(0, groups, BATCH):
        await asyncio.gather(*(sample(f"g{start + number}", m) for number in range(BATCH) for m in range(SIZE)))


def milliseconds_of_stand_ins(groups: int) -> float:
    started = time.process_time()
    run_simulated(stand_ins(groups))
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
    pairs = [
        (milliseconds_a_group(arguments.groups), milliseconds_of_stand_ins(arguments.groups))
        for _ in range(arguments.repeats)
    ]
    for name, times in (
        ("all", [whole for whole, _ in pairs]),
        ("stand-ins alone", [alone for _, alone in pairs]),
        ("the controller's", [whole - alone for whole, alone in pairs]),
    ):
        print(
            f"groups of {SIZE}, {name}: median {statistics.median(times):.2f} ms of processor time a group "
            f"({min(times):.2f} to {max(times):.2f} over {arguments.repeats})"
        )


if __name__ == "__main__":
    main()
