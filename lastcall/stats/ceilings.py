"""What could be gained at most, and how far the ceilings can be trusted (sections 4 and 8).

Two ceilings at k calls a block: the oracle's k largest utilities (hindsight), and the knowable k largest
KL(full ‖ bypass). With p the full branch's next-token distribution and q the bypass's,
u = log p(x) − log q(x) at the token x that follows, so KL(p ‖ q) is the mean of u over x drawn from p. Where
the full branch is calibrated (x is as if drawn from p, given the prefix), E[u | prefix] = KL: no prefix tells
more, and ranking by KL is the best there is. One token cannot show whether it is calibrated. What can be
checked is whether mean utility agrees with mean KL over many positions: calibration implies it, but it does
not imply calibration.

KL ≥ 0: by its own lights the full branch expects to gain at every position. So a rule that leaves positions
out because it predicts a loss there can beat `always` only as far as the full branch is miscalibrated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float, Float32, Float64

from lastcall.errors import InputError
from lastcall.results import CalibrationBin
from lastcall.secondary import Allocations, KnowableCeiling, Reliability, RouterAllocation
from lastcall.stats.bootstrap import Draws, mean_intervals, ratio_intervals
from lastcall.stats.policies import largest
from lastcall.stats.summaries import tenths

_BINS = 10
"""What `tenths` makes."""


def best_gains(
    values: Float[np.ndarray, "books blocks scored"],
    utility: Float64[np.ndarray, "books blocks scored"],
    calls: Sequence[int],
) -> Float64[np.ndarray, "books budgets"]:
    """Each book's gain over `never` from the k largest `values` of each block, for every k of `calls`.

    Of equal values the earlier. With utility itself the oracle's gains, with KL the knowable ones. Raises
    ValueError where a k is not 1 to the number of scored positions.
    """
    scored = utility.shape[-1]
    if not all(1 <= k <= scored for k in calls):
        raise ValueError(f"calls must be 1 to {scored}, got {list(calls)}")
    order = np.argsort(-values, axis=-1, kind="stable")
    totals = np.take_along_axis(utility, order, axis=-1).cumsum(axis=-1).mean(axis=1)
    gains: Float64[np.ndarray, "books budgets"] = totals[:, np.array(calls) - 1] / scored
    return gains


def fit_scale(kl: Float64[np.ndarray, "*any"], utility: Float64[np.ndarray, "*any"]) -> float:
    """a of the least squares of `utility` on a · `kl`, through the origin: for the calibration split alone.

    Raises InputError where KL is 0 everywhere.
    """
    _check_differs(kl)
    return float((utility * kl).sum() / (kl * kl).sum())


def _check_differs(kl: Float64[np.ndarray, "*any"]) -> None:
    if not (kl > 0).any():
        raise InputError(
            "the full branch never differs from the bypass",
            got=f"KL 0 at {kl.size} positions",
            todo="leave this checkpoint out, or check its final block",
        )


def reliability(
    utility: Float64[np.ndarray, "books blocks scored"],
    kl: Float64[np.ndarray, "books blocks scored"],
    draws: Draws,
    alpha: float,
) -> Reliability:
    """Utility against KL on the test split, with whole-book intervals.

    Raises InputError where KL is 0 everywhere.
    """
    _check_differs(kl)
    above = np.stack([(utility * kl).sum((1, 2)), utility.sum((1, 2))], axis=1)
    below = np.stack([(kl * kl).sum((1, 2)), kl.sum((1, 2))], axis=1)
    slope, ratio = ratio_intervals(draws, above, below, alpha)
    return {"bins": _bins(utility, kl, draws, alpha), "slope": slope, "ratio": ratio}


def _bins(
    utility: Float64[np.ndarray, "books blocks scored"],
    kl: Float64[np.ndarray, "books blocks scored"],
    draws: Draws,
    alpha: float,
) -> list[CalibrationBin]:
    """Tenths of the pooled KL; a bin that ties leave empty is dropped."""
    books = len(kl)
    cells = (_BINS * np.arange(books)[:, None, None] + tenths(kl.astype(np.float32))).ravel()
    counts, expected, realised = (
        np.bincount(cells, weights.ravel(), books * _BINS).reshape(books, _BINS)
        for weights in (np.ones(kl.shape), kl, utility)
    )
    some = counts.sum(0) > 0
    intervals = ratio_intervals(draws, realised[:, some], counts[:, some], alpha)
    means = expected.sum(0)[some] / counts.sum(0)[some]
    return [{"predicted": float(p), "realised": r} for p, r in zip(means, intervals, strict=True)]


def knowable_ceiling(
    utility: Float64[np.ndarray, "books blocks scored"],
    kl: Float64[np.ndarray, "books blocks scored"],
    calls: int,
    scale: float,
    draws: Draws,
    alpha: float,
) -> KnowableCeiling:
    """What the k largest KL claim, what they claim times `scale` (of `fit_scale`), what they gain."""
    claimed = best_gains(kl, kl, [calls])[:, 0]
    columns = {
        "claimed": claimed,
        "corrected": scale * claimed,
        "realised": best_gains(kl, utility, [calls])[:, 0],
    }
    found = mean_intervals(draws, columns, alpha)
    return {
        "calls": calls,
        "scale": scale,
        "claimed": found["claimed"],
        "corrected": found["corrected"],
        "realised": found["realised"],
    }


def allocations(
    utility: Float64[np.ndarray, "books blocks scored"],
    kl: Float64[np.ndarray, "books blocks scored"],
    scores: Mapping[str, Float32[np.ndarray, "seeds books blocks scored"]],
    calls: int,
    draws: Draws,
    alpha: float,
    *,
    fit_profile: Float[np.ndarray, " scored"] | None = None,
) -> Allocations:
    """The value of ranking against the value of the sign, for hindsight, ceilings and every router's scores.

    `fit_profile` is the mean utility of each scored position over the fit split.
    """
    share = calls / utility.shape[-1]
    books = {
        "always": utility.mean((1, 2)),
        "chance": share * utility.mean((1, 2)),
        "fixed_hindsight": _fixed(utility.mean((0, 1)), utility, calls),
        "knowable": best_gains(kl, utility, [calls])[:, 0],
        "oracle": best_gains(utility, utility, [calls])[:, 0],
        "hindsight_sign": np.maximum(utility, 0).mean((1, 2)),
    }
    if fit_profile is not None:
        books["fixed_fit"] = _fixed(fit_profile, utility, calls)
    found = mean_intervals(draws, books, alpha)
    return {
        "calls": calls,
        "always": {"called": 1.0, "gain": found["always"]},
        "chance": {"called": share, "gain": found["chance"]},
        "fixed_fit": {"called": share, "gain": found["fixed_fit"]} if "fixed_fit" in found else None,
        "fixed_hindsight": {"called": share, "gain": found["fixed_hindsight"]},
        "knowable": {"called": share, "gain": found["knowable"]},
        "oracle": {"called": share, "gain": found["oracle"]},
        "hindsight_sign": {"called": float((utility > 0).mean()), "gain": found["hindsight_sign"]},
        "routers": {name: _of_router(of, utility, calls, draws, alpha) for name, of in scores.items()},
    }


def _of_router(
    scores: Float32[np.ndarray, "seeds books blocks scored"],
    utility: Float64[np.ndarray, "books blocks scored"],
    calls: int,
    draws: Draws,
    alpha: float,
) -> RouterAllocation:
    books = {
        "ranking": np.mean([best_gains(of, utility, [calls])[:, 0] for of in scores], axis=0),
        "sign": np.mean([np.where(of > 0, utility, 0.0).mean((1, 2)) for of in scores], axis=0),
    }
    found = mean_intervals(draws, books, alpha)
    return {
        "ranking": {"called": calls / utility.shape[-1], "gain": found["ranking"]},
        "sign": {"called": float((scores > 0).mean()), "gain": found["sign"]},
    }


def _fixed(
    profile: Float[np.ndarray, " scored"], utility: Float64[np.ndarray, "books blocks scored"], calls: int
) -> Float64[np.ndarray, " books"]:
    """Each book's gain from the k positions with the largest `profile`; of equal ones the earlier."""
    mask = largest(profile.astype(np.float64)[None, None], calls)
    gains: Float64[np.ndarray, " books"] = np.where(mask, utility, 0.0).mean((1, 2))
    return gains
