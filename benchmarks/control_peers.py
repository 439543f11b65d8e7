"""What `control.py` measures against: a hand-written torch PPO loop, Stable-Baselines3 and Sample Factory, each run by the Python
of its own virtual environment.

    python benchmarks/control_peers.py NAME '{"seconds": 6}'     # one JSON line at the end: steps/s, steps/processor second, seconds

Imported by `control.py` for the clocks, so that every program is timed by the same ones.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

TARGET, WINDOW = 475.0, 100
TICKS_S = os.sysconf("SC_CLK_TCK")


# -------------------------------------------------------------------------------------------------------------- clocks


def processor_seconds() -> float:
    """Of this process and all that it started, the ended ones that were waited for included."""
    parents, used = {}, {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has just ended
                continue
            parents[int(entry.name)] = int(fields[1])
            used[int(entry.name)] = sum(map(int, fields[11:15])) / TICKS_S
    family, total = [os.getpid()], 0.0
    while family:
        pid = family.pop()
        total += used.get(pid, 0.0)
        family += [child for child, parent in parents.items() if parent == pid]
    return total


class Marks:
    """(wall, processor seconds, steps so far), two a second at most, and rates over what came after the first `warmup_s`."""

    def __init__(self) -> None:
        self.began: float = time.perf_counter()
        self.seen: list[tuple[float, float, float]] = []

    def add(self, steps: float) -> None:
        now = time.perf_counter()
        if not self.seen or now - self.seen[-1][0] > 0.5:
            self.seen.append((now, processor_seconds(), steps))

    def rates(self, warmup_s: float = 1.0) -> dict[str, float]:
        first = next(
            (mark for mark in self.seen[:-1] if mark[0] - self.seen[0][0] >= warmup_s and mark[2]), self.seen[0]
        )
        if self.seen[-1][1] <= first[1]:
            raise SystemExit("too little was done to take a rate: give it more --seconds")
        wall, processor, steps = (last - start for last, start in zip(self.seen[-1], first, strict=True))
        return {"wall": steps / wall, "processor": steps / processor, "seconds": self.seen[-1][0] - self.began}


# ------------------------------------------------------------------------------------------------------------- programs


def by_hand(
    seconds: float, count=1024, steps=32, epochs=1, minibatches=1, lr=4e-3, threads=1, seed=0, learn=False
) -> dict:
    """The usual loop over Gymnasium's vectorised CartPole, nothing around it. learn: up to a mean return of 475."""
    import gymnasium
    import numpy as np
    import torch
    import torch._dynamo  # which the optimiser would import when it is made
    from torch import nn

    torch.manual_seed(seed)
    torch.set_num_threads(threads)
    marks, total, episodes = Marks(), 0.0, deque(maxlen=WINDOW)
    environments = gymnasium.make_vec("CartPole-v1", num_envs=count, vectorization_mode="vector_entry_point")

    def network(outputs: int, gain: float) -> nn.Sequential:
        layers = [nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)]
        for layer, scale in zip(layers[::2], (2**0.5, 2**0.5, gain), strict=True):
            nn.init.orthogonal_(layer.weight, scale)
            nn.init.zeros_(layer.bias)
        return nn.Sequential(*layers)

    actor, critic = network(2, 0.01), network(1, 1.0)
    parameters = [*actor.parameters(), *critic.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=lr, eps=1e-5)
    shown = torch.from_numpy(environments.reset(seed=seed)[0])
    after_end, returns = torch.zeros(count), np.zeros(count)
    while True:
        observations, actions = torch.zeros(steps, count, 4), torch.zeros(steps, count, dtype=torch.int64)
        logprobs, rewards, ends, cuts, values, resets, lasts = (torch.zeros(steps, count) for _ in range(7))
        for t in range(steps):
            observations[t], resets[t] = shown, after_end
            with torch.no_grad():
                chosen = torch.distributions.Categorical(logits=actor(shown))
                action = chosen.sample()
                logprobs[t], values[t] = chosen.log_prob(action), critic(shown)[:, 0]
            actions[t] = action
            now, reward, terminated, truncated, _ = environments.step(action.numpy())
            shown, rewards[t] = torch.from_numpy(now), torch.from_numpy(reward)
            over = np.logical_or(terminated, truncated)
            ends[t], cuts[t], after_end = (torch.from_numpy(f).float() for f in (terminated, truncated, over))
            returns += reward
            episodes.extend(returns[over])
            returns[over] = 0
        with torch.no_grad():
            lasts[-1], lasts[:-1] = critic(shown)[:, 0], values[1:]
            advantages, running = torch.zeros(steps, count), torch.zeros(count)
            for t in reversed(range(steps)):
                error = rewards[t] + 0.99 * lasts[t] * (1 - ends[t]) - values[t]
                running = error + 0.99 * 0.95 * (1 - ends[t]) * (1 - cuts[t]) * running
                advantages[t] = running
            targets = advantages + values
        valid = (1 - resets).flatten().bool()
        flat = [a.flatten(0, 1)[valid] for a in (observations, actions, logprobs, advantages, targets)]
        size = len(flat[0])
        for _ in range(epochs):
            for part in [slice(None)] if minibatches == 1 else torch.randperm(size).tensor_split(minibatches):
                seen, taken, old, advantage, target = (a[part] for a in flat)
                chosen = torch.distributions.Categorical(logits=actor(seen))
                ratio = (chosen.log_prob(taken) - old).exp()
                advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                surrogate = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
                value_loss = (critic(seen)[:, 0] - target).square().mean()
                loss = -surrogate + 0.25 * value_loss - 0.01 * chosen.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(parameters, 0.5)
                optimizer.step()
        total += size
        if learn:
            if len(episodes) == WINDOW and np.mean(episodes) >= TARGET:
                return {"seconds": time.perf_counter() - marks.began, "steps": total}
        else:
            marks.add(total)
            if marks.seen[-1][0] - marks.seen[0][0] > seconds:
                return marks.rates()


