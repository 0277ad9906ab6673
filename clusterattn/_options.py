"""The options of ``ca.attention`` as a type, for its overloads. Read by type checkers alone."""

from __future__ import annotations

from typing import Any, TypedDict

import torch
from torch import Tensor

from ._documents import Starts
from ._types import Groups
from .methods import MethodSpec


class AttentionOptions(TypedDict, total=False):
    """What ``ca.attention`` takes by name, but for what decides what it returns."""

    method: MethodSpec
    key_mask: Tensor | None
    key_lengths: Tensor | None
    query_mask: Tensor | None
    causal: bool
    documents: Tensor | tuple[Tensor, Tensor] | Starts | None
    scale: float | None
    generator: torch.Generator | None
    seed: int | Tensor
    dropout_p: float
    backend: str
    groups: Groups
    state: Any
    points: Tensor | None
    attn_mask: Tensor | None
