"""A disk that is full."""

from __future__ import annotations

import contextlib
from pathlib import Path

from lastcall.records import atomic


def fill(path: Path) -> None:
    """Send the next write of `path` to a device that is always full; what is at `path` stays."""
    with contextlib.suppress(LookupError), atomic(path) as temporary:
        raise LookupError
    temporary.symlink_to("/dev/full")
