"""The race against exact attention: no time without a proof, and one failure takes no other row with it."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import clusterattn as ca
from clusterattn.measure import bench as bench_module
from clusterattn.measure import embedded, mixture
from clusterattn.measure import race as race_module
from clusterattn.measure.bench import FACTORS, PASSES, RoundedProducts, _fault, bench, direction, pass_of
from clusterattn.measure.race import Race
from clusterattn.measure.speed import captured, copy_speed, first_line, timed

ON_A_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs need a GPU")
SHAPE = (2, 2, 48, 8)
FEW = ca.Clustered(clusters=4, steps=2)


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> Iterator[None]:
    """Measuring memory collects garbage first; torch and the tests themselves are none."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


# ---------------------------------------------------------------- proof


@pytest.mark.parametrize("spec", ["smyrf:q_seats=32,k_seats=32", "refined:clusters=8,top=8"])
def test_rounded_products_reach_into_our_own_operators_forward_and_backward(spec: str) -> None:
    sample = mixture(1, 2, 256, 32).to("cpu", torch.bfloat16)
    given = ca.groups(sample.q.double(), sample.k.double(), method=spec, backend="reference")

    def outcome(dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in (sample.q, sample.k, sample.v)]
        out = ca.attention(*leaves, method=spec, groups=given, backend="reference")
        return [out.detach(), *torch.autograd.grad(out, leaves, direction(sample).to(dtype))]

    plain, wide = outcome(torch.float32), outcome(torch.float64)
    with RoundedProducts(torch.bfloat16):
        rounded = outcome(torch.float32)
    for exact, usual, coarser in zip(wide, plain, rounded, strict=True):
        few, many = (float((x - exact).norm() / exact.norm()) for x in (usual, coarser))
        assert few < 1e-4  # fp32 all along
        assert 1e-4 < many < 2e-2  # bf16 in the products, and in nothing else


