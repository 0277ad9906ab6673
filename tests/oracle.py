"""What every method must answer, written as slowly and plainly as possible.

Dense matrices and Python loops, one row at a time. Nothing is imported from the library, so a mistake in its
verbs cannot be repeated here. All functions are differentiable and work in the dtype they are given: fp64
inputs give the truth.

Shapes: q (b h n d), k (b hk m d), v (b hk m e) with hk dividing h; ``seen`` (b n m) says which key a query
may see. A query that sees nothing answers 0 with log-weight -inf.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

NOBODY = float("-inf")
Row = tuple[Tensor, Tensor]  # weights over all keys (m), log of the weight behind them ()
Split = tuple[list[int], list[Row]]  # near keys, far parts


def seen(
    b: int,
    n: int,
    m: int,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """(b n m) bool. Causal is aligned to the bottom right: the last query stands beside the last key."""
    table = torch.ones(b, n, m, dtype=torch.bool)
    for i in range(n):
        for j in range(m):
            if causal and j > i + m - n:
                table[:, i, j] = False
    if key_mask is not None:
        table &= key_mask[:, None, :]
    if query_mask is not None:
        table &= query_mask[:, :, None]
    return table


def softmax_row(logits: Tensor, at: list[int], m: int) -> Row:
    """Softmax over the keys ``at`` (a key listed twice counts twice), spread over a row of m weights."""
    row = logits.new_zeros(m)
    if not at:
        return row, logits.new_full((), NOBODY)
    chosen = logits[at]
    lse = chosen.logsumexp(0)
    return row.index_add(0, torch.tensor(at), (chosen - lse).exp()), lse


def repeat_heads(x: Tensor, h: int) -> Tensor:
    return x.repeat_interleave(h // x.shape[1], 1)


def by_row(q: Tensor, k: Tensor, row: Callable[[int, int, int], Row]) -> tuple[Tensor, Tensor]:
    """Ask ``row(b, h, i)`` for every query: weights (b h n m) and lse (b h n)."""
    b, h, n, _ = q.shape
    m = k.shape[2]
    rows = [row(bi, hi, i) for bi in range(b) for hi in range(h) for i in range(n)]
    if not rows:
        return q.new_zeros(b, h, n, m), q.new_zeros(b, h, n)
    weights = torch.stack([weight for weight, _ in rows]).view(b, h, n, m)
    return weights, torch.stack([lse for _, lse in rows]).view(b, h, n)


def answer(weights_and_lse: tuple[Tensor, Tensor], v: Tensor) -> tuple[Tensor, Tensor]:
    weights, lse = weights_and_lse
    return weights @ repeat_heads(v, weights.shape[1]), lse


def _scale(q: Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(q.shape[-1]) if scale is None else scale


def exact_rows(q: Tensor, k: Tensor, seen: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
    k, scale = repeat_heads(k, q.shape[1]), _scale(q, scale)

    def row(b: int, h: int, i: int) -> Row:
        return softmax_row(scale * (k[b, h] @ q[b, h, i]), seen[b, i].nonzero()[:, 0].tolist(), k.shape[2])

    return by_row(q, k, row)


def exact(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
    return answer(exact_rows(q, k, seen, scale), v)


# ---- the family of centroids: clustered, improved, refined ---------------------------------------


def centroid(q: Tensor, members: Tensor, label: int) -> Tensor:
    """Mean of the members of one cluster of one head; nobody's centroid is 0."""
    here = (members == label).nonzero()[:, 0]
    return q[here].mean(0) if len(here) else q.new_zeros(q.shape[-1])


@dataclass(frozen=True)
class Kept:
    """What a method of the family does with the keys: how many are near, how much the far ones weigh, which part each
    key of a key head belongs to (b hk m; None: they are one), whether the far values have a slope, and how many heads
    in a row share their clusters."""

    top: int = 0
    mass: str = "tangent"
    parts: Tensor | None = None
    slope: bool = False
    scale: float | None = None
    share: int = 1


def crowd(rows: Tensor, h: int, share: int) -> Tensor:
    """The rows (h n ...) of all heads that share clusters with head h, one after the other."""
    first = h // share * share
    return torch.cat([rows[head] for head in range(first, first + share)])


