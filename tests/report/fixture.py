"""A plausible `Judged` of invented figures: two checkpoints, three families."""

from __future__ import annotations

import math
from itertools import pairwise

from lastcall.results import (
    CalibrationBin,
    CheckpointResult,
    ComparisonResult,
    Family,
    Histogram,
    Interval,
    Judged,
    LockResult,
    PositionBin,
    Provenance,
    PublishedFigure,
    RouterResult,
    Setup,
    Verdict,
)

LEARNED = {"B": 0.41, "T": 0.412, "S32": 0.43, "S35": 0.431, "J32": 0.433, "C_RP3": 0.44, "I_B": 0.22,
           "I_S35": 0.3, "I_J32": 0.31}  # fmt: skip
"""Share of the oracle's gain by learned router."""
FIXED = {"random": 0.07, "every-fifth": 0.068, "by-position": 0.09}


def interval(estimate: float, half: float) -> Interval:
    return {"estimate": estimate, "low": estimate - half, "high": estimate + 1.1 * half}


def router(name: str, kind: str, share: float, full: float, bypass: float) -> RouterResult:
    """A policy that gains `share` of the oracle's gain, which is 2.4 times the full branch's."""
    gain = share * 2.4 * full
    learned = kind == "learned"
    calls = {"never": (0, 0), "always": (495, 495)}.get(name, (99, 99))
    drift = [0.19, 0.2, 0.21, 0.225 + share / 50]
    return {
        "name": name,
        "kind": kind,  # type: ignore[typeddict-item]
        "seeds": [0, 1, 2] if learned else [0],
        "nll": interval(bypass - gain, 0.05),
        "gain": interval(gain, 0.0 if name == "never" else 0.1 * gain + 0.001),
        "oracle_share": share,
        "knowable_share": share / 0.62,
        "calls_min": calls[0],
        "calls_max": calls[1],
        "forced_share": 0.031 + share / 20 if learned else None,
        "unforced": {
            "nll": bypass - 1.04 * gain,
            "activation": sum(drift) / 4,
            "activation_by_quarter": drift,
        }
        if learned
        else None,
    }


def histogram(full: float, positive: float) -> Histogram:
    """A peaked distribution with heavy tails, cut at ±2 nats in 40 bins."""
    edges = [round(-2 + 0.1 * i, 10) for i in range(41)]
    middles = [(a + b) / 2 for a, b in pairwise(edges)]
    weights = [math.exp(-4 * abs(m - full) ** 0.7) * (positive if m > 0 else 1 - positive) for m in middles]
    scale = 0.9965 / sum(weights)
    return {"edges": edges, "shares": [w * scale for w in weights], "below": 0.0011, "above": 0.0024}


def calibration(full: float, slope: float) -> list[CalibrationBin]:
    predicted = [full * (0.1 + 0.08 * i + 0.03 * i * i) for i in range(10)]
    return [
        {"predicted": p, "realised": interval(slope * p + 0.1 * full * math.sin(i), 0.12 * full)}
        for i, p in enumerate(predicted)
    ]


def positions(full: float) -> list[PositionBin]:
    edges = [17, 79, 141, 203, 265, 327, 389, 451, 512]
    return [
        {"first": a, "last": b - 1, "utility": interval(full * (0.8 + 0.06 * i), 0.09 * full)}
        for i, (a, b) in enumerate(pairwise(edges))
    ]


def checkpoint(name: str, full: float, bypass: float, positive: float, recovery: float) -> CheckpointResult:
    routers = [
        router("never", "reference", 0.0, full, bypass),
        router("always", "reference", 1 / 2.4, full, bypass),
        *(router(n, "learned", s, full, bypass) for n, s in LEARNED.items()),
        *(router(n, "fixed", s, full, bypass) for n, s in FIXED.items()),
        router("knowable", "ceiling", 0.62, full, bypass),
        router("oracle", "ceiling", 1.0, full, bypass),
    ]
    return {
        "name": name,
        "nll_full": interval(bypass - full, 0.05),
        "nll_bypass": interval(bypass, 0.05),
        "nll_local": {"32": interval(bypass - recovery * full, 0.05)},
        "gain_full": interval(full, 0.06 * full),
        "share_positive": interval(positive, 0.006),
        "local_recovery": {"32": interval(recovery, 0.03)},
        "routers": routers,
        "histogram": histogram(full, positive),
        "by_position": positions(full),
        "calibration": {n: calibration(full, 12 * s - 4.3) for n, s in LEARNED.items()},
    }


def comparison(
    name: str, a: str, b: str, delta: float, verdict: Verdict, se: float = 0.0007
) -> ComparisonResult:
    return {
        "checkpoint": name,
        "a": a,
        "b": b,
        "delta": interval(delta, 1.9 * se),
        "simultaneous_low": delta - 2.6 * se,
        "simultaneous_high": delta + 2.6 * se,
        "se": se,
        "p": 0.0001 if verdict == "gain" else 0.4,
        "p_holm": 0.0006 if verdict == "gain" else 1.0,
        "per_seed": [delta - se / 3, delta, delta + se / 3],
        "verdict": verdict,
    }


