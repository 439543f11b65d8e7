"""Holds the generated pages to their source, and what the README says to what there is."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import msgspec
import pytest

from headrace.config import RunConfig, library_names, preset_names
from headrace.configbase import Config, field_types, is_config

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def config_docs():
    spec = importlib.util.spec_from_file_location("config_docs", ROOT / "tools" / "config_docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_config_reference_is_up_to_date(config_docs):
    assert config_docs.TARGET.read_text(encoding="utf-8") == config_docs.render(), "run `make docs`"


def test_the_config_reference_names_every_key(config_docs):
    page = config_docs.render()

    def walk(struct: type[Config]):
        for field in msgspec.structs.fields(struct):
            if is_config(field_types(struct)[field.name]):
                walk(field_types(struct)[field.name])
            elif struct is not RunConfig or field.name != "reward":
                assert f"| `{field.name}` |" in page or f"{field.name}]]" in page, field.name

    walk(RunConfig)


def test_field_docs_reads_the_string_after_a_field(config_docs):
    docs = config_docs.field_docs(RunConfig)
    assert docs["placement"].startswith("sync: generation and training alternate")
    assert list(docs) == list(RunConfig.__struct_fields__)


def test_the_readme_names_every_preset_and_only_files_that_exist():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in preset_names():
        assert f"`{name}`" in text or f"run {name}" in text
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if not target.startswith("http"):
            assert (ROOT / target).exists(), target
    for target in re.findall(r"`(src/headrace/[\w/.]+)`", text):
        assert (ROOT / target).exists(), target


def test_every_key_says_what_it_is(config_docs):
    assert not [line for line in config_docs.render().splitlines() if line.endswith("|  |")]


def test_the_metrics_page_names_every_metric_that_is_written():
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    named: set[str] = set()
    for cell in re.findall(r"^\| (`.*?) \|", page, re.M):
        prefix = ""
        for name in re.findall(r"`([^`]+)`", cell):
            prefix = name.rpartition("/")[0] if "/" in name else prefix
            named.add(name if "/" in name else f"{prefix}/{name}")
    written: set[str] = set()
    source = ROOT / "src" / "headrace"
    files = ["narrator.py", "learner.py", "replay_learner.py", "turns.py", "evaluate.py"]
    for file in [*(source / "orchestrator" / name for name in files), *source.glob("training/**/*.py"),
                 source / "reward/meter.py", source / "exchange/replay.py"]:  # fmt: skip
        written |= set(re.findall(r'"([a-z]+/[a-z0-9_/]+)"', file.read_text(encoding="utf-8")))
    assert len(written) > 50
    prefixes = {name for name in written if any(other.startswith(f"{name}/") for other in named)}
    assert sorted(written - named - prefixes) == []


def test_the_presets_page_names_every_library():
    page = (ROOT / "docs" / "presets.md").read_text(encoding="utf-8").lower().replace("-", "_")
    for name in library_names():
        assert name.partition("_")[0] in page, name


def test_pages_are_finished():
    for page in (ROOT / "docs").glob("*.md"):
        assert "@@" not in page.read_text(encoding="utf-8"), page
