"""What a study file says of a published study: its figures and its design, to be printed beside ours.

A figure is named by a key, such as `gain_full` or `unforced_activation:J32@4096`; `parse` reads it.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, Self, cast, final, get_args

from pydantic import Field, field_validator, model_validator

from lastcall.operation import OperationName
from lastcall.section import Section

Kind = Literal[
    "gain_full",
    "share_positive",
    "local_recovery",
    "unforced_activation",
    "delta",
    "planned_comparisons",
    "planned_gains",
    "planned_upper_bound",
    "speed_ratio",
    "executed_nll_change",
]
EXECUTED: tuple[Kind, ...] = ("speed_ratio", "executed_nll_change")
"""Figures of executed policies, which judging does not measure."""
WHOLE_STUDY: tuple[Kind, ...] = ("planned_comparisons", "planned_gains", "planned_upper_bound")
"""Figures of all checkpoints together."""
_KEY = re.compile(r"(?P<kind>[a-z_]+)(?::(?P<of>[^@]+?))?(?:@(?P<horizon>[1-9]\d*))?")
_SHAPES: dict[Kind, tuple[str, str]] = {
    "local_recovery": (":WINDOW", r"([1-9]\d*)"),
    "unforced_activation": (":ROUTER", r"(\S+)"),
    "delta": (":A over B", r"(\S+) over (\S+)"),
    "speed_ratio": (":ROUTER", r"(\S+)"),
    "executed_nll_change": (":ROUTER", r"(\S+)"),
}
"""What follows a kind, in words and as a pattern; nothing follows the rest."""


@final
@dataclass(frozen=True)
class Quantity:
    """What a figure is a figure of."""

    kind: Kind
    routers: tuple[str, ...] = ()
    """The router; of a `delta`, A and B."""
    window: int | None = None
    """Of a `local_recovery`."""
    horizon: int | None = None
    """Predictions a block, where the key says so; else the study's."""


def parse(key: str) -> Quantity:
    """The quantity that `key` names. Raises ValueError where it names none."""
    match = _KEY.fullmatch(key)
    if match is None or match["kind"] not in get_args(Kind):
        raise ValueError(f'no figure is called "{key}"; known: {", ".join(get_args(Kind))}')
    kind, of = cast(Kind, match["kind"]), match["of"] or ""
    horizon = int(match["horizon"]) if match["horizon"] else None
    shape, pattern = _SHAPES.get(kind, ("", ""))
    parts = re.fullmatch(pattern, of)
    if parts is None:
        raise ValueError(f'"{key}" should read "{kind}{shape}"')
    if kind == "local_recovery":
        return Quantity(kind, window=int(parts[1]), horizon=horizon)
    return Quantity(kind, parts.groups(), horizon=horizon)


@final
class Figure(Section):
    """One published figure."""

    checkpoint: str | None = None
    """The checkpoint of this study that stands for the published one; none for a figure of them all."""
    what: str
    """`gain_full` (mean NLL gain of full over bypass), `share_positive`, `local_recovery:WINDOW`,
    `unforced_activation:ROUTER`, `delta:A over B`; of all checkpoints together `planned_comparisons`,
    `planned_gains` (how many are positive after Holm) and `planned_upper_bound` (all simultaneous upper
    bounds lie below it); and, printed as not measured here, `speed_ratio:ROUTER`,
    `executed_nll_change:ROUTER`, and any at another horizon, as in `…@4096`. Losses in nats a token, shares
    as fractions."""
    value: float
    """The figure."""
    low: float | None = None
    """Lower end of its 95% interval, where one is published."""
    high: float | None = None
    """Upper end."""

    @field_validator("what")
    @classmethod
    def _names_a_figure(cls, what: str) -> str:
        parse(what)
        return what

    @model_validator(mode="after")
    def _sane(self) -> Self:
        if (self.low is None) != (self.high is None):
            raise ValueError("give both ends of the interval, low and high, or neither")
        if self.low is not None and self.high is not None and not self.low <= self.value <= self.high:
            raise ValueError(f"value = {self.value} is not within [{self.low}, {self.high}]")
        whole = parse(self.what).kind in WHOLE_STUDY
        if whole != (self.checkpoint is None):
            does = "is of all checkpoints and names none" if whole else "needs its `checkpoint`"
            raise ValueError(f'"{self.what}" {does}')
        return self


@final
class Design(Section):
    """How the published study was made, as far as it says; what differs here is listed in the report."""

    operation: OperationName | None = None
    """Its optional operation, named as in this study file."""
    corpus: Literal["PG-19"] | None = None
    """Where its books come from."""
    fit_books: int | None = Field(default=None, ge=1)
    """Books of the fit split."""
    calibration_books: int | None = Field(default=None, ge=1)
    """Books of the calibration split."""
    test_books: int | None = Field(default=None, ge=1)
    """Books of the test split."""
    blocks_a_book: int | None = Field(default=None, ge=1)
    """Blocks a book."""
    horizon: int | None = Field(default=None, ge=1)
    """Predictions a block."""
    context: int | None = Field(default=None, ge=0)
    """Leading predictions of a block that are context only."""
    calls: int | None = Field(default=None, ge=1)
    """Calls a block."""
    fit_seeds: int | None = Field(default=None, ge=1)
    """How many fit seeds."""
    cluster: Literal["book", "author"] | None = None
    """The unit of resampling."""
    draws: int | None = Field(default=None, ge=1)
    """Bootstrap draws."""
    bootstrap_seed: int | None = Field(default=None, ge=0)
    """Seed of the bootstrap."""
    alpha: float | None = Field(default=None, gt=0, lt=1)
    """Level of Holm's correction."""
    practical_threshold: float | None = Field(default=None, gt=0)
    """The least difference worth having, nats a token."""
    dtype: str | None = None
    """Type its models compute in."""


@final
class Published(Section):
    """A published study whose figures are printed beside ours; a study file without it prints none."""

    source: str = Field(min_length=1)
    """Where the figures come from, a sentence."""
    design: Design = Design()
    """How it was made."""
    figures: tuple[Figure, ...] = Field(min_length=1)
    """Its figures."""
    unmeasured: tuple[str, ...] = ()
    """What else it reports, a sentence each; printed as not measured here."""
    differences: tuple[str, ...] = ()
    """How this study differs from it in ways that its design does not show, a sentence each."""

    def refusal(
        self, checkpoints: Collection[str], routers: Collection[str], windows: Collection[int]
    ) -> str:
        """Why a study of these checkpoints, routers and local windows cannot carry the figures; or empty."""
        seen: set[tuple[str | None, Quantity]] = set()
        for figure in self.figures:
            quantity, at = parse(figure.what), f'published figure "{figure.what}"'
            if figure.checkpoint is not None and figure.checkpoint not in checkpoints:
                return f'{at} names the checkpoint "{figure.checkpoint}", which is not among checkpoints'
            for router in quantity.routers:
                if router not in routers:
                    return f'{at} names "{router}", which is not among routers.names'
            if quantity.window is not None and quantity.window not in windows:
                return f"{at} names a window that is not among measure.local_windows"
            if (figure.checkpoint, quantity) in seen:
                return f"{at} comes twice{f' for {figure.checkpoint}' if figure.checkpoint else ''}"
            seen.add((figure.checkpoint, quantity))
        return ""
