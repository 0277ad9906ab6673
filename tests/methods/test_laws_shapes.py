"""Laws 4 (relabelling) and 7 (shapes), and the dtypes: whatever fits the contract gets a fitting answer."""

from __future__ import annotations

import dataclasses

import laws
import oracle
import pytest
import torch
from laws import Case, Inputs, as_good_as, close, draw, not_above, over, padded, same_bits

import clusterattn as ca

LENGTHS = (1, 63, 257)


@over()
@pytest.mark.parametrize("n", LENGTHS)
def test_any_lengths(case: Case, n: int) -> None:
    """Lengths need not divide anything; clusters, top, seats, chunks and windows may be too many."""
    for m in (n,) if case.method.self_only else LENGTHS:
        x = draw(b=1, h=2, hk=1, n=n, m=m, d=4, e=3, dtype=torch.float32)
        for causal in laws.kinds(case):
            out, lse = x.attend(case.method, causal=causal, return_lse=True)
            assert out.shape == (1, 2, n, 3)
            assert lse.shape == (1, 2, n)
            assert out.isfinite().all()
            if case.name != "local" or n == m:  # whose window may lie where no key is
                assert torch.equal(lse.isfinite(), x.seen_when(causal).any(-1)[:, None].expand_as(lse))
            if not causal and not case.slope:
                # An average of the values: never outside their range. (With a slope weights may be negative.)
                out = torch.where((lse == float("-inf"))[..., None], x.v[:, :, :1], out)
                not_above(out, x.v.amax(2, keepdim=True).expand_as(out))
                not_above(x.v.amin(2, keepdim=True).expand_as(out), out)


@over(where=lambda case: case.method.self_only)
def test_methods_for_self_attention_refuse_other_lengths(case: Case) -> None:
    x = draw(n=12, m=15)
    with pytest.raises(ValueError, match=r"wanted .*got .*15.*try"):
        x.attend(case.method)


@over()
def test_the_papers_defaults_serve_short_inputs(case: Case) -> None:
    x = draw(case, n=9, m=7, dtype=torch.float32)
    assert x.attend(type(case.method)()).isfinite().all()


@over(where=lambda case: not getattr(case.method, "share_heads", False))
def test_grouped_heads_equal_repeated_ones(case: Case) -> None:
    """Parts are made once for the query heads of a key head, so they are given."""
    x = padded(draw(case, h=6, hk=2, m=33), "holes")
    repeated = dataclasses.replace(x, k=x.k.repeat_interleave(3, 1), v=x.v.repeat_interleave(3, 1))
    for causal in laws.kinds(case):
        groups = same = None
        if case.parts > 1:
            groups = x.groups(case.method)
            parts = dataclasses.replace(groups.parts, labels=groups.parts.labels.repeat_interleave(3, 1))
            same = dataclasses.replace(groups, parts=parts)
        got = x.attend(case.method, causal=causal, groups=groups, return_lse=True)
        close(got, repeated.attend(case.method, causal=causal, groups=same, return_lse=True))


@over()
def test_strides_do_not_matter(case: Case) -> None:
    x = draw(case, dtype=torch.float32)
    wanted = x.attend(case.method, return_lse=True)
    for shuffled in (
        [t.transpose(1, 2).contiguous().transpose(1, 2) for t in x.tensors],  # (b n h d) in memory, as models have it
        [t.mT.contiguous().mT for t in x.tensors],
        [torch.stack([t, t], -1)[..., 0] for t in x.tensors],
    ):
        assert not shuffled[0].is_contiguous()
        close(ca.attention(*shuffled, method=case.method, return_lse=True), wanted)


@over()
def test_expanded_inputs(case: Case) -> None:
    """One sequence seen twice through a stride of 0."""
    x = draw(case, b=1, dtype=torch.float32)
    twice = [t.expand(2, -1, -1, -1) for t in x.tensors]
    out = ca.attention(*twice, method=case.method)
    same_bits(out, ca.attention(*(t.contiguous() for t in twice), method=case.method))
    if not getattr(case.method, "share_heads", False):
        same_bits(out[0], out[1])
    close(out[0], out[1])  # at some sizes torch's own products differ in the last bit from one matrix to the next


