"""What a run records and shows."""

from __future__ import annotations

from typing import Literal

from headrace.configbase import Config, NonNegative


class ObservabilityConfig(Config):
    """[observability]: metrics, samples, timeline and the live display."""

    sinks: tuple[Literal["jsonl", "tensorboard", "wandb", "trackio"], ...] = ("jsonl", "tensorboard")
    """Where metrics go."""
    samples_every: NonNegative = 5
    """Write samples of every n-th step in readable form; 0: never."""
    samples_groups: NonNegative = 32
    """The first so many groups of such a step are written, whole; 0: all."""
    display: Literal["auto", "live", "lines", "none"] = "auto"
    """auto: live on a terminal, else one line per step."""
