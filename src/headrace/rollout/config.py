"""What the rollout plane is told: where tasks or environments come from, who samples, and how groups close."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta

from headrace.configbase import Config, NonNegative, Positive

if TYPE_CHECKING:
    from headrace.types import SamplingParams

Seconds = Annotated[float, Meta(gt=0)]


class TasksConfig(Config):
    """[tasks]: where prompts come from."""

    source: str = ""
    """`sums`, `largest` (built in), `jsonl:PATH`, `hf:FOLDER`, `reasoning_gym:TASK`, `pkg.module:object`, or
    `clients` (with rollout.source = http): the clients know what to do."""
    prompt_column: str = "prompt"
    """Column that holds the prompt: a string, or a list of chat messages."""
    system: str = ""
    """System message put before string prompts that are rendered as chat."""
    chat: Literal["auto", "always", "never"] = "auto"
    """Whether a string prompt goes through the chat template. auto: only lists of messages do."""
    prefill: str = ""
    """Text put after the prompt as the start of the answer; not trained on."""
    shuffle: bool = True
    """A new order in each pass, decided by the seed."""
    epochs: NonNegative = 0
    """Passes over a finite source; 0 repeats for ever."""
    limit: NonNegative = 0
    """Use only the first so many tasks; 0 takes all."""
    options: dict[str, str | int | float | bool] = {}
    """Handed to the source (for example the arguments of a reasoning_gym task)."""


COLDEST = 1e-3
"""Lowest temperature above 0: what logits are divided by must leave them finite, in the engine and in the trainer."""


class SamplingConfig(Config):
    """[rollout.sampling]: how tokens are drawn."""

    max_tokens: Positive = 64
    """Most tokens of one answer, over all its interruptions."""
    temperature: Annotated[float, Meta(ge=0, le=1000)] = 1.0
    """0 is greedy; a run that trains needs more, at least 0.001."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Keep the likeliest tokens that together have this probability."""
    top_k: NonNegative = 0
    """Keep so many of the likeliest tokens; 0 keeps all."""
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Keep tokens at least so likely as this share of the likeliest."""
    stop_token_ids: tuple[int, ...] = ()
    """Added to the model's own end tokens."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer wherever they appear in it."""
    min_tokens: NonNegative = 0
    """No end token before so many tokens."""
    repetition_penalty: Annotated[float, Meta(gt=0, le=1000)] = 1.0
    """Makes tokens of the prompt and the answer so far less likely (above 1), or more; the trainer computes with it."""
    logit_bias: dict[str, float] = {}
    """Added to the logits of token ids (the keys); the trainer computes with it."""
    allowed_token_ids: tuple[int, ...] = ()
    """The only ids that may come, end tokens included; empty allows all."""
    record_sampling_mask: bool = False
    """Keep which tokens each one was drawn from, so that the trainer computes probabilities over the same set."""
    record_expert_routing: bool = False
    """Keep which experts made each token (mixture-of-experts models), so that the trainer computes with the same ones."""


class EngineConfig(Config):
    """[rollout.engine]: who samples."""

    kind: Literal["native", "hf", "scripted"] = "native"
    """native: the embedded engine; hf: a plain reference; scripted: no model, for tests."""
    count: Positive = 1
    """Engine processes."""
    routing: Literal["group", "load", "prefix"] = "group"
    """Which engine serves a request. group: siblings together, else the one with the fewest outstanding; load: that one
    always; prefix: the one that was sent the longest beginning of the prompt, unless it has far more to do than another."""
    threads: Positive = 1
    """Of each engine process."""
    weights: Literal["model", "bfloat16", "int8"] = "model"
    """In which form linear layers compute: as published (packed), or rounded at each sync. Both read fewer bytes,
    which gains most with few sequences at a time, and change the policy a little: watch `mismatch/*`, and let
    `training.correction` weigh for it. Models with experts have "model" only."""
    max_running: Positive = 64
    """Sequences decoded side by side."""
    kv_tokens: NonNegative = 0
    """Bound of the key-value cache in tokens; 0: max_running full-length sequences, at most 32,768 tokens."""
    block_size: Annotated[int, Meta(ge=1, le=1024)] = 16
    """Tokens in one block of the cache."""
    prefill_tokens: Positive = 512
    """Most prompt tokens in one pass, so that a long prompt does not hold up those who decode."""
    preemption: Literal["recompute", "save"] = "recompute"
    """What becomes of keys and values that have to make room: computed again later, or saved outside the cache."""
    kv_saved_mb: NonNegative = 1024
    """Most megabytes of saved keys and values of one engine; the oldest go first and are then computed again."""
    kv_folder: str = ""
    """Folder to save them in, where another engine may take them up; empty: in the engine's own memory."""
    context_length: NonNegative = 0
    """Longest prompt plus completion; 0: the model's own limit."""
    max_adapters: Annotated[int, Meta(ge=2)] = 4
    """Versions of an adapter in one pass (weights.kv_on_swap = finish); beyond, what runs on the oldest goes on under the newest."""
    deterministic: bool = False
    """Pad to fixed shapes, so that a generation is bit-equal alone or in a crowd."""


class GroupConfig(Config):
    """[group]: siblings of one task."""

    size: Positive = 8
    """Answers to one task, compared with each other."""
    min_complete: NonNegative = 0
    """A group below it is dropped whole; 0 means all."""
    timeout_s: Seconds = 600.0
    """From the first dispatch; stands while a weight sync closes the gate."""
    retries: NonNegative = 2
    """Further attempts per member after a failure."""


