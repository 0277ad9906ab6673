"""Where Routing's centroids live between calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..methods import RoutingState


class RoutingMemory(nn.Module):
    """Centroids (h c d), moved by every forward in training mode and saved with the model.

    They are empty (c = 0) until the first training batch, from whose tokens they start and whose length may
    decide how many there are. Under data parallelism run one batch before wrapping the model: wrappers note
    the buffers they find.

    Activation checkpointing runs a forward again inside the backward pass. The second run must see what the
    first one saw and teach nothing, so the centroids before the last move are kept too (those of one
    forward: with checkpointing, go backward before going forward again).
    """

    centroids: Tensor
    previous: Tensor

    def __init__(self, heads: int, d: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.register_buffer("centroids", torch.empty(heads, 0, d, device=device))
        self.register_buffer("previous", torch.empty(heads, 0, d, device=device), persistent=False)
        self.auxiliary_loss: Tensor | None = None

    def recall(self) -> RoutingState | None:
        means = self.previous if _recomputing() else self.centroids
        return RoutingState(means, means.new_zeros(())) if means.shape[1] else None

    def learn(self, state: RoutingState | None) -> None:
        """Take over what a training forward returned; None, after one in eval mode, forgets the loss."""
        if _recomputing():
            return
        self.auxiliary_loss = None if state is None else state.commitment
        if state is not None:
            self._set("previous", self.centroids)
            self._set("centroids", state.means)

    def _set(self, name: str, new: Tensor) -> None:
        old: Tensor = getattr(self, name)
        if old.shape == new.shape and old.dtype == new.dtype:
            old.copy_(new)  # in place: wrappers and graphs hold on to the tensor
        else:  # the first time, or after the model was cast to a dtype too coarse for a slow average
            setattr(self, name, new.clone())

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Make room for as many centroids as were saved. torch loads them, or complains about heads and d."""
        saved = state_dict.get(prefix + "centroids")
        heads, _, d = self.centroids.shape
        if isinstance(saved, Tensor) and saved.dim() == 3 and saved.shape[0::2] == (heads, d):
            self.centroids = torch.empty_like(saved, device=self.centroids.device)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def __getstate__(self) -> dict[str, Any]:
        return {
            **self.__dict__,
            "auxiliary_loss": None,
        }  # it belongs to its graph and cannot be copied or pickled


def _recomputing() -> bool:
    """Are we inside a backward pass? (A compiled graph recomputes on its own terms.)"""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
