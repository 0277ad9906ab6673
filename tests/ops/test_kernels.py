"""The Triton kernels against their references, with the groups given: on a GPU for real, elsewhere interpreted.

conftest.py sets TRITON_INTERPRET=1 where there is no GPU. The interpreter knows no bf16: fp16 stands in for it there.
"""

from __future__ import annotations

import pytest
import torch

import clusterattn as ca
from clusterattn.ops import beside, choose, draw
from clusterattn.ops._jit import HAVE_TRITON, INTERPRETING

pytestmark = pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16

# (b h hk n m d e): grouped heads, odd lengths, key and value dimensions that are no power of two
SELF = (1, 2, 1, 70, 70, 16, 24)
CROSS = (2, 2, 2, 37, 83, 20, 12)
SPECS = [
    "clustered:clusters=6,block=32,bits=15,steps=2",
    "improved:clusters=6,top=5,block=32,bits=15,steps=2",
    "improved:clusters=6,top=5,block=32,bits=15,steps=2,mass=softmax",
    "refined:clusters=6,top=5,block=32",
    "smyrf:q_seats=16,k_seats=16,rounds=2",
    "smyrf:q_seats=16,k_seats=16,rounds=2,dedup=true",
    "local:window=9",
]
NOT_CAUSAL = [  # parts there are not; and the slope's kernels know one block
    "refined:clusters=6,top=5,parts=4,slope=true,steps=2",
    "refined:clusters=6,top=5,parts=1,slope=true,steps=2",
    "refined:clusters=6,top=0,parts=7,slope=false,steps=2",
    "improved:clusters=6,top=5,bits=15,steps=2,mass=tangent,parts=3,slope=true",
]
SELF_ONLY = [
    "reformer:chunk=16,rounds=2",
    "clusterformer:clusters=4",
    "clusterformer:clusters=4,scope=shared",
    "clusterformer:clusters=4,affinity=3",
]


