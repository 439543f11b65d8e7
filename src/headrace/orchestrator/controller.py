"""Runs the three loops of a run: roll out, train, publish. One controller for every placement.

    roll out   admit a lease (waits for room) → rollout(lease) → put
    train      take a batch (waits for units) → filter → learner.train → version + 1
    publish    learner.publish → two-phase sync → settle the batch's leases (frees room)

`sync` differs from `separate` only in how many leases may be held: with no batch ahead, admission waits until the batch
that was trained on is live, so that generation and training alternate.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any

from headrace.errors import (
    BufferClosed,
    NoEngines,
    PartFailed,
    RolloutDropped,
    RolloutRecycled,
    RunError,
    Stalled,
    Starved,
    TrainingFailed,
    WorkerDied,
)
from headrace.exchange.buffer import LeaseBuffer
from headrace.exchange.ledger import RECYCLED, TRAINED
from headrace.orchestrator.dispatcher import Dispatcher, EngineSlot
from headrace.orchestrator.flow import FlowObserver, FlowSettings, StepReport
from headrace.orchestrator.learner import Learner
from headrace.orchestrator.remedies import reasons, remedy
from headrace.orchestrator.turns import Turns
from headrace.orchestrator.weight_sync import WeightSync
from headrace.protocols import Lease
from headrace.types import NO_VERSION, Event, Unit

AT_ONCE = 64
"""Leases admitted in one turn of the event loop: what was asked for goes to the engines while more is admitted."""


class Controller:
    """Owns admission, ledger, staleness and version numbers; everything else holds bytes or does work.

    spawn_engine: builds a replacement for a fenced engine; None: engines are never replaced
    turns: engines and trainer share their devices; None: each has its own
    """

    def __init__(
        self,
        settings: FlowSettings,
        buffer: LeaseBuffer,
        dispatcher: Dispatcher,
        sync: WeightSync,
        rollout: Callable[[Lease], Awaitable[Unit]],
        learner: Learner,
        observer: FlowObserver,
        *,
        spawn_engine: Callable[[str], Awaitable[EngineSlot]] | None = None,
        turns: Turns | None = None,
        step: int = 0,
    ) -> None:
        self.settings, self.buffer, self.dispatcher, self.weight_sync = settings, buffer, dispatcher, sync
        self.rollout, self.learner, self.observer = rollout, learner, observer
        self.spawn_engine, self.turns = spawn_engine, turns
        self.ledger, self.versions = buffer.ledger, buffer.versions
        self.step = step
        buffer.wanted = self._wanted()
        self.state = "starting"
        self.waits: dict[str, str] = {}
        self.producing: dict[str, tuple[Lease, asyncio.Task[None]]] = {}
        self.ending: dict[str, asyncio.Task[None]] = {}
        """Rollouts that were cancelled, while they clean up."""
        self.not_live: list[tuple[int, Lease]] = []
        """Leases trained on, with their step."""
        self.joining = 0
        self.restarts_left = settings.restarts
        self._publishing: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._told_errors: set[str] = set()
        self._tasks: dict[str, asyncio.Task[Any]] = {}
        dispatcher.on_fenced = self._on_fenced
        buffer.on_drop = self._on_drop

    # --------------------------------------------------------------------------------------------------- the run

    async def run(self) -> str:
        """ "finished", or "stopped" after `request_stop`. Raises the `RunError` that ended it otherwise."""
        try:
            await self._until_failure(self._start())
            self.state = "running"
            self._spawn("engine watch", self.dispatcher.watch())
            self._spawn("stall watch", self._watch_for_stalls())
            self._spawn("roll out", self._roll_out())
            await self._until_failure(self._train())
            await self._until_failure(self._end())
            self.state = "stopped" if self._stop.is_set() else "finished"
            return self.state
        except BaseException:
            self.state = "failed"
            raise
        finally:
            await self._shut_down()

    def request_stop(self) -> None:
        """Finish the step in hand, write a checkpoint, end."""
        self._stop.set()
        self.buffer.changed.fire()

    async def _start(self) -> None:
        """Engines open with the weights that the trainer has: a run begins, and resumes, by publishing them."""
        await self._publish()
        await self._published()
        await self.observer.evaluate(self.step)

    async def _end(self) -> None:
        await self._published()
        if self.learner.updates_weights and self.versions.version > self.weight_sync.live_version:
            await self._publish()
            await self._published()
        await self.observer.checkpoint(self)
        if not self._stop.is_set():
            await self._cancel_rollouts("end")
            await self.observer.evaluate(self.step)

    async def _shut_down(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await self._cancel_rollouts("end" if self.state == "finished" else "stopped")
        if self._publishing is not None:
            self._publishing.cancel()
            await asyncio.gather(self._publishing, return_exceptions=True)
        for lease in list(self.ledger.in_flight.values()):
            # A batch that was in the trainer's hands when the run broke cannot be cancelled, only ended.
            if lease.state == "trained":
                self.buffer.settle(lease, TRAINED)
            elif lease.state in ("taken", "ready"):
                self.buffer.settle(lease, "end")
        self.check()

    async def _cancel_rollouts(self, reason: str) -> None:
        self.buffer.close()
        running = list(self.producing.values())
        for lease, task in running:
            self.buffer.settle(lease, reason)
            task.cancel()
        await asyncio.gather(*(task for _, task in running), *self.ending.values(), return_exceptions=True)
        for lease, _ in running:
            # A task cancelled before its first step never reaches its own `finally`.
            self.producing.pop(lease.lease_id, None)

    # ------------------------------------------------------------------------------------------------- roll out

    async def _roll_out(self) -> None:
        for number in count(1):
            self.waits["admission"] = "waits for room"
            try:
                lease = await self._timed("wait_room", self.buffer.admit())
            except BufferClosed:
                self.waits["admission"] = "closed"
                return
            self._event("admitted", lease.lease_id)
            task = asyncio.create_task(self._produce(lease), name=f"rollout {lease.lease_id}")
            self.producing[lease.lease_id] = (lease, task)
            task.add_done_callback(self._notice)
            if number % AT_ONCE == 0:
                await asyncio.sleep(0)  # what was admitted goes to the engines while the rest is

    async def _produce(self, lease: Lease) -> None:
        """One lease to its unit or its end. A rollout's failure is its own: only a `RunError` ends the run."""
        try:
            unit = await self.rollout(lease)
            if self.buffer.put(lease, unit):
                self._event("put", lease.lease_id, lease.oldest_version)
        except RolloutRecycled as recycled:
            self._event("recycled", lease.lease_id)
            self.buffer.settle(lease, RECYCLED, recycled.remainder)
        except RolloutDropped as dropped:
            self._tell_once(f"dropped ({dropped.reason}): {dropped.detail or lease.task.task_id}")
            self.buffer.settle(lease, dropped.reason)
        except RunError:
            self.buffer.settle(lease, "failed")
            raise
        except Exception as error:
            self._tell_once(f"a rollout raised {type(error).__name__}: {first_line(error)}")
            self.buffer.settle(lease, "error")
        finally:
            self.producing.pop(lease.lease_id, None)

    def _cancel_stale(self) -> None:
        """Give up running groups that hold a token too old to be trained on already (`staleness.cancel_group`)."""
        oldest = self.dispatcher.oldest
        if oldest is None:
            return
        for group_id in [known for known in oldest if known not in self.producing]:
            del oldest[group_id]
        for lease_id, version in oldest.items():
            if not self.buffer.too_old(version):
                continue
            lease, task = self.producing.pop(lease_id)
            self.buffer.settle(lease, RECYCLED if self.buffer.on_stale == "recycle" else "cancelled")
            task.cancel()
            self.ending[lease_id] = task
            task.add_done_callback(lambda done, lease_id=lease_id: self.ending.pop(lease_id, None))

    # ---------------------------------------------------------------------------------------------------- train

    async def _train(self) -> None:
        loop = asyncio.get_running_loop()
        while self.step < self.settings.steps and not self._stop.is_set() and not self.learner.done:
            started = loop.time()
            batch = await self._take_batch()
            if not batch:
                break
            taken = loop.time()
            leases, units = [lease for lease, _ in batch], [unit for _, unit in batch]
            lags = [self.versions.lag(lease.oldest_version) for lease in leases]
            for lease in leases:
                self._event("taken", lease.lease_id, self.versions.version)
            self.waits["trainer"] = "trains"
            if self.turns is not None:
                await self._trainer(self.turns.to_training())
            metrics = await self._trainer(self.learner.train(units))
            if self.turns is not None:
                metrics = {**metrics, **self.turns.metrics()}
            trained = loop.time()
            self.step += 1
            self.buffer.mark_trained(leases)
            self.buffer.wanted = self._wanted()
            self.not_live.extend((self.step, lease) for lease in leases)
            waited = await self._after_update()
            report = StepReport(
                step=self.step,
                version=self.versions.version,
                units=units,
                lags=lags,
                metrics=metrics,
                wait_batch_s=taken - started,
                train_s=trained - taken,
                wait_sync_s=waited,
                publish_s=loop.time() - trained - waited,
                step_s=loop.time() - started,
                sync=self.weight_sync.last,
            )
            for lease in leases:
                self._event("trained", lease.lease_id, self.versions.version)
            self.check()
            self.observer.step(report)
            await self._at_intervals()
        self.waits["trainer"] = "has ended"

    def _wanted(self) -> int:
        """Units that the steps to come will take."""
        return 0 if self.learner.done else max(0, self.settings.steps - self.step) * self.settings.batch

    async def _after_update(self) -> float:
        """Number the new weights and send them off; the seconds spent waiting for the sync before."""
        if not self.learner.updates_weights:
            self._settle_live(self.step)
            return 0.0
        self.versions.advance()
        self._cancel_stale()
        if self.step % self.settings.every_steps and self.step < self.settings.steps:
            return 0.0
        return await self._publish()

    async def _at_intervals(self) -> None:
        every, evaluate = self.settings.checkpoint_every, self.settings.evaluate_every
        last = self.step == self.settings.steps or self._stop.is_set() or self.learner.done
        if every and self.step % every == 0 and not last:
            await self._published()
            await self.observer.checkpoint(self)
        if evaluate and self.step % evaluate == 0 and not last:
            await self._published()
            await self.observer.evaluate(self.step)

    async def _take_batch(self) -> list[tuple[Lease, Unit]]:
        """A batch after the trainer's filter, refilled up to the limit and shorter beyond it; empty only at the end."""
        batch: list[tuple[Lease, Unit]] = []
        refills = self.settings.refill_limit * self.settings.batch
        while (wanted := self.settings.batch - len(batch)) > 0:
            self.waits["trainer"] = f"waits for {wanted} of {self.settings.batch} units"
            at_least = min(self.settings.stream_groups or wanted, wanted)
            taken = await self._timed("wait_batch", self._take_or_stop(wanted, at_least))
            unwanted = self.learner.unwanted([unit for _, unit in taken])
            kept = [pair for pair, drop in zip(taken, unwanted, strict=True) if not drop]
            for (lease, _), drop in zip(taken, unwanted, strict=True):
                if drop:
                    self.buffer.settle(lease, "filtered")
            batch.extend(kept)
            refills -= len(taken) - len(kept)
            if kept and self.settings.stream_groups:
                self.waits["trainer"] = f"trains on {len(batch)} of {self.settings.batch} units"
                await self._trainer(self.learner.begin([unit for _, unit in kept]))
            if len(taken) < at_least or (batch and refills <= 0 and len(kept) < len(taken)):
                break
        if self._stop.is_set() and len(batch) < self.settings.batch:
            for lease, _ in batch:
                self.buffer.untake(lease)  # so that the checkpoint has it
            return []
        return sorted(batch, key=lambda pair: pair[0].index)

    async def _take_or_stop(self, wanted: int, at_least: int) -> list[tuple[Lease, Unit]]:
        take = asyncio.ensure_future(self.buffer.take(wanted, self.versions.version, at_least))
        stop = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait((take, stop), return_when=asyncio.FIRST_COMPLETED)
            return take.result() if take.done() else []
        finally:
            take.cancel()
            stop.cancel()

    # --------------------------------------------------------------------------------------------------- publish

    async def _publish(self) -> float:
        """Hand the current weights to the sync, once the one before is through; the seconds that took."""
        clock = asyncio.get_running_loop().time
        started = clock()
        self.waits["trainer"] = "waits for the weight sync before"
        await self._timed("wait_sync", self._published())
        waited = clock() - started
        self.waits["trainer"] = "publishes"
        version = self.versions.version
        self.observer.version_written(version)
        ticket = await self._trainer(self.learner.publish(version))
        if self.turns is not None:
            await self._trainer(self.turns.to_generation())
        self._publishing = asyncio.create_task(self._make_live(ticket, self.step), name=f"sync {version}")
        self._publishing.add_done_callback(self._notice)
        return waited

    async def publish_anew(self) -> int:
        """Make weights live that came to the learner from outside, under a version of their own."""
        self.versions.advance()
        await self._publish()
        await self._published()
        return self.versions.version

    async def _published(self) -> None:
        if self._publishing is not None:
            await asyncio.shield(self._publishing)

    async def _make_live(self, ticket: Any, step: int) -> None:
        self.waits["weights"] = f"sync to version {ticket.version}"
        times = await self._timed("sync", self.weight_sync.sync(ticket))
        if self.weight_sync.interruption.drain:
            self._span("gate", times.drain_s + times.commit_s)
        self._settle_live(step)
        self._cancel_stale()
        self._event("live", "", times.version)
        self.waits["weights"] = f"version {times.version} is live"

    def _settle_live(self, step: int) -> None:
        """The weights trained on these leases are live: their places are free."""
        live = [lease for trained_at, lease in self.not_live if trained_at <= step]
        self.not_live = [pair for pair in self.not_live if pair[0] > step]
        for lease in live:
            self.buffer.settle(lease, TRAINED)

    # --------------------------------------------------------------------------------------------------- engines

    def _on_fenced(self, slot: EngineSlot, reason: str) -> None:
        self._event("fenced", slot.name)
        reason = reason.partition("\n")[0]
        self.observer.message(f"{slot.name} is given up: {reason}")
        self._spawn(f"kill {slot.name} {self.restarts_left}", slot.proxy.kill())
        if self.spawn_engine is not None and self.restarts_left > 0:
            self.restarts_left -= 1
            self._spawn(f"replace {slot.name} {self.restarts_left}", self._replace(slot.name))
        elif not self.dispatcher.live() and not self.joining:
            self._fail(NoEngines(f"the last engine is gone ({reason}) and no restart is left (limits.restarts)"))

    async def _replace(self, name: str) -> None:
        assert self.spawn_engine is not None
        self.joining += 1
        try:
            slot = await self.spawn_engine(name)
            await self.weight_sync.join(slot)
            self._event("joined", name, slot.version)
            self.observer.message(f"{name} is replaced and runs version {slot.version}")
        except PartFailed as error:
            self.observer.message(f"{name} could not be replaced: {first_line(error)}")
            if self.restarts_left > 0:
                self.restarts_left -= 1
                self._spawn(f"replace {name} {self.restarts_left}", self._replace(name))
            elif not self.dispatcher.live():
                self._fail(NoEngines(f"no engine is left: {first_line(error)}"))
        finally:
            self.joining -= 1

    # -------------------------------------------------------------------------------------------------- watching

    def census(self) -> list[str]:
        """Ids in flight, asked of the parts in the order of the flow: rollouts, then the store."""
        return [*self.producing, *self.buffer.store.scan()]

    def check(self) -> None:
        """Law 1. Raises `ConservationError` naming the ids."""
        self.ledger.check(self.census())

    async def _watch_for_stalls(self) -> None:
        """Say what everybody waits for when nothing moved for a while; stop when it lasts."""
        loop = asyncio.get_running_loop()
        seen, moved_at, warned = -1, loop.time(), False
        while True:
            await asyncio.sleep(self.settings.stall_warning_s / 4)
            tokens = sum(slot.stats.generated_tokens for slot in self.dispatcher.live())
            now = self.ledger.transitions + tokens + self.weight_sync.syncs
            if now != seen:
                seen, moved_at, warned = now, loop.time(), False
                continue
            still = loop.time() - moved_at
            if still >= self.settings.stall_stop_s:
                self._fail(Stalled(f"nothing moved for {still:.0f} s. {self.describe()}"))
                return
            if still >= self.settings.stall_warning_s and not warned:
                warned = True
                self.observer.message(f"nothing moved for {still:.0f} s. {self.describe()}")

    def describe(self) -> str:
        """Each part's state and what it waits for, in words."""
        states = ("admitted", "ready", "taken", "trained")
        leases = ", ".join(f"{self.ledger.count(state)} {state}" for state in states)
        engines = (
            ", ".join(f"{slot.name} has {len(slot.calls)} requests" for slot in self.dispatcher.live()) or "no engine"
        )
        gate = "open" if self.dispatcher.gate_open else "closed"
        waits = "; ".join(f"{part} {what}" for part, what in self.waits.items())
        return f"Leases: {leases}; room for {self.buffer.room()} more. Gate {gate}; {engines}. {waits}."

    def _on_drop(self, lease: Lease, reason: str, unit: Unit | None) -> None:
        self._event("dropped", f"{lease.lease_id}:{reason}", NO_VERSION)
        self.observer.dropped(lease, reason, unit)
        since = self.ledger.dropped_since_trained
        lost = sum(count for why, count in since.items() if why not in ("end", "stopped"))
        if lost >= self.settings.max_dropped and self.state == "running":
            why, _ = since.most_common(1)[0]
            self._fail(
                Starved(f"{lost} units were dropped since the last trained one ({reasons(since)}): {remedy(why)}")
            )

    def _tell_once(self, text: str) -> None:
        """A failure that may repeat a thousand times is told once."""
        key = "".join(letter for letter in text if not letter.isdigit())[:120]
        if key not in self._told_errors:
            self._told_errors.add(key)
            self.observer.message(text)

    # --------------------------------------------------------------------------------------------------- plumbing

    async def _trainer(self, call: Awaitable[Any]) -> Any:
        try:
            return await call
        except WorkerDied as error:
            raise TrainingFailed(f"the trainer is gone: {error}") from None
        except PartFailed as error:
            raise TrainingFailed(f"the trainer failed: {first_line(error)}") from error

    def _spawn(self, name: str, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks[name] = task
        task.add_done_callback(self._notice)

    def _notice(self, task: asyncio.Task[Any]) -> None:
        """A loop or a rollout that broke ends the run: an exception in a task that nobody awaits is never lost."""
        if not task.cancelled() and task.exception() is not None:
            self._fail(task.exception())

    def _fail(self, error: BaseException | None) -> None:
        if not self._failure.done():
            self._failure.set_exception(error or RunError("unknown"))
            self._failure.exception()  # it may be raised by another path first

    async def _until_failure(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait((task, self._failure), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
            if self._failure.done():
                self._failure.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _timed(self, kind: str, call: Awaitable[Any]) -> Any:
        """The call, with its waiting on the timeline when it was more than a millisecond."""
        clock = asyncio.get_running_loop().time
        started = clock()
        try:
            return await call
        finally:
            self._span(kind, clock() - started)

    def _span(self, kind: str, seconds: float) -> None:
        """Something that took so long and has just ended."""
        if seconds > 1e-3:
            began = asyncio.get_running_loop().time() - seconds
            self.observer.event(
                Event(int(began * 1e9), "controller", kind, "", self.versions.version, int(seconds * 1e9))
            )

    def _event(self, kind: str, subject: str = "", version: int = NO_VERSION) -> None:
        now = int(asyncio.get_running_loop().time() * 1e9)
        self.observer.event(Event(now, "controller", kind, subject, version))


def first_line(error: BaseException) -> str:
    """An error from another process carries its traceback below the first line."""
    return str(error).partition("\n")[0]
