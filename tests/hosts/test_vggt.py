"""VGGT: a small model of the same make (vggt itself is on no package index), and vggt where it is installed."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import clusterattn as ca
from clusterattn import _report

V = ca.hosts.vggt
DIM, HEADS, FRAMES, TOKENS = 32, 4, 6, 20
METHOD = "refined:clusters=16,top=8"


class Rope(nn.Module):
    """Turns pairs of features by a token's place."""

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        angle = at[:, None, :, :1].to(x.dtype) * torch.arange(1, x.shape[-1] // 2 + 1) / 10
        one, two = x.chunk(2, -1)
        return torch.cat([one * angle.cos() - two * angle.sin(), one * angle.sin() + two * angle.cos()], -1)


class Attention(nn.Module):
    def __init__(self, rope: nn.Module | None, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.head_dim = HEADS, DIM // HEADS
        self.scale = self.head_dim**-0.5
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.q_norm, self.k_norm = nn.LayerNorm(self.head_dim), nn.LayerNorm(self.head_dim)
        self.attn_drop, self.proj_drop = nn.Dropout(dropout), nn.Dropout(0.0)
        self.rope = rope

    def forward(self, x: Tensor, pos: Tensor | None = None) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.rope is not None:
            q, k = self.rope(q, pos), self.rope(k, pos)
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=self.attn_drop.p if self.training else 0.0)
        return self.proj_drop(self.proj(out.transpose(1, 2).reshape(b, n, DIM)))


class Block(nn.Module):
    def __init__(self, rope: nn.Module | None, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(DIM), Attention(rope, dropout)

    def forward(self, x: Tensor, pos: Tensor | None = None) -> Tensor:
        return x + self.attn(self.norm1(x), pos=pos)


class Aggregator(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        rope = Rope()
        self.frame_blocks = nn.ModuleList(Block(rope, dropout) for _ in range(2))
        self.global_blocks = nn.ModuleList(Block(rope, dropout) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(TOKENS)[None, :, None]
        for inside, across in zip(self.frame_blocks, self.global_blocks, strict=True):
            x = inside(x, at.expand(FRAMES, -1, -1))
            x = across(x.view(1, -1, DIM), at.repeat(1, FRAMES, 1)).view(FRAMES, TOKENS, DIM)
        return x


class Model(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.aggregator = Aggregator(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.aggregator(x)


def model(**options: Any) -> Model:
    torch.manual_seed(0)
    return Model(**options).eval()


def frames() -> Tensor:
    torch.manual_seed(1)
    return 3 * torch.randn(FRAMES, TOKENS, DIM)


NAMES = ["aggregator.global_blocks.0.attn", "aggregator.global_blocks.1.attn"]


@pytest.fixture(autouse=True)
def fresh_log(caplog: pytest.LogCaptureFixture) -> None:
    _report._logged.cache_clear()
    caplog.set_level(logging.INFO, logger="clusterattn")


def test_global_blocks_are_served_and_frames_stay_exact() -> None:
    made = model()
    before, weights = made(frames()), made.state_dict()
    report = V.swap(made, METHOD, exact_below=64)
    assert report.swapped == NAMES
    assert "2 of 2 attention layers swapped; exact below 64 tokens" in str(report)
    after = made(frames())
    assert 1e-4 < (after - before).norm() / before.norm() < 0.3
    assert [(row.method, row.reason, row.calls) for row in report.served.rows] == [(METHOD, "", 2)]
    assert made.state_dict().keys() == weights.keys()
    assert sum(x.numel() for x in made.parameters()) == sum(x.numel() for x in model().parameters())
    assert type(made.aggregator.frame_blocks[0].attn) is Attention
    assert isinstance(made.aggregator.global_blocks[0].attn, Attention)
    assert torch.equal(copy.deepcopy(made)(frames()), after)
    assert torch.allclose(torch.compile(made, fullgraph=True, backend="aot_eager")(frames()), after, atol=1e-5)
    V.restore(made)
    assert torch.equal(made(frames()), before)
    assert type(made.aggregator.global_blocks[0].attn) is Attention


@pytest.mark.parametrize("method", ["exact", "refined:clusters=128,top=128"])
def test_rope_norms_and_scale_are_the_models(method: str) -> None:
    made = model()
    before = made(frames())
    V.swap(made, method, exact_below=0)
    assert torch.allclose(made(frames()), before, atol=1e-5)


def test_few_tokens_are_exact_to_the_bit() -> None:
    made = model()
    before = made(frames())
    report = V.swap(made, METHOD)
    assert torch.equal(made(frames()), before)
    assert [row.reason for row in report.served.rows] == ["shorter than 4096 tokens"]


def test_a_plan_by_block_and_head_travels_in_a_folder(tmp_path: Path) -> None:
    made = model()
    plan = ca.Plan({NAMES[1]: ["exact", METHOD, METHOD, "exact"]}, 64, host="vggt", kind="self", length=120)
    report = V.swap(made, plan)
    assert report.swapped == NAMES[1:]
    assert report.rows[0].reason == "the plan does not name it"
    planned = made(frames())
    plan.save(tmp_path)
    read = model()
    V.swap(read, ca.Plan.load(tmp_path))
    assert torch.equal(read(frames()), planned)
    with pytest.raises(ValueError, match="wanted a method for each of 4 heads"):
        V.swap(made, ca.Plan({NAMES[0]: [METHOD]}))
    assert V.swap(made, ca.Plan({NAMES[0]: METHOD}, kind="cross")).swapped == []


def test_blocks_of_kin_are_named_by_the_caller() -> None:
    torch.manual_seed(0)
    kin = nn.Module()
    kin.decoder = nn.ModuleList(Block(None) for _ in range(4))
    report = V.swap(kin, METHOD, exact_below=0, blocks=kin.decoder[1::2])
    assert report.swapped == ["decoder.1.attn", "decoder.3.attn"]
    x = torch.randn(1, 90, DIM)
    assert kin.decoder[1](x).shape == x.shape
    assert report.served.swapped == 1
    assert V.swap(kin, "improved", exact_below=0, blocks=kin.decoder[1::2]).swapped == report.swapped, "again"


def test_what_cannot_be_honoured_is_the_models_own_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    made = model(dropout=0.5).train()
    report = V.swap(made, METHOD, exact_below=0)
    made(frames())
    made(frames())
    reason = "attention dropout needs the weights: set it to 0, or call eval()"
    assert [(row.reason, row.calls) for row in report.served.rows] == [(reason, 4)]
    assert [record.getMessage() for record in caplog.records] == [f"{name} stays exact: {reason}" for name in NAMES]


def test_another_make_of_attention_is_left_alone() -> None:
    made = model()
    made.aggregator.global_blocks[0].attn.gate = nn.Linear(DIM, DIM)
    made.aggregator.global_blocks[1].attn = nn.Identity()
    report = V.swap(made, METHOD)
    assert [row.reason for row in report.rows] == ["it does more than attend: gate", "it has no qkv"]
    with pytest.raises(ValueError, match="wanted a model with global_blocks"):
        V.swap(nn.Linear(2, 2), METHOD)
    with pytest.raises(TypeError, match="wanted a model"):
        V.swap("vggt", METHOD)  # type: ignore[arg-type]


def test_gradients_reach_the_weights() -> None:
    made = model()
    V.swap(made, METHOD, exact_below=0)
    made(frames()).square().sum().backward()
    assert all(weight.grad is not None for weight in made.parameters())


def test_the_real_one() -> None:
    aggregator = pytest.importorskip("vggt.models.aggregator", reason="needs vggt, which is on no package index")
    torch.manual_seed(0)
    made = aggregator.Aggregator(img_size=140, patch_size=14, embed_dim=256, depth=4, num_heads=4, patch_embed="conv")
    images = torch.rand(1, 3, 3, 140, 140)
    with torch.no_grad():
        before = made.eval()(images)[0][-1]
        report = V.swap(made, METHOD, exact_below=64)
        after = made(images)[0][-1]
    assert len(report.swapped) == report.served.swapped == 4
    assert 0 < (after - before).norm() < 0.5 * before.norm()