class RolloutConfig(Config):
    """[rollout]: tasks into scored groups."""

    source: Literal["engine", "http", "redis"] = "engine"
    """Who produces units. engine: parts of this run; http: clients of the API that [clients] describes, which talk to the
    model and post scores; redis: actors that `headrace actor ADDRESS` starts anywhere (with env.id), by the server at buffer.url."""
    function: str = ""
    """`pkg.module:fn`, an async function (Task, RolloutTools) -> Group, in place of generation."""
    max_in_flight: NonNegative = 0
    """Most groups running at once; 0: as many as a batch (and what the buffer allows)."""
    oversample: NonNegative = 0
    """Groups started beyond what a step needs."""
    order: Literal["source", "length_bucket"] = "source"
    """length_bucket: tasks whose answers are likely to be about as long come together, so that no batch waits for one."""
    generate_timeout_s: Seconds = 120.0
    """An engine call fails when no token arrived for so long."""
    sampling: SamplingConfig = SamplingConfig()
    engine: EngineConfig = EngineConfig()


class ClientsConfig(Config):
    """[clients]: the HTTP API of rollout.source = http. Its address and token are written to runs/NAME/clients.json."""

    host: str = "127.0.0.1"
    """Where it listens. Whoever reaches it needs the token; it speaks no TLS."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """0 takes a free one."""
    idle_s: Seconds = 300.0
    """A session of which nothing is heard for so long ends, and its place is free again (group.retries times)."""
    max_body_mb: Annotated[float, Meta(gt=0)] = 8.0
    """Largest request body."""


class EnvConfig(Config):
    """[env]: what a control policy acts in. A config with an `id` is control RL: units are trajectories, and [tasks], [reward],
    [group] and [model] are not read (but for group.retries); of [training] count steps, groups, epochs, minibatches, threads
    and [training.optimizer]."""

    id: str = ""
    """A Gymnasium id, `sim:ID` (simulated many at once, see `env.device`), `envpool:ID`, or `pkg.module:make_env` (or `file.py:make_env`): a function of `options` that returns an
    environment, or a vector environment when it takes `num_envs`."""
    count: Positive = 8
    """Environments side by side in one actor."""
    device: str = "cpu"
    """Where `sim:ID` runs. With runtime = local, policy and learner run there too, and steps stay there as tensors."""
    steps: Positive = 32
    """Steps of one trajectory."""
    workers: NonNegative = 0
    """Processes that only step, for one policy worker (rollout.engine.count of those) that acts for all of them; 0: an actor
    steps its environments itself."""
    splits: Positive = 2
    """With workers: sets of `count` environments in each; one is stepped while another waits for actions."""
    mode: Literal["auto", "sync", "async", "vector_entry_point"] = "auto"
    """How single environments become a vector. sync: one after the other in this process; async: a process each;
    vector_entry_point: the environment's own vector class; auto: that class where there is one, else sync."""
    autoreset: Literal["auto", "next_step", "same_step", "disabled"] = "auto"
    """When an ended episode is reset; all give the same transitions. auto: same_step where it can be chosen, else the environment's own."""
    options: dict[str, str | int | float | bool] = {}
    """Handed to the environment."""
    max_episode_steps: NonNegative = 0
    """Time limit in place of the environment's own, in steps as the policy sees them; 0 keeps that. Not for a factory of vectors."""
    frame_skip: Positive = 1
    """Repeat each action so often and add the rewards up. For single environments, and ALE's vector class."""
    frame_stack: Positive = 1
    """Show the last so many observations together. 1: as the environment does."""
    image_size: tuple[Positive, ...] = ()
    """[height, width] that images are brought to, by the mean over each pixel's area; empty: as they come."""
    greyscale: bool = False
    """Show images of three colours as one of grey."""
    reward_clip: Annotated[float, Meta(ge=0)] = 0.0
    """Train on rewards clipped to this size; episode returns are not clipped. 0: do not."""
    target_return: float | None = None
    """End the run once the mean return of the last 100 episodes has reached it."""
    step_timeout_s: Seconds = 60.0
    """Longest step with workers or mode = async; elsewhere rollout.generate_timeout_s holds."""


def sampling_problem(sampling: SamplingParams, vocab_size: int, stop_ids: tuple[int, ...]) -> str:
    """What no engine can sample by, in a line; "" when there is nothing. Comparisons are such that NaN is always wrong."""
    s = sampling
    numbers = (
        ("max_tokens", s.max_tokens >= 1, "at least 1"),
        ("min_tokens", s.min_tokens >= 0, "at least 0"),
        ("temperature", s.temperature == 0 or COLDEST <= s.temperature < math.inf, f"0 or at least {COLDEST:g}"),
        ("top_p", 0 < s.top_p <= 1, "above 0 and at most 1"),
        ("top_k", s.top_k >= 0, "at least 0"),
        ("min_p", 0 <= s.min_p <= 1, "between 0 and 1"),
        ("repetition_penalty", 0 < s.repetition_penalty < math.inf, "above 0 and finite"),
    )
    for key, right, expected in numbers:
        if not right:
            return f"{key} must be {expected}, found {getattr(s, key)}"
    if any(not stop for stop in s.stop):
        return "stop has an empty string, which stands before every token"
    for token, bias in s.logit_bias:
        if not math.isfinite(bias):
            return f"logit_bias of token {token} must be finite, found {bias}; allowed_token_ids rules tokens out"
    named = (*s.stop_token_ids, *s.allowed_token_ids, *(token for token, _ in s.logit_bias))
    if named and not (min(named) >= 0 and max(named) < vocab_size):
        wrong = next(token for token in named if not 0 <= token < vocab_size)
        return f"sampling names token {wrong}, ids must lie in [0, {vocab_size})"
    limited = s.allowed_token_ids or len(stop_ids) >= vocab_size
    if s.min_tokens and limited and not set(s.allowed_token_ids or range(vocab_size)) - set(stop_ids):
        return "what may come is end tokens only, and min_tokens rules them out"
    return ""
