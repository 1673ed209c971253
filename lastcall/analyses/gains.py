"""From calls to the planned comparisons, for routers that are not those of the records (section 6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from jaxtyping import Bool, Float64

from lastcall.comparing import Comparison
from lastcall.errors import StudyError
from lastcall.routing.dataset import Dataset
from lastcall.stats.loading import Policy
from lastcall.stats.policies import book_gains
from lastcall.study import LEARNED_ROUTERS, Study

Gains = Mapping[str, Float64[np.ndarray, "seeds books"]]
"""NLL(never) − NLL(router) by router name, nats a token."""


@final
@dataclass(frozen=True, eq=False)
class Differences:
    """Book differences of one family."""

    pairs: tuple[tuple[str, str, str], ...]
    """Checkpoint, A and B of each comparison."""
    values: Float64[np.ndarray, "books comparisons"]
    """NLL(B) − NLL(A), mean over seeds, nats a token."""


def gains_of(calls: Bool[np.ndarray, "seeds blocks n"], data: Dataset) -> Float64[np.ndarray, "seeds books"]:
    """NLL(never) − NLL(calls) of each seed and book of `data`: the mean over its blocks, nats a token."""
    books = len(dict.fromkeys(data.books))
    n = data.utility.shape[-1]
    utility = data.utility.double().numpy().reshape(books, -1, n)
    return book_gains(
        Policy("", "learned", tuple(range(len(calls))), calls.reshape(len(calls), *utility.shape)), utility
    )


def planned_of_learned(study: Study) -> tuple[Comparison, ...]:
    """The planned comparisons between fitted routers; StudyError where there is none."""
    found = tuple(over for over in study.inference.planned if {over.a, over.b} <= set(LEARNED_ROUTERS))
    if not found:
        raise StudyError(
            "no planned comparison is between two fitted routers",
            got=", ".join(map(str, study.inference.planned)),
            todo="plan one, such as J32 over S32",
        )
    return found


def differences(comparisons: Sequence[Comparison], gains: Mapping[str, Gains]) -> Differences:
    """The differences of `comparisons` on every checkpoint of `gains`, checkpoint by checkpoint."""
    pairs = tuple((checkpoint, over.a, over.b) for checkpoint in gains for over in comparisons)
    columns = [gains[c][a].mean(axis=0) - gains[c][b].mean(axis=0) for c, a, b in pairs]
    return Differences(pairs, np.stack(columns, axis=1))
