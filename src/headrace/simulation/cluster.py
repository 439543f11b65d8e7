"""Turns a cluster's TOML file into what its parts cost: engines, trainer, transports, work and failures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from msgspec import Meta

from headrace.config import RunConfig, read_toml
from headrace.configbase import Config, NonNegative, Positive, build
from headrace.errors import ConfigError
from headrace.exchange.channels import AVAILABLE
from headrace.rollout.engines.scripted import ScriptedCosts

CLUSTER_FILE = Path(__file__).parent / "cluster.toml"
"""The one that ships; `headrace compare --simulate cluster.toml` finds it by this name too."""

TRANSPORTS = {*AVAILABLE, "mesh", "adapter", "collective_buckets", "default"}
"""Channels whose costs a file may name: those of `weights.channel`, what libraries have beside them, and `default`."""
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Rate = Annotated[float, Meta(ge=1e-6, le=1e12)]
Share = Annotated[float, Meta(ge=0, le=1)]


class GenerationCosts(Config):
    """[generation]: the engines."""

    engines: Positive = 1
    """Engines that generate, each of as many devices as its rates are of."""
    rates: tuple[tuple[int, float], ...] = ((1, 50.0),)
    """(requests decoded side by side, tokens a second of one engine), ascending."""
    max_running: NonNegative = 256
    """Requests that one engine decodes side by side; 0: no bound."""
    prefill_tokens_per_s: Rate = 20_000.0
    """Prompt tokens a second of one engine, during which it decodes nothing. Siblings share their prompt."""
    wake_s: Seconds = 0.0
    """Waking from sleep, under colocated."""


class TrainingCosts(Config):
    """[training]: the trainer."""

    tokens_per_s: Rate = 10_000.0
    """Prompt and sampled tokens a second, forward, backward and step."""
    step_s: Seconds = 0.0
    """Added to every step whatever its size."""
    offload_s: Seconds = 0.0
    """Giving state away, and the same again to take it back, under colocated."""


class TransportCosts(Config):
    """[transport.CHANNEL]: one weight sync. Keys are the channels of `weights.channel`."""

    publish_s: Seconds = 0.0
    """The trainer stands for so long."""
    prepare_s: Seconds = 0.0
    """Bytes come to every engine, beside the live weights."""
    commit_s: Seconds = 0.0
    """The swap itself."""


class WorkloadCosts(Config):
    """[workload]: what is asked and answered, and what scoring costs."""

    prompt_tokens: Positive = 512
    """Of every prompt."""
    median_tokens: Rate = 2048.0
    """Of a completion: log-normal, cut at max_tokens."""
    sigma: Seconds = 0.0
    """Spread of the logarithm; 1 and more is a heavy tail."""
    tasks: NonNegative = 0
    """Different tasks, which come again and again; 0: every task is new."""
    task_sigma: Seconds = 0.0
    """Spread of the logarithm of the median from task to task: what `rollout.order = "length_bucket"` can learn."""
    runaway: Share = 0.0
    """Share of completions that go on to max_tokens whatever they were drawn as."""
    max_tokens: Positive = 2048
    """Longest completion."""
    groups: NonNegative = 0
    """Groups in a batch; 0: as the run's config says."""
    group_size: NonNegative = 0
    """Members of a group; 0: as the run's config says."""
    score_s: Seconds = 0.0
    """One score; any number at a time."""
    score_sigma: Seconds = 0.0
    """Spread of the logarithm of it."""
    hard: Share = 0.0
    """Share of tasks that no member solves."""
    easy: Share = 0.0
    """Share of tasks that every member solves; half of the members solve the rest."""
    grain: Positive = 1
    """One simulated token stands for so many: versions inside a completion are told apart no finer. Saves memory and time."""


