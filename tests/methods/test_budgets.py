"""Sizes from shapes, and the one accountant of what they cost."""

from __future__ import annotations

import dataclasses
from typing import Any

import laws
import pytest
import torch
from laws import Case, draw, over
from torch.utils.flop_counter import FlopCounterMode

import clusterattn as ca
from clusterattn.measure import cost
from clusterattn.measure.cost import Shape
from clusterattn.methods import budgets

LENGTHS = (1024, 1500, 2048, 4000, 8192, 16384, 60_000, 200_000, 1 << 20)
SIZES = ("clusters", "top", "parts", "slope", "steps")


def grouping_share(method: Any, at: Shape) -> float:
    how = {"causal": at.causal, "group": at.group}
    filled = method.at(at.n, at.m, at.d, at.e, **how)
    return filled.grouping_cost(at.n, at.m, at.d, at.e, **how) / cost.multiply_adds(filled, at)


# ---- open sizes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [32, 64, 128])
def test_a_method_without_sizes_gets_them_and_more_of_them_as_lengths_grow(d: int, causal: bool) -> None:
    before = None
    for n in (1, 64, 512, *LENGTHS):
        filled = ca.Refined().at(n, n, d, d, causal=causal)
        assert all(getattr(filled, name) is not None for name in SIZES)
        assert filled.budget is None
        assert filled.at(n, n, d, d, causal=causal) == filled
        assert (filled.block is not None) == causal
        if n >= 8192:
            assert before is None or filled.clusters * filled.top * filled.parts >= before
            before = filled.clusters * filled.top * filled.parts
            assert cost.share(ca.Refined(), Shape(n, n, d, d, causal)) < (0.3 if causal else 0.1)


