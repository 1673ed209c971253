"""Image-and-text checkpoints: their text decoder is measured, and nothing else of them is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from lastcall.measure.equivalence import check_all, full_is_stock, stock_loss
from lastcall.measure.loading import load
from tests.tiny import IMAGE_TEXT, build, build_image_text, checkpoint, token_blocks

TOKENS = token_blocks()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Path]]:
    """Name in `IMAGE_TEXT` -> the whole model and the folder it was saved in."""
    made: dict[str, tuple[Any, Path]] = {}

    def get(name: str) -> tuple[Any, Path]:
        if name not in made:
            folder = tmp_path_factory.mktemp("whole") / name
            model = build_image_text(name, build(name)).eval()
            model.save_pretrained(folder)
            made[name] = model, folder
        return made[name]

    return get


@pytest.mark.parametrize("name", IMAGE_TEXT)
def test_the_text_path_is_measured_as_the_text_model_alone(
    name: str, whole: Callable[[str], tuple[Any, Path]], tmp_path: Path
) -> None:
    model, folder = whole(name)
    build(name).save_pretrained(tmp_path / "text")
    alone = load(checkpoint("text", tmp_path / "text")).site
    loaded = load(checkpoint("whole", folder))
    assert full_is_stock(loaded.site, TOKENS, "float32").passed
    with torch.inference_mode():
        assert torch.equal(stock_loss(loaded.site, TOKENS), stock_loss(alone, TOKENS))
        logits = model(input_ids=TOKENS[:, :-1], use_cache=False).logits.flatten(0, 1)
    own = nn.functional.cross_entropy(logits.double(), TOKENS[:, 1:].flatten(), reduction="none")
    assert (own - stock_loss(loaded.site, TOKENS)).abs().max() < 1e-5
    assert loaded.facts["architecture"].startswith(type(alone.model).__name__)
    assert [path.name for path in loaded.location.weight_files] == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("name", IMAGE_TEXT)
def test_no_vision_tower_is_loaded(name: str, whole: Callable[[str], tuple[Any, Path]]) -> None:
    model, folder = whole(name)
    stored = safetensors.torch.load_file(folder / "model.safetensors")
    assert any("visual" in key or "vision" in key for key in stored)
    site = load(checkpoint("whole", folder)).site
    assert {n for n, _ in site.model.named_parameters()} == {n for n, _ in build(name).named_parameters()}
    assert sum(p.numel() for p in site.model.parameters()) < sum(p.numel() for p in model.parameters())


def test_every_check_passes_on_the_text_of_an_image_and_text_checkpoint(
    whole: Callable[[str], tuple[Any, Path]],
) -> None:
    site = load(checkpoint("whole", whole("qwen3_5")[1])).site
    assert [check.name for check in check_all(site, TOKENS, "float32") if not check.passed] == []


@pytest.mark.parametrize("outer", [True, False])
def test_a_head_tied_to_the_embedding_is_tied_wherever_the_configuration_says_so(
    outer: bool, tmp_path: Path
) -> None:
    text = build("qwen3_5")
    text.config.tie_word_embeddings = True
    text.lm_head.weight = text.model.embed_tokens.weight
    model = build_image_text("qwen3_5", text)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = {k: v for k, v in safetensors.torch.load_file(file).items() if k != "lm_head.weight"}
    safetensors.torch.save_file(weights, file, metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = True
    del (config["text_config"] if outer else config)["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = load(checkpoint("tied", tmp_path)).site
    assert loaded.head.weight is loaded.model.get_submodule("model.embed_tokens").weight
    assert torch.equal(loaded.head.weight, text.model.embed_tokens.weight)


def test_weights_under_older_names_are_found(
    whole: Callable[[str], tuple[Any, Path]], tmp_path: Path
) -> None:
    """Gemma 3 is published with `language_model.model.*`; newer saves may say `model.language_model.*`."""
    _, folder = whole("gemma3-full")
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    assert any(key.startswith("language_model.model.") for key in weights)
    renamed = {key.replace("language_model.model.", "model.language_model."): v for key, v in weights.items()}
    safetensors.torch.save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    old, new = (load(checkpoint("whole", where)).site for where in (folder, tmp_path))
    assert torch.equal(stock_loss(old, TOKENS), stock_loss(new, TOKENS))
