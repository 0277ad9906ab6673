"""The ClusterFormer encoder (ACL 2022): centroids trained with the task, handed from layer to layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._errors import check_whole
from ..methods import ClusterFormer, ClusterFormerState
from .encoder import Frame, last_norm


class ClusterFormerLosses(NamedTuple):
    """Means over layers. 0 where not computed: with weight 0, and where no gradients are recorded (evaluation).

    Attributes:
        clustering: L1: tokens should lie near their centroid
        sorting: L2: neighbouring centroids should lie near each other
        balance: how uneven the clusters are
    """

    clustering: Tensor
    sorting: Tensor
    balance: Tensor


class ClusterMap(nn.Linear):
    """W^C: hidden states (b n embed_dim) as they are grouped. With ``trains="map"`` no gradient leaves it.

    Args:
        embed_dim: width of the hidden states
        method: ClusterFormer's settings: its ``trains`` decides where gradients go
        **here: device and dtype of the weight
    """

    def __init__(self, embed_dim: int, method: ClusterFormer, **here: Any) -> None:
        super().__init__(embed_dim, embed_dim, bias=False, **here)
        self.through = method.trains != "map"
        nn.init.xavier_uniform_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """The hidden states as they are grouped, (b n embed_dim).

        Args:
            x: hidden states (b n embed_dim)
        """
        return super().forward(x if self.through else x.detach())


class NeuralClusters:
    """What stacks of ClusterFormer layers share, encoders and decoders: their centroids and the joint loss (eq. 17).

    A mixin of modules. The first layer takes the trained centroids (clusters embed_dim), every other one those that the
    layer before it updated for each sequence (eq. 3); with ``pass_on=False`` every layer trains its own."""

    clustering: ClusterFormer
    centroids: nn.Parameter | None
    updates: Tensor

    def own_centroids(self, method: ClusterFormer, embed_dim: int, layers: int, options: dict[str, Any]) -> None:
        """Make them, where the layers are made. As many as the method has clusters, which is known by now.

        Args:
            method: with its number of clusters
            embed_dim: width of the hidden states
            layers: how many there are
            options: device and dtype among them
        """
        assert isinstance(self, nn.Module)
        assert method.clusters is not None
        here = {name: options.get(name) for name in ("device", "dtype")}
        many = () if method.pass_on else (layers,)
        empty = torch.empty(*many, method.clusters, embed_dim, **here)
        self.clustering = method
        self.centroids = nn.Parameter(nn.init.normal_(empty, std=embed_dim**-0.5))
        # a tensor, so that the replays of a CUDA graph count too
        self.register_buffer("updates", torch.zeros((), device=here["device"]), persistent=method.fade > 0)

    def state_for(self, layer: int, before: ClusterFormerState | None) -> ClusterFormerState:
        """What a layer starts from.

        Args:
            layer: its number
            before: what the layer before it returned
        """
        assert self.centroids is not None
        if self.clustering.pass_on:
            return before or ClusterFormerState(self.centroids)
        return ClusterFormerState(self.centroids[layer])

    def mean_losses(self, states: Sequence[ClusterFormerState]) -> ClusterFormerLosses:
        """Over layers; in training with fading weights, one more update is counted.

        Args:
            states: one for each layer
        """
        if self.clustering.fade and self.training:  # type: ignore[attr-defined]
            self.updates += 1
        names = ("clustering_loss", "sorting_loss", "balance_loss")
        like = states[0].centroids
        return ClusterFormerLosses(*(_mean([getattr(state, name) for state in states], like) for name in names))

    def joint_loss(self, task_loss: Tensor, losses: ClusterFormerLosses) -> Tensor:
        """task + mu · clustering + nu · sorting + balance · balance; a weight of 0 leaves its loss out of the graph.

        Args:
            task_loss: what the task asks to be small
            losses: of the last forward
        """
        method = self.clustering
        for weight, loss in zip((method.mu, method.nu, method.balance), losses, strict=True):
            if weight:
                left = (1 - (self.updates - 1) / method.fade).clamp(0, 1) if method.fade else 1.0
                task_loss = task_loss + weight * left * loss
        return task_loss


def _mean(losses: Sequence[Tensor | None], like: Tensor) -> Tensor:
    there = [loss for loss in losses if loss is not None]
    return torch.stack(there).mean() if there else like.new_zeros(())


class ClusterFormerLayer(Frame):
    """A layer that groups its tokens by X W^C. Options as for ``EncoderLayer``.

    Args:
        embed_dim: width of the hidden states
        heads: query heads; they divide embed_dim
        method: with its number of clusters
        **options: of ``EncoderLayer``
    """

    def __init__(self, embed_dim: int, heads: int, method: ClusterFormer, **options: Any) -> None:
        super().__init__(embed_dim, heads, method, **options)
        here = self.linear1.weight
        self.cluster_proj = ClusterMap(embed_dim, method, device=here.device, dtype=here.dtype)

    def forward(
        self, x: Tensor, key_mask: Tensor | None, state: ClusterFormerState
    ) -> tuple[Tensor, ClusterFormerState]:
        """The layer's output, and the state for the next one.

        Args:
            x: hidden states (b n embed_dim)
            key_mask: bool (b n), True = a real token, as in ``ca.attention``
            state: the centroids, from the layer before
        """
        y = self.enter(x)
        answer, state = self.attend(y, key_mask, points=self.cluster_proj(y), state=state, return_state=True)
        return self.leave(x, answer), state


class ClusterFormerEncoder(NeuralClusters, nn.Module):
    """Layers of neural clustering attention with their joint loss: task + mu · L1 + nu · L2 (eq. 17).

    Args:
        embed_dim: width of the hidden states
        heads: query heads; they divide embed_dim
        layers: how many
        clusters: how many centroids: near the root of the length (the paper takes 3 for short sentences)
        norm_first: norms before each part (the default), or after it
        final_norm: a LayerNorm after the last layer; by default where layers put their norms first
        **options: settings of ``ClusterFormer``, and options of ``EncoderLayer``

    and any other setting of the method ``ClusterFormer``: scope, similarity, mu, nu, ...; and the options of
    ``EncoderLayer``.

    Attention depends on centroids and W^C through an argmax alone: unless there is an ``affinity`` or ``straight``, the
    losses are all that trains them, and with mu = nu = 0 they never move. Nothing in L1 and L2 keeps the points apart:
    one vector for all tokens is the best answer to both, and the task does not prevent it. ``watched`` shows how far
    it has come to that; docs/methods.md tells which settings stand against it.
    """

    def __init__(
        self,
        embed_dim: int,
        heads: int,
        layers: int,
        clusters: int,
        *,
        norm_first: bool = True,
        final_norm: bool | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        check_whole("ClusterFormerEncoder", layers=layers, clusters=clusters)
        names = {field.name for field in dataclasses.fields(ClusterFormer)} & options.keys()
        method = ClusterFormer(clusters=clusters, **{name: options.pop(name) for name in names})
        self.layers = nn.ModuleList(
            ClusterFormerLayer(embed_dim, heads, method, norm_first=norm_first, **options) for _ in range(layers)
        )
        self.norm = last_norm(embed_dim, norm_first if final_norm is None else final_norm, options)
        self.own_centroids(method, embed_dim, layers, options)

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> tuple[Tensor, ClusterFormerLosses]:
        """x (b n embed_dim), key_mask (b n) True = a real token: the output, and the losses.

        Args:
            x: hidden states (b n embed_dim)
            key_mask: bool (b n), True = a real token, as in ``ca.attention``
        """
        states: list[ClusterFormerState] = []
        for at, layer in enumerate(self.layers):
            x, state = layer(x, key_mask, self.state_for(at, states[-1] if states else None))
            states.append(state)
        return self.norm(x), self.mean_losses(states)
