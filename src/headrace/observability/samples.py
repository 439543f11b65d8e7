"""Turns scored groups into files to read: prompt, completion, score parts, versions, and how each one ended."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from headrace.observability.jsonl import finite_or_none
from headrace.types import Episode, Group, Score, TokenSample

SAMPLES_FOLDER = "samples"

Decode = Callable[[Sequence[int]], str]


def version_runs(sample: TokenSample) -> list[tuple[int, int]]:
    """(version, tokens) of the sampled tokens, in order of sampling: [(3, 12), (4, 20)]."""
    sampled = sample.policy_versions[np.asarray(sample.loss_mask, dtype=bool)].tolist()
    return [(version, sum(1 for _ in run)) for version, run in groupby(sampled)]


def split_prompt(sample: TokenSample) -> tuple[list[int], list[int]]:
    """(prompt ids, the rest): the prompt ends at the first sampled token."""
    ids = sample.token_ids.tolist()
    sampled = np.flatnonzero(np.asarray(sample.loss_mask))
    cut = int(sampled[0]) if sampled.size else len(ids)
    return ids[:cut], ids[cut:]


def _number(value: float | None) -> float | None:
    return None if value is None else finite_or_none(float(value))


def _sample_row(
    sample: TokenSample, decode: Decode, advantages: Mapping[str, float], prompts: dict[tuple[int, ...], str]
) -> dict[str, Any]:
    """prompts: texts of the group's prompts that are known already"""
    prompt, completion = split_prompt(sample)
    key = tuple(prompt)
    if key not in prompts:
        prompts[key] = decode(prompt)
    row = {
        "sample_id": sample.sample_id,
        "agent": sample.agent,
        "prompt": prompts[key],
        "completion": decode(completion),
        "tokens": sample.completion_length,
        "finish_reason": sample.finish_reason,
        "versions": version_runs(sample),
    }
    if sample.sample_id in advantages:
        row["advantage"] = _number(advantages[sample.sample_id])
    return row


def sample_rows(
    groups: Sequence[Group], decode: Decode, advantages: Mapping[str, float] | None = None
) -> list[dict[str, Any]]:
    """One JSON-able row for each sample, group by group. `advantages` maps sample ids or episode ids to a number."""
    rows = []
    for group in groups:
        prompts: dict[tuple[int, ...], str] = {}
        for place, episode in enumerate(group.episodes):
            score = group.scores[place] if place < len(group.scores) else Score(reward=None)
            for sample in episode.samples:
                row = _sample_row(sample, decode, advantages or {}, prompts)
                if "advantage" not in row and advantages and episode.episode_id in advantages:
                    row["advantage"] = _number(advantages[episode.episode_id])
                rows.append(_group_facts(group, episode, score) | row)
    return rows


def _group_facts(group: Group, episode: Episode, score: Score) -> dict[str, Any]:
    facts = {
        "group_id": group.group_id,
        "task_id": group.task.task_id,
        "episode_id": episode.episode_id,
        "reward": _number(score.reward),
        "parts": {name: _number(value) for name, value in score.parts.items()},
    }
    return facts | ({"error": score.error} if score.error else {})


# ---------------------------------------------------------------------------------------------------------- to read


def _shown(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"


def _indent(text: str) -> str:
    return "\n".join("    " + line for line in text.splitlines()) or "    (empty)"


def render_samples(step: int, rows: Sequence[Mapping[str, Any]], of: int = 0) -> str:
    """The rows of `sample_rows` as text; a prompt that the samples of a group share is printed once. of: groups of the step"""
    groups = len(dict.fromkeys(row["group_id"] for row in rows))
    shown = f"{groups} of {of} groups" if of > groups else f"{groups} groups"
    lines = [f"Step {step}: {len(rows)} samples in {shown}", ""]
    group_id = prompt = None
    for row in rows:
        if row["group_id"] != group_id:
            group_id, prompt = row["group_id"], None
            lines += ["=" * 100, f"group {group_id}   task {row['task_id']}"]
        if row["prompt"] != prompt:
            prompt = row["prompt"]
            lines += ["prompt:", _indent(prompt), ""]
        facts = [f"reward {_shown(row['reward'])}"]
        facts += [f"{name} {_shown(value)}" for name, value in row["parts"].items()]
        if "advantage" in row:
            facts.append("advantage " + ("none" if row["advantage"] is None else f"{row['advantage']:+.3f}"))
        versions = ", ".join(f"v{version} x {count}" for version, count in row["versions"]) or "nothing sampled"
        facts += [row["finish_reason"], f"{row['tokens']} tokens ({versions})"]
        lines += [f"--- {row['sample_id']}: " + " | ".join(facts)]
        if "error" in row:
            lines.append(f"    ! {row['error']}")
        lines += [_indent(row["completion"]), ""]
    return "\n".join(lines) + "\n"


def write_samples(
    folder: Path,
    step: int,
    groups: Sequence[Group],
    decode: Decode,
    advantages: Mapping[str, float] | None = None,
    *,
    of: int = 0,
) -> Path:
    """Write samples/step_000005.txt and .jsonl in the run folder; returns the readable file's path. of: groups of the step,
    where these are not all"""
    target = folder / SAMPLES_FOLDER
    target.mkdir(parents=True, exist_ok=True)
    rows = sample_rows(groups, decode, advantages)
    path = target / f"step_{step:06d}.txt"
    # A model may sample half of a surrogate pair or any byte: reading must not fail for what was written.
    path.write_text(render_samples(step, rows, of), encoding="utf-8", errors="replace")
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.with_suffix(".jsonl").write_text(text, encoding="utf-8", errors="replace")
    return path
