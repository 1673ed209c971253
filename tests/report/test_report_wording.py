"""Figures and verdicts in words."""

from __future__ import annotations

import pytest

from lastcall.report import wording
from lastcall.results import Judged, Verdict

from .fixture import comparison, judged


def with_planned(*verdicts: tuple[Verdict, float]) -> Judged:
    given = judged()
    given["families"] = given["families"][:1]
    given["families"][0]["comparisons"] = [comparison("x", "A", "B", delta, v) for v, delta in verdicts]
    return given


NONE: tuple[Verdict, float] = ("no gain of practical size", 0.001)


@pytest.mark.parametrize(
    ("verdicts", "sentences"),
    [
        (
            [NONE, NONE, ("undecided", 0.004)],
            [
                "None of the three planned comparisons shows a gain.",
                "For two of them a gain of 0.005 nats a token or more is excluded.",
                "One is undecided: no gain is shown, nor one of that size excluded.",
            ],
        ),
        (
            [("gain", 0.02), ("gain", 0.002), ("loss", -0.003), ("loss", -0.004)],
            [
                "Two of the four planned comparisons show a gain.",
                "For three of them a gain of 0.005 nats a token or more is excluded.",
                "Of the gains shown, one is among these, hence below practical size.",
                "Two are losses: the first router does worse than the second.",
            ],
        ),
        (
            [("gain", 0.02), ("gain", 0.03)],
            [
                "Both planned comparisons show a gain.",
                "For none of them is a gain of 0.005 nats a token or more excluded.",
            ],
        ),
        (
            [NONE],
            [
                "The one planned comparison shows no gain.",
                "For it a gain of 0.005 nats a token or more is excluded.",
            ],
        ),
    ],
)
def test_answer_counts_verdicts(verdicts: list[tuple[Verdict, float]], sentences: list[str]) -> None:
    assert wording.answer(with_planned(*verdicts))[:-1] == sentences


def test_secondary_families_never_enter_the_answer() -> None:
    given = judged()
    before = wording.answer(given)
    given["families"] = given["families"][:1]
    assert wording.answer(given) == before


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (wording.signed(0.00123), "+0.00123"),
        (wording.signed(-0.00123), "−0.00123"),
        (wording.signed(-0.000001), "0.00000"),
        (wording.number(-0.00004), "0.0000"),
        (wording.bracket(-0.1, 0.2, 1), "[−0.1, 0.2]"),
        (wording.percent(0.4804), "48.0%"),
        (wording.percent(-31.4159), "−3142%"),
        (wording.percent(None), "–"),
        (wording.p_value(0.00001), "<0.0001"),
        (wording.p_value(1 / 10_001), "0.0001"),
        (wording.plural(1, "book"), "1 book"),
        (wording.plural(1200, "book"), "1,200 books"),
    ],
)
def test_figures_in_words(shown: str, expected: str) -> None:
    assert shown == expected
