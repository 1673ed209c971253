"""The contents of a lock, and changes of them."""

from __future__ import annotations

import copy
from typing import Any

HASH = "0123456789ab" + "c" * 52
OTHER = "ba9876543210" + "d" * 52
CONTENTS: dict[str, Any] = {
    "software": "0.1.0",
    "plan": {
        "name": "golden",
        "blocks": {"horizon": 512, "starts": [0.25, 0.75]},
        "checkpoints": [{"name": "one", "dtype": "float32"}, {"name": "two", "dtype": "float32"}],
        "inference": {"draws": 10000, "practical_threshold": 0.005},
    },
    "books": {
        "12": {"split": "test", "cluster": "12", "sha256": HASH, "tokens": {"one": 1539}},
        "naïve ‘book’": {"split": "fit", "cluster": "Brontë", "sha256": HASH, "tokens": {"one": 2000}},
    },
    "left_out": [],
    "checkpoints": {
        "one": {"facts": {"bos": "none"}, "weights": {"model.safetensors": HASH}, "tokenizer": {}}
    },
    "fitted": {"fitted/one/J32-0.safetensors": HASH, "fitted/one/thresholds.json": HASH},
    "thresholds": {"one": {"J32": {"0": 0.1, "1": -2.5e-08}}},
}


def put(*path: Any, value: Any) -> dict[str, Any]:
    """CONTENTS with `value` at `path`; None removes."""
    contents = copy.deepcopy(CONTENTS)
    *sections, key = path
    here: Any = contents
    for section in sections:
        here = here[section]
    if value is None:
        del here[key]
    else:
        here[key] = value
    return contents


def reordered(value: Any) -> Any:
    """The same with every dictionary the other way round."""
    if isinstance(value, dict):
        return {key: reordered(value[key]) for key in reversed(list(value))}
    return [reordered(v) for v in value] if isinstance(value, list) else value
