"""Every mutant still finds the line that it breaks."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_each_mutants_line_is_there():
    spec = importlib.util.spec_from_file_location("run_mutants", ROOT / "tests" / "run_mutants.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["run_mutants"] = module
    spec.loader.exec_module(module)
    gone = [m.name for m in module.MUTANTS if m.old not in (ROOT / "src/headrace" / m.file).read_text(encoding="utf-8")]
    assert not gone