@over()
def test_empty_batch(case: Case) -> None:
    x = draw(case, b=0).leaves()
    out, lse = x.attend(case.method, return_lse=True)
    assert out.shape == (0, 4, 29, 5)
    assert lse.shape == (0, 4, 29)
    out.sum().backward()


@over(laws.CROSS)
def test_no_queries(case: Case) -> None:
    out, lse = draw(case, n=0, m=9).attend(case.method, return_lse=True)
    assert out.shape == (2, 4, 0, 5)
    assert lse.shape == (2, 4, 0)


@over(laws.CROSS)
def test_no_keys(case: Case) -> None:
    x = draw(n=9, m=0)
    out, lse = x.attend(case.method, return_lse=True)
    assert out.shape == (2, 4, 9, 5)
    assert (out == 0).all()
    assert (lse == float("-inf")).all()


@over()
def test_scale_is_the_callers(case: Case) -> None:
    x = draw(case)
    close(x.attend(case.method, scale=6**-0.5, return_lse=True), x.attend(case.method, return_lse=True))
    assert not torch.equal(x.attend(case.method, scale=2.0), x.attend(case.method))


@over()
def test_settings_survive_a_round_trip(case: Case) -> None:
    method = case.method
    assert type(method).from_dict(method.to_dict()) == method
    assert ca.method(method.to_dict()) == method
    assert ca.method(str(method)) == method
    assert ca.method(method) is method
    assert ca.METHODS[method.name] is type(method)


@over()
def test_cost_counts_and_exact_is_the_yardstick(case: Case) -> None:
    counts = [case.method.cost(n, n, 64, 64) for n in (1, 100, 4096, 65536)]
    assert all(isinstance(count, int) and count > 0 for count in counts)
    assert counts == sorted(counts)
    assert case.name in ("exact", "oracle_top") or counts[-1] < ca.Exact().cost(65536, 65536, 64, 64)
    assert ca.Exact().cost(10, 20, 3, 5) == 10 * 20 * (3 + 5)


# ---- law 4 ---------------------------------------------------------------------------------------


@over(where=lambda case: case.family or case.name in ("exact", "oracle_top", "smyrf", "smyrf-e2lsh", "smyrf-dedup"))
def test_permuting_the_keys_changes_nothing(case: Case) -> None:
    """Methods in which positions play no part. (They break ties between cross-polytope hashes; and where keys are drawn
    to form parts, they decide who is: then with the groups given.)"""
    x = padded(draw(n=24, m=31), "holes")
    order = torch.randperm(31, generator=torch.Generator().manual_seed(3))
    moved = dataclasses.replace(x, k=x.k[:, :, order], v=x.v[:, :, order], key_mask=x.key_mask[:, order])
    groups = moved_groups = None
    if case.parts > 1:
        groups = x.groups(case.method)
        parts = dataclasses.replace(groups.parts, labels=groups.parts.labels[..., order])
        moved_groups = dataclasses.replace(groups, parts=parts)
    wanted = x.attend(case.method, groups=groups, return_lse=True)
    close(moved.attend(case.method, groups=moved_groups, return_lse=True), wanted)


@over(laws.CROSS, where=lambda case: case.method.groups_type is not None and case.name != "local")
def test_permuting_queries_with_their_groups_permutes_the_answers(case: Case) -> None:
    x = padded(draw(n=24, m=31), "holes")
    groups = x.groups(case.method)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(3))
    if isinstance(groups, ca.Clusters):
        groups = dataclasses.replace(groups, labels=groups.labels[..., order], member_of=groups.member_of[..., order])
    else:
        seats = torch.where(groups.queries < 0, groups.queries, order.argsort()[groups.queries.clamp(min=0)])
        groups = dataclasses.replace(groups, queries=seats)
    moved = dataclasses.replace(x, q=x.q[:, :, order], query_mask=x.query_mask[:, order])
    wanted = [part[:, :, order] for part in x.attend(case.method, groups=x.groups(case.method), return_lse=True)]
    close(moved.attend(case.method, groups=groups, return_lse=True), wanted)


