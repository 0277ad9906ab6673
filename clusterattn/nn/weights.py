"""The weights of ``nn.MultiheadAttention`` and ours: torch stacks three projections in one, we keep them apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .._errors import bad_value

if TYPE_CHECKING:
    from .attention import MultiheadAttention

APART = ("q_proj_weight", "k_proj_weight", "v_proj_weight")  # torch's names where it does not stack them
OURS = ("q_proj", "k_proj", "v_proj")


def renamed(state: dict[str, Any], prefix: str) -> None:
    """Torch's entries under this prefix become ours, in place; ours stay as they are."""
    for torchs in ("weight", "bias"):
        stacked = state.pop(f"{prefix}in_proj_{torchs}", None)
        if isinstance(stacked, Tensor):
            for name, part in zip(OURS, stacked.chunk(3), strict=True):
                state[f"{prefix}{name}.{torchs}"] = part
    for torchs, name in zip(APART, OURS, strict=True):
        if prefix + torchs in state:
            state[f"{prefix}{name}.weight"] = state.pop(prefix + torchs)


def to_torch(ours: MultiheadAttention) -> nn.MultiheadAttention:
    """A copy as torch's module."""
    if ours.k_proj is None or ours.v_proj.out_features != ours.embed_dim:
        got = "shared_qk" if ours.k_proj is None else f"{ours.v_proj.out_features // ours.head_dim} key heads"
        wanted = f"projections as torch has them: {ours.num_heads} heads of queries, keys and values"
        raise bad_value(wanted, got, "a module without shared_qk or kv_heads")
    weight, bias = ours.out_proj.weight, ours.out_proj.bias is not None
    theirs = nn.MultiheadAttention(
        ours.embed_dim,
        ours.num_heads,
        dropout=ours.dropout.p,
        bias=bias,
        kdim=ours.k_proj.in_features,
        vdim=ours.v_proj.in_features,
        batch_first=ours.batch_first,
        device=weight.device,
        dtype=weight.dtype,
    )
    inward = (ours.q_proj, ours.k_proj, ours.v_proj)
    stacked: Tensor | None = theirs.in_proj_weight  # None where kdim or vdim differ
    with torch.no_grad():
        if stacked is not None:
            stacked.copy_(torch.cat([each.weight for each in inward]))
        else:
            for name, each in zip(APART, inward, strict=True):
                getattr(theirs, name).copy_(each.weight)
        if bias:
            theirs.in_proj_bias.copy_(torch.cat([each.bias for each in inward]))
    theirs.out_proj.load_state_dict(ours.out_proj.state_dict())
    return theirs.train(ours.training)