def split(middle: Tensor, k: Tensor, at: list[int], top: int, part_of: list[int], scale: float) -> Split:
    """The keys ``at`` as a centroid sees them: its ``top`` near ones, and the far ones part by part."""
    coarse = scale * (k @ middle)
    order = sorted(at, key=lambda j: (-float(coarse[j].detach()), j))
    near, far = order[:top], sorted(order[top:])
    parts = [[j for j in far if part_of[j] == part] for part in sorted({part_of[j] for j in far})]
    return near, [softmax_row(coarse, part, len(k)) for part in parts]


def near_and_far(
    query: Tensor, middle: Tensor, k: Tensor, at: list[int], part_of: list[int], slope: Tensor | None, kept: Kept,
    scale: float,
) -> Row:  # fmt: skip
    """Eqs. 9-11 of clustered attention for one query, the two other ways to weigh the far keys, and what Refined adds.

    The ``top`` keys of the centroid are attended exactly by the query itself; the rest keep the centroid's
    weights. cluster: the near keys share the mass the centroid gives them (the paper). softmax: the far keys
    weigh what they weigh for the centroid. tangent: that, corrected to first order for this query, part by part.
    Without near keys (top=0) and with one part this is clustered attention, whose log-weight is the tangent.
    slope (d m): how the far weights move with the query, see ``slope_of``.
    """
    near, parts = split(middle, k, at, kept.top, part_of, scale)
    near_row = softmax_row(scale * (k @ query), near, len(k))
    if not parts:
        return near_row
    far = softmax_row(k[:, 0], [], len(k))
    for row, lse in parts:
        if kept.mass == "cluster" and near:
            lse = lse + near_row[1] - (scale * (k[near] @ middle)).logsumexp(0)
        elif kept.mass == "tangent" or not near:
            lse = lse + scale * torch.dot(query - middle, row @ k)
        far = merge_rows(far, (row, lse))
    row, lse = merge_rows(near_row, far)
    if slope is not None:
        row = row + (far[1] - lse).exp() * scale * ((query - middle) @ slope)
    return row, lse


def slope_of(
    q: Tensor, k: Tensor, members: Tensor, labels: list[int], at: list[int], part_of: list[int], top: int, scale: float
) -> Tensor:
    """M of one head (or of one block), as weights over the keys: M = sum_l omega_l k_l v_l^T - sum_c pi_c sum_j a_cj
    kbar_cj vbar_cj^T becomes (d m), the values taken off. Each of the ``labels`` counts by its share of the members."""
    total = sum(int((members == label).sum()) for label in labels)
    slope = k.new_zeros(k.shape[1], len(k))
    for label in labels:
        pi = int((members == label).sum()) / max(total, 1)
        _, parts = split(centroid(q, members, label), k, at, top, part_of, scale)
        if not parts or not pi:
            continue
        whole = torch.stack([lse for _, lse in parts]).logsumexp(0)
        for row, lse in parts:
            a = (lse - whole).exp()
            slope = slope + pi * a * (k.mT * row - torch.outer(row @ k, row))
    return slope


def clustered_rows(q: Tensor, k: Tensor, labels: Tensor, seen: Tensor, kept: Kept) -> tuple[Tensor, Tensor]:
    """Every query is answered by the centroid of its label; all queries of a batch row see the same keys."""
    part_of = _parts(q, k, kept)
    k, scale = repeat_heads(k, q.shape[1]), _scale(q, kept.scale)
    slopes: dict[tuple[int, int], Tensor] = {}

    def row(b: int, h: int, i: int) -> Row:
        at = seen[b, i].nonzero()[:, 0].tolist()
        if not at:
            return softmax_row(k[b, h, :, 0], [], k.shape[2])
        asking, mine, parts = crowd(q[b], h, kept.share), crowd(labels[b], h, kept.share), part_of[b, h].tolist()
        if kept.slope and (b, h) not in slopes:
            there = sorted(set(mine.tolist()) - {-1})
            slopes[b, h] = slope_of(asking, k[b, h], mine, there, at, parts, kept.top, scale)
        middle = centroid(asking, mine, int(labels[b, h, i]))
        return near_and_far(q[b, h, i], middle, k[b, h], at, parts, slopes.get((b, h)), kept, scale)

    return by_row(q, k, row)


def _parts(q: Tensor, k: Tensor, kept: Kept) -> Tensor:
    """(b h m): the part of every key for each query head."""
    parts = torch.zeros(*k.shape[:3], dtype=torch.int64) if kept.parts is None else kept.parts
    return repeat_heads(parts, q.shape[1])


