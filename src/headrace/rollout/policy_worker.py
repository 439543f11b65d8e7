"""Turns observations that wait in shared memory into actions, whole batches at a time, and filled slots into trajectories.

    rollout workers (step only)          arena: slots x [steps + 1, environments, ...]         policy worker
      slot 0 | slot 1   ──reply byte──▶   observations, rewards, flags                ──▶  takes all slots that wait,
        (one is stepped while             actions                        ◀──────────────   one forward pass for all
        the other one waits)             ◀──command byte──

Only slot numbers travel in the pipes. A slot begins a trajectory when a request (a lease) is there for it, so that the
buffer's room holds the environments back. Petrenko et al. 2020, arXiv:2006.11751.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch

from headrace.errors import PartFailed
from headrace.policies.config import PolicyConfig
from headrace.protocols import TrajectoryRequest, WeightChannel, WorkerContext
from headrace.rollout import arena
from headrace.rollout.acting import Acting, mix_seed, refuse_what_is_not_finite
from headrace.rollout.config import EnvConfig
from headrace.rollout.engines.policy_network import PolicyNetworkEngine
from headrace.rollout.environments.gymnasium_vector import VectorEnvironment
from headrace.rollout.rollout_worker import ERROR_BYTES, LENGTH, WorkerPlan
from headrace.types import Episodes, Trajectory

CLOSE_S = 2.0
MOST_DEATHS = 3
"""So many deaths of a rollout worker before its first step, one after the other, are the environment's fault."""


def build_policy_worker(
    context: WorkerContext, env: EnvConfig, policy: PolicyConfig, channel: WeightChannel | None, seed: int
) -> PolicyWorker:
    """A policy worker and its rollout workers. The name's last part is the policy worker's number."""
    if context.resources.threads:
        torch.set_num_threads(context.resources.threads)
    return PolicyWorker(context, env, policy, channel, seed)


@dataclass(slots=True, eq=False)
class Slot:
    """`count` environments of one rollout worker: `t` steps of the present trajectory are done.

    waits: its observations lie there and nothing is being stepped
    """

    index: int
    own: int
    t: int = 0
    waits: bool = False
    request: TrajectoryRequest | None = None
    answer: asyncio.Future[Trajectory] | None = None
    initial_state: dict[str, np.ndarray] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Worker:
    """A rollout worker's process. sent_at: when its oldest unanswered command was sent; outstanding: how many there are."""

    row: int
    slots: list[Slot]
    process: subprocess.Popen[bytes] | None = None
    commands: int = -1
    replies: int = -1
    sent_at: float = 0.0
    outstanding: int = 0
    deaths: int = 0


