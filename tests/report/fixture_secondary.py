"""Plausible `Answers` of invented figures that agree with those of `fixture`: the same gains at 99 calls."""

from __future__ import annotations

import math

from lastcall.results import Interval
from lastcall.secondary import (
    Allocation,
    Answers,
    Ceilings,
    ControllerResult,
    HorizonResult,
    HorizonRouter,
    IndependenceResult,
    QuotaCurves,
    QuotaPoint,
    ThirdActionResult,
)

from .fixture import FIXED, LEARNED, comparison, interval

FIRST, SECOND = "alder-3b-base", "birch-4b-base"
FULL = {FIRST: 0.038, SECOND: 0.166}
BYPASS = {FIRST: 2.51, SECOND: 2.62}
POSITIONS, CALLS = 495, 99
QUOTAS = (*(i / 100 for i in range(1, 21)), *(i / 100 for i in range(24, 101, 4)))
UNFORCED = {FIRST: 0.87, SECOND: 0.36}
"""Share that J32's unforced rule calls in the longer blocks."""


def around(estimate: float) -> Interval:
    return interval(estimate, 0.1 * abs(estimate))


def oracle(full: float, share: float) -> float:
    """2.4 times the full gain at 20%, the full gain at 100%."""
    return full * (share + 4.83 * share**0.35 * (1 - share))


def gain(full: float, share: float, of_oracle: float) -> float:
    """What a policy gains that has `of_oracle` of the oracle's gain at 20%."""
    skill = (2.4 * of_oracle - 0.2) / 2.2
    return share * full + skill * (oracle(full, share) - share * full)


def curve(full: float) -> QuotaCurves:
    calls = [round(q * POSITIONS) for q in QUOTAS]
    shares = [k / POSITIONS for k in calls]

    def points(of_oracle: float) -> list[QuotaPoint]:
        return [
            {
                "gain": around(found := gain(full, s, of_oracle)),
                "oracle_share": around(found / oracle(full, s)),
                "knowable_share": around(found / gain(full, s, 0.62)),
            }
            for s in shares
        ]

    learned = LEARNED | {name: FIXED[name] for name in ("random", "by-position")}
    return {
        "calls": calls,
        "positions": POSITIONS,
        "chance": [around(s * full) for s in shares],
        "knowable": [around(gain(full, s, 0.62)) for s in shares],
        "oracle": [around(oracle(full, s)) for s in shares],
        "routers": {name: points(of_oracle) for name, of_oracle in learned.items()},
    }


def ceilings(full: float, positive: float) -> Ceilings:
    expected = [full * 0.01 * 2.05**i for i in range(10)]

    def choice(called: float, found: float) -> Allocation:
        return {"called": called, "gain": around(found)}

    return {
        "reliability": {
            "bins": [
                {"predicted": kl, "realised": interval(0.9 * kl, 0.08 * kl + 0.1 * full)} for kl in expected
            ],
            "slope": interval(0.9, 0.03),
            "ratio": interval(0.93, 0.04),
        },
        "knowable": {
            "calls": CALLS,
            "scale": 0.894,
            "claimed": around(1.66 * full),
            "corrected": around(0.894 * 1.66 * full),
            "realised": around(gain(full, 0.2, 0.62)),
        },
        "allocations": {
            "calls": CALLS,
            "always": choice(1.0, full),
            "chance": choice(0.2, 0.2 * full),
            "fixed_fit": choice(0.2, gain(full, 0.2, 0.09)),
            "fixed_hindsight": choice(0.2, gain(full, 0.2, 0.14)),
            "knowable": choice(0.2, gain(full, 0.2, 0.62)),
            "oracle": choice(0.2, oracle(full, 0.2)),
            "hindsight_sign": choice(positive, 2.9 * full),
            "routers": {
                name: {
                    "ranking": choice(0.2, 1.03 * gain(full, 0.2, of)),
                    "sign": choice(0.71, full * (1 + of / 5)),
                }
                for name, of in LEARNED.items()
            },
        },
    }


def controllers(full: float) -> list[ControllerResult]:
    rules = (("token-bucket", 8.0, 0.97, 0.2), ("online-quantile", 17.0, 0.98, 0.2049))
    return [
        {
            "controller": name,
            "router": router,
            "slack": slack,
            "called": called,
            "gain": around(kept * gain(full, called, of)),
            "deadline_gain": around(gain(full, called, of)),
            "oracle_gain": around(oracle(full, called)),
        }
        for name, slack, kept, called in (*rules, ("integral", 6.6, 0.96, 0.1994))
        for router, of in LEARNED.items()
    ]