def sure_choice(q: Tensor, k: Tensor, labels: Tensor, seen: Tensor, top: int, eps: float) -> Tensor:
    """(b h n) bool: the centroid's ``top`` keys stand out so far that rounding by eps cannot exchange one."""
    k, scale = repeat_heads(k, q.shape[1]), _scale(q, None)
    sure = torch.ones(q.shape[:3], dtype=torch.bool)
    for b, h, i in (sure & seen.any(-1)[:, None]).nonzero().tolist():
        middle, keys = centroid(q[b, h], labels[b, h], int(labels[b, h, i])), k[b, h, seen[b, i]]
        logits = (scale * (keys @ middle)).sort(descending=True).values
        if 0 < top < len(logits):
            size = scale * float((keys.abs() @ middle.abs()).max())
            sure[b, h, i] = float(logits[top - 1] - logits[top]) > 2 * eps * size
    return sure


def merge_rows(one: Row, other: Row) -> Row:
    """Two answers over different keys as one."""
    if float(one[1].detach()) == NOBODY or float(other[1].detach()) == NOBODY:
        return other if float(one[1].detach()) == NOBODY else one
    lse = torch.logaddexp(one[1], other[1])
    return (one[1] - lse).exp() * one[0] + (other[1] - lse).exp() * other[0], lse