class PolicyWorker(Acting):
    """An engine over `env.workers` processes with `env.splits` slots each. A worker that dies, or whose step takes longer than
    `env.step_timeout_s`, fails the trajectories of its slots and is replaced."""

    def __init__(
        self, context: WorkerContext, env: EnvConfig, policy: PolicyConfig, channel: WeightChannel | None, seed: int
    ) -> None:
        self.env, self.index = env, int(context.name.rpartition("-")[2])
        self.seed = mix_seed(seed, 1000 + self.index)
        spaces, in_place = _probe(env)
        super().__init__(context, env, PolicyNetworkEngine(spaces, policy, channel, mix_seed(seed, self.index)))
        slots, count, outputs = env.workers * env.splits, env.count, self.engine.distribution.size
        self.layout = _layout(self.engine, env, slots, in_place)
        self.descriptor, self.arrays = arena.create(self.layout)
        self.shown, self.final = arena.take(self.arrays, "shown:"), arena.take(self.arrays, "final:")
        self.in_place = in_place
        box = spaces.action.kind == "box"
        shape = (len(spaces.action.low),) if box else spaces.action.shape
        self.actions = np.zeros((slots, env.steps, count, *shape), np.float32 if box else np.int64)
        self.outputs = np.zeros((slots, env.steps, count, outputs), np.float32)
        self.versions = np.zeros((slots, env.steps, count), np.int32)
        states = self.engine.network.initial_state(slots * count)
        self.states = {name: state.view(slots, count, -1) for name, state in states.items()}
        self.workers = [
            Worker(row, [Slot(row * env.splits + own, own) for own in range(env.splits)]) for row in range(env.workers)
        ]
        self.starts = 0
        self._queue: deque[tuple[TrajectoryRequest, asyncio.Future[Trajectory]]] = deque()
        self._inferring: asyncio.Handle | None = None
        self._watching: asyncio.TimerHandle | None = None

    # ---------------------------------------------------------------------------------------------------- requests

    async def generate(self, request: TrajectoryRequest) -> Trajectory | Episodes:
        """One trajectory, from whichever slot is free first, or whole episodes. Raises `PartFailed`."""
        if request.episodes is not None:
            return await self.play(request)
        answer: asyncio.Future[Trajectory] = asyncio.get_running_loop().create_future()
        self._requests[request.request_id] = 0
        self._queue.append((request, answer))
        for worker in self.workers:
            if worker.process is None:
                self._start(worker)
        if self._watching is None:
            self._watch()
        self._infer_soon()
        try:
            return await answer
        finally:
            self._requests.pop(request.request_id, None)
            self._aborted.discard(request.request_id)

    async def abort(self, request_id: str, keep_kv: bool = False) -> None:
        await super().abort(request_id)
        for request, answer in list(self._queue):
            if request.request_id == request_id:
                self._queue.remove((request, answer))
                _fail(answer, PartFailed(f"{request_id} was aborted"))

    # --------------------------------------------------------------------------------------------------- inference

    def _infer_soon(self) -> None:
        """Once all replies that have come by now are taken in, so that they share a forward pass."""
        if self._inferring is None:
            self._inferring = asyncio.get_running_loop().call_soon(self._infer)

    def _infer(self) -> None:
        """Actions for every slot that waits and has a trajectory to make."""
        self._inferring = None
        began = time.monotonic_ns()
        asked = [(worker, slot) for worker in self.workers for slot in worker.slots if slot.waits and self._claim(slot)]
        if not asked:
            return
        slots = np.array([slot.index for _, slot in asked])
        times = np.array([slot.t for _, slot in asked])
        rows, count = len(asked), self.env.count
        leaves = {name: torch.from_numpy(shown[slots, times]).flatten(0, 1) for name, shown in self.shown.items()}
        state = {name: states[slots].flatten(0, 1) for name, states in self.states.items()}
        noise = self.engine.noise(1, rows * count)[0]
        actions, outputs, state = self.engine.step(leaves, state, noise)
        for name, new in state.items():
            self.states[name][slots] = new.view(rows, count, -1)
        chosen = actions.numpy()
        self.actions[slots, times] = chosen.reshape(rows, count, *chosen.shape[1:])
        self.outputs[slots, times] = outputs.numpy().reshape(rows, count, -1)
        self.versions[slots, times] = self.engine.version
        given = self.engine.distribution.to_environment(chosen)
        self.arrays["given"][slots] = given.reshape(rows, count, *given.shape[1:])
        for worker, slot in asked:
            self._send(worker, slot)
        self._steps += rows * count
        self.record_work(began)

    def _claim(self, slot: Slot) -> bool:
        """Whether the slot is in a trajectory, or may begin one."""
        if slot.request is None and self._queue:
            slot.request, slot.answer = self._queue.popleft()
            slot.initial_state = {name: state[slot.index].numpy().copy() for name, state in self.states.items()}
        return slot.request is not None

    def _send(self, worker: Worker, slot: Slot) -> None:
        slot.waits = False
        if not worker.outstanding:
            worker.sent_at = time.monotonic()
        worker.outstanding += 1
        with contextlib.suppress(OSError):  # it is gone: the end of its replies says so
            os.write(worker.commands, bytes([slot.own]))

    # ---------------------------------------------------------------------------------------------------- replies

    def _on_reply(self, worker: Worker) -> None:
        replies = os.read(worker.replies, 64)
        if not replies:
            self._on_death(worker)
            return
        for own in replies:
            slot = worker.slots[own]
            if worker.outstanding:  # the first reply of each slot answers nothing: it shows the first observations
                worker.outstanding -= 1
                worker.sent_at = time.monotonic()
            if slot.request is not None:
                worker.deaths = 0
                self._stepped(slot)
            slot.waits = True
        self._infer_soon()

    def _stepped(self, slot: Slot) -> None:
        assert slot.request is not None
        s, t = slot.index, slot.t
        if self.states:
            arrays = self.arrays
            done = arrays["terminated"][s, t] | arrays["truncated"][s, t]
            begins = done if self.in_place else ~arrays["valid"][s, t]
            for state in self.states.values():
                state[s][torch.from_numpy(begins)] = 0.0
        slot.t = t + 1
        self._requests[slot.request.request_id] = slot.t
        if slot.t == self.env.steps:
            self._complete(slot)

    def _complete(self, slot: Slot) -> None:
        """Copy the trajectory out, so that the slot can go on, and answer."""
        assert slot.request is not None and slot.answer is not None
        request, answer, slot.request, slot.answer = slot.request, slot.answer, None, None
        try:
            if request.request_id in self._aborted:
                raise PartFailed(f"{request.request_id} was aborted")
            trajectory = self._trajectory(request, slot)
            refuse_what_is_not_finite(self.env.id, trajectory)
            if not answer.done():
                answer.set_result(trajectory)
        except PartFailed as error:
            _fail(answer, error)
        for shown in self.shown.values():
            shown[slot.index, 0] = shown[slot.index, -1]
        slot.t = 0

    def _trajectory(self, request: TrajectoryRequest, slot: Slot) -> Trajectory:
        s, arrays = slot.index, self.arrays
        terminated, truncated = arrays["terminated"][s].copy(), arrays["truncated"][s].copy()
        done = terminated | truncated
        ended = np.argwhere(done) if self.in_place else np.zeros((0, 2), np.int64)
        actions = self.actions[s].copy()
        logprobs = self.engine.distribution.logprobs(torch.from_numpy(self.outputs[s]), torch.from_numpy(actions))
        clip, rewards = self.env.reward_clip, arrays["rewards"][s]
        return Trajectory(
            sample_id=request.key.lease_id,
            observations={name: shown[s].copy() for name, shown in self.shown.items()},
            actions=actions,
            rewards=np.clip(rewards, -clip, clip) if clip else rewards.copy(),
            terminated=terminated,
            truncated=truncated,
            valid=arrays["valid"][s].copy(),
            behavior_logprobs=logprobs.numpy(),
            policy_versions=self.versions[s].copy(),
            ended=ended,
            final_observations={name: leaf[s][tuple(ended.T)] for name, leaf in self.final.items()},
            episode_returns=arrays["returns"][s][done],
            episode_lengths=arrays["lengths"][s][done],
            initial_state=slot.initial_state or None,
        )

    # -------------------------------------------------------------------------------------------- rollout workers

    def _start(self, worker: Worker) -> None:
        """A fresh process for a worker; its slots wait for their first observations."""
        self.starts += 1
        theirs, worker.commands = os.pipe()
        worker.replies, theirs_too = os.pipe()
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from headrace.rollout.rollout_worker import main; "
            f"main({theirs}, {theirs_too}, {self.descriptor})"
        )
        worker.process = subprocess.Popen(
            [sys.executable, "-c", code, f"headrace:rollout-{self.index}-{worker.row}"],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs, theirs_too, self.descriptor),
        )
        os.close(theirs)
        os.close(theirs_too)
        self.arrays["error"][worker.row] = 0
        plan = pickle.dumps(
            WorkerPlan(
                env=self.env,
                layout=self.layout,
                slots=tuple(slot.index for slot in worker.slots),
                row=worker.row,
                seed=mix_seed(self.seed, self.starts),
            )
        )
        os.write(worker.commands, LENGTH.pack(len(plan)) + plan)
        worker.outstanding, worker.sent_at = len(worker.slots), time.monotonic()
        asyncio.get_running_loop().add_reader(worker.replies, self._on_reply, worker)

    def _on_death(self, worker: Worker) -> None:
        """Fail what its slots were making, and start it anew, unless it never gets as far as a step."""
        error = self._words(worker)
        self._end(worker)
        worker.deaths += 1
        for slot in worker.slots:
            if slot.answer is not None:
                _fail(slot.answer, error)
            for state in self.states.values():
                state[slot.index] = 0.0
            slot.t, slot.waits, slot.request, slot.answer = 0, False, None, None
        if worker.deaths >= MOST_DEATHS:
            worker.deaths = 0
            while self._queue:
                _fail(self._queue.popleft()[1], error)
        elif self._requests:
            self._start(worker)

    def _words(self, worker: Worker) -> PartFailed:
        text = self.arrays["error"][worker.row].tobytes().rstrip(b"\0").decode(errors="replace")
        name = f"rollout worker {self.index}-{worker.row}"
        return PartFailed(f"{name} of {self.env.id} failed: {text}" if text else f"{name} is gone")

    def _end(self, worker: Worker) -> None:
        if worker.process is None:
            return
        asyncio.get_running_loop().remove_reader(worker.replies)
        os.close(worker.replies)
        os.close(worker.commands)
        worker.process.kill()
        worker.process.wait()
        worker.process = None

    def _watch(self) -> None:
        """Kill a worker whose step, or start, takes too long: the end of its replies does the rest."""
        loop, limit = asyncio.get_running_loop(), self.env.step_timeout_s
        self._watching = loop.call_later(min(1.0, limit / 4), self._watch)
        for worker in self.workers:
            late = worker.outstanding and time.monotonic() - worker.sent_at > limit
            if worker.process is not None and late:
                text = f"no step within {limit:g} s (env.step_timeout_s)".encode()
                self.arrays["error"][worker.row, : len(text)] = np.frombuffer(text, np.uint8)
                worker.process.kill()
                worker.outstanding = 0

    async def close(self) -> None:
        await super().close()
        if self._watching is not None:
            self._watching.cancel()
        for worker in self.workers:
            self._end(worker)
        os.close(self.descriptor)


