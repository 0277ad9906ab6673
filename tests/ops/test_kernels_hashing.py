"""The kernels of Smyrf and Reformer: draws, hashes, seats and the joins of rounds, against their references.

On a GPU for real, elsewhere interpreted (see test_kernels.py).
"""

from __future__ import annotations

import pytest
import torch

import clusterattn as ca
from clusterattn.ops import choose, draw
from clusterattn.ops._jit import HAVE_TRITON
from clusterattn.ops.bucketed import kernels as bucketed_kernels
from clusterattn.ops.bucketed import lists
from clusterattn.ops.draw import kernels as draw_kernels
from clusterattn.ops.hashing import kernels as hashing_kernels

pytestmark = pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
PLAIN, FAST = choose("reference"), choose("triton")


def tokens(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 5) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def some(b: int, n: int, padding: int) -> torch.Tensor | None:
    """The first sequence is padded in the middle; None without padding."""
    if not padding:
        return None
    keep = torch.ones(b, n, dtype=torch.bool, device=DEVICE)
    keep[0, n // 3 : n // 3 + padding] = False
    return keep


@pytest.mark.parametrize("seed", [0, 7, 123456789012345])
def test_normal_numbers_are_the_drawn_ones(seed: int) -> None:
    like, stream = tokens(1), draw.STREAM_ROUNDS
    plain = draw.normals(3, 50, seed, stream, like.cpu()).to(DEVICE)
    assert torch.equal(FAST.directions(3, 5, 10, seed, like), draw.normals(3, 50, seed, stream, like).view(3, 5, 10))
    for number, holder in ((seed, None), (0, torch.tensor(seed, device=DEVICE))):
        drawn = draw_kernels.normal(3, 50, number, stream, like.device, holder)
        assert torch.allclose(drawn, plain, rtol=1e-6, atol=1e-6)
        assert torch.equal(draw_kernels.normal(1, 20, number, stream, like.device, holder)[0], drawn[0, :20])


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["fp32", "half"])
@pytest.mark.parametrize("padding", [0, 11])
@pytest.mark.parametrize("lifted", [False, True])
def test_scores(lifted: bool, padding: int, dtype: torch.dtype) -> None:
    q = tokens(2, 70, 4, 20, dtype=dtype).transpose(1, 2)  # any strides; grouped heads; d no power of two
    k = tokens(2, 2, 83, 20, dtype=dtype, seed=6)
    drawn, masks = tokens(3, 22, seed=8), (some(2, 70, padding), some(2, 83, padding))
    found = FAST.scores(q, k, drawn, *masks, lifted=lifted)
    for fast, plain in zip(found, PLAIN.scores(q, k, drawn, *masks, lifted=lifted), strict=True):
        assert fast.shape == plain.shape
        assert fast.dtype == torch.float32
        assert torch.allclose(fast, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["fp32", "half"])
@pytest.mark.parametrize(("each", "rounds", "n"), [(1, 2, 37), (16, 3, 137), (21, 5, 37), (150, 2, 137), (300, 2, 37)])
def test_polytope_finds_the_nearest_direction(each: int, rounds: int, n: int, dtype: torch.dtype) -> None:
    """An equal hash, or a direction that is as near within the rounding of the inputs."""
    x, drawn = tokens(2, 2, n, 20, dtype=dtype), tokens(rounds, each, 20, seed=9)
    for buckets in (None, torch.tensor([[2 * each], [max(each, 1)]], device=DEVICE)):
        fast, plain = FAST.polytope(x, drawn, buckets).long(), PLAIN.polytope(x, drawn, buckets)
        half = (torch.tensor([[each], [each]], device=DEVICE) if buckets is None else (buckets + 1) // 2).view(
            2, 1, 1, 1
        )
        assert ((fast >= 0) & (fast < 2 * half)).all()
        assert (fast == plain).float().mean() > 0.9
        product = torch.einsum("bhnd,rcd->bhrnc", x.double(), drawn.double())
        best = product.masked_fill(torch.arange(each, device=DEVICE) >= half.unsqueeze(-1), 0.0).abs().amax(-1)
        mine = product.gather(-1, (fast % half).unsqueeze(-1)).squeeze(-1) * torch.where(fast < half, 1, -1)
        assert (mine >= best - 8 * torch.finfo(dtype).eps * best.max()).all()


