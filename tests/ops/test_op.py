"""Ops called eagerly, as plain functions or one autograd.Function, and as torch.library ops: the same arithmetic."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import laws
import pytest
import torch
from laws import Case, over
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import clusterattn as ca
from clusterattn.ops._op import op


@op("test_product")
def _product(x: Tensor, y: Tensor, factor: float, kind: str) -> tuple[Tensor, Tensor]:
    return x @ y * factor, (x > 0).long()


@_product.fake
def _(x: Tensor, y: Tensor, factor: float, kind: str) -> tuple[Tensor, Tensor]:
    return x.new_empty((x.shape[0], y.shape[1])), torch.empty_like(x, dtype=torch.int64)


@op("test_product_backward")
def _product_backward(d_out: Tensor, x: Tensor, y: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    return d_out @ y.mT * factor, x.mT @ d_out * factor


@_product_backward.fake
def _(d_out: Tensor, x: Tensor, y: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(y)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.factor = inputs[2]
    ctx.mark_non_differentiable(output[1])


SENT: list[Any] = []  # the gradients that the last backward was sent


def _give_back(ctx: Any, *gradients: Tensor | None) -> Any:
    SENT[:] = gradients
    return () if gradients[0] is None else _product_backward(gradients[0], *ctx.saved_tensors, ctx.factor)


_product.gradient(_give_back, _keep)
_product.flops(lambda x, y, factor, kind: 2 * x[0] * x[1] * y[1])


def leaves(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    x, y = (torch.randn(size, generator=draw, dtype=dtype).requires_grad_() for size in ((3, 4), (4, 5)))
    return x, y


class Seen(TorchDispatchMode):
    """The library's ops that came by."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "clusterattn":
            self.names.append(func._overloadpacket.__name__)
        return func(*args, **kwargs or {})


def test_eager_and_traced_are_the_same_bits() -> None:
    x, y = leaves()
    wanted = _product(x, y, 2.0, "any")[0]
    gradients = torch.autograd.grad(wanted.sum(), (x, y))
    with torch.no_grad():
        assert torch.equal(_product(x, y, 2.0, "any")[0], wanted)
    calls: list[Callable[..., Any]] = [
        lambda x, y: torch.ops.clusterattn.test_product(x, y, 2.0, "any")[0],
        torch.compile(lambda x, y: _product(x, y, 2.0, "any")[0], fullgraph=True, backend="aot_eager"),
        lambda x, y: checkpoint(lambda *two: _product(*two, 2.0, "any")[0], x, y, use_reentrant=False),
    ]
    for call in calls:
        out = call(x, y)
        assert torch.equal(out, wanted)
        for got, one in zip(torch.autograd.grad(out.sum(), (x, y)), gradients, strict=True):
            assert torch.equal(got, one)
    torch.library.opcheck(torch.ops.clusterattn.test_product, (x, y, 2.0, "any"))


def test_whoever_watches_sees_one_operator() -> None:
    x, y = leaves()
    with Seen() as seen:
        _product(x, y, 2.0, "any")[0].sum().backward()
    assert seen.names == ["test_product", "test_product_backward"]
    exported = torch.export.export(Product(), leaves()).graph.nodes
    assert any(node.target is torch.ops.clusterattn.test_product.default for node in exported)
    with FlopCounterMode(display=False) as counter:
        _product(x, y, 2.0, "any")
    assert counter.get_total_flops() == 2 * 3 * 4 * 5


