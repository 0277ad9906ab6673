"""A transformer decoder: causal self-attention by any method, exact attention to what the encoder said."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .._errors import check_whole
from ..methods import ClusterFormer, ClusterFormerState, MethodSpec
from ..methods import method as as_method
from .attention import MultiheadAttention
from .clusterformer import ClusterMap, NeuralClusters
from .encoder import Frame, last_norm

COMMITMENT = 1e-4
"""The published weight of Routing's commitment loss."""
SEES_AHEAD = (
    "ClusterFormer's affinity or straight in a decoder: memberships are made from the whole sequence, so the task "
    "learns to read later tokens in them, and what writes token by token finds none there; keep them to encoders"
)


class DecoderLayer(Frame):
    """Causal self-attention, cross-attention, feed-forward, each with dropout and a residual.

    Cross-attention is exact for every method: no paper clusters it. Options as for ``EncoderLayer``.

    Args:
        embed_dim: width of the hidden states
        heads: query heads; they divide embed_dim
        method: of causal self-attention
        **options: of ``EncoderLayer``
    """

    def __init__(self, embed_dim: int, heads: int, method: MethodSpec, **options: Any) -> None:
        super().__init__(embed_dim, heads, method, **(options | {"causal": True}))
        here: dict[str, Any] = {"device": self.linear1.weight.device, "dtype": self.linear1.weight.dtype}
        self.cross = MultiheadAttention(embed_dim, heads, "exact", dropout=self.dropout.p, **here)
        self.norm_cross = nn.LayerNorm(embed_dim, **here)
        own = self.attention.method
        self.cluster_proj = ClusterMap(embed_dim, own, **here) if isinstance(own, ClusterFormer) else None

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        key_mask: Tensor | None,
        memory_mask: Tensor | None,
        state: ClusterFormerState | None = None,
    ) -> tuple[Tensor, ClusterFormerState | None]:
        """x (b n embed_dim), memory (b m embed_dim), masks (b n) and (b m); with ClusterFormer its state.

        Args:
            x: hidden states (b n embed_dim)
            memory: what the encoder said (b m embed_dim)
            key_mask: bool (b n), True = a real token
            memory_mask: bool (b m), True = a real token of the memory
            state: ClusterFormer's, from the layer before
        """
        y, more = self.enter(x), dict[str, Any]()
        if self.cluster_proj is not None:
            more = {"points": self.cluster_proj(y), "state": state, "return_state": True}
        answer, new = self.attend(y, key_mask, **more)
        x = x + answer
        if not self.norm_first:
            x = self.norm_cross(x)
        asked = self.norm_cross(x) if self.norm_first else x
        heard, _, _ = self.cross.attend(asked, memory, memory, key_mask=memory_mask, query_mask=key_mask)
        return self.leave(x, heard), new if self.cluster_proj is not None else None  # Routing keeps its own


class Decoder(NeuralClusters, nn.Module):
    """A stack of ``DecoderLayer``.

    Args:
        embed_dim: width of the hidden states
        heads: query heads; they divide embed_dim
        layers: how many
        method: of causal self-attention, one for all layers
        length: ClusterFormer has near the root of it clusters, where the method leaves their number open
        norm_first: norms before each part (the default), or after it
        final_norm: a LayerNorm after the last layer; by default where layers put their norms first
        seed: of the first layer's draws; each layer has its own
        **options: of ``DecoderLayer``

    ClusterFormer's trained centroids and its losses are those of ``ClusterFormerEncoder``, in the paper's masked
    variant (appendix B, its mask corrected).

    No token ever hears the value of a later one. But Reformer, Routing, ClusterFormer and Smyrf are only
    value-causal: over a whole sequence, as in training, later tokens have a say in who is grouped with whom;
    a decoder that writes token by token groups its prefix alone. Clustered, Improved and Refined group by
    earlier blocks (``block`` in the method) and are strict. With ClusterFormer's ``affinity`` or ``straight`` that say
    is one the task trains: it learns to read later tokens off the memberships. A warning says so.
    """

    def __init__(
        self,
        embed_dim: int,
        heads: int,
        layers: int,
        method: MethodSpec = "refined",
        *,
        length: int = 512,
        norm_first: bool = True,
        final_norm: bool | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__()
        check_whole("Decoder", layers=layers)
        chosen = as_method(method)
        self.centroids = None
        if isinstance(chosen, ClusterFormer):
            chosen = replace(chosen, clusters=chosen.clusters or max(math.isqrt(length), 1))
            self.own_centroids(chosen, embed_dim, layers, options)
            if chosen.affinity or chosen.straight:
                warnings.warn(SEES_AHEAD, stacklevel=2)
        self.layers = nn.ModuleList(
            DecoderLayer(embed_dim, heads, chosen, norm_first=norm_first, seed=seed + at, **options)
            for at in range(layers)
        )
        self.norm = last_norm(embed_dim, norm_first if final_norm is None else final_norm, options)

    def forward(
        self, y: Tensor, memory: Tensor, key_mask: Tensor | None = None, memory_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """y (b n dim), memory (b m dim), masks True = a real token: (b n dim), and the method's own loss, weighted.

        Args:
            y: hidden states (b n embed_dim)
            memory: what the encoder said (b m embed_dim)
            key_mask: bool (b n), True = a real token
            memory_mask: bool (b m), True = a real token of the memory
        """
        auxiliary = y.new_zeros((), dtype=torch.float32)
        states: list[ClusterFormerState] = []
        for at, layer in enumerate(self.layers):
            state = None if self.centroids is None else self.state_for(at, states[-1] if states else None)
            y, state = layer(y, memory, key_mask, memory_mask, state)
            if state is not None:
                states.append(state)
            left = layer.attention.take_auxiliary_loss() if isinstance(layer, DecoderLayer) else None
            auxiliary = auxiliary if left is None else auxiliary + COMMITMENT * left  # a sum, as in the encoder
        if states:
            auxiliary = self.joint_loss(auxiliary, self.mean_losses(states))
        return self.norm(y), auxiliary