@pytest.mark.parametrize(("q_seats", "k_seats"), [(8, 8), (16, 5), (200, 300), (1, 7)])
@pytest.mark.parametrize("padding", [0, 11])
def test_balanced_seats_are_those_of_the_reference(q_seats: int, k_seats: int, padding: int) -> None:
    """Scores far enough apart for the bits that a sort key keeps: the very same tables."""
    shuffled = torch.Generator().manual_seed(3)
    score_q, score_k = (
        torch.stack([torch.randperm(n, generator=shuffled) for _ in range(12)]).view(2, 2, 3, n).to(DEVICE).float() - 30
        for n in (70, 83)
    )
    for masks in ((some(2, 70, padding), some(2, 83, padding)), (None, some(2, 83, 80 if padding else 0))):
        options = {"q_seats": q_seats, "k_seats": k_seats}
        found = FAST.balanced(score_q, score_k, *masks, **options)
        for fast, plain in zip(found, PLAIN.balanced(score_q, score_k, *masks, **options), strict=True):
            assert torch.equal(fast, plain)


@pytest.mark.parametrize("chunk", [4, 7, 64, 100])
@pytest.mark.parametrize("counted", [0, 512])
@pytest.mark.parametrize("padding", [0, 11, 45])
def test_chunked_seats_are_those_of_the_reference(
    chunk: int, padding: int, counted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashing_kernels, "COUNTED", counted)
    n = 50
    most = -(-n // chunk) + 1
    hashes = torch.randint(most, (2, 2, 3, n), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    valid = some(2, n, min(padding, n - n // 3))
    for fast, plain in zip(
        FAST.chunked(hashes.int(), valid, chunk=chunk), PLAIN.chunked(hashes, valid, chunk=chunk), strict=True
    ):
        assert torch.equal(fast, plain)


def test_sort_keys_of_many_segments() -> None:
    """With so many segments that 32 bits cannot hold a score besides, the keys are 64 bits wide."""
    least, hashing_kernels.LEAST_BITS = hashing_kernels.LEAST_BITS, 32
    try:
        scores = tokens(2, 2, 3, 40)
        fast = FAST.balanced(scores, scores, None, None, q_seats=8, k_seats=8)
    finally:
        hashing_kernels.LEAST_BITS = least
    assert torch.equal(fast[0], PLAIN.balanced(scores, scores, None, None, q_seats=8, k_seats=8)[0])


@pytest.mark.parametrize("spec", ["smyrf:q_seats=16,k_seats=16", "reformer:chunk=16"])
@pytest.mark.parametrize("padding", [0, 9])
def test_groups_are_equally_good(spec: str, padding: int) -> None:
    q, k = tokens(2, 2, 100, 16), tokens(2, 2, 100, 16, seed=6)
    one, two = (
        ca.groups(q, k, method=spec, key_mask=some(2, 100, padding), backend=backend)
        for backend in ("reference", "triton")
    )
    for plain, fast in ((one.queries, two.queries), (one.keys, two.keys)):
        assert (plain.sort(-1).values == fast.sort(-1).values).float().mean() > 0.95


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["fp32", "half"])
def test_unit_rows_and_their_gradient(dtype: torch.dtype) -> None:
    x = (tokens(2, 37, 3, 20, dtype=dtype) * 3).transpose(1, 2)
    d_unit = tokens(2, 3, 37, 20, dtype=dtype, seed=6)
    fast, plain = x.detach().clone().requires_grad_(), x.detach().clone().requires_grad_()
    one, two = FAST.unit(fast), PLAIN.unit(plain)
    eps = torch.finfo(dtype).eps
    assert torch.allclose(one, two, rtol=2 * eps, atol=2 * eps)
    (mine,), (theirs,) = (torch.autograd.grad(y, x, d_unit) for x, y in ((fast, one), (plain, two)))
    assert torch.allclose(mine, theirs, rtol=4 * eps, atol=4 * eps * float(theirs.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["fp32", "half"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "spec", ["smyrf:q_seats=4,k_seats=4,rounds=2", "reformer:chunk=1,rounds=2", "routing:window=8"]
)
def test_seats_joined_and_lonely_tokens(spec: str, causal: bool, dtype: torch.dtype) -> None:
    """Buckets so small that some tokens meet nobody; and tokens with any number of seats (Routing)."""
    b, h, n, d = 2, 2, 21, 12
    x = [tokens(b, h, n, d, dtype=dtype, seed=seed) for seed in (1, 2, 3)]
    options = {"method": spec, "causal": causal, "key_mask": some(b, n, 4)}
    groups = ca.groups(x[0], x[1], backend="reference", **options)
    d_out, found = tokens(b, h, n, d, seed=4), {}
    runs = {"fast": (dtype, "triton"), "plain": (dtype, "reference"), "exact": (torch.float64, "reference")}
    for name, (kind, backend) in runs.items():
        mine = [t.to(kind).requires_grad_() for t in x]
        out, lse = ca.attention(*mine, groups=groups, return_lse=True, backend=backend, **options)
        total = (out * d_out.to(kind)).sum() + torch.where(lse.isfinite(), lse, 0.0).square().sum()
        gradients = torch.autograd.grad(total, mine, allow_unused=True)
        found[name] = [out, lse, *(g for g in gradients if g is not None)]
    for place, (fast, plain, exact) in enumerate(zip(*found.values(), strict=True)):
        assert torch.equal(fast.isfinite(), exact.isfinite())
        there = exact.isfinite()
        errors = [float((y.double() - exact).detach()[there].abs().max()) for y in (fast, plain)]
        least = 8 * torch.finfo(dtype).eps * float(exact.detach()[there].abs().max())
        assert errors[0] <= max((2 if place < 2 else 3) * errors[1], least)


@pytest.mark.parametrize("back", [True, False])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("chunk", [27, 64])
def test_chunks_are_walked_past(chunk: int, causal: bool, back: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the second half of a bucket's keys is not what the bucket before has first."""
    monkeypatch.setattr(bucketed_kernels, "TURNS", 2)
    n, spec = 5 * chunk - 11, f"reformer:rounds=3,chunk={chunk}"
    q, v, keep = tokens(2, 2, n, 20, dtype=HALF), tokens(2, 2, n, 36, dtype=HALF, seed=6), some(2, n, 30)
    options = {"method": spec, "causal": causal, "key_mask": keep, "return_lse": True}
    groups = ca.groups(q, q, method=spec, causal=causal, key_mask=keep, backend="reference")
    assert isinstance(groups, ca.Buckets)
    if not back:
        own, before = groups.keys.chunk(2, -1)
        groups = ca.Buckets(groups.queries, torch.cat([own, before.flip(2)], -1), groups.rounds, groups.copies)
    fast, plain, exact = (
        ca.attention(q.to(kind), q.to(kind), v.to(kind), groups=groups, backend=backend, **options)
        for kind, backend in ((HALF, "triton"), (HALF, "reference"), (torch.float64, "reference"))
    )
    for mine, theirs, right in zip(fast, plain, exact, strict=True):
        there = right.isfinite()
        assert torch.equal(mine.isfinite(), there)
        errors = [float((y.double() - right)[there].abs().max()) for y in (mine, theirs)]
        assert errors[0] <= max(2 * errors[1], 8 * torch.finfo(HALF).eps * float(right[there].abs().max()))


def test_opcheck() -> None:
    ops = torch.ops.clusterattn
    q, k, v = (tokens(1, 2, 12, 16, seed=seed).requires_grad_() for seed in (1, 2, 3))
    keep = some(1, 12, 3)
    drawn, scores = tokens(2, 18, seed=4), tokens(1, 2, 2, 12, seed=5)
    hashes = torch.arange(12, dtype=torch.int32, device=DEVICE).expand(1, 2, 2, 12) % 3
    queries, keys = FAST.chunked(hashes, None, chunk=4)
    seating = (None, queries, keys, None, None, None)
    for op, args in (
        (ops.normal, (q.detach(), 2, 48, 5, draw.STREAM_ROUNDS)),
        (ops.normal, (q.detach(), 2, 48, 0, draw.STREAM_ROUNDS, torch.tensor(5, device=DEVICE))),
        (ops.scores, (q.detach(), k.detach(), drawn, keep, None, True, "triton")),
        (ops.polytope, (q.detach(), tokens(2, 3, 16), None, "triton")),
        (ops.balanced, (scores, scores, keep, keep, 4, 5, "triton")),
        (ops.chunked, (hashes, keep, 4, "triton")),
        (ops.unit, (q, "triton")),
        (ops.bucketed, (q, k, v, *seating, None, 0.25, 0.0, (0, -1, -1, 1, 2, 2, 0), "triton")),
        (ops.bucketed, (q, k, v, *seating, keep, 0.25, 0.7, (0, -1, -1, 1, 2, 0, 1), "triton")),
        (ops.bucketed, (q, k, v, *seating, None, 0.25, 0.0, (0, -1, -1, 1, 0, 0, 0), "triton")),
    ):
        torch.library.opcheck(op, args)


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize(
    ("spec", "n", "m"),
    [("reformer:rounds=2,chunk=16", n, n) for n in (7, 40, 65)]
    + [("smyrf:rounds=3,q_seats=8,k_seats=16", n, m) for n, m in ((7, 7), (40, 40), (65, 65), (65, 7), (9, 65))],
)
def test_a_key_sits_no_more_often_than_is_said(spec: str, n: int, m: int, padding: int, backend: str) -> None:
    """In each part of the buckets of each round once, so that its seats need not be searched for."""
    q, k, keep = tokens(2, 2, n, 16), tokens(2, 2, m, 16, seed=6), some(2, m, padding)
    groups = ca.groups(q, k, method=spec, key_mask=keep, backend=backend)
    assert isinstance(groups, ca.Buckets)
    rounds, copies = groups.rounds, groups.copies
    if spec.startswith("smyrf"):
        assert copies == int(keep is None and (n, m) != (65, 7))  # few keys, or who knows how few: buckets share them
    if copies:
        seats = groups.keys.view(2, 2, rounds, -1, copies, groups.keys.shape[3] // copies)
        for part in seats.movedim(4, 3).flatten(4).flatten(0, 3).tolist():
            real = [key for key in part if key >= 0]
            assert len(real) == len(set(real))


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["fp32", "half"])
def test_what_stands_at_known_seats_is_added_up_as_from_lists(dtype: torch.dtype) -> None:
    n, d, chunk, rounds = 45, 24, 8, 3
    hashes = torch.randint(5, (2, 4, rounds, n), generator=torch.Generator().manual_seed(3)).to(DEVICE, torch.int32)
    _, keys = FAST.chunked(hashes, some(2, n, 6), chunk=chunk)
    part = tokens(8, keys.shape[2] * keys.shape[3], d, dtype=dtype)
    found = [torch.empty(2, 2, n, d, dtype=dtype, device=DEVICE) for _ in range(2)]  # two heads to a head of keys
    lists.sum_lists(lists.seat_lists(keys, n), part, found[0], 4)
    lists.sum_lists(lists.seat_places(keys, n, rounds, 2), part, found[1], 4)
    assert torch.allclose(*found, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-5)
    assert not found[1][0, :, 15:21].any()  # nobody's