class Product(torch.nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out: Tensor = _product(x, y, 2.0, "any")[0]
        return out


def test_gradients_that_nobody_sent_are_none() -> None:
    x, y = leaves()
    out, _ = _product(x, y, 2.0, "any")
    out.sum().backward()
    assert SENT[0] is not None
    assert SENT[1] is None


def test_autocast_stays_outside() -> None:
    x, y = leaves()
    wanted = _product(x, y, 2.0, "any")[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for out in (_product(x, y, 2.0, "any")[0], torch.ops.clusterattn.test_product(x, y, 2.0, "any")[0]):
            assert torch.equal(out, wanted)


def test_what_has_no_derivative_says_so() -> None:
    x, y = leaves()

    def loss(x: Tensor) -> Tensor:
        out: Tensor = _product(x, y.detach(), 2.0, "any")[0]
        return out.square().sum()

    with pytest.raises(NotImplementedError, match=r"wanted .*reverse mode.* got .*jvp.* try"):
        torch.func.jvp(loss, (x.detach(),), (torch.ones_like(x),))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        loss(torch.autograd.forward_ad.make_dual(x.detach(), torch.ones_like(x)))
    (first,) = torch.autograd.grad(loss(x), x, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"wanted first derivatives .* try"):
        first.sum().backward()
    assert torch.equal(torch.func.grad(loss)(x.detach()), first)


@over(where=lambda case: "-" not in case.name and case.name not in ("exact", "exact-fp64"))
def test_every_method_refuses_forward_mode_and_second_derivatives(case: Case) -> None:
    x = laws.draw(case, dtype=torch.float32)

    def attend(*tensors: Tensor) -> Tensor:
        out: Tensor = ca.attention(*tensors, method=case.method)
        return out

    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(attend, x.tensors, tuple(torch.ones_like(t) for t in x.tensors))
    leaf = x.leaves()
    loss = attend(*leaf.tensors).square().sum()
    found = torch.autograd.grad(loss, leaf.tensors, create_graph=True, allow_unused=True)
    with pytest.raises(NotImplementedError, match="first derivatives"):
        sum(g.sum() for g in found if g is not None).backward()


@over(where=lambda case: "-" not in case.name)
def test_every_method_eager_and_watched_is_the_same_bits(case: Case) -> None:
    x = laws.draw(case, dtype=torch.float32)
    answers = []
    for mode in (contextlib.nullcontext(), Seen()):
        leaf = x.leaves()
        with mode:
            out = ca.attention(*leaf.tensors, method=case.method)
            found = torch.autograd.grad(out.square().sum(), leaf.tensors, allow_unused=True)
        answers.append((out, *(g for g in found if g is not None)))
    for one, two in zip(*answers, strict=True):
        assert torch.equal(one, two)


def test_operations_of_a_call_are_counted() -> None:
    q = torch.randn(1, 2, 96, 16)
    with FlopCounterMode(display=False) as counter:
        ca.attention(q, q, q, method=ca.Clustered(clusters=8, metric="euclid", steps=3))
    found = {str(name): count for name, count in counter.get_flop_counts()["Global"].items()}
    steps, last = 2 * 2 * (2 * 96 * 8 * 16), 2 * (2 * 96 * 8 * 16)  # two trained on, the last one assigns
    assert found["clusterattn.kmeans"] == steps
    assert found["clusterattn.nearest"] == last
    with FlopCounterMode(display=False) as counter:
        ca.attention(q, q, q, method=ca.Smyrf(rounds=2, q_seats=16, k_seats=16))
    assert counter.get_flop_counts()["Global"][torch.ops.clusterattn.bucketed] == 2 * 2 * 2 * 96 * 16 * (16 + 16)


ATTENDING: dict[str, ca.Clustered] = {
    "clustered": ca.Clustered(clusters=8, steps=2),
    "improved": ca.Improved(clusters=8, top=4, steps=2),
    "softmax": ca.Improved(clusters=8, top=4, steps=2, mass="softmax"),
    "refined": ca.Refined(clusters=8, top=4, parts=1, slope=False, steps=2),
    "parts": ca.Refined(clusters=8, top=4, parts=6, slope=False, steps=2),
    "slope": ca.Refined(clusters=8, top=0, parts=3, slope=True, steps=2),
    "slope of many": ca.Refined(clusters=80, top=4, parts=1, slope=True, steps=2),
}
ATTEND = tuple(getattr(torch.ops.clusterattn, name) for name in ("coarse", "fine", "near_and_far"))


def counted(counter: FlopCounterMode, ops: tuple[Any, ...]) -> int:
    found = counter.get_flop_counts()["Global"]
    return sum(found.get(each, 0) for each in ops)


def attending_cost(method: ca.Clustered, *shape: int, group: int = 1) -> int:
    """What a method's cost holds beside the grouping."""
    filled = method.at(*shape, group=group)
    return filled.cost(*shape, group=group) - filled.grouping_cost(*shape, group=group)


@pytest.mark.parametrize("name", ATTENDING)
def test_what_attends_is_counted_as_its_cost_says(name: str) -> None:
    method = ATTENDING[name]
    q, k, v = (torch.randn(2, heads, rows, dim) for heads, rows, dim in ((4, 96, 16), (2, 130, 16), (2, 130, 24)))
    with FlopCounterMode(display=False) as counter:
        ca.attention(q, k, v, method=method)
    assert counted(counter, ATTEND) == 2 * 2 * 4 * attending_cost(method, 96, 130, 16, 24, group=2)


def test_what_attends_in_blocks_is_counted_block_by_block() -> None:
    """Centroids see the keys before their block alone."""
    method = ca.Clustered(clusters=4, steps=2, block=32)
    q = torch.randn(1, 1, 96, 16)
    with FlopCounterMode(display=False) as counter:
        ca.attention(q, q, q, method=method, causal=True)
    tangent = 16  # a block's answer is merged by its weight, which needs the mean key
    assert counted(counter, ATTEND) == 2 * 4 * (32 + 64) * (16 + 16 + tangent)


@pytest.mark.parametrize("name", ["improved", "parts", "slope"])
def test_the_kernels_op_counts_as_the_definition_does(name: str) -> None:
    method = ATTENDING[name]
    mass = ("softmax", "tangent", "cluster").index(method.mass)
    b, h, n, m, d, e, c = 1, 2, 96, 130, 16, 24, method.clusters
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        q, cs, k, v = (torch.empty(b, h, *size) for size in ((n, d), (c, d), (m, d), (m, e)))
        whole = torch.empty(b, h, n, dtype=torch.int64)
        pi = torch.empty(b, h, c) if method.slope else None
        given = (None, whole, whole, whole, *(None,) * 4, pi, None)
        settings = (0.25, method.top, 0, 0, 0, method.parts, mass, False, "triton")
        q.requires_grad_()
        out, *_ = torch.ops.clusterattn.near_and_far(q, cs, k, v, *given, *settings)
        out.sum().backward()
    attending = attending_cost(method, n, m, d, e)
    assert counted(counter, ATTEND) == 2 * h * attending
    backward = counted(counter, (torch.ops.clusterattn.near_and_far_backward,))
    assert 2 * 2 * h * attending <= backward <= 2.5 * 2 * h * attending  # as for exact attention: 5 products for 2


@pytest.mark.parametrize("name", ["improved", "slope"])
def test_backward_is_counted_too(name: str) -> None:
    q = torch.randn(1, 2, 96, 16, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        ca.attention(q, q, q, method=ATTENDING[name]).sum().backward()
    back = tuple(getattr(torch.ops.clusterattn, f"{each}_backward") for each in ("coarse", "fine"))
    forward = counted(counter, ATTEND)
    assert 2 * forward <= counted(counter, back) <= 2.5 * forward
