"""Joins the planes' configs into one `RunConfig`, and refuses pairs that cannot work, with the value found and the remedy."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from headrace.configbase import Config
from headrace.exchange.config import BufferConfig, StalenessConfig, WeightsConfig
from headrace.observability.config import ObservabilityConfig
from headrace.orchestrator.config import CheckpointConfig, EvaluationConfig, LimitsConfig
from headrace.reward.config import RewardConfig
from headrace.rollout.config import GroupConfig, RolloutConfig, TasksConfig
from headrace.training.config import TrainingConfig


class ModelConfig(Config):
    """[model]: the policy at the start."""

    path: str = ""
    """A local Hugging Face folder of a causal LM, or `smollm2` or `tiny` (built in, cached)."""
    dtype: Literal["float32", "bfloat16"] = "float32"


class RunConfig(Config):
    """One run. Every table and key may be left out."""

    name: str = "run"
    seed: Annotated[int, Meta(ge=0)] = 0
    placement: Literal["sync", "colocated", "separate"] = "separate"
    """sync: generation and training alternate; separate: both run all the time."""
    runtime: Literal["auto", "local", "processes", "simulated", "ray"] = "auto"
    """auto: local for sync, processes for separate."""
    model: ModelConfig = ModelConfig()
    tasks: TasksConfig = TasksConfig()
    rollout: RolloutConfig = RolloutConfig()
    group: GroupConfig = GroupConfig()
    reward: RewardConfig = RewardConfig()
    buffer: BufferConfig = BufferConfig()
    staleness: StalenessConfig = StalenessConfig()
    weights: WeightsConfig = WeightsConfig()
    training: TrainingConfig = TrainingConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    limits: LimitsConfig = LimitsConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    observability: ObservabilityConfig = ObservabilityConfig()
