"""The study file: the protocol's defaults, one-line refusals, anchored paths, and the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomlkit
from hypothesis import given
from hypothesis import strategies as st

from lastcall import study as module
from lastcall.errors import OutputError, StudyError
from lastcall.study import (
    LEARNED_ROUTERS,
    ROUTERS,
    Study,
    built_in_studies,
    parse_checkpoint,
    parse_study,
    read_study,
    save_study,
)

LISTS: dict[str, Any] = {"fit": ["a"], "calibration": ["b"], "test": ["c"]}
LEAST: dict[str, Any] = {
    "name": "least",
    "books": {"source": "sotu", "lists": LISTS},
    "checkpoints": [{"name": "one", "model": "hub/one"}],
}
"""The least that a study must say."""


def changed(**at: Any) -> dict[str, Any]:
    """LEAST with values put at paths, dots written `__`; checkpoint keys go to the first one."""
    data: Any = {**LEAST, "books": {**LEAST["books"]}, "checkpoints": [{**LEAST["checkpoints"][0]}]}
    for path, value in at.items():
        *sections, key = path.split("__")
        here = data
        for section in sections:
            here = here["checkpoints"][0] if section == "checkpoints" else here.setdefault(section, {})
        here[key] = value
    return data  # type: ignore[no-any-return]


def parse(data: dict[str, Any], folder: Path = Path("/nowhere")) -> Study:
    return parse_study(tomlkit.dumps(data), "the file", folder)


def test_defaults_are_the_protocols() -> None:
    study = parse(LEAST)
    blocks, routers, inference = study.blocks, study.routers, study.inference
    assert (blocks.horizon, blocks.tokens, blocks.context, blocks.scored) == (512, 513, 17, 495)
    assert (blocks.starts, blocks.minimum_tokens) == ((0.25, 0.75), 1539)
    assert (study.quota.budget, study.calls) == (0.2, 99)
    assert study.measure.local_windows == (32,)
    assert (routers.names, routers.seeds, routers.hidden, routers.huber_delta) == (ROUTERS, (0, 1, 2), 64, 1)
    assert (routers.learning_rate, routers.weight_decay, routers.epochs) == (1e-3, 0.05, 12)
    assert (routers.batch_blocks, routers.holdout_every) == (4, 6)
    assert (inference.draws, inference.seed, inference.alpha) == (10_000, 217, 0.05)
    assert inference.practical_threshold == 0.005
    assert [str(c) for c in inference.planned] == ["T over B", "J32 over S32", "J32 over C_RP3"]
    assert study.checkpoints[0].bos == "none"
    assert study.checkpoints[0].dtype == "float32"
    assert study.books.too_short == "refuse"
    assert study.books.cluster == "book"


def test_routers_are_those_of_section_4() -> None:
    assert LEARNED_ROUTERS == ("B", "T", "S32", "S35", "J32", "C_RP3", "I_B", "I_S35", "I_J32")
    assert list(ROUTERS) == [*LEARNED_ROUTERS, "random", "every-fifth", "by-position"]


def test_seeds_of_policies_without_one_are_the_single_zero() -> None:
    study = parse(changed(routers__seeds=[5, 3]))
    assert {name: study.seeds_of(name) for name in ROUTERS} == {
        name: (0,) if name in ("every-fifth", "by-position") else (5, 3) for name in ROUTERS
    }


def test_families_are_the_planned_one_and_the_labelled_ones() -> None:
    families = {name: [str(c) for c in cs] for name, cs in parse(LEAST).families.items()}
    assert families == {
        "planned": ["T over B", "J32 over S32", "J32 over C_RP3"],
        "same-input-size": ["J32 over S35"],
        "incoming": ["I_S35 over I_B", "I_J32 over I_S35"],
        "over-random": ["B over random", "S32 over random", "J32 over random"],
    }
    few = parse(changed(routers__names=["T", "B", "random"], inference__planned=["T over B"]))
    assert {n: [str(c) for c in cs] for n, cs in few.families.items()} == {
        "planned": ["T over B"],
        "over-random": ["B over random"],
    }
    own = parse(changed(inference__secondary={"mine": ["S35  over   B"]}))
    assert {n: [str(c) for c in cs] for n, cs in own.families.items() if n != "planned"} == {
        "mine": ["S35 over B"]
    }


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
    ({"operation": "ffn"}, "operation: got 'ffn'"),
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


def test_relative_paths_are_anchored_at_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub" / "here").mkdir(parents=True)
    monkeypatch.chdir("/")
    monkeypatch.setenv("HOME", "/home/x")
    models = [
        "here",
        "./gone",
        "gone.gguf",
        "../up",
        "hub/here",
        "package:p/f.gguf",
        "random:llama",
        "~/m",
        "/m",
    ]
    data = changed(books__path="../books", books__splits_csv="s.csv", books__source="folder")
    del data["books"]["lists"]
    data["checkpoints"] = [{"name": f"c{i}", "model": m, "tokenizer": m} for i, m in enumerate(models)]
    (tmp_path / "sub" / "study.toml").write_text(tomlkit.dumps(data))
    study = read_study(tmp_path / "sub" / "study.toml")
    assert study.books.path == tmp_path / "books"
    assert study.books.splits_csv == tmp_path / "sub" / "s.csv"
    here = tmp_path / "sub"
    expected = [
        here / "here",
        here / "gone",
        here / "gone.gguf",
        tmp_path / "up",
        *models[4:7],
        "/home/x/m",
        "/m",
    ]
    assert [c.model for c in study.checkpoints] == [c.tokenizer for c in study.checkpoints]
    assert [c.model for c in study.checkpoints] == [str(path) for path in expected]


def test_a_model_too_long_to_be_a_file_is_a_hub_id() -> None:
    assert parse(changed(checkpoints__model="m" * 5000)).checkpoints[0].model == "m" * 5000


COMMENTED = """\
# first
name = "x"  # beside the name