def block_causal_rows(
    q: Tensor, k: Tensor, labels: Tensor, members: Tensor, seen: Tensor, kept: Kept, *, block: int, lag: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Blocks of queries: own keys exactly, earlier keys through centroids; the first block is all exact.

    ``labels`` says which centroid answers for a query, ``members`` which one it helps to form: those of a block are
    formed by the queries of the block ``lag`` before it.
    """
    part_of = _parts(q, k, kept)
    k, scale = repeat_heads(k, q.shape[1]), _scale(q, kept.scale)
    n, m = q.shape[2], k.shape[2]
    slopes: dict[tuple[int, int, int], Tensor] = {}

    def row(b: int, h: int, i: int) -> Row:
        at = seen[b, i].nonzero()[:, 0].tolist()
        start = i // block * block + m - n  # the first key of the query's own block
        logits = scale * (k[b, h] @ q[b, h, i])
        if i < block:
            return softmax_row(logits, at, m)
        own = softmax_row(logits, [j for j in at if j >= start], m)
        past = [j for j in at if j < start]
        if not past:
            return own
        asking, mine = crowd(q[b], h, kept.share), crowd(members[b], h, kept.share)
        parts, where = part_of[b, h].tolist(), (b, h, i // block)
        if kept.slope and where not in slopes:
            first = (i // block - lag) * block
            there = sorted(set(crowd(members[b, :, first : first + block], h, kept.share).tolist()) - {-1})
            slopes[where] = slope_of(asking, k[b, h], mine, there, past, parts, kept.top, scale)
        middle = centroid(asking, mine, int(labels[b, h, i]))
        far = near_and_far(q[b, h, i], middle, k[b, h], past, parts, slopes.get(where), kept, scale)
        return merge_rows(own, far)

    return by_row(q, k, row)


# ---- the family of buckets: SMYRF, Reformer, routing, ClusterFormer, local -----------------------


def bucketed_rows(
    q: Tensor,
    k: Tensor,
    queries: Tensor,
    keys: Tensor,
    seen: Tensor,
    *,
    scale: float | None = None,
    rounds: int = 1,
    once: bool = False,
    not_itself: bool = False,
    or_itself: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention inside every bucket; a query in several merges by lse: one softmax over all keys met.

    A pair met twice counts twice unless ``once``; the log-weight is the mean over ``rounds``. ``not_itself``:
    a token leaves itself out. ``or_itself``: a query that met nobody it may see attends to its own position.
    """
    k, scale = repeat_heads(k, q.shape[1]), _scale(q, scale)
    n, m = q.shape[2], k.shape[2]

    def row(b: int, h: int, i: int) -> Row:
        met: list[int] = []
        for bucket in range(queries.shape[2]):
            here = int((queries[b, h, bucket] == i).sum())
            met += here * [j for j in keys[b, h, bucket].tolist() if j >= 0 and seen[b, i, j]]
        itself = i + m - n
        if once:
            met = sorted(set(met))
        if not_itself:
            met = [j for j in met if j != itself]
        logits = scale * (k[b, h] @ q[b, h, i])
        if not met and or_itself and 0 <= itself < m and seen[b, i, itself]:
            return softmax_row(logits, [itself], m)
        weights, lse = softmax_row(logits, met, m)
        return weights, lse - math.log(rounds)

    return by_row(q, k, row)


def unit(x: Tensor) -> Tensor:
    """Rows of length one; a zero row stays zero."""
    length = x.norm(dim=-1, keepdim=True)
    return x / torch.where(length > 0, length, torch.ones_like(length))


def oracle_top_rows(
    q: Tensor, k: Tensor, seen: Tensor, *, top: int, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Every query keeps its own best keys and nothing else."""
    k, scale = repeat_heads(k, q.shape[1]), _scale(q, scale)

    def row(b: int, h: int, i: int) -> Row:
        logits = scale * (k[b, h] @ q[b, h, i])
        at = sorted(seen[b, i].nonzero()[:, 0].tolist(), key=lambda j: (-float(logits[j].detach()), j))
        return softmax_row(logits, at[:top], k.shape[2])

    return by_row(q, k, row)


def local_rows(
    q: Tensor, k: Tensor, seen: Tensor, *, window: int, causal: bool, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """``window`` keys around the query's own position, itself included; causal: the last ``window``."""
    n, m = q.shape[2], k.shape[2]
    left = window - 1 if causal else (window - 1) // 2
    ahead = torch.arange(m) - (torch.arange(n)[:, None] + m - n)
    return exact_rows(q, k, seen & (ahead >= -left) & (ahead < window - left), scale)


# ---- ClusterFormer, eqs. 2-11 --------------------------------------------------------------------


def neural_clustering(
    points: Tensor, start: Tensor, valid: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """One sequence: points (n x), centroids (c x), valid (n) -> U (c n), labels (n), new centroids, L1, L2.

    U is normalised over the words, for each centroid (eq. 2); the label is the argmax over centroids (eq. 4).
    """
    n, c = len(points), len(start)
    real = [j for j in range(n) if valid is None or valid[j]]
    u = torch.stack([softmax_row(points @ start[i], real, n)[0] for i in range(c)])  # eq. 2
    new = torch.stack([sum((u[i, j] * points[j] for j in real), points.new_zeros(points.shape[1])) for i in range(c)])
    labels = torch.tensor([int(u[:, j].argmax()) if j in real else -1 for j in range(n)])  # eq. 4
    belonging = [torch.dot(points[j], new[labels[j]]) for j in real]
    l1 = -sum(belonging, points.new_zeros(())) / max(len(real), 1)  # eq. 6
    l2 = (
        -sum((torch.dot(new[i], new[i - 1]) for i in range(c)), points.new_zeros(())) / c
    )  # eq. 11, new[-1] is the last
    return u, labels, new, l1, l2


def clusterformer_tables(
    labels: Tensor, clusters: int, blocks: int = 2, *, turns: bool = False
) -> tuple[list[list[int]], list[list[int]]]:
    """Eqs. 5 and 8 for one sequence: sorted by label, equal ones by their place (in turns: backwards in odd clusters),
    equal blocks, each with those before it."""
    real = [j for j in range(len(labels)) if labels[j] >= 0]
    order = sorted(real, key=lambda j: (int(labels[j]), -j if turns and labels[j] % 2 else j))
    width = max(math.ceil(len(order) / clusters), 1)
    slices = [order[i * width : (i + 1) * width] for i in range(clusters)]
    windows = []
    for i in range(clusters):
        window: list[int] = []
        for back in range(min(blocks, clusters)):  # with fewer blocks than asked for, no block is met twice
            window += slices[(i - back) % clusters]
        windows.append(window)
    return slices, windows


# ---- SMYRF's asymmetric transform ----------------------------------------------------------------


def asymmetric(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """P(q), Q(k) with |P(q)| = |Q(k)| constant and P(q).Q(k) = q.k, for q (n d) and k (m d)."""
    most = q.square().sum(-1).max() + k.square().sum(-1).max()
    q_rest = (most - q.square().sum(-1, keepdim=True)).clamp(min=0).sqrt()
    k_rest = (most - k.square().sum(-1, keepdim=True)).clamp(min=0).sqrt()
    return torch.cat([q, torch.zeros_like(q_rest), q_rest], -1), torch.cat([k, k_rest, torch.zeros_like(k_rest)], -1)
