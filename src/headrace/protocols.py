"""The interfaces between the planes. Each has one contract suite in `tests/contracts`, run over every implementation.

A part may live in this process or in another: a `Runtime` builds it from a factory and gives back a proxy with the
same methods, all of them awaitable. Every factory takes a `WorkerContext` first.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from headrace.types import (
    NO_VERSION,
    Array,
    EngineStats,
    Event,
    GenerateRequest,
    Generation,
    Group,
    Metrics,
    RequestKey,
    Score,
    Task,
    TokenBatch,
    Trajectory,
    Unit,
    WeightTicket,
    travels,
)

if TYPE_CHECKING:
    import torch

    from headrace.errors import HeadraceError

# ------------------------------------------------------------------------------------------------------- runtimes

EventSink = Callable[[Event], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What a part may use. `threads` is its own share of the cores (0: leave the library's default)."""

    threads: int = 1
    gpus: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """Handed to every factory: who the part is, and where its events go."""

    name: str
    record: EventSink
    resources: Resources = field(default_factory=Resources)


class Proxy(Protocol):
    """A part built by a runtime. Any public method of the part can be awaited on it.

    Raises `WorkerDied` from every pending and later call once the part's process is gone.
    """

    name: str

    @property
    def alive(self) -> bool: ...

    @property
    def pid(self) -> int | None: ...

    async def kill(self) -> None:
        """Stop the part at once, without asking it (SIGKILL for a process)."""

    async def close(self) -> None:
        """Ask the part to close, wait a little, then kill it. Idempotent."""

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]: ...


class Runtime(Protocol):
    """Where parts live."""

    async def spawn(
        self,
        name: str,
        factory: Callable[..., Any],
        *args: Any,
        resources: Resources = ...,
    ) -> Proxy:
        """Build ``factory(context, *args)`` and return its proxy once it is ready.

        `factory` is a module-level function (it travels by name). An exception in it is raised here.
        """
        ...

    async def close(self) -> None:
        """Close every part, last spawned first."""
        ...


# -------------------------------------------------------------------------------------------------- weight channels


class WeightChannel(Protocol):
    """Moves one version's tensors from a trainer to any number of receivers. Both ends hold an object of this class;
    across processes it is sent to the worker when the worker is built, and opens its own end there.

    Raises `StaleTicket` from `publish` for a version not above the last one.
    """

    def publish(
        self,
        tensors: Iterable[tuple[str, torch.Tensor]],
        version: int,
        policy: str = "main",
        scope: Literal["full", "adapter", "changed"] = "full",
    ) -> WeightTicket:
        """Copy the tensors out, so that the trainer may go on changing its own. `scope` says what they are: all of the
        policy, its adapter alone, or (between the two ends of `ChangedValues`) what changed."""
        ...

    def latest(self) -> WeightTicket | None:
        """The last ticket that this end knows of."""
        ...

    def read(self, ticket: WeightTicket) -> Mapping[str, torch.Tensor]:
        """The version's tensors by name, as views where the medium can: valid until `release`. The checksum is checked."""
        ...

    def release(self, ticket: WeightTicket) -> None:
        """This receiver needs the bytes no longer. A publisher never waits for ever for a receiver that does not say so."""
        ...

    def close(self) -> None: ...


RunningPolicy = Literal["go_on", "freeze", "abort"]
PauseMode = Literal["abort", "wait", "keep"]


@runtime_checkable
class WeightReceiver(Protocol):
    """Anything that runs weights made by a trainer. `prepare` and `commit` are idempotent."""

    async def prepare(self, ticket: WeightTicket) -> None:
        """Bring the bytes beside the live weights, while generation goes on. A newer ticket replaces a staged one."""
        ...

    async def commit(self, ticket: WeightTicket, running: RunningPolicy = "go_on") -> None:
        """Swap between two forward passes and return once the next pass would use the new weights.

        go_on: running generations continue at once; freeze: the same, their keys and values kept whatever the engine's
        own rule is; abort: they are handed back as they are, with finish_reason "abort".
        Raises `StaleTicket` for a version below the live one.
        """
        ...

    async def pause(self, mode: PauseMode) -> None:
        """abort: hand back what runs; wait: return when it has finished; keep: freeze it. New requests wait."""
        ...

    async def resume(self) -> None: ...

    async def sleep(self, level: int) -> None:
        """1: give up keys and values; 2: weights too."""
        ...

    async def wake(self) -> None: ...

    async def stats(self) -> EngineStats: ...


