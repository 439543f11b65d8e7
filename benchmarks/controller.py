"""What the flow itself costs: processor time a group in the controller's process, and how near two balanced parts come to
the slower one's pace.

    python benchmarks/controller.py [--groups 2000] [--repeats 5]

Processor time is of the whole process: controller, dispatcher, buffer, ledger, rollouts, and the scripted engine, scorer
and trainer that stand in for the real parts. It is an upper bound of the controller's share.
"""

from __future__ import annotations

import argparse
import statistics
import time

from headrace.exchange.staleness import Capacity
from headrace.orchestrator.controller import FlowSettings
from headrace.orchestrator.runtimes.worker import calm_garbage_collection
from headrace.rollout.config import GroupConfig
from headrace.rollout.engines.scripted import ScriptedCosts
from headrace.simulation.parts import LearnerCosts, TimedLearner, Watcher
from headrace.simulation.run import Flow, Outcome, simulate_flow

BATCH, SIZE, STEP_S = 16, 8, 64.0


def balanced(steps: int, *, ahead: int = 1, sigma: float = 0.3, seed: int = 0) -> Outcome:
    """Generation of a batch and training on it each take about `STEP_S`: lengths vary, so either may be late."""
    learner = TimedLearner(LearnerCosts(step_s=STEP_S, publish_s=0.01), lambda units: [False] * len(units))
    in_flight = BATCH * (1 + ahead)
    # All requests share the engine's pace: a batch of answers of mean length m takes STEP_S when a step of n running
    # ones takes n * STEP_S / (BATCH * SIZE * m).
    mean = 64.0
    each = STEP_S / (BATCH * SIZE * mean)
    return simulate_flow(
        Flow(
            settings=FlowSettings(batch=BATCH, steps=steps),
            capacity=Capacity(batch=BATCH, ahead=ahead, max_in_flight=in_flight),
            costs=ScriptedCosts(
                token_s=each, token_s_each=each, prefill_s=0.0, prepare_s=0.05, length=mean, length_sigma=sigma
            ),
            learner=learner,
            seed=seed,
            group=GroupConfig(size=SIZE, timeout_s=1e6),
            max_tokens=1024,
            generate_timeout_s=600.0,
            watcher=Watcher(keep=False),
        )
    )


def milliseconds_a_group(groups: int) -> float:
    started = time.process_time()
    outcome = balanced(groups // BATCH)
    assert outcome.error is None, outcome.error
    return 1e3 * (time.process_time() - started) / outcome.controller.ledger.trained


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    milliseconds_a_group(200)
    calm_garbage_collection()
    times = [milliseconds_a_group(arguments.groups) for _ in range(arguments.repeats)]
    print(
        f"groups of {SIZE}: median {statistics.median(times):.2f} ms of processor time a group "
        f"({min(times):.2f} to {max(times):.2f} over {arguments.repeats})"
    )


if __name__ == "__main__":
    main()
