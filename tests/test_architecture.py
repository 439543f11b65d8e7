"""Turns the package's syntax trees into its import graph, and holds the directions in which imports may run."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import headrace

ROOT = Path(headrace.__file__).parent
PLANES = ("rollout", "reward", "training", "exchange", "observability")

# A module may import from ranks below its own, and from its own part. Parts of one rank never import each other.
RANKS = {
    **dict.fromkeys(("cores", "errors", "pages", "signals", "types", "vectors"), 0),
    **dict.fromkeys(("configbase", "imports", "protocols"), 1),
    "policies": 2,
    **dict.fromkeys(PLANES, 3),
    "config": 4,
    "valid_config": 5,
    "nearest": 6,
    **dict.fromkeys(("models", "orchestrator"), 5),
    "estimates": 6,
    **dict.fromkeys(("assemble_clients", "assemble_control"), 7),
    "assemble_tokens": 8,
    **dict.fromkeys(("assemble", "check"), 9),
    "session": 10,
    "simulation": 11,
    "comparison": 12,
    "cli": 13,
}
UPWARDS = {("config", "orchestrator.config")}
"""The one exception: the join of all configs reads the orchestrator's too, which imports nothing but the base."""

HEAVY = (
    "torch",
    "gymnasium",
    "starlette",
    "transformers",
    "uvicorn",
    "ray",
    "vllm",
    "redis",
    "plotly",
    "tensorboard",
    "wandb",
    "trackio",
    "datasets",
)
LIGHT_MODULES = [
    "errors",
    "types",
    "protocols",
    "configbase",
    "config",
    "valid_config",
    "cli",
    "check",
    "estimates",
    "assemble",
    *(f"{part}.config" for part in (*PLANES, "policies", "orchestrator")),
]


def module_name(path: Path) -> str:
    """`rollout/engines/hf.py` -> `rollout.engines.hf`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def imports(path: Path, *, top_level_only: bool = False) -> list[tuple[int, str]]:
    """(line, absolute module) of every import in a file, those under TYPE_CHECKING included unless `top_level_only`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found: list[tuple[int, str]] = []
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
        inside_call = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        type_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        if not (top_level_only and (inside_call or type_only)):
            waiting.extend(ast.iter_child_nodes(node))
    return found


def part_of(module: str) -> str:
    return module.partition(".")[0]


def may_import(importer: str, imported: str) -> bool:
    """Both without the leading `headrace.`; `imported` may end in a name from the module."""
    mine, other = part_of(importer), part_of(imported)
    if not mine or mine == other:
        return True
    if any(mine == first and imported.startswith(second) for first, second in UPWARDS):
        return True
    return RANKS[other] < RANKS[mine]


def test_every_part_has_a_rank():
    assert {part_of(name) for name in MODULES} - {""} <= set(RANKS)


@pytest.mark.parametrize("name", [name for name in MODULES if name])
def test_imports_run_one_way(name: str):
    wrong = [
        f"{MODULES[name].relative_to(ROOT)}:{line} imports {module}"
        for line, module in imports(MODULES[name])
        if module.startswith("headrace.") and not may_import(name, module.removeprefix("headrace."))
    ]
    assert not wrong, wrong


def test_the_rule_itself_refuses_what_it_should():
    assert not may_import("rollout.partial", "reward.pool")
    assert not may_import("training.losses", "orchestrator.controller")
    assert not may_import("types", "protocols.Turn")
    assert not may_import("orchestrator.controller", "assemble.run")
    assert not may_import("exchange.buffer", "config.RunConfig")
    assert may_import("orchestrator.controller", "exchange.buffer.Buffer")
    assert may_import("rollout.engines.hf", "rollout.partial")


def test_the_package_itself_imports_nothing():
    assert imports(ROOT / "__init__.py") == []


@pytest.mark.parametrize("name", [name for name in LIGHT_MODULES if name in MODULES])
def test_light_modules_import_heavy_packages_only_where_they_are_used(name: str):
    top = {part_of(module) for _, module in imports(MODULES[name], top_level_only=True)}
    assert not top & set(HEAVY)


def test_only_its_own_runtime_imports_ray():
    users = [name for name, path in MODULES.items() if any(part_of(module) == "ray" for _, module in imports(path))]
    assert set(users) <= {"orchestrator.runtimes.ray"}


@pytest.mark.parametrize("name", list(MODULES))
def test_every_file_opens_with_one_sentence(name: str):
    text = MODULES[name].read_text(encoding="utf-8")
    if text.strip():
        assert ast.get_docstring(ast.parse(text)), f"{MODULES[name]} has no docstring"


LOADED = "import sys; {body}; print('loaded', *sorted({{name.partition('.')[0] for name in sys.modules}}))"


def loaded_by(body: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", LOADED.format(body=body)], capture_output=True, text=True, check=True, timeout=60
    )
    return set(done.stdout.splitlines()[-1].split()[1:])


def test_help_loads_no_heavy_package():
    help_page = (
        "from headrace.cli import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        "import sys; print('loaded', *{name.partition('.')[0] for name in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", help_page], capture_output=True, text=True, check=True, timeout=60)
    assert "Train (or only roll out)" in done.stdout
    loaded = set(done.stdout.splitlines()[-1].split())
    assert not loaded & {*HEAVY, "numpy", "rich", "msgspec", "hypothesis"}


def test_reading_a_config_loads_no_heavy_package():
    body = "from headrace.config import load_config; from headrace.valid_config import validate; validate(load_config('tiny', []))"
    assert not loaded_by(body) & set(HEAVY)
    assert "numpy" not in loaded_by("from headrace.config import load_config; load_config('tiny', [])")


def test_types_and_protocols_load_numpy_alone():
    assert not loaded_by("import headrace.types, headrace.protocols") & {*HEAVY, "msgspec", "rich"}


def test_test_files_have_names_of_their_own():
    """pytest imports them by their bare name: a second one of a name stops the collection of all."""
    names = Counter(path.name for path in Path(__file__).parent.rglob("test_*.py"))
    assert [name for name, found in names.items() if found > 1] == []
