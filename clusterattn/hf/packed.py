"""Packed sequences in transformers: the three ways in which a model says that a row holds several documents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import masking_utils
from transformers.masking_utils import and_masks, causal_mask_function, packed_sequence_mask_function

from .._documents import Starts

_AND = and_masks(causal_mask_function).__code__
_PACKED = packed_sequence_mask_function(torch.empty(0)).__code__
_places = getattr(masking_utils, "remap_positions_for_packed_sequence", None)  # since 5.23
_PLACES = None if _places is None else _places(causal_mask_function, torch.empty(0)).__code__
FORBIDDEN = -1e4  # what is added to a logit that must not count is at most this


def in_function(mask_function: Callable[..., Any]) -> Tensor | None:
    """(b n) numbers of documents, where a causal model found that its position ids begin anew, and nothing more is
    said. transformers tells that by a function made of two others: the documents, and causality, which since 5.23 asks
    for the places inside of documents; they rise by 1 there, so it says the same."""
    if getattr(mask_function, "__code__", None) is not _AND:
        return None
    (both,) = _inside(mask_function)
    kinds = [getattr(each, "__code__", None) for each in both]
    found: Tensor | None = None
    if len(both) == 2 and both[0] is causal_mask_function and kinds[1] is _PACKED:
        (found,) = _inside(both[1])
    elif _PLACES is not None and kinds == [_PACKED, _PLACES] and _inside(both[1])[0] is causal_mask_function:
        (found,) = _inside(both[0])
    return found


def _inside(function: Any) -> list[Any]:
    """What an inner function knows of the outer one, in the order of its names."""
    return [cell.cell_contents for cell in function.__closure__]


def in_words(extra: dict[str, Any], b: int) -> Starts | None:
    """Flash attention's own words, in a batch of one row: DataCollatorWithFlattening brings them."""
    queries, keys = extra.get("cu_seq_lens_q"), extra.get("cu_seq_lens_k")
    return Starts(queries, keys) if b == 1 and queries is not None and keys is not None else None


_KNOWN: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # masks that were looked at


def in_dense(mask: Tensor, b: int, n: int) -> tuple[Tensor, bool] | None:
    """Numbers of documents (b n), and whether they are causal, where a dense mask says no more than that. The host
    looks at a mask once, however many layers it goes through."""
    if mask.dim() != 4 or mask.shape[1:] != (1, n, n) or mask.shape[0] not in (1, b):
        return None
    if mask.is_inference():
        return _read_dense(mask, b)
    known = _KNOWN.get(mask)  # type: ignore[no-untyped-call]
    if known is None or known[:2] != (mask._version, b):
        _KNOWN[mask] = known = (mask._version, b, _read_dense(mask, b))
    found: tuple[Tensor, bool] | None = known[2]
    return found


def _read_dense(mask: Tensor, b: int) -> tuple[Tensor, bool] | None:
    seen = mask.squeeze(1) if mask.dtype == torch.bool else mask.squeeze(1) == 0
    if mask.dtype != torch.bool and not (seen | (mask.squeeze(1) <= FORBIDDEN)).all():
        return None  # a bias
    ids = torch.where(seen.any(-1), seen.to(torch.uint8).argmax(-1), -1)  # by the first token that is seen
    for causal in (True, False):
        if torch.equal(seen, as_dense(ids, causal).squeeze(1)):
            return ids.expand(b, -1), causal
    return None


def as_dense(documents: Tensor | Starts, causal: bool, n: int = 0) -> Tensor:
    """(b 1 n n) bool, True = seen."""
    if isinstance(documents, Starts):
        at = torch.arange(n, device=documents.queries.device)
        documents = torch.bucketize(at, documents.queries[1:], right=True).unsqueeze(0)
    same = (documents.unsqueeze(-1) == documents.unsqueeze(-2)) & (documents >= 0).unsqueeze(-1)
    return (same.tril() if causal else same).unsqueeze(1)
