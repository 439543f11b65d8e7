"""Presets really run, one after another in rounds, each in a process of its own; their metric rows into figures."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from headrace.comparison.figures import Figures, figures_of, merge
from headrace.observability.jsonl import read_jsonl


def run_interleaved(
    presets: Sequence[tuple[str, str]],
    overrides: Sequence[str],
    *,
    rounds: int,
    seed: int,
    runs_dir: Path,
    nearest: bool,
    tell: Callable[[str], None],
) -> list[Figures]:
    """[preset] medians over rounds. A round runs every preset once with one seed, and starts one preset further on each
    time, so that what changes on the machine meets them all. presets: (name, config source)."""
    found: dict[str, list[Figures]] = {name: [] for name, _ in presets}
    for number in range(rounds):
        turn = number % len(presets)
        for name, source in [*presets[turn:], *presets[:turn]]:
            label = f"{name}-s{seed + number}"
            tell(f"round {number + 1} of {rounds}: {name}")
            note = run_labelled(label, source, [*overrides, f"seed={seed + number}"], runs_dir, nearest=nearest)
            found[name].append(figures_of_run(name, runs_dir / label, note))
    return [merge(runs) for runs in found.values()]


def figures_of_run(name: str, folder: Path, note: str = "") -> Figures:
    """Of a run's folder, whether it has ended well or not."""
    rows = {row["step"]: row for row in read_jsonl(folder / "metrics.jsonl")}
    return figures_of(name, [row for _, row in sorted(rows.items())], note)


def run_labelled(label: str, source: str, overrides: Sequence[str], runs_dir: Path, *, nearest: bool) -> str:
    """One run, into its folder; empty when it went well, else its own last line."""
    words = [source, *overrides, "--name", label, "--runs-dir", str(runs_dir), "--display", "none"]
    command = [sys.executable, "-m", "headrace.cli", "run", *words, *(["--nearest"] if nearest else [])]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return ""
    lines = [line for line in done.stderr.splitlines() if line.startswith("headrace: ")]
    return (lines or done.stderr.splitlines() or [f"exit code {done.returncode}"])[-1].removeprefix("headrace: ")