def inputs(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    b, h, hk, n, m, d, e = shape
    draw = torch.Generator().manual_seed(7)
    sizes = ((b, h, n, d), (b, hk, m, d), (b, hk, m, e), (b, h, n, e))
    q, k, v, d_out = (torch.randn(size, generator=draw).to(DEVICE, dtype) for size in sizes)
    keep = torch.ones(b, m, dtype=torch.bool, device=DEVICE)
    keep[0, m - 9 :] = False
    return [q, k, v], keep, d_out


def answers(spec: str, shape: tuple[int, ...], dtype: torch.dtype, causal: bool) -> dict[str, list[torch.Tensor]]:
    """out, lse and gradients: by kernels (twice on a GPU; the interpreter runs one program after another, and always
    gives the same bits), by the reference in the same dtype, and by the reference in fp64."""
    x, keep, d_out = inputs(shape, dtype)
    options = {"method": spec, "key_mask": keep, "causal": causal}
    groups = ca.groups(*x, backend="reference", **options)
    found = {}
    kernels = ["kernel"] if INTERPRETING else ["kernel", "again"]
    runs = {**dict.fromkeys(kernels, (dtype, "triton")), "plain": (dtype, "reference")}
    for name, (kind, backend) in {**runs, "exact": (torch.float64, "reference")}.items():
        mine = [t.to(kind).requires_grad_() for t in x]
        out, lse = ca.attention(*mine, groups=groups, return_lse=True, backend=backend, **options)
        total = (out * d_out.to(kind)).sum() + torch.where(lse.isfinite(), lse, 0.0).sum()
        gradients = torch.autograd.grad(total, mine, allow_unused=True)
        found[name] = [out, lse, *(g for g in gradients if g is not None)]
    return found


def test_an_affinity_of_more_clusters_than_kernels_hold_is_refused_in_words_or_left_to_the_reference() -> None:
    x, _, _ = inputs((1, 2, 2, 40, 40, 16, 16), torch.float32)
    points, at = torch.randn(1, 40, 8, device=DEVICE), {}
    for clusters in (240, 241):  # 256 features of queries and keys, and 257
        options = {"points": points, "state": torch.randn(clusters, 8, device=DEVICE)}
        options["method"] = f"clusterformer:clusters={clusters},blocks=3,affinity=3"
        at[clusters] = lambda backend, options=options: ca.attention(*x, backend=backend, **options)
    assert torch.allclose(at[240]("triton"), at[240]("reference"), atol=1e-5)
    with pytest.raises(ValueError, match=r"up to 256, this one is 257 \(an affinity .* one for every cluster"):
        at[241]("triton")
    assert torch.equal(at[241]("auto"), at[241]("reference"))


def largest_error(got: torch.Tensor, exact: torch.Tensor) -> float:
    assert torch.equal(got.isfinite(), exact.isfinite())
    return float((got.double() - exact).detach()[exact.isfinite()].abs().max())


CASES = [(spec, shape, causal) for spec in SPECS for shape in (SELF, CROSS) for causal in (False, True)]
CASES += [(spec, SELF, causal) for spec in SELF_ONLY for causal in (False, True)]
CASES += [(spec, shape, False) for spec in NOT_CAUSAL for shape in (SELF, CROSS)]
CASES += [("refined:clusters=20,top=33,block=32", SELF, causal) for causal in (False, True)]  # several tiles of each
CASES += [("refined:clusters=4,top=70,parts=20,slope=true,steps=2", SELF, False)]
CASES += [("refined:clusters=66,top=0,parts=2,slope=true,steps=1", SELF, False)]  # more clusters than make the slope
CASES += [("refined:clusters=4,top=3,parts=2,slope=true,steps=2", (1, 1, 1, 40, 140, 16, 16), False)]  # full parts
CALLS = [(*case, dtype) for case in CASES for dtype in (torch.float32, HALF)]
if INTERPRETING:  # slow: every two of shape, causal and dtype meet in one call, all three on a GPU alone
    CALLS = [x for x in CALLS if ((x[1] is CROSS) + x[2] + (x[3] is HALF)) % 2 == 0]


@pytest.mark.parametrize(
    ("spec", "shape", "causal", "dtype"), CALLS,
    ids=[f"{s}-n{x[3]}-{'causal' if c else 'all'}-{'half' if t is HALF else 'fp32'}" for s, x, c, t in CALLS],
)  # fmt: skip
def test_as_good_as_the_reference(spec: str, shape: tuple[int, ...], causal: bool, dtype: torch.dtype) -> None:
    found = answers(spec, shape, dtype, causal)
    rounding = torch.finfo(dtype).eps
    for kernel, again in zip(found["kernel"], found.pop("again", found["kernel"]), strict=True):
        assert torch.equal(kernel, again), "the same inputs give the same bits"
    for place, (kernel, plain, exact) in enumerate(zip(*found.values(), strict=True)):
        factor, least = (2 if place < 2 else 3), 8 * rounding * float(exact.detach()[exact.isfinite()].abs().max())
        assert largest_error(kernel, exact) <= max(factor * largest_error(plain, exact), least)


@pytest.mark.parametrize("top", [0, 32])
def test_parts_of_few_keys_that_lie_far_apart_keep_their_slope_in_half_precision(top: int) -> None:
    """top: some parts then lie wholly among the near keys of a cluster."""
    draw = torch.Generator().manual_seed(1)
    m, parts, d = 120, 30, 64
    homes = 3 * torch.randn(parts, 2, d, generator=draw)
    k, v = (homes.repeat(m // parts, 1, 1) + 0.02 * torch.randn(m, 2, d, generator=draw)).transpose(0, 1)
    q, d_out = 4 * torch.randn(7, d, generator=draw), torch.randn(7, d, generator=draw).to(DEVICE)
    x = [t[None, None].to(DEVICE, torch.float16) for t in (q, k, v)]
    method = f"refined:clusters=1,top={top},parts={parts},slope=true,steps=1"
    groups = ca.groups(*x, method=method, backend="reference")
    found = []
    for dtype, backend in ((torch.float16, "triton"), (torch.float16, "reference"), (torch.float64, "reference")):
        leaves = [t.to(dtype).requires_grad_() for t in x]
        out = ca.attention(*leaves, method=method, groups=groups, backend=backend)
        found.append([out, *torch.autograd.grad(out, leaves, d_out[None, None].to(dtype))])
    for factor, kernel, plain, exact in zip((2, 3, 3, 3), *found, strict=True):
        least = 8 * torch.finfo(torch.float16).eps * float(exact.detach().abs().max())
        assert largest_error(kernel, exact) <= max(factor * largest_error(plain, exact), least)


def test_a_slope_too_wide_to_hold_is_walked_over(monkeypatch: pytest.MonkeyPatch) -> None:
    from clusterattn.ops.coarse import slope_backward

    x, keep, d_out = inputs((1, 2, 1, 30, 40, 48, 40), torch.float32)
    groups = ca.groups(*x, method=NOT_CAUSAL[0], key_mask=keep, backend="reference")
    found = []
    for whole in (1 << 20, 0):
        monkeypatch.setattr(slope_backward, "WHOLE_SLOPE", whole)
        mine = [t.clone().requires_grad_() for t in x]
        out = ca.attention(*mine, method=NOT_CAUSAL[0], key_mask=keep, groups=groups, backend="triton")
        found.append(torch.autograd.grad(out, mine, d_out))
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("start", ["random", "far"])
@pytest.mark.parametrize("metric", ["hamming", "euclid", "keys"])
def test_groups_are_equally_good(metric: str, start: str) -> None:
    """k-means by kernels: nearly every label equal; a different one is a tie within rounding."""
    (q, k, _), keep, _ = inputs((1, 2, 2, 90, 90, 16, 16), torch.float32)
    method = ca.Clustered(clusters=7, metric=metric, start=start, steps=3, bits=15)
    one, two = (ca.groups(q, k, method=method, key_mask=keep, backend=backend) for backend in ("reference", "triton"))
    assert (one.labels == two.labels).float().mean() > 0.98
    assert torch.allclose(one.means, two.means, atol=0.2)


def seen_keys(
    heads: int, dtype: torch.dtype, backend: str, d: int = 24, starts: int = 0
) -> tuple[torch.Tensor, torch.Tensor, beside.View]:
    """Keys, values and what they are seen by: from so many starts, or from means."""
    (q, k, v), _, _ = inputs((1, heads, 2, 50, 70, d, 40), dtype)
    clusters = ca.groups(q, k, method="refined:clusters=4,top=2,parts=1,slope=false,steps=2", backend="reference")
    draw_at = torch.Generator().manual_seed(3)
    queries_at = torch.randint(50, (1, heads, 6), generator=draw_at).to(DEVICE)
    keys_at = torch.randint(70, (1, 2, 40), generator=draw_at).to(DEVICE)
    queries_at[..., -1], keys_at[..., -2:] = -1, -1
    of = {"means": clusters.means, "labels": clusters.labels}
    if starts:
        of = {"starts_at": torch.randint(50, (1, heads, starts), generator=draw_at).to(DEVICE)}
        of["starts_at"][..., starts // 2 :: 3] = -1
    return k, v, choose(backend).view(q, k, v, queries_at, keys_at, **of)


@pytest.mark.parametrize("starts", [0, 5, 80])
@pytest.mark.parametrize("heads", [2, 4], ids=["own", "grouped"])
def test_keys_beside_values_are_the_same_points(heads: int, starts: int) -> None:
    (plain, *_), (kernel, *_) = (
        choose(name).beside(*seen_keys(heads, torch.float32, name, starts=starts)) for name in ("reference", "triton")
    )
    assert torch.allclose(plain, kernel, atol=1e-4)
    spread = plain[..., -40:].var(2, correction=0).sum(-1).sqrt()  # of the values, over all keys: nearly that of some
    assert torch.allclose(spread, torch.ones_like(spread), atol=0.25)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_points_of_some_keys_are_those_of_all(backend: str) -> None:
    k, v, seen = seen_keys(2, torch.float32, backend)
    everybody, *nothing = choose(backend).beside(k, v, seen)
    assert nothing == [None, None]
    first_at, second_at = torch.tensor([5, 69, -1, 3]).to(DEVICE).expand(1, 2, 4), torch.arange(67, device=DEVICE) - 1
    second_at = torch.stack([second_at, second_at.flip(0)])[None]
    for lots in ((first_at, second_at), (first_at,)):
        points, *places = choose(backend).beside(k, v, seen, *lots)
        assert points.shape == (1, 2, sum(at.shape[2] for at in lots), everybody.shape[3])
        for at, place in zip(lots, places, strict=False):
            assert torch.equal(at < 0, place < 0)
            real = (at >= 0).unsqueeze(-1)
            theirs = (x.gather(2, where.clamp(min=0).unsqueeze(-1).expand(-1, -1, -1, x.shape[3])) * real
                      for x, where in ((points, place), (everybody, at)))  # fmt: skip
            torch.testing.assert_close(*theirs)
        assert places[1] is None or len(lots) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "half"])
@pytest.mark.parametrize(("d", "parts"), [(24, 7), (24, 64), (40, 100), (136, 20)])
def test_the_nearest_of_points_that_nobody_writes(d: int, parts: int, dtype: torch.dtype) -> None:
    """The same as of written points, but for such as are equally near."""
    ops = choose("triton")
    k, v, seen = seen_keys(2, dtype, "triton", d)
    points, *_ = ops.beside(k, v, seen)
    start_at = (torch.randperm(70, generator=torch.Generator().manual_seed(1))[:parts]).to(DEVICE).expand(1, 2, -1)
    start_at = torch.where(torch.arange(start_at.shape[2], device=DEVICE) == 2, -1, start_at)  # one that never was
    found = ops.kmeans(points, None, start_at, updates=1)
    got, wanted = ops.nearest_beside(k, v, seen, found), ops.nearest(points, found)
    assert got.shape == wanted.shape == (1, 2, 70)
    assert (got == wanted).float().mean() > 0.98
    assert (got != 2).all()
    scores = (points.double() - found.origin.double()) @ found.right.double().mT + found.offset.double().unsqueeze(-2)
    short = scores.amax(-1) - scores.gather(-1, got.unsqueeze(-1)).squeeze(-1)
    assert (short <= (1e-4 if dtype == torch.float32 else 1e-2) * scores[scores.isfinite()].abs().max()).all()


def test_opcheck_with_kernels() -> None:
    """The ops as kernels serve them; take and broadcast are served by nothing else (see test_compile.py)."""
    ops = torch.ops.clusterattn
    (q, k, v), keep, _ = inputs((1, 2, 1, 12, 14, 16, 16), torch.float32)
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    at = torch.tensor([[[0, 3, 3], [5, -1, 0]]], device=DEVICE)
    queries = torch.arange(12, device=DEVICE).view(1, 1, 2, 6).expand(1, 2, 2, 6)
    keys = torch.arange(14, device=DEVICE).view(1, 1, 2, 7).expand(1, 2, 2, 7)
    seating = (None, queries, keys, None, None, None, None, 0.25, 0.0, (2, -1, 0, 0, 1, 0, 0), "triton")
    labels = torch.arange(24, device=DEVICE).view(1, 2, 12) % 4 - 1
    c, (order, first) = q[:, :, :3].detach().requires_grad_(), ops.members(labels, 3, False, "triton")[:2]
    by_part = ops.members(torch.arange(14, device=DEVICE).view(1, 1, 14) % 2, 2, True, "triton")
    centres = torch.ones(1, 1, 33, device=DEVICE)
    found = [torch.randn(size, device=DEVICE) for size in ((1, 4, 19), (1, 4), (1, 1, 19))]
    counts = torch.full((1, 2, 3), 3, device=DEVICE)
    one, two = (None,) * 6, (*by_part, torch.full((1, 2, 3), 1 / 3, device=DEVICE), None)
    three = (*two[:5], counts)
    for op, args in (
        (ops.take, (k, at, "triton")),
        (ops.members, (labels, 3, False, "triton")),
        (ops.members, (labels, 3, True, "triton")),
        (ops.broadcast, (c, labels, None, None, "triton")),
        (ops.broadcast, (c, labels, order, first, "triton")),
        (ops.means, (q, labels, order, first, 3, "triton")),
        (ops.codes, (q.detach(), k[0, 0].detach().mT.contiguous(), None, "triton")),
        (ops.farthest, (q.detach(), at, 2, None, False, "triton")),
        (ops.kmeans, (q.detach(), None, at, None, None, 1, False, "triton")),
        (ops.covariance, (k.detach(), keep, None, "triton")),
        (ops.covariance, (k.detach(), None, at[:, :1], "triton")),
        (ops.coarse, (q, k, v, keep, None, None, 0.25, 3, True, 0, 0, 0, 1, "triton")),
        (ops.coarse, (q, k, v, None, None, None, 0.25, 3, False, 6, 4, 4, 1, "triton")),
        (ops.near_and_far, (q, c, k, v, keep, labels, order, first, *one, 0.25, 3, 0, 0, 0, 1, 1, False, "triton")),
        (ops.near_and_far, (q, c, k, v, None, labels, order, first, *one, 0.25, 3, 0, 0, 0, 1, 2, True, "triton")),
        (ops.near_and_far, (q, c, k, v, None, labels, order, first, *two, 0.25, 3, 0, 0, 0, 2, 1, False, "triton")),
        (
            ops.near_and_far,
            (q, c.detach(), k, v, None, labels, order, first, *three, 0.25, 3, 0, 0, 0, 2, 1, False, "triton"),
        ),
        (ops.view, (q.detach(), k.detach(), v.detach(), c.detach(), labels, None, at, at[:, :1], "triton")),
        (ops.view, (q.detach(), k.detach(), v.detach(), None, None, at, at, at[:, :1], "triton")),
        (ops.beside, (k.detach(), v.detach(), k[:, :, :3].detach(), centres, None, None, "triton")),
        (ops.beside, (k.detach(), v.detach(), k[:, :, :3].detach(), centres, at[:, :1], at[:, 1:, 1:], "triton")),
        (ops.nearest_beside, (k.detach(), v.detach(), k[:, :, :3].detach(), centres, *found, "triton")),
        (ops.bucketed, (q, k, v, *seating)),
    ):
        torch.library.opcheck(op, args)


@pytest.mark.parametrize("parts", [False, True], ids=["clusters", "parts"])
@pytest.mark.parametrize(("n", "clusters"), [(1, 1), (70, 6), (1100, 20), (300, 150), (300, 1100)])
def test_the_roll_is_a_stable_sort(n: int, clusters: int, parts: bool) -> None:
    labels = torch.randint(-1, clusters, (1, 3, n), generator=torch.Generator().manual_seed(n)).to(DEVICE)
    order, first, place, largest = torch.ops.clusterattn.members(labels, clusters, parts, "triton")
    home = torch.where(labels[0] < 0, clusters, labels[0])
    assert torch.equal(order.long(), home.argsort(dim=-1, stable=True))
    counts = torch.stack([torch.bincount(one, minlength=clusters + 1) for one in home])
    assert torch.equal(first[:, 1:].long(), counts.cumsum(-1))
    if not parts:
        assert place.numel() == largest.numel() == 0
        return
    assert torch.equal(place.long(), order.argsort(dim=-1))
    by_size = counts[:, :clusters].argsort(dim=-1, descending=True, stable=True)
    assert torch.equal(largest.long(), by_size if clusters <= 1000 else torch.arange(clusters).expand(3, -1).to(DEVICE))


@pytest.mark.parametrize("stretches", [2, 1008], ids=["wide", "narrow"])
def test_gradients_of_near_keys_are_added_key_by_key(stretches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from clusterattn.ops.coarse import arrange

    monkeypatch.setattr(arrange, "STRETCHES", stretches)
    draw = torch.Generator().manual_seed(3)
    b, h, hk, m, c, t, d, e = 1, 4, 2, 150, 5, 17, 16, 8
    at = torch.randint(-1, m, (b * h, c, t), generator=draw)
    at[:, :, 0] = 70  # everybody's
    sizes = ((b, hk, m, d), (b, hk, m, e), (b * h, c, t, d), (b * h, c, t, e))
    dk, dv, near_dk, near_dv = (torch.randn(size, generator=draw) for size in sizes)
    wanted = []
    for x, near in ((dk, near_dk), (dv, near_dv)):
        total = torch.zeros(b * hk, m + 1, x.shape[3]).double()
        total[:, :m] = x[0]
        for head in range(b * hk):
            entries = at[2 * head : 2 * head + 2].flatten()
            rows = torch.where(entries < 0, m, entries)
            total[head].index_add_(0, rows, near[2 * head : 2 * head + 2].flatten(0, 2).double())
        wanted.append(total[:, :m])
    found = arrange.add_near(*(x.to(DEVICE) for x in (dk.clone(), dv.clone(), at, near_dk, near_dv)))
    for one, two in zip(found, wanted, strict=True):
        torch.testing.assert_close(one[0].double().cpu(), two, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["fp32", "half"])
@pytest.mark.parametrize(("m", "top"), [(83, 5), (83, 83), (1400, 32), (2100, 3)])
def test_near_keys_are_the_best(m: int, top: int, dtype: torch.dtype) -> None:
    """As a whole row and by groups: every chosen key scores at least as high as every other, within rounding."""
    draw = torch.Generator().manual_seed(m)
    c, k = (torch.randn(1, 2, n, 16, generator=draw).to(DEVICE, dtype) for n in (3, m))
    near_at = torch.ops.clusterattn.coarse(c, k, k, None, None, None, 0.25, top, False, 0, 0, 0, 1, "triton")[4]
    scores = (c.double() @ k.double().mT) * 0.25
    assert near_at.shape == (1, 2, 3, top)
    assert torch.equal(near_at, near_at.unique_consecutive(dim=-1).sort(-1).values)  # all of them, each once
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, near_at, True)
    worst = scores.masked_fill(~chosen, float("inf")).amin(-1)
    best = scores.masked_fill(chosen, float("-inf")).amax(-1)
    assert (worst >= best - 4 * torch.finfo(dtype).eps * scores.abs().amax()).all()


def test_draws_are_the_same_on_every_device() -> None:
    from clusterattn.ops.draw.kernels import bits, stratified, stratified_among

    counter = torch.arange(500) * 7 + (5 << 32)
    for seed, stream in ((0, 1), (1, 2), (123456789012345, 9)):
        for told in ((seed, None), (0, torch.tensor(seed, device=DEVICE))):
            mine = bits(counter.to(DEVICE), told[0], stream, told[1]).cpu()
            assert torch.equal(mine, draw.bits(counter, seed, stream))
            for n, most in ((1000, 37), (20, 37)):
                mine = stratified(n, told[0], stream, most, torch.device(DEVICE), told[1]).cpu()
                all_real = torch.ones(1, n, dtype=torch.bool)
                assert torch.equal(mine, draw.stratified(counter, n, seed, stream, most))
                assert torch.equal(mine, draw.stratified_among(all_real, seed, stream, most)[0])
                assert torch.equal(
                    mine, stratified_among(all_real.to(DEVICE), told[0], stream, most, None, told[1])[0].cpu()
                )


def test_triton_refuses_what_it_cannot_serve() -> None:
    q = torch.randn(1, 1, 8, 4, dtype=torch.float64, device=DEVICE)
    with pytest.raises(ValueError, match=r"wanted .* got .*fp64.* try"):
        ca.attention(q, q, q, method="smyrf", backend="triton")


@pytest.mark.skipif(not INTERPRETING, reason="only an interpreter could be taken by mistake")
def test_auto_never_interprets() -> None:
    from clusterattn.ops._backends import serving

    assert serving("take", "auto", torch.zeros(1, 1, 4, 4, device=DEVICE)) == "reference"
