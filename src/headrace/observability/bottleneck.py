"""Turns who worked and who waited into the one part that holds a run back, a sentence with numbers, and what to change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.observability.activity import (
    Interval,
    busy_intervals,
    clip,
    flow_window,
    intersect,
    matches,
    merge,
    part_of,
    subtract,
    total_ns,
    wait_intervals,
    working_sources,
)
from headrace.types import Event

Part = Literal["engine", "reward", "trainer", "weight sync", "admission", "unknown"]

SLACK = 0.12
"""A trainer that waits less than this share of the time is itself what the run waits for."""
OVERLAPPED = 0.15
"""With less of the trainer's work under running engines than this, the two alternate."""
SATURATED = 0.85
"""A part busy for this share has nothing left to give."""
SPREAD = 0.9
"""What each of a part's threads is still worth when it gets all cores in place of its own: what does not divide costs more."""
WORTHWHILE = 0.95
"""Taking turns is advised from here: it must save a twentieth of the time at least."""

TRAINING_KINDS = ("annotate", "forward_backward", "optimizer_step", "save")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Shares of one window of the flow, all 0..1.

    held: what the trainer's time went to: "trainer" (its own work), "engine", "reward", "weight sync" and "admission" (it
        waited, and that part was why). Together at most 1.
    busy: engine (mean over engines), reward (any scoring in progress), trainer
    idle_engine_for_room: no engine works while admission waits for room
    overlap: of the trainer's work, the share during which an engine works too
    occupied: busy shares of everything that an engine or a trainer does, weights included, by source
    """

    window_s: float
    busy: dict[str, float]
    waits: dict[str, float]
    held: dict[str, float]
    overlap: float
    idle_engine_for_room: float
    engines: dict[str, float] = field(default_factory=dict)
    occupied: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`part` holds the run back; `sentence` says so with numbers and what to change; `notes` say what else is odd."""

    part: Part
    sentence: str
    change: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    shares: Shares | None = None


# ---------------------------------------------------------------------------------------------------------- measure


def measure(events: Sequence[Event], window: Interval | None = None) -> Shares:
    """Attribute every moment at which the trainer does not train to the part that it waits for.

    While the trainer has no batch: an engine works -> engine; only scoring is going on -> reward; both -> the one that is
    busier over the window (the other one keeps up); neither, and a sync holds the gate -> weight sync; neither -> admission.
    Publishing and waiting for the last sync belong to the weight sync.
    """
    window = flow_window(events) if window is None else window
    length = max(1, window[1] - window[0])

    def share(intervals: Sequence[Interval]) -> float:
        return total_ns(clip(intervals, window)) / length

    training = busy_intervals(events, "trainer", TRAINING_KINDS)
    publishing = busy_intervals(events, "trainer", ("publish",))
    generating = busy_intervals(events, "engine", ("generate",))
    scoring = busy_intervals(events, "reward")
    waits = {kind: wait_intervals(events, kind) for kind in ("wait_batch", "wait_room", "wait_sync", "gate")}
    engines = {
        source: share(busy_intervals(events, source, ("generate",)))
        for source in working_sources(events)
        if matches(source, "engine")
    }
    busy = {
        "engine": sum(engines.values()) / len(engines) if engines else 0.0,
        "reward": share(scoring),
        "trainer": share(merge(training + publishing)),
    }

    syncing = subtract(merge(waits["wait_sync"] + publishing), training)
    starving = subtract(clip(waits["wait_batch"], window), merge(training + syncing))
    with_engine, with_reward = intersect(starving, generating), intersect(starving, scoring)
    both = total_ns(intersect(with_engine, with_reward)) / length
    only_engine = total_ns(with_engine) / length - both
    only_reward = total_ns(with_reward) / length - both
    neither = subtract(subtract(starving, generating), scoring)
    at_gate = total_ns(intersect(neither, waits["gate"])) / length
    scoring_is_busier = busy["reward"] > max(engines.values(), default=0.0) + 0.05
    held = {
        "trainer": share(training),
        "engine": only_engine + (0.0 if scoring_is_busier else both),
        "reward": only_reward + (both if scoring_is_busier else 0.0),
        "weight sync": share(syncing) + at_gate,
        "admission": total_ns(neither) / length - at_gate,
    }
    training_ns = total_ns(clip(training, window))
    return Shares(
        window_s=(window[1] - window[0]) / 1e9,
        busy=busy,
        waits={kind: share(intervals) for kind, intervals in waits.items()},
        held=held,
        overlap=total_ns(clip(intersect(generating, training), window)) / training_ns if training_ns else 0.0,
        idle_engine_for_room=share(subtract(waits["wait_room"], generating)),
        engines=engines,
        occupied={
            source: share(busy_intervals(events, source))
            for source in working_sources(events)
            if part_of(source) in ("engine", "trainer")
        },
    )


