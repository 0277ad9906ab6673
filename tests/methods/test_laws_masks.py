"""Law 2: padding changes nothing, a row that sees nothing says nothing, a batch row ends at its edge."""

from __future__ import annotations

import dataclasses
from typing import Any

import laws
import pytest
import torch
from laws import Case, Inputs, close, draw, gradients, kinds, over, padded, same_bits

import clusterattn as ca
from clusterattn.methods import _grouping

JUNK = {"nan": float("nan"), "inf": float("inf"), "huge": 3e38, "zero": 0.0}


def with_junk(x: Inputs, junk: float) -> Inputs:
    """The same sequence with something else in its padding."""
    assert x.key_mask is not None
    assert x.query_mask is not None
    hidden_keys, hidden_queries = ~x.key_mask[:, None, :, None], ~x.query_mask[:, None, :, None]
    return dataclasses.replace(
        x,
        q=x.q.masked_fill(hidden_queries, junk),
        k=x.k.masked_fill(hidden_keys, junk),
        v=x.v.masked_fill(hidden_keys, junk),
    )


@over()
@pytest.mark.parametrize("padding", laws.PADDINGS)
def test_the_content_of_padding_changes_no_bit(case: Case, padding: str) -> None:
    for causal in kinds(case):
        x = padded(draw(case, dtype=torch.float32, m=34), padding)
        wanted = x.attend(case.method, causal=causal, return_lse=True)
        assert not wanted[0].isnan().any()
        for junk in JUNK.values():
            same_bits(with_junk(x, junk).attend(case.method, causal=causal, return_lse=True), wanted)


@over()
@pytest.mark.parametrize("padding", laws.PADDINGS)
def test_the_content_of_padding_changes_no_gradient_and_gets_none(case: Case, padding: str) -> None:
    for causal in kinds(case):
        x = padded(draw(case, dtype=torch.float32, m=34), padding)
        found = []
        for inputs in (x, with_junk(x, float("nan"))):
            leaves = inputs.leaves()
            found.append(gradients(leaves.attend(case.method, causal=causal, return_lse=True), leaves))
        same_bits(found[1], found[0])
        for grad, mask in zip(found[1], (x.query_mask, x.key_mask, x.key_mask), strict=True):
            assert grad.isfinite().all()
            assert (grad.transpose(1, 2)[~mask] == 0).all()


@over()
@pytest.mark.parametrize("padding", laws.PADDINGS)
def test_padded_equals_unpadded(case: Case, padding: str) -> None:
    """Tokens that are hidden might as well not be there. (To Local a hole is a distance.)"""
    if case.name == "local":
        padding = "left" if padding == "holes" else padding
    x = with_junk(padded(draw(case, m=29 if case.name == "local" else 34), padding), 9.0)
    got = x.attend(case.method, return_lse=True)
    for row in range(2):
        kept, shown = x.query_mask[row], x.key_mask[row]
        alone = Inputs(x.q[row : row + 1, :, kept], x.k[row : row + 1, :, shown], x.v[row : row + 1, :, shown])
        close([part[row : row + 1, :, kept] for part in got], alone.attend(case.method, return_lse=True))


@pytest.mark.parametrize("padding", laws.PADDINGS)
@pytest.mark.parametrize("share_heads", [False, True])
@pytest.mark.parametrize("clusters", [5, 500])  # fewer than queries; more
def test_parts_seen_from_starts_know_no_padding(
    clusters: int, share_heads: bool, padding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_grouping, "FROM_STARTS", 2)
    method = ca.Refined(clusters=clusters, top=4, steps=2, parts=6, slope=True, start="random", share_heads=share_heads)
    assert _grouping.from_starts(method)
    case = Case("refined-starts", method, None)
    test_the_content_of_padding_changes_no_bit(case, padding)
    test_padded_equals_unpadded(case, padding)


