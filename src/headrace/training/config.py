"""What the training plane is told: how credit is assigned, which loss, which optimiser, how batches are cut."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from headrace.configbase import Config, NonNegative, Positive

Share = Annotated[float, Meta(ge=0, le=1)]
Ratio = Annotated[float, Meta(ge=0)]


class AdvantageConfig(Config):
    """[training.advantage]: scores into credit."""

    kind: Literal["grpo", "dr_grpo", "leave_one_out"] = "grpo"
    """grpo: (r - mean) / (std + eps); dr_grpo: r - mean; leave_one_out: r - mean of the others."""
    function: str = ""
    """`pkg.module:function` or `file.py:function` to use in place of `kind`: a group's rewards [E] and this table -> advantages [E]."""
    eps: Annotated[float, Meta(gt=0)] = 1e-6
    """Added to the standard deviation."""
    drop_zero_variance: bool = False
    """Drop groups whose scores are all equal and take others in their place."""
    refill_limit: NonNegative = 4
    """Batches' worth of groups that one step may drop so before it trains on the fewer ones it has. A step without any
    waits on, until limits.max_dropped ends the run."""


class LossConfig(Config):
    """[training.loss]: the clipped surrogate and what is added to it."""

    kind: Literal["clipped", "reinforce"] = "clipped"
    """clipped: the surrogate of PPO and GRPO; reinforce: -advantage * log-probability."""
    function: str = ""
    """`pkg.module:function` or `file.py:function` to use in place of `kind`: LossInputs -> LossOutputs (see training/losses.py)."""
    clip_low: Ratio = 0.2
    """The ratio is clipped at 1 - clip_low."""
    clip_high: Ratio = 0.28
    """The ratio is clipped at 1 + clip_high."""
    normalise: Literal["token", "sequence", "constant"] = "token"
    """token: mean over all tokens of the step; sequence: mean over samples of token means; constant: sum / (samples * max_tokens)."""
    kl_coef: Ratio = 0.0
    """Weight of the KL term to the reference (the model at the start); 0 keeps no reference."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Of KL(current || reference): k1, k2 and k3 after Schulman."""
    old_logprobs: Literal["engine", "trainer", "interpolated"] = "engine"
    """Denominator of the ratio: the engine's log-probabilities; the trainer's own, recomputed before the update; or a mix
    of the engine's and the current ones in log space, by how many versions old the token is (no extra pass)."""
    mask_truncated: bool = False
    """Leave samples that hit the length limit out of the loss."""


class CorrectionConfig(Config):
    """[training.correction]: importance weights between the behaviour and the proximal policy."""

    kind: Literal["none", "truncate", "mask"] = "none"
    """See `high`."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """sequence: product of a sample's ratios; geometric: their geometric mean."""
    low: Ratio = 0.0
    """For mask."""
    high: Annotated[float, Meta(gt=0)] = 2.0
    """truncate: weights above it become it; mask: ratios outside [low, high] are left out."""


class OptimizerConfig(Config):
    """[training.optimizer]: AdamW."""

    lr: Annotated[float, Meta(ge=0)] = 1e-5
    """Learning rate, at its highest."""
    betas: tuple[float, float] = (0.9, 0.95)
    """How slowly the two moments forget, each below 1."""
    eps: Annotated[float, Meta(gt=0)] = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Ratio = 0.0
    """Decoupled: each step takes away lr * weight_decay of every weight."""
    clip_norm: Ratio = 1.0
    """Largest gradient norm; 0 does not clip."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Of the learning rate, after the warm-up."""
    warmup_steps: NonNegative = 0
    """Steps over which the learning rate rises from 0."""


class LoraConfig(Config):
    """[training.lora]: train low-rank adapters in place of all weights (Hu et al. 2021). There is no dropout: the ratio must
    compare the same network."""

    kind: Literal["off", "adapter", "merged"] = "off"
    """adapter: only the adapters travel, and engines run them beside the base; merged: all weights travel, the adapters added."""
    rank: Positive = 16
    """Of the two factors."""
    alpha: Annotated[float, Meta(gt=0)] = 32.0
    """The adapters' product counts alpha / rank times."""
    target_modules: tuple[str, ...] = ()
    """Linear layers that get an adapter, by the last part of their name (q_proj, v_proj, ...); empty: all but the head."""