# ----------------------------------------------------------------------------------------------------------- decide


def decide(shares: Shares) -> Part:
    """The part that holds the run back.

    Parts that overlap: the one that never waits. The trainer, when it hardly waits or is the busiest by far; else the
    part that it waits for most. Parts that alternate: the one that takes the largest share of the cycle.
    """
    if shares.window_s <= 0 or not any(share > 0 for share in shares.held.values()):
        return "unknown"
    waiting = {part: share for part, share in shares.held.items() if part != "trainer"}
    worst = max(waiting, key=lambda part: waiting[part])
    if shares.overlap < OVERLAPPED:
        return worst if waiting[worst] > shares.held["trainer"] else "trainer"  # type: ignore[return-value]
    trains = shares.held["trainer"]
    if sum(waiting.values()) < SLACK or (trains >= SATURATED - 0.05 and trains >= shares.busy["engine"]):
        return "trainer"
    return worst  # type: ignore[return-value]


def percent(share: float) -> str:
    return f"{100 * min(1.0, max(0.0, share)):.0f}%"


def find_bottleneck(
    events: Sequence[Event],
    config: Mapping[str, Any] | None = None,
    dropped_share: float = 0.0,
    window: Interval | None = None,
    cores: int | None = None,
) -> Verdict:
    """The verdict over a run's events. `config` (the resolved run config as a dict) makes the advice fit what was set, and
    `cores` (of the machine that all parts ran on) what the machine has."""
    shares = measure(events, window)
    part = decide(shares)
    setting = Setting(config or {})
    match part:
        case "engine":
            sentence, change = _engine(shares, setting)
        case "reward":
            sentence, change = _reward(shares)
        case "trainer":
            sentence, change = _trainer(shares, setting)
        case "weight sync":
            sentence, change = _sync(shares, setting)
        case "admission":
            sentence, change = _admission(shares, setting)
        case _:
            return Verdict(
                part="unknown", sentence="Nothing was trained yet: no bottleneck can be named.", shares=shares
            )
    notes = _notes(shares, setting, dropped_share, cores)
    return Verdict(part=part, sentence=sentence, change=change, notes=notes, shares=shares)


