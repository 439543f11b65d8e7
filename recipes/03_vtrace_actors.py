"""Actors and a learner that do not wait for each other, in one file: IMPALA's V-trace on CartPole.

    python recipes/03_vtrace_actors.py --actors 2 --target 475

What `headrace run impala` does with leases, a weight channel and fenced workers, in its barest form: processes that act with
whatever weights they last saw, a queue of their trajectories, and a correction for the weights being old by then. What is
missing here is why the library exists: nobody replaces a dead actor, bounds the lag, or could go on after a crash.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
import torch.multiprocessing as multiprocessing
from torch import nn

from headrace.rollout.config import EnvConfig
from headrace.rollout.environments.gymnasium_vector import VectorEnvironment


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--count", type=int, default=32, help="environments side by side in an actor")
    parser.add_argument("--steps", type=int, default=32, help="steps of a trajectory")
    parser.add_argument("--batches", type=int, default=1500, help="trajectories to learn from")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--gamma", type=float, default=0.99)
    parser.add_argument("--target", type=float, default=475.0)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


class Network(nn.Module):
    """Observations [..., D] -> logits [..., A] and values [...]."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.policy = nn.Sequential(
            nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)
        )
        self.value = nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, observations: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.policy(observations), self.value(observations)[..., 0]


# ------------------------------------------------------------------------------------------------------- 1. actors


def act(index: int, args: argparse.Namespace, shared: Network, version, trajectories) -> None:
    """For ever: take the newest weights, step, send what happened with the probabilities it happened with."""
    torch.set_num_threads(1)
    torch.manual_seed(args.seed * 1000 + index)
    environments = VectorEnvironment(EnvConfig(id=args.env, count=args.count), seed=args.seed, index=index)
    (leaf,), action = environments.spaces.leaves, environments.spaces.action
    own = Network(leaf.shape[0], action.sizes[0])
    shown, returns = environments.reset()["obs"].copy(), np.zeros(args.count, np.float32)
    while True:
        own.load_state_dict(
            shared.state_dict()
        )  # may be torn between two updates: the recipe accepts it, a channel does not
        rows = {name: [] for name in ("actions", "logprobs", "rewards", "terminated", "truncated", "valid")}
        seen, finished, made_by = [shown], [], version.value
        for _ in range(args.steps):
            with torch.no_grad():
                chosen = torch.distributions.Categorical(logits=own.policy(torch.from_numpy(seen[-1])))
                action = chosen.sample()
            step = environments.step(action.numpy())
            now = (
                action.numpy(),
                chosen.log_prob(action).numpy(),
                step.rewards,
                step.terminated,
                step.truncated,
                step.valid,
            )
            for name, value in zip(rows, now, strict=True):
                rows[name].append(np.array(value))
            seen.append(step.observations["obs"].copy())
            returns += step.rewards
            done = step.terminated | step.truncated
            finished += returns[done].tolist()
            returns[done] = 0
        shown = seen[-1]
        trajectories.put(
            ({"observations": np.stack(seen)} | {n: np.stack(v) for n, v in rows.items()}, finished, made_by)
        )


# ------------------------------------------------------------------------------------------------------ 2. V-trace


def vtrace(log_ratios, rewards, values, following, discounts, goes_on, valid):
    """Targets and advantages [T, N] of Espeholt et al. 2018: importance weights cut at 1 scale each error and each trace."""
    rho = log_ratios.exp().clamp(max=1.0) * valid
    errors = rho * (rewards + discounts * following - values)
    corrections, running = torch.zeros_like(values), torch.zeros_like(values[0])
    for t in reversed(range(len(values))):
        running = errors[t] + discounts[t] * rho[t] * goes_on[t] * running
        corrections[t] = running
    targets = values + corrections
    after = torch.cat([targets[1:], following[-1:]])
    after = torch.where(goes_on.bool(), after, following)
    return targets, rho * (rewards + discounts * after - values)


# ------------------------------------------------------------------------------------------------------ 3. learner


def learn(network: Network, optimizer: torch.optim.Optimizer, batch: dict[str, np.ndarray], gamma: float) -> None:
    """One update on one trajectory."""
    at = {name: torch.from_numpy(array) for name, array in batch.items()}
    logits, values = network(at["observations"])
    chosen = torch.distributions.Categorical(logits=logits[:-1])
    logprobs, valid = chosen.log_prob(at["actions"]), at["valid"].float()
    with torch.no_grad():
        goes_on = (at["valid"] & ~at["terminated"] & ~at["truncated"]).float()
        discounts = gamma * (~at["terminated"]).float()
        targets, advantages = vtrace(
            logprobs - at["logprobs"], at["rewards"], values[:-1], values[1:], discounts, goes_on, valid
        )
    policy_loss = -(advantages * logprobs * valid).sum()
    value_loss = 0.5 * ((values[:-1] - targets).square() * valid).sum()
    scale = targets.std().clamp(min=1.0)  # of returns: one learning rate for both terms
    loss = (policy_loss / scale + 0.5 * value_loss / scale.square()) / valid.sum()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    optimizer.step()


def main() -> None:
    args = arguments()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    probe = VectorEnvironment(EnvConfig(id=args.env, count=1))
    if probe.mode != "next_step":
        raise SystemExit(f"{args.env} hides the last observation of an episode; the recipe has no place for those")
    network = Network(probe.spaces.leaves[0].shape[0], probe.spaces.action.sizes[0]).share_memory()
    optimizer = torch.optim.AdamW(network.parameters(), lr=args.lr, betas=(0.9, 0.99), weight_decay=0.0)
    context = multiprocessing.get_context("spawn")
    version, trajectories = (
        context.Value("q", 0),
        context.Queue(maxsize=2 * args.actors),
    )  # a full queue holds actors back
    actors = [
        context.Process(target=act, args=(index, args, network, version, trajectories), daemon=True)
        for index in range(args.actors)
    ]
    for actor in actors:
        actor.start()
    finished: list[float] = []
    started = None
    for batch in range(1, args.batches + 1):
        trajectory, returns, made_by = trajectories.get(timeout=120)
        started = started or time.perf_counter()
        learn(network, optimizer, trajectory, args.gamma)
        lag, version.value = version.value - made_by, batch
        finished = [*finished, *returns][-100:]
        if batch % 20 == 0 or (len(finished) == 100 and np.mean(finished) >= args.target):
            seconds = time.perf_counter() - started
            print(f"batch {batch:4d}  return {np.mean(finished or [0]):6.1f}  lag {lag}  {seconds:.1f} s", flush=True)
        if len(finished) == 100 and np.mean(finished) >= args.target:
            break
    for actor in actors:
        actor.terminate()


if __name__ == "__main__":
    main()
