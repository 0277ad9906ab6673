"""The two functions that transformers calls: one makes masks, once per forward pass, one answers for a layer.

Masks stay small. Where a mask says no more than causality and padding, the layers get the padding alone: bool (b m),
or None; of packed sequences they get the numbers of the documents, int64 (b m). Everything else (windows, overlays,
caches of unknown filling) stays the dense mask of SDPA, and dense masks are answered exactly, except where they only
tell documents apart. This is the contract of flash attention in transformers, so models that support that are the
models that can be swapped.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from .._documents import Starts
from .._layer_call import LayerCall
from .._plan import LayerPlan, check_exact_below, check_stateless, is_plan
from .._report import log_once
from .._types import Method
from ..methods import Exact, Refined
from ..methods import method as as_method
from . import over_ranks, packed

NAME = "clusterattn"
"""The attention implementation: every layer, by the method that the config names or else Refined()."""
SWAPPED = "clusterattn_swapped"  # only the layers that ``swap`` has stamped; the others stay exact
STAMP = "_clusterattn"  # the attribute of an attention module that holds its Stamp

_sdpa = AttentionInterface()["sdpa"]  # type: ignore[no-untyped-call]
_sdpa_mask = AttentionMaskInterface()["sdpa"]  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Stamp:
    """A layer's settings, kept on its module."""

    name: str
    method: LayerPlan
    exact_below: int = 0
    why_exact: str = ""  # what is known beforehand to keep this layer exact
    eager: bool = False  # exact means the model's own plain attention, which it used before, and not SDPA
    self_attention: bool = True  # surely: the padding of keys is the padding of queries
    watch: Callable[[str, LayerCall], None] | None = None
    seed: int = 0  # of the method's draws
    parallel: Any = None  # the ranks that share the sequence: a process group or a DeviceMesh


# ---------------------------------------------------------------------------------------------------- masks


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Tensor | None:
    """(b m) bool, True = a real key; None when all keys are; a dense mask where neither says it all.

    A causal query i stands at key ``m - n + i``: of a cache that is longer than what it holds, m counts what it holds.
    """
    causal = mask_function is causal_mask_function
    plain = (causal or mask_function is bidirectional_mask_function) and kv_offset == 0
    plain = plain and (attention_mask is None or attention_mask.dim() == 2)
    # A mask that may not be left out is about to be changed by the model: it must be dense.
    needed = not options.get("allow_is_causal_skip" if causal else "allow_is_bidirectional_skip", causal)
    held = None if needed or not plain or q_length == 1 else kv_length
    if held is not None and causal:
        held = _held(q_offset, q_length, kv_length)
    if held is None:
        if q_length not in (1, kv_length):
            options["allow_is_causal_skip"] = False  # SDPA would take "no mask" as causal from the top left
        dense: Tensor | None = _sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            **options,
        )
        return dense
    keys = attention_mask
    if keys is not None:
        keys = F.pad(keys.bool(), (0, max(held - keys.shape[-1], 0)))[:, :held].expand(batch_size, -1)
        # Looked at once per forward pass, as transformers does itself, to save every layer the work of masking.
        return None if held == kv_length and not _tracing(keys) and keys.all() else keys
    if held < kv_length:
        return torch.ones(batch_size, held, dtype=torch.bool, device=options.get("device"))
    return None


