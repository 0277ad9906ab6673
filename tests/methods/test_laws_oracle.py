"""Every method against the dense oracle, groups given: answers, gradients (law 6); and the groups."""

from __future__ import annotations

import dataclasses
from typing import Any

import laws
import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import BY_NAME, Case, close, draw, gradients, kinds, over, padded
from laws_oracle import expected, expected_rows

import clusterattn as ca
from clusterattn.methods import routing
from clusterattn.ops import draw as draws


@over()
@pytest.mark.parametrize("mask", ["all", *laws.PADDINGS])
def test_answers_log_weights_and_gradients(case: Case, mask: str) -> None:
    for causal in kinds(case):
        x = draw(case, h=2, hk=1, n=21, m=26)
        x = x if mask == "all" else padded(x, mask)
        groups = x.groups(case.method, causal=causal)
        mine, theirs = x.leaves(), x.leaves()
        got = mine.attend(case.method, causal=causal, groups=groups, return_lse=True)
        wanted = expected(case, theirs, groups, causal)
        close(got, wanted)
        close(gradients(got, mine), gradients(wanted, theirs), got[1].dtype)
        close(x.attend(case.method, causal=causal), wanted[0])  # without groups it makes the same ones; without lse too


@over()
@given(data=st.data())
def test_any_shape_any_mask(case: Case, data: st.DataObject) -> None:
    size = st.integers(1, 14)
    n, hk, group = data.draw(size), data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2))
    m = n if case.method.self_only else data.draw(size)
    b = data.draw(st.integers(1, 2))
    causal = data.draw(st.booleans()) and case.method.causality != "no"
    x = draw(b=b, h=hk * group, hk=hk, n=n, m=m, d=data.draw(st.integers(1, 4)), e=data.draw(st.integers(1, 3)))

    def mask(length: int) -> torch.Tensor:
        return torch.tensor(data.draw(st.lists(st.booleans(), min_size=b * length, max_size=b * length))).view(
            b, length
        )

    if data.draw(st.booleans()):
        key_mask = mask(m)
        x = dataclasses.replace(x, key_mask=key_mask, query_mask=key_mask if case.method.self_only else mask(n))
    method = case.method
    if case.family:
        method = dataclasses.replace(method, clusters=data.draw(st.integers(1, 5)), block=data.draw(st.integers(1, 6)))
    if case.family and "clustered" not in case.name:
        method = dataclasses.replace(method, top=data.draw(st.integers(0 if case.method.mass == "tangent" else 1, 5)))
    if case.parts > 1:
        method = dataclasses.replace(method, parts=data.draw(st.integers(2, 6)))
    case = dataclasses.replace(case, method=method)
    groups = x.groups(method, causal=causal, seed=data.draw(st.integers(0, 3)))
    out, lse = x.attend(method, causal=causal, groups=groups, return_lse=True)
    wanted_out, wanted_lse = expected(case, x, groups, causal)
    assert out.isfinite().all()
    if case.family and causal:
        # The block before may hold no real query. Its centroid is then 0, all keys equally near: any will do.
        counts = oracle.repeat_heads(groups.counts, x.q.shape[1])
        nobody = counts.gather(2, groups.labels.clamp(min=0)) == 0 if counts.shape[2] else groups.labels > 0
        ties = nobody & (groups.labels >= 0)
        out, lse = out.masked_fill(ties[..., None], 0.0), lse.masked_fill(ties, 0.0)
        wanted_out, wanted_lse = (
            wanted_out.masked_fill(ties[..., None], 0.0),
            wanted_lse.masked_fill(ties, 0.0),
        )
    close((out, lse), (wanted_out, wanted_lse))


@over()
def test_the_matrix_is_what_is_applied(case: Case) -> None:
    for causal in kinds(case):
        x = padded(draw(case, h=2, hk=1, n=21, m=26), "holes")
        rows = ca.attention_matrix(*x.tensors, method=case.method, causal=causal, **x.masks)
        close(rows, expected_rows(case, x, x.groups(case.method, causal=causal), causal)[0])
        close(rows @ x.v, x.attend(case.method, causal=causal))
        assert (rows[~x.seen_when(causal)[:, None].expand_as(rows)] == 0).all()
        sums = rows.sum(-1)
        close(sums, (sums > 0.5).double())


# ---- law 6 ---------------------------------------------------------------------------------------


