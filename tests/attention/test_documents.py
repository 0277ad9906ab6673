"""Rows of a batch that hold several documents, by their numbers."""

from __future__ import annotations

from typing import Any

import laws
import pytest
import torch
from laws import Case, Inputs, close, gradients, kinds, over, same_bits
from torch import Tensor

import clusterattn as ca

CAUSAL = laws.BY_NAME["refined"].method


def by_hand(x: Inputs, of_queries: Tensor, of_keys: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """``ca.attention`` with documents, row by row and document by document."""
    out = torch.zeros(*x.q.shape[:3], x.v.shape[3], dtype=x.q.dtype)
    lse = torch.full(x.q.shape[:3], float("-inf"), dtype=x.q.dtype)
    for row in range(len(of_queries)):
        for name in of_queries[row].unique():
            if name >= 0:
                queries, keys = of_queries[row] == name, of_keys[row] == name
                alone = x.q[row : row + 1, :, queries], x.k[row : row + 1, :, keys], x.v[row : row + 1, :, keys]
                one, weight = ca.attention(*alone, return_lse=True, **options)
                out, lse = _put(out, row, queries, one[0]), _put(lse, row, queries, weight[0])
    return out, lse


def _put(whole: Tensor, row: int, at: Tensor, part: Tensor) -> Tensor:
    rows = list(whole.unbind(0))
    rows[row] = rows[row].index_copy(1, at.nonzero().squeeze(-1), part)
    return torch.stack(rows)


@over()
def test_rows_of_several_documents(case: Case) -> None:
    """In any order, with other numbers in every row, and tokens that are nobody's."""
    x = laws.draw(case, n=29, m=29).leaves()
    ids = torch.randint(-1, 3, (2, 29), generator=torch.Generator().manual_seed(0))
    ids[1] = torch.tensor([7] * 20 + [4] * 9)
    for causal in kinds(case):
        got = x.attend(case.method, documents=ids, causal=causal, return_lse=True)
        wanted = by_hand(x, ids, ids, method=case.method, causal=causal)
        close(got, wanted)
        close(gradients(got, x), gradients(wanted, x))


def test_rows_with_numbers_for_queries_and_keys_and_masks() -> None:
    x = laws.draw(n=29, m=34).leaves()
    g = torch.Generator().manual_seed(0)
    of_queries, of_keys = (torch.randint(0, 3, (2, length), generator=g) for length in (29, 34))
    masks = [torch.rand(2, length, generator=g) < 0.8 for length in (29, 34)]
    shown = [torch.where(mask, ids, -1) for mask, ids in zip(masks, (of_queries, of_keys), strict=True)]
    for causal in (False, True):
        options: dict[str, Any] = {"method": CAUSAL, "causal": causal, "return_lse": True}
        wanted = by_hand(x, *shown, method=CAUSAL, causal=causal)
        got = x.attend(documents=(of_queries, of_keys), query_mask=masks[0], key_mask=masks[1], **options)
        close(got, wanted)
        close(x.attend(documents=tuple(shown), **options), wanted)
    lengths = torch.tensor([30, 17])
    mask = torch.arange(34) < lengths.unsqueeze(-1)
    by_mask, by_length = ({"key_mask": mask}, {"key_lengths": lengths})
    got, wanted = (x.attend(CAUSAL, documents=(of_queries, of_keys), **each) for each in (by_length, by_mask))
    same_bits(got, wanted)


def test_dropout_beside_documents_is_exact() -> None:
    x = laws.draw(n=20, m=20)
    ids = (torch.arange(20) // 8).expand(2, -1)
    v = torch.ones_like(x.v)
    torch.manual_seed(0)
    out = ca.attention(x.q, x.k, v, documents=ids, dropout_p=0.5)
    assert out.std() > 0.1
    close(ca.attention(x.q, x.k, v, documents=ids), torch.ones_like(out))


def test_wrong_numbers_of_documents_are_refused_by_a_sentence() -> None:
    x, ids = laws.draw(n=29, m=34), torch.zeros(2, 29, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"documents \(2 29\) of the queries and \(2 34\) of the keys; got one tensor"):
        x.attend(CAUSAL, documents=ids)
    with pytest.raises(ValueError, match=r"documents of shape \(2, 34\); got \(2, 29\)"):
        x.attend(CAUSAL, documents=(ids, ids.clone()))
    with pytest.raises(TypeError, match=r"documents of whole numbers; got torch.bool"):
        x.attend(CAUSAL, documents=(ids.bool(), ids))
    square = laws.draw()
    groups = square.groups(CAUSAL)
    for word, more in (("groups", {"groups": groups}), ("attn_mask", {"attn_mask": torch.ones(29, 29).bool()})):
        with pytest.raises(ValueError, match=f"documents without {word}="):
            square.attend(CAUSAL, documents=ids, **more)
    with pytest.raises(ValueError, match="documents without return_state="):
        square.attend("routing", documents=ids, return_state=True)
    with pytest.raises(ValueError, match="attention_matrix without documents"):
        ca.attention_matrix(square.q, square.k, documents=ids)
