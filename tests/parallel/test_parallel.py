"""Attention over shares of a sequence: what one device answers, whoever holds what."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import clusterattn as ca
from tests.parallel.ranks import run

FEW = {"clusters": 7, "steps": 3}
METHODS = {
    "clustered": ca.Clustered(bits=15, **FEW),
    "clustered, far starts": ca.Clustered(bits=15, start="far", sample=40, bias=True, **FEW),
    "improved": ca.Improved(top=6, bits=15, sample=50, **FEW),
    "improved, softmax": ca.Improved(top=6, metric="euclid", mass="softmax", **FEW),
    "refined": ca.Refined(top=6, parts=5, slope=True, sample=60, start="random", **FEW),
    "refined, few directions": ca.Refined(top=5, parts=1, slope=False, rank=6, start="far", **FEW),
    "refined, parts alone": ca.Refined(top=0, parts=5, slope=True, start="far", sample=30, **FEW),
    "refined, every key near": ca.Refined(top=500, parts=3, slope=True, start="far", **FEW),
    "refined, a part for each": ca.Refined(top=3, parts=500, slope=True, start="far", **FEW),
    "refined, a cluster for each": ca.Refined(clusters=500, top=3, parts=4, slope=True, steps=2, start="far"),
    "refined, open sizes": ca.Refined(),
}
# lengths of the shares of queries and keys
SELF = ([60, 31, 29], [60, 31, 29])
CROSS = ([25, 0, 16], [3, 100, 50])


def inputs(lengths: tuple[list[int], list[int]], heads: tuple[int, int] = (2, 2), dtype: Any = torch.float64) -> Any:
    n, m, (h, hk) = sum(lengths[0]), sum(lengths[1]), heads
    draw = torch.Generator().manual_seed(3)
    q, k, v, up = (
        torch.randn(2, *shape, generator=draw, dtype=dtype)
        for shape in ((h, n, 8), (hk, m, 8), (hk, m, 5), (h, n, 5))
    )
    return 2 * q + 1, 2 * k - 1, v, up


def answers(call: Any, q: Tensor, k: Tensor, v: Tensor, up: Tensor, **options: Any) -> list[Tensor]:
    """out, lse and the gradients of a loss that reads both."""
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    out, lse = call(q, k, v, return_lse=True, **options)
    seen = torch.where(lse > float("-inf"), lse, 0.0)
    ((out * up).sum() + (seen.sin() * up[..., 0]).sum()).backward()
    return [out.detach(), lse.detach(), q.grad, k.grad, v.grad]


def shared_out(rank: int, world: int, case: dict[str, Any]) -> list[Tensor]:
    """What this rank answers about its share."""
    lengths, options = case["lengths"], dict(case["options"])
    at = [slice(sum(each[:rank]), sum(each[: rank + 1])) for each in lengths]
    q, k, v, up = case["inputs"]
    for name, which in (("query_mask", 0), ("key_mask", 1)):
        if name in options:
            options[name] = options[name][:, at[which]]
    return answers(
        ca.parallel.attention, q[:, :, at[0]], k[:, :, at[1]], v[:, :, at[1]], up[:, :, at[0]],
        method=case["method"], **options,
    )  # fmt: skip


def many(rank: int, world: int, cases: dict[str, Any]) -> dict[str, list[Tensor]]:
    return {name: shared_out(rank, world, case) for name, case in cases.items()}


def compare(cases: dict[str, Any], world: int, tolerance: float) -> None:
    found = run(many, world, cases)
    for name, case in cases.items():
        q, k, v, up = case["inputs"]
        wanted = answers(ca.attention, q, k, v, up, method=case["method"], **case["options"])
        for part, one in enumerate(wanted):
            whole = torch.cat([each[name][part] for each in found], 2)
            assert whole.shape == one.shape
            error = torch.where(whole == one, 0.0, (whole - one).abs()).max().item()
            assert error <= tolerance * max(1.0, one[one.abs() < float("inf")].abs().max().item()), (name, part, error)


def case(method: ca.Method, lengths: Any = SELF, heads: tuple[int, int] = (2, 2), **options: Any) -> dict[str, Any]:
    return {"method": method, "lengths": lengths, "inputs": inputs(lengths, heads), "options": options}


def masks(lengths: Any) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(5)
    queries, keys = (torch.rand(2, sum(each), generator=draw) < 0.7 for each in lengths)
    keys[:, : lengths[1][0]] = False  # the first rank has nothing real
    return {"query_mask": queries, "key_mask": keys}


def test_three_ranks_answer_as_one() -> None:
    """Out, lse and gradients of every method, uneven shares."""
    cases = {name: case(method) for name, method in METHODS.items()}
    cases |= {f"{name}, masks": case(method, **masks(SELF)) for name, method in METHODS.items()}
    cases |= {
        f"{name}, cross, grouped heads": case(method, CROSS, (4, 2), scale=0.5, seed=7)
        for name, method in METHODS.items()
    }
    blind = masks(SELF)
    blind["key_mask"][1] = False
    cases["nothing to see"] = case(METHODS["refined"], **blind)
    compare(cases, 3, 1e-10)


def test_two_ranks_answer_as_one() -> None:
    lengths = ([50, 45], [30, 65])
    compare({name: case(method, lengths) for name, method in METHODS.items()}, 2, 1e-10)
