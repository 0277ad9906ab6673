"""Where the conditioning rows of a sequence are, on one device or on a rank of diffusers' context parallelism; and a
ring of ranks that answer as one device does."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._types import Method
from ._served import heads_first


class Layout(NamedTuple):
    pieces: list[tuple[slice, bool]]  # stretches of queries, and whether their answers are to be exact
    order: Tensor | None = None  # (n) the tokens as they follow each other on one device; None: as they come
    back: Tensor | None = None  # (n) the places to which they return


def layout(n: int, exact_rows: int, joint: bool, parallel: Any, device: torch.device) -> Layout:
    """The first ``exact_rows`` tokens of the whole sequence, or the last if it is negative, among the n of this call.

    Ulysses joins the shares of the ranks in their order, which is the order on one device. Of a joint model, whose
    conditioning is a stream of its own, each rank has a share of both streams: the streams are put together again, or
    else the draws of a method would fall on other tokens than on one device. Around a ring, a rank's queries are its
    own share.
    """
    rows, first = abs(exact_rows), exact_rows > 0
    if parallel is None or not exact_rows:
        return Layout(_pieces(n, min(rows, n), first))
    ring, ulysses, at = parallel.ring_degree, parallel.ulysses_degree, parallel._ring_local_rank
    if not joint:
        before = at * n if first else (ring - 1 - at) * n  # tokens between this share and that end of the sequence
        return Layout(_pieces(n, min(max(rows - before, 0), n), first))
    shares = _shares(rows, ring * ulysses)[at * ulysses : (at + 1) * ulysses]
    pieces = _pieces(n, sum(shares), first)
    if ulysses == 1:
        return Layout(pieces)
    rest = _shares(n - sum(shares), ulysses)
    front, behind = (shares, rest) if first else (rest, shares)
    sizes = [size for pair in zip(front, behind, strict=True) for size in pair]
    stretches = torch.split(torch.arange(n, device=device), sizes)
    order = torch.cat([*stretches[0::2], *stretches[1::2]])
    return Layout(pieces, order, order.argsort())


def over_ring(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    method: Method,
    scale: float | None,
    lse: bool,
    exact_rows: int,
    joint: bool,
    parallel: Any,
) -> Any:
    """(b n h d) of this rank's share -> (b n h e), and the log-weight (b n h) if it is asked for: as one device that
    holds everything would answer, by ``clusterattn.parallel``. Conditioning rows are answered exactly."""
    from ..parallel import attention, few_exactly

    group, n = parallel._ring_mesh.get_group(), q.shape[1]
    pieces = layout(n, exact_rows, joint, parallel, q.device).pieces
    q, k, v = (heads_first(x) for x in (q, k, v))
    found = []
    for exact in dict.fromkeys([exact_rows > 0, False, exact_rows < 0]):  # in order, also where this rank has none
        rows = next((piece for piece, kind in pieces if kind == exact), slice(0, 0))
        if exact:
            found.append(few_exactly(q[:, :, rows], k, v, group=group, scale=scale)[: 1 + lse])
        else:
            # the streams of a joint model follow one another on one device, and the draws with them
            others = n - (rows.stop - rows.start)
            streams = ([others, n - others] if exact_rows > 0 else [n - others, others]) if joint else None
            options = {"method": method, "group": group, "scale": scale, "key_streams": streams}
            answer = attention(q[:, :, rows], k, v, return_lse=lse, **options)
            found.append(answer if lse else (answer,))
    whole = [torch.cat(each, 2).transpose(1, 2) for each in zip(*found, strict=True)]
    return (whole[0], whole[1]) if lse else whole[0]


def _pieces(n: int, rows: int, first: bool) -> list[tuple[slice, bool]]:
    if first:
        cut = [(slice(0, rows), True), (slice(rows, n), False)]
    else:
        cut = [(slice(0, n - rows), False), (slice(n - rows, n), True)]
    return [(piece, exact) for piece, exact in cut if piece.stop > piece.start]


def _shares(total: int, ranks: int) -> list[int]:
    """As torch.tensor_split, by which diffusers shares out a sequence."""
    return [total // ranks + (rank < total % ranks) for rank in range(ranks)]