class Setting:
    """Reads "a.b.c" from a nested dict; None where it is absent."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def __call__(self, path: str) -> Any:
        value: Any = self._config
        for key in path.split("."):
            if not isinstance(value, Mapping) or key not in value:
                return None
            value = value[key]
        return value


Advice = tuple[str, tuple[str, ...]]


def _engine_names(shares: Shares) -> str:
    if len(shares.engines) == 1:
        return f"{next(iter(shares.engines))} was"
    return f"the {len(shares.engines)} engines were"


def _engine(shares: Shares, setting: Setting) -> Advice:
    work, lighter = "Generation", "lower rollout.sampling.max_tokens"
    if setting("env.id"):
        work, lighter = "Stepping", "raise env.count, so that one pass of the policy serves more environments"
    change = ("rollout.engine.count", "rollout.engine.threads", lighter.split(",")[0].split()[-1])
    if shares.overlap < OVERLAPPED:
        remedy = f"raise rollout.engine.threads or {lighter}"
        if setting("placement") == "sync":
            return (
                f"{work} and training alternate, and {percent(shares.held['engine'])} of the time went to {work.lower()} "
                f"against {percent(shares.held['trainer'])} to training: {work.lower()} is the bottleneck; {remedy}, or let "
                'them overlap with placement = "separate".',
                (*change[1:], "placement"),
            )
    return (
        f"The trainer waited {percent(shares.waits['wait_batch'])} of the time for samples while {_engine_names(shares)} "
        f"busy {percent(shares.busy['engine'])}: {work.lower()} is the bottleneck; raise rollout.engine.count or "
        f"rollout.engine.threads, or {lighter}.",
        change,
    )


def _reward(shares: Shares) -> Advice:
    return (
        f"The trainer waited {percent(shares.waits['wait_batch'])} of the time for samples while scoring was going on "
        f"{percent(shares.busy['reward'])} of the time and {_engine_names(shares)} busy only "
        f"{percent(shares.busy['engine'])}: the reward plane is the bottleneck; raise reward.workers, make the reward "
        "functions quicker, or hide their delay behind more groups with rollout.max_in_flight.",
        ("reward.workers", "rollout.max_in_flight"),
    )


def _trainer(shares: Shares, setting: Setting) -> Advice:
    larger = "training.threads" if setting("env.id") else "training.threads or training.micro_tokens"
    return (
        f"The trainer was busy {percent(shares.busy['trainer'])} of the time and waited for samples only "
        f"{percent(shares.waits['wait_batch'])}, while {_engine_names(shares)} busy {percent(shares.busy['engine'])}: "
        f"training is the bottleneck; raise {larger}, or lower training.epochs.",
        (*larger.split(" or "), "training.epochs"),
    )


def _sync(shares: Shares, setting: Setting) -> Advice:
    ways = ["raise weights.every_steps"]
    change = ["weights.every_steps"]
    if setting("weights.interruption") in ("drain", "barrier", "abort"):
        ways.append(f'take weights.interruption = "never" in place of "{setting("weights.interruption")}"')
        change.append("weights.interruption")
    elif setting("weights.channel") in ("filesystem", "http"):
        ways.append("choose a quicker weights.channel")
        change.append("weights.channel")
    return (
        f"{percent(shares.held['weight sync'])} of the time went to publishing weights and waiting for the engines to take "
        f"them, against {percent(shares.held['trainer'])} to training: the weight sync is the bottleneck; "
        f"{' or '.join(ways)}.",
        tuple(change),
    )


def _admission(shares: Shares, setting: Setting) -> Advice:
    if shares.overlap < OVERLAPPED and setting("placement") == "sync":
        remedy, change = (
            'raise training.groups, or overlap with placement = "separate"',
            ("training.groups", "placement"),
        )
    elif setting("rollout.max_in_flight"):
        remedy = f"raise rollout.max_in_flight (now {setting('rollout.max_in_flight')}) or buffer.depth"
        change = ("rollout.max_in_flight", "buffer.depth")
    elif setting("staleness.max_steps_ahead") is not None:
        remedy = f"raise staleness.max_steps_ahead (now {setting('staleness.max_steps_ahead')})"
        change = ("staleness.max_steps_ahead",)
    elif setting("buffer.depth") == "queue":
        remedy, change = f"raise buffer.steps (now {setting('buffer.steps')})", ("buffer.steps",)
    else:
        now = f" (now {setting('buffer.depth')})" if setting("buffer.depth") else ""
        remedy, change = f"deepen buffer.depth{now} or raise rollout.oversample", ("buffer.depth", "rollout.oversample")
    return (
        f"The trainer waited {percent(shares.waits['wait_batch'])} of the time for samples, yet the engines were busy only "
        f"{percent(shares.busy['engine'])}, and admission waited for room {percent(shares.waits['wait_room'])} of the "
        f"time: too little may be in flight; {remedy}.",
        change,
    )


def alternating_share(shares: Shares, setting: Setting, cores: int | None) -> float | None:
    """The time that engine and trainer would take in turns, each with all cores, as a share of the time they took side by
    side: their work in seconds of a core, over what all cores do. None where they do not share all cores between them."""
    elsewhere = setting("runtime") == "ray" or setting("placement") != "separate"
    if cores is None or elsewhere or shares.overlap < OVERLAPPED:
        return None
    threads = {"engine": setting("rollout.engine.threads") or 1, "trainer": setting("training.threads") or 1}
    given = sum(threads[part_of(source)] for source in shares.occupied)
    if given != cores or len(shares.occupied) < 2:
        return None
    work = sum(share * threads[part_of(source)] for source, share in shares.occupied.items())
    return work / (cores * SPREAD)


def _notes(shares: Shares, setting: Setting, dropped_share: float, cores: int | None) -> tuple[str, ...]:
    notes = []
    waiting = sum(share for part, share in shares.held.items() if part != "trainer")
    in_turns = alternating_share(shares, setting, cores)
    if in_turns is not None and in_turns < WORTHWHILE:
        notes.append(
            f"Side by side, engine and trainer left {percent(1 - in_turns * SPREAD)} of the {cores} cores' time unused. "
            f"Alternating, with all {cores} threads for each, would take about {percent(in_turns)} of the time: set "
            f'placement = "sync", rollout.engine.threads = {cores} and training.threads = {cores}.'
        )
    elif shares.busy["trainer"] >= SATURATED and shares.busy["engine"] >= SATURATED and waiting < SLACK:
        notes.append(
            f"Engine ({percent(shares.busy['engine'])}) and trainer ({percent(shares.busy['trainer'])}) were both busy "
            "nearly all the time. Where they share cores, nothing is hidden by overlapping, and alternating with all threads "
            'for each may be as quick or quicker: compare with placement = "sync".'
        )
    if dropped_share >= 0.1:
        notes.append(
            f"{percent(dropped_share)} of the units were dropped: their generation was work for nothing; see the drops by "
            "reason."
        )
    engines = shares.engines
    if len(engines) > 1 and max(engines.values()) - min(engines.values()) > 0.3:
        low, high = min(engines, key=lambda e: engines[e]), max(engines, key=lambda e: engines[e])
        notes.append(f"{high} was busy {percent(engines[high])}, {low} only {percent(engines[low])}: uneven load.")
    if shares.waits["wait_room"] > 0.5 and shares.busy["engine"] < 0.5 and shares.held["trainer"] >= SATURATED:
        notes.append("The engines stood still most of the time: fewer rollout.engine.threads would do.")
    return tuple(notes)
