"""One task's lease into a scored group: all members at once, one turn or many, each scored as soon as it ends.

A member survives failures (retries) and interruptions (the partial policy). The group closes when every member has
ended, or at its timeout if enough are scored; what still runs is then aborted.
"""

from __future__ import annotations

import asyncio
import hashlib
import struct
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from headrace.errors import PartFailed, RequestRefused, RolloutDropped, RolloutRecycled
from headrace.protocols import Environment, Lease, Rewarder, RewardRequest, RolloutTools, TextEngine
from headrace.rollout.config import GroupConfig
from headrace.rollout.partial import GroupRemainder, MemberProgress, PartialPolicy
from headrace.signals import Signal
from headrace.types import (
    NO_VERSION,
    Array,
    Episode,
    GenerateRequest,
    Generation,
    Group,
    RequestKey,
    SamplingMask,
    SamplingParams,
    Score,
    TokenSample,
)


class TextEnvironment(Environment, Protocol):
    """An environment that can also show its text, for reward functions and for people."""

    def prompt_text(self, task: Any) -> Any: ...

    def decode(self, token_ids: Any) -> str: ...


@dataclass(slots=True)
class Transcript:
    """The tokens of one episode as they come, piece by piece: prompt and tool tokens are not trained on, sampled ones are."""

    token_ids: list[Array] = field(default_factory=list)
    sampled: list[tuple[int, Generation]] = field(default_factory=list)
    """Generations, each with the place of its tokens in `token_ids`."""

    def add_prompt(self, token_ids: Any) -> None:
        self.token_ids.append(np.asarray(token_ids, np.int64))

    def add_generation(self, generation: Generation) -> None:
        self.sampled.append((sum(map(len, self.token_ids)), generation))
        self.token_ids.append(generation.token_ids)

    def prompt(self) -> Array:
        """[P] all tokens so far: what the next generation goes on from."""
        return self.token_ids[0] if len(self.token_ids) == 1 else np.concatenate(self.token_ids)

    def sample(self, sample_id: str) -> TokenSample:
        token_ids = np.concatenate(self.token_ids, dtype=np.int64)
        loss_mask, logprobs = np.zeros(len(token_ids), np.int8), np.zeros(len(token_ids), np.float32)
        versions = np.full(len(token_ids), NO_VERSION, np.int64)
        for start, one in self.sampled:
            span = slice(start, start + len(one.token_ids))
            loss_mask[span] = 1
            logprobs[span] = one.logprobs
            versions[span] = one.policy_versions
        last = self.sampled[-1][1]
        masks = [one.sampling_mask for _, one in self.sampled]
        return TokenSample(
            sample_id=sample_id,
            token_ids=token_ids,
            loss_mask=loss_mask,
            behavior_logprobs=logprobs,
            policy_versions=versions,
            sampling=last.sampling,
            finish_reason=last.finish_reason,
            # Of the sampled tokens, all turns together; what one turn lacks, the whole has not.
            sampling_mask=joined_masks(masks) if all(one is not None for one in masks) else None,
            expert_routing=self._routes() if last.expert_routing is not None else None,
        )

    def _routes(self) -> Array | None:
        """[L - 1, layers, top_k] of all that was fed in: a turn adds what its prompt has beyond the turns before, and its own."""
        pieces: list[Array] = []
        known = 0
        for _, one in self.sampled:
            if one.expert_routing is None or one.prompt_routing is None:
                return None
            pieces += [one.prompt_routing[known:], one.expert_routing]
            known = len(one.prompt_routing) + len(one.expert_routing)
        return np.concatenate(pieces)


def joined_masks(masks: list[SamplingMask]) -> SamplingMask:
    """The supports of several turns, one after another."""
    lengths = np.concatenate([np.diff(mask.offsets) for mask in masks])
    return SamplingMask(
        token_ids=np.concatenate([mask.token_ids for mask in masks]), offsets=np.concatenate([[0], np.cumsum(lengths)])
    )


