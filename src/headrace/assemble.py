"""A `RunConfig` into a wired `Controller`, and the controller's run into an exit code.

One `match` per axis; heavy imports only inside the arm taken.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from headrace.config import RunConfig, resolve
from headrace.configbase import config_to_dict
from headrace.errors import ConfigError, MissingExtra, RunError, TrainingFailed
from headrace.exchange.buffer import LeaseBuffer
from headrace.exchange.config import steps_ahead
from headrace.exchange.interruption import INTERRUPTIONS
from headrace.exchange.ledger import Ledger
from headrace.exchange.staleness import Capacity, VersionLine
from headrace.exchange.stores import open_store
from headrace.observability.display import open_display
from headrace.observability.recorder import RunRecorder
from headrace.orchestrator.checkpoint import Checkpoints, Restored, restore
from headrace.orchestrator.controller import Controller, FlowSettings, reasons, remedy
from headrace.orchestrator.dispatcher import Dispatcher, EngineSlot
from headrace.orchestrator.evaluate import Evaluator
from headrace.orchestrator.learner import GroupKeeper, TokenLearner
from headrace.orchestrator.narrator import Narrator
from headrace.orchestrator.parts import Parts
from headrace.orchestrator.runtimes.worker import calm_garbage_collection
from headrace.orchestrator.turns import Turns
from headrace.orchestrator.weight_sync import WeightSync
from headrace.protocols import Resources, Runtime, Store, TaskSource
from headrace.rollout.partial import PARTIAL_POLICIES
from headrace.rollout.token_rollout import TokenRollout
from headrace.types import Group, SamplingParams, Task


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
    return asyncio.run(
        Assembly(
            resolve(config), run_dir, only=only, resume=resume, display=display, samples=samples, token=token
        ).run()
    )


class Assembly:
    """The parts of one run, built in the order in which the data flows and closed in the other. What differs between
    language models and control is what `_parts` returns."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        *,
        only: str | None,
        resume: bool,
        display: str | None,
        samples: Path | None,
        token: str = "",
    ) -> None:
        self.config, self.run_dir, self.only, self.resume, self.samples = config, run_dir, only, resume, samples
        self.token = token
        self.display = open_display(display or config.observability.display, config.training.steps)  # type: ignore[arg-type]
        self.versions = VersionLine()
        self.started = time.monotonic()
        self.interrupts = 0

    async def run(self) -> int:
        """Build, run, close; run.json says how it went whatever happens."""
        state, error = "failed", ""
        self.controller: Controller | None = None
        there = set(self.run_dir.iterdir()) if self.run_dir.is_dir() else set()
        try:
            async with AsyncExitStack() as stack:
                stack.callback(self.display.close)
                self._listen_for_stop()
                self.controller = await self._build(stack)
                self._write_state("running")
                watching = asyncio.create_task(self.narrator.watch())
                stack.callback(watching.cancel)
                calm_garbage_collection()
                state = await self.controller.run()
                self._hold_to_account(state)
                await self._closing_words(state)
        except asyncio.CancelledError:
            state, error = "stopped", "at once, without a checkpoint"
            if not self.interrupts:
                raise
        except Exception as raised:
            state = "failed"
            if self.controller is not None and isinstance(raised, RunError):
                self._say_how_to_go_on(raised)
            error = f"{type(raised).__name__}: {raised}"
            raise
        finally:
            if self.controller is not None:
                self._write_state(state, error)
            elif not self.resume:
                self._take_away(there)
        return 130 if state == "stopped" else 0

    # --------------------------------------------------------------------------------------------------- building

    async def _build(self, stack: AsyncExitStack) -> Controller:
        config = self.config
        checkpoints = Checkpoints(self.run_dir, config.checkpoint.keep)
        restored = checkpoints.latest(self.display.message) if self.resume else None
        if restored is not None and restored.step >= config.training.steps:
            self.display.message(
                f"all {config.training.steps} steps are done; for more, add training.steps={2 * config.training.steps}"
            )
        source = self._open_source()
        model = Path() if config.env.id else await asyncio.to_thread(self._resolve_model)
        recorder = RunRecorder(self.run_dir, config.observability, config_to_dict(config))
        stack.callback(recorder.close)
        runtime = self._runtime(recorder.event)
        stack.push_async_callback(runtime.close)
        buffer, dispatcher = self._buffer(stack, source, restored, checkpoints), self._dispatcher()
        channel = self._channel()
        stack.callback(channel.close)
        if config.env.id:
            from headrace.assemble_control import control_parts

            parts = await control_parts(config, runtime, dispatcher, channel, restored, buffer)
        else:
            parts = await self._parts(
                stack, recorder, runtime, dispatcher, channel, model, restored, buffer.incarnation
            )
        self.backend = parts.backend
        self.narrator = Narrator(
            self.run_dir,
            recorder,
            self.display,
            checkpoints,
            total_steps=config.training.steps,
            decode=parts.decode,
            describe=parts.describe,
            names=parts.names,
            evaluator=parts.evaluator,
            reward_metrics=parts.reward_metrics,
        )
        if restored is not None:
            self.narrator.tally.restore(restored.flow.get("tally", {}))
        sync = self._weight_sync(dispatcher, parts.rollout)
        shared_devices = config.placement == "colocated" and self.only is None
        controller = Controller(
            self._settings(),
            buffer,
            dispatcher,
            sync,
            parts.rollout,
            parts.learner,
            self.narrator,
            spawn_engine=parts.spawn_engine,
            turns=Turns(sync, parts.backend) if shared_devices else None,
            step=restored.step if restored else 0,
        )
        self.narrator.attach(controller)
        if self._served:
            from headrace.assemble_clients import serve_clients

            await serve_clients(stack, config, self.run_dir, controller, parts, self.token, self.display.message)
        return controller

    async def _parts(
        self,
        stack: AsyncExitStack,
        recorder: RunRecorder,
        runtime: Runtime,
        dispatcher: Dispatcher,
        channel: Any,
        model: Path,
        restored: Restored | None,
        incarnation: int,
    ) -> Parts:
        """Of a language model. Workers spend seconds on imports: all start together, and our own imports run meanwhile."""
        rewarder, learner, spawn_engine, (tokenizer, environment) = await asyncio.gather(
            self._rewarder(stack, recorder),
            self._learner(runtime, model, channel, restored),
            self._engines(runtime, dispatcher, model, channel),
            self._environment(model),
        )
        return Parts(
            rollout=self._rollout(dispatcher, environment, rewarder, tokenizer, incarnation),
            learner=learner,
            spawn_engine=spawn_engine,
            backend=self.backend,
            decode=environment.decode,
            describe=partial(describe_group, environment),
            evaluator=self._evaluator(dispatcher, environment, rewarder),
            reward_metrics=rewarder.metrics if rewarder is not None else dict,
        )

    @property
    def _served(self) -> bool:
        """Whether clients produce the episodes."""
        return self.config.rollout.source == "http" and self.only != "train"

    def _open_source(self) -> TaskSource:
        if self.config.env.id:
            from headrace.rollout.sources.trajectories import TrajectorySource

            return TrajectorySource(self.config.env.id)
        if self.only == "train":
            from headrace.exchange.codec import read_groups
            from headrace.rollout.sources.replay import ReplaySource

            assert self.samples is not None
            self.recorded = ReplaySource(read_groups(self.samples))
            return self.recorded
        from headrace.rollout.tasks import open_source

        source = open_source(self.config.tasks, seed=self.config.seed, folder=Path.cwd())
        if self.config.rollout.order == "length_bucket":
            from headrace.rollout.sources.length_buckets import LengthBuckets

            return LengthBuckets(source, self.config.training.groups, self.config.seed)
        return source

    def _resolve_model(self) -> Path:
        from headrace.models.catalog import resolve_model

        return resolve_model(self.config.model, seed=self.config.seed, progress=self.display.message)

    async def _environment(self, model: Path) -> tuple[Any, Any]:
        await asyncio.sleep(0.05)  # let the workers start before this blocks the loop
        from headrace.models.catalog import load_tokenizer
        from headrace.rollout.environments.single_turn import SingleTurn

        tokenizer = load_tokenizer(model)
        ends = end_token_ids(model)
        return tokenizer, SingleTurn(tokenizer, self.config.tasks, end_token_ids=ends)

    def _record(self, sink: Callable[[Any], None]) -> Callable[[Any], None]:
        def record(event: Any) -> None:
            narrator = getattr(self, "narrator", None)
            (narrator.event if narrator is not None else sink)(event)

        return record

    def _runtime(self, sink: Callable[[Any], None]) -> Runtime:
        match self.config.runtime:
            case "local":
                from headrace.orchestrator.runtimes.local import LocalRuntime

                return LocalRuntime(self._record(sink))
            case "processes":
                from headrace.orchestrator.runtimes.processes import ProcessRuntime

                return ProcessRuntime(self._record(sink))
            case "ray":
                try:
                    from headrace.orchestrator.runtimes.ray import RayRuntime
                except ImportError:
                    raise MissingExtra("ray", "ray", 'runtime = "ray"') from None
                return RayRuntime(self._record(sink))
            case other:
                raise ConfigError("runtime", f'found "{other}", which is not available in this version')

    async def _rewarder(self, stack: AsyncExitStack, recorder: RunRecorder) -> Any:
        """Reward functions run in processes of their own whatever the runtime: only so can one that hangs be ended."""
        if self.only == "train" or not self.config.reward.functions:
            return None
        from headrace.orchestrator.runtimes.processes import ProcessRuntime
        from headrace.reward.pool import build_rewarder

        record = self._record(recorder.event)
        runtime = ProcessRuntime(record)
        stack.push_async_callback(runtime.close)
        rewarder = build_rewarder(self.config.reward, runtime, record, Path.cwd())
        stack.push_async_callback(rewarder.close)
        await rewarder.start()
        return rewarder

    def _buffer(
        self, stack: AsyncExitStack, source: TaskSource, restored: Restored | None, checkpoints: Checkpoints
    ) -> LeaseBuffer:
        config, versions = self.config, self.versions
        capacity = Capacity(
            batch=config.training.groups,
            ahead=steps_ahead(config.buffer, config.staleness),
            oversample=config.rollout.oversample,
            max_in_flight=config.rollout.max_in_flight,
        )
        kind: Callable[..., LeaseBuffer] = LeaseBuffer
        if config.env.id and config.algorithm.kind in ("dqn", "sac"):
            from headrace.exchange.replay import ReplayBuffer
            from headrace.exchange.stores.replay import ReplayStore

            replay = config.replay
            kind = partial(ReplayBuffer, save=replay.save)
            store: Store = ReplayStore(replay.capacity, exponent=replay.priority, seed=config.seed)
        else:
            store = open_store(
                config.buffer.store,
                config.buffer.max_bytes,
                str((self.run_dir / "store").resolve()),
                config.buffer.url,
                keep_acknowledged=config.checkpoint.every_steps > 0,
            )
        stack.callback(store.close)
        buffer = kind(
            source,
            store,
            Ledger(),
            versions,
            capacity,
            max_version_lag=config.staleness.max_version_lag,
            on_stale=config.staleness.on_stale,
        )
        if restored is not None:
            restore(restored, buffer, versions, checkpoints.highest_version(int(restored.flow["version"])))
        else:
            for key in store.scan():  # what a run of the same name left on a server is not this run's
                store.acknowledge(key)
            store.forget(store.acknowledged())
        buffer.on_put = getattr(source, "observe", buffer.on_put)
        return buffer

    def _dispatcher(self) -> Dispatcher:
        dispatcher = Dispatcher(
            generate_timeout_s=self.config.rollout.generate_timeout_s,
            rejoin_timeout_s=self.config.weights.rejoin_timeout_s,
            routing=self.config.rollout.engine.routing,
        )
        dispatcher.oldest = {} if self.config.staleness.cancel_group else None
        return dispatcher

    def _rollout(
        self, dispatcher: Dispatcher, environment: Any, rewarder: Any, tokenizer: Any, incarnation: int
    ) -> Any:
        if self.only == "train":
            return self.recorded.rollout
        config = self.config
        function = None
        if config.rollout.function:
            from headrace.reward.functions import import_function

            function = import_function(config.rollout.function, Path.cwd(), "rollout.function")
        kind: Callable[..., TokenRollout] = TokenRollout
        if self._served:
            from headrace.assemble_clients import client_rollout

            kind = client_rollout(config, environment)
        return kind(
            dispatcher,
            lambda: environment,
            rewarder,
            sampling=sampling_params(config),
            group=config.group,
            partial=PARTIAL_POLICIES[config.weights.partial],
            open_time=dispatcher.open_time,
            seed=config.seed,
            incarnation=incarnation,
            function=function,
            tokenizer=tokenizer,
        )

    def _channel(self) -> Any:
        from headrace.exchange.channels import open_channel

        weights = self.config.weights
        return open_channel(
            weights.channel,
            folder=str((self.run_dir / "weights").resolve()),
            address=weights.address,
            bucket_mb=weights.bucket_mb,
            scope=weights.scope,
            full_every=weights.full_every,
            timeout_s=weights.prepare_timeout_s / 3,  # a broken transfer can be repeated before an engine is fenced
        )

    async def _learner(self, runtime: Runtime, model: Path, channel: Any, restored: Restored | None) -> Any:
        config = self.config
        match config.training.backend:
            case "single_device":
                from headrace.training.backends.single_device import build_single_device as build
            case other:
                raise ConfigError("training.backend", f'found "{other}", which is not available in this version')
        max_length = config.rollout.sampling.max_tokens
        backend = await runtime.spawn(
            "trainer",
            build,
            config.training,
            str(model),
            config.model.dtype,
            channel,
            max_length,
            resources=Resources(threads=config.training.threads),
        )
        self.backend = backend
        checkpoint = restored.model_folder if restored is not None else None
        if self.only == "rollout":
            return GroupKeeper(backend, self.run_dir / "groups" / "groups.groups", checkpoint)
        if checkpoint is not None:
            await backend.load(str(checkpoint))
        return TokenLearner(backend, config.training, max_length=max_length, lag=self.versions.lag)

    async def _engines(self, runtime: Runtime, dispatcher: Dispatcher, model: Path, channel: Any) -> Any:
        """Spawn the engines; returns how to spawn a replacement."""
        config = self.config
        inline = config.runtime == "local"
        arguments: tuple[Any, ...] = (
            config.rollout.engine,
            str(model),
            config.model.dtype,
            channel,
            config.weights.kv_on_swap,
        )
        factory: Callable[..., Any]
        match "scripted" if self.only == "train" else config.rollout.engine.kind:
            case "native":
                from headrace.rollout.engines.native.engine import build_native

                factory = partial(build_native, inline=inline)
            case "hf":
                from headrace.rollout.engines.hf import build_hf

                factory = partial(build_hf, inline=inline)
            case _:
                from headrace.rollout.engines.scripted import build_scripted

                factory, arguments = build_scripted, ()

        async def spawn(name: str) -> EngineSlot:
            resources = Resources(threads=config.rollout.engine.threads)
            return EngineSlot(name, await runtime.spawn(name, factory, *arguments, resources=resources))

        slots = await asyncio.gather(*(spawn(f"engine-{n}") for n in range(config.rollout.engine.count)))
        for slot in slots:
            dispatcher.join(slot)
        return spawn

    def _weight_sync(self, dispatcher: Dispatcher, rollout: Any) -> WeightSync:
        weights = self.config.weights

        async def scored() -> None:
            while getattr(rollout, "scoring", 0):
                await asyncio.sleep(0.005)

        return WeightSync(
            dispatcher,
            INTERRUPTIONS[weights.interruption],
            prepare_timeout_s=weights.prepare_timeout_s,
            commit_timeout_s=weights.commit_timeout_s,
            drain_timeout_s=weights.drain_timeout_s,
            scoring=scored,
            whole=self.backend.republish if weights.scope == "changed" else None,
        )

    def _evaluator(self, dispatcher: Dispatcher, environment: Any, rewarder: Any) -> Evaluator | None:
        config = self.config
        if not config.evaluation.source or self.only or not config.evaluation.count or rewarder is None:
            return None
        return Evaluator(
            self._evaluation_tasks(),
            dispatcher,
            environment,
            rewarder,
            sampling_params(config),
            sampled=config.evaluation.sampled,
            seed=config.seed,
        )

    def _evaluation_tasks(self) -> list[Task]:
        from headrace.rollout.tasks import heldout_source, open_source

        config = self.config
        if config.evaluation.source == "heldout":
            source: TaskSource = heldout_source(config.tasks, folder=Path.cwd(), limit=config.evaluation.count)
        else:
            tables = msgspec.structs.replace(
                config.tasks, source=config.evaluation.source, shuffle=False, epochs=1, limit=config.evaluation.count
            )
            source = open_source(tables, seed=0, folder=Path.cwd())
        tasks = []
        while len(tasks) < config.evaluation.count and (task := source.next()) is not None:
            tasks.append(task)
        return tasks

    def _settings(self) -> FlowSettings:
        config = self.config
        return FlowSettings(
            batch=config.training.groups,
            steps=config.training.steps,
            every_steps=config.weights.every_steps,
            refill_limit=config.training.advantage.refill_limit,
            stream_groups=config.training.stream_groups,
            checkpoint_every=config.checkpoint.every_steps,
            evaluate_every=config.evaluation.every_steps,
            stall_warning_s=config.limits.stall_warning_s,
            stall_stop_s=config.limits.stall_stop_s,
            max_dropped=config.limits.max_dropped,
            restarts=config.limits.restarts,
        )

    # ----------------------------------------------------------------------------------------------- around the run

    def _listen_for_stop(self) -> None:
        """The first Ctrl-C finishes the step and writes a checkpoint; the second ends at once. Before the run has begun
        there is nothing to finish."""
        loop = asyncio.get_running_loop()
        main = asyncio.current_task()
        assert main is not None

        def stop() -> None:
            self.interrupts += 1
            begun = self.controller is not None
            if begun and self.interrupts == 1:
                self.display.message("stopping after this step, with a checkpoint; again to stop at once")
                self.controller.request_stop()
            elif self.interrupts <= 1 + begun:
                main.cancel()
            else:  # what is being closed does not come to an end
                self.display.close()
                os._exit(130)

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop)

    def _hold_to_account(self, state: str) -> None:
        """Raise what makes a run that came to its end a failed one all the same."""
        controller = self.controller
        assert controller is not None
        if self.narrator.unsaved:
            raise RunError(self.narrator.unsaved)
        if controller.step or state != "finished" or not self.config.training.steps:
            return
        dropped = controller.ledger.dropped
        if not dropped:
            raise RunError("the run ended after 0 steps: the task source gave no tasks")
        why, _ = dropped.most_common(1)[0]
        raise RunError(f"the run ended after 0 steps: all units were dropped ({reasons(dropped)}): {remedy(why)}")

    def _say_how_to_go_on(self, error: RunError) -> None:
        """Add to the error's line what the run's folder allows."""
        step = Checkpoints(self.run_dir, self.config.checkpoint.keep).newest_step()
        if step is not None:
            how = f"go on from step {step} with: headrace run --resume {self.run_dir}"
        elif isinstance(error, TrainingFailed) or self.narrator.unsaved:
            how = "there is no checkpoint for --resume (see checkpoint.every_steps), start anew with another --name"
        else:
            return
        error.args = (f"{error}; {how}", *error.args[1:])

    def _take_away(self, there: set[Path]) -> None:
        """Leave a folder in which nothing began as it was, so that the next try may use it."""
        for path in set(self.run_dir.iterdir()) - there if self.run_dir.is_dir() else ():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def _write_state(self, state: str, error: str = "") -> None:
        controller = self.controller
        assert controller is not None
        ledger = controller.ledger
        content = {
            "state": state,
            "steps": controller.step,
            "total_steps": self.config.training.steps,
            "elapsed_s": round(self.narrator.elapsed_s, 3),
            "version": controller.versions.version,
            "counts": {
                "submitted": ledger.submitted,
                "trained": ledger.trained,
                "dropped": dict(ledger.dropped),
                "in_flight": len(ledger.in_flight),
            },
            "error": error,
            "only": self.only,
            "samples": str(self.samples.resolve()) if self.samples else None,
        }
        new = self.run_dir / ".run.json.new"
        try:
            new.write_text(json.dumps(content, indent=1), encoding="utf-8")
            new.replace(self.run_dir / "run.json")
        except OSError as problem:
            self.display.message(f"run.json could not be written: {problem.strerror}")

    async def _closing_words(self, state: str) -> None:
        for problem in self.narrator.recorder.problems:
            self.display.message(problem)
        if self.only == "rollout":
            rates = self.narrator.rates()
            self.display.message(
                f"rollout alone: {self.narrator.samples} samples, {rates[0]:.1f} samples/s, {rates[1]:.0f} tokens/s; "
                f"train on them with --only train --samples {self.run_dir / 'groups'}"
            )
        elif state == "finished":
            fingerprint = await self.backend.fingerprint()
            self.display.message(f"weights {fingerprint[:16]} after {self.controller.step} steps")


def sampling_params(config: RunConfig) -> SamplingParams:
    """[rollout.sampling] as engines read it."""
    sampling = config.rollout.sampling
    given = {name: getattr(sampling, name) for name in sampling.__struct_fields__}
    return SamplingParams(**{**given, "logit_bias": tuple((int(i), b) for i, b in sampling.logit_bias.items())})


def end_token_ids(model: Path) -> tuple[int, ...]:
    """All end tokens that the model's own files name."""
    ends: list[int] = []
    for name in ("generation_config.json", "config.json"):
        path = model / name
        if path.is_file():
            found = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            ends.extend(found if isinstance(found, list) else [found] if found is not None else [])
    return tuple(dict.fromkeys(ends))


def describe_group(environment: Any, group: Group) -> str:
    """One completion of a group in a line: prompt, answer, score."""
    if not group.episodes:
        return ""
    sample = group.episodes[0].samples[-1]
    ids = sample.token_ids[sample.loss_mask.astype(bool)]
    prompt = environment.prompt_text(group.task) if "prompt" in group.task.payload else ""
    reward = group.scores[0].reward
    score = "no score" if reward is None else f"{reward:g}"
    return f"{prompt[-80:]} → {environment.decode(ids)} [{score}]".replace("\n", "⏎")
