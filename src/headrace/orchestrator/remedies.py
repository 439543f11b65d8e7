"""Turns why units were dropped into words: how many of which, and what to change."""

from __future__ import annotations

from collections.abc import Mapping

REMEDIES = {
    "cancelled": "groups run longer than staleness.max_version_lag allows; raise it, or lower rollout.sampling.max_tokens",
    "stale": "samples wait or take longer than staleness.max_version_lag allows; raise it, or lower buffer.steps",
    "filtered": "all scores of a group are equal; mend the reward, choose tasks of another difficulty, or set "
    "training.advantage.drop_zero_variance = false",
    "unscored": "the reward functions give no score; run `headrace check` and read the messages above",
    "refused": "prompts do not fit the context; shorten them, or raise rollout.engine.context_length",
    "timeout": "groups do not end within group.timeout_s; raise it, or lower rollout.sampling.max_tokens",
    "retries": "engine calls fail again and again; read the messages above",
    "interrupted": "weight syncs cut generations short; choose weights.partial = resume_prefix, or weights.interruption = never",
    "recycled": "weight syncs send tasks back faster than they end; choose weights.partial = resume_prefix",
    "lost": "the store no longer has what it took; give the Redis server appendonly yes, or choose buffer.store = files",
    "error": "read the messages above",
}
"""Drop reason -> what to change."""


def remedy(reason: str) -> str:
    return REMEDIES.get(reason, REMEDIES["error"])


def reasons(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in counts.items())
