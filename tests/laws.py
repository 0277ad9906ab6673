"""What the tests of the laws share: the one list of methods, inputs, and the two rules of comparison."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import oracle
import pytest
import torch
from torch import Tensor

import clusterattn as ca

# ---- the list ------------------------------------------------------------------------------------

HEADS = 4  # of a query in `draw`
_FAMILY: dict[str, Any] = {"clusters": 5, "block": 8}
_HASHED: dict[str, Any] = {**_FAMILY, "bits": 31, "steps": 3}
_REFINED: dict[str, Any] = {**_FAMILY, "top": 4, "steps": 2, "parts": 1, "slope": False}


@dataclass(frozen=True)
class Case:
    """A method at a small setting, and the setting at which it must equal exact attention (None: special)."""

    name: str
    method: Any
    limit: Callable[[int, int], Any] | None

    @property
    def family(self) -> bool:
        return isinstance(self.method, (ca.Clustered, ca.Improved, ca.Refined))

    @property
    def parts(self) -> int:
        """How many the far keys fall into."""
        return getattr(self.method, "parts", 1)

    @property
    def slope(self) -> bool:
        return getattr(self.method, "slope", False)

    def __str__(self) -> str:
        return self.name


def _own_clusters(method: Any) -> Callable[[int, int], Any]:
    return lambda n, m: dataclasses.replace(method, clusters=n * HEADS if method.share_heads else n)


def _family(name: str, method: Any) -> Case:
    return Case(name, method, _own_clusters(method))


CASES = [
    Case("exact", ca.Exact(), lambda n, m: ca.Exact()),
    _family("clustered", ca.Clustered(**_HASHED)),
    _family("clustered-bias", ca.Clustered(**_HASHED, bias=True)),
    _family("clustered-sample", ca.Clustered(**_HASHED, sample=12)),
    _family("clustered-far", ca.Clustered(**_HASHED, start="far")),
    _family("clustered-euclid", ca.Clustered(**_HASHED, metric="euclid")),
    _family("clustered-keys", ca.Clustered(**_HASHED, metric="keys")),
    _family("clustered-block", ca.Clustered(**_HASHED, centroids_from="block")),
    _family("improved", ca.Improved(**_HASHED, top=4)),
    _family("improved-softmax", ca.Improved(**_HASHED, top=4, mass="softmax")),
    _family("improved-tangent", ca.Improved(**_HASHED, top=4, mass="tangent")),
    _family("improved-block", ca.Improved(**_HASHED, top=4, centroids_from="block")),
    _family("improved-parts", ca.Improved(**_HASHED, top=4, mass="tangent", parts=3, slope=True)),
    _family("refined", ca.Refined(**_REFINED)),
    _family("refined-rank", ca.Refined(**_REFINED, rank=3)),
    _family("refined-block", ca.Refined(**_REFINED, centroids_from="block")),
    _family("refined-slope", ca.Refined(**{**_REFINED, "slope": True})),
    _family("refined-slope-block", ca.Refined(**{**_REFINED, "slope": True}, centroids_from="block")),
    _family("refined-parts", ca.Refined(**{**_REFINED, "parts": 6})),
    _family("refined-both", ca.Refined(**{**_REFINED, "parts": 6, "slope": True})),
    _family("refined-far", ca.Refined(**{**_REFINED, "parts": 4, "slope": True, "top": 0})),
    _family("refined-sample", ca.Refined(**{**_REFINED, "parts": 4, "slope": True}, sample=14, rank=3)),
    _family("clustered-share", ca.Clustered(**_HASHED, share_heads=True)),
    _family("refined-share", ca.Refined(**_REFINED, share_heads=True)),
    _family("refined-share-block", ca.Refined(**{**_REFINED, "slope": True}, centroids_from="block", share_heads=True)),
    _family("refined-share-both", ca.Refined(**{**_REFINED, "parts": 6, "slope": True}, share_heads=True, rank=3)),
    Case(
        "smyrf",
        ca.Smyrf(rounds=2, q_seats=8, k_seats=8),
        lambda n, m: ca.Smyrf(rounds=1, q_seats=n, k_seats=m),
    ),
    Case(
        "smyrf-e2lsh",
        ca.Smyrf(rounds=2, q_seats=8, k_seats=8, transform="e2lsh"),
        lambda n, m: ca.Smyrf(rounds=1, q_seats=n + 1, k_seats=m + 1, transform="e2lsh"),
    ),
    Case(
        "smyrf-crosspolytope",
        ca.Smyrf(rounds=2, q_seats=8, k_seats=8, transform="crosspolytope"),
        lambda n, m: ca.Smyrf(rounds=1, q_seats=2 * n, k_seats=2 * m, transform="crosspolytope"),
    ),
    Case(
        "smyrf-dedup",
        ca.Smyrf(rounds=3, q_seats=8, k_seats=6, dedup=True),
        lambda n, m: ca.Smyrf(rounds=3, q_seats=n, k_seats=m, dedup=True),
    ),
    Case("reformer", ca.Reformer(rounds=2, chunk=4), None),
    Case("routing", ca.Routing(clusters=3, window=8), lambda n, m: ca.Routing(clusters=1, window=max(n, m))),
    Case("routing-auto", ca.Routing(window=8), lambda n, m: ca.Routing(window=max(n, m))),
    Case("clusterformer", ca.ClusterFormer(clusters=4), lambda n, m: ca.ClusterFormer(clusters=1)),
    Case(
        "clusterformer-shared",
        ca.ClusterFormer(clusters=4, scope="shared", similarity="inner"),
        lambda n, m: ca.ClusterFormer(clusters=1, scope="shared", similarity="inner"),
    ),
    Case("clusterformer-auto", ca.ClusterFormer(), lambda n, m: ca.ClusterFormer(clusters=2)),
    Case(
        "clusterformer-three",
        ca.ClusterFormer(clusters=5, blocks=3),
        lambda n, m: ca.ClusterFormer(clusters=3, blocks=3),
    ),
    Case("clusterformer-turns", ca.ClusterFormer(clusters=4, ties="turns"), None),
    Case("oracle_top", ca.OracleTop(top=4), lambda n, m: ca.OracleTop(top=m)),
    Case("local", ca.Local(window=4), lambda n, m: ca.Local(window=2 * max(n, m) + 1)),
]
BY_NAME = {case.name: case for case in CASES}
CAUSAL = [case for case in CASES if case.method.causality != "no"]
CROSS = [case for case in CASES if not case.method.self_only]


def kinds(case: Case) -> list[bool]:
    """The values of ``causal`` that a method answers to."""
    return [False] if case.method.causality == "no" else [False, True]


def over(cases: list[Case] = CASES, *, where: Callable[[Case], bool] = lambda case: True) -> Any:
    """``@over()``: the test runs once for every method of the list."""
    chosen = [case for case in cases if where(case)]
    assert chosen
    return pytest.mark.parametrize("case", chosen, ids=str)


# ---- inputs --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    key_mask: Tensor | None = None
    query_mask: Tensor | None = None

    @property
    def seen(self) -> Tensor:
        return self.seen_when(False)

    def seen_when(self, causal: bool) -> Tensor:
        b, _, n, _ = self.q.shape
        return oracle.seen(b, n, self.k.shape[2], self.key_mask, self.query_mask, causal)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    @property
    def masks(self) -> dict[str, Tensor]:
        given = {"key_mask": self.key_mask, "query_mask": self.query_mask}
        return {name: mask for name, mask in given.items() if mask is not None}

    def to(self, dtype: torch.dtype) -> Inputs:
        return dataclasses.replace(self, q=self.q.to(dtype), k=self.k.to(dtype), v=self.v.to(dtype))

    def leaves(self) -> Inputs:
        """The same numbers as leaves that want a gradient."""
        q, k, v = (x.detach().clone().requires_grad_() for x in self.tensors)
        return dataclasses.replace(self, q=q, k=k, v=v)

    def attend(self, method: Any, **more: Any) -> Any:
        return ca.attention(*self.tensors, method=method, **self.masks, **more)

    def groups(self, method: Any, **more: Any) -> Any:
        return ca.groups(*self.tensors, method=method, **self.masks, **more)


def draw(
    case: Case | None = None,
    *,
    b: int = 2,
    h: int = HEADS,
    hk: int = 2,
    n: int = 29,
    m: int = 29,
    d: int = 6,
    e: int = 5,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    spread: float = 1.5,
) -> Inputs:
    """Queries and keys in a few lumps, so that clusters exist; methods for self-attention alone get m = n."""
    if case is not None and case.method.self_only:
        m = n
    g = torch.Generator().manual_seed(seed + 1)
    lumps = torch.randn(6, d, generator=g, dtype=torch.float64) * spread

    def lumpy(heads: int, length: int) -> Tensor:
        which = torch.randint(6, (b, heads, length), generator=g)
        return lumps[which] + 0.5 * torch.randn(b, heads, length, d, generator=g, dtype=torch.float64)

    v = torch.randn(b, hk, m, e, generator=g, dtype=torch.float64)
    return Inputs(lumpy(h, n).to(dtype), lumpy(hk, m).to(dtype), v.to(dtype))


PADDINGS = ("right", "left", "holes")


def padded(x: Inputs, padding: str, seed: int = 0) -> Inputs:
    """Masks of unequal lengths, on both sides; where n = m the same tokens are hidden as queries and keys."""
    b, n, m = x.q.shape[0], x.q.shape[2], x.k.shape[2]

    def mask(length: int, drop: int) -> Tensor:
        kept = torch.ones(b, length, dtype=torch.bool)
        for row in range(b):
            many = min(drop + 4 * row, length - 1)
            if padding == "right":
                kept[row, length - many :] = False
            elif padding == "left":
                kept[row, :many] = False
            else:
                kept[row, torch.randperm(length, generator=torch.Generator().manual_seed(seed + row))[:many]] = False
        return kept

    key_mask = mask(m, 5)
    return dataclasses.replace(x, key_mask=key_mask, query_mask=key_mask if n == m else mask(n, 3))


def gradients(out: Tensor | tuple[Tensor, ...], x: Inputs) -> tuple[Tensor, ...]:
    """Gradients of a fixed random combination of everything in ``out`` that is finite."""
    g = torch.Generator().manual_seed(7)
    total = torch.zeros((), dtype=torch.float64)
    for part in (out,) if isinstance(out, Tensor) else out:
        weight = torch.randn(part.shape, generator=g, dtype=torch.float64)
        finite = part.detach().isfinite()
        total = total + (torch.where(finite, part, torch.zeros_like(part)).double() * weight).sum()
    found = torch.autograd.grad(total, x.tensors, allow_unused=True)
    return tuple(torch.zeros_like(t) if grad is None else grad for grad, t in zip(found, x.tensors, strict=True))


# ---- the rules of comparison ---------------------------------------------------------------------

_ROOM = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def close(got: Any, wanted: Any, dtype: torch.dtype | None = None) -> None:
    """Equal up to rounding in the coarser of the dtypes (or ``dtype``): same infinities, no NaN anywhere."""
    if isinstance(got, (tuple, list)):
        assert len(got) == len(wanted)
        for one, other in zip(got, wanted, strict=True):
            close(one, other, dtype)
        return
    assert got.shape == wanted.shape, f"shape {tuple(got.shape)}, wanted {tuple(wanted.shape)}"
    room = max(_ROOM[got.dtype], _ROOM[wanted.dtype], _ROOM[dtype or torch.float64])
    got, wanted = got.detach().double(), wanted.detach().double()
    assert not got.isnan().any(), "NaN in the answer"
    infinite = wanted.isinf()
    assert torch.equal(got.isinf(), infinite), "infinities in other places"
    assert torch.equal(got[infinite], wanted[infinite]), "infinities of the other sign"
    got, wanted = got[~infinite], wanted[~infinite]
    if wanted.numel():
        worst = float((got - wanted).abs().max())
        size = max(1.0, float(wanted.abs().max()))
        assert worst <= room * size, f"off by {worst:.3g} where numbers are up to {size:.3g}; room {room:.0e}"


def not_above(low: Tensor, high: Tensor) -> None:
    """low <= high everywhere, up to the same rounding."""
    room = max(_ROOM[low.dtype], _ROOM[high.dtype])
    low, high = low.detach().double(), high.detach().double()
    size = high.abs().clamp(min=1).masked_fill(high.isinf(), 0.0)
    assert (low <= high + room * size).all()


def as_good_as(fast: Tensor, plain: Tensor, truth: Tensor, factor: float = 2.0) -> None:
    """The largest error of ``fast`` against fp64 is at most twice that of ``plain`` (gradients: factor=3)."""
    assert not fast.isnan().any()
    finite = truth.isfinite()
    assert torch.equal(fast.isfinite(), finite)
    if finite.any():
        error, yardstick = (float((x.double() - truth)[finite].abs().max()) for x in (fast.detach(), plain.detach()))
        one_rounding = torch.finfo(fast.dtype).eps * float(truth[finite].abs().max())
        assert error <= factor * max(yardstick, one_rounding), f"error {error:.3g}, plain {yardstick:.3g}"


def same_bits(got: Any, wanted: Any) -> None:
    """Every bit; NaN equals itself."""
    for one, other in zip(*((x,) if isinstance(x, Tensor) else x for x in (got, wanted)), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.isnan(), other.isnan())
        assert torch.equal(one.nan_to_num(), other.nan_to_num()), f"bits differ by up to {(one - other).abs().max()}"
