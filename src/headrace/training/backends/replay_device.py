"""Turns draws from a replay into new weights on one device, and says how wrong each value was."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from headrace.errors import RunDirError
from headrace.policies.config import PolicyConfig
from headrace.policies.spaces import Spaces
from headrace.protocols import WeightChannel, WorkerContext
from headrace.training import checkpoint_folder
from headrace.training.backends.policy_device import WEIGHTS, PolicyDevice
from headrace.training.config import AlgorithmConfig, TrainingConfig
from headrace.training.off_policy import OFF_POLICY, Draw
from headrace.training.q_learning import n_step_returns
from headrace.types import Array, Metrics, Stat, Transitions, WeightTicket


def build_replay_device(
    context: WorkerContext,
    training: TrainingConfig,
    algorithm: AlgorithmConfig,
    policy: PolicyConfig,
    channel: WeightChannel | None,
    seed: int,
) -> ReplayDevice:
    """A trainer that gets its networks with `begin`, once an actor has said what its environments show and take."""
    if context.resources.threads:
        torch.set_num_threads(context.resources.threads)
    return ReplayDevice(context, training, algorithm, policy, channel, seed)


class ReplayDevice(PolicyDevice):
    """The networks and optimisers of `training.off_policy`, called one draw at a time."""

    async def begin(self, spaces: Spaces) -> None:
        """Build the networks. Called once, before anything else."""
        kind = OFF_POLICY[self._algorithm.kind]
        self._learned = kind(spaces, self._policy, self._training, self._algorithm, self._seed)
        self._network = self._learned.network

    async def update(self, drawn: Transitions) -> tuple[Metrics, Array]:
        """One update of every network: what it was like, and [B] the errors that are the draw's new priorities."""
        with self._event("forward_backward"):
            found, errors = self._learned.update(self._draw(drawn))
            values = torch.stack([value.detach().float() for value in found.values()]).tolist()
        metrics = {name: Stat(value, 1.0, value) for name, value in zip(found, values, strict=True)}
        return metrics, errors.numpy()

    def _draw(self, drawn: Transitions) -> Draw:
        rewards, steps, terminated = (torch.from_numpy(part) for part in (drawn.rewards, drawn.steps, drawn.terminated))
        returns, discounts = n_step_returns(rewards, steps, terminated, self._algorithm.gamma)
        shown, after = (
            {name: torch.from_numpy(leaf) for name, leaf in leaves.items()}
            for leaves in (drawn.observations, drawn.next_observations)
        )
        actions, weights = torch.from_numpy(drawn.actions), torch.from_numpy(drawn.weights)
        return Draw(shown, actions, returns, discounts, after, weights)

    async def publish(self, version: int) -> WeightTicket:
        """See `PolicyDevice`; how actors explore follows the version, so that a resumed run goes on where it was."""
        self._learned.explore(version / self._training.steps)
        return await super().publish(version)

    # ------------------------------------------------------------------------------------------------ checkpoints

    def _fill(self, folder: Path) -> None:
        from safetensors.torch import save_file

        learned, state = self._learned, {}
        weights = {f"{part}.{n}": t for part, module in learned.modules.items() for n, t in module.state_dict().items()}
        for part, optimizer in learned.optimizers.items():
            state |= {f"{part}.{name}": tensor for name, tensor in optimizer.state().items()}
        if generator := getattr(learned, "generator", None):
            state["generator"] = generator.get_state()
        for tensors, name in ((weights, WEIGHTS), (state, checkpoint_folder.OPTIMIZER)):
            save_file({n: t.detach().clone().contiguous() for n, t in tensors.items()}, folder / name)
        facts = {
            "format": 1,
            "kind": self._algorithm.kind,
            "updates": learned.updates,
            "attempts": {part: optimizer.attempts for part, optimizer in learned.optimizers.items()},
        }
        (folder / checkpoint_folder.TRAINER).write_text(json.dumps(facts, indent=1))

    async def load(self, folder: str) -> None:
        """Go on from a folder that `save` wrote."""
        from safetensors.torch import load_file

        checkpoint_folder.verify_folder(folder)
        facts = json.loads((Path(folder) / checkpoint_folder.TRAINER).read_text())
        weights, state = load_file(Path(folder) / WEIGHTS), load_file(Path(folder) / checkpoint_folder.OPTIMIZER)
        learned = self._learned
        own = {f"{part}.{n}": t for part, module in learned.modules.items() for n, t in module.state_dict().items()}
        shapes = {name: tensor.shape for name, tensor in weights.items()}
        if facts["kind"] != self._algorithm.kind or shapes != {name: tensor.shape for name, tensor in own.items()}:
            raise RunDirError(f"{folder} holds other networks than [algorithm], [policy] and [env] ask for")
        with torch.no_grad():
            for name, tensor in weights.items():
                own[name].copy_(tensor)
        if generator := getattr(learned, "generator", None):
            generator.set_state(state["generator"])
        for part, optimizer in learned.optimizers.items():
            optimizer.flat.load()
            mine = {n.removeprefix(f"{part}."): t for n, t in state.items() if n.startswith(f"{part}.")}
            optimizer.restore(mine, facts["attempts"][part])
        learned.updates = facts["updates"]
