"""What a plan says, against numbers counted by hand; what it refuses; and that it leaves no trace."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lastcall.errors import BookError, LastcallError, ModelError, StudyError, UnknownArchitectureError
from lastcall.measure import costs
from lastcall.measure.branches import Branches
from lastcall.measure.loading import load
from lastcall.measure.outline import outline
from lastcall.planning import Plan, duration, plan, sentences
from lastcall.study import Checkpoint, Study
from lastcall.study_file import read_study
from tests.little import write_books, write_study
from tests.test_cli import last, lastcall, refused
from tests.tiny import IMAGE_TEXT, build, build_image_text, checkpoint, token_blocks, with_tokenizer

HUB = {"source": "pg19-hub", "counts": {"fit": 60, "calibration": 20, "test": 100}}


def hub_study(*models: str, **books: Any) -> Study:
    """A study of PG-19 from the hub over `models`."""
    checkpoints = [{"name": f"m{i}", "model": m, "dtype": "bfloat16"} for i, m in enumerate(models)]
    values = {"name": "hub", "books": {**HUB, **books}, "checkpoints": checkpoints}
    return Study.model_validate(values)


def counts(found: Plan, at: int = 0) -> list[tuple[int, int, int, int]]:
    """Books, blocks, scored predictions and tokens of each split."""
    return [(s.books, s.blocks, s.scored, s.tokens) for s in found.checkpoints[at].splits]


def test_a_little_study_against_a_hand_count(tmp_path: Path) -> None:
    """6, 2 and 4 books of two blocks; horizon 40, context 5: 35 scored a block."""
    found = plan(read_study(write_study(tmp_path, {"llama": "llama"})), rate=1.0)
    assert counts(found) == [(6, 12, 420, 480), (2, 4, 140, 160), (4, 8, 280, 320)]
    assert found.exact
    assert found.left_out == ()
    assert found.comparisons == {"planned": 3, "same-input-size": 1, "incoming": 2, "over-random": 3}
    one = found.checkpoints[0]
    # embedding and head 331 × 64 each; a block: q, k, v, o and three FFN matrices with biases, two norms
    block = 2 * (64 * 64 + 64) + 2 * (64 * 32 + 32) + 2 * (64 * 96 + 96) + (96 * 64 + 64) + 2 * 64
    assert one.parameters == 2 * 331 * 64 + 4 * block + 64
    files = ("model.safetensors", "config.json")
    assert one.load_bytes == sum((tmp_path / "llama" / file).stat().st_size for file in files)
    assert one.memory_bytes is not None
    assert one.memory_bytes > one.parameters * 4
    # 24 blocks of 40 rows, two float32 states of 64 each; 280 rows a policy: 9 × 2, random × 2, 2 others
    assert one.disk_bytes == 24 * 40 * (88 + 2 * 64 * 4) + 280 * (9 * 2 + 2 + 2) * 6
    assert one.fits is None


def test_the_plan_is_what_the_run_writes(tmp_path: Path) -> None:
    study = write_study(tmp_path, {"llama": "llama"})
    found = plan(read_study(study), rate=1.0)
    assert lastcall("run", study, "--out", tmp_path / "run").returncode == 0
    for split in found.checkpoints[0].splits:
        written = list((tmp_path / "run" / "measured" / "llama" / split.split).glob("*.parquet"))
        assert len(written) == split.books
    states = sum(f.stat().st_size for f in (tmp_path / "run").glob("measured/**/*.safetensors"))
    assert states == pytest.approx(24 * 40 * 2 * 64 * 4, rel=0.02)


def test_two_checkpoints_share_their_books_and_add_their_comparisons(tmp_path: Path) -> None:
    """A book too short for one tokenizer is left out for both, and listed."""
    path = write_study(tmp_path, {"a": "llama", "b": "smollm3"}, books={"too_short": "leave out"})
    (tmp_path / "books" / "1.txt").write_text("Short.")
    found = plan(read_study(path), rate=1.0)
    assert sum(s.books for s in found.checkpoints[0].splits) == 11
    assert counts(found, 0) == counts(found, 1)
    assert [one.id for one in found.left_out] == ["1"]
    assert "Left out: 1: too short: 6 tokens" in " ".join(sentences(found))
    assert found.comparisons["planned"] == 6


def test_a_beginning_token_is_read_too(tmp_path: Path) -> None:
    write_study(tmp_path, {"llama": "llama"})
    with_tokenizer(tmp_path / "llama")
    words = " ".join("w1" for _ in range(200))
    for i, book in enumerate(sorted((tmp_path / "books").glob("*.txt"))):
        book.write_text(f"w{i} {words}")
    one = {"name": "llama", "model": "./llama", "bos": "bos", "device": "cpu"}
    found = plan(read_study(write_study_over(tmp_path, one)), rate=1.0)
    assert counts(found)[0] == (6, 12, 420, 12 * 41)


def write_study_over(root: Path, one: dict[str, Any]) -> Path:
    """The little study in `root` with its books as they are and `one` checkpoint."""
    kept = {book: book.read_text() for book in (root / "books").glob("*.txt")}
    path = write_study(root, {"llama": "llama"}, checkpoints=[one])
    for book, text in kept.items():
        book.write_text(text)
    return path


@pytest.mark.parametrize("name", ["llama", "smollm3", "gemma3-full", "gpt2", "cohere2", "gpt_neox", "phi3"])
@pytest.mark.parametrize("windows", [0, 2])
def test_operations_against_a_counter(tiny_folder: Callable[[str], Path], name: str, windows: int) -> None:
    """Within 4%: the counter takes a head's two products, and attention whole rather than causal."""
    one = checkpoint(name, tiny_folder(name), attention="eager")
    counted = run_counted(one, windows)
    site = outline(one).site
    assert site is not None
    assert site.device.type == "meta"
    assert costs.operations(site, 2, 16, windows) == pytest.approx(counted, rel=0.04)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "olmoe"])