def families(first: str, second: str) -> list[Family]:
    none: Verdict = "no gain of practical size"
    planned = [
        comparison(first, "T", "B", 0.0003, none),
        comparison(first, "J32", "S32", 0.0021, "gain"),
        comparison(first, "J32", "C_RP3", -0.0004, none),
        comparison(second, "T", "B", 0.0036, "undecided", 0.0012),
        comparison(second, "J32", "S32", 0.0008, none),
        comparison(second, "J32", "C_RP3", -0.0036, "loss"),
    ]
    random = [
        comparison(n, a, "random", 0.03 * i, "gain", 0.002)
        for i, n in ((1, first), (2, second))
        for a in "BT"
    ]
    inputs = [comparison(n, "J32", "S35", 0.0006, none) for n in (first, second)]
    return [
        {"name": "planned", "planned": True, "comparisons": planned},
        {"name": "same-input-size", "planned": False, "comparisons": inputs},
        {"name": "over-random", "planned": False, "comparisons": random},
    ]


SETUP: Setup = {
    "horizon": 512,
    "context": 17,
    "scored": 495,
    "calls": 99,
    "blocks_a_book": 2,
    "books": {"fit": 60, "calibration": 20, "test": 18},
    "cluster": "book",
    "clusters": 18,
    "draws": 10_000,
    "seed": 217,
    "alpha": 0.05,
    "practical_threshold": 0.005,
    "warnings": ["18 test books are fewer than 20: the bootstrap is unproven there"],
}

LOCK: LockResult = {
    "hash": "4f" * 32,
    "software": "0.1.0",
    "verified": ["plan", "fitted/alder-3b-base", "fitted/birch-4b-base", "36 test files of 36"],
    "unverified": ["weights of birch-4b-base: not on this machine"],
    "warnings": ["the lock was made by lastcall 0.1.0, this is 0.2.0"],
    "amendments": [
        {
            "lock": "4f" * 32,
            "reason": "a book turned out to be a translation",
            "changed": ["books.lists.test"],
        }
    ],
    "test_measurements": [
        {"lock": "1c" * 32, "files": 38, "repeated": 0, "used": False},
        {"lock": "4f" * 32, "files": 36, "repeated": 6, "used": True},
    ],
}

FACTS = {
    "architecture": "llama",
    "dtype": "bfloat16",
    "attention": "sdpa",
    "beginning of text": "none",
    "weights": "a7" * 32,
    "tokenizer": "3d" * 32,
}


def judged() -> Judged:
    """A fresh copy, free to be changed."""
    first, second = "alder-3b-base", "birch-4b-base"
    provenance: list[Provenance] = [{"name": n, "facts": dict(FACTS)} for n in (first, second)]
    return {
        "schema": 1,
        "software": "0.2.0",
        "study": "invented",
        "question": "At which positions is the final attention worth calling, and can a cheap router tell?",
        "claim": "Invented figures that exercise the report; they say nothing about any model.",
        "setup": {**SETUP, "warnings": list(SETUP["warnings"])},
        "lock": LOCK,
        "provenance": provenance,
        "left_out": ["pamphlet-12: 811 tokens, 1,539 needed"],
        "checkpoints": [
            checkpoint(first, 0.038, 2.51, 0.48, 0.55),
            checkpoint(second, 0.166, 2.62, 0.721, 0.94),
        ],
        "families": families(first, second),
    }


def published_figure(
    checkpoint: str | None, what: str, value: float, ours: Interval | None
) -> PublishedFigure:
    """A row whose published interval is ±10% of the value, but for shares and figures of the whole study."""
    bracketed = checkpoint is not None and what.startswith(("delta", "speed"))
    return {
        "checkpoint": checkpoint,
        "what": what,
        "value": value,
        "low": 0.9 * value if bracketed else None,
        "high": 1.1 * value if bracketed else None,
        "ours": None if ours is None else ours["estimate"],
        "ours_low": None if ours is None else ours["low"],
        "ours_high": None if ours is None else ours["high"],
        "difference": None if ours is None else ours["estimate"] - value,
        "agrees": None if ours is None else ours["low"] <= value <= ours["high"],
        "unmeasured": "the horizon here is 512" if ours is None else None,
    }


def judged_beside() -> Judged:
    """The same with a published study of each kind of figure."""
    first, second = "alder-3b-base", "birch-4b-base"
    count = published_figure(None, "planned_comparisons", 6.0, None)
    gains = published_figure(None, "planned_gains", 0.0, None)
    bound = published_figure(None, "planned_upper_bound", 0.005, None)
    for row, ours, agrees in ((count, 6.0, True), (gains, 1.0, False), (bound, 0.00672, False)):
        row.update(ours=ours, agrees=agrees, unmeasured=None)
        row["difference"] = None if row is bound else ours - row["value"]
    figures = [
        count,
        gains,
        bound,
        published_figure(first, "gain_full", 0.0381, interval(0.038, 0.002)),
        published_figure(first, "share_positive", 0.4804, interval(0.4912, 0.006)),
        published_figure(first, "local_recovery:32", 0.548, interval(0.55, 0.03)),
        published_figure(first, "unforced_activation:J32", 0.2046, interval(0.2061, 0.004)),
        published_figure(first, "unforced_activation:J32@4096", 0.8686, None),
        published_figure(second, "delta:C_RP3 over J32", 0.00356, interval(0.0036, 0.0013)),
        published_figure(second, "delta:J32 over S32", -0.00004, interval(0.0008, 0.0013)),
        published_figure(second, "speed_ratio:I_S35@4096", 1.043, None),
        published_figure(second, "executed_nll_change:I_S35@4096", 0.11014, None),
    ]
    return {
        **judged(),
        "published": {
            "source": "A published study of invented figures.",
            "figures": figures,
            "unmeasured": ["Every learned router was slower."],
            "differences": ["Test books: 18 here, 100 there.", "alder-3b-base: its revision was not pinned."],
        },
    }