@over()
def test_gradcheck_with_groups_given(case: Case) -> None:
    for causal in kinds(case):
        method = dataclasses.replace(case.method, block=3, clusters=2) if case.family else case.method
        method = dataclasses.replace(method, parts=2, top=min(method.top, 2)) if case.parts > 1 else method
        x = draw(case, b=1, h=2, hk=1, n=5, m=6, d=2, e=2)
        x = dataclasses.replace(x, key_mask=torch.arange(x.k.shape[2])[None] != 2).leaves()
        groups = x.groups(method, causal=causal)

        fixed = {"method": method, "groups": groups, "causal": causal, "key_mask": x.key_mask}

        def attend(*tensors: torch.Tensor, fixed: dict[str, Any] = fixed) -> tuple[torch.Tensor, ...]:
            out, lse = ca.attention(*tensors, **fixed, return_lse=True)
            # log-weights in fp32 would be too coarse for finite differences
            return (out, lse[lse.isfinite()]) if lse.dtype == torch.float64 else (out,)

        assert torch.autograd.gradcheck(attend, x.tensors)


def test_detach_mass_is_the_old_gradient_and_not_the_true_one() -> None:
    x = draw(n=21, m=26)
    method = BY_NAME["improved"].method
    groups = x.groups(method)
    found = []
    for detach in (False, True):
        leaves = x.leaves()
        found.append(gradients(leaves.attend(dataclasses.replace(method, detach_mass=detach), groups=groups), leaves))
    close(found[0][2], found[1][2])  # the values' gradient does not pass through the mass
    for true, old in zip(found[0][:2], found[1][:2], strict=True):
        assert float((true - old).norm() / true.norm()) > 1e-3


def test_groups_carry_no_gradient_into_labels_but_means_follow_the_queries() -> None:
    x = draw().leaves()
    groups = x.groups("clustered:clusters=5,bits=31")
    assert not groups.labels.is_floating_point()
    out = x.attend(ca.Clustered(clusters=5, bits=31))
    (grad,) = torch.autograd.grad(out.sum() + out.square().sum(), x.q)
    assert (grad.abs().sum(-1) > 0).all()  # every member moves its centroid


# ---- the groups ----------------------------------------------------------------------------------


