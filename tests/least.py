"""The least study, and changes of it, as a study file would say them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tomlkit

from lastcall.study import Study
from lastcall.study_file import parse_study

LISTS: dict[str, Any] = {"fit": ["a"], "calibration": ["b"], "test": ["c"]}
LEAST: dict[str, Any] = {
    "name": "least",
    "books": {"source": "sotu", "lists": LISTS},
    "checkpoints": [{"name": "one", "model": "hub/one"}],
}
"""The least that a study must say."""


def changed(**at: Any) -> dict[str, Any]:
    """LEAST with values put at paths, dots written `__`; checkpoint keys go to the first one."""
    data: Any = {**LEAST, "books": {**LEAST["books"]}, "checkpoints": [{**LEAST["checkpoints"][0]}]}
    for path, value in at.items():
        *sections, key = path.split("__")
        here = data
        for section in sections:
            here = here["checkpoints"][0] if section == "checkpoints" else here.setdefault(section, {})
        here[key] = value
    return data  # type: ignore[no-any-return]


def parse(data: dict[str, Any], folder: Path = Path("/nowhere")) -> Study:
    return parse_study(tomlkit.dumps(data), "the file", folder)