@runtime_checkable
class TextEngine(WeightReceiver, Protocol):
    """Samples tokens."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """One sample. Raises `RequestRefused` for a prompt that can never fit."""
        ...

    async def submit(self, requests: Sequence[GenerateRequest]) -> None:
        """Take requests whose ends `ended` tells of. What `generate` would raise for one of them is its end."""
        ...

    async def ended(self) -> list[tuple[str, Generation | HeadraceError]]:
        """Ids of submitted requests that have ended since the last call, and how; waits for the first. One caller at a time."""
        ...

    def stream(self, request: GenerateRequest) -> AsyncIterator[Generation]:
        """As `generate`, yielding what was sampled since the last item; the last item carries the finish reason."""
        ...

    async def abort(self, request_id: str, keep_kv: bool = False) -> Generation | None:
        """Stop a request. Its `generate` returns the partial generation (finish_reason "abort"), which is returned here
        too; None for an id that is not known."""
        ...

    async def close(self) -> None: ...


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class Actions:
    """actions: [B, ...] as sampled; logprobs: [B] of them; version: of the weights that chose them."""

    actions: Array
    logprobs: Array
    version: int


@runtime_checkable
class ActionEngine(WeightReceiver, Protocol):
    """Chooses actions."""

    async def act(self, observations: dict[str, Array]) -> Actions:
        """One action for each of B observations (leaves [B, ...]), by one version of the weights."""
        ...


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodesWanted:
    """count whole episodes, in environments made for them from `seed`; greedy: by the likeliest actions, else by drawn ones."""

    count: int
    greedy: bool
    seed: int


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryRequest:
    """One trajectory wanted from an actor, which is asked as a text engine is: `generate`, `abort`, `stats`. With `episodes`
    the answer is `Episodes` in its place, and the environments that trajectories come from stay as they are."""

    key: RequestKey
    episodes: EpisodesWanted | None = None

    @property
    def request_id(self) -> str:
        return str(self.key)

    @property
    def group_id(self) -> str:
        return self.key.lease_id


# ----------------------------------------------------------------------------------------------------- environments


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What an environment shows a language policy.

    prompt_ids: [P] tokens to append to the conversation (the whole prompt at `reset`), none of them trained on
    done: no further generation is wanted
    reward: the environment's own reward for the step, if it has one
    """

    prompt_ids: Sequence[int] = ()
    done: bool = False
    reward: float | None = None


class Environment(Protocol):
    """What a language policy talks to, once per episode. Control environments use Gymnasium's own `VectorEnv`."""

    async def reset(self, task: Task) -> Turn: ...

    async def step(self, generation: Generation) -> Turn: ...

    async def close(self) -> None: ...


# ---------------------------------------------------------------------------------------------------------- rewards

RewardUnit = Literal["sample", "group", "step"]


@travels
@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRequest:
    """One episode to score, in the form that reward functions read."""

    task: Task
    prompt: str | list[dict[str, Any]]
    completion: str
    token_ids: tuple[int, ...] = ()
    finish_reason: str = "stop"


class Rewarder(Protocol):
    """Scores episodes. It is called at the earliest moment its unit is there: one request, or a whole group's."""

    unit: RewardUnit

    async def score(self, requests: Sequence[RewardRequest]) -> list[Score]:
        """One score for each request, in order. A failure of the user's function gives ``Score(reward=None, error=...)``;
        it never raises for that."""
        ...

    async def close(self) -> None: ...


# --------------------------------------------------------------------------------------------------------- exchange

LeaseState = Literal["admitted", "ready", "taken", "trained", "settled"]


@dataclass(slots=True, eq=False)
class Lease:
    """The right to produce one unit, held from admission until the weights trained on it are live.

    `index` grows by one with each lease of a run and decides its sampling seeds; `lease_id` holds the incarnation too.
    """

    lease_id: str
    index: int
    task: Task
    remainder: Any = None
    oldest_version: int = NO_VERSION
    """Of its unit, once that is put."""
    state: LeaseState = "admitted"
    outcome: str | None = None