def test_operations_of_experts_are_those_a_token_uses(tiny_folder: Callable[[str], Path], name: str) -> None:
    one = checkpoint(name, tiny_folder(name), attention="eager")
    site = outline(one).site
    assert site is not None
    assert costs.operations(site, 2, 16, 0) == pytest.approx(run_counted(one, 0), rel=0.04)


def run_counted(one: Checkpoint, windows: int) -> int:
    """Operations that torch counts in the paired measure of 2 blocks of 16, with the real model."""
    site: Any = load(one).site
    if hasattr(site.model.config, "num_experts_per_tok"):
        site.model.set_experts_implementation("eager")  # grouped products are not counted
    tokens = token_blocks(2, 16)
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        branches = Branches(site, tokens)
        states = [branches.full(), branches.bypass(), *(branches.local(3 + i) for i in range(windows))]
        for state in states:
            site.head.logits(state.flatten(0, 1), 0, site.head.vocabulary)
    return int(counter.get_total_flops())


def test_the_outline_has_the_parameters_of_the_loaded_model(tiny: Callable[..., Any]) -> None:
    for name in ("llama", "qwen3_5", "gemma3-softcap", "qwen3_5_moe"):
        loaded = tiny(name)
        site = outline(loaded.checkpoint).site
        assert site is not None
        assert costs.parameters(site) == sum(p.numel() for p in loaded.site.model.parameters())


def test_full_sizes() -> None:
    """3.08 and 4.21 billion parameters, as their cards say; 16 bits are two bytes a parameter."""
    for name, millions in {"smollm3-3b": 3075, "qwen3.5-4b": 4206}.items():
        site = outline(Checkpoint(name=name, model=f"random:{name}", dtype="bfloat16")).site
        assert site is not None
        assert round(costs.parameters(site) / 1e6) == millions
        assert costs.weight_bytes(site) == 2 * costs.parameters(site)


def test_seconds_and_memory_against_the_recorded_measurements() -> None:
    """measure_gpu.json: 62.8 and 122 ms for 8 × 512, 1.05 and 1.06 GiB beside the weights."""
    machine = costs.elsewhere(762.8)
    for name, milliseconds, gib in (("smollm3-3b", 62.8, 1.047), ("qwen3.5-4b", 122.2, 1.060)):
        site = outline(Checkpoint(name=name, model=f"random:{name}", dtype="bfloat16")).site
        assert site is not None
        assert costs.seconds(site, machine, 8, 512, 0) == pytest.approx(milliseconds / 1e3, rel=0.03)
        assert costs.working_bytes(site, 8, 512, 0, "cuda", False) == pytest.approx(gib * 2**30, rel=0.01)


def test_workers_and_rate_divide_the_measuring_alone(tmp_path: Path) -> None:
    study = read_study(write_study(tmp_path, {"llama": "llama"}))
    base = plan(study, rate=1.0).checkpoints[0]
    many = plan(study, rate=2.0, workers=4).checkpoints[0]
    assert base.measuring_seconds is not None
    assert many.measuring_seconds == pytest.approx(base.measuring_seconds / 8)
    assert many.fitting_seconds == base.fitting_seconds


