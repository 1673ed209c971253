"""The Triton scoring pass against its slow twin, the tiles of `scoring`, on a CUDA device."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from lastcall.measure import scoring
from lastcall.measure.anatomy import Head

NAMES = ("loss_full", "loss_bypass", "entropy", "top_logprob", "margin", "kl")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocabulary", [2, 331, 4096, 50_257, 131_073])
@pytest.mark.parametrize("softcap", [None, 20.0])
def test_every_figure_is_that_of_the_tiles(
    dtype: torch.dtype, vocabulary: int, softcap: float | None
) -> None:
    generator = torch.Generator("cuda").manual_seed(vocabulary)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").to(dtype)

    head = Head(normal(vocabulary, 64) / 2, normal(vocabulary), softcap)
    full, bypass, local = normal(3, 67, 64)
    targets = torch.randint(vocabulary, (67,), generator=generator, device="cuda")
    fast = scoring._score_rows_fused(head, full, bypass, {5: local}, targets)
    slow = scoring._score_rows(head, full, bypass, {5: local}, targets)
    near = 2e-5 if dtype == torch.float32 else 1e-3  # a product of another shape may round a logit otherwise
    for name in NAMES:
        torch.testing.assert_close(getattr(fast, name), getattr(slow, name), rtol=near, atol=near)
    torch.testing.assert_close(fast.loss_local[5], slow.loss_local[5], rtol=near, atol=near)
    assert scoring.is_fused(full.device)
    whole = scoring.score(head, full, bypass, {}, targets)
    assert all(torch.equal(getattr(whole, n), getattr(fast, n)) for n in NAMES)


@pytest.mark.gpu
def test_ties_and_extremes() -> None:
    weight = torch.tensor([[1.0], [1.0], [-60.0], [0.5]], device="cuda")
    state = torch.tensor([[1.0], [-1.0], [40.0]], device="cuda")
    targets = torch.tensor([0, 2, 3], device="cuda")
    fast = scoring._score_rows_fused(Head(weight, None), state, state, {}, targets)
    slow = scoring._score_rows(Head(weight, None), state, state, {}, targets)
    assert fast.margin[0] == 0
    for field in dataclasses.fields(fast):
        if field.name != "loss_local":
            torch.testing.assert_close(getattr(fast, field.name), getattr(slow, field.name))
    assert (fast.kl == 0).all()
