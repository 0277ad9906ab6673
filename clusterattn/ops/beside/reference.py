"""Keys beside their values as the points of one space.

Keys are told apart as the queries of a cluster do: by their products with some differences of queries from their
centroids, or from where these started. Products and values are scaled to a spread of one, and taken off is what all
share (the row of one key): it says nothing about who is alike, and costs digits in half precision.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._chunks import wide
from ..kmeans import reference as kmeans
from ..kmeans.reference import rows_at
from ..merge import NEVER
from ..rows import broadcast
from . import EVERY


def _spread(x: Tensor, at: Tensor) -> Tensor:
    """The standard deviation of rows x (b h s w), those with at >= 0, as one number for all columns: (b h 1 1)."""
    real = (at >= 0).unsqueeze(-1)
    total = real.sum(2, keepdim=True).clamp(min=1)
    apart = (x - (x * real).sum(2, keepdim=True) / total) * real
    size = (apart.square().sum((2, 3), keepdim=True) / total).sqrt()
    return torch.where(size > 0, size, 1.0)


def view(
    q: Tensor, k: Tensor, v: Tensor, means: Tensor | None, labels: Tensor | None, starts_at: Tensor | None,
    queries_at: Tensor, keys_at: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    (b, hk, _, d) = k.shape
    mine, keys = wide(rows_at(q, queries_at)), wide(rows_at(k, keys_at))
    if starts_at is not None:
        means = rows_at(q, starts_at)
        theirs = _nearest_start(mine, wide(means), starts_at, keys[:, :, ::EVERY], keys_at[..., ::EVERY])
    else:
        assert means is not None
        assert labels is not None
        theirs = labels.gather(2, queries_at.clamp(min=0))
    theirs = torch.where(queries_at >= 0, theirs, -1)
    apart = (mine - wide(broadcast(means, theirs))) * (theirs >= 0).unsqueeze(-1)
    directions = apart.reshape(b, hk, q.shape[1] // hk * apart.shape[2], d)
    key_centre, value_centre = (wide(rows_at(x, keys_at[..., :1])) for x in (k, v))
    directions = directions / _spread((keys - key_centre) @ directions.mT, keys_at)
    shrink = _spread(wide(rows_at(v, keys_at)) - value_centre, keys_at)
    return directions.to(k.dtype), torch.cat([key_centre, value_centre, shrink], -1).squeeze(2)


def _nearest_start(x: Tensor, starts: Tensor, starts_at: Tensor, keys: Tensor, keys_at: Tensor) -> Tensor:
    """For each of the queries x (b h s d) the nearest of the starts (b h c d), by products with the keys (b hk t d)
    alone; -1 where there is none."""
    (b, h, _, d), (hk, t), real = x.shape, keys.shape[1:3], (keys_at >= 0).unsqueeze(-1)
    centred = (keys - (keys * real).sum(2, keepdim=True) / real.sum(2, keepdim=True).clamp(min=1)) * real
    origin = starts[:, :, :1]  # a shared offset costs digits

    def seen(rows: Tensor) -> Tensor:
        return ((rows - origin).reshape(b, hk, h // hk * rows.shape[2], d) @ centred.mT).view(b, h, rows.shape[2], t)

    theirs = seen(starts)
    scores = seen(x) @ theirs.mT - theirs.square().sum(-1).unsqueeze(2) / 2
    best = scores.masked_fill((starts_at < 0).unsqueeze(2), NEVER).max(-1)
    return torch.where(best.values == NEVER, -1, best.indices)


def beside(
    k: Tensor, v: Tensor, directions: Tensor, centres: Tensor, first_at: Tensor | None, second_at: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    at = None if first_at is None else first_at if second_at is None else torch.cat([first_at, second_at], -1)
    places, first = torch.empty(*k.shape[:2], 0, dtype=torch.int64, device=k.device), 0
    if at is not None and first_at is not None:
        places, first = torch.where(at >= 0, torch.arange(at.shape[2], device=at.device), -1), first_at.shape[2]
        k, v = rows_at(k, at), rows_at(v, at)
    (b, hk, many, d), e = k.shape, v.shape[3]
    centres = centres.to(k.dtype).unsqueeze(2)
    key_centre, value_centre, shrink = centres[..., :d], centres[..., d : d + e], centres[..., d + e :]
    # the centre is taken off before the product is rounded
    offset = -(key_centre @ directions.mT).flatten(0, 1)
    seen = torch.baddbmm(offset, k.flatten(0, 1), directions.mT.flatten(0, 1)).view(b, hk, many, directions.shape[2])
    points = torch.cat([seen, (v - value_centre) / shrink], -1)
    return points, places[..., :first].clone(), places[..., first:].clone()


def nearest_beside(
    k: Tensor, v: Tensor, directions: Tensor, centres: Tensor, right: Tensor, offset: Tensor, origin: Tensor
) -> Tensor:
    """Points are made a few at a time, and not put together."""
    (ways, d), e, along = directions.shape[2:], v.shape[3], directions.to(right.dtype).flatten(0, 1)
    centres, k, v = centres.to(right.dtype).flatten(0, 1).unsqueeze(1), k.flatten(0, 1), v.flatten(0, 1)
    key_centre, value_centre, shrink = centres.split_with_sizes((d, e, 1), -1)

    def seen(heads: slice, piece: slice) -> Tensor:
        return torch.bmm(along[heads], kmeans.centred(k, key_centre, heads, piece).mT)

    def values(heads: slice, piece: slice) -> Tensor:
        return kmeans.centred(v, value_centre, heads, piece).mT

    sides = (seen, right[..., :ways]), (values, right[..., ways:] / shrink)
    return kmeans.nearest_of(sides, offset - (right @ origin.mT).squeeze(-1), k)
