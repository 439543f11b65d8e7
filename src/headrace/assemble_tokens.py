"""The parts of a run that trains a language model: tasks, engines, rewards, a trainer of tokens, held-out evaluation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from headrace.config import RunConfig, is_served
from headrace.errors import ConfigError
from headrace.models.catalog import load_tokenizer, resolve_model
from headrace.orchestrator.dispatcher import EngineSlot
from headrace.orchestrator.evaluate import Evaluator
from headrace.orchestrator.learner import GroupKeeper, TokenLearner
from headrace.orchestrator.parts import Flow, Parts, RunOrder
from headrace.protocols import Resources, TaskSource
from headrace.rollout.partial import PARTIAL_POLICIES
from headrace.rollout.tasks import open_source
from headrace.rollout.token_rollout import TokenRollout
from headrace.types import Group, SamplingParams, Task


class TokenWork:
    def __init__(self, order: RunOrder, say: Callable[[str], None]) -> None:
        self.order, self.config, self.say = order, order.config, say

    async def open_source(self) -> TaskSource:
        source = recorded(self.order.samples) if self.order.samples else task_source(self.config)
        self.model = await asyncio.to_thread(resolve_model, self.config.model, seed=self.config.seed, progress=self.say)
        return source

    def replay(self) -> None:
        return None

    async def parts(self, flow: Flow) -> Parts:
        """Workers spend seconds on imports: all start together, and our own imports run meanwhile."""
        config, order = self.config, self.order
        rewarder, backend, spawn_engine, (tokenizer, environment) = await asyncio.gather(
            open_rewarder(order, flow),
            spawn_trainer(config, flow, self.model),
            spawn_engines(order, flow, self.model),
            open_environment(config, self.model),
        )
        return Parts(
            rollout=flow.source.rollout
            if order.only == "train"
            else rollout(order, flow, environment, rewarder, tokenizer),  # type: ignore[attr-defined]
            learner=await learner(order, flow, backend),
            spawn_engine=spawn_engine,
            backend=backend,
            decode=environment.decode,
            describe=partial(describe_group, environment),
            evaluator=evaluator(config, flow, environment, rewarder)
            if rewarder is not None and not order.only
            else None,
            reward_metrics=rewarder.metrics if rewarder is not None else dict,
        )


def task_source(config: RunConfig) -> TaskSource:
    source = open_source(config.tasks, seed=config.seed, folder=Path.cwd())
    if config.rollout.order == "length_bucket":
        from headrace.rollout.sources.length_buckets import LengthBuckets

        return LengthBuckets(source, config.training.groups, config.seed)
    return source


def recorded(samples: Path) -> TaskSource:
    """Groups that an earlier run wrote: the source whose tasks come with their units."""
    from headrace.exchange.codec import read_groups
    from headrace.rollout.sources.replay import ReplaySource

    return ReplaySource(read_groups(samples))


async def open_environment(config: RunConfig, model: Path) -> tuple[Any, Any]:
    """(tokenizer, environment)"""
    await asyncio.sleep(0.05)  # let the workers start before this blocks the loop
    from headrace.rollout.engines.models import named_end_ids
    from headrace.rollout.environments.single_turn import SingleTurn

    tokenizer = load_tokenizer(model)
    return tokenizer, SingleTurn(tokenizer, config.tasks, end_token_ids=named_end_ids(model))


async def open_rewarder(order: RunOrder, flow: Flow) -> Any:
    """Reward functions run in processes of their own whatever the runtime: only so can one that hangs be ended."""
    if order.only == "train" or not order.config.reward.functions:
        return None
    from headrace.orchestrator.runtimes.processes import ProcessRuntime
    from headrace.reward.pool import build_rewarder

    runtime = ProcessRuntime(flow.record)
    flow.stack.push_async_callback(runtime.close)
    rewarder = build_rewarder(order.config.reward, runtime, flow.record, Path.cwd())
    flow.stack.push_async_callback(rewarder.close)
    await rewarder.start()
    return rewarder


async def spawn_trainer(config: RunConfig, flow: Flow, model: Path) -> Any:
    match config.training.backend:
        case "single_device":
            from headrace.training.backends.single_device import build_single_device as build
        case other:
            raise ConfigError("training.backend", f'found "{other}", which is not available in this version')
    return await flow.runtime.spawn(
        "trainer",
        build,
        config.training,
        str(model),
        config.model.dtype,
        flow.channel,
        config.rollout.sampling.max_tokens,
        resources=Resources(threads=config.training.threads),
    )


async def learner(order: RunOrder, flow: Flow, backend: Any) -> Any:
    checkpoint = flow.restored.model_folder if flow.restored is not None else None
    if order.only == "rollout":
        return GroupKeeper(backend, order.run_dir / "groups" / "groups.groups", checkpoint)
    if checkpoint is not None:
        await backend.load(str(checkpoint))
    config = order.config
    return TokenLearner(
        backend, config.training, max_length=config.rollout.sampling.max_tokens, lag=flow.buffer.versions.lag
    )


async def spawn_engines(order: RunOrder, flow: Flow, model: Path) -> Any:
    """Spawn the engines; returns how to spawn a replacement."""
    config = order.config
    inline = config.runtime == "local"
    arguments: tuple[Any, ...] = (
        config.rollout.engine,
        str(model),
        config.model.dtype,
        flow.channel,
        config.weights.kv_on_swap,
    )
    factory: Callable[..., Any]
    match "scripted" if order.only == "train" else config.rollout.engine.kind:
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
        proxy = await flow.runtime.spawn(name, factory, *arguments, resources=resources)
        return EngineSlot(name, proxy, together=True)

    for slot in await asyncio.gather(*(spawn(f"engine-{n}") for n in range(config.rollout.engine.count))):
        flow.dispatcher.join(slot)
    return spawn


def rollout(order: RunOrder, flow: Flow, environment: Any, rewarder: Any, tokenizer: Any) -> TokenRollout:
    config = order.config
    function = None
    if config.rollout.function:
        from headrace.reward.functions import import_function

        function = import_function(config.rollout.function, Path.cwd(), "rollout.function")
    kind: Callable[..., TokenRollout] = TokenRollout
    if is_served(config, order.only):
        from headrace.assemble_clients import client_rollout

        kind = client_rollout(config, environment)
    return kind(
        flow.dispatcher,
        lambda: environment,
        rewarder,
        sampling=sampling_params(config),
        group=config.group,
        partial=PARTIAL_POLICIES[config.weights.partial],
        open_time=flow.dispatcher.open_time,
        seed=config.seed,
        incarnation=flow.buffer.incarnation,
        function=function,
        tokenizer=tokenizer,
    )


def sampling_params(config: RunConfig) -> SamplingParams:
    """[rollout.sampling] as engines read it."""
    sampling = config.rollout.sampling
    given = {name: getattr(sampling, name) for name in sampling.__struct_fields__}
    return SamplingParams(**{**given, "logit_bias": tuple((int(i), b) for i, b in sampling.logit_bias.items())})


def evaluator(config: RunConfig, flow: Flow, environment: Any, rewarder: Any) -> Evaluator | None:
    if not config.evaluation.source or not config.evaluation.count:
        return None
    return Evaluator(
        evaluation_tasks(config),
        flow.dispatcher,
        environment,
        rewarder,
        sampling_params(config),
        sampled=config.evaluation.sampled,
        seed=config.seed,
    )


def evaluation_tasks(config: RunConfig) -> list[Task]:
    from headrace.rollout.tasks import heldout_source

    if config.evaluation.source == "heldout":
        source: TaskSource = heldout_source(config.tasks, folder=Path.cwd(), limit=config.evaluation.count)
    else:
        tables = msgspec.structs.replace(
            config.tasks, source=config.evaluation.source, shuffle=False, epochs=1, limit=config.evaluation.count
        )
        source = open_source(tables, seed=0, folder=Path.cwd())
    tasks: list[Task] = []
    while len(tasks) < config.evaluation.count and (task := source.next()) is not None:
        tasks.append(task)
    return tasks


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
