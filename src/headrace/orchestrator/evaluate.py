"""Held-out tasks, or episodes of a control policy, into two figures: how good are greedy answers or actions, and sampled
ones, under the weights that are live."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from headrace.errors import PartFailed
from headrace.protocols import EpisodesWanted, Rewarder, RewardRequest, TextEngine, TrajectoryRequest
from headrace.rollout.token_rollout import TextEnvironment, member_seed
from headrace.types import Episodes, GenerateRequest, Generation, RequestKey, SamplingParams, Task

GREEDY, SAMPLED = "greedy", "sampled"


class Evaluation(Protocol):
    """What a run is judged by while training stands."""

    async def __call__(self) -> dict[str, float]:
        """Mean reward by mode, and `count`."""
        ...

    def words(self, result: dict[str, float]) -> str:
        """The result in a line."""
        ...


class Evaluator:
    """Scores one answer a task by the first part of the reward, so that shaping terms do not count. Its requests carry the lease id "evaluation": they train nothing and hold no lease."""

    def __init__(
        self,
        tasks: list[Task],
        engine: TextEngine,
        environment: TextEnvironment,
        rewarder: Rewarder,
        sampling: SamplingParams,
        *,
        sampled: bool,
        seed: int,
    ) -> None:
        self.tasks, self.engine, self.environment, self.rewarder = tasks, engine, environment, rewarder
        self.seed, self.calls = seed, 0
        self.modes = {GREEDY: replace(sampling, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)}
        if sampled:
            self.modes[SAMPLED] = sampling

    async def __call__(self) -> dict[str, float]:
        """Mean reward by mode, over the tasks that could be answered and scored; and their count."""
        result: dict[str, float] = {}
        for mode, sampling in self.modes.items():
            self.calls += 1
            rewards = await asyncio.gather(*(self._one(index, task, sampling) for index, task in enumerate(self.tasks)))
            scored = [reward for reward in rewards if reward is not None]
            result[mode] = float(np.mean(scored)) if scored else 0.0
            result["count"] = float(len(scored))
        return result

    def words(self, result: dict[str, float]) -> str:
        figures = ", ".join(f"{name} {value:.1%}" for name, value in result.items() if name != "count")
        return f"{result.get('count', 0):.0f} tasks: {figures}"

    async def _one(self, index: int, task: Task, sampling: SamplingParams) -> float | None:
        turn = await self.environment.reset(task)
        request = GenerateRequest(
            key=RequestKey(lease_id="evaluation", member=index, attempt=self.calls),
            group_id=f"evaluation/{index}",
            prompt_ids=np.array(turn.prompt_ids, np.int64),
            sampling=replace(sampling, seed=member_seed(self.seed, index, 0, 0)),
        )
        try:
            generation: Generation = await self.engine.generate(request)
        except PartFailed:
            return None
        ids = generation.token_ids
        score = await self.rewarder.score(
            [
                RewardRequest(
                    task=task,
                    prompt=task.payload.get("prompt") or self.environment.prompt_text(task),
                    completion=self.environment.decode(ids),
                    token_ids=tuple(ids.tolist()),
                    finish_reason=generation.finish_reason,
                )
            ]
        )
        return next(iter(score[0].parts.values()), score[0].reward)


class EpisodeEvaluator:
    """Mean return of whole episodes, the same starts each time, in environments that train nothing.

    engine: a dispatcher over what acts; retries: further tries when one of those fails
    """

    def __init__(self, engine: Any, *, count: int, sampled: bool, seed: int, retries: int) -> None:
        self.engine, self.count, self.retries, self.calls = engine, count, retries, 0
        self.modes = {GREEDY: True, SAMPLED: False} if sampled else {GREEDY: True}
        self.seed = member_seed(seed, 0, 0, 0)
        self.problem = ""

    async def __call__(self) -> dict[str, float]:
        """Mean return by mode, the greedy episodes' mean length, and how many there were; no figure where none ended."""
        result: dict[str, float] = {}
        for mode, greedy in self.modes.items():
            episodes = await self._episodes(EpisodesWanted(count=self.count, greedy=greedy, seed=self.seed))
            if episodes is not None:
                result[mode] = float(episodes.returns.mean())
                result.setdefault("length", float(episodes.lengths.mean()))
            result["count"] = float(len(episodes.returns)) if episodes is not None else 0.0
        return result

    def words(self, result: dict[str, float]) -> str:
        if not result["count"]:
            return f"no episode could be played: {self.problem}"
        figures = ", ".join(f"{name} {result[name]:.1f}" for name in self.modes if name in result)
        return f"{result['count']:.0f} episodes of {result['length']:.0f} steps: mean return {figures}"

    async def _episodes(self, wanted: EpisodesWanted) -> Episodes | None:
        for _ in range(self.retries + 1):
            self.calls += 1
            try:
                key = RequestKey(lease_id="evaluation", attempt=self.calls)
                return await self.engine.generate(TrajectoryRequest(key=key, episodes=wanted))
            except PartFailed as error:
                self.problem = str(error).partition("\n")[0]
        return None
