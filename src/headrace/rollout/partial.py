"""What becomes of a generation that a weight sync cut short: two facts, is its prefix kept, is its lease kept."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.types import Episode, Generation, Score


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialPolicy:
    """keep_prefix: what was sampled is continued, never sampled again
    keep_lease: the group goes on at once; otherwise its task returns to the pool, or is dropped
    keep_kv: ask the engine for a handle to the keys and values, and fall back to the prefix when it is gone
    """

    keep_prefix: bool
    keep_lease: bool
    keep_kv: bool = False


PARTIAL_POLICIES = {
    "continue": PartialPolicy(keep_prefix=True, keep_lease=True),
    "resume_prefix": PartialPolicy(keep_prefix=True, keep_lease=True),
    "restore": PartialPolicy(keep_prefix=True, keep_lease=True, keep_kv=True),
    "recycle": PartialPolicy(keep_prefix=True, keep_lease=False),
    "restart": PartialPolicy(keep_prefix=False, keep_lease=True),
    "none": PartialPolicy(keep_prefix=False, keep_lease=False),
}

VALID_PAIRS = {
    "never": ("continue",),
    "hold": ("continue",),
    "abort": ("resume_prefix", "restore", "recycle", "restart", "none"),
    "drain": ("none",),
    "barrier": ("none",),
}
"""Interruption -> partial policies that make sense with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberProgress:
    """What one member of a group has done: a finished episode with or without its score, or a generation cut short."""

    episode: Episode | None = None
    score: Score | None = None
    generation: Generation | None = None


@dataclass(frozen=True, slots=True)
class GroupRemainder:
    """The finished work of a recycled group, by member."""

    members: dict[int, MemberProgress] = field(default_factory=dict)
