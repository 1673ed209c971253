"""What a study asks beside its planned comparisons (section 8); each answer is labelled secondary."""

from __future__ import annotations

from typing import Annotated, Literal, final

from pydantic import Field

from lastcall.section import Section

Share = Annotated[float, Field(gt=0, le=1)]
Controller = Literal["token-bucket", "online-quantile", "integral"]
Learner = Literal["ridge", "trees", "wide", "recurrent"]


@final
class Analyses(Section):
    """Secondary questions; none is asked unless it is written here."""

    horizon: int | None = Field(default=None, ge=18)
    """Predictions of one longer block a test book, at its midpoint, such as 4,096."""
    quotas: tuple[Share, ...] = ()
    """Budgets for the curves of gain against budget, such as 0.01, 0.05, 0.2, 1.0."""
    controllers: tuple[Controller, ...] = ()
    """Rules that know only the prefix and no horizon, judged beside the deadline rule."""
    learners: tuple[Learner, ...] = ()
    """Stronger learners of the same inputs; each judges the planned comparisons anew, in its own family."""
    independence: bool = False
    """Whether utility is tested for independence of the trajectory, given state, uncertainty, displacement
    and position."""
    third_action: int | None = Field(default=None, ge=1)
    """Width of a local window that routers may choose instead of the full call, at its smaller cost."""
    ceilings: bool = False
    """Whether the knowable ceiling is checked against what is realised, and ranking told from sign."""
