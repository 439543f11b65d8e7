"""A `RunConfig` into a wired `Controller`: what every run has stands here, what differs between language models and
control in `assemble_tokens` and `assemble_control`.

One `match` per axis; heavy imports only inside the arm taken.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from headrace.config import RunConfig, is_served
from headrace.configbase import config_to_dict
from headrace.errors import ConfigError, MissingExtra
from headrace.exchange.buffer import LeaseBuffer
from headrace.exchange.channels import open_channel
from headrace.exchange.config import steps_ahead
from headrace.exchange.interruption import INTERRUPTIONS
from headrace.exchange.ledger import Ledger
from headrace.exchange.staleness import Capacity, VersionLine
from headrace.exchange.stores import open_store
from headrace.observability.display import Display
from headrace.observability.recorder import RunRecorder
from headrace.orchestrator.checkpoint import Checkpoints, Restored, restore
from headrace.orchestrator.controller import Controller
from headrace.orchestrator.dispatcher import Dispatcher
from headrace.orchestrator.flow import FlowSettings
from headrace.orchestrator.narrator import Narrator
from headrace.orchestrator.parts import Flow, Parts, RunOrder
from headrace.orchestrator.turns import Turns
from headrace.orchestrator.weight_sync import WeightSync
from headrace.protocols import Runtime, Store, TaskSource
from headrace.types import Event


@dataclass(frozen=True, slots=True)
class Assembled:
    """A run that is ready to go. backend: the trainer's proxy"""

    controller: Controller
    narrator: Narrator
    backend: Any


class Work(Protocol):
    """What a kind of work adds to every run."""

    async def open_source(self) -> TaskSource: ...

    def replay(self) -> tuple[Callable[..., LeaseBuffer], Store] | None:
        """The buffer and the store of an algorithm that samples from what it keeps; None takes each unit once."""
        ...

    async def parts(self, flow: Flow) -> Parts:
        """Start engines and trainer."""
        ...


async def assemble(order: RunOrder, stack: AsyncExitStack, display: Display) -> Assembled:
    """The parts of one run, built in the order in which the data flows; `stack` closes them in the other."""
    config, tellers = order.config, [display.message]

    def say(text: str) -> None:
        tellers[-1](text)

    checkpoints = Checkpoints(order.run_dir, config.checkpoint.keep)
    restored = checkpoints.latest(say) if order.resume else None
    steps = config.training.steps
    if restored is not None and restored.step >= steps:
        say(f"all {steps} steps are done; for more, add training.steps={2 * steps}")
    work = open_work(order, say)
    source = await work.open_source()
    recorder = RunRecorder(order.run_dir, config.observability, config_to_dict(config))
    stack.callback(recorder.close)
    watchers: list[Callable[[Event], None]] = [recorder.event]

    def record(event: Event) -> None:
        watchers[-1](event)

    runtime = open_runtime(config.runtime, record)
    stack.push_async_callback(runtime.close)
    buffer = open_buffer(order, work, source, stack, restored, checkpoints)
    dispatcher = open_dispatcher(config)
    channel = open_weight_channel(order)
    stack.callback(channel.close)
    parts = await work.parts(Flow(stack, runtime, source, buffer, dispatcher, channel, record, restored))
    narrator = Narrator(order.run_dir, recorder, display, checkpoints, parts, steps)
    watchers.append(narrator.event)
    tellers.append(narrator.message)
    if restored is not None:
        narrator.tally.restore(restored.flow.get("tally", {}))
    sync = weight_sync(config, dispatcher, parts)
    shared_devices = config.placement == "colocated" and order.only is None
    controller = Controller(
        flow_settings(config),
        buffer,
        dispatcher,
        sync,
        parts.rollout,
        parts.learner,
        narrator,
        spawn_engine=parts.spawn_engine,
        turns=Turns(sync, parts.backend) if shared_devices else None,
        step=restored.step if restored else 0,
    )
    narrator.attach(controller)
    if is_served(config, order.only):
        from headrace.assemble_clients import serve_clients

        await serve_clients(stack, config, order.run_dir, controller, parts, order.token, say)
    return Assembled(controller, narrator, parts.backend)


def open_work(order: RunOrder, say: Callable[[str], None]) -> Work:
    if order.config.env.id:
        from headrace.assemble_control import ControlWork

        return ControlWork(order, say)
    from headrace.assemble_tokens import TokenWork

    return TokenWork(order, say)


def open_runtime(kind: str, record: Callable[[Event], None]) -> Runtime:
    match kind:
        case "local":
            from headrace.orchestrator.runtimes.local import LocalRuntime

            return LocalRuntime(record)
        case "processes":
            from headrace.orchestrator.runtimes.processes import ProcessRuntime

            return ProcessRuntime(record)
        case "ray":
            try:
                from headrace.orchestrator.runtimes.ray import RayRuntime
            except ImportError:
                raise MissingExtra("ray", "ray", 'runtime = "ray"') from None
            return RayRuntime(record)
    raise ConfigError("runtime", f'found "{kind}", which is not available in this version')


def open_buffer(
    order: RunOrder,
    work: Work,
    source: TaskSource,
    stack: AsyncExitStack,
    restored: Restored | None,
    checkpoints: Checkpoints,
) -> LeaseBuffer:
    config, versions = order.config, VersionLine()
    kind, store = work.replay() or (LeaseBuffer, open_unit_store(order))
    stack.callback(store.close)
    buffer = kind(
        source,
        store,
        Ledger(),
        versions,
        Capacity(
            batch=config.training.groups,
            ahead=steps_ahead(config.buffer, config.staleness),
            oversample=config.rollout.oversample,
            max_in_flight=config.rollout.max_in_flight,
        ),
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


def open_unit_store(order: RunOrder) -> Store:
    buffer = order.config.buffer
    return open_store(
        buffer.store,
        buffer.max_bytes,
        str((order.run_dir / "store").resolve()),
        buffer.url,
        keep_acknowledged=order.config.checkpoint.every_steps > 0,
    )


def open_dispatcher(config: RunConfig) -> Dispatcher:
    dispatcher = Dispatcher(
        generate_timeout_s=config.rollout.generate_timeout_s,
        rejoin_timeout_s=config.weights.rejoin_timeout_s,
        routing=config.rollout.engine.routing,
    )
    dispatcher.oldest = {} if config.staleness.cancel_group else None
    return dispatcher


def open_weight_channel(order: RunOrder) -> Any:
    weights = order.config.weights
    return open_channel(
        weights.channel,
        folder=str((order.run_dir / "weights").resolve()),
        address=weights.address,
        bucket_mb=weights.bucket_mb,
        scope=weights.scope,
        full_every=weights.full_every,
        timeout_s=weights.prepare_timeout_s / 3,  # a broken transfer can be repeated before an engine is fenced
    )


def weight_sync(config: RunConfig, dispatcher: Dispatcher, parts: Parts) -> WeightSync:
    weights = config.weights

    async def scored() -> None:
        while getattr(parts.rollout, "scoring", 0):
            await asyncio.sleep(0.005)

    return WeightSync(
        dispatcher,
        INTERRUPTIONS[weights.interruption],
        prepare_timeout_s=weights.prepare_timeout_s,
        commit_timeout_s=weights.commit_timeout_s,
        drain_timeout_s=weights.drain_timeout_s,
        scoring=scored,
        whole=parts.backend.republish if weights.scope == "changed" else None,
    )


def flow_settings(config: RunConfig) -> FlowSettings:
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