def sb3(seconds: float, count=64, steps=32, epochs=1, batch=2048, lr=2.5e-3, threads=1, seed=0, learn=False) -> dict:
    """Stable-Baselines3's PPO over plain environments."""
    import torch
    import torch._dynamo
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env

    torch.set_num_threads(threads)
    marks = Marks()

    class Watch(BaseCallback):
        def _on_step(self) -> bool:
            return True

        def _on_rollout_end(self) -> None:
            marks.add(self.num_timesteps)
            if learn:
                returns = [episode["r"] for episode in self.model.ep_info_buffer]
                self.found = len(returns) == WINDOW and sum(returns) / WINDOW >= TARGET
            else:
                self.found = marks.seen[-1][0] - marks.seen[0][0] > seconds
            if self.found:
                raise StopIteration

    model = PPO(
        "MlpPolicy", make_vec_env("CartPole-v1", count, seed=seed), n_steps=steps, batch_size=batch, n_epochs=epochs,
        learning_rate=lr, ent_coef=0.01, max_grad_norm=0.5, seed=seed, device="cpu",
    )  # fmt: skip
    with contextlib.suppress(StopIteration):
        model.learn(10**9, Watch())
    if learn:
        return {"seconds": marks.seen[-1][0] - marks.began, "steps": marks.seen[-1][2]}
    return marks.rates()


def make_one(name, cfg=None, env_config=None, render_mode=None):
    import gymnasium

    return gymnasium.make("CartPole-v1", render_mode=render_mode)


def make_many(name, cfg=None, env_config=None, render_mode=None):
    """Gymnasium 0.29's vectorised CartPole, which resets in the same step, as Sample Factory's batched mode takes it."""
    import gymnasium
    import numpy as np
    from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv

    class Many(gymnasium.Env):
        num_agents, is_multiagent = 1024, True

        def __init__(self) -> None:
            self.inner = CartPoleVectorEnv(self.num_agents)
            self.observation_space = gymnasium.spaces.Dict(obs=self.inner.single_observation_space)
            self.action_space = self.inner.single_action_space

        def reset(self, *, seed=None, options=None):
            return {"obs": self.inner.reset(seed=seed)[0]}, {}

        def step(self, actions):
            shown, rewards, terminated, truncated, _ = self.inner.step(np.asarray(actions, np.int64))
            return {"obs": shown}, rewards, np.asarray(terminated, bool), np.asarray(truncated, bool), {}

        def render(self):
            pass

    return Many()


def sample_factory(seconds: float, batched: bool, serial: bool = False) -> dict:
    """batched: its batched sampling over one vectorised environment of 1,024; else its default mode, 2 workers of 64 plain ones."""
    from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
    from sample_factory.envs.env_utils import register_env
    from sample_factory.train import make_runner

    with tempfile.TemporaryDirectory() as folder:
        words = [
            "--algo=APPO", "--env=bench", "--experiment=bench", f"--train_dir={folder}", "--device=cpu", "--use_rnn=False",
            "--encoder_mlp_layers", "64", "64", "--nonlinearity=tanh",
            "--save_every_sec=10000", "--normalize_input=False",
        ]  # fmt: skip
        if batched:
            words += [
                "--batched_sampling=True", "--num_workers=1", "--num_envs_per_worker=1", "--worker_num_splits=1", "--rollout=32",
                "--batch_size=32768", "--num_batches_per_epoch=1", "--num_epochs=1", "--env_gpu_actions=False",
                "--env_gpu_observations=False", f"--serial_mode={serial}", f"--async_rl={not serial}",
            ]  # fmt: skip
        else:
            words += ["--num_workers=2", "--num_envs_per_worker=64"]
        register_env("bench", make_many if batched else make_one)
        parser, _ = parse_sf_args(argv=words)
        marks = Marks()
        _, runner = make_runner(parse_full_cfg(parser, words))
        runner.init()
        over = threading.Event()

        def watch() -> None:
            while not over.wait(0.2):
                marks.add(float(runner.total_env_steps_since_resume or 0))

        def enough() -> bool:
            began = next((mark[0] for mark in marks.seen if mark[2]), None)
            return began is not None and time.perf_counter() - began > seconds

        runner._should_end_training = enough  # its own train_for_seconds never ends: nothing counts the seconds

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            runner.run()
        finally:
            over.set()
            thread.join()
        # Steps are counted when a batch has been trained on; after the last one nothing comes while parts are taken down.
        final = max(mark[2] for mark in marks.seen)
        marks.seen = marks.seen[: next(i for i, mark in enumerate(marks.seen) if mark[2] == final) + 1]
        began = next(mark[0] for mark in marks.seen if mark[2])
        marks.seen = [mark for mark in marks.seen if mark[0] >= began]
        return marks.rates()


PROGRAMS: dict[str, Callable[..., dict]] = {
    "by_hand": by_hand,
    "sb3": sb3,
    "sample_factory": sample_factory,
}

if __name__ == "__main__":
    print(json.dumps(PROGRAMS[sys.argv[1]](**json.loads(sys.argv[2]))))
