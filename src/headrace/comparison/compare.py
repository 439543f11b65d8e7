"""The words of `headrace compare` into runs or simulations of each preset, and their figures into a table and a page."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from headrace.comparison.figures import Figures, merge
from headrace.comparison.table import cells, markdown_table, notes, page, text_table
from headrace.config import library_names, load_config
from headrace.errors import UserError
from headrace.nearest import refuse, substitute
from headrace.valid_config import validate


def compare(
    words: Sequence[str],
    *,
    on: str,
    cluster: Path | None,
    hours: float,
    rounds: int,
    nearest: bool,
    runs_dir: Path,
    out: Path | None,
    markdown: bool,
    tell: Callable[[str], None],
    show: Callable[[str], None],
) -> list[Figures]:
    """Figures of all presets, in the order given. Every config is checked before the first run starts."""
    names = [word for word in words if "=" not in word]
    overrides = [word for word in words if "=" in word]
    if not names:
        raise UserError("compare needs presets: names of `headrace presets`, or .toml files")
    if len(set(names)) < len(names):
        raise UserError("compare: a preset is named twice")
    if not 0 <= hours < math.inf or (hours and cluster is None):
        raise UserError(f"--hours: found {hours:g}; it takes simulated hours, 0 or more, and goes with --simulate")
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        raise UserError(f"--out: {str(out)!r} cannot be written: it is a folder, or is to be in one that is not there")
    presets = [(name, f"{on}+{name}" if name in library_names() else name) for name in names]
    if cluster is not None:
        figures = _simulate(presets, overrides, cluster, hours, rounds, tell)
    else:
        exchanges: list[str] = []
        for name, source in presets:
            config, own = substitute(load_config(source, overrides))
            validate(config)
            exchanges += [f"{name}: {exchange}" for exchange in own]
        refuse(exchanges, allowed=nearest)
        for exchange in exchanges:
            tell(f"{exchange}, which is used")
        figures = _run(presets, overrides, rounds, runs_dir, nearest, tell)
    rows = cells(figures, rewards=cluster is None)
    show(markdown_table(rows) if markdown else text_table(rows))
    for note in notes(figures):
        show(f"\n* {note}")
    if out is not None:
        place = f"on the simulated cluster {cluster}" if cluster is not None else f"on {on}"
        out.write_text(page(f"{len(names)} presets {place}", rows, figures), encoding="utf-8")
        tell(f"drawn into {out}")
    return figures


def _simulate(
    presets: Sequence[tuple[str, str]],
    overrides: Sequence[str],
    cluster: Path,
    hours: float,
    rounds: int,
    tell: Callable[[str], None],
) -> list[Figures]:
    """A simulated cluster has every part, so nothing is exchanged for the nearest."""
    from headrace.comparison.simulated import run_simulated_preset
    from headrace.simulation.cluster import load_cluster

    costs = load_cluster(cluster)
    sizes = {"training.groups": costs.workload.groups, "group.size": costs.workload.group_size}
    for word in overrides:
        key, _, found = word.partition("=")
        if sizes.get(key.strip()):
            raise UserError(
                f"{key}: found {found}, but {cluster} says {sizes[key.strip()]}; change it in its [workload]"
            )
    if control := [name for name, source in presets if load_config(source, overrides).env.id]:
        raise UserError(f"--simulate: {control[0]!r} acts in environments, and a simulated cluster generates tokens")
    figures = []
    for name, source in presets:
        repeats = []
        for number in range(rounds):
            config = load_config(source, overrides)
            config = load_config(source, [*overrides, f"seed={config.seed + number}"])
            made, outcome = run_simulated_preset(name, config, costs, hours * 3600 or None)
            tell(f"{name}: {outcome.seconds / 3600:.2f} simulated hours in {outcome.wall_s:.1f} s")
            repeats.append(made)
        figures.append(merge(repeats))
    return figures


def _run(
    presets: Sequence[tuple[str, str]],
    overrides: Sequence[str],
    rounds: int,
    runs_dir: Path,
    nearest: bool,
    tell: Callable[[str], None],
) -> list[Figures]:
    from headrace.comparison.real import run_interleaved

    seed = load_config(presets[0][1], overrides).seed
    return run_interleaved(presets, overrides, rounds=rounds, seed=seed, runs_dir=runs_dir, nearest=nearest, tell=tell)