class AlgorithmConfig(Config):
    """[algorithm]: how trajectories become a loss. Passes and optimiser steps a batch are training.epochs and .minibatches."""

    kind: Literal["ppo", "appo", "impala", "dqn", "sac"] = "ppo"
    """ppo: GAE and the clipped surrogate; appo: V-trace and the clipped surrogate; impala: V-trace and the policy gradient;
    dqn: values of discrete actions; sac: soft actor-critic. The last two learn from [replay]."""
    gamma: Annotated[float, Meta(ge=0, le=1)] = 0.99
    """Discount a step."""
    lam: Annotated[float, Meta(ge=0, le=1)] = 0.95
    """Of GAE, and of V-trace's traces; 1 there: those of the paper."""
    clip: Ratio = 0.2
    """The ratio is clipped at 1 - clip and 1 + clip."""
    value_clip: Ratio = 0.0
    """Largest move of a value away from the one before the update that still lowers its loss; 0: none."""
    value_coef: Ratio = 0.5
    """Weight of the value loss."""
    entropy_coef: Ratio = 0.01
    """Weight of the entropy bonus."""
    normalise_advantages: bool = True
    """To mean 0 and deviation 1, over each minibatch."""
    target_kl: Ratio = 0.0
    """No further update on a batch once the KL divergence to the behaviour policy is above 1.5 times this; 0: no such stop."""
    clip_rho: Annotated[float, Meta(gt=0)] = 1.0
    """Of V-trace: bound of the importance weight of an error."""
    clip_c: Annotated[float, Meta(gt=0)] = 1.0
    """Of V-trace: bound of the trace."""
    normalise_returns: bool = False
    """The value function predicts returns of mean 0 and deviation 1; the running figures are saved with it."""
    double: bool = True
    """Of dqn: the online network chooses the next action, the target network judges it."""
    huber: Annotated[float, Meta(gt=0)] = 1.0
    """Of dqn: errors beyond it count linearly."""
    target_rate: Annotated[float, Meta(gt=0, le=1)] = 0.005
    """Of dqn, sac: how far the target network moves towards the online one at a time; 1 copies it."""
    target_every: Positive = 1
    """Of dqn, sac: updates between such moves."""
    epsilon: tuple[Share, Share] = (1.0, 0.05)
    """Of dqn: chance of a random action at the start and at the end."""
    epsilon_share: Annotated[float, Meta(gt=0, le=1)] = 0.2
    """Of dqn: part of training.steps over which it falls."""
    temperature: Annotated[float, Meta(gt=0)] = 1.0
    """Of sac: weight of the entropy at the start; tuned from then on."""
    target_entropy: float | None = None
    """Of sac: entropy that the temperature is tuned for, of actions between -1 and 1; none: minus their number."""


class TrainingConfig(Config):
    """[training]: batches into weights."""

    steps: Positive = 40
    """Batches to train on."""
    groups: Positive = 8
    """Units in a batch: groups, or trajectories of [env]."""
    epochs: Positive = 1
    """Passes over a batch."""
    minibatches: Positive = 1
    """Optimiser steps per pass; groups must divide by it (steps of trajectories are split as evenly as it goes)."""
    stream_groups: NonNegative = 0
    """Start on a batch as soon as so many of its groups are there, and go on as others come; the gradient is that of the
    whole batch. 0 waits for all."""
    micro_tokens: Positive = 4096
    """Most input tokens in one forward pass."""
    backend: Literal["single_device", "fsdp2", "deepspeed", "megatron", "jax", "scripted"] = "single_device"
    """How the trainer holds and splits the model; scripted: no model, for tests."""
    threads: Positive = 1
    """Of the trainer's process."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass in place of keeping them."""
    logits_chunk: Positive = 512
    """Targets whose logits exist at one time."""
    advantage: AdvantageConfig = AdvantageConfig()
    loss: LossConfig = LossConfig()
    correction: CorrectionConfig = CorrectionConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    lora: LoraConfig = LoraConfig()
