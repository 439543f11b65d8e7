"""Held-out tasks into two figures: how good are greedy answers, and sampled ones, under the weights that are live."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np

from headrace.errors import PartFailed
from headrace.protocols import Rewarder, RewardRequest, TextEngine
from headrace.rollout.token_rollout import TextEnvironment, member_seed
from headrace.types import GenerateRequest, Generation, RequestKey, SamplingParams, Task

GREEDY, SAMPLED = "greedy", "sampled"


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
