"""Do ClusterFormer's groupings still tell tokens apart? Nothing in its losses sees to that."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..methods import ClusterFormer, ClusterFormerState
from ..methods.clusterformer import cut, spread_out
from .clusterformer import ClusterMap

COLLAPSED = 0.95  # a mean cosine between points above this: the argmax sorts what is left, which is noise


@dataclasses.dataclass(frozen=True)
class Grouping:
    """How one layer told tokens apart in one forward; means over sequences and groupings.

    Attributes:
        layer: its name
        clusters: how many there are
        points: mean cosine between the points of two tokens: near 1 they have become one vector
        centroids: mean cosine between two updated centroids
        used: clusters in use: the exponential of the entropy of their sizes, out of ``clusters``
        largest: share of the tokens in the largest cluster
    """

    layer: str
    clusters: int
    points: float
    centroids: float
    used: float
    largest: float

    @property
    def collapsed(self) -> bool:
        """Whether the points of all tokens have become nearly one vector."""
        return self.points > COLLAPSED

    def __str__(self) -> str:
        return (
            f"{self.layer}: cosine of points {self.points:.2f}, of centroids {self.centroids:.2f}; {self.used:.1f} of "
            f"{self.clusters} clusters in use, {self.largest:.0%} of the tokens in the largest"
        )


@contextlib.contextmanager
def watched(model: nn.Module) -> Iterator[list[Grouping]]:
    """Every forward inside adds what each ClusterFormer layer of the model did to the list::

    with torch.no_grad(), ca.nn.watched(model) as seen:
        model(batch)
    print(*seen, sep="\\n")

    Args:
        model: any module with ClusterFormer layers in it
    """
    seen: list[Grouping] = []
    hooks = []
    for name, layer in model.named_modules():
        if isinstance(getattr(layer, "cluster_proj", None), ClusterMap):
            latest: dict[str, Tensor] = {}

            def keep(module: nn.Module, _: Any, points: Tensor, latest: dict[str, Tensor] = latest) -> None:
                latest["points"] = points.detach()

            def look(
                module: nn.Module,
                _: Any,
                answer: tuple[Tensor, ClusterFormerState],
                name: str = name,
                latest: dict[str, Tensor] = latest,
            ) -> None:
                seen.append(_grouping(name, latest.pop("points"), answer[1], module.attention.method))  # type: ignore[union-attr, arg-type]

            hooks += [layer.cluster_proj.register_forward_hook(keep), layer.register_forward_hook(look)]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def _grouping(name: str, points: Tensor, state: ClusterFormerState, method: ClusterFormer) -> Grouping:
    assert state.labels is not None
    labels, (g, c) = state.labels, (state.labels.shape[1], state.centroids.shape[1])
    valid = labels[:, :1] >= 0  # (b 1 n)
    seen = cut(points.float(), g)  # (b g n y)
    if method.spread:
        seen = spread_out(seen, valid[:, 0])
    centroids = cut(state.centroids.float(), g)
    sizes = F.one_hot(labels.clamp(min=0), c).mul(valid.unsqueeze(-1)).sum(2).float()  # (b g c)
    share = sizes / sizes.sum(-1, keepdim=True).clamp(min=1)
    entropy = -(share * share.clamp(min=1e-12).log()).sum(-1)
    everyone = torch.ones(*centroids.shape[:1], 1, c, dtype=torch.bool, device=points.device)
    there = valid.any(-1)  # sequences of padding alone tell nothing
    figures = (_cosine(seen, valid), _cosine(centroids, everyone), entropy.exp(), share.amax(-1))
    means = [float((each * there).sum() / (there.sum() * g).clamp(min=1)) for each in figures]
    return Grouping(name, c, *means)


def _cosine(x: Tensor, valid: Tensor) -> Tensor:
    """The mean cosine between two different valid ones of the vectors x (b g n y), from the length of their sum."""
    count = valid.sum(-1)
    together = (F.normalize(x, dim=-1) * valid.unsqueeze(-1)).sum(2).square().sum(-1)
    return (together - count) / (count * (count - 1)).clamp(min=1)


def warn_if_collapsed(seen: Sequence[Grouping]) -> bool:
    """One warning that names the layers whose points have become one vector; whether there are any.

    Args:
        seen: what ``watched`` listed
    """
    gone = [each for each in seen if each.collapsed]
    if gone:
        warnings.warn(
            f"the grouping of {len(gone)} of {len(seen)} ClusterFormer layers has collapsed: tokens are sorted by "
            f"noise ({gone[0]}). trains='centroids' or mu=nu=0 keep points apart; smaller weights and an affinity help",
            stacklevel=2,
        )
    return bool(gone)