@pytest.mark.parametrize("group", [1, 8])
@pytest.mark.parametrize(("d", "e"), [(32, 32), (40, 64), (64, 64), (128, 128), (256, 128)])
@pytest.mark.parametrize("budget", [None, 0.02, 0.1, 0.3])
def test_grouping_takes_at_most_a_third_from_1024_up(budget: float | None, d: int, e: int, group: int) -> None:
    """At the first and the last lengths of their steps, with more keys, with fewer, and in causal calls."""
    method = ca.Refined(budget=budget)
    for n in (*LENGTHS, 1535, 2047, 12_287):
        for m in (n, 4 * n, max(n // 8, 1024)):
            if m == n or budgets.step(m) != budgets.step(n):
                assert grouping_share(method, Shape(n, m, d, e, False, group)) <= 1 / 3, (n, m)
        for m in (n, 2 * n) if d <= 128 else ():  # wider: the keys' metric alone takes as much in a short causal call
            assert grouping_share(method, Shape(n, m, d, e, True, group)) <= 1 / 3, (n, m)


def test_a_step_is_all_the_lengths_that_share_its_sizes() -> None:
    for length in range(1, 5000):
        at = budgets.step(length)
        assert budgets.step(at) == at <= length <= budgets.step_end(at)
        assert budgets.step(budgets.step_end(at) + 1) > at


@pytest.mark.parametrize("group", [3, 8])
def test_heads_that_share_clusters_have_no_more_than_their_grouping_is_worth(group: int) -> None:
    shared = ca.Refined(share_heads=True)
    for n in LENGTHS:
        assert grouping_share(shared, Shape(n, n, 64, 64, False, group)) <= 1 / 3
        apart, filled = (each.at(n, n, 64, 64, group=group) for each in (ca.Refined(), shared))
        assert filled.clusters <= group * apart.clusters


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("n", "m"), [(2048, 2048), (3000, 3000), (8192, 8192), (10_000, 60_000), (200_000, 200_000)])
def test_a_budget_is_kept_and_used(n: int, m: int, causal: bool) -> None:
    """No larger sizes of the ladder fit."""
    at = Shape(n, m, 64, 64, causal)
    shares = []
    for budget in (0.1, 0.2, 0.3, 0.5) if causal else (0.05, 0.1, 0.2, 0.5):
        method = ca.Refined(budget=budget)
        filled = method.at(n, m, 64, 64, causal=causal)
        shares.append(cost.share(filled, at))
        if causal and (filled.clusters, filled.top) == budgets.CAUSAL[0]:
            continue  # less than the smallest sizes take
        assert shares[-1] <= budget
        at_step = dataclasses.replace(at, n=budgets.step(n), m=budgets.step(m))
        for rung in budgets.rungs(at_step):
            larger = budgets._sensible(method, rung, at_step)
            if cost.multiply_adds(larger, at_step) > cost.multiply_adds(filled, at_step):
                assert cost.share(larger, at_step) > budget
    assert shares == sorted(shares)
    assert shares[-1] > 1.5 * shares[0]


def test_sizes_are_step_functions_of_the_lengths() -> None:
    for causal in (False, True):
        steps = [ca.Refined().at(n, n, 64, 64, causal=causal) for n in range(512, 4097, 7)]
        assert len(set(steps)) <= 7
    assert ca.Refined().at(1536, 1536, 64, 64) == ca.Refined().at(2047, 1999, 64, 64)
    assert [budgets.step(n) for n in (1, 2, 3, 5, 6, 7, 8, 767, 768, 1023, 1024)] == [
        1, 2, 3, 4, 6, 6, 8, 512, 768, 768, 1024,
    ]  # fmt: skip


def test_what_is_given_stays_and_the_rest_follows() -> None:
    for given in ({"clusters": 7}, {"top": 0}, {"parts": 3, "slope": False}, {"slope": True}, {"steps": 4}):
        for n in (512, 8192):
            filled = ca.Refined(**given).at(n, n, 64, 64)
            assert {name: getattr(filled, name) for name in given} == given
    fixed = ca.Refined(clusters=7, top=5, parts=1, slope=False, steps=2, start="far")
    assert fixed.at(8192, 8192, 64, 64) == fixed  # sample and rank are all, as for Clustered and Improved
    assert ca.Refined(steps=2).at(8192, 8192, 64, 64).sample is None
    small, large = (ca.Refined(parts=64, budget=share).at(8192, 8192, 64, 64) for share in (0.05, 0.2))
    assert small.parts == large.parts == 64
    assert small.clusters < large.clusters


def test_chosen_clusters_of_a_causal_call_are_shared_by_the_heads_that_see_the_same_keys() -> None:
    shape = (8192, 8192, 64, 64)
    alone, three = (ca.Refined().at(*shape, causal=True, group=group) for group in (1, 3))
    assert not alone.share_heads
    assert three.share_heads
    assert (three.clusters, three.block, three.top) == (3 * alone.clusters, alone.block, alone.top)
    apart = ca.Refined(share_heads=False).at(*shape, causal=True, group=3)
    assert (apart.clusters, apart.share_heads) == (alone.clusters, False)
    assert not ca.Refined(clusters=16).at(*shape, causal=True, group=3).share_heads  # as many for each head, as given
    assert not ca.Refined().at(*shape, group=3).share_heads
    spent, saved = (cost.share(each, Shape(*shape, True, 3)) for each in (three, apart))
    assert spent < 1.05 * saved


def test_a_budget_as_text_and_beside_all_sizes() -> None:
    assert ca.method("refined:budget=0.05") == ca.Refined(budget=0.05)
    assert ca.Refined.from_dict(ca.Refined(budget=0.05).to_dict()) == ca.Refined(budget=0.05)
    with pytest.raises(ValueError, match=r"wanted a budget, or all sizes.* got .*budget=0.05.*clusters=8"):
        ca.Refined(budget=0.05, clusters=8, top=4, parts=1, slope=False)
    for wrong in (0, -1.0, True, "much"):
        with pytest.raises(ValueError, match=r"wanted .*budget"):
            ca.Refined(budget=wrong)


def test_parts_are_refused_in_a_causal_call_and_left_out_where_sizes_are_chosen() -> None:
    with pytest.raises(ValueError, match=r"wanted parts=1 in a causal call"):
        ca.Refined(parts=4).at(512, 512, 64, 64, causal=True)
    filled = ca.Refined().at(8192, 8192, 64, 64, causal=True)
    assert (filled.parts, filled.slope) == (1, False)


def test_few_queries_over_many_keys_get_more_near_keys_and_parts() -> None:
    own, cross = ca.Refined().at(10_000, 10_000, 128, 128), ca.Refined().at(10_000, 60_000, 128, 128)
    assert cross.top > own.top
    assert cross.parts > own.parts


def test_padding_changes_nothing_for_equal_sizes_and_sizes_follow_the_padded_shape() -> None:
    x = draw(n=100, m=100, dtype=torch.float32)
    mask = (torch.arange(100) < 60).expand(2, 100)
    shown = ca.attention(*x.tensors, method="refined", key_mask=mask, query_mask=mask)
    filled = ca.Refined().at(100, 100, 6, 5, group=2)
    laws.same_bits(shown, ca.attention(*x.tensors, method=filled, key_mask=mask, query_mask=mask))
    cut = ca.attention(*(t[:, :, :60] for t in x.tensors), method=filled)
    laws.close(shown[:, :, :60], cut)


def test_causal_blocks_grow_so_that_the_whole_grows_like_n_to_the_one_and_a_half() -> None:
    for method in (ca.Clustered(clusters=32), ca.Improved(clusters=32), ca.Refined(clusters=32, top=32)):
        short, long = (method.cost(n, n, 64, 64, causal=True) for n in (1 << 14, 1 << 20))
        assert long / short < 1.3 * 64**1.5
        fixed = dataclasses.replace(method, block=256)
        assert fixed.cost(1 << 20, 1 << 20, 64, 64, causal=True) > 5 * long


# ---- keys grouped once ---------------------------------------------------------------------------


def test_parts_of_the_keys_serve_other_queries() -> None:
    """A table's rows under many questions: the keys are grouped once."""
    method = ca.Refined(clusters=5, top=4, parts=6, slope=True, steps=2)
    x, other = draw(n=29, m=40), draw(n=33, m=40, seed=3)
    parts = x.groups(method).parts
    later = dataclasses.replace(other, k=x.k, v=x.v).leaves()
    out = ca.attention(*later.tensors, method=method, groups=parts)
    out.sum().backward()
    groups = dataclasses.replace(later.groups(method), parts=parts)
    laws.close(out, ca.attention(*later.tensors, method=method, groups=groups))
    laws.same_bits(x.attend(method, groups=parts), x.attend(method))
    for wrong, words in (
        (dataclasses.replace(method, parts=5), r"wanted as many parts .* got 6 parts for Refined with 5"),
        (dataclasses.replace(method, parts=1), r"wanted as many parts"),
        (ca.Exact(), r"wanted as many parts"),
    ):
        with pytest.raises(ValueError, match=words):
            ca.attention(*later.tensors, method=wrong, groups=parts)
    with pytest.raises(ValueError, match=r"wanted parts of keys"):
        draw(n=33, m=41).attend(method, groups=parts)


# ---- the accountant ------------------------------------------------------------------------------


class Products:
    """Counts the multiply-adds of every product of matrices that is made."""

    NAMES = ("__matmul__", "matmul", "baddbmm", "baddbmm_", "bmm", "mm", "mv")

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.total, self.quiet = 0, False
        for place in (torch, torch.Tensor):
            for name in self.NAMES:
                if hasattr(place, name):
                    patch.setattr(place, name, self.counting(getattr(place, name), name.startswith("badd")))
        einsum = torch.einsum
        patch.setattr(torch, "einsum", self.counting_einsum(einsum))

    def counting(self, product: Any, adds: bool) -> Any:
        def counted(*args: Any, **more: Any) -> Any:
            left, right = args[1:3] if adds else args[:2]
            out = product(*args, **more)
            if not self.quiet:
                self.total += out.numel() * left.shape[-1]
            return out

        return counted

    def counting_einsum(self, einsum: Any) -> Any:
        def counted(equation: str, *tensors: Any) -> Any:
            sizes = {
                letter: size
                for word, x in zip(equation.split("->")[0].split(","), tensors, strict=True)
                for letter, size in zip(word, x.shape, strict=True)
            }
            self.total += int(torch.tensor(list(sizes.values())).prod())
            self.quiet = True  # what it is made of
            try:
                return einsum(equation, *tensors)
            finally:
                self.quiet = False

        return counted


def even(x: torch.Tensor, heads: int, length: int, many: int) -> torch.Tensor:
    return (torch.arange(length) * many // length).expand(x.shape[0], heads, length)


ATTENDING = [
    ca.Clustered(clusters=4),
    ca.Improved(clusters=4, top=8),
    ca.Improved(clusters=4, top=8, mass="tangent"),
    ca.Refined(clusters=4, top=8, parts=1, slope=False, steps=2),
    ca.Refined(clusters=4, top=8, parts=1, slope=True, steps=2),
    ca.Refined(clusters=4, top=8, parts=4, slope=False, steps=2),
    ca.Refined(clusters=4, top=8, parts=4, slope=True, steps=2),
    ca.Refined(clusters=4, top=0, parts=4, slope=True, steps=2),
]


@pytest.mark.parametrize("method", ATTENDING, ids=str)
@pytest.mark.parametrize("hk", [1, 3])
def test_attending_costs_what_it_multiplies(method: Any, hk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clusters and parts of equal sizes, which fill their tiles: every product is counted, none is wasted."""
    n, m, d, e, h = 64, 64, 16, 8, 3
    method = method.at(n, m, d, e)
    x = draw(b=1, h=h, hk=hk, n=n, m=m, d=d, e=e, dtype=torch.float32)
    groups = x.groups(method)
    labels = even(x.q, h, n, 4)
    groups = dataclasses.replace(groups, labels=labels, member_of=labels)
    if groups.parts is not None:
        groups = dataclasses.replace(groups, parts=ca.Parts(even(x.k, hk, m, 4), 4))
    count = Products(monkeypatch)
    x.attend(method, groups=groups)
    wanted = method.cost(n, m, d, e, group=h // hk) - method.grouping_cost(n, m, d, e, group=h // hk)
    assert count.total / h == pytest.approx(wanted, rel=0.02)


GROUPING = [
    ca.Clustered(clusters=6, metric="euclid", steps=3),
    ca.Clustered(clusters=6, bits=31, steps=3),
    ca.Clustered(clusters=6, metric="keys", steps=3),
    ca.Clustered(clusters=6, metric="keys", start="far", steps=2),
    ca.Clustered(clusters=6, metric="keys", steps=2, rank=4, sample=60),
    ca.Refined(clusters=6, top=4, parts=1, slope=False, steps=1),
    ca.Refined(clusters=6, top=4, parts=5, slope=False, steps=3),
    ca.Refined(clusters=6, top=4, parts=5, slope=True, steps=2, rank=8, sample=50),
]


@pytest.mark.parametrize("method", GROUPING, ids=str)
@pytest.mark.parametrize("hk", [1, 3])
def test_grouping_costs_what_it_multiplies(method: Any, hk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums and means are additions: up to a tenth of the count. The tiny factorisations of ``rank`` are left out."""
    n, m, d, e, h = 200, 150, 16, 8, 3
    method = method.at(n, m, d, e)
    x = draw(b=1, h=h, hk=hk, n=n, m=m, d=d, e=e, dtype=torch.float32)
    count = Products(monkeypatch)
    x.groups(method)
    wanted = method.grouping_cost(n, m, d, e, group=h // hk)
    assert 0.85 * wanted <= count.total / h <= 1.02 * wanted


@pytest.mark.parametrize("source", ["past", "block"])
@pytest.mark.parametrize("slope", [False, True])
@pytest.mark.parametrize(("n", "m"), [(64, 64), (60, 70)])
def test_causal_calls_cost_what_they_multiply(
    source: str, slope: bool, n: int, m: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a block by exact squares; tiles of few queries are not all full."""
    method = ca.Refined(clusters=2, top=4, parts=1, slope=slope, steps=2, block=16, centroids_from=source)
    d, e, h, hk = 16, 8, 4, 2
    x = draw(b=1, h=h, hk=hk, n=n, m=m, d=d, e=e, dtype=torch.float32)
    count = Products(monkeypatch)
    x.attend(method, causal=True)
    wanted = method.cost(n, m, d, e, causal=True, group=2)
    assert 0.9 * wanted <= count.total / h <= 1.35 * wanted


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("method", "empty"),
    [(ca.Local(window=16), 0.0), (ca.Smyrf(rounds=2, q_seats=16, k_seats=16), 0.0), (ca.Reformer(chunk=16), 0.0),
     (ca.ClusterFormer(clusters=4), 0.0), (ca.ClusterFormer(clusters=4, affinity=2.0), 0.0),
     (ca.Routing(window=32), 0.3)],
    ids=lambda given: getattr(given, "name", ""),
)  # fmt: skip
def test_buckets_cost_what_they_multiply(method: Any, empty: float, causal: bool) -> None:
    """empty: seats on top, in Routing's tiles of queries that no window took."""
    n, d, e, h = 256, 16, 24, 2
    x = draw(b=1, h=h, n=n, m=n, d=d, e=e, dtype=torch.float32)
    with FlopCounterMode(display=False) as counter:
        x.attend(method, causal=causal)
    made, told = counter.get_total_flops() / 2 / h, method.cost(n, n, d, e, causal=causal)
    assert 0.95 * made <= (1 + empty) * told
    assert told <= 1.05 * made


def test_exact_attention_costs_what_a_causal_mask_leaves() -> None:
    for n, m in ((4, 4), (2, 5), (5, 2)):
        seen = sum(min(m, max(i + 1 + m - n, 0)) for i in range(n))
        assert ca.Exact().cost(n, m, 3, 5, causal=True) == seen * 8


@over(laws.CAUSAL)
def test_nothing_costs_nothing(case: Case) -> None:
    for causal in laws.kinds(case):
        assert ca.Refined().cost(0, 5, 3, 5, causal=causal) == ca.Refined().cost(5, 0, 3, 5, causal=causal) == 0
        assert case.method.cost(9, 9, 3, 5, causal=causal) > 0