class Store(Protocol):
    """Moves bytes of units and nothing else. Keys are lease ids.

    A bounded store reserves the largest unit at `reserve`, so that `append` never waits. A durable store keeps the bytes
    of an acknowledged unit until `forget`: a run that is restored from an earlier checkpoint trains on it again.
    """

    def reserve(self, key: str) -> bool:
        """Room for one more unit? False when the store's own bound is reached."""
        ...

    def append(self, key: str, unit: Unit) -> None:
        """Store the unit, in place of an earlier one of this key."""
        ...

    def read(self, key: str) -> Unit:
        """Raises `KeyError` for a key that is not stored, and `UnitLost` for one whose bytes the medium has lost."""
        ...

    def acknowledge(self, key: str) -> None:
        """The unit, or the room promised for it, is no longer needed. Unknown keys are ignored."""
        ...

    def acknowledged(self) -> list[str]:
        """Keys whose bytes are still kept for a restore."""
        ...

    def forget(self, keys: Sequence[str]) -> None:
        """A checkpoint that knows the end of these acknowledged units has been committed: drop their bytes."""
        ...

    def scan(self) -> list[str]:
        """Keys of stored units that are not acknowledged, oldest first."""
        ...

    def bytes(self) -> int: ...

    def close(self) -> None: ...


class Buffer(Protocol):
    """Leases out, batches of their units in between, and places free again. Only `admit` and `take` wait."""

    async def admit(self) -> Lease:
        """Wait for room, *then* pick a task. Raises `BufferClosed` when there is nothing more to admit."""
        ...

    def put(self, lease: Lease, unit: Unit) -> bool:
        """False when the lease is not running any more (settled in the meantime)."""
        ...

    async def take(self, n: int, version: int, at_least: int | None = None) -> list[tuple[Lease, Unit]]:
        """Wait for n units fresh enough for `version`; by lease index. Fewer, or none, only when nothing more comes.

        With `at_least` so many are enough, and up to n are given."""
        ...

    def settle(self, lease: Lease, outcome: str, remainder: Any = None) -> bool:
        """End a lease. The first settle wins; False for every later one. "recycled" puts its task back in front."""
        ...

    def close(self) -> None:
        """The source has ended, or the run is stopping."""
        ...


class TaskSource(Protocol):
    """Where tasks come from. It learns what became of those it gave."""

    def next(self) -> Task | None:
        """The next task, or None at the end."""
        ...

    def give_back(self, task: Task, reason: str) -> None:
        """The task was not trained on (unfinished or dropped, by reason)."""
        ...

    def state(self) -> dict[str, Any]:
        """The data position, JSON-able."""
        ...

    def restore(self, state: dict[str, Any]) -> None: ...


# --------------------------------------------------------------------------------------------------------- training

Annotation = Literal["reference", "proximal", "values"]


class TrainBackend(Protocol):
    """Holds a policy and changes it. Batches are numpy; log-probabilities come back as numpy [M]."""

    async def annotate(self, batch: TokenBatch, what: Sequence[Annotation]) -> TokenBatch:
        """The batch with the asked fields filled, without gradient."""
        ...

    async def forward_backward(self, batch: TokenBatch) -> Metrics:
        """Add this micro-batch's gradient. The loss is named by the config that the backend was built with."""
        ...

    async def optimizer_step(self, gradient_scale: float = 1.0) -> Metrics:
        """Scale, clip, step, advance the schedule, clear gradients. A non-finite gradient skips the step and counts it.

        A batch whose size was not known when its first micro-batch came is divided by it here.
        """
        ...

    async def publish(self, version: int) -> WeightTicket:
        """Send the current weights through this backend's channel as `version`."""
        ...

    async def republish(self) -> WeightTicket:
        """The last published version again, at full scope (`weights.scope = changed`)."""
        ...

    async def offload(self) -> None:
        """Leave the device to the engines (`placement = "colocated"`): gradients are freed, the optimiser's state moved
        away, the weights stay. Idempotent, as is `onload`."""
        ...

    async def onload(self) -> None:
        """Be ready to train again."""
        ...

    async def save(self, folder: str) -> None:
        """Weights as a plain Hugging Face folder, and optimiser, schedule and random state beside them."""
        ...

    async def load(self, folder: str) -> None: ...

    async def fingerprint(self) -> str:
        """Hash of all weights: equal exactly when the weights are."""
        ...

    async def close(self) -> None: ...


# --------------------------------------------------------------------------------------------------- function types

RolloutFn = Callable[[Task, "RolloutTools"], Awaitable[Group | Trajectory]]
"""A user's own rollout (`rollout.function`). Groups that come back without scores are scored by the reward plane."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutTools:
    """What a rollout function works with for one lease."""

    lease: Lease
    engine: TextEngine
    rewarder: Rewarder | None
    tokenizer: Any
    group_size: int
    sampling: Any
