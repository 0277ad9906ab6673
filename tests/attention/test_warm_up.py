"""warm_up makes the calls it was asked for, and leaves nothing behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import clusterattn as ca
from clusterattn import _warm_up


def test_calls_of_the_kind_that_is_coming(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Any, ...]] = []

    def noted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        mask = options.pop("key_mask")
        made.append((tuple(q.shape), tuple(k.shape), tuple(v.shape), q.dtype, q.requires_grad, mask is not None))
        out: torch.Tensor = ca.attention(q, k, v, key_mask=mask, **options)
        return out

    monkeypatch.setattr(_warm_up, "attention", noted)
    before = torch.get_rng_state()
    taken = ca.warm_up(
        (40, 64), method="refined:clusters=4,top=2,steps=2", heads=4, key_heads=2, dim=16, value_dim=8, keys=50,
        dtype=torch.float32, device="cpu", masked=True,
    )  # fmt: skip
    assert list(taken) == [40, 64]
    assert all(seconds > 0 for seconds in taken.values())
    assert set(made) == {((1, 4, n, 16), (1, 2, 50, 16), (1, 2, 50, 8), torch.float32, True, True) for n in (40, 64)}
    assert torch.equal(torch.get_rng_state(), before)
    made.clear()
    ca.warm_up(40, method="exact", device="cpu", dtype=torch.float32, backward=False, causal=True)
    assert {each[4:] for each in made} == {(False, False)}


def test_bad_words_are_refused() -> None:
    with pytest.raises(ValueError, match="lengths"):
        ca.warm_up(0, device="cpu")
    with pytest.raises(ValueError, match="a method"):
        ca.warm_up(8, method="refind", device="cpu")
