"""The tables of docs/comparison.md, made again; the text around them stays.

    python tools/comparison.py simulated          all presets on benchmarks/small_cluster.toml: seconds
    python tools/comparison.py tails              oversampling and length buckets on benchmarks/tail_cluster.toml: a minute
    python tools/comparison.py real [--rounds 3] [--minutes 8] [PRESET ...]

`real` runs presets on `tiny`, round by round, each round one preset further on. A run that is in the folder already is not run
again, so the rounds may be made in pieces of some minutes, on a quiet machine; the table is made from all runs that are there.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from headrace.comparison.figures import merge
from headrace.comparison.real import figures_of_run, run_labelled
from headrace.comparison.simulated import run_simulated_preset
from headrace.comparison.table import cells, markdown_table, notes
from headrace.config import library_names, load_config
from headrace.simulation.cluster import load_cluster

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "comparison.md"
SIMULATED = ["training.steps=30"]
REAL = ["training.steps=10", "training.groups=32", "evaluation.source=", "rollout.max_in_flight=64"]

CUT = ["weights.interruption=abort", "weights.partial=none"]
RESUME = ["weights.interruption=abort", "weights.partial=resume_prefix"]
TAILS = [
    ("alternating", "trl_sync", []),
    ("+ oversample 4, the rest is lost", "trl_sync", [*CUT, "rollout.oversample=4"]),
    ("+ oversample 4, the rest goes on", "trl_sync", [*RESUME, "rollout.oversample=4"]),
    ("+ length buckets", "trl_sync", ["rollout.order=length_bucket"]),
    ("+ both, the rest goes on", "trl_sync", [*RESUME, "rollout.oversample=4", "rollout.order=length_bucket"]),
    ("queue of 2, cut and resumed", "skyrl", []),
    ("+ oversample 4", "skyrl", ["rollout.oversample=4"]),
    ("+ length buckets", "skyrl", ["rollout.order=length_bucket"]),
    ("+ both", "skyrl", ["rollout.oversample=4", "rollout.order=length_bucket"]),
]
"""(row, preset, what is changed)"""
TAIL_STEPS, TAIL_SEEDS = 60, 3


def simulated() -> str:
    cluster = load_cluster(ROOT / "benchmarks" / "small_cluster.toml")
    runs = [
        run_simulated_preset(name, load_config(f"tiny+{name}", SIMULATED), cluster, None)[0] for name in library_names()
    ]
    return markdown_table(cells(runs, rewards=False))


def tails() -> str:
    cluster = load_cluster(ROOT / "benchmarks" / "tail_cluster.toml")
    runs = []
    for label, preset, changed in TAILS:
        seeds = []
        for seed in range(TAIL_SEEDS):
            config = load_config(f"tiny+{preset}", [f"training.steps={TAIL_STEPS}", f"seed={seed}", *changed])
            seeds.append(run_simulated_preset(label, config, cluster, None)[0])
        runs.append(merge(seeds))
    table = cells(runs, rewards=False)
    table[0][0] = "flow"
    wanted = [
        table[0].index(name)
        for name in ("flow", "samples/s", "trainer idle", "wait p99 s", "lag mean/p99/max", "dropped", "length bias")
    ]
    return markdown_table([[row[column] for column in wanted] for row in table])


def real(names: list[str], rounds: int, minutes: float, runs_dir: Path) -> str:
    started = time.monotonic()
    for seed in range(rounds):
        turn = seed * len(names) // max(1, rounds)
        for name in [*names[turn:], *names[:turn]]:
            done = runs_dir / f"{name}-s{seed}" / "metrics.jsonl"
            if done.is_file():
                continue
            if time.monotonic() - started > 60 * minutes:
                break
            note = run_labelled(f"{name}-s{seed}", f"tiny+{name}", [*REAL, f"seed={seed}"], runs_dir, nearest=True)
            took = time.monotonic() - started
            print(f"{took:6.0f} s  {name}, seed {seed}{': ' + note if note else ''}", flush=True)
    runs = []
    for name in library_names():
        folders = [runs_dir / f"{name}-s{seed}" for seed in range(rounds)]
        if found := [figures_of_run(name, folder) for folder in folders if (folder / "metrics.jsonl").is_file()]:
            runs.append(merge(found))
    return "\n\n".join([markdown_table(cells(runs, rewards=True)), *notes(runs)])


def write(section: str, text: str) -> None:
    """Between the section's two marks."""
    page = PAGE.read_text(encoding="utf-8")
    begin, end = f"<!-- {section} -->\n", f"<!-- end of {section} -->"
    head, found, rest = page.partition(begin)
    _, closed, tail = rest.partition(end)
    if not found or not closed:
        raise SystemExit(f"{PAGE} has no section {section!r}")
    PAGE.write_text(f"{head}{begin}\n{text}\n\n{end}{tail}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", choices=("simulated", "tails", "real"))
    parser.add_argument("presets", nargs="*", help="of `real`; all when none is named")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=1e9, help="start no further run after so many")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs/comparison"))
    arguments = parser.parse_intermixed_args()  # presets may stand after options
    match arguments.section:
        case "simulated":
            text = simulated()
        case "tails":
            text = tails()
        case _:
            names = arguments.presets or library_names()
            text = real(names, arguments.rounds, arguments.minutes, arguments.runs_dir)
    write(arguments.section, text)


if __name__ == "__main__":
    main()
