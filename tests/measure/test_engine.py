"""Measuring a batch, refusing it, writing it and knowing that it is done."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from lastcall.errors import ModelError, NonFiniteError, OutputError
from lastcall.measure import scoring
from lastcall.measure.engine import Measured, batches, check_fits, is_done, measure_batch, write
from lastcall.measure.loading import Loaded, load
from lastcall.records import RunFolder, measured_columns, read_tables
from tests.reference import measure as twin
from tests.tiny import BOS, HORIZON, TINY, VOCABULARY, book, checkpoint, study, token_blocks, with_tokenizer

Tiny = Callable[..., Loaded]
Folder = Callable[[str], Path]


@pytest.fixture
def worded(tiny_folder: Folder, tmp_path: Path) -> Path:
    """A tiny Llama with a tokenizer."""
    return with_tokenizer(Path(shutil.copytree(tiny_folder("llama"), tmp_path / "worded")))


def as_read(measured: Measured, column: str) -> torch.Tensor:
    return torch.as_tensor(np.asarray(measured.columns[column])).view(-1, HORIZON)


# --- what is measured -----------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("name", TINY)
def test_every_column_is_the_twins(
    name: str, backend: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "_TILES", {"cpu": (37, 101)})
    loaded, windows = tiny(name, backend), (3, 20)
    books = (book("a", token_blocks(2)), book("b", token_blocks(1, seed=1)))
    found = measure_batch(loaded, study(windows=windows), books)
    assert [one.book for one in found] == ["a", "b"]
    for one, source in zip(found, books, strict=True):
        for i, block in enumerate(torch.from_numpy(source.tokens).long()):
            want = twin.measure(loaded.site.model, block, windows)
            for states in ("states", "incoming_states"):
                mine = one.states["bypass" if states == "states" else "incoming"][i].double()
                torch.testing.assert_close(mine, want.pop(states), atol=2e-5, rtol=1e-5)
            assert want.keys() <= one.columns.keys()
            assert len(want) == 14 + len(windows)
            for column, value in want.items():
                got = as_read(one, column)[i].double()
                torch.testing.assert_close(got, value, atol=2e-5, rtol=1e-5, msg=f"{column} of {one.book}")


def test_identity_columns_say_which_prediction_a_row_is(tiny: Tiny) -> None:
    tokens, plan = token_blocks(2), study(context=5)
    source = book("a", tokens)
    found = measure_batch(tiny("llama"), plan, (source,))[0]
    assert set(found.columns) == {column.name for column in measured_columns((3,))}
    assert found.columns["book"] == ["a"] * 2 * HORIZON
    for i in range(2):
        assert as_read(found, "block")[i].tolist() == [i] * HORIZON
        assert as_read(found, "start")[i].tolist() == [source.starts[i]] * HORIZON
        assert as_read(found, "position")[i].tolist() == list(range(HORIZON))
        assert as_read(found, "token")[i].tolist() == tokens[i, :-1].tolist()
        assert as_read(found, "target")[i].tolist() == tokens[i, 1:].tolist()
        assert as_read(found, "scored")[i].tolist() == [t >= 5 for t in range(HORIZON)]


def test_a_book_measures_the_same_whatever_its_batch(tiny: Tiny) -> None:
    loaded, plan = tiny("smollm3"), study()
    books = tuple(book(str(seed), token_blocks(2, seed=seed)) for seed in range(3))
    together = measure_batch(loaded, plan, books)
    for one, source in zip(together, books, strict=True):
        alone = measure_batch(loaded, plan, (source,))[0]
        for column in ("loss_full", "loss_bypass", "loss_local3", "kl", "entropy", "curvature"):
            torch.testing.assert_close(as_read(one, column), as_read(alone, column), atol=2e-5, rtol=1e-5)


def test_sixteen_bits_store_sixteen_bit_states_and_float32_losses(tiny_folder: Folder) -> None:
    loaded = load(checkpoint("tiny", tiny_folder("smollm3"), dtype="bfloat16"))
    found = measure_batch(loaded, study(), (book("a", token_blocks()),))[0]
    assert {state.dtype for state in found.states.values()} == {torch.bfloat16}
    assert found.columns["loss_full"].dtype == np.float32
    exact = measure_batch(
        load(checkpoint("tiny", tiny_folder("smollm3"))), study(), (book("a", token_blocks()),)
    )[0]
    assert abs(found.columns["loss_full"] - exact.columns["loss_full"]).mean() < 0.1


def test_batches_are_runs_of_books_in_order() -> None:
    books = [book(str(i), token_blocks(1)) for i in range(7)]
    assert [[b.id for b in batch] for batch in batches(books, 3)] == [
        ["0", "1", "2"],
        ["3", "4", "5"],
        ["6"],
    ]
    assert batches([], 3) == []


# --- beginning of text ----------------------------------------------------------------------------------


def test_bos_is_one_more_context_token_and_t_does_not_shift(worded: Path) -> None:
    with_bos, without = (load(checkpoint("tiny", worded, tokenizer=None, bos=bos)) for bos in ("bos", "none"))
    assert (with_bos.tokenizer.bos, without.tokenizer.bos) == (BOS, None)
    tokens = token_blocks(2)
    found, bare = (measure_batch(each, study(), (book("a", tokens),))[0] for each in (with_bos, without))
    for i, block in enumerate(tokens):
        for one, bos in ((found, BOS), (bare, None)):
            want = twin.measure(with_bos.site.model, block, (3,), bos)
            for column in ("loss_full", "loss_bypass", "loss_local3", "kl", "entropy", "displacement"):
                torch.testing.assert_close(
                    as_read(one, column)[i].double(), want[column], atol=2e-5, rtol=1e-5
                )
    for column in ("position", "token", "target", "scored", "start"):
        assert torch.equal(as_read(found, column), as_read(bare, column))
    assert found.states["bypass"].shape == bare.states["bypass"].shape == (2, HORIZON, 64)
    assert not np.allclose(found.columns["loss_full"], bare.columns["loss_full"], atol=1e-3)
    assert (as_read(found, "displacement")[:, 0] == 0).all()


def test_the_tokenizers_own_special_tokens_are_never_added(worded: Path) -> None:
    for bos in ("bos", "none"):
        tokenize = load(checkpoint("tiny", worded, tokenizer=None, bos=bos)).tokenizer.tokenize
        assert tokenize(["w5 w7", "w1"]) == [[5, 7], [1]]


# --- refusals -------------------------------------------------------------------------------------------


def test_nan_weights_are_refused_by_book_block_and_position(tiny_folder: Folder) -> None:
    loaded = load(checkpoint("tiny", tiny_folder("llama")))
    tokens, clean = token_blocks(2) % 200, book("a", token_blocks(2, seed=1) % 200)
    tokens[1, 0] = 201
    loaded.site.model.model.embed_tokens.weight[201] = torch.nan
    with pytest.raises(NonFiniteError) as caught:
        measure_batch(loaded, study(), (clean, book("b", tokens)))
    assert str(caught.value) == (
        "tiny: loss_full is not finite in book b, block 1, position 0: got nan; "
        "try dtype float32 or leave the book out; the batch was not written"
    )
    assert len(measure_batch(loaded, study(), (clean,))) == 1


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_the_one_position_that_is_not_finite_is_named(bad: float, tiny_folder: Folder) -> None:
    loaded = load(checkpoint("tiny", tiny_folder("gemma3-sliding")))

    def spoil(_: object, __: object, output: torch.Tensor) -> torch.Tensor:
        output = output.clone()
        output[3, 17] = bad
        return output

    loaded.site.block.mlp.register_forward_hook(spoil)
    books = (book("a", token_blocks(2)), book("b", token_blocks(2)))
    with pytest.raises(NonFiniteError, match="is not finite in book b, block 1, position 17: got"):
        measure_batch(loaded, study(), books)


def test_an_overflow_is_refused_too(tiny_folder: Folder) -> None:
    loaded = load(checkpoint("tiny", tiny_folder("llama")))
    loaded.site.attention.o_proj.weight[:] = torch.inf
    with pytest.raises(NonFiniteError, match="loss_full is not finite in book a, block 0, position 0: got"):
        measure_batch(loaded, study(), (book("a", token_blocks()),))


def test_a_token_outside_the_vocabulary_is_refused(tiny: Tiny) -> None:
    tokens = token_blocks()
    tokens[1, HORIZON] = VOCABULARY
    with pytest.raises(ModelError) as caught:
        check_fits(tiny("llama"), (book("fine", token_blocks()), book("odd", tokens)))
    assert str(caught.value) == (
        "llama: book odd has a token outside the model's vocabulary: "
        "got id 331 where the vocabulary has 331; give the tokenizer that belongs to this checkpoint"
    )
    tokens[1, HORIZON] = VOCABULARY - 1
    check_fits(tiny("llama"), (book("odd", tokens),))


def test_a_context_shorter_than_a_block_is_refused(tiny: Tiny, worded: Path) -> None:
    just, over = token_blocks(1, 129), token_blocks(1, 130)
    check_fits(tiny("llama"), (book("a", just),))
    with pytest.raises(ModelError) as caught:
        check_fits(tiny("llama"), (book("a", over),))
    assert str(caught.value) == (
        "llama: its context is shorter than a block: got 128 positions where 129 are needed; "
        "choose a shorter blocks.horizon"
    )
    with pytest.raises(ModelError, match="got 128 positions where 129 are needed"):
        check_fits(load(checkpoint("tiny", worded, tokenizer=None, bos="bos")), (book("a", just),))


# --- files ----------------------------------------------------------------------------------------------


@pytest.fixture
def written(tiny: Tiny, tmp_path: Path) -> tuple[RunFolder, list[Measured]]:
    """A run folder with books a and b measured from sources A and B."""
    run, plan = RunFolder(tmp_path / "run"), study(windows=(3, 1))
    found = measure_batch(tiny("qwen3_5"), plan, (book("a", token_blocks()), book("b", token_blocks(1))))
    for one in found:
        write(run, plan, "tiny", "fit", one, one.book.upper())
    return run, found


def test_measured_files_round_trip(written: tuple[RunFolder, list[Measured]]) -> None:
    run, found = written
    for one in found:
        table = read_tables([run.measured("tiny", "fit", one.book)])
        assert table.column_names == [column.name for column in measured_columns((3, 1))]
        for name in table.column_names:
            assert table[name].to_pylist() == np.asarray(one.columns[name]).tolist(), name
        assert all(field.metadata[b"meaning"] for field in table.schema)
        states = safetensors.torch.load_file(run.states("tiny", "fit", one.book))
        assert states.keys() == {"bypass", "incoming"}
        assert all(torch.equal(states[kind], one.states[kind]) for kind in states)
    left = {path.name for path in run.root.rglob("*") if path.is_file()}
    assert left == {"a.parquet", "a.safetensors", "b.parquet", "b.safetensors"}


def test_a_batch_is_done_where_all_its_files_come_from_the_same_things(
    written: tuple[RunFolder, list[Measured]],
) -> None:
    run, _ = written
    both = (book("a", token_blocks()), book("b", token_blocks(1)))
    source = {"a": "A", "b": "B"}
    assert is_done(run, "tiny", "fit", both, source)
    assert not is_done(run, "tiny", "fit", both, {**source, "b": "other"})
    assert not is_done(run, "tiny", "test", both, source)
    assert not is_done(run, "other", "fit", both, source)
    run.states("tiny", "fit", "b").unlink()
    assert not is_done(run, "tiny", "fit", both, source)
    assert is_done(run, "tiny", "fit", both[:1], source)
    run.measured("tiny", "fit", "a").unlink()
    assert not is_done(run, "tiny", "fit", both[:1], source)


def test_a_torn_record_is_not_done(written: tuple[RunFolder, list[Measured]]) -> None:
    run, _ = written
    record = run.measured("tiny", "fit", "a")
    record.write_bytes(record.read_bytes()[:100])
    assert not is_done(run, "tiny", "fit", (book("a", token_blocks()),), {"a": "A"})


def test_a_disk_that_refuses_leaves_nothing_half_written(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, plan = RunFolder(tmp_path / "run"), study()
    one = measure_batch(tiny("llama"), plan, (book("a", token_blocks()),))[0]

    def full(path: Path, data: bytes) -> int:
        with path.open("wb") as handle:
            handle.write(data[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OutputError, match=r"a\.safetensors: got No space left on device; free some space"):
        write(run, plan, "tiny", "fit", one, "A")
    assert not [path for path in run.root.rglob("*") if path.is_file()]


def test_a_kill_between_states_and_record_leaves_no_record_of_other_states(
    written: tuple[RunFolder, list[Measured]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, found = written

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lastcall.measure.engine.write_table", killed)
    with pytest.raises(KeyboardInterrupt):
        write(run, study(windows=(3, 1)), "tiny", "fit", found[0], "other")
    assert not is_done(run, "tiny", "fit", (book("a", token_blocks()),), {"a": "A"})
