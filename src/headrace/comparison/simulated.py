"""A preset on a simulated cluster into the rows that a real run would have written."""

from __future__ import annotations

from typing import Any

from headrace.comparison.figures import Figures, figures_of
from headrace.config import RunConfig
from headrace.observability.metrics import lag_metrics, unit_lengths
from headrace.orchestrator.flow import StepReport
from headrace.simulation.cluster import ClusterConfig
from headrace.simulation.run import Outcome, flow_of, prepared, simulate_flow


class RowKeeper:
    """Turns step reports into rows while the simulation runs."""

    def __init__(self, grain: int) -> None:
        self.grain = grain
        self.rows: list[dict[str, Any]] = []
        self.elapsed_s = 0.0

    def __call__(self, report: StepReport) -> None:
        self.elapsed_s += report.step_s
        lengths = [self.grain * length for unit in report.units for length in unit_lengths(unit)]
        rewards = [score.reward for unit in report.units for score in unit.scores if score.reward is not None]
        row = {
            "time/elapsed_s": self.elapsed_s,
            "time/step_s": report.step_s,
            "time/wait_batch_s": report.wait_batch_s,
            "time/wait_sync_s": report.wait_sync_s,
            "time/train_s": report.train_s,
            "length/mean": sum(lengths) / max(1, len(lengths)),
            "group/size_mean": len(lengths) / max(1, len(report.units)),
            "reward/batch": sum(rewards) / max(1, len(rewards)),
            **lag_metrics(report.lags),
        }
        if report.sync is not None:
            row["sync/seconds"] = report.sync.total_s
            row["sync/standstill_s"] = report.sync.drain_s + report.sync.commit_s
        self.rows.append(row)


def run_simulated_preset(
    name: str, config: RunConfig, cluster: ClusterConfig, for_s: float | None
) -> tuple[Figures, Outcome]:
    """Its figures and how the run ended."""
    flow = flow_of(prepared(config, cluster), cluster, for_s=for_s, keep=False)
    keeper = RowKeeper(cluster.workload.grain)
    flow.watcher.on_step = keeper
    outcome = simulate_flow(flow)
    if keeper.rows:
        busy_s = sum(engine.busy_s for engine in outcome.engines)
        idle = 1 - busy_s / max(outcome.seconds * flow.engines, 1e-9)
        drawn = sum(engine.drawn_tokens for engine in outcome.engines) / sum(engine.drawn for engine in outcome.engines)
        keeper.rows[-1] |= {
            **flow.watcher.tally.row(),
            "idle/engine": max(0.0, idle),
            "length/drawn_mean": cluster.workload.grain * drawn,
        }
    note = f"{type(outcome.error).__name__}: {outcome.error}" if outcome.error is not None else ""
    return figures_of(name, keeper.rows, note), outcome
