"""Write the reference pages from the program itself: docs/cli.md, docs/study-file.md, docs/records.md.

`--check` writes nothing and exits 1 where a page is stale.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from lastcall.records import MEASURED, ROUTED, Column
from lastcall.study import Study

DOCS = Path(__file__).parent
NOTE = "<!-- Written by docs/generate.py; do not edit. -->\n\n"
COMMANDS = (
    "run",
    "demo",
    "check",
    "books",
    "plan",
    "measure",
    "fit",
    "power",
    "lock",
    "judge",
    "analyse",
    "report",
)


def main() -> int:
    pages = {"cli.md": cli(), "study-file.md": study_file(), "records.md": records()}
    stale = [n for n, text in pages.items() if not (DOCS / n).exists() or (DOCS / n).read_text() != text]
    if "--check" in sys.argv:
        for name in stale:
            print(f"docs/{name} is stale; run `make docs`")
        return 1 if stale else 0
    for name in stale:
        (DOCS / name).write_text(pages[name])
    print(f"{len(stale)} of {len(pages)} pages written")
    return 0


def cli() -> str:
    """--help of the program and of every command."""
    parts = [f"```text\n{_help([])}\n```\n"]
    parts += [f"## lastcall {name}\n\n```text\n{_help([name])}\n```\n" for name in COMMANDS]
    return NOTE + "# Command line\n\n" + "\n".join(parts)


def _help(arguments: list[str]) -> str:
    environment = {**os.environ, "COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1", "TERMINAL_WIDTH": "100"}
    command = [
        sys.executable,
        "-c",
        "from lastcall.cli import app; app(prog_name='lastcall')",
        *arguments,
        "--help",
    ]
    output = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    return "\n".join(line.rstrip() for line in output.strip("\n").splitlines())


def study_file() -> str:
    """Every section and key of the study file, with its default and meaning."""
    return NOTE + "# The study file\n\n" + "\n".join(_sections("", Study))


def _sections(path: str, section: type[BaseModel]) -> Iterator[str]:
    doc = (section.__doc__ or "").strip()
    heading = f"[{path}]" if path else "Top level"
    yield f"## {heading}\n\n{doc}\n\n| key | default | meaning |\n| --- | --- | --- |"
    inner: list[tuple[str, type[BaseModel]]] = []
    for name, field in section.model_fields.items():
        if sub := _section_in(field.annotation):
            inner.append((f"{path}.{name}".lstrip("."), sub))
            continue
        meaning = " ".join((field.description or "").split()).replace("|", "\\|")
        yield f"| `{name}` | {_default(field.default)} | {meaning} |"
    yield ""
    for where, sub in inner:
        yield from _sections(where, sub)


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """The section class inside an annotation such as `tuple[Checkpoint, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return None if annotation.__name__ == "Comparison" else annotation
    found = (_section_in(a) for a in get_args(annotation))
    return next((sub for sub in found if sub is not None), None)


def _default(value: Any) -> str:
    if value is PydanticUndefined:
        return "required"
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return f"`[{', '.join(_literal(v) for v in value)}]`"
    return f"`{_literal(value)}`"


def _literal(value: Any) -> str:
    text = str(value)
    return text if isinstance(value, int | float) else f'"{text}"'


def records() -> str:
    """Every column of the records."""
    return (
        NOTE
        + "# Records\n\n## measured/\\<checkpoint\\>/\\<split\\>/\\<book\\>.parquet\n\nOne row a prediction. "
        + "`loss_local<w>` (nats) follows for every local window. Beside it, in `.safetensors`, the states "
        + "`bypass` (s) and `incoming` (h), [block, horizon, d], in the model's own type.\n\n"
        + _columns(MEASURED)
        + "\n## routed/\\<checkpoint\\>/\\<book\\>.parquet\n\n"
        + "One row a scored test prediction, router and seed.\n\n"
        + _columns(ROUTED)
        + "\n`judged.json` is typed and explained, key by key, in `lastcall/results.py`, `analyses.json` in "
        + "`lastcall/secondary.py`.\n"
    )


def _columns(columns: tuple[Column, ...]) -> str:
    rows = (f"| `{c.name}` | {c.type} | {c.unit} | {c.meaning} |" for c in columns)
    return "| column | type | unit | meaning |\n| --- | --- | --- | --- |\n" + "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.exit(main())