def horizon(name: str) -> HorizonResult:
    full, bypass, end = FULL[name], BYPASS[name], UNFORCED[name]

    def router(router: str, of: float) -> HorizonRouter:
        most = 0.24 if router == "B" else 0.2 + (end - 0.2) * (of / LEARNED["J32"]) ** 6
        edges = [17 + round(4079 * i / 32) for i in range(33)]
        return {
            "name": router,
            "forced": interval(bypass - 0.95 * gain(full, 0.2, of), 0.05),
            "forced_gain": around(0.95 * gain(full, 0.2, of)),
            "unforced": interval(bypass - gain(full, most, of), 0.05),
            "activation": interval(most, 0.012),
            "activation_core": interval(0.2046, 0.004),
            "drift": [
                {
                    "first": edges[i],
                    "last": edges[i + 1] - 1,
                    "utility": interval(most + (0.2 - most) * 0.8**i + 0.01 * of, 0.02),
                }
                for i in range(32)
            ],
        }

    return {
        "checkpoint": name,
        "horizon": 4096,
        "calls": 816,
        "scored": 4079,
        "books": 17,
        "left_out": ["pamphlet-07"],
        "overlap": 0.061 if name == FIRST else 0.058,
        "nll_never": interval(bypass, 0.05),
        "nll_always": interval(bypass - full, 0.05),
        "routers": [router(n, of) for n, of in LEARNED.items()],
    }


def independence(name: str, z: float) -> IndependenceResult:
    features = ("extrapolation_error", "curvature", "error_change")

    def p(z: float) -> float:
        return math.erfc(z / math.sqrt(2))

    return {
        "checkpoint": name,
        "learner": "trees",
        "folds": 5,
        "features": [
            {"name": f, "z": z / i, "p": p(z / i), "correlation": z / i / 900, "explained": e}
            for i, (f, e) in enumerate(zip(features, (0.93, 0.81, 0.56), strict=True), start=1)
        ],
        "p_together": min(1.0, 2 * p(z)),
        "explained_utility": 0.041,
    }


def third_action(name: str) -> ThirdActionResult:
    full, bypass = FULL[name], BYPASS[name]
    return {
        "checkpoint": name,
        "window": 32,
        "local_cost": 0.199,
        "budget": 0.2,
        "routers": [
            {
                "name": router,
                "nll": interval(bypass - 1.1 * gain(full, 0.2, LEARNED[router]), 0.05),
                "gain": around(1.1 * gain(full, 0.2, LEARNED[router])),
                "over_two": interval(0.1 * gain(full, 0.2, LEARNED[router]), 0.001),
                "full": 0.121,
                "local": 0.392,
                "cost": 0.121 + 0.199 * 0.392,
            }
            for router in ("J32", "S32", "B")
        ],
        "oracle": around(2.7 * full),
    }


def answers() -> Answers:
    """A fresh copy, free to be changed; every section is there."""
    none, names = "no gain of practical size", (FIRST, SECOND)
    return {
        "schema": 1,
        "software": "0.2.0",
        "study": "invented",
        "lock": "4f" * 32,
        "records": "5e" * 32,
        "alpha": 0.05,
        "practical_threshold": 0.005,
        "costs": [
            {
                "checkpoint": name,
                "operation": "attention",
                "operations_a_token": 18_900_000.0,
                "share_of_operations": 0.0031,
                "bytes_a_token": 17_300_000.0,
                "share_of_bytes": 0.00285,
            }
            for name in names
        ],
        "horizon": [horizon(name) for name in names],
        "curves": {name: curve(FULL[name]) for name in names},
        "ceilings": {FIRST: ceilings(FULL[FIRST], 0.48), SECOND: ceilings(FULL[SECOND], 0.721)},
        "controllers": {name: controllers(FULL[name]) for name in names},
        "learners": [
            {
                "name": f"learner: {kind}",
                "planned": False,
                "comparisons": [
                    comparison(name, a, b, delta, verdict)
                    for name in names
                    for a, b, delta, verdict in (
                        ("T", "B", shift + 0.0002, none),
                        ("J32", "S32", shift + 0.0011, none),
                        ("J32", "C_RP3", shift - 0.0021, "loss"),
                    )
                ],
            }
            for kind, shift in (("trees", 0.0), ("ridge", 0.0002))
        ],
        "independence": [independence(FIRST, 0.8), independence(SECOND, 4.1)],
        "third_action": [third_action(name) for name in names],
    }
