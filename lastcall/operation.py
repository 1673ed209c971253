"""The optional operation a study asks about: what the bypass branch goes without.

    attention      the self-attention of the final block
    ffn            its FFN
    block          the whole final block: the trunk's output goes straight to the final norm
    heads:0,3      some of its query heads
    window:32      the keys farther back than the 32 most recent positions
    window:32+4    the same, but for the first 4 positions (attention sinks)

All are exact for any routing under teacher forcing (section 2): keys and values of the final block come from
h alone, so going without at one position changes no other.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal, final

from pydantic import AfterValidator

Kind = Literal["attention", "ffn", "block", "heads", "window"]


@final
@dataclass(frozen=True)
class Operation:
    """An optional operation of the final block."""

    kind: Kind
    heads: tuple[int, ...] = ()
    """Query heads that the bypass goes without."""
    window: int = 0
    """Most recent positions that the bypass still attends to, the current one included."""
    sinks: int = 0
    """First positions that it still attends to beside them."""

    @classmethod
    def parse(cls, text: str) -> Operation:
        """The operation named `text`; ValueError where it is none."""
        kind, _, rest = text.partition(":")
        if kind in ("attention", "ffn", "block") and kind == text:
            return cls(kind)  # type: ignore[arg-type]
        if kind == "heads" and re.fullmatch(r"\d+(,\d+)*", rest):
            heads = tuple(int(head) for head in rest.split(","))
            if list(heads) == sorted(set(heads)):
                return cls("heads", heads=heads)
            raise ValueError(f'"{text}" must name its heads once each, in rising order')
        if kind == "window" and (found := re.fullmatch(r"([1-9]\d*)(?:\+([1-9]\d*))?", rest)):
            return cls("window", window=int(found[1]), sinks=int(found[2] or 0))
        raise ValueError(
            f'no such operation: "{text}"; known are attention, ffn, block, heads:0,3 and window:32+4'
        )

    @property
    def words(self) -> str:
        """What a call does, as the report says it."""
        return {
            "attention": "the final block's attention",
            "ffn": "the final block's FFN",
            "block": "the final block",
            "heads": f"heads {', '.join(map(str, self.heads))} of the final block's attention",
            "window": f"the final block's attention beyond a window of {self.window}"
            + (f" and the first {self.sinks}" if self.sinks else ""),
        }[self.kind]


ATTENTION = Operation("attention")
"""The study's own."""


def _known(text: str) -> str:
    Operation.parse(text)
    return text


OperationName = Annotated[str, AfterValidator(_known)]
"""The name of an operation, as a study writes it."""
