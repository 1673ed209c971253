"""The plan, which the lock hashes, and the way of any valid study through TOML."""

from __future__ import annotations

from typing import Any

import pytest
import tomlkit
from hypothesis import given
from hypothesis import strategies as st

from lastcall import study as module
from lastcall import study_file
from lastcall.study import ROUTERS, Study
from lastcall.study_file import read_study, save_study
from tests.least import LEAST, LISTS, changed, parse

UNPLANNED = {
    "books.path",
    "books.splits_csv",
    "checkpoints.model",
    "checkpoints.tokenizer",
    "checkpoints.device",
}
"""Where things lie and what computes: not part of the plan."""
OTHERWISE: dict[str, Any] = {
    "name": "other",
    "question": "other?",
    "claim": "other",
    "books.source": "pg19-hub",
    "books.counts": {"fit": 6, "calibration": 1, "test": 2},
    "books.lists": {**LISTS, "test": ["d"]},
    "books.split_seed": 1,
    "books.cluster": "author",
    "books.too_short": "leave out",
    "checkpoints.name": "two",
    "checkpoints.revision": "abc",
    "checkpoints.dtype": "bfloat16",
    "checkpoints.attention": "eager",
    "checkpoints.bos": "bos",
    "checkpoints.weights_seed": 1,
    "checkpoints.pickle_may_run_code": True,
    "checkpoints.trust_remote_code": True,
    "blocks.horizon": 513,
    "blocks.context": 18,
    "blocks.starts": [0.5],
    "measure.local_windows": [16],
    "measure.batch_books": 5,
    "routers.names": [*ROUTERS[:6], "random"],
    "routers.seeds": [0, 1],
    "routers.hidden": 65,
    "routers.huber_delta": 0.9,
    "routers.learning_rate": 2e-3,
    "routers.weight_decay": 0.06,
    "routers.epochs": 13,
    "routers.batch_blocks": 5,
    "routers.holdout_every": 7,
    "routers.projection_seed": 218,
    "quota.budget": 0.25,
    "inference.draws": 10_001,
    "inference.seed": 218,
    "inference.alpha": 0.04,
    "inference.practical_threshold": 0.006,
    "inference.planned": ["T over B"],
    "inference.secondary": {"mine": ["T over S32"]},
    "operation": "ffn",
    "analyses.horizon": 1024,
    "analyses.quotas": [0.1, 0.5],
    "analyses.controllers": ["integral"],
    "analyses.learners": ["ridge"],
    "analyses.independence": True,
    "analyses.third_action": 32,
    "analyses.ceilings": True,
    "published": {"source": "s", "figures": [{"what": "planned_gains", "value": 0}]},
}
"""Another value for every planned key."""


def keys(section: type[Any] = Study, prefix: str = "") -> set[str]:
    """Every key of a study file."""
    found = set()
    for name, field in section.model_fields.items():
        inner = study_file._section_of(field.annotation)
        whole = (module.Counts, module.Lists, module.Comparison, module.Published)
        nested = inner is not None and inner not in whole
        found |= keys(inner, f"{name}.") if nested else {f"{prefix}{name}"}
    return found


def test_the_tables_here_name_every_key() -> None:
    assert set(OTHERWISE) | UNPLANNED == keys()


@pytest.mark.parametrize("key", OTHERWISE)
def test_the_plan_changes_with_every_planned_key(key: str) -> None:
    at = changed(**{key.replace(".", "__"): OTHERWISE[key]})
    if key == "books.counts":
        del at["books"]["lists"]
    assert parse(at).plan() != parse(LEAST).plan()


@pytest.mark.parametrize("key", sorted(UNPLANNED))
def test_the_plan_holds_no_paths_and_no_devices(key: str) -> None:
    csv = changed(books={"source": "folder", "path": "p", "splits_csv": "q"}, checkpoints__tokenizer="t")
    value = "cpu" if key.endswith("device") else "./marked"
    section, name = key.split(".")
    other = changed(
        books=csv["books"] | ({name: value} if section == "books" else {}),
        **({f"checkpoints__{name}": value} if section == "checkpoints" else {"checkpoints__tokenizer": "t"}),
    )
    assert parse(other).plan() == parse(csv).plan()
    assert "marked" not in str(parse(other).plan())


def test_the_plan_spells_out_what_was_left_to_default() -> None:
    plan = parse(LEAST).plan()
    assert plan["inference"]["secondary"]["same-input-size"] == ["J32 over S35"]
    assert plan["inference"]["planned"] == ["T over B", "J32 over S32", "J32 over C_RP3"]
    spelled = parse(changed(inference__secondary=plan["inference"]["secondary"]))
    assert spelled.plan() == plan
    assert parse(changed(quota__budget=0.2)).plan() == plan


def test_a_study_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        parse(LEAST).blocks.horizon = 3  # type: ignore[misc]


TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]))
SEED = st.integers(0, 2**31 - 1)
OVERRIDES = {
    "question": TEXT,
    "claim": TEXT,
    "books.lists": st.fixed_dictionaries({s: st.lists(TEXT, max_size=3) for s in LISTS}),
    "books.split_seed": SEED,
    "books.cluster": st.sampled_from(["book", "author"]),
    "checkpoints.dtype": st.sampled_from(["float32", "bfloat16", "float16"]),
    "checkpoints.revision": TEXT,
    "checkpoints.device": TEXT,
    "blocks.horizon": st.integers(300, 5000),
    "blocks.context": st.integers(3, 200),
    "blocks.starts": st.lists(st.floats(0, 1), min_size=1, max_size=4, unique=True).map(sorted),
    "measure.local_windows": st.lists(st.integers(1, 600), unique=True, max_size=4),
    "routers.seeds": st.lists(SEED, min_size=1, max_size=4, unique=True),
    "routers.learning_rate": st.floats(0, 10, exclude_min=True),
    "routers.weight_decay": st.floats(0, 10),
    "quota.budget": st.floats(0.01, 1),
    "inference.alpha": st.floats(0, 1, exclude_min=True, exclude_max=True),
    "inference.planned": st.sampled_from(
        [["J32 over B"], ["B over T", "T over B"], [{"a": "I_B", "b": "B"}]]
    ),
    "inference.secondary": st.dictionaries(
        st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]*", fullmatch=True).filter(lambda name: name != "planned"),
        st.just(["random over B"]),
        max_size=2,
    ),
}


@given(st.fixed_dictionaries({}, optional=OVERRIDES))
def test_any_valid_study_goes_through_toml(
    tmp_path_factory: pytest.TempPathFactory, overrides: dict[str, Any]
) -> None:
    data = changed(**{key.replace(".", "__"): value for key, value in overrides.items()})
    study = parse(data)
    assert study == Study.model_validate(data)
    folder = tmp_path_factory.mktemp("saved")
    (folder / "x.toml").write_text(tomlkit.dumps(data), encoding="utf-8")
    save_study(folder / "x.toml", study, folder / "study.toml")
    assert read_study(folder / "study.toml").plan() == study.plan()
    assert study.calls == round(study.quota.budget * study.blocks.scored)
