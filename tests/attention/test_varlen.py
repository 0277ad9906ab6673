"""Packed sequences: a row of documents answers as a loop over them, whatever the method."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import hypothesis
import hypothesis.strategies as st
import laws
import pytest
import torch
from laws import Case, Inputs, close, gradients, kinds, over, same_bits
from torch import Tensor

import clusterattn as ca
from clusterattn import _documents
from clusterattn.methods.budgets import Shape
from clusterattn.methods.exact import packs

LENGTHS = [5, 12, 1, 0, 12, 3, 70, 64, 78]  # which share a batch or two
REFINED = laws.BY_NAME["refined-both"].method
CAUSAL = laws.BY_NAME["refined"].method


def starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def packed(n: int, m: int | None = None, dtype: torch.dtype = torch.float64, seed: int = 0) -> Inputs:
    """q (n 4 6), k (m 2 6), v (m 2 5), as leaves."""
    x = laws.draw(b=1, n=n, m=n if m is None else m, dtype=dtype, seed=seed)
    return Inputs(*(t[0].transpose(0, 1) for t in x.tensors)).leaves()


def spans(of_queries: Tensor, of_keys: Tensor) -> Iterator[tuple[slice, slice]]:
    for at in range(len(of_queries) - 1):
        yield slice(*of_queries[at : at + 2].tolist()), slice(*of_keys[at : at + 2].tolist())


def loop(x: Inputs, of_queries: Tensor, of_keys: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    """What ``ca.attention`` answers document by document."""
    outs, weights = [], []
    for queries, keys in spans(of_queries, of_queries if of_keys is None else of_keys):
        alone = x.q[queries], x.k[keys], x.v[keys]
        out, lse = ca.attention(*(t.transpose(0, 1).unsqueeze(0) for t in alone), return_lse=True, **options)
        outs.append(out[0].transpose(0, 1))
        weights.append(lse[0])
    return torch.cat(outs), torch.cat(weights, 1)


def agree(x: Inputs, of_queries: Tensor, of_keys: Tensor | None = None, **options: Any) -> None:
    """Forward, log-weights and gradients."""
    got = ca.varlen_attention(*x.tensors, of_queries, of_keys, return_lse=True, **options)
    wanted = loop(x, of_queries, of_keys, **options)
    close(got, wanted)
    close(gradients(got, x), gradients(wanted, x))
    close(ca.varlen_attention(*x.tensors, of_queries, of_keys, **options), wanted[0])


# ---- the loop ------------------------------------------------------------------------------------


@over()
def test_packed_documents_answer_as_a_loop_over_them(case: Case) -> None:
    x = packed(sum(LENGTHS))
    for causal in kinds(case):
        agree(x, starts(LENGTHS), method=case.method, causal=causal)


@over(laws.CROSS)
def test_queries_and_keys_of_other_lengths(case: Case) -> None:
    """Documents without keys, without queries, with more of either."""
    n, m = [5, 12, 0, 7, 30, 66, 9], [8, 12, 4, 0, 11, 90, 6]
    x = packed(sum(n), sum(m))
    for causal in kinds(case):
        agree(x, starts(n), starts(m), method=case.method, causal=causal)


@hypothesis.given(
    st.lists(st.tuples(st.integers(0, 90), st.integers(0, 90)), min_size=1, max_size=7),
    st.sampled_from(["refined-both", "refined", "improved", "smyrf", "local", "exact"]),
    st.booleans(),
)
def test_any_lengths(sizes: list[tuple[int, int]], name: str, causal: bool) -> None:
    method = laws.BY_NAME[name].method
    n, m = ([each[side] for each in sizes] for side in (0, 1))
    agree(packed(sum(n), sum(m)), starts(n), starts(m), method=method, causal=causal and method.causality != "no")


def test_exact_documents_answer_to_the_bit() -> None:
    """They are never padded, so the arithmetic is the same."""
    x = packed(sum(LENGTHS), dtype=torch.float32)
    for causal in (False, True):
        got = ca.varlen_attention(*x.tensors, starts(LENGTHS), method="exact", causal=causal, return_lse=True)
        wanted = loop(x, starts(LENGTHS), method="exact", causal=causal)
        same_bits(got, wanted)
        same_bits(gradients(got, x), gradients(wanted, x))


@over()
def test_documents_of_equal_length_are_a_batch_to_the_bit(case: Case) -> None:
    x = packed(4 * 23, dtype=torch.float32)
    batch = Inputs(*(t.detach().unflatten(0, (4, 23)).transpose(1, 2) for t in x.tensors)).leaves()
    for causal in kinds(case):
        options: dict[str, Any] = {"method": case.method, "causal": causal, "return_lse": True}
        got = ca.varlen_attention(*x.tensors, starts([23] * 4), **options)
        out, lse = ca.attention(*batch.tensors, **options)
        wanted = out.transpose(1, 2).flatten(0, 1), lse.transpose(0, 1).flatten(1)
        same_bits(got, wanted)
        grads = [grad.transpose(1, 2).flatten(0, 1) for grad in gradients(wanted, batch)]
        same_bits(gradients(got, x), grads)


@pytest.mark.parametrize("name", ["refined-both", "improved", "smyrf"])
def test_64_documents_answer_to_the_bit_where_the_arithmetic_is_the_same(name: str) -> None:
    """10 to 8 000 tokens: those that share a batch with none but their equals are not padded, and answer and learn in
    the bits of a loop. (Rows are of 64 bytes: a product's bits may depend on where in a cache line its rows begin.)"""
    lengths = [round(10 * 800 ** (step / 15)) for step in range(16)] * 4
    lengths = [lengths[i] for i in torch.randperm(64, generator=torch.Generator().manual_seed(0))]
    x = laws.draw(b=1, h=1, hk=1, n=sum(lengths), m=sum(lengths), d=16, e=16, dtype=torch.float32)
    x = Inputs(*(t[0].transpose(0, 1) for t in x.tensors)).leaves()
    method, at = laws.BY_NAME[name].method, starts(lengths)
    got = ca.varlen_attention(*x.tensors, at, method=method, return_lse=True)
    wanted = loop(x, at, method=method)
    grads = [*zip(gradients(got, x), gradients(wanted, x), strict=True)]
    close(got, wanted)
    documents = _documents.Documents(tuple(lengths), tuple(lengths))
    batches = _documents.merged(documents, _documents.alike(documents), False, x.q.transpose(0, 1))
    same = {i for batch in batches if len({lengths[i] for i in batch}) == 1 for i in batch}
    assert 24 <= len(same) < 64
    for i in same:
        tokens = slice(*at[i : i + 2].tolist())
        same_bits((got[0][tokens], got[1][:, tokens]), (wanted[0][tokens], wanted[1][:, tokens]))
        for one, other in grads:
            same_bits(one[tokens], other[tokens])


def test_sizes_that_are_left_open_come_from_the_longest() -> None:
    lengths = [40, 300, 9]
    x = packed(sum(lengths))
    for causal in (False, True):
        sized = ca.Refined().at(300, 300, 6, 5, causal=causal, group=2)
        got = ca.varlen_attention(*x.tensors, starts(lengths), method="refined", causal=causal, return_lse=True)
        close(got, loop(x, starts(lengths), method=sized, causal=causal))


def test_auto_answers_short_documents_exactly_and_long_ones_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(self: ca.Auto, device: Any, dtype: Any, rows: int, shape: Shape) -> Any:
        return self.refined(shape) if shape.n >= 70 else ca.Exact()

    monkeypatch.setattr(ca.Auto, "choose", choose)
    x, at = packed(sum(LENGTHS)), starts(LENGTHS)
    got = ca.varlen_attention(*x.tensors, at, return_lse=True)
    for method, chosen in ((ca.Exact(), lambda n: n < 70), (ca.Refined().at(78, 78, 6, 5, group=2), lambda n: n >= 70)):
        wanted = loop(x, at, method=method)
        mine = torch.tensor([chosen(n) for n in LENGTHS for _ in range(n)])
        close((got[0][mine], got[1][:, mine]), (wanted[0][mine], wanted[1][:, mine]))
    assert not torch.allclose(got[0], loop(x, at, method="exact")[0])


def test_the_default_is_exact_where_that_is_faster() -> None:
    x = packed(30, dtype=torch.float32)
    at = starts([10, 20])
    same_bits(ca.varlen_attention(*x.tensors, at), ca.varlen_attention(*x.tensors, at, method="exact"))


@pytest.mark.parametrize("name", ["refined-both", "smyrf"])
def test_kernels_serve_packed_documents(name: str) -> None:
    method, lengths = laws.BY_NAME[name].method, [9, 5, 9]
    x = laws.draw(b=1, h=1, hk=1, n=23, m=23, d=16, e=16, dtype=torch.float32)
    x = Inputs(*(t[0].transpose(0, 1) for t in x.tensors)).leaves()
    got = ca.varlen_attention(*x.tensors, starts(lengths), method=method, backend="triton", return_lse=True)
    close(got, loop(x, starts(lengths), method=method, backend="reference"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch's kernel for packed documents is one for GPUs")
@pytest.mark.parametrize("hk", [4, 2])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["exact", "refined", "smyrf"])
def test_on_a_gpu(name: str, causal: bool, hk: int) -> None:
    """Exact documents go to torch's own kernel; cu_seqlens on the device is read once."""
    method, lengths = laws.BY_NAME[name].method, [5, 200, 1, 0, 130, 64, 64]
    x = laws.draw(b=1, h=4, hk=hk, n=sum(lengths), m=sum(lengths), d=64, e=64, dtype=torch.bfloat16, spread=0.3)
    x = Inputs(*(t[0].transpose(0, 1).cuda() for t in x.tensors)).leaves()
    at = starts(lengths).cuda()
    if name == "exact":
        assert packs(x.q, x.v, 0.0)
    got = ca.varlen_attention(*x.tensors, at, method=method, causal=causal)
    wanted = loop(x, at.cpu(), method=method, causal=causal)[0]
    close(got.cpu(), wanted.cpu())
    direction = torch.randn_like(got)
    for one, other in zip(*(torch.autograd.grad(out, x.tensors, direction) for out in (got, wanted)), strict=True):
        close(one.cpu(), other.cpu())


# ---- neighbours ----------------------------------------------------------------------------------


@over()
def test_a_document_does_not_see_its_neighbours(case: Case) -> None:
    x = packed(sum(LENGTHS), dtype=torch.float32)
    at = starts(LENGTHS)
    hurt = slice(*at[1:3].tolist())
    for causal in kinds(case):
        wanted = ca.varlen_attention(*x.tensors, at, method=case.method, causal=causal, return_lse=True)
        bad = [t.detach().clone() for t in x.tensors]
        for t in bad:
            t[hurt] = float("nan")
        out, lse = ca.varlen_attention(*bad, at, method=case.method, causal=causal, return_lse=True)
        for got, want in ((out, wanted[0]), (lse.mT, wanted[1].mT)):
            same_bits(
                torch.cat([got[: hurt.start], got[hurt.stop :]]), torch.cat([want[: hurt.start], want[hurt.stop :]])
            )


@over()
def test_the_order_of_documents_changes_nothing(case: Case) -> None:
    x, at = packed(sum(LENGTHS)), starts(LENGTHS)
    order = [6, 1, 8, 0, 3, 7, 2, 5, 4]
    tokens = torch.cat([torch.arange(at[i], at[i + 1]) for i in order])
    got = ca.varlen_attention(
        *(t[tokens] for t in x.tensors), starts([LENGTHS[i] for i in order]), method=case.method, return_lse=True
    )
    out, lse = ca.varlen_attention(*x.tensors, at, method=case.method, return_lse=True)
    close(got, (out[tokens], lse[:, tokens]))


@over(laws.CAUSAL, where=lambda case: case.method.causality == "strict")
def test_strict_causality_holds_in_every_document(case: Case) -> None:
    """Replace the last token of each document: no earlier output changes."""
    x, at = packed(sum(LENGTHS), dtype=torch.float32), starts(LENGTHS)
    last = torch.tensor([int(end) - 1 for end, length in zip(at[1:], LENGTHS, strict=True) if length])
    other = [t.detach().clone() for t in x.tensors]
    for t in other:
        t[last] = t[last] * -3 + 1
    kept = torch.ones(sum(LENGTHS), dtype=torch.bool).index_fill(0, last, False)
    got, wanted = (ca.varlen_attention(*tensors, at, method=case.method, causal=True) for tensors in (other, x.tensors))
    same_bits(got[kept], wanted[kept])
    assert not torch.equal(got, wanted)


def test_without_keys_there_is_nothing_to_answer() -> None:
    x = packed(9, 4)
    out, lse = ca.varlen_attention(*x.tensors, starts([5, 4]), starts([0, 4]), method=REFINED, return_lse=True)
    assert (out[:5] == 0).all()
    assert (lse[:, :5] == float("-inf")).all()
    assert lse[:, 5:].isfinite().all()
    assert (gradients((out, lse), x)[0][:5] == 0).all()
    for method in ("auto", "exact", REFINED):  # no document has any; and no document at all
        none, some = torch.zeros(0, 4, 6), torch.ones(3, 4, 6, requires_grad=True)
        out = ca.varlen_attention(some, none, none, starts([3]), starts([0]), method=method)
        assert (torch.autograd.grad(out.sum(), some)[0] == 0).all()
        assert ca.varlen_attention(none, none, none, starts([]), method=method).shape == (0, 4, 6)


# ---- options -------------------------------------------------------------------------------------


def test_seeds_and_generators() -> None:
    x, at = packed(sum(LENGTHS)), starts(LENGTHS)
    for seed in (3, torch.tensor(5)):
        agree(x, at, method="smyrf:q_seats=4,k_seats=4", seed=seed)
    one, two = (ca.varlen_attention(*x.tensors, at, method="smyrf:q_seats=4,k_seats=4", seed=seed) for seed in (0, 1))
    assert not torch.equal(one, two)
    g = torch.Generator().manual_seed(1)
    one, two = (ca.varlen_attention(*x.tensors, at, method="smyrf:q_seats=4,k_seats=4", generator=g) for _ in range(2))
    assert not torch.equal(one, two)


def test_scale_state_and_points() -> None:
    x, at = packed(40), starts([10, 9, 21])
    agree(x, at, method=REFINED, scale=0.1)
    _, state = ca.attention(*laws.draw(n=20, m=20).tensors, method="routing:window=8", return_state=True)
    agree(x, at, method="routing:window=8", state=state)
    points = torch.randn(40, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    got = ca.varlen_attention(*x.tensors, at, method=ca.ClusterFormer(clusters=3), points=points)
    wanted = [
        ca.attention(
            *(t[span].transpose(0, 1).unsqueeze(0) for t in x.tensors),
            method=ca.ClusterFormer(clusters=3), points=points[span].unsqueeze(0),
        )[0].transpose(0, 1)
        for span, _ in spans(at, at)
    ]  # fmt: skip
    close(got, torch.cat(wanted))


def test_autocast_as_in_attention() -> None:
    x, at = packed(40, dtype=torch.float32), starts([10, 9, 21])
    with torch.autocast("cpu", torch.bfloat16):
        got = ca.varlen_attention(*x.tensors, at, method=REFINED)
        wanted = loop(x, at, method=REFINED)[0]
    assert got.dtype == torch.bfloat16
    close(got, wanted)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("method", [REFINED, ca.Refined(), "auto"], ids=str)
def test_compiled_it_is_one_operator_for_all_lengths(method: Any, lse: bool) -> None:
    def f(q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Any:
        return ca.varlen_attention(q * 2, k, v, at, method=method, return_lse=lse)

    torch._dynamo.reset()
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    for lengths in ([9, 30], [40, 5, 12], [40, 5, 13, 2]):
        x = packed(sum(lengths), dtype=torch.float32)
        got, wanted = compiled(*x.tensors, starts(lengths)), f(*x.tensors, starts(lengths))
        same_bits(got, wanted)
        same_bits(gradients(got, x), gradients(wanted, x))


def test_compiled_without_a_gradient_and_with_a_tensor_that_holds_the_seed() -> None:
    x, at = packed(40, dtype=torch.float32), starts([10, 9, 21])

    def f(q: Tensor, seed: Tensor) -> Any:
        return ca.varlen_attention(q, x.k, x.v, at, method="smyrf:q_seats=4,k_seats=4", seed=seed)

    with torch.no_grad():
        for seed in (0, 4):
            got = torch.compile(f, fullgraph=True, backend="aot_eager")(x.q, torch.tensor(seed))
            same_bits(got, f(x.q, torch.tensor(seed)))


# ---- reading -------------------------------------------------------------------------------------


def test_lengths_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    read = _documents._read_starts
    monkeypatch.setattr(_documents, "_read_starts", lambda *given: reads.append(1) or read(*given))
    x, at = packed(30), starts([10, 20])
    for _ in range(3):
        ca.varlen_attention(*x.tensors, at, method=CAUSAL)
    assert len(reads) == 1
    at[1] = 12  # written to: read again
    agree(x, at, method=CAUSAL)
    assert len(reads) == 2
    ca.varlen_attention(*x.tensors, at, at.clone(), method=CAUSAL)
    assert len(reads) == 3
    with torch.inference_mode():  # nobody counts what is written to these
        inference = starts([10, 20])
        for first in (10, 15):
            inference[1] = first
            same_bits(ca.varlen_attention(*x.tensors, inference), ca.varlen_attention(*x.tensors, inference.clone()))


def slots(groups: list[tuple[int, ...]], lengths: list[int]) -> int:
    return sum(len(group) * max(lengths[i] for i in group) for group in groups)


def test_documents_of_other_lengths_are_padded_only_where_a_call_costs_more() -> None:
    lengths = torch.randint(65, 8000, (64,), generator=torch.Generator().manual_seed(0)).tolist() * 2
    documents = _documents.Documents(tuple(lengths), tuple(lengths))
    groups = _documents.alike(documents)
    assert sorted(i for group in groups for i in group) == list(range(128))
    assert all(len({lengths[i] for i in group}) == 1 for group in groups)
    for heads in (1, 4, 32):
        call = _documents.CALL["cpu"] / heads
        for batch in _documents.merged(documents, groups, True, torch.empty(heads, 0, 1)):
            apart = sorted({lengths[i] for i in batch})
            assert slots([batch], lengths) <= sum(lengths[i] for i in batch) + call * (len(apart) - 1)


@hypothesis.given(st.lists(st.integers(1, 3000), min_size=1, max_size=30), st.integers(1, 8))
def test_batches_cost_least(lengths: list[int], heads: int) -> None:
    """Of all cuts of the row of documents, in tokens and calls."""
    documents = _documents.Documents(tuple(lengths), tuple(lengths))
    row = _documents.alike(documents)[:9]
    q = torch.empty(heads, 0, 1)
    got = _documents.merged(documents, row, False, q)
    call = _documents.CALL["cpu"] / heads

    def cost(batches: list[tuple[int, ...]]) -> float:
        return len(batches) * call + slots(batches, lengths)

    cuts = ([at for at in range(1, len(row)) if way >> at & 1] for way in range(0, 2 ** len(row), 2))
    ends = ([0, *cut, len(row)] for cut in cuts)
    ways = [[sum(row[a:b], ()) for a, b in itertools.pairwise(cut)] for cut in ends]
    assert cost(got) == pytest.approx(min(map(cost, ways)))
    assert sorted(i for group in got for i in group) == sorted(i for group in row for i in group)


# ---- what is refused -----------------------------------------------------------------------------

WRONG = [
    ({"at": torch.tensor([1, 10, 30])}, r"cu_seqlens_q to begin with 0; got 1; try"),
    ({"at": torch.tensor([0, 20, 10, 30])}, r"cu_seqlens_q that never falls; got 20, then 10"),
    ({"at": torch.tensor([0, 10, 29])}, r"cu_seqlens_q to end at the 30 tokens there are; got 29"),
    ({"at": torch.tensor([0, 10, 31])}, r"cu_seqlens_q to end at the 30 tokens there are; got 31"),
    ({"at": torch.tensor([0, 10, 30]), "of_keys": torch.tensor([0, 10, 28])}, r"cu_seqlens_k to end at the 30 tokens"),
    ({"at": torch.tensor([0, 10, 30]), "of_keys": torch.tensor([0, 30])}, r"as many documents .*; got 2 and 1; try"),
    ({"at": torch.tensor([[0, 30]])}, r"cu_seqlens_q of shape \(documents \+ 1,\); got \(1, 2\)"),
    ({"at": torch.tensor([])}, r"cu_seqlens_q of shape \(documents \+ 1,\); got \(0,\)"),
    ({"at": torch.tensor([0, 30]), "max_seqlen_q": 29}, r"max_seqlen_q of at least the longest document's 30 tokens"),
    ({"at": torch.tensor([0, 30]), "max_seqlen_k": 2}, r"max_seqlen_k of at least the longest document's 30 tokens"),
    ({"at": torch.tensor([0, 30]), "scale": float("nan")}, "scale a finite number"),
    ({"at": torch.tensor([0, 30]), "method": "nothing"}, "a method: one of"),
    ({"at": torch.tensor([0, 30]), "causal": True, "method": REFINED}, "parts=1 in a causal call"),
]


@pytest.mark.parametrize(("given", "words"), WRONG)
def test_wrong_lengths_are_refused_by_a_sentence(given: dict[str, Any], words: str) -> None:
    x, given = packed(30), dict(given)
    with pytest.raises(ValueError, match=words):
        ca.varlen_attention(*x.tensors, given.pop("at"), given.pop("of_keys", None), **given)


def test_wrong_tensors_are_refused_by_a_sentence() -> None:
    x, at = packed(30), starts([10, 20])
    with pytest.raises(ValueError, match=r"q \(tokens h d\); got \(1, 30, 4, 6\); try ca.attention"):
        ca.varlen_attention(x.q[None], x.k, x.v, at)
    with pytest.raises(TypeError, match=r"k a torch.Tensor; got list"):
        ca.varlen_attention(x.q, [1], x.v, at)
    nested = torch.nested.nested_tensor([x.q[:10], x.q[10:]], layout=torch.jagged)
    with pytest.raises(TypeError, match=r"got a nested tensor; try q.values\(\), with q.offsets\(\)"):
        ca.varlen_attention(nested, x.k, x.v, at)
    same_bits(ca.varlen_attention(nested.values(), x.k, x.v, nested.offsets()), ca.varlen_attention(*x.tensors, at))
    with pytest.raises(ValueError, match="that agree in b, hk, m and d"):
        ca.varlen_attention(x.q, x.k, x.v[:20], at)
    with pytest.raises(TypeError, match="cu_seqlens_q a tensor"):
        ca.varlen_attention(*x.tensors, [0, 10, 30])
    with pytest.raises(TypeError, match=r"cu_seqlens_q of whole numbers; got torch.float32"):
        ca.varlen_attention(*x.tensors, at.float())
    with pytest.raises(ValueError, match=r"Reformer is self-attention only; got a document of 10 and 20"):
        ca.varlen_attention(*x.tensors, at, starts([20, 10]), method="reformer")
