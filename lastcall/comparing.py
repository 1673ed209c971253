"""What a study compares, and how the comparisons are judged (section 6)."""

from __future__ import annotations

import re
from typing import Annotated, Any, final

from pydantic import BeforeValidator, Field, PlainSerializer

from lastcall.section import Name, Section, Seed


@final
class Comparison(Section):
    """`A over B`: Δ = NLL(B) − NLL(A), nats a token; positive favours A."""

    a: str
    b: str

    def __str__(self) -> str:
        return f"{self.a} over {self.b}"


def _parse_comparison(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\S+)\s+over\s+(\S+)\s*", value)
    if match is None:
        raise ValueError(f'a comparison reads "A over B", not "{value}"')
    return {"a": match[1], "b": match[2]}


Over = Annotated[Comparison, BeforeValidator(_parse_comparison), PlainSerializer(str)]


@final
class Inference(Section):
    """How the comparisons are judged (section 6)."""

    draws: int = Field(default=10_000, ge=100, le=1_000_000)
    """Bootstrap draws of whole clusters."""
    seed: Seed = 217
    """Seed of the one draw of cluster indices that serves every comparison and checkpoint."""
    alpha: float = Field(default=0.05, gt=0, lt=1)
    """Family-wise error rate of Holm's correction; intervals are at 1 − alpha."""
    practical_threshold: float = Field(default=0.005, gt=0)
    """The least difference worth having, nats a token."""
    planned: tuple[Over, ...] = Field(
        default=tuple(Comparison(a=a, b=b) for a, b in (("T", "B"), ("J32", "S32"), ("J32", "C_RP3"))),
        min_length=1,
    )
    """The planned comparisons of each checkpoint; all checkpoints' together are one family."""
    secondary: dict[Name, Annotated[tuple[Over, ...], Field(min_length=1)]] | None = None
    """Labelled families outside the planned one, each corrected by itself; without it, the protocol's
    (J32 over S35; the incoming routers) and three against chance, as far as their routers are fitted."""


DEFAULT_SECONDARY = {
    "same-input-size": (Comparison(a="J32", b="S35"),),
    "incoming": (Comparison(a="I_S35", b="I_B"), Comparison(a="I_J32", b="I_S35")),
    "over-random": tuple(Comparison(a=a, b="random") for a in ("B", "S32", "J32")),
}
"""Families where the study names none."""
