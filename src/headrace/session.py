"""One run from its start to its exit code: it is assembled, runs, may be stopped, and says how it went.

What the run is made of is `assemble`'s; this module knows signals, `run.json` and closing words.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from contextlib import AsyncExitStack
from pathlib import Path

from headrace.assemble import Assembled, assemble
from headrace.config import RunConfig, cores, resolve
from headrace.errors import RunError, TrainingFailed
from headrace.observability.display import open_display
from headrace.orchestrator.checkpoint import Checkpoints
from headrace.orchestrator.parts import RunOrder
from headrace.orchestrator.remedies import reasons, remedy
from headrace.orchestrator.runtimes.worker import calm_garbage_collection

INTERRUPTED = 130


def run(
    config: RunConfig,
    run_dir: Path,
    *,
    only: str | None = None,
    resume: bool = False,
    display: str | None = None,
    samples: Path | None = None,
    token: str = "",
) -> int:
    """Run to the end, or to a stop; 0, or the exit code of an interrupted run (130). Raises the error of a failed one."""
    order = RunOrder(resolve(config), run_dir, only=only, resume=resume, samples=samples, token=token)
    return asyncio.run(Session(order, display).run())


class Session:
    def __init__(self, order: RunOrder, display: str | None = None) -> None:
        self.order = order
        config = order.config
        self.display = open_display(display or config.observability.display, config.training.steps)  # type: ignore[arg-type]
        self.interrupts = 0
        self.running: Assembled | None = None

    async def run(self) -> int:
        """Build, run, close; run.json says how it went whatever happens."""
        state, error, folder = "failed", "", self.order.run_dir
        there = set(folder.iterdir()) if folder.is_dir() else set()
        try:
            async with AsyncExitStack() as stack:
                stack.callback(self.display.close)
                self._listen_for_stop()
                self.running = await assemble(self.order, stack, self.display)
                self._write_state(self.running, "running")
                watching = asyncio.create_task(self.running.narrator.watch())
                stack.callback(watching.cancel)
                calm_garbage_collection()
                state = await self.running.controller.run()
                self._hold_to_account(self.running, state)
                await self._closing_words(self.running, state)
        except asyncio.CancelledError:
            state, error = "stopped", "at once, without a checkpoint"
            if not self.interrupts:
                raise
            self.display.message(f"stopped at once; {self._how_to_go_on() or 'nothing was begun yet'}")
        except Exception as raised:
            state = "failed"
            if self.running is not None and isinstance(raised, RunError):
                self._say_how_to_go_on(self.running, raised)
            error = f"{type(raised).__name__}: {raised}"
            raise
        finally:
            if self.running is not None:
                self._write_state(self.running, state, error)
            elif not self.order.resume:
                take_away(folder, there)
        return INTERRUPTED if state == "stopped" else 0

    def _listen_for_stop(self) -> None:
        """The first Ctrl-C finishes the step and writes a checkpoint; the second ends at once. Before the run has begun
        there is nothing to finish."""
        loop = asyncio.get_running_loop()
        main = asyncio.current_task()
        assert main is not None

        def stop() -> None:
            self.interrupts += 1
            begun = self.running is not None
            if begun and self.interrupts == 1:
                self.display.message("stopping after this step, with a checkpoint; again to stop at once")
                self.running.controller.request_stop()
            elif self.interrupts <= 1 + begun:
                main.cancel()
            else:  # what is being closed does not come to an end
                self.display.close()
                os._exit(INTERRUPTED)

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop)

    def _hold_to_account(self, running: Assembled, state: str) -> None:
        """Raise what makes a run that came to its end a failed one all the same."""
        if running.narrator.unsaved:
            raise RunError(running.narrator.unsaved)
        if running.controller.step or state != "finished" or not self.order.config.training.steps:
            return
        dropped = running.controller.ledger.dropped
        if not dropped:
            raise RunError("the run ended after 0 steps: the task source gave no tasks")
        why, _ = dropped.most_common(1)[0]
        raise RunError(f"the run ended after 0 steps: all units were dropped ({reasons(dropped)}): {remedy(why)}")

    def _say_how_to_go_on(self, running: Assembled, error: RunError) -> None:
        """Add to the error's line what the run's folder allows."""
        if self._newest_step() is None and not isinstance(error, TrainingFailed) and not running.narrator.unsaved:
            return
        error.args = (f"{error}; {self._how_to_go_on()}", *error.args[1:])

    def _newest_step(self) -> int | None:
        return Checkpoints(self.order.run_dir, self.order.config.checkpoint.keep).newest_step()

    def _how_to_go_on(self) -> str:
        """Empty for a run that has not begun."""
        step = self._newest_step()
        if step is not None:
            return f"go on from step {step} with: headrace run --resume {self.order.run_dir}"
        if self.running is None:
            return ""
        return "there is no checkpoint for --resume (see checkpoint.every_steps), start anew with another --name"

    def _write_state(self, running: Assembled, state: str, error: str = "") -> None:
        order, controller, ledger = self.order, running.controller, running.controller.ledger
        content = {
            "state": state,
            "steps": controller.step,
            "total_steps": order.config.training.steps,
            "elapsed_s": round(running.narrator.elapsed_s, 3),
            "version": controller.versions.version,
            "counts": {
                "submitted": ledger.submitted,
                "trained": ledger.trained,
                "dropped": dict(ledger.dropped),
                "in_flight": len(ledger.in_flight),
            },
            "cores": cores(),
            "error": error,
            "only": order.only,
            "samples": str(order.samples.resolve()) if order.samples else None,
        }
        new = order.run_dir / ".run.json.new"
        try:
            new.write_text(json.dumps(content, indent=1), encoding="utf-8")
            new.replace(order.run_dir / "run.json")
        except OSError as problem:
            self.display.message(f"run.json could not be written: {problem.strerror}")

    async def _closing_words(self, running: Assembled, state: str) -> None:
        narrator = running.narrator
        for problem in narrator.recorder.problems:
            self.display.message(problem)
        if self.order.only == "rollout":
            self.display.message(narrator.without_a_trainer())
        elif state == "stopped":
            self.display.message(self._how_to_go_on())
        elif state == "finished":
            fingerprint = await running.backend.fingerprint()
            self.display.message(f"weights {fingerprint[:16]} after {running.controller.step} steps")


def take_away(folder: Path, there: set[Path]) -> None:
    """Leave a folder in which nothing began as it was, so that the next try may use it."""
    for path in set(folder.iterdir()) - there if folder.is_dir() else ():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
