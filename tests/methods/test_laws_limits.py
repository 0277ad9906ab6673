"""Laws 1 (limits), 8 (bounds) and 9 (joining): where approximations meet exact attention, on which side."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import laws
import oracle
import pytest
import torch
from laws import BY_NAME, Case, close, draw, gradients, not_above, over, padded

import clusterattn as ca

CAUSAL_NEAR = ["improved", "improved-softmax", "improved-tangent", "improved-block", "refined", "refined-block"]
CAUSAL_NEAR += ["refined-slope", "refined-slope-block"]
NEAR = [*CAUSAL_NEAR, "improved-parts", "refined-parts", "refined-both", "refined-sample"]
PLAIN = ["clustered", "clustered-bias", "clustered-euclid", "clustered-keys"]
FAR = ["refined-slope", "refined-parts", "refined-both", "refined-far", "refined-sample", "improved-parts"]
TANGENT = [*PLAIN, "improved-tangent", "refined", *FAR]


def equals_exact(x: laws.Inputs, method: Any, causal: bool = False) -> None:
    """out, lse and the gradients of both."""
    mine, theirs = x.leaves(), x.leaves()
    got = mine.attend(method, causal=causal, return_lse=True)
    wanted = oracle.exact(*theirs.tensors, theirs.seen_when(causal))
    close(got, wanted)
    close(gradients(got, mine), gradients(wanted, theirs), got[1].dtype)


# ---- law 1 ---------------------------------------------------------------------------------------


@over(where=lambda case: case.limit is not None)
@pytest.mark.parametrize("mask", ["all", *laws.PADDINGS])
def test_at_the_limit_every_method_is_exact(case: Case, mask: str) -> None:
    x = draw(case, n=13, m=17)
    equals_exact(x if mask == "all" else padded(x, mask), case.limit(13, x.k.shape[2]))


@over(where=lambda case: case.family)
def test_more_clusters_than_queries_is_exact(case: Case) -> None:
    equals_exact(draw(case, n=13, m=17), dataclasses.replace(case.method, clusters=40))


@pytest.mark.parametrize("name", NEAR)
@pytest.mark.parametrize("mask", ["all", *laws.PADDINGS])
@pytest.mark.parametrize("extra", [0, 5])
def test_all_keys_near_is_exact(name: str, mask: str, extra: int) -> None:
    x = draw(n=19, m=11)
    x = x if mask == "all" else padded(x, mask)
    equals_exact(x, dataclasses.replace(BY_NAME[name].method, top=11 + extra))


@pytest.mark.parametrize("name", FAR)
@pytest.mark.parametrize("mask", ["all", *laws.PADDINGS])
@pytest.mark.parametrize("extra", [0, 5])
def test_a_part_for_every_key_is_exact_for_any_clusters(name: str, mask: str, extra: int) -> None:
    x = draw(n=19, m=11)
    x = x if mask == "all" else padded(x, mask)
    for clusters in (1, 3):
        equals_exact(x, dataclasses.replace(BY_NAME[name].method, parts=11 + extra, clusters=clusters))


@pytest.mark.parametrize("rounds", [1, 4])
def test_rounds_that_repeat_every_pair_are_exact(rounds: int) -> None:
    """Everybody in one bucket, several times over, is exact: the log-weight is the mean over the rounds."""
    x = padded(draw(n=13, m=17), "holes")
    for dedup in (False, True):
        equals_exact(x, ca.Smyrf(rounds=rounds, q_seats=20, k_seats=20, dedup=dedup))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", ["all", *laws.PADDINGS])
def test_one_chunk_of_reformer_is_exact_attention_to_the_others(mask: str, causal: bool) -> None:
    x = draw(n=13, m=13)
    x = x if mask == "all" else padded(x, mask)
    mine, theirs = x.leaves(), x.leaves()
    got = mine.attend(ca.Reformer(rounds=1, chunk=13), causal=causal, return_lse=True)
    everyone = torch.arange(13).expand(2, 4, 1, 13)
    rows = oracle.bucketed_rows(
        theirs.q,
        oracle.unit(theirs.q),
        everyone,
        everyone,
        theirs.seen_when(causal),
        not_itself=True,
        or_itself=True,
    )
    wanted = oracle.answer(rows, theirs.v)
    close(got, wanted)
    close(gradients(got, mine), gradients(wanted, theirs), got[1].dtype)


# ---- law 8 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("mask", ["all", "holes"])
def test_proposition_2_improved_rows_are_never_farther_than_clustered_rows(seed: int, mask: str) -> None:
    x = draw(n=40, m=33, seed=seed, spread=2.0)
    x = x if mask == "all" else padded(x, mask)
    truth, _ = oracle.exact_rows(x.q, x.k, x.seen)
    for metric in ("hamming", "euclid", "keys"):
        same = {"clusters": 6, "bits": 31, "steps": 3, "metric": metric}
        errors = []
        for method in (ca.Clustered(**same), ca.Improved(**same, top=5)):
            rows = ca.attention_matrix(*x.tensors, method=method, **x.masks)
            errors.append((rows - truth).abs().sum(-1))
        not_above(errors[1], errors[0])
        assert errors[1].mean() < errors[0].mean()


@pytest.mark.parametrize("name", TANGENT)
@pytest.mark.parametrize("mask", ["all", *laws.PADDINGS])
def test_the_tangent_never_exceeds_the_true_log_weight(name: str, mask: str) -> None:
    x = draw(n=31, m=37, spread=2.5)
    x = x if mask == "all" else padded(x, mask)
    _, lse = x.attend(BY_NAME[name].method, return_lse=True)
    _, truth = oracle.exact(*x.tensors, x.seen)
    not_above(lse, truth)


@pytest.mark.parametrize("name", TANGENT)
def test_the_tangent_is_exact_at_the_centroid(name: str) -> None:
    """Queries that are all alike are their own centroid."""
    x = draw(n=12, m=21)
    x = dataclasses.replace(x, q=x.q[:, :, :1].expand(-1, -1, 12, -1))
    close(x.attend(BY_NAME[name].method, return_lse=True), oracle.exact(*x.tensors, x.seen))


@pytest.mark.parametrize("name", FAR)
@pytest.mark.parametrize("mask", ["all", "holes"])
def test_more_parts_bring_the_log_weight_closer_to_the_truth_from_below(name: str, mask: str) -> None:
    """Clusters given, every part of one setting inside one of the setting before: a sum of tangents lies above the
    tangent of the sum (Jensen), and below the truth."""
    x = draw(n=31, m=37, spread=2.5)
    x = x if mask == "all" else padded(x, mask)
    method = BY_NAME[name].method
    groups, found = x.groups(dataclasses.replace(method, parts=1)), []
    for count in (1, 2, 4, 8, 16, 37):
        labels = torch.arange(37).mul(count).div(37, rounding_mode="floor").expand(2, 2, 37)
        if x.key_mask is not None:
            labels = labels.masked_fill(~x.key_mask[:, None], -1)
        parts = dataclasses.replace(groups, parts=ca.Parts(labels, count))
        found.append(x.attend(dataclasses.replace(method, parts=count), groups=parts, return_lse=True))
    _, one = x.attend(dataclasses.replace(method, parts=1), groups=groups, return_lse=True)
    close(found[0][1], one)
    truth = oracle.exact(*x.tensors, x.seen)
    for (_, fewer), (_, more) in itertools.pairwise(found[:-1]):  # 1, 2, 4, 8, 16: each divides the next
        not_above(fewer, more)
        not_above(more, truth[1])
    close(found[-1], truth)


@pytest.mark.parametrize("name", FAR)
def test_the_slope_adds_nothing_at_a_centroid_and_rows_still_sum_to_one(name: str) -> None:
    """Four distinct queries, six times each, in their own clusters: everybody is a centroid."""
    x = draw(n=24, m=30)
    method = BY_NAME[name].method
    groups = x.groups(method)
    rows = ca.attention_matrix(*x.tensors, method=dataclasses.replace(method, slope=True), groups=groups)
    flat = ca.attention_matrix(*x.tensors, method=dataclasses.replace(method, slope=False), groups=groups)
    assert not torch.allclose(rows, flat)
    close(rows.sum(-1), torch.ones_like(rows[..., 0]))
    labels = torch.arange(4).repeat(6).expand(2, 4, 24)
    alike = dataclasses.replace(x, q=x.q[:, :, :4].repeat(1, 1, 6, 1))
    groups = dataclasses.replace(
        groups, labels=labels, member_of=labels, counts=torch.full((2, 4, 4), 6), means=x.q[:, :, :4].contiguous()
    )
    wanted = alike.attend(dataclasses.replace(method, slope=False), groups=groups, return_lse=True)
    close(alike.attend(dataclasses.replace(method, slope=True), groups=groups, return_lse=True), wanted)


@pytest.mark.parametrize("slope", [False, True])
def test_the_slope_is_the_derivative_of_the_far_answer(slope: bool) -> None:
    """One cluster, no near keys: near its centroid exact attention moves as the slope says, to first order."""
    x = draw(b=1, h=1, hk=1, n=8, m=20)
    centre, step = x.q[:, :, :1], 1e-4
    apart = torch.cat([x.q[:, :, 1:5], -x.q[:, :, 1:5]], 2) * step  # their mean is 0
    x = dataclasses.replace(x, q=centre + apart)
    method = ca.Refined(clusters=1, top=0, parts=1, slope=slope, steps=1)
    error = (x.attend(method) - oracle.exact(*x.tensors, x.seen)[0]).abs().max()
    assert (float(error) < 1e-6) == slope


@pytest.mark.parametrize("name", ["refined", "refined-block", "refined-slope", "refined-slope-block"])
def test_under_causality_too_refined_stays_below_the_true_log_weight(name: str) -> None:
    x = draw(n=37, m=41, spread=2.5)
    _, lse = x.attend(BY_NAME[name].method, causal=True, return_lse=True)
    _, truth = oracle.exact(*x.tensors, x.seen_when(True))
    not_above(lse, truth)


# ---- law 9 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CAUSAL_NEAR)
@pytest.mark.parametrize(("n", "m"), [(29, 29), (20, 33), (33, 20)])
@pytest.mark.parametrize("mask", ["all", *laws.PADDINGS])
def test_causal_with_all_keys_near_is_causal_exact(name: str, n: int, m: int, mask: str) -> None:
    x = draw(n=n, m=m)
    x = x if mask == "all" else padded(x, mask)
    equals_exact(x, dataclasses.replace(BY_NAME[name].method, top=m), causal=True)


@over(
    laws.CAUSAL,
    where=lambda case: case.limit is not None and getattr(case.method, "centroids_from", "block") == "block",
)
def test_at_the_limit_every_method_is_causally_exact(case: Case) -> None:
    """Own clusters for all makes exact only where a block's own queries may form them."""
    x = draw(case, n=21, m=26)
    equals_exact(x, case.limit(21, x.k.shape[2]), causal=True)


