"""Turns trajectories of tensors into new weights on the device where they lie."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.policies.config import PolicyConfig
from headrace.policies.spaces import Spaces
from headrace.protocols import WeightChannel, WorkerContext
from headrace.training.backends.control_device import ControlDevice
from headrace.training.backends.step_rows import Rows
from headrace.training.config import AlgorithmConfig, TrainingConfig
from headrace.training.tensor_credit import gae_tensors, vtrace_tensors
from headrace.types import Metrics, Trajectory


def build_tensor_device(
    context: WorkerContext,
    training: TrainingConfig,
    algorithm: AlgorithmConfig,
    policy: PolicyConfig,
    channel: WeightChannel | None,
    seed: int,
    device: str,
) -> TensorDevice:
    """A trainer that gets its network with `begin`, once an actor has said what its environments show and take."""
    if context.resources.threads:
        torch.set_num_threads(context.resources.threads)
    return TensorDevice(context, training, algorithm, policy, channel, seed, device)


class TensorDevice(ControlDevice):
    """A `ControlDevice` on any device. Losses, gradient norms and statistics reach the host, steps do not."""

    def __init__(
        self,
        context: WorkerContext,
        training: TrainingConfig,
        algorithm: AlgorithmConfig,
        policy: PolicyConfig,
        channel: WeightChannel | None,
        seed: int,
        device: str,
    ) -> None:
        super().__init__(context, training, algorithm, policy, channel, seed)
        self._device = device

    async def begin(self, spaces: Spaces) -> None:
        self._build(spaces, self._device)

    async def learn(self, units: Sequence[Trajectory]) -> Metrics:
        """All epochs and minibatches of one batch of trajectories."""
        with self._event("forward_backward"):
            rows = TensorRows(units)
            rows.keep(*self._tensor_credit(rows))
            found = self._epochs(rows)
            self._follow(rows)
        return found.summary() | rows.explained_variance()

    @torch.no_grad()
    def _tensor_credit(self, rows: TensorRows) -> tuple[Tensor, Tensor, Tensor]:
        """[T*B] values, advantages, targets, in the rewards' units."""
        network, algorithm, shape = self._network, self._algorithm, (rows.steps, rows.count)
        mean, std = network.value_mean, network.value_std
        last = {name: leaf[-1] for name, leaf in rows.leaves.items()}
        if algorithm.kind == "ppo":
            values = network.values(rows.observations)
        else:
            outputs, values = network.evaluate(rows.observations)
        values = (values * std + mean).view(shape)
        following = torch.cat([values[1:], (network.values(last) * std + mean)[None]])
        if len(rows.ended):
            t, n = rows.ended.T
            following[t, n] = network.values(rows.final) * std + mean
        discounts = algorithm.gamma * ~rows.terminated
        if algorithm.kind == "ppo":
            credit = gae_tensors(rows.rewards, values, following, discounts, algorithm.lam, rows.cut)
        else:
            logprobs = self._distribution.logprobs(outputs, rows.actions)
            rhos = (logprobs - rows.behavior_logprobs).clamp(-20, 20).exp().view(shape)
            how = algorithm.clip_rho, algorithm.clip_c, algorithm.lam, algorithm.kind == "impala"
            credit = vtrace_tensors(rhos, rows.rewards, values, following, discounts, rows.cut, *how)
        return values.flatten(), credit[0].flatten(), credit[1].flatten()


class TensorRows(Rows):
    """Trajectories of equal length side by side, [T*B, ...]: a single one without a copy."""

    def __init__(self, units: Sequence[Trajectory]) -> None:
        def joined(name: str) -> Tensor:
            return _join([getattr(unit, name) for unit in units], dim=1)

        self.rewards, self.terminated, self.cut = joined("rewards"), joined("terminated"), joined("truncated")
        self.steps, self.count = self.rewards.shape
        self.leaves = {name: _join([unit.observations[name] for unit in units], 1) for name in units[0].observations}
        self.observations = {name: leaf[:-1].flatten(0, 1) for name, leaf in self.leaves.items()}
        self.actions = joined("actions").flatten(0, 1)
        self.behavior_logprobs = joined("behavior_logprobs").flatten()
        self.weights = torch.ones_like(self.behavior_logprobs)
        first, places = 0, []
        for unit in units:
            places.append(torch.as_tensor(unit.ended) + torch.tensor([0, first], device=self.rewards.device))
            first += unit.rewards.shape[1]
        self.ended = _join(places, 0)
        cut = [unit.final_observations for unit in units if len(unit.ended)]
        self.final = {name: _join([leaves[name] for leaves in cut], 0) for name in cut[0]} if cut else {}

    def keep(self, values: Tensor, advantages: Tensor, targets: Tensor) -> None:
        self.values, self.advantages, self.targets = values, advantages, targets


def _join(parts: Sequence[Tensor], dim: int) -> Tensor:  # type: ignore[type-arg]
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)
