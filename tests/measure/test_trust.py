"""Pickles are not read, and code that comes with a checkpoint does not run, unless the checkpoint says so."""

from __future__ import annotations

import fnmatch
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lastcall.measure.location as location
from lastcall.errors import ModelError, UnknownArchitectureError
from lastcall.measure.equivalence import stock_loss
from lastcall.measure.loading import load, load_tokenizer
from tests.tiny import build, checkpoint, token_blocks, with_tokenizer

TOKENS = token_blocks(1)
NEEDS_CODE = (
    "got a checkpoint that needs the code it comes with, which can do whatever you can; "
    "read that code and, if you trust it, set trust_remote_code (--trust-remote-code)"
)
OWN = """
from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

Path(MARKER).write_text("ran")


class OwnConfig(LlamaConfig):
    model_type = "own_llama"


class OwnForCausalLM(LlamaForCausalLM):
    pass


class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""
"""Code that comes with a checkpoint, and leaves a mark where it runs."""


@pytest.fixture
def copy(tiny_folder: Callable[[str], Path], tmp_path: Path) -> Path:
    """A tiny Llama to change."""
    return Path(shutil.copytree(tiny_folder("llama"), tmp_path / "copy"))


@pytest.fixture
def pickled(copy: Path) -> Path:
    """A tiny Llama whose weights are pickled, as PyTorch saves them."""
    (copy / "model.safetensors").unlink()
    torch.save(build("llama").state_dict(), copy / "pytorch_model.bin")
    return copy


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the code leaves its mark; transformers keeps its copies of code in a folder of the test's own."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path / "marker"


def bring_code(folder: Path, marker: Path, file: str = "config.json", **auto_map: Any) -> Path:
    """Put code beside a checkpoint, and name its classes in `file`."""
    (folder / "own.py").write_text(f"MARKER = {str(marker)!r}\n{OWN}", "utf-8")
    said = json.loads((folder / file).read_text("utf-8"))
    (folder / file).write_text(json.dumps({**said, "auto_map": auto_map}), "utf-8")
    return folder


def refusal(model: Path | str, kind: type[ModelError] = ModelError, **values: Any) -> str:
    """The one line `load` refuses the checkpoint with."""
    with pytest.raises(kind) as caught:
        load(checkpoint("tiny", model, **values))
    assert caught.type is kind
    assert "\n" not in str(caught.value)
    return str(caught.value)


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


# --- pickles --------------------------------------------------------------------------------------------


def test_pickled_weights_are_refused_and_the_risk_and_the_key_named(pickled: Path) -> None:
    assert refusal(pickled) == (
        f"no safetensors weights in {pickled}: got pickled pytorch_model.bin; save the model with "
        "save_pretrained, which writes safetensors, or set pickle_may_run_code (--pickle-may-run-code) where "
        "you trust it: a pickle can run any code as you"
    )


def test_pickled_weights_are_read_where_the_checkpoint_allows_it(
    pickled: Path, tiny: Callable[..., Any]
) -> None:
    loaded = load(checkpoint("tiny", pickled, pickle_may_run_code=True))
    assert torch.equal(stock_loss(loaded.site, TOKENS), stock_loss(tiny("llama").site, TOKENS))
    assert loaded.facts["weights"] == "pickle"
    assert names(loaded.location.weight_files) == ["config.json", "pytorch_model.bin"]


def test_sharded_pickles_are_hashed_whole(pickled: Path) -> None:
    weights = torch.load(pickled / "pytorch_model.bin")
    (pickled / "pytorch_model.bin").unlink()
    shards = {f"pytorch_model-0000{i + 1}-of-00002.bin": list(weights)[i::2] for i in range(2)}
    for shard, keys in shards.items():
        torch.save({key: weights[key] for key in keys}, pickled / shard)
    index = {"metadata": {}, "weight_map": {key: shard for shard, keys in shards.items() for key in keys}}
    (pickled / "pytorch_model.bin.index.json").write_text(json.dumps(index), "utf-8")
    with_tokenizer(pickled)
    where = load(checkpoint("tiny", pickled, tokenizer=None, pickle_may_run_code=True)).location
    assert names(where.weight_files) == ["config.json", *shards, "pytorch_model.bin.index.json"]
    assert "pytorch_model.bin.index.json" not in names(where.tokenizer_files)


def test_a_pickle_beside_safetensors_is_ignored(copy: Path, tiny: Callable[..., Any]) -> None:
    (copy / "pytorch_model.bin").write_bytes(b"no pickle at all")
    for allowed in (False, True):
        loaded = load(checkpoint("tiny", copy, pickle_may_run_code=allowed))
        assert loaded.facts["weights"] == "safetensors"
        assert names(loaded.location.weight_files) == ["config.json", "model.safetensors"]
        assert torch.equal(stock_loss(loaded.site, TOKENS), stock_loss(tiny("llama").site, TOKENS))


def test_a_pickle_that_runs_code_is_refused_in_one_line(pickled: Path, marker: Path) -> None:
    class Runs:
        def __reduce__(self) -> Any:
            return Path.write_text, (marker, "ran")

    torch.save({"model.norm.weight": Runs()}, pickled / "pytorch_model.bin")
    assert refusal(pickled).startswith("no safetensors weights in")
    line = refusal(pickled, pickle_may_run_code=True)  # torch unpickles tensors only, as far as it can tell
    assert line.startswith(f"cannot load tiny from {pickled}: got ")
    assert not marker.exists()


@pytest.mark.parametrize("name", ["model.pt", "consolidated.00.pth", "model.ckpt"])
def test_a_pickle_that_cannot_be_read_here_names_no_key(name: str, pickled: Path) -> None:
    (pickled / "pytorch_model.bin").rename(pickled / name)
    for allowed in (False, True):
        assert refusal(pickled, pickle_may_run_code=allowed) == (
            f"no safetensors weights in {pickled}: got pickled {name}; "
            "save the model with save_pretrained, which writes safetensors"
        )


# --- code -----------------------------------------------------------------------------------------------


def test_code_of_a_known_architecture_is_ignored_unless_trusted(
    copy: Path, marker: Path, tiny: Callable[..., Any]
) -> None:
    bring_code(copy, marker, AutoModelForCausalLM="own.OwnForCausalLM")
    ignored = load(checkpoint("tiny", copy))
    assert not marker.exists()
    assert ignored.facts["code"] == "transformers"
    assert names(ignored.location.weight_files) == ["config.json", "model.safetensors"]
    trusted = load(checkpoint("tiny", copy, trust_remote_code=True))
    assert marker.read_text() == "ran"
    assert type(trusted.site.model).__name__ == "OwnForCausalLM"
    assert trusted.facts["code"] == "the checkpoint's own"
    assert trusted.facts["kernels"] == "not known: the checkpoint's own code"
    assert names(trusted.location.weight_files) == ["config.json", "model.safetensors", "own.py"]
    want = stock_loss(tiny("llama").site, TOKENS)
    assert all(torch.equal(stock_loss(one.site, TOKENS), want) for one in (ignored, trusted))


def test_a_checkpoint_that_needs_its_code_is_refused_and_the_key_named(copy: Path, marker: Path) -> None:
    bring_code(copy, marker, AutoConfig="own.OwnConfig", AutoModelForCausalLM="own.OwnForCausalLM")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "model_type": "own_llama"}))
    assert refusal(copy) == f"cannot read {copy}/config.json: {NEEDS_CODE}"
    assert not marker.exists()
    line = refusal(copy, UnknownArchitectureError, trust_remote_code=True)  # it ran, and is in no row
    assert line.startswith('this architecture is not in the table: got model_type "own_llama"; ')
    assert marker.exists()


def test_a_tokenizers_code_runs_only_where_it_is_trusted(copy: Path, marker: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    bring_code(
        with_tokenizer(other), marker, "tokenizer_config.json", AutoTokenizer=[None, "own.OwnTokenizer"]
    )
    said = checkpoint("tiny", copy, tokenizer=str(other))
    ids = load_tokenizer(said).tokenize(["w3 w1"])
    assert not marker.exists()
    assert "own.py" not in names(location.find(said).tokenizer_files)
    trusting = said.model_copy(update={"trust_remote_code": True})
    assert load_tokenizer(trusting).tokenize(["w3 w1"]) == ids == [[3, 1]]
    assert marker.exists()
    assert "own.py" in names(location.find(trusting).tokenizer_files)


@pytest.mark.parametrize("reference", ["someone/else--own.OwnForCausalLM", "inside/own.OwnForCausalLM"])
def test_trusted_code_that_cannot_be_hashed_is_refused(reference: str, copy: Path, marker: Path) -> None:
    bring_code(copy, marker, AutoModelForCausalLM=reference)
    assert refusal(copy, trust_remote_code=True) == (
        f"the code of tiny does not lie beside its config.json: got {reference}; "
        "copy it there and name it so, that it can be hashed"
    )
    load(checkpoint("tiny", copy))
    assert not marker.exists()


# --- the command line and the hub -----------------------------------------------------------------------


def test_the_command_line_has_a_flag_for_each(pickled: Path, marker: Path, tmp_path: Path) -> None:
    bring_code(
        with_tokenizer(pickled), marker, "tokenizer_config.json", AutoTokenizer=[None, "own.OwnTokenizer"]
    )
    books = tmp_path / "books"
    books.mkdir()
    (books / "a.txt").write_text("w1 " * 2_000)
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")}

    def lastcall(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "lastcall", *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)

    refused = lastcall("check", str(pickled), "--device", "cpu")
    assert refused.returncode == 2
    assert "a pickle can run any code as you" in refused.stderr
    checked = lastcall("check", str(pickled), "--device", "cpu", "--pickle-may-run-code")
    assert checked.returncode == 0, checked.stderr
    assert "weights: pickle" in checked.stdout
    told = lastcall("books", str(books), "--model", str(pickled), "--pickle-may-run-code")
    assert not marker.exists()
    asked = ["books", str(books), "--model", str(pickled), "--pickle-may-run-code", "--trust-remote-code"]
    trusted = lastcall(*asked)
    assert marker.exists()
    assert told.returncode == trusted.returncode
    assert told.stdout == trusted.stdout


@pytest.fixture
def hub(pickled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository on a hub whose client copies, as the real one does, the files that patterns allow."""

    def snapshot_download(repository: str, *, allow_patterns: list[str], **_: Any) -> str:
        cache = tmp_path / "cache"
        cache.mkdir(exist_ok=True)
        for file in pickled.iterdir():
            if any(fnmatch.fnmatch(file.name, pattern) for pattern in allow_patterns):
                shutil.copy(file, cache)
        return str(cache)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    (pickled / "own.py").write_text("raise RuntimeError")
    return pickled


def test_of_a_hub_repository_only_what_may_be_used_is_fetched(hub: Path, tmp_path: Path) -> None:
    said, cache = checkpoint("tiny", "some/model"), tmp_path / "cache"
    with pytest.raises(ModelError, match=r"got none, or pickles only; .* set pickle_may_run_code"):
        location.find(said)
    assert not {"pytorch_model.bin", "own.py"} & set(os.listdir(cache))
    where = location.find(said.model_copy(update={"pickle_may_run_code": True, "trust_remote_code": True}))
    assert names(where.weight_files) == ["config.json", "own.py", "pytorch_model.bin"]


def test_of_a_hub_repository_pickles_are_not_fetched_where_there_are_safetensors(
    hub: Path, tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copy(tiny_folder("llama") / "model.safetensors", hub)
    where = location.find(checkpoint("tiny", "some/model", pickle_may_run_code=True))
    assert names(where.weight_files) == ["config.json", "model.safetensors"]
    assert "pytorch_model.bin" not in os.listdir(tmp_path / "cache")
