"""Run folders into docs/results.md's table rows and one SVG of reward curves.

python tools/results.py docs/tiny.svg runs/tiny-s0 runs/tiny-s1 runs/tiny-s2
"""

from __future__ import annotations

import sys
from pathlib import Path

from headrace.observability.jsonl import read_jsonl

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 720, 300, 52, 40, 16, 130
COLOURS = ("#2563eb", "#d97706", "#059669", "#db2777", "#7c3aed")


def curve(folder: Path) -> list[tuple[float, float]]:
    """(seconds since the start, mean reward of the batch), one for each step."""
    rows = {row["step"]: row for row in read_jsonl(folder / "metrics.jsonl")}
    return [(row["time/elapsed_s"], row["reward/mean"]) for _, row in sorted(rows.items())]


def draw(curves: dict[str, list[tuple[float, float]]]) -> str:
    longest = max(x for points in curves.values() for x, _ in points)

    def place(x: float, y: float) -> str:
        across = LEFT + x / longest * (WIDTH - LEFT - RIGHT)
        return f"{across:.1f},{HEIGHT - BOTTOM - y * (HEIGHT - BOTTOM - TOP):.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for tenth in range(0, 11, 2):
        x, y = place(0, tenth / 10).split(",")
        parts.append(f'<path d="M{x},{y} H{WIDTH - RIGHT}" stroke="#e5e7eb"/>')
        parts.append(
            f'<text x="{LEFT - 8}" y="{float(y) + 4}" text-anchor="end" fill="#374151">{tenth / 10:.1f}</text>'
        )
    step = next(s for s in (5, 10, 20, 30, 60, 120, 300, 600) if longest / s <= 8)
    for seconds in range(0, int(longest) + 1, step):
        x = place(seconds, 0).split(",")[0]
        parts.append(f'<text x="{x}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle" fill="#374151">{seconds}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle" fill="#374151">seconds of training</text>')
    parts.append(f'<text x="{LEFT}" y="{TOP - 4}" fill="#374151">mean reward of the batch</text>')
    for number, (name, points) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        line = " ".join(place(x, y) for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        parts.append(f'<text x="{WIDTH - RIGHT + 10}" y="{TOP + 14 + 18 * number}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


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
    picture, *folders = sys.argv[1:]
    print(
        "| run | steps | training time | reward, first step | reward, last five steps | held-out, greedy | held-out, sampled | tasks |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for folder in folders:
        print(row(Path(folder)))
    Path(picture).write_text(draw({Path(folder).name: curve(Path(folder)) for folder in folders}), encoding="utf-8")


if __name__ == "__main__":
    main()
