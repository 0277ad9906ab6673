"""A model whose sequence many ranks hold together: its attention goes over all of it, or is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._errors import bad_value
from .._layer_call import LayerCall
from .._types import Method

if TYPE_CHECKING:
    from .register import Stamp

ADVICE = "parallel=None, on a device that holds the whole sequence"


def shared_out(stamp: Stamp, module: torch.nn.Module, parallel: Any) -> Stamp:
    """The stamp of a layer whose tokens are shared out; refused where it would have to answer exactly or causally."""
    reason = stamp.why_exact
    if not reason and getattr(module, "is_causal", False):
        reason = "it is causal, which is not made yet over many ranks"
    elif not reason and not (isinstance(stamp.method, Method) and stamp.method.name != "exact"):
        reason = "it has no method of the clustered family"
    elif not reason and stamp.exact_below:
        reason = f"exact_below={stamp.exact_below}"
    if reason:
        raise bad_value("layers that can all attend over many ranks", f"{stamp.name}: {reason}", ADVICE)
    return replace(stamp, parallel=parallel)


def answer(stamp: Stamp, call: LayerCall, obstacle: str) -> Tensor:
    """(b h n e), over the tokens of all ranks."""
    from .. import parallel

    if obstacle:
        raise bad_value("a call that ranks can share", f"{stamp.name}: {obstacle}", ADVICE)
    assert isinstance(stamp.method, Method)
    out: Tensor = parallel.attention(
        call.q,
        call.k,
        call.v,
        method=stamp.method,
        group=stamp.parallel,
        key_mask=call.key_mask,
        query_mask=call.query_mask,
        causal=call.causal,
        scale=call.scale,
        seed=call.seed,
    )
    return out