def mask_swapped(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Tensor | None:
    """As ``mask``, but of packed sequences the numbers of the documents (b m): the layers of a swapped model are known
    not to change masks on their way."""
    if attention_mask is None and q_length == kv_length and not torch.compiler.is_compiling():
        documents = packed.in_function(mask_function)
        if documents is not None and not _tracing(documents):
            return documents
    return mask(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, **options)


def _held(q_offset: int | Tensor, q_length: int, kv_length: int) -> int | None:
    """How many keys there are with these queries; None where that is not to be known: a static cache counts on the
    device, and a graph must not look."""
    if isinstance(q_offset, Tensor):
        if _tracing(q_offset):
            return None
        q_offset = int(q_offset)
    return q_offset + q_length if q_offset + q_length <= kv_length else None


def _tracing(x: Tensor) -> bool:
    """May the numbers in x not be looked at?"""
    return torch.compiler.is_compiling() or (x.is_cuda and torch.cuda.is_current_stream_capturing())


# ---------------------------------------------------------------------------------------------------- attention


def attend(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[Tensor, Tensor | None]:
    """The implementation "clusterattn": a layer without a stamp goes by its config."""
    stamp = getattr(module, STAMP, None)
    return _attend(stamp or by_config(module), module, query, key, value, attention_mask, **given)


def attend_swapped(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[Tensor, Tensor | None]:
    """The implementation that ``swap`` sets: a layer without a stamp, of another part of the model, is exact."""
    stamp = getattr(module, STAMP, None)
    return _attend(stamp or _EXACT, module, query, key, value, attention_mask, **given)


_EXACT = Stamp("", Exact())


def by_config(module: torch.nn.Module) -> Stamp:
    """``config.clusterattn``: a method's name, short form or dict; its dict may also say exact_below."""
    config = getattr(module, "config", None)
    hint = getattr(config, "clusterattn", None)
    if is_plan(hint):
        log_once(type(module).__name__, "its config holds a plan, which goes by the names of layers: ca.hf.swap(model)")
        return _EXACT
    alone = not (getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False))
    below = hint.get("exact_below", 0) if isinstance(hint, dict) else 0
    check_exact_below(below)
    if isinstance(hint, dict):
        hint = {name: value for name, value in hint.items() if name != "exact_below"}
    method = as_method(hint or Refined())
    check_stateless(method)
    return Stamp("", method, below, self_attention=alone)


def _attend(
    stamp: Stamp,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **extra: Any,
) -> tuple[Tensor, Tensor | None]:
    """(b n h e), as transformers wants it, and the weights where they were asked for."""
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)  # as SDPA's function has it
    keys = mask if mask is not None and mask.dim() == 2 and mask.dtype == torch.bool else None
    if keys is not None and keys.shape[1] < key.shape[2]:  # a static cache: what it does not hold yet is cut off
        key, value = key[:, :, : keys.shape[1]], value[:, :, : keys.shape[1]]
    n, m = query.shape[2], key.shape[2]
    documents, causal = _documents(stamp, mask, causal, query.shape[0], n, m, extra)
    besides = mask if documents is None else None
    obstacle = stamp.why_exact or _obstacle(stamp, module, besides, dropout, causal, n, m, extra)
    as_asked = n == 1 or min(n, m) < stamp.exact_below
    method = Exact() if obstacle or as_asked else stamp.method
    queries = _query_mask(stamp, keys, causal, n, m)
    call = LayerCall(query, key, value, keys, queries, causal, scaling, method, seed=stamp.seed, documents=documents)
    if stamp.parallel is not None:
        shared = obstacle or ("" if documents is None else "a packed sequence: its documents would cross the ranks")
        return over_ranks.answer(stamp, call, shared).transpose(1, 2).contiguous(), None
    weights = None
    if isinstance(method, Exact):
        if obstacle and not stamp.why_exact and not as_asked:
            log_once(stamp.name or type(module).__name__, obstacle)
        out, weights = _exact(stamp, module, call, mask, dropout, extra)
    else:
        out = call.answer().transpose(1, 2).contiguous()
    if stamp.watch is not None and not obstacle and n > 1 and documents is None:
        stamp.watch(stamp.name, replace(call, out=out.transpose(1, 2)))
    return out, weights


def _documents(
    stamp: Stamp, mask: Tensor | None, causal: bool, b: int, n: int, m: int, extra: dict[str, Any]
) -> tuple[Tensor | Starts | None, bool]:
    """The documents of rows that hold several, and whether they are causal."""
    if mask is not None and mask.dim() == 2:
        return (mask if mask.dtype == torch.int64 and n == m else None), causal
    if stamp.why_exact or isinstance(stamp.method, Exact) or n != m:
        return None, causal
    if mask is None:
        return packed.in_words(extra, b), causal
    return (None if n < stamp.exact_below or _tracing(mask) else packed.in_dense(mask, b, n)) or (None, causal)


def _query_mask(stamp: Stamp, keys: Tensor | None, causal: bool, n: int, m: int) -> Tensor | None:
    """Padded queries are padded keys, where queries and keys are the same tokens."""
    if keys is None or n > m or not (causal or (n == m and stamp.self_attention)):
        return None
    return keys[:, m - n :]


OBSTACLES = {
    "position_bias": "a position bias is added to the logits",
    "softcap": "the logits are capped (softcap)",
    "s_aux": "attention sinks take part in the softmax",
    "sliding_window": "a sliding window limits the keys",
    "indices": "the model picks keys itself",
    "block_indices": "the model picks keys itself",
    "head_mask": "a head mask weighs the heads",
    "cache": "a paged cache holds the keys",
}
EAGER = ("softcap", "s_aux", "indices", "block_indices", "head_mask")  # what SDPA cannot honour either


def _obstacle(
    stamp: Stamp,
    module: torch.nn.Module,
    mask: Tensor | None,
    dropout: float,
    causal: bool,
    n: int,
    m: int,
    extra: dict[str, Any],
) -> str:
    """What keeps the stamp's method from serving this call, known only now; "" if nothing does."""
    if mask is not None and not (mask.dim() == 2 and mask.dtype == torch.bool):
        return "the mask says more than padding, documents and causality (a window, or one that was handed in)"
    for name, what in OBSTACLES.items():
        if extra.get(name) is not None:
            return what
    if _wants_weights(module, extra):
        return "the attention weights were asked for (output_attentions)"
    if dropout > 0.0:
        return "attention dropout needs the weights: set it to 0, or call eval()"
    for method in (stamp.method,) if isinstance(stamp.method, Method) else stamp.method:
        if method.self_only and n != m:
            return f"{type(method).__name__} needs as many keys as queries, which a cache or cross-attention breaks"
        if causal and method.causality == "no":
            return f"{type(method).__name__} cannot be causal"
    return ""


def _wants_weights(module: torch.nn.Module, extra: dict[str, Any]) -> bool:
    asked = extra.get("output_attentions")
    return bool(getattr(getattr(module, "config", None), "output_attentions", False) if asked is None else asked)


# ---------------------------------------------------------------------------------------------------- exact


def _exact(
    stamp: Stamp, module: torch.nn.Module, call: LayerCall, mask: Tensor | None, dropout: float, extra: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """What the layer would have done: the functions of transformers themselves, with the mask that they expect."""
    plain = stamp.eager or _wants_weights(module, extra) or any(extra.get(name) is not None for name in EAGER)
    eager = _eager(module) if plain else None
    n, m = call.q.shape[2], call.k.shape[2]
    if call.documents is not None and (mask is None or mask.dim() == 2):
        mask = packed.as_dense(call.documents, call.causal, n)
    elif mask is None or call.key_mask is not None:
        implied = eager is None and call.key_mask is None and n == m  # SDPA knows causality without a mask
        mask = _dense(call.key_mask, call.causal and n > 1 and not implied, n, m, call.q.device)
    options = {"dropout": dropout, "scaling": call.scale, **extra}
    answer: tuple[Tensor, Tensor | None]
    if eager is None:
        answer = _sdpa(module, call.q, call.k, call.v, mask, is_causal=call.causal, **options)
        return answer
    if mask is not None and mask.dtype == torch.bool:
        zero = torch.zeros((), dtype=call.q.dtype, device=mask.device)
        mask = torch.where(mask, zero, torch.finfo(call.q.dtype).min)
    answer = eager(module, call.q, call.k, call.v, mask, **options)
    return answer


def _dense(keys: Tensor | None, causal: bool, n: int, m: int, device: torch.device) -> Tensor | None:
    """(b 1 n m) or what broadcasts to it, True = seen; None when everybody sees everything."""
    seen = None if keys is None else keys[:, None, None, :]
    if not causal:
        return seen
    past = torch.arange(m, device=device) <= torch.arange(n, device=device).unsqueeze(-1) + (m - n)
    return past[None, None] if seen is None else past & seen


def _eager(module: torch.nn.Module) -> Callable[..., Any] | None:
    """The plain attention beside the module's class: every modeling file of transformers has it under this name."""
    for each in type(module).__mro__:
        found = getattr(sys.modules.get(each.__module__), "eager_attention_forward", None)
        if found is not None:
            return found  # type: ignore[no-any-return]
    return None


AttentionInterface.register(NAME, attend)
AttentionInterface.register(SWAPPED, attend_swapped)
AttentionMaskInterface.register(NAME, mask)
AttentionMaskInterface.register(SWAPPED, mask_swapped)
