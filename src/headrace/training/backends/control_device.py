"""Turns batches of control steps into new weights on one device: values, credit, minibatch updates, publish, save."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headrace.cores import Crew, threads_for
from headrace.errors import ConfigError, RunDirError
from headrace.policies.config import PolicyConfig
from headrace.policies.distributions import Distribution, distribution_of
from headrace.policies.networks import PolicyNetwork, build_network
from headrace.policies.shared_pass import Passes, SharedPass
from headrace.policies.spaces import Spaces
from headrace.protocols import Annotation, WeightChannel, WorkerContext
from headrace.training import checkpoint_folder
from headrace.training.advantages import Credit
from headrace.training.backends.policy_device import WEIGHTS, PolicyDevice
from headrace.training.backends.step_credit import credit_of
from headrace.training.backends.step_rows import ROWS_WORTH_A_CORE, Part, Rows
from headrace.training.config import AlgorithmConfig, TrainingConfig
from headrace.training.losses import StepLossInputs, step_loss
from headrace.training.optimizer import FlatAdamW, FlatParameters
from headrace.types import Array, Metrics, Stat, StepBatch

Forward = tuple[Tensor, Tensor, Tensor]
"""[M] log-probabilities, entropies and values, with their graph."""
Chunk = tuple[Part, Forward | None]
"""Rows that are worked on at once, and their forward pass if it was made."""


def build_control_device(
    context: WorkerContext,
    training: TrainingConfig,
    algorithm: AlgorithmConfig,
    policy: PolicyConfig,
    channel: WeightChannel | None,
    seed: int,
    shared: SharedPass | None = None,
) -> ControlDevice:
    """A trainer that gets its network with `begin`, once an actor has said what its environments show and take."""
    if context.resources.threads:
        torch.set_num_threads(context.resources.threads)
    made = ControlDevice(context, training, algorithm, policy, channel, seed)
    made.shared = shared
    return made


class ControlDevice(PolicyDevice):
    """A policy with its value function and optimiser. `update` is a whole batch's work in one call, so that a trainer in
    another process is sent each batch once; it is made of the same parts as the calls of every `TrainBackend`.

    shared: where an actor in this process leaves the passes that it acted by
    """

    shared: SharedPass | None = None

    async def begin(self, spaces: Spaces) -> None:
        """Build the network. Called once, before anything else."""
        self._build(spaces, "cpu")

    def _build(self, spaces: Spaces, device: str) -> None:
        self._distribution = distribution_of(spaces.action, self._policy.squash)
        self._network = build_network(spaces, self._policy, self._distribution.size, self._seed).to(device)
        self._flat = FlatParameters(self._network)
        # Only networks of ours: a user's own may draw random numbers, or keep figures, in an order that threads would mix.
        parallel = device == "cpu" and isinstance(self._network, PolicyNetwork)
        self._crew, self._cores = Crew(), torch.get_num_threads() if parallel else 1
        total = self._training.steps * self._training.epochs * self._training.minibatches
        self._optimizer = FlatAdamW(self._flat, self._training.optimizer, total)
        self._shuffle = torch.Generator(device).manual_seed(self._seed)
        self._fused = (
            _fused(self._network, self._distribution, self._flat, self._algorithm) if device == "cpu" else None
        )
        if self.shared is not None and self._fused is None:
            self.shared.network = self._network
        self._returns = (0.0, 0.0, 0.0)  # count, mean, sum of squared differences

    # --------------------------------------------------------------------------------------------------- training

    async def update(self, batch: StepBatch) -> Metrics:
        """All epochs and minibatches of one batch."""
        training = self._training
        once = training.epochs * training.minibatches == 1 and not self._network.recurrent
        rows = Rows(batch)
        with self._event("forward_backward"), self._threads(batch.rewards.size // training.minibatches):
            if once:
                found = self._update_once(batch, rows)
            else:
                rows.fill(self._credit(batch, rows))
                found = self._epochs(rows)
            self._follow(rows)
            if self._fused is not None:
                self._fused.let_go()
            return found.summary() | rows.explained_variance()

    def _threads(self, rows: int) -> AbstractContextManager[None]:
        """Of each product of a minibatch; one where its parts have cores of their own, as what is left beside them is small."""
        cut = self._cores > 1 and rows >= 2 * ROWS_WORTH_A_CORE and not self._network.recurrent
        return threads_for(0 if cut else self._flat.values.numel() * rows)

    def _update_once(self, batch: StepBatch, rows: Rows) -> Updates:
        """One step on the whole batch: its forward pass serves the values that credit is made of, too; and if the batch
        was acted out in this process by this network, that pass is there already."""
        if self._fused is not None:
            rows.fill(self._credit(batch, rows))
            return Updates([self._gradient(rows, slice(None))], self._step())
        kept = self.shared.take(batch.behavior_logprobs) if self.shared is not None else None
        forward = partial(self._forward, rows) if kept is None else partial(self._forward_kept, rows, kept)
        shares = rows.shares(slice(None), self._cores, 1 if kept is None else rows.count)
        made = self._crew.run([partial(_of_each, forward, share) for share in shares])
        passes = [found for share in made for _, found in share]
        logprobs, values = (torch.cat([found[i].detach() for found in passes]) for i in (0, 2))
        rows.fill(self._credit(batch, rows, values, logprobs))
        metrics = self._gradient(rows, slice(None), made)
        return Updates([metrics], self._step())

    def _epochs(self, rows: Rows) -> Updates:
        """Shuffled minibatches, until the policy is too far from the one that acted."""
        found = Updates([], {})
        bound = 1.5 * self._algorithm.target_kl
        for _ in range(self._training.epochs):
            for part in rows.minibatches(self._training.minibatches, self._shuffle, self._network.recurrent):
                metrics = self._gradient(rows, part)
                found.losses.append(metrics)
                if bound and float(metrics["loss/kl"]) > bound:
                    self._flat.grads.zero_()
                    found.metrics["loss/stopped"] = Stat(1.0)
                    return found
                for name, stat in self._step().items():
                    found.metrics[name] = found.metrics[name] + stat if name in found.metrics else stat
        return found

    def _forward(self, rows: Rows, part: Part) -> Forward:
        """[M] log-probabilities, entropies and values of rows, or of the rows of whole sequences with a memory."""
        if self._network.recurrent:
            outputs, values, _ = self._network.unroll(*rows.sequences(part))  # type: ignore[operator]
            outputs, values, part = outputs.flatten(0, 1), values.flatten(), rows.rows_of(part)
        else:
            outputs, values = self._network.evaluate(rows.shown(part))
        return *self._distribution.logprobs_and_entropy(outputs, rows.actions[part]), values

    def _forward_kept(self, rows: Rows, kept: Passes, part: slice) -> Forward:
        """The same of whole steps, from the passes that acted; only values that acting had no use for are computed here."""
        outputs, values = zip(*kept[part.start // rows.count : part.stop // rows.count], strict=True)
        found = self._network.values(rows.shown(part)) if values[0] is None else torch.cat(values)
        return *self._distribution.logprobs_and_entropy(torch.cat(outputs), rows.actions[part]), found

    def _gradient(self, rows: Rows, part: Part, made: Sequence[Sequence[Chunk]] | None = None) -> dict[str, Tensor]:
        """Add the gradient of one minibatch. made: a share of its chunks for each core"""
        if self._fused is not None:
            return self._gradient_fused(rows, part)
        if self._network.recurrent:
            forward, part = self._forward(rows, part), rows.rows_of(part)
            made = [[(part, forward)]]
        elif made is None:
            made = [[(chunk, None) for chunk in share] for share in rows.shares(part, self._cores)]
        weights = rows.weights[part]
        shift, scale = torch.zeros(()), torch.ones(())
        if self._algorithm.normalise_advantages:
            shift, scale = spread(rows.advantages[part], weights)
        share = partial(self._gradient_of_share, rows, (shift, scale), weights.sum(), len(made) == 1)
        found = self._crew.run([partial(share, chunks) for chunks in made])
        for _, gradients in found:
            self._flat.add(gradients)
        return reduce(_joined, (metrics for metrics, _ in found))

    def _gradient_fused(self, rows: Rows, part: Part) -> dict[str, Tensor]:
        assert self._fused is not None
        self._fused.turn_to(rows)
        *normal, count = self._fused.normal(part)
        if not self._algorithm.normalise_advantages:
            normal = [0.0, 1.0]
        chunks = [chunk for share in rows.shares(part, self._cores, fused=True) for chunk in share]
        found = self._crew.run([partial(self._fused.gradient, chunk, normal, count) for chunk in chunks])
        for _, gradient in found:
            self._flat.grads += gradient
        return reduce(_joined, (metrics for metrics, _ in found))

    def _gradient_of_share(
        self, rows: Rows, normal: tuple[Tensor, Tensor], count: Tensor, alone: bool, share: Sequence[Chunk]
    ) -> tuple[dict[str, Tensor], list[Tensor | None]]:
        """Chunk by chunk: what a chunk keeps for its backward pass fits the caches. Shares that run side by side do not add
        to the same memory, and are added up in their order, so a seeded run repeats."""
        metrics, gradients = [], [None] * len(self._flat.parameters)
        for chunk, forward in share:
            advantages = (rows.advantages[chunk] - normal[0]) / normal[1]
            inputs = self._inputs(rows, chunk, forward or self._forward(rows, chunk), advantages, count)
            loss, found = step_loss(inputs, self._algorithm)
            metrics.append(found)
            if alone:
                loss.backward()
            else:
                more = torch.autograd.grad(loss, self._flat.parameters, allow_unused=True)
                gradients = [_sum(one, other) for one, other in zip(gradients, more, strict=True)]
        return reduce(_joined, metrics), gradients

    def _inputs(
        self,
        rows: Rows,
        part: Part,
        forward: Forward,
        advantages: Tensor,
        count: Tensor,
    ) -> StepLossInputs:
        mean, std = self._network.value_mean, self._network.value_std
        return StepLossInputs(
            logprobs=forward[0],
            entropies=forward[1],
            values=forward[2],
            behavior_logprobs=rows.behavior_logprobs[part],
            advantages=advantages,
            targets=(rows.targets[part] - mean) / std,
            old_values=(rows.values[part] - mean) / std if self._algorithm.value_clip else None,
            weights=rows.weights[part],
            count=count,
        )

    def _step(self) -> Metrics:
        if self.shared is not None:
            self.shared.changes += 1
        norm, rate, stepped = self._optimizer.step()
        metrics = {"optimizer/lr": Stat(rate), "optimizer/skipped": Stat(0.0 if stepped else 1.0)}
        if stepped:
            metrics["optimizer/grad_norm"] = Stat(norm, 1.0, norm)
        return metrics

    # ------------------------------------------------------------------------------------------------------ credit

    def _credit(
        self, batch: StepBatch, rows: Rows, values: Tensor | None = None, logprobs: Tensor | None = None
    ) -> tuple[Array, Credit]:
        known = (values, logprobs)
        return credit_of(self._network, self._distribution, self._algorithm, batch, rows, self._values, *known)

    def _values(self, rows: Rows) -> Tensor:
        """[T*B] under the current weights, each core's share at once."""
        shares = rows.shares(slice(None), self._cores, fused=self._fused is not None)
        calls = [partial(_values_of_each, self._network, rows, share) for share in shares]
        return torch.cat([found for share in self._crew.run(calls) for found in share])

    @torch.no_grad()
    def _follow(self, rows: Rows) -> None:
        """Take a batch into the running figures: after the update, so that it was made under those that acted."""
        kept = rows.weights > 0
        for name, normalisers in self._network.normalisers():
            for normaliser in normalisers:
                normaliser.update(rows.observations[name][kept].float())
        if self._algorithm.normalise_returns:
            targets = rows.targets[kept].double()
            count, mean, squares = self._returns
            n = float(targets.numel())
            if n:
                difference, total = float(targets.mean()) - mean, count + n
                squares += float((targets - targets.mean()).square().sum()) + difference**2 * count * n / total
                self._returns = (total, mean + difference * n / total, squares)
                self._network.value_mean.fill_(self._returns[1])
                self._network.value_std.fill_(max((squares / total) ** 0.5, 1e-4))

    # ------------------------------------------------------------------------------- the calls of every TrainBackend

    async def annotate(self, batch: StepBatch, what: Sequence[Annotation]) -> StepBatch:
        """Fill values, advantages and targets [T, B]."""
        if list(what) != ["values"]:
            raise ConfigError("algorithm.kind", f"a batch of steps is annotated with values, not with {list(what)}")
        with self._event("annotate"):
            values, credit = self._credit(batch, Rows(batch))
        return dataclasses.replace(batch, values=values, advantages=credit.advantages, targets=credit.targets)

    async def forward_backward(self, batch: StepBatch) -> Metrics:
        """Add the gradient of an annotated batch."""
        rows = Rows(batch)
        assert batch.values is not None and batch.advantages is not None and batch.targets is not None
        if not float(rows.weights.sum()):
            return {"batch/empty_micro": Stat(1.0, 1.0)}
        rows.fill((batch.values, Credit(batch.advantages, batch.targets)))
        with self._event("forward_backward"):
            metrics = self._gradient(rows, slice(None))
        return {name: Stat(float(value), 1.0, float(value)) for name, value in metrics.items()}

    async def optimizer_step(self, gradient_scale: float = 1.0) -> Metrics:
        """Scale, clip, step, advance the schedule, clear the gradients."""
        with self._event("optimizer_step"):
            if gradient_scale != 1.0:
                self._flat.grads.mul_(gradient_scale)
            return self._step()

    # ------------------------------------------------------------------------------------------------ checkpoints

    def _fill(self, folder: Path) -> None:
        from safetensors.torch import save_file

        save_file({n: t.detach().clone().contiguous() for n, t in self._network.state_dict().items()}, folder / WEIGHTS)
        state = {**self._optimizer.state(), "shuffle": self._shuffle.get_state()}
        save_file({n: t.detach().clone().contiguous() for n, t in state.items()}, folder / checkpoint_folder.OPTIMIZER)
        facts = {"format": 1, "attempts": self._optimizer.attempts, "returns": self._returns}
        facts["parameters"] = self._flat.values.numel()
        (folder / checkpoint_folder.TRAINER).write_text(json.dumps(facts, indent=1))

    async def load(self, folder: str) -> None:
        """Go on from a folder that `save` wrote."""
        from safetensors.torch import load_file

        checkpoint_folder.verify_folder(folder)
        facts = json.loads((Path(folder) / checkpoint_folder.TRAINER).read_text())
        weights = load_file(Path(folder) / WEIGHTS)
        own = self._network.state_dict()
        if facts["parameters"] != self._flat.values.numel() or set(weights) != set(own):
            raise RunDirError(f"{folder} holds another policy than [policy] and [env] ask for")
        with torch.no_grad():
            for name, tensor in weights.items():
                own[name].copy_(tensor)
        self._flat.load()
        state = load_file(Path(folder) / checkpoint_folder.OPTIMIZER)
        self._shuffle.set_state(state.pop("shuffle"))
        self._returns = tuple(facts["returns"])
        self._optimizer.restore(state, facts["attempts"])


