"""What a study file may not say: each refused in one line that names it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lastcall.errors import StudyError
from lastcall.study import ROUTERS
from lastcall.study_file import built_in_studies, parse_checkpoint, parse_study, read_study, save_study
from tests.least import LEAST, LISTS, changed, parse


@pytest.mark.parametrize(
    ("at", "message"),
    [
        ({"bloks": 3}, 'unknown key "bloks"; did you mean "blocks"?'),
        ({"books__sorce": "x"}, 'unknown key "books.sorce"; did you mean "source"?'),
        ({"books__lists": {**LISTS, "tests": []}}, 'unknown key "books.lists.tests"; did you mean "test"?'),
        (
            {"books": {"source": "sotu", "counts": {"fit": 6, "calibration": 1, "test": 2, "calib": 1}}},
            'unknown key "books.counts.calib"; did you mean "calibration"?',
        ),
        ({"checkpoints__modle": "x"}, 'unknown key "checkpoints.0.modle"; did you mean "model"?'),
        ({"blocks__horizn": 1}, 'unknown key "blocks.horizn"; did you mean "horizon"?'),
        ({"measure__local_window": 1}, 'unknown key "measure.local_window"; did you mean "local_windows"?'),
        ({"routers__epoch": 1}, 'unknown key "routers.epoch"; did you mean "epochs"?'),
        ({"quota__zzz": 1}, 'unknown key "quota.zzz"; known keys here: budget'),
        ({"inference__draw": 1}, 'unknown key "inference.draw"; did you mean "draws"?'),
        (
            {"inference__planned": [{"a": "T", "b": "B", "c": "x"}]},
            'unknown key "inference.planned.0.c"; known keys here: a, b',
        ),
        (
            {"inference__secondary": {"mine": [{"a": "T", "b": "B", "bb": "x"}]}},
            'unknown key "inference.secondary.mine.0.bb"; did you mean "b"?',
        ),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_known_one(at: dict[str, Any], message: str) -> None:
    with pytest.raises(StudyError) as caught:
        parse(changed(**at))
    assert str(caught.value) == f"the file: {message}"


REFUSED = [
    ({"books": {"source": "folder", "lists": LISTS}}, 'books: source = "folder" needs `path`'),
    ({"books": {"source": "pg19-folder"}}, 'books: source = "pg19-folder" needs `path`'),
    ({"books": {"source": "sotu"}}, '"sotu" needs `splits_csv`, `counts` or `lists`'),
    ({"books": {"source": "folder", "path": "x"}}, '"folder" needs `splits_csv`, `counts` or `lists`'),
    ({"books__splits_csv": "x"}, "give one of splits_csv, lists, not 2"),
    (
        {"books": {"source": "sotu", "splits_csv": "x"}},
        '`splits_csv` goes with source = "folder", not "sotu"',
    ),
    ({"books": {"source": "web"}}, "books.source: got 'web'; input should be"),
    ({"books__counts": {"fit": 0, "calibration": 1, "test": 1}}, "books.counts.fit: got 0"),
    ({"books__lists": {"fit": [], "test": []}}, '"books.lists.calibration" is missing; add it'),
    ({"name": "a/b"}, "name: got 'a/b'; string should match"),
    ({"name": ".."}, "name: got '..'"),
    ({"operation": "mlp"}, 'operation: no such operation: "mlp"; known are attention, ffn, block'),
    ({"analyses": {"horizon": 512}}, "analyses.horizon = 512 must be over blocks.horizon, 512"),
    (
        {"analyses": {"third_action": 32}, "operation": "ffn"},
        'analyses.third_action goes with operation = "attention", not "ffn"',
    ),
    ({"analyses": {"third_action": 8}}, "analyses.third_action = 8 is not among local_windows"),
    ({"checkpoints": []}, "checkpoints: got []"),
    ({"checkpoints": [LEAST["checkpoints"][0]] * 2}, "checkpoints.name has the same value twice: one, one"),
    ({"checkpoints__dtype": "int8"}, "checkpoints.0.dtype: got 'int8'"),
    ({"checkpoints__weights_seed": -1}, "checkpoints.0.weights_seed: got -1"),
    ({"blocks__context": 512}, "blocks: context = 512 leaves nothing to score in a horizon of 512"),
    ({"blocks__context": 2}, "blocks.context: got 2; input should be greater than or equal to 3"),
    ({"blocks__starts": []}, "blocks.starts: got []"),
    ({"blocks__starts": [0.5, 0.5]}, "starts = [0.5, 0.5] must rise within [0, 1]"),
    ({"blocks__starts": [0.5, 1.1]}, "starts = [0.5, 1.1] must rise within [0, 1]"),
    ({"blocks__starts": [float("nan")]}, "blocks.starts.0: got nan"),
    ({"measure__local_windows": [0]}, "local_windows = [0] must be distinct and at least 1"),
    ({"measure__local_windows": [8, 8]}, "local_windows = [8, 8] must be distinct"),
    ({"measure__batch_books": 0}, "measure.batch_books: got 0"),
    ({"routers__names": ["J33"]}, "routers.names.0: got 'J33'"),
    ({"routers__names": [*ROUTERS, "B"]}, "routers.names has the same value twice"),
    ({"routers__seeds": []}, "routers.seeds: got []"),
    ({"routers__seeds": [1, 1]}, "routers.seeds has the same value twice: 1, 1"),
    ({"routers__seeds": [-1]}, "routers.seeds.0: got -1"),
    ({"routers__seeds": [2**31]}, "routers.seeds.0: got 2147483648"),
    ({"routers__holdout_every": 1}, "routers.holdout_every: got 1"),
    ({"routers__huber_delta": float("inf")}, "routers.huber_delta: got inf"),
    ({"routers__learning_rate": 0.0}, "routers.learning_rate: got 0.0"),
    ({"routers__weight_decay": -0.1}, "routers.weight_decay: got -0.1"),
    ({"routers__epochs": 0}, "routers.epochs: got 0"),
    ({"routers__hidden": 0}, "routers.hidden: got 0"),
    ({"routers__batch_blocks": 0}, "routers.batch_blocks: got 0"),
    ({"quota__budget": 0.0}, "quota.budget = 0.0 gives 0 calls of 495 scored positions a block"),
    ({"quota__budget": 1.1}, "choose one that gives 1 to 495"),
    ({"quota__budget": float("inf")}, "quota.budget: got inf"),
    ({"quota__budget": float("nan")}, "quota.budget: got nan"),
    ({"inference__draws": 99}, "inference.draws: got 99"),
    ({"inference__seed": -1}, "inference.seed: got -1"),
    ({"inference__alpha": 1.0}, "inference.alpha: got 1.0"),
    ({"inference__practical_threshold": 0.0}, "inference.practical_threshold: got 0.0"),
    ({"inference__planned": []}, "inference.planned: got []"),
    (
        {"inference__planned": ["T beats B"]},
        'inference.planned.0: a comparison reads "A over B", not "T beats B"',
    ),
    ({"inference__planned": ["T over never"]}, 'planned comparison names "never", which is not among'),
    ({"inference__planned": ["T over T"]}, 'planned comparison "T over T" compares a router with itself'),
    ({"inference__planned": ["T over B", "T over B"]}, 'planned comparison "T over B" comes twice'),
    ({"inference__secondary": {"x": ["T over Q"]}}, 'x comparison names "Q"'),
    ({"inference__secondary": {"x": []}}, "inference.secondary.x: got []"),
    ({"inference__secondary": {"planned": ["T over B"]}}, "cannot hold a family named planned"),
    ({"routers__names": ["T", "B"]}, 'planned comparison names "J32", which is not among routers.names'),
]


@pytest.mark.parametrize(("at", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_what_is_impossible_is_refused_in_one_line(at: dict[str, Any], message: str) -> None:
    with pytest.raises(StudyError) as caught:
        parse(changed(**at))
    assert str(caught.value).startswith("the file: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("missing", ["name", "books", "checkpoints"])
def test_what_is_missing_is_named(missing: str) -> None:
    with pytest.raises(StudyError, match=f'the file: "{missing}" is missing; add it'):
        parse({key: value for key, value in LEAST.items() if key != missing})


@pytest.mark.parametrize("text", ["name = ", "= 3", "[books\n", "name = 'a'\nname = 'b'", "a = 1\n\x00"])
def test_what_is_not_toml_is_refused(text: str) -> None:
    with pytest.raises(StudyError, match=r"the file is not TOML: got .*; mend the line it names"):
        parse_study(text, "the file", Path("/nowhere"))


def test_a_checkpoint_alone_is_refused_in_one_line() -> None:
    assert parse_checkpoint({"name": "x", "model": "m"}).dtype == "float32"
    with pytest.raises(StudyError, match="dtype: got 'int8'"):
        parse_checkpoint({"name": "x", "model": "m", "dtype": "int8"})


def test_a_study_that_is_not_there_is_named_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(
        StudyError, match=r'no such study: got "dmeo"; give a .toml file .* did you mean demo\?'
    ):
        read_study("dmeo")
    with pytest.raises(StudyError, match=r"built-in studies are .*demo"):
        read_study("zzz")
    with pytest.raises(StudyError, match=r"cannot read the study file .*gone.toml: got No such file"):
        read_study(tmp_path / "gone.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(StudyError, match=r"cannot read the study file .*binary.toml: got .*utf-8"):
        read_study(tmp_path / "binary.toml")


def test_a_folder_of_a_built_in_name_does_not_hide_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    assert read_study("demo").name == "demo"


@pytest.mark.parametrize("name", built_in_studies())
def test_built_in_studies_parse_and_survive_saving(name: str, tmp_path: Path) -> None:
    study = read_study(name)
    save_study(name, study, tmp_path / "study.toml")
    assert read_study(tmp_path / "study.toml") == study


def test_the_demo_is_built_in() -> None:
    assert "demo" in built_in_studies()
