"""The display on wide, narrow and absent terminals, with text that tries to break it."""

import io
import os

import pytest
from rich.console import Console

from headrace.observability.display import (
    LinesDisplay,
    LiveDisplay,
    NoDisplay,
    Steps,
    Terminal,
    clock,
    open_display,
    plain,
    sparkline,
)
from headrace.types import FlowStatus


def status(step, **more):
    facts = {
        "elapsed_s": 3.0 * step, "step": step, "total_steps": 40, "version": step, "live_version": step - 1,
        "reward": 0.02 * step, "samples_per_s": 34.2, "tokens_per_s": 410.0, "running": 8, "ready": 3, "held": 14, "room": 2,
        "lag_mean": 0.8, "lag_max": 2, "syncs": step, "sync_s": 0.41, "standstill_s": 0.004, "trained_units": 8 * step,
        "dropped": {"lag": 3, "retries": 1}, "waits": {"trainer": "waits for a batch", "engine-0": "generates"},
        "sample": "27 + 41 = \x1b[2J[/bold]68 😀",
    }  # fmt: skip
    return FlowStatus(**(facts | more))


def test_sparkline():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([1, 1, 1], 8) == "▅▅▅" and sparkline([], 8) == "" and sparkline([1, 2], 0) == ""
    assert sparkline(list(range(100)), 10)[-1] == "█" and len(sparkline(list(range(100)), 10)) == 10
    assert sparkline([0, 1], 8, ascii_only=True).isascii()


def test_clock():
    assert (clock(65), clock(3700), clock(-1)) == ("1:05", "1:01:40", "0:00")


@pytest.mark.parametrize("begun_at", [0, 30])
def test_the_time_left_is_told_from_the_second_step_of_this_part_of_the_run_on(begun_at):
    steps, told = Steps(), []
    for step in (0, 0, 1, 1, 2, 3):
        at = status(begun_at + step, elapsed_s=20.0 + 3.0 * step if step else 0.5)
        told.append((steps.ended(at), steps.left_s))
    left = [3.0 * (40 - begun_at - step) for step in (2, 3)]
    assert told == [(False, None), (False, None), (True, None), (False, None), (True, left[0]), (True, left[1])]
    assert steps.ended(status(40)) and steps.left_s is None


def test_plain_takes_escape_sequences_out():
    assert plain("a\x1b[31mb\tc\nd") == "a·[31mb    c\nd"
    assert plain("█ é", "ascii") == "? ?"


def live(width, encoding="utf-8"):
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, errors="strict", write_through=True)
    console = Console(file=file, width=width, height=40, force_terminal=True, _environ={"TERM": "xterm"})
    return LiveDisplay(40, console), raw, console


def test_live_shows_everything_the_status_holds():
    display, raw, console = live(110)
    for step in range(1, 9):
        display.update(status(step))
    console.begin_capture()
    console.print(display.render(status(8)))
    shown = console.end_capture()
    display.close()
    for words in ("step 8/40", "left 1:36", "reward", "0.160", "▁", "34.2 samples/s", "410 tokens/s", "8 running", "3 ready",
                  "14 held", "room 2", "lag 3, retries 1", "8 trained, 7 live", "mean 0.80, max 2", "0.41 s each",
                  "4 ms", "waits for a batch", "27 + 41 = "):  # fmt: skip
        assert words in shown, words
    assert "\x1b[2J" not in raw.getvalue().decode(), "a completion cannot clear the screen"


@pytest.mark.parametrize("width", [1, 5, 12, 24, 40, 75, 76, 200])
def test_no_line_is_wider_than_the_terminal(width):
    display, _, console = live(width)
    display.update(status(1))
    console.begin_capture()
    console.print(display.render(status(2)))
    lines = console.end_capture().splitlines()
    display.close()
    from rich.text import Text

    assert lines and max(Text.from_ansi(line).cell_len for line in lines) <= max(width, 4)


def test_live_on_an_ascii_terminal_and_with_nothing_known():
    display, raw, _ = live(60, "ascii")
    display.update(FlowStatus(elapsed_s=0, step=0, total_steps=0, version=0, live_version=-1))
    display.update(status(1))
    display.message("a mésage [bold]")
    display.close()
    display.close()
    display.update(status(2))
    assert b"step 1/40" in raw.getvalue() and b"[bold]" in raw.getvalue()


def test_kind_auto_follows_the_terminal():
    piped = Console(file=io.StringIO())
    assert isinstance(open_display("auto", 3, piped), LinesDisplay)
    assert isinstance(open_display("none", 3, piped), NoDisplay)
    terminal = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "xterm"})
    shown = open_display("auto", 3, terminal)
    assert isinstance(shown, LiveDisplay)
    shown.close()
    assert isinstance(
        open_display("auto", 3, Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "dumb"})),
        LinesDisplay,
    )


def test_lines_print_one_unwrapped_line_a_step():
    file = io.StringIO()
    display = open_display("lines", 40, Console(file=file, width=20))
    for step in (0, 1, 1, 1, 2, 2, 3):
        display.update(status(step))
    display.message("note")
    display.close()
    lines = file.getvalue().splitlines()
    assert len(lines) == 4 and lines[-1] == "note"
    assert lines[0].startswith("step  1/40  reward 0.020  34.2 samples/s") and "dropped lag 3, retries 1" in lines[0]


def test_a_reader_that_goes_away_does_not_end_the_run():
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as file:
        for kind in ("lines", "live"):
            display = open_display(kind, 40, Terminal(file=file, force_terminal=kind == "live", width=80))
            for step in range(1, 4):
                display.update(status(step))
            display.message("still here")
            display.close()
        # What is left in the file's buffer cannot be written either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())
