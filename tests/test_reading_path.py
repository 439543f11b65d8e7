"""The path of data is short: one step of `tiny`, traced in all processes, against the budget and the README's reading list."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MOST_FILES, MOST_LINES = 70, 5670
"""A ratchet: what it is today, and a little. Lower it whenever the path gets shorter; the aim is 16 files and 2,000 lines."""
LEFT_OUT = ("observability/", "narrator.py", "config.py", "configbase.py", "nearest.py", "checkpoint")
"""What watches, configures or saves a run is not the path of data."""

TRACER = """
import ast, atexit, builtins, json, os
from importlib.machinery import SourceFileLoader

_seen = builtins.__headrace_seen__ = set()

class _Mark(ast.NodeTransformer):
    def __init__(self, path):
        self.path = path
    def visit_FunctionDef(self, node):
        compiled = any(word in ast.dump(d) for d in node.decorator_list for word in ("njit", "intrinsic", "compiled"))
        if not compiled:
            self.generic_visit(node)
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        mark = ast.parse(f"__headrace_seen__.add(({self.path!r}, {node.name!r}, {first}))").body[0]
        if compiled:  # a loop that is compiled cannot mark itself: it counts as entered
            return [node, mark]
        at = 1 if ast.get_docstring(node) is not None else 0
        node.body.insert(at, mark)
        return node
    visit_AsyncFunctionDef = visit_FunctionDef

_get_code = SourceFileLoader.get_code
def get_code(self, name):
    if not name.startswith("headrace"):
        return _get_code(self, name)
    path = self.get_filename(name)
    tree = _Mark(path).visit(ast.parse(self.get_data(path)))
    return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)
SourceFileLoader.get_code = get_code

def _write():
    with open(os.path.join(os.environ["HEADRACE_TRACE"], str(os.getpid()) + ".json"), "w") as file:
        json.dump(sorted(_seen), file)
atexit.register(_write)

_exit = os._exit
def _exit_after_writing(code):
    _write()
    _exit(code)
os._exit = _exit_after_writing
"""
"""Marks each function of the package as it is entered. (A profile hook would slow every import down tenfold.)"""


def reading_list() -> list[str]:
    """The source files that the README tells to read, in its order."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").split("## Reading list")[1].split("\n## ")[0]
    return re.findall(r"`src/headrace/([\w/]+\.py)`", text)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> dict[str, int]:
    """File -> lines of the functions entered while one step of `tiny` is generated, scored, trained and sent back."""
    from headrace.models.tiny import make_tiny

    folder = tmp_path_factory.mktemp("path")
    make_tiny(folder / "model", seed=0, warmup_steps=0)
    traces, hook = folder / "traces", folder / "hook"
    traces.mkdir()
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(TRACER)
    environment = {**os.environ, "PYTHONPATH": f"{hook}{os.pathsep}{ROOT / 'src'}", "HEADRACE_TRACE": str(traces)}
    arguments = [
        "run", "tiny", f"model.path={folder / 'model'}", "training.groups=2", "training.steps=1", "evaluation.source=",
        "observability.sinks=[\"jsonl\"]", "--runs-dir", str(folder / "runs"), "--display", "none",
    ]  # fmt: skip
    code = f"import sys; sys.argv = {['headrace', *arguments]!r}; from headrace.cli import main; main()"
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=120)
    return lines_entered(traces)


def lines_entered(traces: Path) -> dict[str, int]:
    entered: dict[str, set[tuple[str, int]]] = {}
    for trace in traces.glob("*.json"):
        for filename, name, first in json.loads(trace.read_text()):
            short = filename.split("/headrace/", 1)[1]
            if not any(part in short for part in LEFT_OUT):
                entered.setdefault(short, set()).add((name, first))
    return {short: code_lines(ROOT / "src/headrace" / short, found) for short, found in entered.items()}


def code_lines(file: Path, functions: set[tuple[str, int]]) -> int:
    """Lines of the functions, blank lines, comments and docstrings aside, each line once."""
    import ast

    text = file.read_text(encoding="utf-8")
    lines, source = set(), text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if (node.name, first) in functions:
                body = node.body[1:] if ast.get_docstring(node) else node.body
                start = body[0].lineno if body else node.lineno
                lines |= set(range(node.lineno, start)) - set(range(node.lineno + 1, start))
                lines |= set(range(start, node.end_lineno + 1))
    return sum(bool(source[line - 1].strip()) and not source[line - 1].strip().startswith("#") for line in lines)


def test_one_step_is_traced_in_all_processes(path):
    for part in ("rollout/engines/core.py", "training/backends/single_device.py", "reward/pool.py"):
        assert part in path, f"{part} was not entered: is every process traced?"


def test_the_reading_list_covers_the_path(path):
    listed = reading_list()
    for file in listed:
        assert (ROOT / "src/headrace" / file).is_file(), f"README names {file}, which does not exist"
    covered = sum(lines for file, lines in path.items() if file in listed)
    missing = {file: lines for file, lines in sorted(path.items(), key=lambda item: -item[1]) if file not in listed}
    assert covered >= 0.9 * sum(path.values()), f"{covered} of {sum(path.values())} lines; not listed: {missing}"


def test_the_path_does_not_grow(path):
    total = sum(path.values())
    print(f"{len(path)} files, {total} lines", dict(sorted(path.items(), key=lambda item: -item[1])))
    assert len(path) <= MOST_FILES, sorted(path)
    assert total <= MOST_LINES, dict(sorted(path.items(), key=lambda item: -item[1]))
