"""Run folders into the table rows of docs/results.md or docs/control.md and one SVG of reward curves.

python tools/results.py docs/tiny.svg runs/tiny-s0 runs/tiny-s1 runs/tiny-s2
"""

from __future__ import annotations

import math
import sys
from collections import deque
from pathlib import Path

from headrace.observability.jsonl import read_jsonl

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 720, 300, 52, 40, 16, 130
EPISODES, MOST_POINTS = 20, 150
COLOURS = ("#2563eb", "#d97706", "#059669", "#db2777", "#7c3aed")


def curve(folder: Path) -> list[tuple[float, float]]:
    """(seconds since the start, mean reward of the batch), one for each step; of control (environment steps, mean return of
    the last `EPISODES` episodes)."""
    found = {row["step"]: row for row in read_jsonl(folder / "metrics.jsonl")}
    rows = [row for _, row in sorted(found.items())]
    if not is_control(folder):
        return [(row["time/elapsed_s"], row["reward/mean"]) for row in rows]
    points, steps = [], 0.0
    recent: deque[tuple[float, float]] = deque()
    for row in rows:
        steps += row["batch/steps"]
        if count := row.get("episode/count"):
            recent.append((row["episode/return"], count))
            while sum(n for _, n in recent) - recent[0][1] >= EPISODES:
                recent.popleft()
            points.append((steps, sum(mean * n for mean, n in recent) / sum(n for _, n in recent)))
    each = max(1, len(points) // MOST_POINTS)
    return [*points[:-1:each], points[-1]]


def is_control(folder: Path) -> bool:
    return "batch/steps" in next(iter(read_jsonl(folder / "metrics.jsonl")))


def tick(span: float, most: int) -> float:
    """1, 2 or 5 times a power of ten, so that at most so many fit into the span."""
    power = 10.0 ** math.floor(math.log10(span / most))
    return next(power * factor for factor in (1, 2, 5, 10) if span / (power * factor) <= most)


def draw(curves: dict[str, list[tuple[float, float]]], control: bool) -> str:
    longest = max(x for points in curves.values() for x, _ in points)
    values = [y for points in curves.values() for _, y in points]
    rise = tick(max(values) - min(0.0, *values), 6) if control else 0.2
    low = rise * math.floor(min(0.0, *values) / rise)
    high = rise * math.ceil(max(0.0, *values) / rise) if control else 1.0

    def place(x: float, y: float) -> str:
        across = LEFT + x / longest * (WIDTH - LEFT - RIGHT)
        return f"{across:.1f},{HEIGHT - BOTTOM - (y - low) / (high - low) * (HEIGHT - BOTTOM - TOP):.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for number in range(round((high - low) / rise) + 1):
        level = low + number * rise
        x, y = place(0, level).split(",")
        shown = f"{level:.0f}" if control else f"{level:.1f}"
        parts.append(f'<path d="M{x},{y} H{WIDTH - RIGHT}" stroke="#e5e7eb"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{float(y) + 4}" text-anchor="end" fill="#374151">{shown}</text>')
    step = tick(longest, 8) if control else next(s for s in (5, 10, 20, 30, 60, 120, 300, 600) if longest / s <= 8)
    for number in range(int(longest / step) + 1):
        x = place(number * step, low).split(",")[0]
        shown = f"{number * step / 1000:g} k" if control else f"{number * step:g}"
        parts.append(f'<text x="{x}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle" fill="#374151">{shown}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    across, up = (
        ("environment steps", f"mean return of the last {EPISODES} episodes")
        if control
        else ("seconds of training", "mean reward of the batch")
    )
    parts.append(f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle" fill="#374151">{across}</text>')
    parts.append(f'<text x="{LEFT}" y="{TOP - 4}" fill="#374151">{up}</text>')
    for number, (name, points) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        line = " ".join(place(x, y) for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        parts.append(f'<text x="{WIDTH - RIGHT + 10}" y="{TOP + 14 + 18 * number}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def control_row(folder: Path) -> str:
    """Steps of the environment, seconds, and the mean return of the first and of the last episodes."""
    points, rows = curve(folder), read_jsonl(folder / "metrics.jsonl")
    seconds = max(row["time/elapsed_s"] for row in rows)
    cells = [folder.name, f"{points[-1][0]:,.0f}", f"{seconds:.0f} s", f"{points[0][1]:.0f}", f"{points[-1][1]:.0f}"]
    return "| " + " | ".join(cells) + " |"


def row(folder: Path) -> str:
    points = curve(folder)
    rewards = [reward for _, reward in points]
    evaluations = read_jsonl(folder / "evaluation.jsonl")
    before, after = evaluations[0], evaluations[-1]
    cells = [
        folder.name,
        f"{len(points)}",
        f"{points[-1][0]:.0f} s",
        f"{rewards[0]:.2f}",
        f"{sum(rewards[-5:]) / len(rewards[-5:]):.2f}",
        *(f"{before[mode]:.1%} → {after[mode]:.1%}" if mode in before else "–" for mode in ("greedy", "sampled")),
        f"{after['count']:.0f}",
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    picture, *names = sys.argv[1:]
    folders = [Path(name) for name in names]
    control = is_control(folders[0])
    heads = (
        ["run", "environment steps", "time", "return, first episodes", "return, last episodes"]
        if control
        else ["run", "steps", "training time", "reward, first step", "reward, last five steps", "held-out, greedy",
              "held-out, sampled", "tasks"]
    )  # fmt: skip
    print("| " + " | ".join(heads) + " |")
    print("|---" * len(heads) + "|")
    for folder in folders:
        print(control_row(folder) if control else row(folder))
    Path(picture).write_text(draw({folder.name: curve(folder) for folder in folders}, control), encoding="utf-8")


if __name__ == "__main__":
    main()
