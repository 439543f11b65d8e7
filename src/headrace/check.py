"""Turns a config into a page that says what the run will do, and an exit code that says whether it can."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from headrace.config import RunConfig, cores, resolve
from headrace.errors import DataError, UserError, how_to_install
from headrace.estimates import (
    ModelShape,
    batch_arithmetic,
    context_length,
    count,
    kv_tokens,
    memory_parts,
    model_shape,
    readable_bytes,
)
from headrace.protocols import RewardRequest, TaskSource
from headrace.types import Score, Task
from headrace.valid_config import validate

PROMPTS = 4
REWARD_TIMEOUT_S = 5.0
"""A reward function that takes longer on a short answer is reported; the run's own limit may be higher."""
ANSWER_COLUMNS = ("answer", "ground_truth", "solution", "target", "label")
SHOWN_CHARACTERS = 400
EXTRAS = {"wandb": "wandb", "trackio": "trackio"}


@dataclass(slots=True)
class Findings:
    """problems: what will not work, each with its remedy; warnings: what works but may surprise."""

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def check(config: RunConfig, *, out: Callable[[str], None] = print) -> int:
    """0 when the run can start, 2 when something must be mended first. Trains nothing."""
    found = Findings(warnings=validate(config))
    config = resolve(config)
    out(
        f"{config.name}: {config.placement}, runtime {config.runtime}, buffer {config.buffer.depth}, channel {config.weights.channel}"
    )
    _section(out, "Batches")
    if config.env.id:
        _check_environment(config, out)
        if config.rollout.source == "redis":
            _check_actors_server(config, found, out)
    else:
        for line in batch_arithmetic(config):
            out(f"  {line}")
    _check_machine(config, found)
    _check_functions(config, found)
    if not config.env.id:
        _check_model(config, found, out)
    _section(out, "Verdict")
    for warning in found.warnings:
        out(f"  warning: {warning}")
    for problem in found.problems:
        print(f"headrace: {problem}", file=sys.stderr)
    out(f"  {count(len(found.problems), 'problem')} to mend before it can run" if found.problems else "  ready to run")
    return 2 if found.problems else 0


def _section(out: Callable[[str], None], title: str) -> None:
    out("")
    out(title)


def _check_environment(config: RunConfig, out: Callable[[str], None]) -> None:
    """The sizes of a batch, what an environment shows and takes, and the policy for it."""
    from headrace.policies.distributions import distribution_of
    from headrace.policies.networks import build_network
    from headrace.rollout.environments.gymnasium_vector import VectorEnvironment

    env, training = config.env, config.training
    rows = training.groups * env.count * env.steps
    updates = training.epochs * training.minibatches
    if config.algorithm.kind in ("dqn", "sac"):
        updates = int(config.replay.updates_per_step * rows)
    out(f"  {count(training.groups, 'trajectory')} of {env.count} x {env.steps} steps make a batch of {rows:,} steps")
    out(f"  {count(updates, 'update')} a batch, {training.steps * rows:,} steps in all")
    made = VectorEnvironment(env)
    made.close()
    _section(out, "Environment")
    for leaf in made.spaces.leaves:
        out(f"  shows {leaf.name}: {leaf.kind} {list(leaf.shape)} {leaf.dtype}")
    action = made.spaces.action
    choices = (
        f"of {', '.join(map(str, action.sizes))} choices" if action.sizes else f"between {action.low} and {action.high}"
    )
    out(f"  takes {action.kind} {list(action.shape)} {choices}; resets: {made.mode}")
    distribution = distribution_of(action, config.policy.squash)
    network = build_network(made.spaces, config.policy, distribution.size, config.seed)
    out(f"  policy and value: {sum(p.numel() for p in network.parameters()):,} weights")


def _check_actors_server(config: RunConfig, found: Findings, out: Callable[[str], None]) -> None:
    """Whether the server is there at which a run and its actors meet."""
    from headrace.nearest import answers

    if importlib.util.find_spec("redis") is None:
        found.problems.append(f"rollout.source: found 'redis', which needs redis: {how_to_install('redis')}")
    elif not answers(config.buffer.url):
        found.problems.append(
            "buffer.url: no Redis server answers there; start one (redis-server), or mend the address"
        )
    out(f"  acted in by any number of: headrace actor ADDRESS --run {config.name}, ADDRESS being buffer.url")


def _check_functions(config: RunConfig, found: Findings) -> None:
    """The user's own advantage and loss can be imported."""
    from headrace.training.advantages import advantage_function
    from headrace.training.losses import loss_function

    for function, of in ((advantage_function, config.training.advantage), (loss_function, config.training)):
        try:
            function(of)
        except UserError as error:
            found.problems.append(str(error))


def _check_machine(config: RunConfig, found: Findings) -> None:
    """Cores and optional packages."""
    wanted = config.training.threads + config.rollout.engine.count * config.rollout.engine.threads
    if config.placement == "separate" and wanted > cores():
        found.warnings.append(
            f"training.threads and rollout.engine.threads: {wanted} threads on {count(cores(), 'core')} get into each other's way"
        )
    for sink, package in EXTRAS.items():
        if sink in config.observability.sinks and importlib.util.find_spec(package) is None:
            found.problems.append(
                f"observability.sinks: found {sink!r}, whose package is not installed: {how_to_install(sink)}, or leave it out"
            )


