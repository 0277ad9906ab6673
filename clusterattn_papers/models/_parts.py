"""What the models share: a stack of attention layers by any method, positions, pooling."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from clusterattn._errors import bad_value
from clusterattn._plan import check_stateless
from clusterattn.methods import ClusterFormer, MethodSpec
from clusterattn.methods import method as as_method
from clusterattn.nn import COMMITMENT, ClusterFormerEncoder, Encoder, MultiheadAttention
from clusterattn.nn.clusterformer import NeuralClusters
from clusterattn.nn.decoder import DecoderLayer


class Answer(NamedTuple):
    """What every model returns."""

    logits: Tensor
    auxiliary: Tensor  # a scalar that training adds, weighted already; 0 where the method has no loss of its own


class Stack(nn.Module):
    """Layers of self-attention by any method: (b n dim) -> (b n dim) and the auxiliary loss.

    ClusterFormer gets its encoder with trained centroids; its cluster count follows ``length`` (near the root, as in
    the paper) where the method leaves it open. Routing's commitment loss comes with the published weight.
    """

    def __init__(
        self, method: MethodSpec, dim: int, heads: int, layers: int, *, length: int = 512, **options: Any
    ) -> None:
        super().__init__()
        chosen = as_method(method)
        self.layers: nn.Module
        if isinstance(chosen, ClusterFormer):
            settings = {**vars(chosen), "clusters": chosen.clusters or max(math.isqrt(length), 1)}
            self.layers = ClusterFormerEncoder(dim, heads, layers, **settings, **options)
        else:
            self.layers = Encoder(dim, heads, layers, chosen, **options)

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        nothing = x.new_zeros((), dtype=torch.float32)
        if isinstance(self.layers, ClusterFormerEncoder):
            x, losses = self.layers(x, key_mask)
            return x, self.layers.joint_loss(nothing, losses)
        x = self.layers(x, key_mask)
        assert isinstance(self.layers, Encoder)
        left = self.layers.take_auxiliary_loss()
        return x, nothing if left is None else COMMITMENT * left


class Positions(nn.Module):
    """Sines and cosines, fixed, for any length."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("rates", torch.exp(torch.arange(0, dim, 2) * (-math.log(10000.0) / dim)), persistent=False)
        self.dim = dim

    rates: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """x (b n dim) with its positions added."""
        angle = torch.arange(x.shape[1], device=x.device).unsqueeze(1) * self.rates
        waves = torch.stack([angle.sin(), angle.cos()], -1).flatten(1)[:, : self.dim]
        return x + waves.to(x.dtype)


def mean_over(x: Tensor, key_mask: Tensor) -> Tensor:
    """(b n dim) -> (b dim): the mean over real tokens."""
    kept = key_mask.unsqueeze(-1).to(x.dtype)
    return (x * kept).sum(1) / kept.sum(1).clamp(min=1)


def attentions(model: nn.Module) -> list[MultiheadAttention]:
    return [module for module in model.modules() if isinstance(module, MultiheadAttention)]


@contextlib.contextmanager
def attending_with(model: nn.Module, method: MethodSpec) -> Iterator[None]:
    """Evaluate a trained model with another attention, without touching its weights; cross-attention stays as it is.

    Layers that ClusterFormer trained group by their centroids: they take its other settings, but no other method.
    """
    chosen, crossing = as_method(method), {each.cross for each in model.modules() if isinstance(each, DecoderLayer)}
    found: list[Any] = [each for each in attentions(model) if each not in crossing]
    stacks: list[Any] = [
        each for each in model.modules() if isinstance(each, NeuralClusters) and each.centroids is not None
    ]
    if chosen.name == "reformer" and any(each.k_proj is not None for each in found):
        raise bad_value("a model trained with shared queries and keys", "keys of their own", "shared_qk=True")
    if not stacks:
        check_stateless(chosen)
    for trained in {each.clustering for each in stacks}:
        alike = isinstance(chosen, ClusterFormer) and chosen.pass_on == trained.pass_on
        if not alike or vars(chosen)["clusters"] not in (None, trained.clusters):
            wanted = f"ClusterFormer with the trained centroids: clusters={trained.clusters}, pass_on={trained.pass_on}"
            raise bad_value(wanted, str(chosen), f"method={str(trained)!r}, or a model that was trained otherwise")
    before = [(each, "method", each.method) for each in found]
    before += [(each, "clustering", each.clustering) for each in stacks]
    try:
        for each, name, _ in before:
            setattr(each, name, chosen)
        yield
    finally:
        for each, name, old in before:
            setattr(each, name, old)