def test_the_rate_is_of_the_products_made() -> None:
    """Between what was made, less the warm-up, over the whole time and over the time asked for."""
    begun = time.perf_counter()
    with FlopCounterMode(display=False) as counter:
        rate = costs.product_rate(torch.device("cpu"), torch.float32, 0.2)
    elapsed = time.perf_counter() - begun
    made = counter.get_total_flops() - 5 * 2 * 1024**3
    assert made / elapsed <= rate <= made / 0.2


def test_hub_ids_that_are_not_here_are_said_to_be_unknown() -> None:
    study = hub_study("HuggingFaceTB/SmolLM3-3B-Base", "someone/a-model-not-here")
    found = plan(study, rate=700.0)
    assert not found.exact
    assert "from the study file" in found.counted
    assert counts(found)[2] == (100, 200, 99_000, 102_400)
    known, unknown = found.checkpoints
    assert known.parameters == 3_075_098_624
    assert "built-in smollm3-3b" in known.known_from
    assert unknown.known_from == "unknown: not downloaded"
    costs_of = (unknown.parameters, unknown.load_bytes, unknown.memory_bytes, unknown.disk_bytes)
    assert (*costs_of, unknown.measuring_seconds, unknown.fitting_seconds) == (None,) * 6
    assert any("unknown for m1" in sentence for sentence in sentences(found))
    assert found.comparisons["planned"] == 6


def test_local_books_with_a_model_that_is_not_here_are_at_most(tmp_path: Path) -> None:
    one = {"name": "m", "model": "someone/a-model-not-here"}
    found = plan(read_study(write_study(tmp_path, {"llama": "llama"}, checkpoints=[one])), rate=1.0)
    assert not found.exact
    assert counts(found)[0] == (6, 12, 420, 480)
    assert "the tokenizer of m is not here" in found.counted


def test_code_that_comes_with_a_checkpoint_does_not_run(tmp_path: Path) -> None:
    """A trusted checkpoint's code would run in a run, not in a plan: its size is unknown."""
    path = write_study(tmp_path, {"llama": "llama"})
    config = json.loads((tmp_path / "llama" / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (tmp_path / "llama" / "config.json").write_text(json.dumps(config))
    (tmp_path / "llama" / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()")
    study = read_study(path)
    trusting = study.checkpoints[0].model_copy(update={"trust_remote_code": True})
    assert plan(study, rate=1.0).checkpoints[0].parameters
    found = plan(study.model_copy(update={"checkpoints": (trusting,)}), rate=1.0)
    assert found.checkpoints[0].parameters is None
    assert "own code" in found.checkpoints[0].known_from
    assert not found.exact
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", IMAGE_TEXT)
def test_of_an_image_and_text_checkpoint_the_text_is_planned(name: str, tmp_path: Path) -> None:
    text = build(name)
    build_image_text(name, text).save_pretrained(tmp_path / "whole")
    site = outline(checkpoint("whole", tmp_path / "whole")).site
    assert site is not None
    assert costs.parameters(site) == sum(p.numel() for p in text.parameters())


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"blocks": {"horizon": 512, "context": 5}}, BookError, "too short for blocks of 513 tokens.*book 1"),
        ({"routers": {"holdout_every": 7}}, BookError, "too few fit books to hold one out: got 6"),
        (
            {"books": {"counts": {"fit": 6, "calibration": 2, "test": 1}}},
            BookError,
            "fewer than two clusters",
        ),
        ({"books": {"counts": {"fit": 6, "calibration": 2, "test": 5}}}, BookError, "too few books"),
        (
            {"checkpoints": [{"name": "m", "model": "./gone", "tokenizer": "bytes"}]},
            ModelError,
            "no model folder",
        ),
        ({"checkpoints": [{"name": "m", "model": "./gone.gguf"}]}, ModelError, "no GGUF file"),
        (
            {"checkpoints": [{"name": "m", "model": "random:gone"}]},
            ModelError,
            "no such full-size architecture",
        ),
    ],
)
def test_what_would_stop_the_study_stops_the_plan(
    tmp_path: Path, changes: dict[str, Any], error: type[LastcallError], message: str
) -> None:
    study = read_study(write_study(tmp_path, {"llama": "llama"}, **changes))
    with pytest.raises(error, match=message):
        plan(study, rate=1.0)


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("qwen3_5-linear-end", ModelError, r"has no attention.*attention in blocks \[1, 2\]"),
        ("mamba", UnknownArchitectureError, 'model_type "mamba"'),
    ],
)
def test_an_unsuitable_architecture_stops_the_plan(
    tmp_path: Path, name: str, error: type[LastcallError], message: str
) -> None:
    with pytest.raises(error, match=message):
        plan(read_study(write_study(tmp_path, {"m": name})), rate=1.0)