def _check_model(config: RunConfig, found: Findings, out: Callable[[str], None]) -> None:
    """The model, what it needs, and the prompts and scores of the first tasks."""
    from headrace.models import load_tokenizer, resolve_model

    folder = resolve_model(config.model, seed=config.seed, progress=lambda line: print(line, file=sys.stderr))
    shape = model_shape(folder)
    tokenizer = load_tokenizer(folder)
    ends = end_tokens(folder, tokenizer, config.rollout.sampling.stop_token_ids)
    if not ends and not config.rollout.sampling.stop:
        found.warnings.append(
            "rollout.sampling.stop: the model names no end token and none is given, so every answer runs to rollout.sampling.max_tokens"
        )
    _section(out, "Prompts")
    words = ", ".join(f"{tokenizer.convert_ids_to_tokens(end)!r} ({end})" for end in ends) or "none"
    out(
        f"  end tokens: {words}"
        + (f"; stop strings: {list(config.rollout.sampling.stop)}" if config.rollout.sampling.stop else "")
    )
    served = config.rollout.source == "http"
    tasks = [] if served else _first_tasks(config, found)
    longest = _check_prompts(config, tokenizer, tasks, shape, found, out)
    if served:
        _check_serving(config, tokenizer, found, out)
    _section(out, "Memory, roughly")
    _check_memory(config, shape, longest, found, out)
    _section(out, "Rewards")
    if config.reward.functions and not served:
        asyncio.run(_check_rewards(config, tokenizer, tasks, found, out))
    else:
        out(f"  none: {'clients post' if served else 'rollout.function brings'} scores")


