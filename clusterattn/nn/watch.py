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

COLLAPSED = 0.95  # a mean cosine above this: points, or trained centroids, are nearly one vector
STEADY = 0.5  # with fewer tokens that keep their cluster in double precision it is rounding that sorts


@dataclasses.dataclass(frozen=True)
class Grouping:
    """How one layer told tokens apart in one forward; means over sequences and groupings.

    Attributes:
        layer: its name
        clusters: how many there are
        points: mean cosine between the points of two tokens: near 1 they have become one vector
        centroids: mean cosine between two updated centroids. Near 1 as long as U is flat, also where nothing is
            trained yet: each is nearly the mean of the sequence then, and what they differ by still sorts tokens
        used: clusters in use: the exponential of the entropy of their sizes, out of ``clusters``
        largest: share of the tokens in the largest cluster
        steady: share of the tokens that have the same cluster in double precision; a tie counts as another one
        trained: mean cosine between two of the centroids that the layer starts from, where they are parameters, which
            the losses can pull together (with the inner product lengths tell apart too: then it is the mean product
            over the mean square). None where the layer before handed them on
    """

    layer: str
    clusters: int
    points: float
    centroids: float
    used: float
    largest: float
    steady: float
    trained: float | None

    @property
    def collapsed(self) -> bool:
        """Whether points or trained centroids have become nearly one vector, or rounding sorts most of the tokens."""
        return max(self.points, self.trained or 0.0) > COLLAPSED or self.steady < STEADY

    def __str__(self) -> str:
        trained = "" if self.trained is None else f", of trained ones {self.trained:.2f}"
        return (
            f"{self.layer}: cosine of points {self.points:.2f}, of updated centroids {self.centroids:.2f}{trained}; "
            f"{self.used:.1f} of {self.clusters} clusters in use, {self.largest:.0%} of the tokens in the largest; "
            f"{self.steady:.0%} keep their cluster in double precision"
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
                given: tuple[Any, ...],
                named: dict[str, Any],
                answer: tuple[Tensor, ClusterFormerState],
                name: str = name,
                latest: dict[str, Tensor] = latest,
            ) -> None:
                (start,) = (each for each in (*given, *named.values()) if isinstance(each, ClusterFormerState))
                method = module.attention.method  # type: ignore[union-attr]
                seen.append(_grouping(name, latest.pop("points"), start.centroids, answer[1], method))  # type: ignore[arg-type]

            hooks.append(layer.cluster_proj.register_forward_hook(keep))
            hooks.append(layer.register_forward_hook(look, with_kwargs=True))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def _grouping(name: str, points: Tensor, start: Tensor, state: ClusterFormerState, method: ClusterFormer) -> Grouping:
    assert state.labels is not None
    labels, (g, c) = state.labels, (state.labels.shape[1], state.centroids.shape[1])
    valid = labels[:, :1] >= 0  # (b 1 n)
    seen = torch.where(valid.unsqueeze(-1), cut(points, g), 0.0)  # (b g n y)
    if method.spread:
        seen = spread_out(seen, valid[:, 0])
    sizes = F.one_hot(labels.clamp(min=0), c).mul(valid.unsqueeze(-1)).sum(2).float()  # (b g c)
    share = sizes / sizes.sum(-1, keepdim=True).clamp(min=1)
    entropy = -(share * share.clamp(min=1e-12).log()).sum(-1)
    same = _in_double(seen, cut(start.expand(len(points), -1, -1), g), valid, method) == labels
    same |= valid.sum(-1, keepdim=True) == 1  # all of U is one token's: there is nothing to tell it from
    figures = (
        _alike(F.normalize(seen.float(), dim=-1), valid),
        _alike(F.normalize(cut(state.centroids.float(), g), dim=-1)),
        entropy.exp(),
        share.amax(-1),
        (same & valid).sum(-1) / valid.sum(-1).clamp(min=1),
    )
    there = valid.any(-1)  # sequences of padding alone tell nothing
    cosine, updated, used, largest, steady = (
        float((each * there).sum() / (there.sum() * g).clamp(min=1)) for each in figures
    )
    handed_on = start.dim() == 3
    trained = None if handed_on else float(_alike(method.unit(cut(start.float().unsqueeze(0), g))).mean())
    return Grouping(name, c, cosine, updated, used, largest, steady, trained)


def _in_double(points: Tensor, centroids: Tensor, valid: Tensor, method: ClusterFormer) -> Tensor:
    """The cluster of each token (b g n) without rounding. Counted from the last one, so that of equal clusters it takes
    another than the layer took, which counts from the first."""
    backwards = method.clusters_of(points.double(), centroids.double().flip(2), valid[:, 0])
    return centroids.shape[2] - 1 - backwards


def _alike(x: Tensor, valid: Tensor | None = None) -> Tensor:
    """The mean product of two different valid ones of the vectors x (b g n y), over their mean square: 1 where they are
    one vector, the mean cosine where their lengths are 1. From the length of their sum; 0 of one alone."""
    x = x if valid is None else x * valid.unsqueeze(-1)
    count = x.new_tensor(x.shape[2]) if valid is None else valid.sum(-1)
    own = x.square().sum((-1, -2))
    return (x.sum(2).square().sum(-1) - own) / (own * (count - 1).clamp(min=1)).clamp(min=1e-12)


def warn_if_collapsed(seen: Sequence[Grouping]) -> bool:
    """One warning of the layers that tell tokens apart no longer, with the figures of the first; whether there are any.

    Args:
        seen: what ``watched`` listed
    """
    gone = [each for each in seen if each.collapsed]
    if gone:
        warnings.warn(
            f"the grouping of {len(gone)} of {len(seen)} ClusterFormer layers has collapsed: tokens are sorted by "
            f"noise ({gone[0]}). trains='centroids' or mu=nu=0 keep points apart, a smaller nu trained centroids, "
            "a larger sharpness or pass_on=False those of deep layers; smaller weights and an affinity help",
            stacklevel=2,
        )
    return bool(gone)
