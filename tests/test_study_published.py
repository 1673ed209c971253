"""What a study file says of a published study, and the built-in study that repeats one."""

from __future__ import annotations

import re
from typing import Any

import pytest

from lastcall.errors import StudyError
from lastcall.published import Quantity, parse
from lastcall.study_file import read_study
from tests.least import LEAST, changed
from tests.least import parse as parse_study


@pytest.mark.parametrize(
    ("key", "quantity"),
    [
        ("gain_full", Quantity("gain_full")),
        ("share_positive@4096", Quantity("share_positive", horizon=4096)),
        ("local_recovery:32", Quantity("local_recovery", window=32)),
        ("unforced_activation:J32@4096", Quantity("unforced_activation", ("J32",), horizon=4096)),
        ("delta:C_RP3 over J32", Quantity("delta", ("C_RP3", "J32"))),
        ("speed_ratio:I_S35@1024", Quantity("speed_ratio", ("I_S35",), horizon=1024)),
        ("unforced_activation:by-position", Quantity("unforced_activation", ("by-position",))),
    ],
)
def test_a_key_names_a_quantity(key: str, quantity: Quantity) -> None:
    assert parse(key) == quantity


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("gain", 'no figure is called "gain"; known: gain_full, share_positive'),
        ("", 'no figure is called ""'),
        ("gain_full@0", "no figure is called"),
        ("gain_full:J32", '"gain_full:J32" should read "gain_full"'),
        ("local_recovery", '"local_recovery" should read "local_recovery:WINDOW"'),
        ("local_recovery:x", 'should read "local_recovery:WINDOW"'),
        ("local_recovery:٣", 'should read "local_recovery:WINDOW"'),
        ("delta:J32", 'should read "delta:A over B"'),
        ("unforced_activation:J32 over B", 'should read "unforced_activation:ROUTER"'),
    ],
)
def test_what_names_none_is_refused(key: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse(key)


def published(*figures: dict[str, Any], **rest: Any) -> dict[str, Any]:
    return {"source": "A study.", "figures": list(figures), **rest}


FIGURE = {"checkpoint": "one", "what": "gain_full", "value": 0.1}

REFUSED = [
    (published(), "published.figures: got []"),
    ({"figures": [FIGURE]}, '"published.source" is missing; add it'),
    (published(FIGURE, sources="x"), 'unknown key "published.sources"; did you mean "source"?'),
    (published({**FIGURE, "vaule": 1}), 'unknown key "published.figures.0.vaule"; did you mean "value"?'),
    (
        published(FIGURE, design={"horizn": 1}),
        'unknown key "published.design.horizn"; did you mean "horizon"?',
    ),
    (published({**FIGURE, "what": "gain"}), 'published.figures.0.what: no figure is called "gain"'),
    (published({**FIGURE, "value": float("nan")}), "published.figures.0.value: got nan"),
    (published({**FIGURE, "low": 0.05}), "give both ends of the interval, low and high, or neither"),
    (published({**FIGURE, "low": 0.2, "high": 0.3}), "value = 0.1 is not within [0.2, 0.3]"),
    (published({"what": "gain_full", "value": 1}), '"gain_full" needs its `checkpoint`'),
    (
        published({**FIGURE, "what": "planned_gains"}),
        '"planned_gains" is of all checkpoints and names none',
    ),
    (
        published({**FIGURE, "checkpoint": "two"}),
        'published figure "gain_full" names the checkpoint "two", which is not among checkpoints',
    ),
    (
        published({**FIGURE, "what": "delta:J32 over Q9"}),
        'published figure "delta:J32 over Q9" names "Q9", which is not among routers.names',
    ),
    (
        published({**FIGURE, "what": "speed_ratio:Q9@4096"}),
        'published figure "speed_ratio:Q9@4096" names "Q9", which is not among routers.names',
    ),
    (
        published({**FIGURE, "what": "local_recovery:64"}),
        'published figure "local_recovery:64" names a window that is not among measure.local_windows',
    ),
    (published(FIGURE, {**FIGURE, "value": 2}), 'published figure "gain_full" comes twice for one'),
    (published(*[{"what": "planned_gains", "value": 0}] * 2), 'published figure "planned_gains" comes twice'),
]


@pytest.mark.parametrize(("given", "message"), REFUSED, ids=[message[:50] for _, message in REFUSED])
def test_what_is_impossible_is_refused_in_one_line(given: dict[str, Any], message: str) -> None:
    with pytest.raises(StudyError) as caught:
        parse_study(changed(published=given))
    assert str(caught.value).startswith("the file: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_plan_of_a_study_without_one_stays_what_it_was() -> None:
    assert "published" not in parse_study(LEAST).plan()
    assert parse_study(changed(published=published(FIGURE))).plan()["published"]["source"] == "A study."


def test_the_built_in_study_is_the_protocols() -> None:
    study, default = read_study("final_attention_pg19"), parse_study(LEAST)
    for section in ("blocks", "measure", "routers", "quota", "inference"):
        assert study.plan()[section] == default.plan()[section]
    counts = study.books.counts
    assert counts is not None
    assert (counts.fit, counts.calibration, counts.test) == (350, 50, 100)
    assert (study.books.source, study.books.split_seed, study.books.cluster) == ("pg19-hub", 217, "book")
    assert [c.model for c in study.checkpoints] == ["HuggingFaceTB/SmolLM3-3B-Base", "Qwen/Qwen3.5-4B-Base"]
    assert {c.dtype for c in study.checkpoints} == {"bfloat16"}
    assert all(re.fullmatch("[0-9a-f]{40}", c.revision or "") for c in study.checkpoints)


def test_the_built_in_study_carries_every_published_figure() -> None:
    """Section 9, the table row by row and the sentences under it."""
    found = read_study("final_attention_pg19").published
    assert found is not None
    value = {(f.checkpoint, f.what): (f.value, f.low, f.high) for f in found.figures}
    smol, qwen = "SmolLM3-3B-Base", "Qwen3.5-4B-Base"
    table = {
        "gain_full": (0.03813, 0.16614),
        "share_positive": (0.4804, 0.7206),
        "local_recovery:32": (0.548, 0.938),
        "unforced_activation:J32": (0.2046, 0.1871),
        "unforced_activation:J32@4096": (0.8686, 0.3555),
        "executed_nll_change:I_S35@4096": (0.00925, 0.11014),
    }
    expected: dict[Any, Any] = {
        (name, what): (figures[i], None, None)
        for what, figures in table.items()
        for i, name in enumerate((smol, qwen))
    }
    expected |= {
        (smol, "speed_ratio:I_S35@4096"): (1.043, 1.013, 1.060),
        (qwen, "speed_ratio:I_S35@4096"): (1.029, 1.024, 1.050),
        (qwen, "delta:C_RP3 over J32"): (0.00356, 0.00218, 0.00487),
        (None, "planned_comparisons"): (6, None, None),
        (None, "planned_gains"): (0, None, None),
        (None, "planned_upper_bound"): (0.005, None, None),
    }
    assert value == expected
    sentences = " ".join(found.unmeasured)
    for said in (
        "100 policy",
        "99 passed",
        "2,970",
        "0.001",
        "slower and worse",
        "shared desktop",
        "recomputed",
    ):
        assert said in sentences
