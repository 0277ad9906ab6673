"""The ClusterFormer encoder (ACL 2022): centroids trained with the task, handed from layer to layer."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._errors import bad_value, check_whole
from ..methods import ClusterFormer, ClusterFormerState
from .encoder import Frame, last_norm


class ClusterFormerLosses(NamedTuple):
    """Means over layers."""

    clustering: Tensor  # L1: tokens should lie near their centroid
    sorting: Tensor  # L2: neighbouring centroids should lie near each other


class ClusterFormerLayer(Frame):
    """A layer that groups its tokens by X W^C, once for all heads. Options as for ``EncoderLayer``."""

    def __init__(self, embed_dim: int, heads: int, method: ClusterFormer, **options: Any) -> None:
        super().__init__(embed_dim, heads, method, **options)
        here = self.linear1.weight
        self.cluster_proj = nn.Linear(embed_dim, embed_dim, bias=False, device=here.device, dtype=here.dtype)
        nn.init.xavier_uniform_(self.cluster_proj.weight)

    def forward(
        self, x: Tensor, key_mask: Tensor | None, state: ClusterFormerState
    ) -> tuple[Tensor, ClusterFormerState]:
        y = self.enter(x)
        answer, state = self.attend(y, key_mask, points=self.cluster_proj(y), state=state, return_state=True)
        return self.leave(x, answer), state


class ClusterFormerEncoder(nn.Module):
    """Layers of neural clustering attention with their joint loss: task + mu · L1 + nu · L2 (eq. 17).

    clusters     how many centroids: near the root of the length (the paper takes 3 for short sentences)
    blocks       a block attends to itself and ``blocks - 1`` before it
    similarity   "cosine", or "inner" as in the paper: its losses have no lower bound and outgrow the task's
    mu, nu       weights of the clustering and the sorting loss; the paper gives no values. Attention depends
                 on centroids and W^C through an argmax alone: these losses train them, with 0 they never move

    The first layer takes the trained centroids (clusters embed_dim), every other one those that the layer
    before it updated for each sequence (eq. 3). Each layer has its own W^C. Other options: ``EncoderLayer``.
    """

    def __init__(
        self,
        embed_dim: int,
        heads: int,
        layers: int,
        clusters: int,
        *,
        blocks: int = 2,
        similarity: str = "cosine",
        mu: float = 0.1,
        nu: float = 0.1,
        norm_first: bool = True,
        final_norm: bool | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        check_whole("ClusterFormerEncoder", layers=layers, clusters=clusters)
        if mu < 0 or nu < 0:
            raise bad_value("weights mu and nu of at least 0", f"mu={mu}, nu={nu}", "mu=0.1, nu=0.1")
        method = ClusterFormer(clusters=clusters, blocks=blocks, similarity=similarity)
        self.mu, self.nu = mu, nu
        self.layers = nn.ModuleList(
            ClusterFormerLayer(embed_dim, heads, method, norm_first=norm_first, **options) for _ in range(layers)
        )
        self.norm = last_norm(embed_dim, norm_first if final_norm is None else final_norm, options)
        centroids = torch.empty(clusters, embed_dim, device=options.get("device"), dtype=options.get("dtype"))
        self.centroids = nn.Parameter(nn.init.normal_(centroids, std=embed_dim**-0.5))

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> tuple[Tensor, ClusterFormerLosses]:
        """x (b n embed_dim), key_mask (b n) True = a real token: the output, and the losses."""
        state = ClusterFormerState(self.centroids)
        clustering, sorting = [], []
        for layer in self.layers:
            x, state = layer(x, key_mask, state)
            clustering.append(state.clustering_loss)
            sorting.append(state.sorting_loss)
        return self.norm(x), ClusterFormerLosses(torch.stack(clustering).mean(), torch.stack(sorting).mean())

    def joint_loss(self, task_loss: Tensor, losses: ClusterFormerLosses) -> Tensor:
        """task + mu · clustering + nu · sorting; a weight of 0 leaves its loss out of the graph."""
        for weight, loss in zip((self.mu, self.nu), losses, strict=True):
            if weight:
                task_loss = task_loss + weight * loss
        return task_loss