class _Cut(Exception):
    """A member's generation was aborted and its lease is not kept."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation


class _Restart(Exception):
    """The whole group starts again from its prompt."""


class TokenRollout:
    """A rollout function for language tasks: ``await rollout(lease) -> Group``.

    open_time: seconds on a clock that stands while dispatch is held by a weight sync
    scoring: counts scores in progress, for an interruption that waits for them
    """

    def __init__(
        self,
        engine: TextEngine,
        environment: Callable[[], TextEnvironment],
        rewarder: Rewarder | None,
        *,
        sampling: SamplingParams,
        group: GroupConfig,
        partial: PartialPolicy,
        open_time: Callable[[], float],
        seed: int = 0,
        incarnation: int = 0,
        function: Callable[..., Any] | None = None,
        tokenizer: Any = None,
    ) -> None:
        self.engine, self.environment, self.rewarder = engine, environment, rewarder
        self.sampling, self.group, self.partial = sampling, group, partial
        self.open_time, self.seed, self.incarnation = open_time, seed, incarnation
        self.function, self.tokenizer = function, tokenizer
        self.min_complete = group.min_complete or group.size
        self.scoring = 0
        self.retries = 0
        self.refused = 0

    async def __call__(self, lease: Lease) -> Group:
        """The scored group. Raises `RolloutDropped` or `RolloutRecycled` when there will be none."""
        if self.function is not None:
            return await self._user_group(lease)
        done: dict[int, MemberProgress] = dict(lease.remainder.members) if lease.remainder else {}
        restarts = 0
        while True:
            try:
                return await self._attempt(lease, done, restarts)
            except _Restart:
                done, restarts = {}, restarts + 1

    # ------------------------------------------------------------------------------------------------- the group

    async def _attempt(self, lease: Lease, done: dict[int, MemberProgress], restarts: int) -> Group:
        members = {
            asyncio.create_task(self._member(lease, index, done.get(index), restarts)): index
            for index in range(self.group.size)
        }
        failures: dict[int, PartFailed | RolloutDropped] = {}
        try:
            await self._collect(members, done, failures)
        finally:
            if running := [task for task in members if not task.done()]:
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)
            for task in members:
                task.cancelled() or task.exception()  # seen, whether it was wanted or not
        if any(progress.generation is not None for progress in done.values()):
            raise RolloutRecycled(GroupRemainder(done))
        scored = {index: progress for index, progress in sorted(done.items()) if progress.score is not None}
        if len(scored) < self.min_complete:
            ended = f"{len(scored)} of {self.group.size} members of {lease.lease_id} ended"
            if not failures:
                raise RolloutDropped("timeout", f"{ended} within {self.group.timeout_s:g} s")
            first = failures[min(failures)]
            raise RolloutDropped(_reason(first), f"{_detail(first)}; {ended}")
        return await self._close(lease, scored)

    async def _collect(
        self,
        members: dict[asyncio.Task[MemberProgress], int],
        done: dict[int, MemberProgress],
        failures: dict[int, Any],
    ) -> None:
        """Wait for members until all have ended or the time is over; afterwards `done` and `failures` say what came."""
        ended: deque[asyncio.Task[MemberProgress]] = deque()
        changed = Signal()

        def end(task: asyncio.Task[MemberProgress]) -> None:
            ended.append(task)
            changed.fire()

        loop = asyncio.get_running_loop()
        deadline = self.open_time() + self.group.timeout_s

        def left() -> float:
            # A rest that is lost when it is added to the clock would be waited for again and again.
            return max(0.0, deadline - self.open_time() - 1e-6)

        def ring() -> None:
            """One timer a group; the clock may have stood since it was set."""
            nonlocal timer
            if rest := left():
                timer = loop.call_later(max(rest, 1e-3), ring)
            else:
                changed.fire()

        for task in members:
            task.add_done_callback(end)
        timer = loop.call_later(self.group.timeout_s, ring)
        waiting = len(members)
        try:
            while waiting:
                while ended:
                    waiting -= 1
                    self._note(ended.popleft(), members, done, failures)
                    if self.group.size - len(failures) < self.min_complete:
                        return
                if not waiting or not left():
                    return
                await changed.wait()
        finally:
            timer.cancel()

    def _note(
        self,
        task: asyncio.Task[MemberProgress],
        members: dict[asyncio.Task[MemberProgress], int],
        done: dict[int, MemberProgress],
        failures: dict[int, Any],
    ) -> None:
        """Put down how one member ended."""
        index = members[task]
        try:
            done[index] = task.result()
        except _Cut as cut:
            if not self.partial.keep_prefix:
                raise RolloutDropped("interrupted", "cut short by a weight sync") from None
            done[index] = MemberProgress(generation=cut.generation)
        except (PartFailed, RolloutDropped) as error:
            failures[index] = error

    async def _close(self, lease: Lease, scored: dict[int, MemberProgress]) -> Group:
        """The group of what completed; a rewarder of whole groups is asked here."""
        episodes = tuple(progress.episode for progress in scored.values() if progress.episode is not None)
        scores = tuple(progress.score for progress in scored.values() if progress.score is not None)
        if self.rewarder is not None and self.rewarder.unit == "group":
            environment = self.environment()
            scores = tuple(await self._score([self._request(lease, episode, environment) for episode in episodes]))
        if all(score.reward is None for score in scores):
            errors = sorted({score.error for score in scores if score.error})
            raise RolloutDropped("unscored", "; ".join(errors) or "every score is empty")
        return Group(
            group_id=lease.lease_id,
            task=lease.task,
            expected_size=self.group.size,
            episodes=episodes,
            scores=scores,
        )

    # ------------------------------------------------------------------------------------------------- one member

    async def _member(self, lease: Lease, index: int, before: MemberProgress | None, restarts: int) -> MemberProgress:
        """One episode and its score; finished work of an earlier lease is not done again."""
        environment = self.environment()
        episode = before.episode if before else None
        score = before.score if before else None
        if episode is None:
            prefix = before.generation if before else None
            episode = await self._episode(lease, index, prefix, environment, restarts)
        if score is None:
            if self.rewarder is None or self.rewarder.unit == "group":
                score = Score(reward=0.0)
            else:
                score = (await self._score([self._request(lease, episode, environment)]))[0]
        return MemberProgress(episode=episode, score=score)

    async def _episode(
        self, lease: Lease, index: int, prefix: Generation | None, environment: TextEnvironment, restarts: int
    ) -> Episode:
        transcript = Transcript()
        turn = await environment.reset(lease.task)
        number = 0
        try:
            while True:
                transcript.add_prompt(turn.prompt_ids)
                generation = await self._turn(lease, index, number, transcript.prompt(), prefix, restarts)
                transcript.add_generation(generation)
                turn = await environment.step(generation)
                if turn.done:
                    break
                number, prefix = number + 1, None
        finally:
            await environment.close()
        episode_id = f"{lease.lease_id}/{index}"
        return Episode(episode_id=episode_id, samples=(transcript.sample(episode_id),))

    async def _turn(
        self,
        lease: Lease,
        index: int,
        turn: int,
        prompt: Array,
        prefix: Generation | None,
        restarts: int,
        *,
        sampling: SamplingParams | None = None,
        seed: int | None = None,
        ask: Callable[[GenerateRequest], Awaitable[Generation]] | None = None,
    ) -> Generation:
        """One generation through failures and interruptions, within one budget of tokens. `sampling`, `seed` (which goes before
        the sampling's own) and `ask` stand in for the run's, for the member's and for `engine.generate`."""
        ask = ask or self.engine.generate
        sampling = sampling or self.sampling
        seed = member_seed(self.seed, lease.index, index, turn) if seed is None else seed
        attempt, failed = restarts, 0
        while True:
            request = GenerateRequest(
                key=RequestKey(
                    lease_id=lease.lease_id, member=index, turn=turn, attempt=attempt, incarnation=self.incarnation
                ),
                group_id=lease.lease_id,
                prompt_ids=prompt,
                sampling=sampling,
                seed=seed,
                prefix=prefix,
                keep_kv=self.partial.keep_kv,
                kv_handle=prefix.kv_handle if prefix is not None and self.partial.keep_kv else None,
            )
            attempt += 1
            try:
                generation = await ask(request)
            except RequestRefused as error:
                self.refused += 1
                raise RolloutDropped("refused", str(error)) from None
            except PartFailed as error:
                failed += 1
                self.retries += 1
                if failed > self.group.retries:
                    raise RolloutDropped("retries", str(error)) from None
                continue
            if generation.finish_reason != "abort":
                return generation
            if not self.partial.keep_lease:
                # A later turn's environment cannot travel to another lease, so its work is not kept.
                raise _Cut(generation) if turn == 0 else RolloutDropped("interrupted", "cut short in a later turn")
            if not self.partial.keep_prefix:
                raise _Restart
            prefix = generation

    # -------------------------------------------------------------------------------------------------- rewards

    def _request(self, lease: Lease, episode: Episode, environment: TextEnvironment) -> RewardRequest:
        sample = episode.samples[-1]
        sampled = sample.token_ids[sample.loss_mask.astype(bool)]
        return RewardRequest(
            task=lease.task,
            prompt=lease.task.payload.get("prompt") or environment.prompt_text(lease.task),
            completion=environment.decode(sampled),
            token_ids=tuple(sampled.tolist()),
            finish_reason=sample.finish_reason,
        )

    async def _score(self, requests: list[RewardRequest]) -> list[Score]:
        assert self.rewarder is not None
        self.scoring += 1
        try:
            return await self.rewarder.score(requests)
        finally:
            self.scoring -= 1

    # ------------------------------------------------------------------------------------------- a user's rollout

    async def _user_group(self, lease: Lease) -> Group:
        """`rollout.function` in place of generation; unscored episodes go to the reward plane."""
        tools = RolloutTools(
            lease=lease,
            engine=self.engine,
            rewarder=self.rewarder,
            tokenizer=self.tokenizer,
            group_size=self.group.size,
            sampling=replace(self.sampling, seed=member_seed(self.seed, lease.index, 0, 0)),
        )
        assert self.function is not None
        group = await self.function(lease.task, tools)
        if not isinstance(group, Group):
            raise RolloutDropped("function", f"rollout.function returned {type(group).__name__}, a Group is wanted")
        if not group.episodes:
            raise RolloutDropped("function", "rollout.function returned a group without episodes")
        if not group.scores and self.rewarder is not None:
            environment = self.environment()
            requests = [self._request(lease, episode, environment) for episode in group.episodes]
            group = replace(group, scores=tuple(await self._score(requests)))
        if len(group.scores) != len(group.episodes):
            raise RolloutDropped("function", f"{len(group.episodes)} episodes came with {len(group.scores)} scores")
        return replace(group, group_id=lease.lease_id)


def member_seed(seed: int, index: int, member: int, turn: int) -> int:
    """The sampling seed of one generation: the same however the flow scheduled it, and across a resume."""
    digest = hashlib.blake2b(struct.pack("<4q", seed, index, member, turn), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _reason(failure: Exception) -> str:
    return failure.reason if isinstance(failure, RolloutDropped) else "failed"


def _detail(failure: Exception) -> str:
    """What happened, in a line: an error from another process carries its traceback below the first."""
    return (getattr(failure, "detail", "") or str(failure)).partition("\n")[0]
