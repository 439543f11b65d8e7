"""What the controller is told: where the parts live, who waits for whom, when to checkpoint and when to give up."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from headrace.configbase import Config, NonNegative, Positive

Seconds = Annotated[float, Meta(gt=0)]


class CheckpointConfig(Config):
    """[checkpoint]"""

    every_steps: NonNegative = 0
    """0: only at the end and when the run is stopped."""
    keep: Positive = 2
    """So many newest checkpoints are kept."""


class LimitsConfig(Config):
    """[limits]: when a run that goes wrong says so or stops."""

    stall_warning_s: Seconds = 30.0
    """Print what each part waits for when nothing moved for so long."""
    stall_stop_s: Seconds = 900.0
    """Stop with an error when nothing moved for so long."""
    max_dropped: NonNegative = 0
    """Stop when so many units were dropped since the last trained one; 0: 16 batches' worth."""
    restarts: NonNegative = 3
    """Replacements of a dead engine over a run."""


class EvaluationConfig(Config):
    """[evaluation]: greedy answers to held-out tasks, before and after training, judged by the first of reward.functions; or
    greedy episodes of a control policy."""

    source: str = ""
    """As `tasks.source`; empty: no evaluation. `heldout` is the built-in source's own held-out part, `episodes` whole
    episodes of [env], in environments that train nothing and begin alike each time."""
    count: NonNegative = 100
    """Held-out tasks to answer, or episodes to play (env.count at a time)."""
    every_steps: NonNegative = 0
    """0: only before the first step and after the last."""
    sampled: bool = False
    """Also score one sampled answer to each task at the run's temperature, or episodes of drawn actions."""
