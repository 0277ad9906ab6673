"""What the papers prove, held against real calls in fp64."""

from __future__ import annotations

import laws
import pytest
import torch
from laws import close, draw, not_above, padded

import clusterattn as ca
from clusterattn.measure import proposition1, subset_error
from clusterattn.measure.error import exact_matrix


@pytest.mark.parametrize("mask", ["all", *laws.PADDINGS])
@pytest.mark.parametrize(("metric", "scale", "hk"), [("hamming", None, 4), ("euclid", 0.9, 2), ("keys", 0.1, 1)])
@pytest.mark.parametrize("seed", [0, 1])
def test_proposition_1_bounds_the_distance_of_a_row_from_its_centroids_row(
    mask: str, metric: str, scale: float | None, hk: int, seed: int
) -> None:
    x = draw(n=40, m=33, h=4, hk=hk, seed=seed, spread=0.5)
    x = x if mask == "all" else padded(x, mask)
    method = ca.Clustered(clusters=5, metric=metric, steps=3)
    groups = x.groups(method)
    bound = proposition1(x.q, x.k, groups, key_mask=x.key_mask, scale=scale)
    centroids = groups.means.gather(2, groups.labels.clamp(min=0).unsqueeze(-1).expand_as(x.q))
    rows, of_centroids = (exact_matrix(each, x.k, key_mask=x.key_mask, scale=scale) for each in (x.q, centroids))
    true = (rows - of_centroids).norm(dim=-1).masked_fill(groups.labels < 0, 0.0)
    not_above(true, bound.tight)
    not_above(bound.tight, bound.printed / 2)
    assert float(bound.tight.mean()) > 0
    if scale is None and hk == 4:  # and these are the weights that clustered attention applies
        weights = ca.attention_matrix(x.q, x.k, method=method, **x.masks)
        close(weights[groups.labels >= 0], of_centroids[groups.labels >= 0])


def test_the_tight_bound_can_be_reached() -> None:
    """Two keys, opposite to each other, and queries near the middle: softmax is steepest there, with slope one half."""
    k = torch.tensor([[[[1.0, 0.0], [-1.0, 0.0]]]], dtype=torch.float64)
    q = torch.tensor([[[[1e-3, 5.0], [-1e-3, 5.0]]]], dtype=torch.float64)
    groups = ca.groups(q, k, method=ca.Clustered(clusters=1))
    bound = proposition1(q, k, groups, scale=1.0)
    exact = exact_matrix(q, k, scale=1.0)
    true = (exact - exact.mean(2, keepdim=True)).norm(dim=-1)
    assert bool((true / bound.tight > 0.999).all())


def test_proposition_1_is_about_clusters() -> None:
    x = draw()
    with pytest.raises(TypeError, match=r"wanted Clusters; got Buckets"):
        proposition1(x.q, x.k, x.groups(ca.Smyrf()))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "method",
    [ca.Local(window=5), ca.OracleTop(top=3), ca.ClusterFormer(clusters=4), ca.Smyrf(rounds=1, q_seats=8, k_seats=8)],
    ids=str,
)
def test_a_row_over_some_keys_is_off_by_twice_what_it_misses(method: ca.Method, causal: bool) -> None:
    x = draw(n=31, m=31)
    weights = ca.attention_matrix(x.q, x.k, method=method, causal=causal)
    _, lse = x.attend(method, causal=causal, return_lse=True)
    _, exact = x.attend(ca.Exact(), causal=causal, return_lse=True)
    true = (weights - exact_matrix(x.q, x.k, causal=causal)).abs().sum(-1)
    close(subset_error(lse, exact), true)