def test_a_horizon_over_the_context_stops_the_plan(tmp_path: Path) -> None:
    write_books(tmp_path / "books", letters=1000)
    path = write_study(tmp_path, {"llama": "llama"}, blocks={"horizon": 129, "starts": [0.5]})
    write_books(tmp_path / "books", letters=1000)
    with pytest.raises(ModelError, match="128 positions where 129 are needed"):
        plan(read_study(path), rate=1.0)


@pytest.mark.parametrize(
    ("books", "message"),
    [
        ({"counts": {"fit": 6, "calibration": 51, "test": 100}}, "counts.calibration = 51 where it has 50"),
        ({"counts": None}, "no counts and no lists"),
        ({"cluster": "author"}, "names no authors"),
    ],
)
def test_pg19_that_the_hub_does_not_have_stops_the_plan(books: dict[str, Any], message: str) -> None:
    with pytest.raises(BookError, match=message):
        plan(hub_study("random:smollm2-135m", **books), rate=1.0)


def test_no_workers_and_no_rate_are_refused() -> None:
    with pytest.raises(StudyError, match="above 0"):
        plan(hub_study("random:smollm2-135m"), rate=0.0)


def test_the_command_prints_writes_nothing_and_ends_with_json(tmp_path: Path) -> None:
    study = write_study(tmp_path, {"llama": "llama"})

    def state() -> dict[str, str]:
        found = sorted(tmp_path.rglob("*"))
        return {str(f): hashlib.sha256(f.read_bytes()).hexdigest() if f.is_file() else "" for f in found}

    before = state()
    result = lastcall("plan", study, "--workers", 2, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert state() == before
    for words in ("what is measured", "what it costs, about", "-core CPU, shared by 2 workers", "3 planned"):
        assert words in result.stdout
    facts = last(result)
    assert facts["command"] == "plan"
    assert facts["checkpoints"][0]["splits"][2] == {
        "split": "test", "books": 4, "blocks": 8, "scored": 280, "tokens": 320
    }  # fmt: skip
    assert facts["checkpoints"][0]["measuring_seconds"] > 0


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    refused(lastcall("plan", "dmo"), "did you mean demo")
    study = write_study(tmp_path, {"llama": "llama"}, blocks={"horizon": 512})
    refused(lastcall("plan", study), "too short for blocks of 513 tokens")


@pytest.mark.demo_model
def test_the_demonstration() -> None:
    found = plan(read_study("demo"), rate=1.0)
    assert counts(found) == [
        (14, 28, 13_860, 14_336),
        (6, 12, 5_940, 6_144),
        (20, 40, 19_800, 20_480),
    ]
    one = found.checkpoints[0]
    assert one.parameters == 134_515_008
    assert one.known_from == "the GGUF file"
    assert one.disk_bytes == 80 * 512 * (88 + 2 * 576 * 4) + 19_800 * 32 * 6
    assert found.comparisons["planned"] == 3


@pytest.mark.gpu
def test_on_a_gpu_it_says_whether_it_fits() -> None:
    found = plan(hub_study("random:smollm3-3b")).checkpoints[0]
    assert found.device_bytes == torch.cuda.get_device_properties(0).total_memory
    assert found.fits
    assert found.measuring_seconds is not None


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(None, "unknown"), (59, "under 1 min"), (60, "1 min"), (5399, "90 min"), (5400, "1.5 h")],
)
def test_durations(seconds: float | None, words: str) -> None:
    assert duration(seconds) == words


def test_the_longer_blocks_are_planned_too(tmp_path: Path) -> None:
    """One a test book at most; the rest of the plan, but for time, disk and memory, is as without them."""
    plain = plan(read_study(write_study(tmp_path, {"llama": "llama"}))).checkpoints[0]
    longer = plan(
        read_study(write_study(tmp_path, {"llama": "llama"}, analyses={"horizon": 80}))
    ).checkpoints[0]
    assert longer.splits[:3] == plain.splits
    found = longer.splits[3]
    assert (found.split, found.books, found.blocks, found.scored, found.tokens) == (
        "horizon",
        4,
        4,
        4 * 75,
        4 * 80,
    )
    assert longer.disk_bytes > plain.disk_bytes
    with pytest.raises(ModelError, match="its context is shorter than a block: got 128 positions where 200"):
        plan(read_study(write_study(tmp_path, {"llama": "llama"}, analyses={"horizon": 200})))
