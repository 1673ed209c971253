"""The study file: the protocol's defaults, anchored paths, and saving."""

from __future__ import annotations

from pathlib import Path

import pytest
import tomlkit

from lastcall.errors import OutputError
from lastcall.study import LEARNED_ROUTERS, ROUTERS
from lastcall.study_file import read_study, save_study
from tests.least import LEAST, changed, parse


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
        OutputError,
        match=r"cannot write .*study.toml: got (Not a directory|File exists)",
    ):
        save_study(file, read_study(file), file / "study.toml")