# ---- dtypes --------------------------------------------------------------------------------------

HALVES = (torch.bfloat16, torch.float16)


@over()
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALVES], ids=str)
def test_the_answer_has_the_dtype_of_the_question(case: Case, dtype: torch.dtype) -> None:
    x = padded(draw(case, dtype=dtype), "right").leaves()
    for causal in laws.kinds(case):
        out, lse = x.attend(case.method, causal=causal, return_lse=True)
        assert out.dtype == dtype
        assert lse.dtype in (torch.float32, torch.float64)
        for leaf, grad in zip(x.tensors, laws.gradients((out, lse), x), strict=True):
            assert grad.dtype == leaf.dtype == dtype
            assert grad.isfinite().all()


@over()
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half_precision_is_as_good_as_plain_half_precision(case: Case, dtype: torch.dtype) -> None:
    """Groups given. The yardstick is the oracle's own arithmetic carried out in that dtype."""
    from laws_oracle import expected

    x = padded(draw(case, dtype=dtype, spread=1.0), "holes")
    groups = x.groups(case.method)
    got = x.attend(case.method, groups=groups, return_lse=True)
    plain, truth = (expected(case, y, groups) for y in (x, x.to(torch.float64)))
    rows = torch.ones_like(got[1], dtype=torch.bool)
    if case.family and hasattr(case.method, "top"):
        # A near key that rounding may exchange for an equally good one is a choice, not an error.
        top, eps = case.method.top, torch.finfo(dtype).eps
        rows = oracle.sure_choice(*x.to(torch.float64).tensors[:2], groups.labels, x.seen, top, eps)
        assert rows.double().mean() > 0.5
        if case.slope:  # and one that enters or leaves the far keys moves the slope of its head
            rows &= rows.all(-1, keepdim=True)
            assert rows.any()
    for fast, slow, right in zip(got, plain, truth, strict=True):
        as_good_as(fast[rows], slow[rows], right[rows])


@over(where=lambda case: case.name != "reformer")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_shared_offset_does_not_spoil_half_precision(case: Case, dtype: torch.dtype) -> None:
    """The grouping may not drown in what all queries share. (Reformer must see it: they are its keys.)"""
    x = draw(case, dtype=torch.float32)
    x = dataclasses.replace(x, q=x.q + 10.0).to(dtype)
    groups = x.groups(case.method)
    if isinstance(groups, ca.Clusters) and case.method.metric != "hamming":
        wanted = x.to(torch.float64).groups(case.method)
        assert (groups.labels == wanted.labels).double().mean() > 0.95
    assert x.attend(case.method).isfinite().all()


@over()
def test_autocast(case: Case) -> None:
    """fp32 in, as a model under autocast has it: no error, and an answer as good as bf16 gives."""
    x = draw(case, dtype=torch.float32)
    groups = x.groups(case.method)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        leaves = x.leaves()
        out, lse = leaves.attend(case.method, groups=groups, return_lse=True)
        out.float().sum().backward()
        assert x.attend(case.method).isfinite().all()
    assert lse.dtype in (torch.float32, torch.float64)
    assert all(t.grad.isfinite().all() for t in leaves.tensors if t.grad is not None)
    close(out, x.attend(case.method, groups=groups), torch.bfloat16)


def test_fp64_stays_fp64() -> None:
    """Not merely the label on the tensor: the digits are there."""
    x = draw(n=20, m=20)
    for case in laws.CASES:
        if case.limit is not None:
            close(x.attend(case.limit(20, 20)), oracle.exact(*x.tensors, x.seen)[0])


def test_large_logits_do_not_overflow() -> None:
    for case in laws.CASES:
        x = draw(case, dtype=torch.float32)
        x = Inputs(x.q * 60, x.k * 60, x.v).leaves()
        out, lse = x.attend(case.method, return_lse=True)
        assert out.isfinite().all(), case.name
        assert lse.isfinite().all(), case.name
        assert all(grad.isfinite().all() for grad in laws.gradients((out, lse), x)), case.name