@over(laws.CAUSAL, where=lambda case: case.family)
def test_the_first_block_is_exact(case: Case) -> None:
    for m in (29, 40):
        x = draw(n=29, m=m)
        got = x.attend(case.method, causal=True, return_lse=True)
        wanted = oracle.exact(*x.tensors, x.seen_when(True))
        first = case.method.block
        close([part[:, :, :first] for part in got], [part[:, :, :first] for part in wanted])


def merged(
    one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    lse = torch.logaddexp(one[1], other[1])
    shares = [(part - lse).exp().unsqueeze(-1) for part in (one[1], other[1])]
    return shares[0] * one[0] + shares[1] * other[0], lse


def half_by_half(x: laws.Inputs, method: Any, groups: Any, cut: int) -> tuple[torch.Tensor, ...]:
    answers = [
        ca.attention(x.q, x.k[:, :, part], x.v[:, :, part], method=method, groups=groups, return_lse=True)
        for part in (slice(0, cut), slice(cut, None))
    ]
    return merged(*answers)


@pytest.mark.parametrize("name", ["exact", *PLAIN])
def test_two_halves_of_the_keys_join_to_the_whole(name: str) -> None:
    """Clusters given. At the centroid the tangent of the whole is the sum of the tangents of its parts."""
    x = draw(n=24, m=30)
    x = dataclasses.replace(x, q=x.q[:, :, :4].repeat(1, 1, 6, 1))
    method = BY_NAME[name].method
    groups = None
    if name != "exact":
        groups = x.groups(dataclasses.replace(method, clusters=4))
        labels = torch.arange(4).repeat(6).expand(2, 4, 24)
        groups = dataclasses.replace(
            groups,
            labels=labels,
            member_of=labels,
            counts=torch.full((2, 4, 4), 6),
            means=x.q[:, :, :4].contiguous(),
        )
    close(half_by_half(x, method, groups, 13), x.attend(method, groups=groups, return_lse=True))


@pytest.mark.parametrize("cut", [13, 15])
def test_parts_on_either_side_of_a_cut_join_to_the_whole(cut: int) -> None:
    """Clusters and parts given, no part on both sides, no near keys: every part is the same virtual key either way."""
    x = draw(n=24, m=30)
    method = ca.Refined(clusters=5, top=0, parts=6, slope=False, steps=2)
    groups = x.groups(method)
    labels = torch.cat([torch.arange(cut) % 2, 2 + torch.arange(30 - cut) % 4]).expand(2, 2, 30)
    answers = []
    for keys in (slice(0, cut), slice(cut, None), slice(None)):
        parts = ca.Parts(labels[:, :, keys], 6)
        part = dataclasses.replace(groups, parts=parts)
        few = dataclasses.replace(x, k=x.k[:, :, keys], v=x.v[:, :, keys])
        answers.append(few.attend(method, groups=part, return_lse=True))
    close(merged(*answers[:2]), answers[2])


@pytest.mark.parametrize("name", PLAIN)
def test_joining_parts_can_only_bring_the_tangent_closer(name: str) -> None:
    """Elsewhere a sum of tangents lies between the tangent of the sum and the truth (convexity)."""
    x = draw(n=24, m=30)
    method = BY_NAME[name].method
    groups = x.groups(method)
    _, parts = half_by_half(x, method, groups, 13)
    _, whole = x.attend(method, groups=groups, return_lse=True)
    _, truth = oracle.exact(*x.tensors, x.seen)
    not_above(whole, parts)
    not_above(parts, truth)


@pytest.mark.parametrize("name", ["smyrf", "routing"])
def test_two_halves_of_every_bucket_join_to_the_whole(name: str) -> None:
    x = draw(n=18, m=24)
    g = torch.Generator().manual_seed(5)
    queries = torch.stack([torch.randperm(18, generator=g).view(3, 6) for _ in range(8)]).view(2, 4, 3, 6)
    keys = torch.stack([torch.randperm(24, generator=g).view(3, 8) for _ in range(8)]).view(2, 4, 3, 8)
    seat = torch.arange(8)
    parts = [
        x.attend(BY_NAME[name].method, groups=ca.Buckets(queries, keys.masked_fill(hidden, -1)), return_lse=True)
        for hidden in (seat < 3, seat >= 3)
    ]
    whole = x.attend(BY_NAME[name].method, groups=ca.Buckets(queries, keys), return_lse=True)
    close(merged(*parts), whole)