def test_rounded_products_round_the_factors_and_the_product() -> None:
    x, y = (torch.randn(1, 3, 3, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    with RoundedProducts(torch.bfloat16):
        found = torch.bmm(x, y)
        added = torch.baddbmm(x, x, y)
        in_place = torch.clone(x).baddbmm_(x, y)
    right = torch.bmm(x.bfloat16().float(), y.bfloat16().float())
    torch.testing.assert_close(found, right.bfloat16().float(), rtol=0, atol=0)
    torch.testing.assert_close(added, (x + right).bfloat16().float(), rtol=0, atol=0)
    torch.testing.assert_close(in_place, added, rtol=0, atol=0)
    for name, at in FACTORS.items():
        assert hasattr(torch.ops.aten, name)
        assert max(at) < len(getattr(torch.ops.aten, name).default._schema.arguments)


@pytest.mark.parametrize("spec", ["smyrf:q_seats=16,k_seats=16", "refined:clusters=8,top=8", "reformer:chunk=16"])
def test_a_kernel_with_products_in_half_precision_is_right(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a kernel, made of the reference: its gradients err more than the plain reference's, which is no fault."""
    reference = bench_module.attention

    def kernel(*args: Any, backend: str, **options: Any) -> torch.Tensor:
        if backend == "reference":
            return reference(*args, backend=backend, **options)
        with RoundedProducts(torch.bfloat16):
            return reference(*args, backend="reference", **options)

    monkeypatch.setattr(bench_module, "attention", kernel)
    sample = mixture(1, 2, 128, 32).to("cpu", torch.bfloat16)
    assert _fault(sample, ca.method(spec), False, True, 0) is None


def test_a_small_error_everywhere_is_seen_by_the_l2_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 % is less than 8 roundings of the largest number in bf16, and still wrong."""
    right = bench_module.attention

    def wrong(*args: Any, backend: str, **options: Any) -> torch.Tensor:
        out: torch.Tensor = right(*args, backend=backend, **options)
        return out if backend == "reference" else out * 1.02

    monkeypatch.setattr(bench_module, "attention", wrong)
    sample = mixture(1, 2, 128, 32).to("cpu", torch.bfloat16)
    said = _fault(sample, FEW, False, False, 0)
    assert said is not None
    assert said.startswith("out is off by 0.0198 in l2")


# ---------------------------------------------------------------- race


def test_a_race_on_the_cpu_has_every_figure() -> None:
    race = Race("cpu", torch.float32, seconds=0.001, commit="0123456789ab")
    rows = list(race.rows(FEW, SHAPE))
    assert [(row["method"], row["pass"]) for row in rows] == [
        (name, which) for which in PASSES for name in ("sdpa", str(FEW))
    ]
    exact, ours = rows[0], rows[1]
    assert exact["speedup"] == exact["memory_share"] == 1
    assert ours["speedup"] == pytest.approx(exact["seconds"] / ours["seconds"])
    assert ours["floor_seconds"] == pytest.approx(4 * 2 * 2 * 48 * 8 * 4 / race.bytes_per_second)
    assert rows[3]["floor_seconds"] == pytest.approx(2 * ours["floor_seconds"])  # with the gradients
    assert rows[3]["memory_of_size"] == rows[3]["memory_bytes"] / (2 * 4 * 2 * 2 * 48 * 8 * 4)
    assert 0 < ours["error"] == rows[3]["error"]
    assert ours["checked_lengths"] == [48, 48]
    assert ours["same_bits"] is True
    assert ours["environment"]["commit"] == "0123456789ab"
    again = list(race.rows(ca.Local(window=4), SHAPE))
    assert [row["method"] for row in again] == ["local:window=4"] * 2, "exact attention is timed once for a shape"
    json.dumps(rows)


def test_a_race_on_a_real_sample_reads_it_and_no_mixture() -> None:
    data = embedded()
    race = Race("cpu", torch.float32, seconds=0.01, data=data)
    rows = list(race.rows(ca.Local(window=8), (2, 4, 48, 32), passes=["forward"], memory=False))
    assert {row["data"] for row in rows} == {data.source}
    assert race._data((2, 4, 48, 32)).shape == (2, 4, 48, 48, 32, 32)


def test_the_error_is_that_of_the_whole_answer_where_it_is_short() -> None:
    from clusterattn.measure import exact_answer, relative_error

    for causal in (False, True):
        method = ca.Clustered(clusters=4, steps=2, block=16)
        row = [*Race("cpu", torch.float32, causal=causal, seconds=0.001).rows(method, SHAPE, passes=PASSES[:1])][-1]
        sample = mixture(*SHAPE)
        out = ca.attention(sample.q, sample.k, sample.v, method=method, causal=causal)
        exact = exact_answer(sample.q, sample.k, sample.v, causal=causal)
        assert row["error"] == pytest.approx(relative_error(out, exact), rel=1e-4)


@pytest.mark.parametrize("backward", [False, True], ids=["out", "gradients"])
def test_a_wrong_kernel_gets_no_time(backward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Off(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, out: torch.Tensor) -> torch.Tensor:
            return out.clone() if backward else out * 1.1

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * 1.1

    right = bench_module.attention

    def wrong(*args: Any, backend: str = "auto", **options: Any) -> torch.Tensor:
        out: torch.Tensor = right(*args, backend=backend, **options)
        return out if backend == "reference" else Off.apply(out)

    monkeypatch.setattr(bench_module, "attention", wrong)
    rows = [row for row in Race("cpu", torch.float32, seconds=0.001).rows(FEW, SHAPE) if row["method"] != "sdpa"]
    failed = [row for row in rows if "failed" in row]
    assert [row["pass"] for row in failed] == list(PASSES[1:] if backward else PASSES)
    for row in failed:
        assert row["failed"].startswith(f"wrong: {'dq' if backward else 'out'} is off by ")
        assert not {"seconds", "eager_seconds", "speedup", "error"} & set(row)


def test_a_kernel_that_is_wrong_only_at_length_is_found_there(monkeypatch: pytest.MonkeyPatch) -> None:
    right = bench_module.attention

    def wrong(q: torch.Tensor, *args: Any, backend: str = "auto", **options: Any) -> torch.Tensor:
        out: torch.Tensor = right(q, *args, backend=backend, **options)
        return out * (2 if backend == "auto" and q.shape[2] > 32 else 1)

    monkeypatch.setattr(bench_module, "attention", wrong)
    monkeypatch.setattr(bench_module, "CHECKED_LENGTH", 32)
    *_, row = Race("cpu", torch.float32, seconds=0.001).rows(FEW, SHAPE, passes=PASSES[:1])
    assert row["failed"].startswith("wrong: out is off by 1")
    assert "from the reference" in row["failed"]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("tried to have 9 GiB\nand more"), RuntimeError("no luck")])
def test_a_row_that_fails_leaves_the_others(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    right = bench_module.pass_of

    def fails(sample: Any, method: Any, **options: Any) -> Any:
        if options["backward"]:
            raise error
        return right(sample, method, **options)

    monkeypatch.setattr(bench_module, "pass_of", fails)
    race = Race("cpu", torch.float32, seconds=0.001)
    first, second = (row for row in race.rows(FEW, SHAPE) if row["method"] != "sdpa")
    assert "failed" not in first
    assert first_line(error) in second["failed"]
    assert "\n" not in second["failed"]
    assert ("out of memory" in second["failed"]) == isinstance(error, torch.OutOfMemoryError)
    assert race.alive()


def test_without_a_peer_there_is_no_ratio() -> None:
    (row,) = Race("cpu", torch.float32, seconds=0.001).rows(FEW, SHAPE, passes=PASSES[1:], peer=False)
    assert row["seconds"] > 0
    assert "speedup" not in row


def test_clocks() -> None:
    calls = []
    clock = timed(lambda: calls.append(1), seconds=0.0)
    assert clock.seconds == clock.eager == clock.host > 0
    assert len(calls) == clock.repetitions >= 2
    assert clock.replay is None
    assert copy_speed("cpu", 2**20) > 1e6


# ---------------------------------------------------------------- on a GPU


@ON_A_GPU
@pytest.mark.parametrize("backward", [False, True])
def test_a_graph_replays_what_the_call_gave(backward: bool) -> None:
    sample = mixture(2, 2, 256, 64).to("cuda", torch.bfloat16)
    run = pass_of(sample, FEW, backward=backward)
    eager = race_module._tensors(run())
    replay = captured(run)
    for x in race_module._tensors(replay.answer):
        x.detach().fill_(float("nan"))
    for right, found in zip(eager, race_module._tensors(replay()), strict=True):
        assert torch.equal(right, found)


@ON_A_GPU
def test_what_waits_for_the_gpu_is_timed_eagerly_and_does_no_harm() -> None:
    x = torch.ones(8, device="cuda")
    clock = timed(lambda: float(x.sum()), "cuda", seconds=0.01)
    assert clock.replay is None
    assert clock.why_eager
    assert timed(lambda: x + 1, "cuda", seconds=0.01).replay is not None


@ON_A_GPU
def test_the_host_does_not_wait_for_the_device() -> None:
    x = torch.ones(8192, 8192, device="cuda")

    def run() -> torch.Tensor:
        return x @ x @ x @ x

    run()
    clock = timed(run, "cuda", seconds=0.05)
    assert clock.host < clock.eager / 4


@ON_A_GPU
def test_the_bench_on_a_gpu_fills_the_table() -> None:
    rows = list(bench([FEW, ca.Refined(clusters=8)], lengths=[512], batch=2, dtype=torch.bfloat16, device="cuda"))
    assert not [row["failed"] for row in rows if "failed" in row]
    assert {row["timed_as"] for row in rows} == {"cuda graph"}
    assert all(row["same_bits"] for row in rows if row["method"] != "sdpa")
