"""Hosts when nobody names a method: Refined where it is faster on this device, the host's attention elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clusterattn as ca
from clusterattn.methods import auto

FAST, SLOW = (0.0, 1e-9, 1e15), (0.0, 0.0, 1e6)  # seconds of a call, of a row; multiply-adds in a second
FASTER = "exact attention is faster here"


@pytest.fixture
def faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Let one of exact and refined be faster on this machine."""
    monkeypatch.setattr(auto, "_user_file", lambda: tmp_path / "crossings.json")
    monkeypatch.setattr(auto, "SHIPPED", tmp_path / "nothing.json")
    auto._entries.cache_clear()
    auto._predicted.cache_clear()

    def which(name: str) -> None:
        both = {each: FAST if each == name else SLOW for each in ("exact", "refined")}
        passes = dict.fromkeys(auto.PASSES, both)
        auto.keep([{"device": "cpu", "dtypes": ["float32"], "causal": False, "passes": passes, "source": "made up"}])

    yield which
    auto._entries.cache_clear()
    auto._predicted.cache_clear()


def reasons(served: Any) -> list[str]:
    return [row.reason or row.method for row in served.rows]


def test_tabpfn(faster: Callable[[str], None]) -> None:
    pytest.importorskip("tabpfn", reason="needs tabpfn")
    from tabpfn.architectures.shared.scaled_dot_product_attention import scaled_dot_product_attention

    q, k, v = torch.randn(3, 1, 300, 2, 32)
    plain = scaled_dot_product_attention(q, k, v)
    try:
        served = ca.hosts.tabpfn.register(min_rows=200)
        faster("refined")
        refined = ca.Refined().at(300, 300, 32, 32)
        ours = ca.attention(*(x.transpose(1, 2) for x in (q, k, v)), method=refined).transpose(1, 2)
        assert torch.equal(scaled_dot_product_attention(q, k, v), ours)
        assert reasons(served) == [str(refined)]
        served.clear()
        scaled_dot_product_attention(*(x[:, :199] for x in (q, k, v)))
        assert reasons(served) == ["fewer than 200 rows"], "however fast"
        served.clear()
        faster("exact")
        assert torch.equal(scaled_dot_product_attention(q, k, v), plain)
        assert reasons(served) == [FASTER]
    finally:
        ca.hosts.tabpfn.unregister()


def test_diffusers(faster: Callable[[str], None]) -> None:
    pytest.importorskip("diffusers", reason="needs diffusers")
    from tiny_diffusers import answer, wan, wan_inputs

    model, inputs = wan(), wan_inputs()
    plain = answer(model, inputs)
    report = ca.hosts.diffusers.swap(model, min_length=64)
    assert {row.method for row in report.rows if not row.reason} == {"auto"}
    faster("exact")
    assert torch.equal(answer(model, inputs), plain)
    assert FASTER in reasons(report.served)
    assert report.served.swapped == 0
    faster("refined")
    assert not torch.equal(answer(model, inputs), plain)
    refined = ca.Refined().at(512, 512, 24, 24)
    assert str(refined) in reasons(report.served)
    named = wan()
    ca.hosts.diffusers.swap(named, refined, min_length=64)
    assert torch.equal(answer(model, inputs), answer(named, inputs))
    for each in (model, named):  # the registry as it was
        ca.hosts.diffusers.restore(each)


def test_diffusers_chooses_under_ulysses_as_one_device_does(faster: Callable[[str], None]) -> None:
    """Its call has the heads of all ranks, and more rows repay more."""
    from clusterattn.hosts._dispatch import DiffusersBackend, DispatchOptions

    seen: list[int] = []

    class Watched(ca.Auto):
        def choose(self, device: Any, dtype: Any, rows: int, shape: Any) -> ca.Method:
            seen.append(rows)
            return ca.Exact()

    class Config:
        ulysses_degree, ring_degree, _ulysses_local_rank = 2, 1, 0

    q, k, v = torch.randn(3, 1, 100, 4, 8)
    backend = DiffusersBackend(Watched(), 0, 0, False, False, "clusterattn")
    for parallel in (None, Config()):
        backend.attend(q, k, v, DispatchOptions(None, 0.0, False, None, False), parallel)
    assert seen == [4, 8]


class Attention(nn.Module):
    """As vision transformers have it."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.scale = 2, 8**-0.5
        self.qkv, self.proj, self.proj_drop = nn.Linear(16, 48), nn.Linear(16, 16), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, 2, -1).permute(2, 0, 3, 1, 4)
        out = nn.functional.scaled_dot_product_attention(q, k, v)
        answer: Tensor = self.proj(out.transpose(1, 2).reshape(b, n, 16))
        return answer


def test_vggt(faster: Callable[[str], None]) -> None:
    torch.manual_seed(0)
    block = nn.Module()
    block.attn = Attention()
    model, x = nn.ModuleDict({"global_blocks": nn.ModuleList([block])}), torch.randn(2, 200, 16)
    plain = block.attn(x)
    report = ca.hosts.vggt.swap(model, exact_below=100)
    faster("exact")
    assert torch.equal(block.attn(x), plain)
    assert reasons(report.served) == [FASTER]
    report.served.clear()
    faster("refined")
    assert not torch.equal(block.attn(x), plain)
    assert reasons(report.served) == [str(ca.Refined().at(200, 200, 8, 8))]
