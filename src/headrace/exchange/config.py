"""What the exchange is told: how deep and where samples wait, how old they may be, how weights travel back."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from headrace.configbase import Config, NonNegative, Positive
from headrace.errors import ConfigError

Seconds = Annotated[float, Meta(gt=0)]


class BufferConfig(Config):
    """[buffer]: how far rollout may run ahead of training."""

    depth: Literal["auto", "none", "double", "queue", "stream"] = "auto"
    """none: alternate; double: one batch ahead; queue: `steps` batches; stream: no bound on steps.
    auto: none under sync and colocated, double under separate."""
    steps: Positive = 2
    """Batches ahead, for depth = queue."""
    store: Literal["memory", "shared_memory", "redis", "files"] = "memory"
    """Where units wait between rollout and training: memory; shared_memory (slots); files, redis: they outlive a crash."""
    url: str = "redis://127.0.0.1:6379/0"
    """Of the server, for store = redis and for rollout.source = redis."""
    max_bytes: NonNegative = 0
    """Bound of the store; 0: none."""


class ReplayConfig(Config):
    """[replay]: what dqn and sac learn from. Each batch of trajectories is kept, and paid for by draws from all that are."""

    capacity: Positive = 100_000
    """Steps kept, of all environments together; the oldest trajectories make room."""
    learning_starts: NonNegative = 1000
    """No update before so many steps are there."""
    draw: Positive = 128
    """Transitions of one update."""
    updates_per_step: Annotated[float, Meta(gt=0)] = 0.5
    """Updates for each environment step."""
    n_steps: Positive = 1
    """Longest span of a transition; shorter before an end of an episode or of a trajectory."""
    priority: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Exponent of the error that a step is drawn by; 0 draws uniformly."""
    importance: Annotated[float, Meta(ge=0, le=1)] = 0.4
    """Exponent of the weights that make up for that, at the start; it rises to 1 over the run."""
    save: bool = True
    """Checkpoints hold what is kept (a file a trajectory); without it a resumed run begins with an empty replay."""


class StalenessConfig(Config):
    """[staleness]: three independent switches; the third, `correction`, is in [training.correction]."""

    max_version_lag: NonNegative | None = None
    """Oldest sampled token allowed at `take`, in trained batches behind the trainer."""
    max_steps_ahead: NonNegative | None = None
    """Bound on admission, in batches; the tightest of this and the buffer's depth holds."""
    on_stale: Literal["drop", "recycle"] = "drop"
    """drop: counted and gone; recycle: the task goes back to the front of the pool."""
    cancel_group: bool = False
    """Cancel running groups that are too stale already to be trained."""


class WeightsConfig(Config):
    """[weights]: how new weights reach the engines and what becomes of what they are generating."""

    channel: Literal["auto", "in_process", "shared_memory", "collective", "ipc", "filesystem", "http", "mesh"] = "auto"
    """auto: in_process with the local runtime, shared_memory with processes, http with rollout.source = redis. ipc: memory that torch shares; filesystem: a
    safetensors file a version, in the run's folder; http, collective (gloo): also between machines."""
    scope: Literal["full", "changed"] = "full"
    """full: all weights, each time; changed: positions and values of what changed, to the bit."""
    full_every: Positive = 20
    """With scope = changed, send every so-many-th version whole."""
    address: str = "127.0.0.1:0"
    """HOST:PORT at which the trainer offers weights, for channel = http and collective. Port 0: any free one."""
    bucket_mb: Annotated[float, Meta(gt=0)] = 64.0
    """What one call moves, for channel = collective."""
    every_steps: Positive = 1
    """Publish after so many trained batches."""
    interruption: Literal["never", "hold", "abort", "drain", "barrier"] = "never"
    """What happens to running generations: never: swap between two forward passes; hold: frozen, swapped, thawed; abort: cut off;
    drain: finish, start no new ones; barrier: the same, scoring included."""
    partial: Literal["continue", "resume_prefix", "restore", "recycle", "restart", "none"] = "continue"
    """What becomes of one that was interrupted: continue (never, hold); resume_prefix, restore (with its keys and values),
    recycle (back to the pool with its prefix), restart, none (abort); none (drain, barrier)."""
    kv_on_swap: Literal["keep", "recompute", "finish"] = "keep"
    """Whether a generation that runs on keeps the keys and values that older weights made. finish: it keeps them and the
    adapter that made them to its end (training.lora.kind = adapter)."""
    prepare_timeout_s: Seconds = 60.0
    """An engine that has not staged new weights by then is fenced."""
    commit_timeout_s: Seconds = 30.0
    """An engine that has not swapped by then is fenced."""
    drain_timeout_s: Seconds = 120.0
    """What is still running by then is aborted."""
    rejoin_timeout_s: Seconds = 60.0
    """With no engine left, wait so long for a replacement."""


def steps_ahead(buffer: BufferConfig, staleness: StalenessConfig) -> int | None:
    """How many batches rollout may run ahead of training: the tightest of the depth and `max_steps_ahead`; None: no bound."""
    depths = {"none": 0, "double": 1, "queue": buffer.steps, "stream": None}
    bounds = [bound for bound in (depths[buffer.depth], staleness.max_steps_ahead) if bound is not None]
    return min(bounds, default=None)


def split_address(address: str) -> tuple[str, int]:
    """HOST and PORT of `weights.address`."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError("weights.address", f'found "{address}", expected HOST:PORT, as 127.0.0.1:0')
    return host, int(port)