@over(where=lambda case: case.family)
@pytest.mark.parametrize("mask", ["all", *laws.PADDINGS])
def test_clusters_are_what_they_say(case: Case, mask: str) -> None:
    x = draw(case)
    x = x if mask == "all" else padded(x, mask)
    for causal in kinds(case):
        g = x.groups(case.method, causal=causal)
        b, h, n = g.labels.shape
        for bi in range(b):
            for hi in range(h):
                share = h // g.counts.shape[1]
                asking, theirs = oracle.crowd(x.q[bi], hi, share), oracle.crowd(g.member_of[bi], hi, share)
                for c in range(g.counts.shape[-1]):
                    here = (theirs == c).nonzero()[:, 0]
                    assert int(g.counts[bi, hi // share, c]) == len(here)
                    if len(here):
                        close(g.means[bi, hi // share, c], asking[here].mean(0))
        valid = x.query_mask if x.query_mask is not None else torch.ones(b, n, dtype=torch.bool)
        assert ((g.labels >= 0) <= valid[:, None]).all()
        assert (g.labels < g.counts.shape[-1]).all()
        if not causal:
            assert torch.equal(g.labels >= 0, valid[:, None].expand_as(g.labels))
            assert torch.equal(g.labels, g.member_of)
            assert (g.parts is None) == (case.parts == 1)
        if g.parts is not None:  # of the keys of a key head: every real one is in a part
            real = x.key_mask if x.key_mask is not None else torch.ones(b, 29, dtype=torch.bool)
            assert g.parts.count == case.parts
            assert g.parts.labels.shape == (2, 2, 29)
            assert torch.equal(g.parts.labels >= 0, real[:, None].expand(2, 2, 29))
            assert (g.parts.labels < g.parts.count).all()


@pytest.mark.parametrize(("metric", "clusters", "n"), [("hamming", 6, 300), ("euclid", 9, 1500)])
def test_ten_steps_are_nine_updates_and_an_assignment(metric: str, clusters: int, n: int) -> None:
    """``steps`` counts assignments, the first to the starts, the last one of everybody; between two of them centres
    move once. The old code moves them after every assignment, ten times."""
    x = draw(n=n, m=20, seed=2)
    method = ca.Clustered(clusters=clusters, metric=metric, bits=31, steps=1)
    planes = draws.normal((31, x.q.shape[-1] + 1), 0, draws.STREAM_PLANES, x.q.device)[:, :-1].double()
    points = torch.where(x.q @ planes.T > 0, 1.0, -1.0).double() if metric == "hamming" else x.q
    labels = x.groups(method).labels
    seen = [labels]
    for _ in range(10):
        one_hot = torch.nn.functional.one_hot(labels, clusters).double().mT
        assert bool((one_hot.sum(-1) > 0).all())  # an empty cluster would keep its place
        centres = one_hot @ points
        centres = torch.where(centres > 0, 1.0, -1.0).double() if metric == "hamming" else \
            centres / one_hot.sum(-1, keepdim=True)  # fmt: skip
        labels = torch.cdist(points, centres).argmin(-1)
        seen.append(labels)
    for updates, wanted in enumerate(seen):
        got = x.groups(dataclasses.replace(method, steps=updates + 1)).labels
        assert torch.equal(got, wanted), updates
    if metric == "euclid":
        assert not torch.equal(seen[9], seen[10])  # here a tenth update would not be the same


@pytest.mark.parametrize("metric", ["hamming", "euclid", "keys"])
@pytest.mark.parametrize("start", ["random", "far"])
def test_well_separated_lumps_are_found(metric: str, start: str) -> None:
    """More clusters than lumps, enough steps: no cluster holds queries of two lumps."""
    g = torch.Generator().manual_seed(4)
    lump = torch.arange(60) % 3
    centres = torch.tensor([[20.0, 0, 0, 1], [0, 20.0, 0, -1], [0, 0, 20.0, 0]])
    q = (centres[lump] + torch.randn(60, 4, generator=g)).expand(1, 2, 60, 4)
    k = torch.randn(1, 2, 50, 4, generator=g)
    labels = ca.groups(q, k, method=ca.Clustered(clusters=12, metric=metric, start=start)).labels
    for head in range(2):
        for c in range(12):
            assert lump[labels[0, head] == c].unique().numel() <= 1


@over(where=lambda case: case.name.startswith("smyrf"))
@pytest.mark.parametrize(("n", "m"), [(29, 29), (40, 13), (13, 40), (5, 1)])
def test_smyrf_seats_everybody_once_a_round_and_evenly(case: Case, n: int, m: int) -> None:
    x = padded(draw(n=n, m=m), "holes")
    g = x.groups(case.method)
    rounds = case.method.rounds
    for row in range(2):
        for table, mask in ((g.queries, x.query_mask), (g.keys, x.key_mask)):
            for head in range(4):
                for part in table[row, head].chunk(rounds):
                    seated = part[part >= 0].tolist()
                    assert set(seated) == set(mask[row].nonzero()[:, 0].tolist())
                    used = (part >= 0).sum(-1)
                    used = used[used > 0]
                    assert int(used.max()) - int(used.min()) <= 1
                    if len(set(seated)) >= len(
                        used
                    ):  # fewer keys than buckets: they are shared, no bucket goes without
                        assert len(seated) == len(set(seated))


def test_smyrf_lift_keeps_products_and_makes_norms_equal() -> None:
    from clusterattn.ops.hashing import lifts

    x = draw(h=2, hk=2, n=9, m=11)
    p, w = oracle.asymmetric(x.q[0, 0], x.k[0, 0])
    close(p @ w.mT, x.q[0, 0] @ x.k[0, 0].mT)
    norm = p.norm(dim=-1)
    close(torch.cat([norm, w.norm(dim=-1)]), norm[:1].expand(20))
    every = [torch.ones(2, length, dtype=torch.bool) for length in (9, 11)]
    lift_q, lift_k = lifts(x.q, x.k, *every)
    close(lift_q[0, 0], p[:, -1])
    close(lift_k[0, 0], w[:, -2])


@pytest.mark.parametrize("mask", ["all", *laws.PADDINGS])
def test_reformer_chunks_hold_everybody_once_a_round_and_look_one_back(mask: str) -> None:
    x = draw(n=30, m=30)
    x = x if mask == "all" else padded(x, mask)
    g = x.groups(ca.Reformer(rounds=3, chunk=4))
    for row in range(2):
        real = set(range(30)) if mask == "all" else set(x.key_mask[row].nonzero()[:, 0].tolist())
        for part, seen in zip(g.queries[row, 0].chunk(3), g.keys[row, 0].chunk(3), strict=True):
            chunks = [c[c >= 0].tolist() for c in part if (c >= 0).any()]
            assert sorted(one for chunk in chunks for one in chunk) == sorted(real)
            for i, keys in enumerate(seen[: len(chunks)]):
                assert sorted(keys[keys >= 0].tolist()) == sorted(chunks[i] + chunks[i - 1])


@pytest.mark.parametrize("mask", ["all", *laws.PADDINGS])
@pytest.mark.parametrize("ties", ["forward", "turns"])
@pytest.mark.parametrize(("clusters", "blocks"), [(4, 2), (5, 3), (2, 2), (1, 2)])
def test_clusterformer_follows_equations_2_to_11(mask: str, clusters: int, blocks: int, ties: str) -> None:
    x = draw(n=22, m=22)
    x = x if mask == "all" else padded(x, mask)
    g = torch.Generator().manual_seed(8)
    points = torch.randn(2, 22, 7, generator=g, dtype=torch.float64).requires_grad_()
    start = torch.randn(clusters, 7, generator=g, dtype=torch.float64).requires_grad_()
    method = ca.ClusterFormer(
        clusters=clusters, blocks=blocks, scope="shared", similarity="inner", trains="all", ties=ties
    )
    asked = {"points": points, "state": start}
    _, state = x.attend(method, **asked, return_state=True)
    buckets = x.groups(method, **asked)
    first, second = [], []
    for row in range(2):
        valid = x.key_mask[row] if mask != "all" else None
        _, labels, new, l1, l2 = oracle.neural_clustering(points[row], start, valid)
        close(state.centroids[row], new)
        first.append(l1)
        second.append(l2)
        slices, windows = oracle.clusterformer_tables(labels, clusters, blocks, turns=ties == "turns")
        for table, wanted in ((buckets.queries, slices), (buckets.keys, windows)):
            for head in range(4):
                got = [seats[seats >= 0].tolist() for seats in table[row, head]]
                assert [sorted(one) for one in got if one] == [sorted(one) for one in wanted if one]
    losses = (torch.stack(first).mean(), torch.stack(second).mean())
    close((state.clustering_loss, state.sorting_loss), losses)
    for mine, theirs in zip((state.clustering_loss, state.sorting_loss), losses, strict=True):
        close(*(torch.autograd.grad(loss, (points, start), retain_graph=True) for loss in (mine, theirs)))


def test_clusterformer_hands_its_centroids_on() -> None:
    """A second layer takes the first one's, which are per example; the word-normalised share decides."""
    x = draw(n=22, m=22)
    method = ca.ClusterFormer(clusters=4, scope="shared", similarity="inner")
    _, first = x.attend(method, return_state=True)
    assert first.centroids.shape[:2] == (2, 4)
    out, second = x.attend(method, state=first, return_state=True)
    points = x.q.transpose(1, 2).flatten(2)
    for row in range(2):
        close(second.centroids[row], oracle.neural_clustering(points[row], first.centroids[row])[2])
    assert out.isfinite().all()


def test_routing_state_is_an_argument_and_a_result() -> None:
    x = draw(n=40, m=40)
    method = ca.Routing(clusters=4, window=10, decay=0.5)
    out, state = x.attend(method, return_state=True)
    assert state.means.shape == (4, 4, 6)
    again, moved = x.attend(method, state=state, return_state=True)
    assert not torch.equal(moved.means, state.means)
    same, _ = x.attend(method, state=state, return_state=True)
    assert torch.equal(again, same)  # nothing is kept anywhere else
    assert torch.equal(x.attend(method, state=state), again)
    _, frozen = x.attend(dataclasses.replace(method, decay=1.0), state=state, return_state=True)
    close(frozen.means, state.means)
    assert out.isfinite().all()
    leaves = x.leaves()
    _, learned = leaves.attend(method, state=state, return_state=True)
    (grad,) = torch.autograd.grad(learned.commitment, leaves.q)
    assert grad.abs().sum() > 0


@pytest.mark.parametrize("causal", [False, True])
def test_routings_answer_does_not_depend_on_how_tall_its_tiles_are(
    causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, method = draw(n=150, m=150), ca.Routing(clusters=3, window=70)
    want = x.attend(method, causal=causal, return_lse=True)
    for tiles in ((4, 4), (64, 64)):
        monkeypatch.setattr(routing, "TILES", tiles)
        assert x.groups(method, causal=causal).queries.shape[-1] == tiles[0]
        close(x.attend(method, causal=causal, return_lse=True), want)


def test_all_answers_come_in_the_order_the_contract_says() -> None:
    x = draw()
    method = ca.Routing(clusters=3, window=8)
    out, lse, state = x.attend(method, return_lse=True, return_state=True)
    assert out.shape == (2, 4, 29, 5)
    assert lse.shape == (2, 4, 29)
    assert state is not None
    assert ca.groups(x.q, x.k, method="exact") is None
    assert isinstance(ca.groups(*x.tensors), ca.Clusters)  # of Refined
    laws.same_bits(ca.attention(*x.tensors), ca.attention(*x.tensors, method=ca.Auto()))