class FailureCosts(Config):
    """[failures]: what breaks."""

    engine_mtbf_s: Seconds = 0.0
    """Mean time between deaths of one engine; 0: never."""
    restart_s: Seconds = 60.0
    """Until a replacement is there."""
    lost_replies: Share = 0.0
    """Share of generations whose reply is lost."""
    failed_scores: Share = 0.0
    """Share of scores that come back empty."""


class ClusterConfig(Config):
    """A cluster and its work."""

    name: str = "cluster"
    """For people."""
    generation: GenerationCosts = GenerationCosts()
    training: TrainingCosts = TrainingCosts()
    transport: dict[str, TransportCosts] = {}
    """Channel -> what a sync through it costs. `default` stands for all that are not named."""
    workload: WorkloadCosts = WorkloadCosts()
    failures: FailureCosts = FailureCosts()

    def transport_of(self, channel: str) -> TransportCosts:
        """Raises ConfigError for a channel without costs."""
        found = self.transport.get(channel, self.transport.get("default"))
        if found is None:
            named = ", ".join(self.transport) or "none"
            raise ConfigError(
                f"transport.{channel}", f"missing; the file names {named}: add it, or [transport.default]"
            )
        return found

    def costs(self, channel: str) -> ScriptedCosts:
        """What one engine costs, in simulated tokens."""
        generation, work, transport = self.generation, self.workload, self.transport_of(channel)
        grain = work.grain
        return ScriptedCosts(
            rates=tuple((count, rate / grain) for count, rate in generation.rates),
            max_running=generation.max_running,
            prefill_s=work.prompt_tokens / generation.prefill_tokens_per_s,
            prepare_s=transport.prepare_s,
            commit_s=transport.commit_s,
            wake_s=generation.wake_s,
            length=work.median_tokens / grain,
            length_sigma=work.sigma,
            task_sigma=work.task_sigma,
            runaway=work.runaway,
        )


def load_cluster(path: str | Path) -> ClusterConfig:
    """Read a cluster's file. Raises ConfigError in one line for what is wrong with it."""
    file = Path(path)
    if not file.is_file() and str(path) == CLUSTER_FILE.name:
        file = CLUSTER_FILE
    if not file.is_file():
        raise ConfigError(
            "", f"--simulate: {str(path)!r} is no file; give a cluster's TOML file, or {CLUSTER_FILE.name}"
        )
    cluster = build(ClusterConfig, read_toml(file), "")
    counts, rates = zip(*cluster.generation.rates, strict=True) if cluster.generation.rates else ((), ())
    if not counts or list(counts) != sorted(set(counts)) or counts[0] < 1 or not all(1e-6 <= r <= 1e12 for r in rates):
        raise ConfigError(
            "generation.rates",
            f"found {[list(pair) for pair in cluster.generation.rates]}, expected ascending numbers of requests, each with its "
            "tokens a second",
        )
    if unknown := sorted(set(cluster.transport) - TRANSPORTS):
        raise ConfigError(f"transport.{unknown[0]}", f"is no channel; use one of {', '.join(sorted(TRANSPORTS))}")
    return cluster


def with_workload(config: RunConfig, cluster: ClusterConfig) -> RunConfig:
    """The run's config with the sizes that the cluster's work names, and limits that simulated hours do not trip."""
    from msgspec.structs import replace

    work, generation = cluster.workload, cluster.generation
    groups, size = work.groups or config.training.groups, work.group_size or config.group.size
    places = generation.engines * generation.max_running // size if generation.max_running else 0
    in_flight = config.rollout.max_in_flight or max(groups + config.rollout.oversample, places)
    return replace(
        config,
        training=replace(config.training, groups=groups),
        group=replace(config.group, size=size, timeout_s=max(config.group.timeout_s, 86_400.0)),
        rollout=replace(
            config.rollout,
            max_in_flight=in_flight,
            sampling=replace(config.rollout.sampling, max_tokens=max(1, work.max_tokens // work.grain)),
        ),
        limits=replace(config.limits, restarts=1_000_000, stall_stop_s=max(config.limits.stall_stop_s, 86_400.0)),
    )
