"""Attention over shares of a sequence: what one device answers, whoever holds what."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
from ranks import run
from torch import Tensor

import clusterattn as ca

FEW = {"clusters": 7, "steps": 3}
METHODS = {
    "clustered": ca.Clustered(bits=15, **FEW),
    "clustered, far starts": ca.Clustered(bits=15, start="far", sample=40, bias=True, **FEW),
    "improved": ca.Improved(top=6, bits=15, sample=50, **FEW),
    "improved, softmax": ca.Improved(top=6, metric="euclid", mass="softmax", **FEW),
    "refined": ca.Refined(top=6, parts=5, slope=True, sample=60, start="random", **FEW),
    "refined, parts from starts": ca.Refined(clusters=64, top=6, parts=5, slope=True, steps=2, start="random"),
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
        torch.randn(2, *shape, generator=draw, dtype=dtype) for shape in ((h, n, 8), (hk, m, 8), (hk, m, 5), (h, n, 5))
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


def compare(found: list[dict[str, list[Tensor]]], cases: dict[str, Any], tolerance: float = 1e-10) -> None:
    """What the ranks found, side by side, with what one process answers."""
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
    compare(run(many, 3, cases), cases)


@pytest.mark.parametrize("world", [1, 5])
def test_any_number_of_ranks(world: int) -> None:
    """Some of which hold no queries, no keys or nothing."""
    lengths = ([41], [77]) if world == 1 else ([20, 0, 1, 0, 20], [0, 30, 1, 0, 46])
    cases = {name: case(METHODS[name], lengths, (4, 2)) for name in ("clustered", "improved", "refined")}
    cases["refined, masks"] = case(METHODS["refined"], lengths, **masks((lengths[0], [0, *lengths[1]])))
    compare(run(many, world, cases), cases)


# ---------------------------------------------------------------------------------------------------- the protocol


REFINED = METHODS["refined"]


def two_shares() -> dict[str, Any]:
    lengths = ([50, 45], [30, 65])
    return {name: case(METHODS[name], lengths) for name in ("clustered", "improved", "refined")}


def complaint(call: Any) -> str:
    try:
        call()
    except (ValueError, TypeError) as error:
        return str(error)
    return "no complaint"


def protocol(rank: int, world: int) -> dict[str, Any]:
    """Everything that needs two ranks and is no equality in fp64, in one go: starting processes takes seconds."""
    found: dict[str, Any] = {"answers": many(rank, world, two_shares())}
    call = ca.parallel.attention
    q, k, v, _ = (x.float() for x in inputs(([40], [40])))
    found["causal"] = complaint(lambda: call(q, k, v, causal=True))
    found["method"] = complaint(lambda: call(q, k, v, method="smyrf"))
    found["other method"] = complaint(lambda: call(q, k, v, method=("improved", "clustered")[rank]))
    found["other width"] = complaint(lambda: call(q, k, v[..., : 4 + rank]))
    found["other dtype"] = complaint(lambda: call(*(x.to((torch.float32, torch.float64)[rank]) for x in (q, k, v))))
    one_head, one_row = [x[:, : 2 - rank] for x in (q, k, v)], [x[: 2 - rank] for x in (q, k, v)]
    less, learns = [q[..., : 8 - rank], k[..., : 8 - rank], v], q.clone().requires_grad_(rank == 0)
    found["other calls"] = {
        "query heads": complaint(lambda: call(*one_head)),
        "batch": complaint(lambda: call(*one_row)),
        "d": complaint(lambda: call(*less)),
        "scale": complaint(lambda: call(q, k, v, scale=0.5 + rank)),
        "seed": complaint(lambda: call(q, k, v, seed=rank)),
        "return_lse": complaint(lambda: call(q, k, v, return_lse=rank == 0)),
        "which of q, k and v want gradients": complaint(lambda: call(learns, k, v)),
        "backend": complaint(lambda: call(q, k, v, backend=("auto", "reference")[rank])),
        "number of streams": complaint(lambda: call(q, k, v, query_streams=[[40], [20, 20]][rank])),
    }
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (world,))
    square = torch.distributed.device_mesh.init_device_mesh("cpu", (world, 1))
    found["square mesh"] = complaint(lambda: call(q, k, v, group=square))
    plain = call(q, k, v, method=REFINED)
    found["mesh"] = torch.equal(call(q, k, v, method=REFINED, group=mesh), plain)
    found["unchecked"] = torch.equal(call(q, k, v, method=REFINED, check=False), plain)
    found["none real"] = call(q, k, v, method=REFINED, key_mask=torch.zeros(2, 40, dtype=torch.bool)).abs().max().item()
    found["no keys"] = call(q, k[:, :, :0], v[:, :, :0], method=REFINED).abs().max().item()
    found["empty batch"] = call(q[:0], k[:0], v[:0]).shape
    by_kernels, by_torch = (call(q, k, v, method=METHODS["improved"], backend=one) for one in ("triton", "reference"))
    found["kernels"] = (by_kernels - by_torch).abs().max().item()
    half = call(*(x.bfloat16() for x in (q, k, v)), method=REFINED)
    found["half"] = (half.dtype, (half.float() - plain).abs().mean().item() / plain.abs().mean().item())
    for length in (150, 400):
        traffic = ca.parallel.Traffic()
        q, k, v, up = (x.float() for x in inputs(([length], [length])))
        answers(call, q, k, v, up, method=REFINED, traffic=traffic)
        found[length] = traffic
    return found


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return run(protocol, 2)


def test_two_ranks_answer_as_one(two: list[dict[str, Any]]) -> None:
    compare([found["answers"] for found in two], two_shares())


def test_kernels_answer_as_torch_does(two: list[dict[str, Any]]) -> None:
    assert all(found["kernels"] < 1e-5 for found in two)


def test_refusals_name_what_is_wrong(two: list[dict[str, Any]]) -> None:
    for found in two:
        assert "causal=False" in found["causal"]
        assert "clustered family" in found["method"]
        assert "the same method on every rank" in found["other method"]
        assert "the same e on every rank" in found["other width"]
        assert "the same dtype on every rank" in found["other dtype"]
        assert "rank 1" in found["other method"]
        for name, said in found["other calls"].items():
            assert f"the same {name} on every rank" in said, said
        assert "a DeviceMesh of one dimension" in found["square mesh"]


def test_meshes_and_unchecked_calls_answer_the_same(two: list[dict[str, Any]]) -> None:
    assert all(found["mesh"] and found["unchecked"] for found in two)


def test_nothing_real_answers_zero(two: list[dict[str, Any]]) -> None:
    assert [found["none real"] for found in two] == [0.0, 0.0]
    assert [found["no keys"] for found in two] == [0.0, 0.0]
    assert all(found["empty batch"] == (0, 2, 40, 5) for found in two)


def test_half_precision(two: list[dict[str, Any]]) -> None:
    for found in two:
        dtype, error = found["half"]
        assert dtype == torch.bfloat16
        assert error < 0.05


def test_traffic_does_not_grow_with_the_length(two: list[dict[str, Any]]) -> None:
    """For given sizes, forward and backward; and near keys and far parts are most of it."""
    for found in two:
        short, long = found[150], found[400]
        assert short.by_what == long.by_what
        assert (short.sent, short.calls) == (long.sent, long.calls)
        b, h, c, t, p, d, e = 2, 2, 7, 6, 5, 8, 5
        near, far = b * h * c * t * (d + e) * 4, b * h * c * p * (1 + d + e) * 4  # two ranks: each number once
        assert short.by_what["near keys and values"] == short.by_what["near keys and values, backward"] == near
        assert short.by_what["far parts"] == short.by_what["far parts, backward"] == far


def one_dies(rank: int, world: int, when: str) -> str:
    q, k, v, _ = (x.float().requires_grad_() for x in inputs(([40], [40])))
    if rank == 1 and when == "before the call":
        os._exit(3)
    out = ca.parallel.attention(q, k, v, method=REFINED)
    if rank == 1:
        os._exit(3)
    out.sum().backward()
    return "answered"


@pytest.mark.parametrize("when", ["before the call", "before backward"])
def test_a_rank_that_dies_is_an_error_on_the_others(when: str) -> None:
    found = run(one_dies, 2, when, timeout=5.0, check=False)
    assert found[1] is None
    assert isinstance(found[0], RuntimeError)


def one_never_comes(rank: int, world: int, limit: float) -> float:
    """How long the other one waits for it."""
    q, k, v, _ = (x.float() for x in inputs(([40], [40])))
    started = time.monotonic()
    if rank == 1:
        time.sleep(4 * limit)
    else:
        with pytest.raises(RuntimeError):
            ca.parallel.attention(q, k, v, method=REFINED)
    return time.monotonic() - started


def test_nobody_waits_for_a_rank_that_never_comes() -> None:
    """Longer than the timeout of the group, that is. (What comes after, the barrier of this test, fails as well.)"""
    limit = 3.0
    waited = run(one_never_comes, 2, limit, timeout=limit, check=False)[0]
    assert limit / 2 < waited < 3 * limit


def test_a_call_without_a_process_group_is_refused() -> None:
    q, k, v, _ = inputs(([9], [9]))
    with pytest.raises(ValueError, match="a process group"):
        ca.parallel.attention(q, k, v)
