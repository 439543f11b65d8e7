"""PPO in one file, from top to bottom: CartPole (or any Gymnasium id with numbers to see and choices to make).

    python recipes/02_ppo_in_one_file.py --env CartPole-v1 --target 475

Every step of `headrace run cartpole` is here, one after the other: act, step, credit, clipped updates. Nothing of the library
is used but the environments side by side, whose reset rows would otherwise be the longest part of the file.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from torch import nn

from headrace.rollout.config import EnvConfig
from headrace.rollout.environments.gymnasium_vector import VectorEnvironment


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--count", type=int, default=64, help="environments side by side")
    parser.add_argument("--steps", type=int, default=32, help="steps of each between two updates")
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--minibatches", type=int, default=4)
    parser.add_argument("--lr", type=float, default=2.5e-3)
    parser.add_argument("--gamma", type=float, default=0.99)
    parser.add_argument("--lam", type=float, default=0.95)
    parser.add_argument("--clip", type=float, default=0.2)
    parser.add_argument("--entropy", type=float, default=0.01)
    parser.add_argument("--target", type=float, default=475.0, help="stop at this mean return of the last 100 episodes")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def network(inputs: int, outputs: int, last_gain: float) -> nn.Sequential:
    """Two hidden layers of 64 with orthogonal weights."""
    layers: list[nn.Module] = []
    for a, b, gain in ((inputs, 64, 2**0.5), (64, 64, 2**0.5), (64, outputs, last_gain)):
        linear = nn.Linear(a, b)
        nn.init.orthogonal_(linear.weight, gain)
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers[:-1])


# ------------------------------------------------------------------------------------------------- 1. act and step


class Collector:
    """Steps the environments with the policy and remembers what one update needs, all [T, N] (observations [T+1, N, D])."""

    def __init__(self, environments: VectorEnvironment, steps: int) -> None:
        self.environments, self.steps = environments, steps
        self.shown = environments.reset()["obs"]
        self.returns = np.zeros(environments.count, np.float32)
        self.finished: list[float] = []

    @torch.no_grad()
    def collect(self, policy: nn.Module, value: nn.Module) -> dict[str, torch.Tensor]:
        shape = (self.steps, self.environments.count)
        observations = np.empty((self.steps + 1, *self.shown.shape), np.float32)
        actions, logprobs, rewards = np.empty(shape, np.int64), np.empty(shape, np.float32), np.empty(shape, np.float32)
        terminated, truncated, valid = (np.empty(shape, bool) for _ in range(3))
        final = np.full(shape, np.nan, np.float32)  # V of the true last observation, where a reset hides it
        observations[0] = self.shown
        for t in range(self.steps):
            chosen = torch.distributions.Categorical(logits=policy(torch.from_numpy(observations[t])))
            action = chosen.sample()
            actions[t], logprobs[t] = action.numpy(), chosen.log_prob(action).numpy()
            step = self.environments.step(actions[t])
            observations[t + 1], rewards[t] = step.observations["obs"], step.rewards
            terminated[t], truncated[t], valid[t] = step.terminated, step.truncated, step.valid
            if step.ended.size:
                final[t, step.ended] = value(torch.from_numpy(step.final_observations["obs"]))[:, 0].numpy()
            self._count(step)
        self.shown = observations[-1]
        values = value(torch.from_numpy(observations))[..., 0].numpy()
        found = dict(observations=observations[:-1], actions=actions, logprobs=logprobs, valid=valid)
        following = np.where(np.isnan(final), values[1:], final)
        found |= credit(rewards, values[:-1], following, terminated, truncated, valid)
        return {name: torch.from_numpy(array.reshape(-1, *array.shape[2:])) for name, array in found.items()}

    def _count(self, step) -> None:
        self.returns += step.rewards
        done = step.terminated | step.truncated
        self.finished += self.returns[done].tolist()
        self.returns[done] = 0


# -------------------------------------------------------------------------------------------------------- 2. credit


def credit(rewards, values, following, terminated, truncated, valid) -> dict[str, np.ndarray]:
    """Generalised advantage estimates (Schulman et al. 2016). An episode that ended by itself is worth nothing after it; one
    that a time limit cut is worth the value of its last observation; a row that only resets passes nothing on."""
    advantages, running = np.zeros_like(rewards), np.zeros(rewards.shape[1], np.float32)
    for t in reversed(range(len(rewards))):
        error = rewards[t] + ARGS.gamma * following[t] * ~terminated[t] - values[t]
        goes_on = valid[t] & ~terminated[t] & ~truncated[t]
        running = valid[t] * (error + ARGS.gamma * ARGS.lam * goes_on * running)
        advantages[t] = running
    return {"advantages": advantages, "targets": advantages + values}


# -------------------------------------------------------------------------------------------------------- 3. update


def update(
    policy: nn.Module, value: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]
) -> None:
    """Clipped updates on shuffled minibatches (Schulman et al. 2017)."""
    batch = {name: array[batch["valid"]] for name, array in batch.items()}
    for _ in range(ARGS.epochs):
        for rows in torch.randperm(len(batch["actions"])).tensor_split(ARGS.minibatches):
            part = {name: array[rows] for name, array in batch.items()}
            chosen = torch.distributions.Categorical(logits=policy(part["observations"]))
            ratio = (chosen.log_prob(part["actions"]) - part["logprobs"]).exp()
            advantage = (part["advantages"] - part["advantages"].mean()) / (part["advantages"].std() + 1e-8)
            surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - ARGS.clip, 1 + ARGS.clip) * advantage)
            error = value(part["observations"])[:, 0] - part["targets"]
            loss = -surrogate.mean() + 0.25 * error.square().mean() - ARGS.entropy * chosen.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_([*policy.parameters(), *value.parameters()], 0.5)
            optimizer.step()


def main() -> None:
    torch.manual_seed(ARGS.seed)
    torch.set_num_threads(1)
    environments = VectorEnvironment(EnvConfig(id=ARGS.env, count=ARGS.count), seed=ARGS.seed)
    (leaf,), action = environments.spaces.leaves, environments.spaces.action
    policy, value = network(leaf.shape[0], action.sizes[0], 0.01), network(leaf.shape[0], 1, 1.0)
    optimizer = torch.optim.AdamW([*policy.parameters(), *value.parameters()], lr=ARGS.lr, eps=1e-5, weight_decay=0.0)
    collector, started = Collector(environments, ARGS.steps), time.perf_counter()
    for batch in range(1, ARGS.batches + 1):
        update(policy, value, optimizer, collector.collect(policy, value))
        last = collector.finished[-100:]
        seconds = time.perf_counter() - started
        speed = batch * ARGS.steps * ARGS.count / seconds
        print(
            f"batch {batch:3d}  return {np.mean(last or [0]):6.1f}  {speed:,.0f} steps/s  {seconds:.1f} s", flush=True
        )
        if len(last) == 100 and np.mean(last) >= ARGS.target:
            break


if __name__ == "__main__":
    ARGS = arguments()
    main()
