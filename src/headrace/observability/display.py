"""Turns pictures of the run (`FlowStatus`) into what a terminal shows: a live panel, one line per step, or nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal, Protocol

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from headrace.types import FlowStatus

REDRAW_S = 0.2
"""Drawing costs a few milliseconds of the controller's core."""
SAMPLE_S = 4.0
"""A completion stays so long, that one can read it."""


class Terminal(Console):
    """A console whose reader may go away: rich would end the whole program then."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        raise BrokenPipeError


class Display(Protocol):
    def update(self, status: FlowStatus) -> None: ...

    def message(self, text: str) -> None:
        """A line that stays."""
        ...

    def close(self) -> None:
        """Idempotent."""
        ...


def open_display(
    kind: Literal["auto", "live", "lines", "none"], total_steps: int, console: Console | None = None
) -> Display:
    """`auto` is live on a terminal, else one line per step."""
    console = console or Terminal(highlight=False)
    if kind == "none":
        return NoDisplay()
    if kind == "live" or (kind == "auto" and console.is_terminal and not console.is_dumb_terminal):
        return LiveDisplay(total_steps, console)
    return LinesDisplay(total_steps, console)


# -------------------------------------------------------------------------------------------------------- in words


def sparkline(values: list[float], width: int, ascii_only: bool = False) -> str:
    """The last `width` values as bars between their smallest and largest; all equal draws the middle."""
    bars = "_.-=+*#" if ascii_only else "▁▂▃▄▅▆▇█"
    shown = values[-width:] if width > 0 else []
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    if high <= low:
        return bars[len(bars) // 2] * len(shown)
    return "".join(bars[min(len(bars) - 1, int((v - low) / (high - low) * len(bars)))] for v in shown)


def clock(seconds: float) -> str:
    """65 -> "1:05", 3700 -> "1:01:40"."""
    whole = max(0, int(seconds))
    minutes, rest = divmod(whole, 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


class Steps:
    """Tells when a step ended, and the seconds to the last one at the pace since the first end that it saw: what comes
    before has the start in it, and a resumed run does not begin at step 0."""

    def __init__(self) -> None:
        self._last_step: int | None = None
        self._first: FlowStatus | None = None
        self.left_s: float | None = None

    def ended(self, status: FlowStatus) -> bool:
        """Whether a step did since the picture before; the first picture only says where this run begins."""
        before, self._last_step = self._last_step, status.step
        if before is None or status.step <= before:
            return False
        first = self._first = self._first or status
        done, left = status.step - first.step, status.total_steps - status.step
        self.left_s = (status.elapsed_s - first.elapsed_s) / done * left if done > 0 and left > 0 else None
        return True


def plain(text: str, encoding: str | None = "utf-8") -> str:
    """The text without control characters (a completion may hold an escape sequence) and what the terminal lacks."""
    kept = "".join(c if c.isprintable() or c == "\n" else "·" for c in text.replace("\t", "    "))
    encoding = encoding or "utf-8"
    return kept.encode(encoding, errors="replace").decode(encoding, errors="replace")


def dropped_words(dropped: dict[str, int]) -> str:
    parts = [f"{reason} {count}" for reason, count in sorted(dropped.items(), key=lambda item: -item[1]) if count]
    return ", ".join(parts) or "none"


def step_line(status: FlowStatus, left_s: float | None = None) -> str:
    """One step in one line. left_s: to the last one, if that is known."""
    reward = "  -  " if status.reward is None else f"{status.reward:.3f}"
    width = len(str(status.total_steps))
    parts = [
        f"step {status.step:>{width}}/{status.total_steps}",
        f"reward {reward}",
        f"{status.samples_per_s:.1f} {status.names[0]}/s",
        f"{status.tokens_per_s:.0f} {status.names[1]}/s",
        f"lag {status.lag_mean:.1f} max {status.lag_max}",
        f"queue {status.ready} ready {status.running} running",
        f"sync {status.sync_s:.2f}s",
        clock(status.elapsed_s),
    ]
    if any(status.dropped.values()):
        parts.insert(-1, f"dropped {dropped_words(status.dropped)}")
    return "  ".join(parts + ([f"(left {clock(left_s)})"] if left_s is not None else []))


# ---------------------------------------------------------------------------------------------------------- displays


class NoDisplay:
    def update(self, status: FlowStatus) -> None:
        pass

    def message(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


class LinesDisplay:
    """One line per step, for logs and pipes. A reader that goes away silences it and does not end the run."""

    def __init__(self, total_steps: int, console: Console) -> None:
        self._total_steps = total_steps
        self._console = console
        self._steps = Steps()
        self._broken = False

    def update(self, status: FlowStatus) -> None:
        if self._steps.ended(status):
            self._line(step_line(status, self._steps.left_s))

    def message(self, text: str) -> None:
        self._line(text)

    def close(self) -> None:
        pass

    def _line(self, text: str) -> None:
        if self._broken:
            return
        try:
            # Not through rich: it would wrap at the width of a terminal that is not there.
            self._console.file.write(plain(text, self._console.encoding) + "\n")
            self._console.file.flush()
        except (OSError, ValueError):
            self._broken = True


class LiveDisplay:
    """A panel that stays at the bottom of the terminal; messages scroll above it."""

    def __init__(self, total_steps: int, console: Console) -> None:
        self._total_steps = total_steps
        self._console = console
        self._ascii = "utf" not in (console.encoding or "").lower()
        self._rewards: list[float] = []
        self._steps = Steps()
        self._drawn_at = float("-inf")
        self._sample = ""
        self._sample_at = float("-inf")
        self._status: FlowStatus | None = None
        self._closed = False
        # Redrawn by `update` alone: a refresh thread would take turns on the cores that generate and train.
        self._live = Live(console=console, auto_refresh=False, transient=False, vertical_overflow="crop")
        self._guard(lambda: self._live.start())

    def update(self, status: FlowStatus) -> None:
        if self._closed:
            return
        new_step = self._steps.ended(status)
        if new_step and status.reward is not None and status.reward == status.reward:
            self._rewards.append(status.reward)
        now = time.monotonic()
        if status.sample and status.sample != self._sample and now - self._sample_at >= SAMPLE_S:
            self._sample, self._sample_at = status.sample, now
        self._status = status
        if new_step or now - self._drawn_at >= REDRAW_S:
            self._drawn_at = now
            self._draw()

    def message(self, text: str) -> None:
        self._guard(lambda: self._console.print(Text(plain(text, self._console.encoding))))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            if self._status is not None:
                self._draw()
            self._guard(self._live.stop)

    def _draw(self) -> None:
        assert self._status is not None
        picture = self.render(self._status)
        self._guard(lambda: self._live.update(picture, refresh=True))

    def _guard(self, action: Callable[[], object]) -> None:
        try:
            action()
        except (OSError, ValueError, UnicodeError):
            # The terminal went away (hang-up, closed pipe): the run is worth more than its display.
            self._closed = True

    # ------------------------------------------------------------------------------------------------- the picture

    def render(self, status: FlowStatus) -> RenderableType:
        """The whole panel for the console's present width."""
        width = max(10, self._console.width - 4)
        blocks: list[RenderableType] = [self._progress(status, width), self._reward(status, width)]
        tables = [self._flow(status), self._weights(status)]
        blocks.append(Columns(tables, expand=False, padding=(0, 3)) if width >= 76 else Group(*tables))
        if status.waits:
            blocks.append(self._waits(status))
        if self._sample and width >= 30:
            blocks.append(self._completion(width))
        title = Text("headrace", style="bold")
        return Panel(Group(*blocks), title=title, title_align="left", border_style="cyan", padding=(0, 1))

    def _progress(self, status: FlowStatus, width: int) -> RenderableType:
        total = status.total_steps or self._total_steps
        line = Text(no_wrap=True, overflow="ellipsis")
        line.append(f"step {status.step}/{total}", style="bold")
        line.append(f"   {clock(status.elapsed_s)}")
        left_s = self._steps.left_s
        line.append(f"   left {clock(left_s)}" if left_s is not None else "")
        if self._ascii:
            return line
        # In a table, since a bare bar ends without a line break.
        bar = Table.grid()
        bar.add_row(ProgressBar(total=max(1, total), completed=min(status.step, total), width=width))
        return Group(line, bar)

    def _reward(self, status: FlowStatus, width: int) -> RenderableType:
        line = Text(no_wrap=True, overflow="crop")
        line.append("reward ", style="dim")
        line.append("-" if status.reward is None else f"{status.reward:.3f}", style="bold green")
        line.append("  ")
        line.append(sparkline(self._rewards, width - 16, self._ascii), style="green")
        return line

    def _flow(self, status: FlowStatus) -> Table:
        return _facts(
            ("speed", _speed(status)),
            (
                status.names[2],
                f"{status.running} running, {status.ready} ready, {status.held} held, room {status.room}",
            ),
            ("done", f"{status.trained_units} trained; dropped: {dropped_words(status.dropped)}"),
        )

    def _weights(self, status: FlowStatus) -> Table:
        return _facts(
            ("version", f"{status.version} trained, {status.live_version} live"),
            ("lag", f"mean {status.lag_mean:.2f}, max {status.lag_max}"),
            ("syncs", f"{status.syncs}, {status.sync_s:.2f} s each, stand-still {status.standstill_s * 1000:.0f} ms"),
        )

    def _waits(self, status: FlowStatus) -> RenderableType:
        return _facts(*((part, plain(what, self._console.encoding)) for part, what in status.waits.items()))

    def _completion(self, width: int) -> RenderableType:
        text = plain(self._sample, self._console.encoding)
        lines = text.splitlines()[:4]
        body = Text("\n".join(line[: 2 * width] for line in lines), overflow="ellipsis", style="italic")
        return Group(Text(f"one of the {self._status.names[2] if self._status else 'units'}", style="dim"), body)


def _speed(status: FlowStatus) -> str:
    attempts, parts, _ = status.names
    return f"{status.samples_per_s:,.1f} {attempts}/s, {status.tokens_per_s:,.0f} {parts}/s"


def _facts(*rows: tuple[str, str]) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, Text(value))
    return table