[books]  # beside the section
# above the path
path = "books"  # beside the path
source = "folder"
splits_csv = "s.csv"

# above a checkpoint
[[checkpoints]]
name = "one"
model = "./tiny"  # beside the model
tokenizer = "./tok"  # beside the tokenizer

[[checkpoints]]
name = "two"
model = "hub/two"
# the end
"""


def test_saving_keeps_comments_and_makes_paths_absolute(tmp_path: Path) -> None:
    file, saved = tmp_path / "a" / "x.toml", tmp_path / "b" / "study.toml"
    file.parent.mkdir()
    saved.parent.mkdir()
    file.write_text(COMMENTED)
    study = read_study(file)
    save_study(file, study, saved)
    a = file.parent
    expected = COMMENTED.replace('"books"', f'"{a}/books"').replace('"s.csv"', f'"{a}/s.csv"')
    expected = expected.replace("./tiny", f"{a}/tiny").replace("./tok", f"{a}/tok")
    assert saved.read_text() == expected
    assert read_study(saved) == study
    assert read_study(saved).plan() == study.plan()


@pytest.mark.parametrize(
    "text",
    [
        'name = "x"\nbooks = {source = "folder", path = "b", splits_csv = "s"}\n'
        'checkpoints = [{name = "one", model = "./m"}, {name = "two", model = "./n", tokenizer = "./t"}]\n',
        'name = "x"\nbooks.source = "folder"\nbooks.path = "b"\nbooks.splits_csv = "s"\n'
        '[[checkpoints]]\nname = "one"\nmodel = "./m"\n',
    ],
    ids=["inline", "dotted"],
)
def test_saving_takes_any_way_of_writing_toml(text: str, tmp_path: Path) -> None:
    file, saved = tmp_path / "x.toml", tmp_path / "elsewhere" / "study.toml"
    saved.parent.mkdir()
    file.write_text(text)
    save_study(file, read_study(file), saved)
    assert read_study(saved) == read_study(file)
    assert read_study(saved).books.path == tmp_path / "b"


def test_a_study_that_cannot_be_saved_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text(tomlkit.dumps(LEAST))
    with pytest.raises(
        OutputError, match=r"cannot write .*study.toml: got Not a directory; choose another --out"
    ):
        save_study(file, read_study(file), file / "study.toml")


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
}
"""Another value for every planned key; `operation` has one only."""


def keys(section: type[Any] = Study, prefix: str = "") -> set[str]:
    """Every key of a study file."""
    found = set()
    for name, field in section.model_fields.items():
        inner = module._section_of(field.annotation)
        nested = inner is not None and inner not in (module.Counts, module.Lists, module.Comparison)
        found |= keys(inner, f"{name}.") if nested else {f"{prefix}{name}"}
    return found


def test_the_tables_here_name_every_key() -> None:
    assert set(OTHERWISE) | UNPLANNED | {"operation"} == keys()


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