@over(laws.CAUSAL)
def test_causal_padding_on_the_right_might_as_well_not_be_there(case: Case) -> None:
    x = with_junk(padded(draw(case, n=29, m=29), "right"), 9.0)
    got = x.attend(case.method, causal=True, return_lse=True)
    for row in range(2):
        many = int(x.key_mask[row].sum())
        alone = Inputs(*(t[row : row + 1, :, :many] for t in x.tensors))
        close(
            [part[row : row + 1, :, :many] for part in got],
            alone.attend(case.method, causal=True, return_lse=True),
        )


@over()
def test_hidden_queries_answer_nothing(case: Case) -> None:
    x = padded(draw(case), "holes")
    out, lse = x.attend(case.method, return_lse=True)
    assert (out.transpose(1, 2)[~x.query_mask] == 0).all()
    assert (lse.transpose(1, 2)[~x.query_mask] == float("-inf")).all()


@over()
def test_rows_that_see_nothing_are_zero_with_no_weight_and_no_gradient(case: Case) -> None:
    """The second batch row has no key at all."""
    x = draw(case, m=34)
    mask = torch.ones(2, x.k.shape[2], dtype=torch.bool)
    mask[1] = False
    x = dataclasses.replace(x, key_mask=mask).leaves()
    for causal in kinds(case):
        out, lse = x.attend(case.method, causal=causal, return_lse=True)
        assert (out[1] == 0).all()
        assert (lse[1] == float("-inf")).all()
        assert lse[0].isfinite().all()
        for grad in gradients((out, lse), x):
            assert grad.isfinite().all()
            assert (grad[1] == 0).all()


@over(laws.CAUSAL, where=lambda case: not case.method.self_only)
def test_with_more_queries_than_keys_the_first_see_nothing(case: Case) -> None:
    """Causal is aligned to the bottom right: query i stands beside key i + m - n."""
    x = draw(n=20, m=14).leaves()
    out, lse = x.attend(case.method, causal=True, return_lse=True)
    assert (out[:, :, :6] == 0).all()
    assert (lse[:, :, :6] == float("-inf")).all()
    assert lse[:, :, 6:].isfinite().all()
    grads = gradients((out, lse), x)
    assert all(grad.isfinite().all() for grad in grads)
    assert (grads[0][:, :, :6] == 0).all()


@over()
def test_a_single_visible_key_is_the_answer(case: Case) -> None:
    """Fewer keys than clusters, near keys, seats or windows: with one value to see, it is the answer."""
    x = draw(case)
    mask = torch.zeros(2, 29, dtype=torch.bool)
    mask[:, 7] = True
    x = dataclasses.replace(x, key_mask=mask)
    if case.name == "local":
        x = dataclasses.replace(x, query_mask=mask)
    out, lse = x.attend(case.method, return_lse=True)
    if case.method.self_only or case.name == "local":  # the only token there is
        out, lse = out[:, :, 7:8], lse[:, :, 7:8]
    assert lse.isfinite().all()
    close(out, x.v[:, :, 7:8].repeat_interleave(2, 1).expand_as(out))


@over()
@pytest.mark.parametrize("junk", ["nan", "inf"])
def test_one_batch_row_cannot_touch_another(case: Case, junk: str) -> None:
    x = draw(case, dtype=torch.float32)
    wanted = x.attend(case.method, return_lse=True)
    for poisoned in ("q", "k", "v"):
        bad = getattr(x, poisoned).clone()
        bad[1, :, 3] = JUNK[junk]
        got = dataclasses.replace(x, **{poisoned: bad}).attend(case.method, return_lse=True)
        same_bits([part[0] for part in got], [part[0] for part in wanted])


@over()
def test_lengths_are_a_mask(case: Case) -> None:
    x = draw(case)
    lengths = torch.tensor([29, 17])
    mask = torch.arange(29) < lengths[:, None]
    by_mask: dict[str, Any] = {"key_mask": mask}
    by_length: dict[str, Any] = {"key_lengths": lengths}
    if case.method.self_only:
        by_mask["query_mask"] = by_length["query_mask"] = mask
    wanted = ca.attention(*x.tensors, method=case.method, **by_mask, return_lse=True)
    same_bits(ca.attention(*x.tensors, method=case.method, **by_length, return_lse=True), wanted)
