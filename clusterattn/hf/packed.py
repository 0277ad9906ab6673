"""Packed sequences in transformers: the three ways in which a model says that a row holds several documents."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import masking_utils
from transformers.masking_utils import and_masks, causal_mask_function, packed_sequence_mask_function

from .._documents import Starts

FORBIDDEN = -1e4  # what is added to a logit that must not count is at most this

_NUMBERS, _POSITIONS = torch.empty(0), torch.empty(0)  # where a model's own will stand
_FORMS = [and_masks(causal_mask_function, packed_sequence_mask_function(_NUMBERS))]
if hasattr(masking_utils, "packed_sequence_compatibility_function"):
    # From 5.23 on causality goes by positions, which within a document rise one by one: it says the same.
    _FORMS.append(masking_utils.packed_sequence_compatibility_function(causal_mask_function, _POSITIONS, _NUMBERS))


def in_function(mask_function: Callable[..., Any]) -> Tensor | None:
    """(b n) numbers of documents, where a causal model found that its position ids begin anew, and nothing more is
    said. transformers tells that by a function made of others, put together as one of _FORMS is."""
    return next((found for form in _FORMS if (found := _numbers(mask_function, form)) is not None), None)


def _numbers(given: Any, form: Any) -> Tensor | None:
    """What a function has in the place of _NUMBERS, where it differs from the form in nothing but tensors."""
    numbers = None
    for theirs, ours in itertools.zip_longest(_made_of(given), _made_of(form)):
        if theirs is not ours and not (isinstance(theirs, Tensor) and isinstance(ours, Tensor)):
            return None
        numbers = theirs if ours is _NUMBERS else numbers
    return numbers


def _made_of(thing: Any) -> Iterator[Any]:
    """Step by step into a function: its code, then whatever it knows of the outer ones."""
    if isinstance(thing, FunctionType):
        yield thing.__code__
        thing = tuple(cell.cell_contents for cell in thing.__closure__ or ())
    if isinstance(thing, tuple):
        for each in thing:
            yield from _made_of(each)
    else:
        yield thing


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