def _probe(env: EnvConfig) -> tuple[object, bool]:
    """What the environments show and take, and whether they are reset in the step that ends an episode."""
    probe = VectorEnvironment(env)
    probe.close()
    return probe.spaces, probe.mode != "next_step"


def _layout(engine: PolicyNetworkEngine, env: EnvConfig, slots: int, in_place: bool) -> arena.Layout:
    """Arrays of all slots; final observations only where a row does not show them."""
    steps, count, spaces = env.steps, env.count, engine.spaces
    box = spaces.action.kind == "box"
    given = (np.dtype(spaces.action.dtype) if box else np.dtype(np.int64)).str
    layout: arena.Layout = {
        f"shown:{leaf.name}": ((slots, steps + 1, count, *leaf.shape), leaf.dtype) for leaf in spaces.leaves
    }
    if in_place:
        layout |= {f"final:{leaf.name}": ((slots, steps, count, *leaf.shape), leaf.dtype) for leaf in spaces.leaves}
    layout |= {name: ((slots, steps, count), "bool") for name in ("terminated", "truncated", "valid")}
    layout |= {name: ((slots, steps, count), "float32") for name in ("rewards", "returns")}
    return layout | {
        "lengths": ((slots, steps, count), "int64"),
        "given": ((slots, count, *spaces.action.shape), given),
        "error": ((env.workers, ERROR_BYTES), "uint8"),
    }


def _fail(answer: asyncio.Future[Trajectory], error: PartFailed) -> None:
    if not answer.done():
        answer.set_exception(error)
