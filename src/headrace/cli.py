"""Turns a command line into calls of session, check and report, and their errors into one line and an exit code."""

from __future__ import annotations

import json
import signal
import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from headrace.errors import ConfigError, HeadraceError, MissingExtra, PartFailed, RunDirError, RunError, UserError

app = typer.Typer(
    name="headrace",
    help="Reinforcement learning as one flow: rollout, reward, buffer, trainer, and new weights flowing back.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

CONFIG_FILE = "config.toml"
INTERRUPTED = 130

SERVE = (
    'rollout.source="http"',
    'placement="separate"',
    'buffer.depth="queue"',
    "buffer.steps=63",
    "rollout.max_in_flight=64",
    "training.groups=1",
    "training.minibatches=1",
    "training.stream_groups=0",
    "training.steps=1000000000",
    "checkpoint.every_steps=0",
    "limits.max_dropped=1000000000",
)
"""What makes a server of a run: groups are written one by one as they are scored, 64 are open, and it ends when it is told to."""


class Only(StrEnum):
    ROLLOUT = "rollout"
    TRAIN = "train"


class Display(StrEnum):
    AUTO = "auto"
    LIVE = "live"
    LINES = "lines"
    NONE = "none"


ConfigArgument = Annotated[
    str, typer.Argument(metavar="CONFIG", help="A .toml file, or a preset (see `headrace presets`).")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Overrides, as in rollout.sampling.temperature=0.8.")
]


NearestOption = Annotated[
    bool, typer.Option("--nearest", help="Use the nearest part where one that the config names is not here.")
]


@app.command()
def run(
    config: Annotated[
        str,
        typer.Argument(metavar="CONFIG", help="A .toml file, or a preset. Left out with --resume.", show_default=False),
    ] = "",
    overrides: Overrides = None,
    only: Annotated[
        Only | None, typer.Option(help="rollout: write scored groups and no more; train: train on written ones.")
    ] = None,
    samples: Annotated[Path | None, typer.Option(help="With --only train: a file or folder of scored groups.")] = None,
    resume: Annotated[Path | None, typer.Option(metavar="RUN_DIR", help="Go on with a run at its next step.")] = None,
    runs_dir: Annotated[Path, typer.Option(help="Where run folders are made.")] = Path("runs"),
    name: Annotated[
        str, typer.Option(help="Name of the run's folder, in place of the config's.", show_default=False)
    ] = "",
    display: Annotated[Display | None, typer.Option(help="How progress is shown.", show_default=False)] = None,
    nearest: NearestOption = False,
) -> None:
    """Train (or only roll out), into a folder of its own."""
    words = [word for word in (config, *(overrides or [])) if word]
    _check_run_options(words, only, samples, resume, name)
    shown = display.value if display else None
    part = only.value if only else None
    if resume is not None:
        part, samples = recorded_part(resume)
        folder, loaded = open_run_dir(resume, words, only=part)
        code = _run(loaded, folder, only=part, resume=True, display=shown, samples=samples)
    else:
        loaded = _load(words[0], words[1:] + ([f'name="{name}"'] if name else []), only=part, nearest=nearest)
        folder = make_run_dir(runs_dir / loaded.name, loaded)
        code = _run(loaded, folder, only=part, resume=False, display=shown, samples=samples)
    raise typer.Exit(code)


@app.command()
def serve(
    config: ConfigArgument,
    overrides: Overrides = None,
    host: Annotated[str, typer.Option(help="Where it listens; whoever can reach it needs the token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8000,
    token: Annotated[
        str, typer.Option(help="What clients must bring; made up when left out.", show_default=False)
    ] = "",
    runs_dir: Annotated[Path, typer.Option(help="Where run folders are made.")] = Path("runs"),
    name: Annotated[str, typer.Option(help="Name of the run's folder.", show_default=False)] = "",
    display: Annotated[Display, typer.Option(help="How progress is shown.")] = Display.LINES,
) -> None:
    """Serve a model behind an OpenAI-compatible API; what its sessions produce is written as scored groups."""
    # A file names its runs; those of a preset would all have one name.
    default = [] if config.endswith(".toml") else [f'name="serve-{time.strftime("%Y%m%d-%H%M%S")}"']
    address = [f"clients.host={json.dumps(host)}", f"clients.port={port}"]
    named = [f"name={json.dumps(name)}"] if name else []
    loaded = _load(config, [*SERVE, *default, *(overrides or []), *address, *named], only="rollout")
    folder = make_run_dir(runs_dir / loaded.name, loaded)
    shown = display.value
    raise typer.Exit(_run(loaded, folder, only="rollout", resume=False, display=shown, samples=None, token=token))


@app.command()
def actor(
    address: Annotated[str, typer.Argument(metavar="ADDRESS", help="Of the run's Redis server: redis://HOST:PORT/DB.")],
    run: Annotated[str, typer.Option(help="Name of the run, where several want actors.", show_default=False)] = "",
    allow: Annotated[
        list[str] | None,
        typer.Option(metavar="MODULE:NAME", help="Code of yours that the run may name: its env.id or policy.network."),
    ] = None,
    patience_s: Annotated[
        float, typer.Option(min=0.1, help="Give up when the server or the learner is away for longer.")
    ] = 300.0,
) -> None:
    """Step environments for a run with rollout.source=redis, anywhere, until it is over."""
    try:
        from headrace.orchestrator.remote.actor import run_actor
    except ImportError:
        raise MissingExtra("redis", "redis", "headrace actor") from None
    try:
        code = run_actor(address, run, allow or [], patience_s, lambda text: typer.echo(f"headrace: {text}", err=True))
    except KeyboardInterrupt:
        code = INTERRUPTED
    raise typer.Exit(code)


@app.command()
def check(config: ConfigArgument, overrides: Overrides = None, nearest: NearestOption = False) -> None:
    """Say what a config will do, and whether it will work, without training."""
    from headrace.check import check as check_config

    raise typer.Exit(check_config(_load(config, overrides or [], warn=False, nearest=nearest)))


@app.command()
def report(run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")]) -> None:
    """Print a run's figures and the part that holds it up, and draw them into report.html."""
    if not run_dir.is_dir():
        raise RunDirError(f"{run_dir} is no folder; give a run's folder, as in runs/quickstart")
    from headrace.observability.report import report as report_run

    report_run(run_dir)


@app.command()
def compare(
    words: Annotated[
        list[str], typer.Argument(metavar="PRESET... [KEY=VALUE...]", help="Presets, and overrides for all of them.")
    ],
    on: Annotated[str, typer.Option(help="The work that libraries' presets are laid over.")] = "tiny",
    simulate: Annotated[
        Path | None, typer.Option(metavar="CLUSTER", help="Simulate on this cluster's costs (cluster.toml ships).")
    ] = None,
    hours: Annotated[
        float, typer.Option(help="With --simulate: so many simulated hours, not a number of steps.")
    ] = 0.0,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each preset, interleaved, each with its own seed.")] = 1,
    nearest: NearestOption = False,
    runs_dir: Annotated[Path, typer.Option(help="Where run folders are made.")] = Path("runs/compare"),
    out: Annotated[
        Path | None, typer.Option(help="Draw the comparison into this HTML file.", show_default=False)
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown.")] = False,
) -> None:
    """Run, or simulate, presets on the same work, and print and draw their figures."""
    from headrace.comparison.compare import compare as compare_presets

    figures = compare_presets(
        words,
        on=on,
        cluster=simulate,
        hours=hours,
        rounds=rounds,
        nearest=nearest,
        runs_dir=runs_dir,
        out=out,
        markdown=markdown,
        tell=lambda text: typer.echo(text, err=True),
        show=typer.echo,
    )
    raise typer.Exit(0 if any(one.steps for one in figures) else 1)


@app.command()
def presets() -> None:
    """List the presets, and what each library's chooses on every axis."""
    from headrace.config import PRESETS_FOLDER, library_names, load_config, preset_names
    from headrace.nearest import AXES, axes, substitute

    width = max(map(len, [*preset_names(), *library_names()]))
    typer.echo("work (headrace run NAME):")
    for preset in preset_names():
        first_line = (PRESETS_FOLDER / f"{preset}.toml").read_text(encoding="utf-8").partition("\n")[0]
        typer.echo(f"  {preset:{width}}  {first_line.lstrip('# ')}")
    typer.echo("\nlibraries' choices on each axis (headrace run tiny+NAME --nearest; * marks what is not here):")
    rows = [("", *AXES)]
    for preset in library_names():
        config = load_config(preset)
        missing = {exchange.found for exchange in substitute(config)[1]}
        rows.append(
            (preset, *(f"{value}*" if value.split(", ")[-1] in missing else value for _, value in axes(config)))
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        typer.echo("  " + "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def _check_samples(samples: Path) -> None:
    from headrace.exchange.codec import read_groups

    if not samples.exists():
        raise UserError(f"--samples: {samples} does not exist")
    if next(read_groups(samples), None) is None:
        raise UserError(
            f"--samples: {samples} holds no whole group; make some with `headrace run CONFIG --only rollout`"
        )


def _check_run_options(
    words: list[str], only: Only | None, samples: Path | None, resume: Path | None, name: str
) -> None:
    """Refuse combinations of options that contradict each other."""
    if resume is None and not words:
        raise UserError("run needs a CONFIG: a .toml file or a preset (see `headrace presets`), or --resume RUN_DIR")
    if resume is not None and (name or only):
        raise UserError(f"--resume goes on with the run as it is; leave out {'--name' if name else '--only'}")
    if resume is not None and words and "=" not in words[0]:
        raise UserError(f"--resume uses the run's own config; leave out {words[0]!r} (overrides are allowed)")
    if (samples is not None) != (only is Only.TRAIN):
        raise UserError("--only train and --samples go together: the samples are what it trains on")
    if samples is not None:
        _check_samples(samples)


def _load(source: str, overrides: list[str], *, only: str | None = None, warn: bool = True, nearest: bool = False):
    """The resolved, validated config; its warnings, and parts that are exchanged for the nearest, go to stderr."""
    from headrace.config import load_config, resolve
    from headrace.nearest import exchanged
    from headrace.valid_config import validate

    config, exchanges = exchanged(load_config(source, overrides), allowed=nearest)
    for exchange in exchanges:
        typer.echo(f"headrace: {exchange}, which is used", err=True)
    for warning in validate(config, only=only) if warn else ():
        typer.echo(f"headrace: warning: {warning}", err=True)
    return resolve(config)


def _run(
    config,
    run_dir: Path,
    *,
    only: str | None,
    resume: bool,
    display: str | None,
    samples: Path | None,
    token: str = "",
) -> int:
    """Start it; a folder in which nothing happened yet is taken away again when the user has something to mend."""
    code = INTERRUPTED
    # The run listens for Ctrl-C itself, once it is there. Until then: a KeyboardInterrupt that passes through an `exec`
    # (imports are full of them) makes the interpreter end by the signal even if it is caught.
    before = signal.signal(signal.SIGINT, _leave)
    try:
        from headrace.session import run as start

        code = start(config, run_dir, only=only, resume=resume, display=display, samples=samples, token=token)
        return code
    except RunError:
        code = 1
        raise
    finally:
        signal.signal(signal.SIGINT, before)
        begun = code in (0, 1) or [file.name for file in run_dir.iterdir()] != [CONFIG_FILE]
        if not resume and not begun:
            (run_dir / CONFIG_FILE).unlink()
            run_dir.rmdir()


def _leave(number: int, frame: object) -> None:
    raise SystemExit(INTERRUPTED)


def make_run_dir(run_dir: Path, config) -> Path:
    """A new folder that holds the resolved config. One that is there already, and not empty, is never touched."""
    from headrace.config import dump_config

    text = dump_config(config)
    try:
        run_dir.mkdir(parents=True)
    except FileExistsError:
        if not run_dir.is_dir():
            raise RunDirError(f"{run_dir} is a file; choose another name with --name") from None
        if any(run_dir.iterdir()):
            go_on = f", or go on with that run with --resume {run_dir}" if (run_dir / CONFIG_FILE).is_file() else ""
            raise RunDirError(f"{run_dir} exists already; choose another name with --name{go_on}") from None
    except NotADirectoryError:
        raise RunDirError(f"{run_dir} lies below a file; choose another place with --runs-dir") from None
    except OSError as error:
        raise RunDirError(f"{run_dir} cannot be made: {error.strerror}; choose another place with --runs-dir") from None
    (run_dir / CONFIG_FILE).write_text(text, encoding="utf-8")
    return run_dir


def recorded_part(run_dir: Path) -> tuple[str | None, Path | None]:
    """What of the flow a run was started with (`--only`), and its samples."""
    try:
        recorded = json.loads((run_dir / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None, None
    samples = Path(recorded["samples"]) if recorded.get("samples") else None
    if samples is not None and not samples.exists():
        raise RunDirError(f"--resume: the run's samples, {samples}, are not there any more")
    return recorded.get("only"), samples


def open_run_dir(run_dir: Path, overrides: list[str], *, only: str | None = None):
    """The folder and config of a run to go on with."""
    if not run_dir.is_dir():
        raise RunDirError(f"--resume: {run_dir} is no folder; give a run's folder, as in runs/quickstart")
    if not (run_dir / CONFIG_FILE).is_file():
        raise RunDirError(f"--resume: {run_dir} has no {CONFIG_FILE}, so it is not a run's folder")
    try:
        loaded = _load(str(run_dir / CONFIG_FILE), overrides, only=only)
    except ConfigError as error:
        raise RunDirError(f"--resume: the run's {CONFIG_FILE} cannot be used: {error}") from None
    if overrides:
        _keep_config(run_dir, loaded)
    return run_dir, loaded


def _keep_config(run_dir: Path, config) -> None:
    """The run goes on as it is now: the next `--resume`, and the report, read what it was last told."""
    from headrace.config import dump_config

    partial = run_dir / f"{CONFIG_FILE}.partial"
    partial.write_text(dump_config(config), encoding="utf-8")
    partial.replace(run_dir / CONFIG_FILE)


def main() -> None:
    """Exit code 0: done; 1: the run could not go on; 2: something for the user to mend; 130: interrupted."""
    try:
        app()
    except UserError as error:
        _fail(error, 2)
    except HeadraceError as error:
        _fail(error, 1)


def _fail(error: Exception, code: int) -> None:
    match error:
        case UserError():
            line = " ".join(str(error).split())
        case PartFailed():  # below its first line is the traceback of another process
            line = str(error).partition("\n")[0]
        case _:
            line = str(error)
    print(f"headrace: {line}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
