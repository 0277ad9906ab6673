"""Which keys the kernels choose as near: the best that a row may see, each once, in order, in a list and as bits."""

from __future__ import annotations

import pytest
import torch

from clusterattn.ops._jit import HAVE_TRITON, INTERPRETING

pytestmark = pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16


def chosen(
    c: torch.Tensor, k: torch.Tensor, keep: torch.Tensor | None, top: int, scale: float, per: int, first: int, step: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """near_at, the scores in fp64 with -inf for what is not seen, and the largest error that they may have. The bits
    are those of the list."""
    from clusterattn.ops.coarse.arrange import Arranged
    from clusterattn.ops.coarse.near import select
    from clusterattn.ops.coarse.reference import Reach

    reach = Reach(scale=scale, top=top, tangent=False, per=per, first=first, step=step)
    near_at, bits, _ = select(c, Arranged(k, k, keep), reach, top)
    (b, h, rows, _), (hk, m) = c.shape, k.shape[1:3]
    scores = (c.double() @ k.repeat_interleave(h // hk, 1).double().mT) * scale
    room = 4 * torch.finfo(c.dtype if c.dtype == torch.float32 else torch.bfloat16).eps * scores.abs().amax()
    if keep is not None:
        scores.masked_fill_(~keep[:, None, None], float("-inf"))
    if per:
        limit = (first + torch.arange(rows, device=c.device) // per * step).clamp(0, m)
        scores.masked_fill_(torch.arange(m, device=c.device) >= limit[:, None], float("-inf"))
    near_at = near_at.view(b, h, rows, top)
    marked = torch.zeros(b, h, rows, m + 1, dtype=torch.bool, device=c.device).scatter(3, near_at % (m + 1), True)
    at = torch.arange(m, device=c.device)
    words = bits.view(b, h, -1, rows).mT[..., at // 32]
    assert torch.equal((words >> (at % 32)) & 1 != 0, marked[..., :m])
    return near_at, scores, room


def holds(near_at: torch.Tensor, scores: torch.Tensor, room: torch.Tensor) -> None:
    top, m = near_at.shape[-1], scores.shape[-1]
    found = (near_at >= 0).sum(-1)
    assert torch.equal(found, (scores > float("-inf")).sum(-1).clamp(max=top))  # as many as there are
    behind = torch.where(near_at < 0, m, near_at)
    assert (behind.diff(dim=-1)[near_at[..., 1:] >= 0] > 0).all()  # each once, in order, then -1
    assert torch.equal(behind, behind.sort(-1).values)
    mine = torch.zeros(*scores.shape[:-1], m + 1, dtype=torch.bool, device=scores.device).scatter(-1, behind, True)
    worst = scores.masked_fill(~mine[..., :m], float("inf")).amin(-1)
    assert (worst > float("-inf")).all()  # all are seen
    assert (worst >= scores.masked_fill(mine[..., :m], float("-inf")).amax(-1) - room).all()


# m, top: all keys looked at, the groups, the spans of 32 and of 64; whole tiles or not, several programs of keys
SIZES = [(7, 3), (63, 63), (64, 16), (257, 20), (300, 8), (640, 9), (1027, 40), (1500, 1)]


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["fp32", "half"])
@pytest.mark.parametrize(("m", "top"), SIZES)
def test_masked_keys_of_grouped_heads(m: int, top: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(m)
    c = torch.randn(2, 2, 5, 20, generator=draw).to(DEVICE, dtype)
    k = torch.randn(2, m, 1, 20, generator=draw).to(DEVICE, dtype).transpose(1, 2)  # a view: (b n h d)
    keep = torch.rand(2, m, generator=draw).to(DEVICE) < 0.7
    holds(*chosen(c, k, keep, top, -0.3, 0, 0, 0))


@pytest.mark.parametrize("seen", [0, 1, 7])
@pytest.mark.parametrize(("m", "top"), [(40, 33), (300, 24), (1027, 20)])
def test_rows_that_see_fewer_keys_than_they_want(m: int, top: int, seen: int) -> None:
    draw = torch.Generator().manual_seed(seen)
    c, k = (torch.randn(1, 1, n, 16, generator=draw).to(DEVICE, HALF) for n in (3, m))
    there = torch.randperm(m, generator=draw)[:seen].sort().values.to(DEVICE)
    keep = torch.zeros(1, m, dtype=torch.bool, device=DEVICE)
    keep[0, there] = True
    near_at, *_ = chosen(c, k, keep, top, 1.0, 0, 0, 0)
    assert torch.equal(near_at[..., :seen], there.expand(1, 1, 3, seen))
    assert (near_at[..., seen:] == -1).all()


@pytest.mark.parametrize(("m", "top", "first", "step"), [(300, 20, 1, 16), (700, 6, -32, 150), (1030, 17, 100, 250)])
def test_prefixes(m: int, top: int, first: int, step: int) -> None:
    """Rows see keys up to limits of their own, and the first of them none."""
    draw = torch.Generator().manual_seed(step)
    c, k = (torch.randn(1, 1, n, 16, generator=draw).to(DEVICE, HALF) for n in (12, m))
    keep = torch.rand(1, m, generator=draw).to(DEVICE) < 0.9
    holds(*chosen(c, k, None, top, 0.25, 2, first, step))
    holds(*chosen(c, k, keep, top, 0.25, 2, first, step))


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["fp32", "half"])
@pytest.mark.parametrize(("m", "top"), [(50, 40), (260, 24), (1100, 9)])
def test_of_equal_keys_as_many_as_wanted(m: int, top: int, dtype: torch.dtype) -> None:
    """All keys the same: the first are taken. A few kinds of them, both zeros among the scores: the best, any of the
    equal ones."""
    draw = torch.Generator().manual_seed(m)
    c = torch.tensor([1.0, -1.0, 0.0, 2.0])[:, None].repeat(1, 1, 1, 16).to(DEVICE, dtype)
    near_at, *_ = chosen(c, torch.ones(1, 1, m, 16, device=DEVICE, dtype=dtype), None, top, 1.0, 0, 0, 0)
    assert torch.equal(near_at, torch.arange(top, device=DEVICE).expand(1, 1, 4, top))
    kinds = torch.randint(-2, 3, (1, 1, m, 1), generator=draw).repeat(1, 1, 1, 16).to(DEVICE, dtype)
    holds(*chosen(c, kinds, None, top, 1.0, 0, 0, 0))


def test_scores_out_of_range_are_chosen_all_the_same() -> None:
    """Below what fp16 holds, where a row sees nothing else."""
    c = torch.full((1, 1, 1, 16), 100.0, device=DEVICE, dtype=HALF)
    k = torch.full((1, 1, 300, 16), -90.0, device=DEVICE, dtype=HALF)
    near_at, *_ = chosen(c, k, None, 12, 1.0, 0, 0, 0)
    assert torch.equal(near_at[0, 0, 0], torch.arange(12, device=DEVICE))


@pytest.mark.skipif(INTERPRETING, reason="too long for an interpreter")
@pytest.mark.parametrize(("m", "top"), [(4096, 2048), (40_000, 1024), (40_000, 2500), (131_072, 32), (1 << 20, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["fp32", "half"])
def test_many_keys(m: int, top: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(top)
    c, k = (torch.randn(1, 1, n, 64, generator=draw).to(DEVICE, dtype) for n in (70, m))
    holds(*chosen(c, k, None, top, 0.125, 0, 0, 0))
