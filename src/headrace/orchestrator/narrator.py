"""What happens in the flow into what people read: metrics, samples, timeline, live display, checkpoints, evaluations."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from pathlib import Path
from typing import Any

from headrace.errors import PartFailed
from headrace.observability.display import Display
from headrace.observability.metrics import (
    DropTally,
    WorkTally,
    lag_metrics,
    step_lags,
    unit_lengths,
    unit_samples,
)
from headrace.observability.recorder import RunRecorder
from headrace.orchestrator.checkpoint import Checkpoints, capture
from headrace.orchestrator.controller import Controller, first_line
from headrace.orchestrator.flow import StepReport
from headrace.orchestrator.parts import Parts
from headrace.protocols import Lease
from headrace.types import NO_VERSION, Event, FlowStatus, Trajectory, Unit

STATUS_S = 0.25
STATS_S = 1.0
FLAT_STEPS = 5
VERSIONS_AHEAD = 31


class Narrator:
    """The `FlowObserver` of real runs."""

    def __init__(
        self,
        run_folder: Path,
        recorder: RunRecorder,
        display: Display,
        checkpoints: Checkpoints,
        parts: Parts,
        total_steps: int,
    ) -> None:
        self.run_folder, self.recorder, self.display, self.checkpoints = run_folder, recorder, display, checkpoints
        self.parts, self.total_steps = parts, total_steps
        self.tally = DropTally()
        self.work = WorkTally()
        self.started = time.monotonic()
        self.evaluation_s = 0.0
        self.samples = 0
        self.tokens = 0
        self.sample = ""
        self.unsaved = ""
        """What became of the last checkpoint, if it could not be written."""
        self._written = NO_VERSION
        self._flat_steps = 0
        self.last: StepReport | None = None
        self._recent: list[tuple[float, int, int]] = []
        self._update_ended_ns = 0
        self._awaited_version: int | None = None
        self._to_first_token_s: float | None = None

    # ----------------------------------------------------------------------------------------------- FlowObserver

    def event(self, event: Event) -> None:
        self.recorder.event(event)
        self.work.event(event)
        # From the end of an optimiser step to the first forward pass with what it made.
        if event.kind == "publish" and event.source.startswith("trainer"):
            self._update_ended_ns, self._awaited_version = event.time_ns, event.version
        elif event.kind == "generate" and self._awaited_version is not None and event.version >= self._awaited_version:
            self._to_first_token_s = max(0.0, (event.time_ns - self._update_ended_ns) / 1e9)
            self._awaited_version = None

    def message(self, text: str) -> None:
        self.display.message(text)
        self._append("messages.txt", f"{time.strftime('%H:%M:%S')} {text}")

    def dropped(self, lease: Lease, reason: str, unit: Unit | None) -> None:
        self.tally.dropped(reason, unit_lengths(unit) if unit is not None else ())

    def version_written(self, version: int) -> None:
        """Some ahead: to reach the disk takes longer than many a small step."""
        if version > self._written:
            self.checkpoints.write_version(version + VERSIONS_AHEAD)
            self._written = version + VERSIONS_AHEAD

    def step(self, report: StepReport) -> None:
        lengths = [unit_lengths(unit) for unit in report.units]
        for of_unit in lengths:
            self.tally.trained(of_unit)
        self.samples += sum(unit_samples(unit) for unit in report.units)
        self.tokens += sum(map(sum, lengths))
        self._recent = [*self._recent[-20:], (time.monotonic(), self.samples, self.tokens)]
        self.last = report
        self.sample = self.parts.describe(report.units[0]) if report.units else ""
        self.recorder.step(report.step, self._row(report))
        if self.parts.decode is not None:
            self.recorder.samples(report.step, report.units, self.parts.decode)
        self._watch_for_flat_rewards(report)
        self.display.update(self.status())

    def _watch_for_flat_rewards(self, report: StepReport) -> None:
        """Groups whose scores are all equal teach nothing; a run of nothing else is told once."""
        share = report.metrics.get("group/zero_variance_share")
        self._flat_steps = self._flat_steps + 1 if share is not None and share.mean >= 1.0 else 0
        if self._flat_steps == FLAT_STEPS:
            self.message(
                f"all scores of each group were equal for {FLAT_STEPS} steps, so nothing is learned: "
                "mend the reward, or choose tasks of another difficulty"
            )

    def _append(self, name: str, line: str) -> None:
        """A line more in a file beside the run; a full disk does not end the run."""
        with contextlib.suppress(OSError), (self.run_folder / name).open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    async def checkpoint(self, controller: Controller) -> None:
        flow, units = capture(controller.buffer, controller.step)
        ended = controller.buffer.store.acknowledged()
        flow["tally"] = self.tally.state()
        try:
            folder = await self.checkpoints.save(controller.step, flow, units, controller.learner.save)
        except (OSError, PartFailed) as error:
            self.unsaved = f"the checkpoint of step {controller.step} could not be written ({first_line(error)})"
            self.message(f"{self.unsaved}; earlier ones stay")
            return
        self.unsaved = ""
        controller.buffer.store.forget(ended)
        self.message(f"checkpoint {folder.relative_to(self.run_folder)}")

    async def evaluate(self, step: int) -> None:
        if self.parts.evaluator is None:
            return
        started = time.monotonic()
        result = await self.parts.evaluator()
        self.evaluation_s += time.monotonic() - started
        row = {"step": step, **result}
        self._append("evaluation.jsonl", json.dumps(row))
        self.message(f"held-out after {step} steps, {self.parts.evaluator.words(result)}")

    # ---------------------------------------------------------------------------------------------------- metrics

    def _row(self, report: StepReport) -> dict[str, Any]:
        controller = self.controller
        ledger, sync = controller.ledger, report.sync
        rates = self.rates()
        row: dict[str, Any] = {
            **report.metrics,
            **lag_metrics(report.lags),
            **step_lags([u for u in report.units if isinstance(u, Trajectory)], self._lag_at_take),
            **self.tally.row(),
            **self.parts.reward_metrics(),
            **self._engine_metrics(),
            **self.work.row(time.monotonic_ns()),
            "queue/ready": float(len(controller.buffer.ready)),
            "queue/held": float(len(ledger.in_flight)),
            "queue/running": float(ledger.count("admitted")),
            "queue/bytes": float(controller.buffer.store.bytes()),
            "rate/samples_per_s": rates[0],
            "rate/tokens_per_s": rates[1],
            "time/step_s": report.step_s,
            "time/wait_batch_s": report.wait_batch_s,
            "time/wait_sync_s": report.wait_sync_s,
            "time/train_s": report.train_s,
            "time/publish_s": report.publish_s,
            "time/elapsed_s": self.elapsed_s,
            "flow/version": float(report.version),
            "flow/ignored_replies": float(controller.dispatcher.ignored_replies),
            "flow/engines": float(len(controller.dispatcher.live())),
        }
        if (refused := getattr(controller.buffer.store, "refused", None)) is not None:
            row["queue/refused"] = float(refused)
        if sync is not None:
            row |= {"sync/seconds": sync.total_s, "sync/prepare_s": sync.prepare_s, "sync/drain_s": sync.drain_s}
            ticket = controller.weight_sync.ticket
            if ticket is not None and ticket.bytes and sync.prepare_s > 0:
                row["sync/transfer_gb_per_s"] = ticket.bytes / (sync.prepare_s + report.publish_s) / 1e9
        if self._to_first_token_s is not None:
            row["sync/to_first_token_s"] = self._to_first_token_s
        return row

    def _lag_at_take(self, version: int) -> int:
        """Lags of a step's report are those before its own version was counted."""
        return max(0, self.controller.versions.lag(version) - self.controller.learner.updates_weights)

    def _engine_metrics(self) -> dict[str, float]:
        """Of the engines that live, as they last said: occupancy at that moment, the rest since each was started."""
        slots = self.controller.dispatcher.live()
        if not slots:
            return {}
        total = sum(slot.stats.kv_tokens_total for slot in slots)
        used = sum(slot.stats.kv_tokens_used for slot in slots)
        prompt = sum(slot.stats.prompt_tokens for slot in slots)
        generated = sum(slot.stats.generated_tokens for slot in slots)
        cached = sum(slot.stats.cached_prompt_tokens for slot in slots)
        return {
            "engine/kv_occupancy": used / total if total else 0.0,
            "engine/prefix_hit_rate": cached / prompt if prompt else 0.0,
            "engine/shared_share": sum(slot.stats.shared_tokens for slot in slots) / max(generated, 1),
            "engine/preemptions": float(sum(slot.stats.preemptions for slot in slots)),
            "engine/recomputed_tokens": float(sum(slot.stats.recomputed_tokens for slot in slots)),
            "engine/weight_error": max((slot.stats.weight_error for slot in slots), default=0.0),
            "engine/prefill_s": sum(slot.stats.prefill_s for slot in slots),
            "engine/decode_s": sum(slot.stats.decode_s for slot in slots),
            "sync/standstill_s": max(slot.stats.standstill_s for slot in slots),
        }

    def rates(self) -> tuple[float, float]:
        """(samples, tokens) trained a second over the last steps."""
        if not self._recent:
            return 0.0, 0.0
        start = self._recent[0] if len(self._recent) > 1 else (self.started, 0, 0)
        end = self._recent[-1]
        seconds = max(end[0] - start[0], 1e-9)
        return (end[1] - start[1]) / seconds, (end[2] - start[2]) / seconds

    def without_a_trainer(self) -> str:
        """What a run of `--only rollout` has made."""
        rates = self.rates()
        return (
            f"rollout alone: {self.samples} samples, {rates[0]:.1f} samples/s, {rates[1]:.0f} tokens/s; "
            f"train on them with --only train --samples {self.run_folder / 'groups'}"
        )

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run began, evaluations left out."""
        return time.monotonic() - self.started - self.evaluation_s

    # ---------------------------------------------------------------------------------------------------- watching

    def attach(self, controller: Controller) -> None:
        self.controller = controller

    async def watch(self) -> None:
        """Keep the display and the engines' figures fresh."""
        asked = 0.0
        while True:
            self.display.update(self.status())
            now = time.monotonic()
            if now - asked >= STATS_S:
                asked = now
                await self._ask_engines()
            await asyncio.sleep(STATUS_S)

    async def _ask_engines(self) -> None:
        for slot in self.controller.dispatcher.live():
            try:
                async with asyncio.timeout(STATS_S):
                    slot.heard(await slot.proxy.stats())
            except (PartFailed, TimeoutError):
                continue  # the dispatcher's own watch decides what to make of it

    def status(self) -> FlowStatus:
        controller, report = self.controller, self.last
        rates, sync = self.rates(), controller.weight_sync
        reward = report.metrics.get("reward/mean") if report else None
        running = {
            slot.name: f"generates {len(slot.calls)} requests" if slot.calls else "idle, no request"
            for slot in controller.dispatcher.live()
        }
        return FlowStatus(
            elapsed_s=self.elapsed_s,
            step=report.step if report else controller.step,  # which may be a step ahead of what is known of it
            total_steps=self.total_steps,
            version=controller.versions.version,
            live_version=sync.live_version,
            reward=reward.mean if reward is not None else None,
            samples_per_s=rates[0],
            tokens_per_s=rates[1],
            names=self.parts.names,
            running=controller.ledger.count("admitted"),
            ready=len(controller.buffer.ready),
            held=len(controller.ledger.in_flight),
            room=controller.buffer.room(),
            lag_mean=sum(report.lags) / len(report.lags) if report and report.lags else 0.0,
            lag_max=max(report.lags, default=0) if report else 0,
            syncs=sync.syncs,
            sync_s=sync.last.total_s if sync.last else 0.0,
            standstill_s=max((slot.stats.standstill_s for slot in controller.dispatcher.live()), default=0.0),
            trained_units=controller.ledger.trained,
            dropped=dict(controller.ledger.dropped),
            waits={**running, **controller.waits},
            sample=self.sample,
        )