def _check_serving(config: RunConfig, tokenizer: Any, found: Findings, out: Callable[[str], None]) -> None:
    """Whether the server of `rollout.source = "http"` can open, and what it understands."""
    out("  from clients of the HTTP API")
    if not tokenizer.chat_template:
        found.warnings.append("model.path: the model has no chat template, so clients can use /v1/completions only")
    for package in ("starlette", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            found.problems.append(f"rollout.source: found 'http', which needs {package}: {how_to_install('serve')}")


def _check_memory(
    config: RunConfig, shape: ModelShape, prompt_tokens: int, found: Findings, out: Callable[[str], None]
) -> None:
    import psutil

    parts = memory_parts(config, shape, prompt_tokens)
    out(f"  {shape.parameters / 1e6:,.1f} million parameters, {shape.layers} layers, vocabulary {shape.vocabulary:,}")
    for part, size in parts.items():
        out(f"  {readable_bytes(size):>10}  {part}")
    total, memory = sum(parts.values()), psutil.virtual_memory()
    out(
        f"  {readable_bytes(total):>10}  together; {readable_bytes(memory.available)} of {readable_bytes(memory.total)} are free"
    )
    remedy = "lower training.micro_tokens, rollout.engine.kv_tokens or rollout.engine.count, or set training.gradient_checkpointing = true"
    if total > memory.total:
        found.problems.append(
            f"memory: the run needs about {readable_bytes(total)}, more than the machine's {readable_bytes(memory.total)}; {remedy}"
        )
    elif total > memory.available:
        found.warnings.append(
            f"memory: the run needs about {readable_bytes(total)}, of which only {readable_bytes(memory.available)} are free; {remedy}"
        )


def end_tokens(folder: Path, tokenizer: Any, added: Sequence[int]) -> list[int]:
    """The ids that end an answer: the tokenizer's, the model's own, and the config's."""
    from headrace.rollout.engines.models import named_end_ids

    found = [tokenizer.eos_token_id, *named_end_ids(folder)]
    return list(dict.fromkeys(end for end in (*found, *added) if end is not None))


def _first_tasks(config: RunConfig, found: Findings) -> list[Task]:
    """The first tasks of the run, and whether there are enough of them for a batch."""
    from headrace.rollout.tasks import open_source

    source = open_source(config.tasks, seed=config.seed, folder=Path.cwd())
    _check_supply(config, source, found)
    tasks = [task for _ in range(PROMPTS) if (task := source.next()) is not None]
    if not tasks:
        raise DataError(f"tasks.source: {config.tasks.source} gave no task")
    _check_evaluation(config, found)
    return tasks


def _check_supply(config: RunConfig, source: TaskSource, found: Findings) -> None:
    found.warnings += [f"tasks.source: {note}" for note in getattr(source, "notes", ())]
    if not config.tasks.epochs or not hasattr(source, "__len__"):
        return
    supply, steps = len(source) * config.tasks.epochs, config.training.steps  # type: ignore[arg-type]
    if supply < config.training.groups:
        found.problems.append(
            f"training.groups: found {config.training.groups}, but tasks.source gives {count(supply, 'task')} in "
            f"{count(config.tasks.epochs, 'epoch')}; use at most {supply}, or more tasks.epochs (0 repeats for ever)"
        )
    elif supply < steps * config.training.groups:
        found.warnings.append(
            f"tasks.epochs: {count(supply, 'task')} are enough for {supply // config.training.groups} of {steps} steps; the run ends there"
        )


def _check_evaluation(config: RunConfig, found: Findings) -> None:
    from headrace.rollout.tasks import heldout_source, open_source

    if not config.evaluation.source:
        return
    try:
        if config.evaluation.source == "heldout":
            heldout_source(config.tasks, folder=Path.cwd())
        else:
            tasks = msgspec.structs.replace(config.tasks, source=config.evaluation.source)
            open_source(tasks, seed=config.seed, folder=Path.cwd())
    except UserError as error:
        found.problems.append(f"evaluation.source: {error}")


def _check_prompts(
    config: RunConfig, tokenizer: Any, tasks: list[Task], shape: ModelShape, found: Findings, out: Callable[[str], None]
) -> int:
    """Show the prompts as the engine will see them, and whether an answer has room after them. Returns the longest's tokens."""
    from headrace.rollout.environments.single_turn import SingleTurn

    environment = SingleTurn(tokenizer, config.tasks)
    limit, budget, longest = context_length(config, shape), config.rollout.sampling.max_tokens, 0
    for task in tasks:
        length = environment.prompt_length(task)
        longest = max(longest, length)
        out(f"  {task.task_id}: {count(length, 'token')}")
        out("    " + _short(environment.prompt_text(task)))
    remedy = "shorten the prompts or raise rollout.engine.context_length"
    if limit and longest >= limit:
        found.problems.append(
            f"tasks.source: a prompt of {count(longest, 'token')} leaves no room in a context of {limit:,}; {remedy}"
        )
    elif limit and longest + budget > limit:
        found.warnings.append(
            f"rollout.sampling.max_tokens: {budget} after a prompt of {longest} pass the context of {limit:,}; answers are cut at {limit - longest}"
        )
    room = kv_tokens(config, shape)
    if longest + budget > room:
        found.problems.append(
            f"rollout.engine.kv_tokens: found {room}, but one prompt and its answer may take {longest + budget}; use at least that"
        )
    return longest


def _short(text: str) -> str:
    shown = json.dumps(text, ensure_ascii=False)
    return shown if len(shown) <= SHOWN_CHARACTERS else f"{shown[: SHOWN_CHARACTERS - 3]}..."


def plausible_answer(task: Task) -> str:
    """What a right answer may look like: the task's own where it names one."""
    for column in ANSWER_COLUMNS:
        value = task.payload.get(column)
        if isinstance(value, str | int | float):
            return f" {value}"
    return " 42"


async def _check_rewards(
    config: RunConfig, tokenizer: Any, tasks: list[Task], found: Findings, out: Callable[[str], None]
) -> None:
    """Score an empty and a plausible answer to each task, in a worker process as the run does."""
    from headrace.orchestrator.runtimes.processes import ProcessRuntime
    from headrace.reward.pool import build_rewarder

    limit_s = min(config.reward.timeout_s, REWARD_TIMEOUT_S)
    limits = msgspec.structs.replace(config.reward, timeout_s=limit_s, workers=1, on_error="exclude")
    runtime = ProcessRuntime(lambda event: None)
    rewarder = build_rewarder(limits, runtime, lambda event: None, Path.cwd())
    scores: list[Score] = []
    clock = asyncio.get_running_loop().time
    try:
        await rewarder.start()
        for task in tasks:
            answers = {"empty": "", "plausible": plausible_answer(task)}
            prompt = task.payload.get("prompt", "")
            began_s = clock()
            # Two answers to one task, so that a function that scores whole groups is given siblings.
            requests = [
                RewardRequest(
                    task=task,
                    prompt=prompt,
                    completion=text,
                    token_ids=tuple(tokenizer.encode(text, add_special_tokens=False)),
                )
                for text in answers.values()
            ]
            pair = await rewarder.score(requests)
            scores += pair
            for (kind, text), score in zip(answers.items(), pair, strict=True):
                parts = ", ".join(f"{name} {value}" for name, value in score.parts.items())
                out(f"  {task.task_id}, {kind} answer {text!r:.40}: reward {score.reward} ({score.error or parts})")
            if clock() - began_s >= limit_s:
                break
    finally:
        await rewarder.close()
        await runtime.close()
    _judge_rewards(scores, found)


def _judge_rewards(every: list[Score], found: Findings) -> None:
    """What the scores of empty and plausible answers say of the functions."""
    errors = [score.error for score in every if score.error]
    if len(errors) == len(every):
        found.problems.append(
            f"reward.functions: every answer failed to be scored: {errors[0]}; mend the function or its options"
        )
    elif errors:
        found.warnings.append(
            f"reward.functions: {len(errors)} of {len(every)} answers failed to be scored: {errors[0]}"
        )
    elif len({score.reward for score in every}) == 1:
        found.warnings.append(
            f"reward.functions: empty and plausible answers all score {every[0].reward}; if no answer scores differently, nothing is learned"
        )
