"""Turns the config structs, with the string after each field, into docs/config.md."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from pathlib import Path
from typing import Any, get_args

import msgspec
import tomli_w

from headrace.config import RunConfig, preset_names
from headrace.configbase import Config, describe, field_types, is_config
from headrace.valid_config import available

TARGET = Path(__file__).parent.parent / "docs" / "config.md"

INTRODUCTION = """\
<!-- Made by `make docs` from the structs in src/headrace; change those. -->
# Configuration

A run is described by one TOML file, or by a preset ({presets}), and dotted overrides on top of it:

```
headrace run my.toml rollout.sampling.temperature=0.8 'rollout.sampling.stop=["\\n"]' reward.functions.0.weight=2
```

Every table and key may be left out. An override's value is read as TOML; what is not TOML is taken as text. A key whose
default is `none` can be given back that value with the text "none". Relative paths in a file start at the file's folder,
those in an override at the current one. `headrace check my.toml` shows what a config comes to; a run keeps its resolved
form in `runs/NAME/config.toml`.
"""


def field_docs(struct: type[Config]) -> dict[str, str]:
    """Field name -> the string that stands after it in the source."""
    body = ast.parse(textwrap.dedent(inspect.getsource(struct))).body[0].body  # type: ignore[attr-defined]
    docs = {}
    for field, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            docs[field.target.id] = inspect.cleandoc(following.value.value) if is_text else ""  # type: ignore[union-attr]
    return docs


def default_of(field: Any) -> str:
    if field.required:
        return "*required*"
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    if value is None:
        return "none"
    if isinstance(value, tuple):
        value = list(value)
    if value == {}:
        return "`{}`"
    text = tomli_w.dumps({"v": value}).removeprefix("v = ")
    return f"`{' '.join(text.split()).replace('[ ', '[').replace(',]', ']').replace(', ]', ']')}`"


def refused(annotation: Any, path: str) -> str:
    """Which of the choices are named in the design but refused in a run."""
    built = available().get(path)
    missing = [choice for choice in get_args(annotation) if choice not in (*(built or ()), "auto")] if built else []
    return f" Refused so far: {', '.join(missing)}." if missing else ""


def table(struct: type[Config], path: str) -> list[str]:
    """The lines of one struct and of those inside it."""
    types, docs = field_types(struct), field_docs(struct)
    inner = []
    rows = []
    for field in msgspec.structs.fields(struct):
        annotation = types[field.name]
        below = f"{path}.{field.name}" if path else field.name
        item = annotation if is_config(annotation) else next((a for a in get_args(annotation) if is_config(a)), None)
        if item is not None:
            inner.append((item, below if item is annotation else f"[{below}]"))
            continue
        meaning = " ".join(docs[field.name].split()).replace("|", "\\|") + refused(annotation, below)
        rows.append(f"| `{field.name}` | {describe(annotation)} | {default_of(field)} | {meaning} |")
    about = inspect.cleandoc(struct.__doc__ or "")
    about = about.partition("]:")[2].strip() if about.startswith("[") else about
    about = about.lstrip("] ").strip()
    lines = [f"## [{path}]" if path else "## Top level", ""]
    if about:
        lines += [about[0].upper() + about[1:], ""]
    if rows:
        lines += ["| key | value | default | meaning |", "|---|---|---|---|", *rows, ""]
    for struct_inside, path_inside in inner:
        lines += table(struct_inside, path_inside)
    return lines


def render() -> str:
    """The whole page."""
    presets = ", ".join(f"`{name}`" for name in preset_names())
    return INTRODUCTION.format(presets=presets) + "\n" + "\n".join(table(RunConfig, "")).rstrip() + "\n"


if __name__ == "__main__":
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(render(), encoding="utf-8")
    print(f"wrote {TARGET.relative_to(Path.cwd()) if TARGET.is_relative_to(Path.cwd()) else TARGET}", file=sys.stderr)