@dataclasses.dataclass
class Updates:
    """losses: scalars of each minibatch; metrics: of the optimiser."""

    losses: list[dict[str, Tensor]]
    metrics: Metrics

    def summary(self) -> Metrics:
        """Both, the losses over all minibatches in one transfer."""
        stats = torch.stack([torch.stack(list(part.values())) for part in self.losses])
        columns = zip(self.losses[0], stats.T.tolist(), strict=True)
        return {name: Stat(sum(column), len(column), max(column)) for name, column in columns} | self.metrics


def _fused(network: nn.Module, distribution: Distribution, flat: FlatParameters, algorithm: AlgorithmConfig) -> Any:
    """`FusedSteps` where it can be had."""
    try:
        from headrace.training.backends.fused_steps import FusedSteps

        return FusedSteps(network, distribution, flat, algorithm) if FusedSteps.fits(network, distribution) else None
    except Exception as error:  # as in `networks.tower_of`
        warnings.warn(f"updates of small networks are not compiled, so they are slower: {error!r}", stacklevel=2)
        return None


def spread(values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of [M] over the rows of weight 1; 0 and 1 with fewer than two or no spread."""
    count = weights.sum()
    mean = (values * weights).sum() / count.clamp(min=1.0)
    deviation = (((values - mean).square() * weights).sum() / (count - 1).clamp(min=1.0)).sqrt()
    known = (count > 1) & (deviation > 0)
    return torch.where(known, mean, 0.0), torch.where(known, deviation + 1e-8, 1.0)


def _of_each(forward: Callable[[Part], Forward], chunks: Sequence[Part]) -> list[Chunk]:
    return [(chunk, forward(chunk)) for chunk in chunks]


@torch.no_grad()
def _values_of_each(network: Any, rows: Rows, chunks: Sequence[Part]) -> list[Tensor]:
    return [network.values(rows.shown(chunk)) for chunk in chunks]


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return (other if one is None else one) if one is None or other is None else one + other


def _joined(one: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: torch.maximum(value, other[name]) if name.endswith("max") else value + other[name]
        for name, value in one.items()
    }
