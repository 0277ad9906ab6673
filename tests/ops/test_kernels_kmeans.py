"""k-means by kernels: the phases of training and of far-apart starts against the reference, whatever the sizes."""

from __future__ import annotations

import pytest
import torch

from clusterattn.ops import choose
from clusterattn.ops._jit import HAVE_TRITON, INTERPRETING
from clusterattn.ops.kmeans import kernels, reference

pytestmark = pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def points(b: int, h: int, n: int, d: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    draw = torch.Generator().manual_seed(n + d)
    centres = torch.randn(b, h, 12, d, generator=draw) * 3
    which = torch.randint(12, (b, h, n), generator=draw)
    near = centres.gather(2, which.unsqueeze(-1).expand(-1, -1, -1, d))
    return (near + torch.randn(b, h, n, d, generator=draw) + 5).to(DEVICE, dtype)


def metric(x: torch.Tensor) -> torch.Tensor:
    b, h, n, d = x.shape
    centred = x.float() - x.float().mean(2, keepdim=True)
    return (centred.mT @ centred / n).view(b * h, d, d)


def positions(b: int, h: int, n: int, many: int, holes: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(many)
    at = torch.randperm(n, generator=draw)[:many].sort().values
    at[many - holes :] = -1
    return at.to(DEVICE).expand(b, h, many)


# (n, d, clusters, sample): one block of clusters and several, one program and several, widths that are no power of two
SIZES = [(150, 16, 7, None), (300, 20, 70, 200), (200, 64, 40, None), (180, 80, 9, 128)]


@pytest.mark.parametrize("together", [True, False], ids=["one-launch", "stages"])
@pytest.mark.parametrize("kind", ["euclid", "keys", "signs"])
@pytest.mark.parametrize(("n", "d", "c", "sample"), SIZES)
def test_training_is_that_of_the_reference(
    n: int, d: int, c: int, sample: int | None, kind: str, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "TOGETHER", 1 << 30 if together else 0)
    x = points(1, 2, n, d)
    if kind == "signs":
        x = torch.where(x > 5, 1.0, -1.0)
    form = metric(x) if kind == "keys" else None
    start_at = positions(1, 2, n, c, holes=1)
    train_at = None if sample is None else positions(1, 2, n, sample, holes=3)
    valid = None if sample is not None else torch.arange(n, device=DEVICE).expand(2, n) < n - 11
    settings = (x, valid, start_at, train_at, form, 2, kind == "signs")
    got, wanted = kernels.kmeans(*settings), reference.kmeans(*settings)
    again = got if INTERPRETING else kernels.kmeans(*settings)  # which runs programs in one order
    for mine, same, theirs in zip(got, again, wanted, strict=True):
        assert torch.equal(mine, same), "the same inputs give the same bits"
        assert torch.equal(mine.isfinite(), theirs.isfinite())
        finite = theirs.isfinite()
        if mine.dim() == 3 and mine.shape[1] == c:  # where a cluster that never was stands is nobody's business
            finite = finite & (start_at >= 0).flatten(0, 1).unsqueeze(-1)
        close = (mine - theirs)[finite].abs() <= 2e-3 * theirs[finite].abs().max()
        assert close.float().mean() > 0.97  # a point between two centroids may go either way


@pytest.mark.parametrize("kind", ["euclid", "keys", "signs"])
@pytest.mark.parametrize(("n", "d", "c", "sample"), [(150, 16, 7, None), (300, 20, 70, 200), (450, 64, 100, None)])
def test_all_ways_of_training_find_the_same(
    n: int, d: int, c: int, sample: int | None, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half precision: in one launch, in two for each round, and over sorted members. Codes add up to the same bits."""
    x = points(1, 2, n, d, torch.float16)
    if kind == "signs":
        x = torch.where(x > 5, 1.0, -1.0).half()
    form = metric(x) if kind == "keys" else None
    start_at = positions(1, 2, n, c, holes=1)
    train_at = None if sample is None else positions(1, 2, n, sample, holes=3)
    valid = None if sample is not None else torch.arange(n, device=DEVICE).expand(2, n) < n - 11
    settings = (x, valid, start_at, train_at, form, 3, kind == "signs")
    once = kernels.kmeans(*settings)
    monkeypatch.setattr(kernels, "TOGETHER", 0)
    assert kernels.fits(x, c)
    rounds = kernels.kmeans(*settings)
    again = rounds if INTERPRETING else kernels.kmeans(*settings)
    monkeypatch.setattr(kernels, "fits", lambda *_: False)
    stages = kernels.kmeans(*settings)
    alive = (start_at >= 0).flatten(0, 1)
    for one, two, same, three in zip(once, rounds, again, stages, strict=True):
        assert torch.equal(two, same), "the same inputs give the same bits"
        lives = alive if one.shape[1] == c else slice(None)
        for mine, other in ((two[lives], one[lives]), (two[lives], three[lives])):
            if kind == "signs":
                assert torch.equal(mine, other)
            else:
                close = (mine.float() - other.float()).abs() <= 2e-3 * other.float().abs().max()
                assert close.float().mean() > 0.97  # a point between two centroids may go either way


@pytest.mark.parametrize("metric_of_keys", [False, True], ids=["euclid", "keys"])
@pytest.mark.parametrize(
    ("n", "d", "c", "pool"), [(90, 16, 7, 56), (400, 20, 45, 360), (60, 64, 1, 8), (40, 16, 30, 33)]
)
def test_far_starts_are_those_of_the_reference(n: int, d: int, c: int, pool: int, metric_of_keys: bool) -> None:
    x = points(1, 2, n, d)
    form = metric(x) if metric_of_keys else None
    pool_at = positions(1, 2, n, pool, holes=4)
    got, wanted = (side.farthest(x, pool_at, c, form, False) for side in (kernels, reference))
    assert torch.equal(got, wanted)
    for chosen in got.tolist():
        there = [place for place in chosen if place >= 0]
        assert len(set(there)) == len(there) >= min(c, 0.95 * (pool - 4))
        assert set(there) <= set(pool_at[0, 0].tolist())


def test_far_starts_lie_farther_apart_than_random_ones() -> None:
    x = points(1, 2, 512, 16)
    pool_at = positions(1, 2, 512, 200)
    chosen = reference.farthest(x, pool_at, 25, None, False)

    def reach(at: torch.Tensor) -> torch.Tensor:
        """How far the pool's points are from the nearest chosen one, at most."""
        pool, starts = (reference.rows_at(x, which.view(1, 2, -1)).flatten(0, 1) for which in (pool_at, at))
        return torch.cdist(pool, starts).amin(-1).amax(-1)

    assert (reach(chosen) < 0.8 * reach(pool_at[:, :, ::8])).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "half"])
@pytest.mark.parametrize(
    ("n", "d", "c"), [(150, 16, 7), (90, 20, 16), (200, 64, 100), (70, 80, 256), (70, 64, 300), (40, 200, 40)]
)
def test_nobody_is_nearer_than_the_nearest(n: int, d: int, c: int, dtype: torch.dtype) -> None:
    """Those that never were are nobody's; a head where none was has the first."""
    x = points(1, 3, n, d, dtype)
    right = points(1, 3, c, d).view(3, c, d) - 5
    origin = x.float().mean(2).view(3, 1, d)
    offset = -0.5 * right.square().sum(-1)
    offset[:, ::3] = float("-inf")
    offset[2] = float("-inf")
    got = kernels.nearest(x, right, offset, origin)
    assert got.shape == (3, n)
    assert (got[2] == 0).all()
    x64 = x[0].double() - origin.double()
    scores = (x64 @ right.to(dtype).double().mT + offset.double().unsqueeze(1))[:2]
    short = scores.amax(-1) - scores.gather(-1, got[:2].unsqueeze(-1)).squeeze(-1)
    assert (short <= (1e-5 if dtype == torch.float32 else 2e-3) * scores[scores.isfinite()].abs().max()).all()


@pytest.mark.parametrize("signs", [False, True])
@pytest.mark.parametrize(("d", "c"), [(16, 90), (64, 100), (100, 200), (200, 40), (16, 300)])
def test_ties_of_codes_go_to_the_lowest(d: int, c: int, signs: bool) -> None:
    x = torch.where(points(1, 1, 200, d, torch.float16) > 5, 1.0, -1.0).half()
    x[..., -1] = 0  # codes are padded
    right = x[0, :, torch.arange(c) % (c // 2)]
    offset = torch.zeros(1, c, device=DEVICE)
    offset[:, ::7] = float("-inf")
    labels = kernels.nearest(x, right, offset, None, signs)
    assert torch.equal(labels, reference.nearest(x, right, offset, None))
    assert (offset[0, labels[0]] == 0).all()
    assert not kernels.nearest(x, right, torch.full_like(offset, float("-inf")), None, signs).any()


def test_growth_ends_where_it_should() -> None:
    for c in (1, 2, 3, 7, 100, 1000):
        sizes = reference.growth(c)
        assert sizes[0] == 0
        assert sizes[-1] < c <= sizes[-1] + max(1, sizes[-1] // 2)
    assert len(reference.growth(2048)) < 25


@pytest.mark.parametrize("together", [True, False], ids=["one-launch", "stages"])
def test_lloyd_from_given_centroids(together: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "TOGETHER", 1 << 30 if together else 0)
    x = points(2, 1, 140, 20)
    valid = torch.arange(140, device=DEVICE).expand(2, 140) < torch.tensor([[140], [99]], device=DEVICE)
    centroids, alive = x[:, 0, :9].clone(), torch.arange(9, device=DEVICE).expand(2, 9) < 8
    settings = (x, valid, None, centroids, alive, None, 2, False)
    got, wanted = kernels.lloyd(*settings), reference.lloyd(*settings)
    close = (got - wanted)[:, :8].abs() <= 2e-3 * wanted.abs().max()
    assert close.float().mean() > 0.97
    assert torch.equal(got[:, 8], centroids[:, 8]), "who never lived stays where it was"


@pytest.mark.parametrize("d", [24, 96, 200])
def test_second_moments_of_wide_keys_come_in_columns(d: int) -> None:
    from clusterattn.ops.kmeans.moments import covariance

    k = torch.randn(1, 2, 150, d, generator=torch.Generator().manual_seed(d)) + 3
    wanted = torch.stack([torch.cov(head.mT, correction=0) for head in k[0].double()])
    assert torch.allclose(covariance(k.to(DEVICE), None, None)[0].double().cpu(), wanted, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "half"])
@pytest.mark.parametrize(("n", "top", "padding"), [(90, 16, 0), (700, 9, 11), (12, 12, 3)])
def test_closest_points_are_those_of_the_reference(n: int, top: int, padding: int, dtype: torch.dtype) -> None:
    x = torch.nn.functional.normalize(points(2, 2, n, 20).float() - 5, dim=-1).to(dtype)
    c = torch.nn.functional.normalize(points(2, 2, 30, 20).float() - 5, dim=-1)[:, :, :13]
    valid = None if not padding else (torch.arange(n, device=DEVICE) < n - padding).expand(2, n)
    got, wanted = (choose(name).closest(c, x, valid, top) for name in ("triton", "reference"))
    assert got.shape == wanted.shape == (2, 2, 13, top)
    assert torch.equal(got < 0, wanted.sort(-1, descending=True).values < 0)
    products = c @ x.float().mT
    worst = [
        torch.where(at < 0, 2.0, products.gather(3, at.clamp(min=0))).amin(-1) for at in (got, wanted)
    ]  # fmt: skip
    assert torch.allclose(*worst, atol=1e-5 if dtype == torch.float32 else 4e-3)
    for row in got.flatten(0, 2).tolist():
        there = [at for at in row if at >= 0]
        assert len(set(there)) == len(there) == min(top, n - padding)
