"""Turns actions in shared memory into the observations, rewards and flags that follow: a process that only steps.

It has no policy and no torch. Its policy worker writes one byte, the number of a slot of its own, when that slot's actions are
there; it writes the byte back when the slot's environments have been stepped. Everything else lies in the arena.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import struct
import sys
import traceback
from dataclasses import dataclass

import numpy as np

from headrace.rollout import arena
from headrace.rollout.config import EnvConfig
from headrace.rollout.environments.gymnasium_vector import Leaves, VectorEnvironment
from headrace.types import Array

LENGTH = struct.Struct("<Q")
ERROR_BYTES = 2000
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """What a rollout worker is told first. slots: numbers of its slots in the arena; row: its own row of `error`."""

    env: EnvConfig
    layout: arena.Layout
    slots: tuple[int, ...]
    row: int
    seed: int


def main(commands: int, replies: int, descriptor: int) -> None:
    """Entry point of the process: returns when the policy worker closes its end, or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    (length,) = LENGTH.unpack(_read(commands, LENGTH.size))
    plan: WorkerPlan = pickle.loads(_read(commands, length))  # from our own parent, through a pipe that it alone holds
    arrays = arena.attach(descriptor, plan.layout)
    try:
        RolloutWorker(plan, arrays).serve(commands, replies)
    except BaseException as error:
        text = traceback.format_exception_only(error)[-1].strip().encode()[:ERROR_BYTES]
        arrays["error"][plan.row, : len(text)] = np.frombuffer(text, np.uint8)
        os._exit(1)
    os._exit(0)


class RolloutWorker:
    """Environments in several slots. While the policy worker thinks about one slot, another is stepped."""

    def __init__(self, plan: WorkerPlan, arrays: dict[str, Array]) -> None:
        self.plan, self.arrays = plan, arrays
        self.shown, self.final = arena.take(arrays, "shown:"), arena.take(arrays, "final:")
        self.environments = [VectorEnvironment(plan.env, seed=plan.seed, index=slot) for slot in plan.slots]
        self.t = [0] * len(plan.slots)
        self.returns = np.zeros((len(plan.slots), plan.env.count), np.float32)
        self.lengths = np.zeros((len(plan.slots), plan.env.count), np.int64)

    def serve(self, commands: int, replies: int) -> None:
        for own, environment in enumerate(self.environments):
            self._show(self.plan.slots[own], 0, environment.reset())
            os.write(replies, bytes([own]))
        while waiting := os.read(commands, 64):
            for own in waiting:
                self.step(own)
                os.write(replies, bytes([own]))

    def step(self, own: int) -> None:
        """Step the environments of one slot with the actions that lie in it; row t+1 shows what came."""
        slot, t, arrays = self.plan.slots[own], self.t[own], self.arrays
        result = self.environments[own].step(arrays["given"][slot])
        self._show(slot, t + 1, result.observations)
        arrays["rewards"][slot, t] = result.rewards
        arrays["terminated"][slot, t], arrays["truncated"][slot, t] = result.terminated, result.truncated
        arrays["valid"][slot, t] = result.valid
        if result.ended.size:
            for name, leaf in result.final_observations.items():
                self.final[name][slot, t, result.ended] = leaf
        self.returns[own] += result.rewards
        self.lengths[own] += result.valid
        done = result.terminated | result.truncated
        if done.any():
            arrays["returns"][slot, t], arrays["lengths"][slot, t] = self.returns[own], self.lengths[own]
            self.returns[own][done], self.lengths[own][done] = 0.0, 0
        self.t[own] = (t + 1) % self.plan.env.steps

    def _show(self, slot: int, t: int, observations: Leaves) -> None:
        for name, leaf in observations.items():
            self.shown[name][slot, t] = leaf


def _read(descriptor: int, size: int) -> bytes:
    """Exactly so many bytes. The parent is gone when there are fewer."""
    parts = b""
    while len(parts) < size:
        part = os.read(descriptor, size - len(parts))
        if not part:
            os._exit(1)
        parts += part
    return parts
