"""beartype as the tests use it."""

from __future__ import annotations

from typing import Any, Self

from beartype import BeartypeConf, beartype

_check: Any = beartype(conf=BeartypeConf(is_pep484_tower=True))


def check(function: Any) -> Any:
    """`function`, its arguments and result checked; an int is a float, as PEP 484 has it.

    Methods that return `Self` stay unchecked: beartype knows it in classes it decorates whole only.
    """
    hints = getattr(function, "__annotations__", {}).values()
    return function if any(hint in ("Self", Self) for hint in hints) else _check(function)
