"""Bad input gets a ValueError or TypeError that says what was wanted, what came and what to try."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import laws
import pytest
import torch
from laws import draw, over
from torch._subclasses.fake_tensor import FakeTensorMode

import clusterattn as ca

X = draw(n=12, m=12, dtype=torch.float32)
Q, K, V = X.tensors

BAD: dict[str, tuple[str, Callable[[], Any]]] = {
    # what is wrong: (a word that the error must contain, the call)
    "rank of q": ("q", lambda: ca.attention(Q[0], K, V)),
    "rank of k": ("k", lambda: ca.attention(Q, K[0], V)),
    "rank of v": ("v", lambda: ca.attention(Q, K, V[0])),
    "not a tensor": ("list", lambda: ca.attention(Q.tolist(), K, V)),
    "heads that do not divide": ("heads", lambda: ca.attention(Q[:, :3], K, V)),
    "heads of k and v": ("v", lambda: ca.attention(Q, K, V[:, :1])),
    "batch sizes": ("agree", lambda: ca.attention(Q, K[:1], V[:1])),
    "lengths of k and v": ("v", lambda: ca.attention(Q, K, V[:, :, :5])),
    "key dims": ("k", lambda: ca.attention(Q, K[..., :3], V)),
    "integers": ("int64", lambda: ca.attention(Q.long(), K.long(), V.long())),
    "bool": ("bool", lambda: ca.attention(Q > 0, K > 0, V > 0)),
    "complex": ("complex", lambda: ca.attention(*(t.to(torch.complex64) for t in (Q, K, V)))),
    "mixed dtypes": ("float64", lambda: ca.attention(Q, K.double(), V)),
    "mixed devices": ("meta", lambda: ca.attention(Q, K.to("meta"), V)),
    "device of the mask": ("meta", lambda: attend(key_mask=torch.ones(2, 12, device="meta").bool())),
    "shape of key_mask": ("key_mask", lambda: attend(key_mask=torch.ones(2, 11, dtype=torch.bool))),
    "rank of key_mask": ("key_mask", lambda: attend(key_mask=torch.ones(2, 1, 12, 12, dtype=torch.bool))),
    "dtype of key_mask": ("key_mask", lambda: attend(key_mask=torch.ones(2, 12))),
    "shape of query_mask": ("query_mask", lambda: attend(query_mask=torch.ones(12, 2, dtype=torch.bool))),
    "dtype of query_mask": ("query_mask", lambda: attend(query_mask=torch.ones(2, 12, dtype=torch.int64))),
    "shape of key_lengths": ("key_lengths", lambda: attend(key_lengths=torch.tensor([3, 4, 5]))),
    "dtype of key_lengths": ("key_lengths", lambda: attend(key_lengths=torch.tensor([3.0, 4.0]))),
    "lengths below 0": ("-1", lambda: attend(key_lengths=torch.tensor([3, -1]))),
    "lengths beyond the keys": ("13", lambda: attend(key_lengths=torch.tensor([13, 12]))),
    "scale that is no number": ("nan", lambda: attend(scale=float("nan"))),
    "scale of another kind": ("str", lambda: attend(scale="1")),
    "scale in a tensor": ("Tensor", lambda: attend(scale=torch.tensor(0.5))),
    "scale without end": ("inf", lambda: attend(scale=float("-inf"))),
    "tensors without numbers": ("meta", lambda: ca.attention(*(t.to("meta") for t in (Q, K, V)))),
    "nested tensors": ("to_padded_tensor", lambda: ca.attention(nested(), K, V)),
    "jagged tensors": ("varlen_attention", lambda: ca.attention(nested(torch.jagged), K, V)),
    "sparse tensors": ("to_dense", lambda: ca.attention(Q, K.to_sparse(), V)),
    "mask and lengths": (
        "key_lengths",
        lambda: attend(key_mask=torch.ones(2, 12, dtype=torch.bool), key_lengths=torch.tensor([3, 4])),
    ),
    "generator of another kind": ("generator", lambda: attend(generator=3)),
    "seed of another kind": ("seed", lambda: attend(seed="three")),
    "seed in a tensor of another kind": ("int64 tensor", lambda: attend(seed=torch.zeros(2))),
    "unknown backend": ("cuda", lambda: attend(backend="cuda")),
    "no such kernel": ("Triton", lambda: ca.groups(*(t.double() for t in (Q, K, V)), backend="triton")),
    "unknown method": ("improve", lambda: attend(method="improve")),
    "unknown setting": ("cluster", lambda: attend(method="improved:cluster=3")),
    "setting of another kind": ("clusters", lambda: attend(method="improved:clusters=many")),
    "method of another kind": ("float", lambda: attend(method=3.5)),
    "class for method": ("Improved", lambda: attend(method=ca.Improved)),
    "unknown key of a dict": ("colour", lambda: ca.method({"method": "local", "colour": 3})),
    "dict without a method": ("method", lambda: ca.method({"clusters": 3})),
    "no clusters": ("clusters", lambda: ca.Clustered(clusters=0)),
    "clusters by halves": ("clusters", lambda: ca.Clustered(clusters=2.5)),
    "no bits": ("bits", lambda: ca.Clustered(bits=0)),
    "no steps": ("steps", lambda: ca.Clustered(steps=0)),
    "no sample": ("sample", lambda: ca.Clustered(sample=0)),
    "no block": ("block", lambda: ca.Clustered(block=0)),
    "no near keys": ("top", lambda: ca.Improved(top=0)),
    "unknown metric": ("cosine", lambda: ca.Clustered(metric="cosine")),
    "unknown start": ("start", lambda: ca.Clustered(start="kmeans++")),
    "unknown mass": ("mass", lambda: ca.Improved(mass="secant")),
    "unknown centroids_from": ("centroids_from", lambda: ca.Refined(centroids_from="future")),
    "no rounds": ("rounds", lambda: ca.Smyrf(rounds=0)),
    "no seats": ("q_seats", lambda: ca.Smyrf(q_seats=0)),
    "unknown transform": ("transform", lambda: ca.Smyrf(transform="xbox")),
    "no chunk": ("chunk", lambda: ca.Reformer(chunk=0)),
    "no window": ("window", lambda: ca.Routing(window=0)),
    "decay above one": ("decay", lambda: ca.Routing(decay=1.5)),
    "no blocks": ("blocks", lambda: ca.ClusterFormer(blocks=0)),
    "no best keys": ("top", lambda: ca.OracleTop(top=0)),
    "no local window": ("window", lambda: ca.Local(window=0)),
    "clusters for buckets": (
        "Buckets",
        lambda: attend(method=ca.Smyrf(), groups=X.groups(ca.Clustered(clusters=3))),
    ),
    "buckets for clusters": ("Clusters", lambda: attend(method="improved", groups=X.groups(ca.Smyrf()))),
    "groups of another length": (
        "groups",
        lambda: attend(method="clustered", groups=draw(n=9).groups(ca.Clustered(clusters=3))),
    ),
    "groups for exact": ("exact", lambda: attend(method="exact", groups=X.groups(ca.Smyrf()))),
    "points for others": ("points", lambda: attend(method="improved", points=torch.zeros(2, 12, 8))),
    "shape of points": ("points", lambda: attend(method="clusterformer", points=torch.zeros(2, 11, 8))),
    "state for others": ("state", lambda: attend(method="improved", state=torch.zeros(3))),
    "state wanted of others": ("state", lambda: attend(method="improved", return_state=True)),
    "negative dropout": ("dropout", lambda: attend(method="exact", dropout_p=-0.5)),
    "dropout above one": ("dropout", lambda: attend(method="exact", dropout_p=1.5)),
}  # fmt: skip


def nested(layout: torch.layout = torch.strided) -> torch.Tensor:
    rows = [each.transpose(0, 1) for each in (Q[0], Q[1, :, :5])]
    return torch.nested.nested_tensor(rows, layout=layout).transpose(1, 2)


def attend(**given: Any) -> Any:
    return ca.attention(Q, K, V, **{"method": "improved", **given})


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_answered_with_wanted_got_try(what: str) -> None:
    word, call = BAD[what]
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    says = str(caught.value)
    assert re.search(r"wanted .+ got .+ try .+", says, re.DOTALL), says
    assert word.lower() in says.lower(), says


@pytest.mark.parametrize(
    ("spec", "near"),
    [
        ("refined:cluster=16", "clusters"),
        ({"method": "smyrf", "round": 2}, "rounds"),
        ("refned", "refined"),
        ("Clusterd:clusters=4", "clustered"),
        ("route", "routing"),
    ],
)
def test_a_slip_of_the_pen_is_answered_with_the_word_that_was_meant(spec: Any, near: str) -> None:
    with pytest.raises(ValueError, match=rf"\(did you mean {near}\?\); try .*{near}"):
        ca.method(spec)


def test_what_is_like_nothing_is_not_guessed_at() -> None:
    for spec in ("xyzzy", "refined:colour=red"):
        with pytest.raises(ValueError) as caught:
            ca.method(spec)
        assert "did you mean" not in str(caught.value)


def test_lengths_are_not_looked_at_in_a_graph() -> None:
    """There they act as if clamped, as on a GPU."""
    lengths = torch.tensor([20, -3])
    method = ca.Improved(clusters=3, top=2)
    compiled = torch.compile(lambda rows: attend(method=method, key_lengths=rows), backend="eager", fullgraph=True)
    assert torch.equal(compiled(lengths), attend(method=method, key_lengths=lengths.clamp(0, 12)))


@over(where=lambda case: case.name != "exact")
def test_dropout_is_refused_never_ignored(case: laws.Case) -> None:
    with pytest.raises(ValueError, match=r"(?s)wanted.*dropout.*Exact"):
        ca.attention(Q, K, V, method=case.method, dropout_p=0.1)


@over(where=lambda case: case.name != "exact")
@pytest.mark.parametrize("kind", ["bool", "bias"])
def test_dense_masks_and_biases_are_refused_naming_exact(case: laws.Case, kind: str) -> None:
    dense = torch.ones(12, 12, dtype=torch.bool) if kind == "bool" else torch.zeros(2, 4, 12, 12)
    with pytest.raises(ValueError, match=r"(?s)wanted.*Exact"):
        ca.attention(Q, K, V, method=case.method, attn_mask=dense)


def test_exact_takes_dense_masks_biases_and_dropout() -> None:
    dense = torch.rand(2, 1, 12, 12, generator=torch.Generator().manual_seed(0)) < 0.6
    dense[:, :, 3] = False
    wanted = torch.nn.functional.scaled_dot_product_attention(
        Q, K.repeat_interleave(2, 1), V.repeat_interleave(2, 1), attn_mask=dense
    ).nan_to_num()
    laws.close(ca.attention(Q, K, V, method="exact", attn_mask=dense), wanted)
    bias = torch.zeros(2, 1, 12, 12).masked_fill(~dense, float("-inf"))
    laws.close(ca.attention(Q, K, V, method="exact", attn_mask=bias), wanted)
    dropped = ca.attention(Q, K, V, method="exact", dropout_p=0.5)
    assert not torch.equal(dropped, ca.attention(Q, K, V, method="exact"))


def test_groups_and_matrix_check_their_input_too() -> None:
    for call in (ca.groups, ca.attention_matrix):
        for bad in (lambda call=call: call(Q[0], K), lambda call=call: call(Q, K, method="nothing")):
            with pytest.raises(ValueError, match=r"(?s)wanted.*got.*try"):
                bad()


def test_errors_reach_the_caller_from_compiled_code_too() -> None:
    def refuse(q: torch.Tensor) -> torch.Tensor:
        return ca.attention(q, K, V, method=ca.Refined(clusters=3, top=2), dropout_p=0.3)

    with pytest.raises(Exception, match="dropout"):
        torch.compile(refuse, backend="eager")(Q)


def test_shapes_alone_are_answered_in_fake_mode() -> None:
    with FakeTensorMode():
        q, lengths = torch.empty(2, 4, 12, 8), torch.empty(2, dtype=torch.int64)
        assert ca.attention(q, q, q, method=ca.Clustered(clusters=3), key_lengths=lengths).shape == q.shape
