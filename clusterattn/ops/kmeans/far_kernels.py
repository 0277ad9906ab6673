"""Starts that lie far apart, in one launch: every round, half of the cells give the point that lies farthest in them.

Cells are the points that are nearest to the same chosen one. What a cell offers is the maximum of integers that hold a
gap and a place, so that any order of the programs finds the same. See reference.farthest for the definition.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._jit import INTERPRETING, in_turn, jit, power, tl
from .._launch import Buffer, cdiv, launch, workspace
from .reference import growth
from .train_kernels import meet, together


@jit
def far_kernel(
    POOL_AT, HELD, W, OFFSET, GAP, CELL, BEST, CHOSEN, BARRIER, OUT,
    p, c, d, heads, programs, stretch, begin, end, phases, spb, sph, grown,
    BR: tl.constexpr, BC: tl.constexpr, BJ: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Phases begin .. end of one head; ``grown`` points are chosen before them. CHOSEN (lead c): places in the pool,
    OUT (lead c): positions.

    The squared distance of i and j is norm(i) + norm(j) - 2 w(i) . x(j); what start_kernel left holds all three. BEST
    (3 lead c): what each cell offers, for this phase, the next, and being wiped for the one after.
    """
    in_turn()
    mine, lead, leads = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(1)
    dims, cells = tl.arange(0, BD), tl.arange(0, BJ)
    stop = min(p, (mine + 1) * stretch)
    for phase in range(begin, end):
        want = 0
        if phase > 0:
            want = tl.minimum(tl.maximum(grown // 2, 1), c - grown)
            offers = BEST + (((phase + 2) % 3) * leads + lead) * c
            many = tl.maximum(grown, 1)
            for first in range(0, many, BJ):
                which = first + cells
                offer = tl.load(offers + which, mask=which < many, other=0, cache_modifier=".cg")
                rank = tl.zeros((BJ,), tl.int32)
                for other in range(0, many, BJ):
                    whose = other + cells
                    theirs = tl.load(offers + whose, mask=whose < many, other=-1, cache_modifier=".cg")
                    before = (theirs[None, :] == offer[:, None]) & (whose[None, :] < which[:, None])
                    rank += tl.sum(((theirs[None, :] > offer[:, None]) | before).to(tl.int32), 1)
                place = tl.where(offer == 0, -1, p - (offer & 0xFFFFFFFF))  # 0: a cell of nobody
                pool = POOL_AT + (lead // heads) * spb + (lead % heads) * sph
                slot, takes = lead * c + grown + rank, (which < many) & (rank < want)
                tl.store(CHOSEN + slot, place, mask=takes)
                tl.store(OUT + slot, tl.load(pool + place, mask=takes & (place >= 0), other=-1), mask=takes)
            for first in range(mine * BJ, c, programs * BJ):
                which = first + cells
                wiped = BEST + (((phase + 1) % 3) * leads + lead) * c + which
                tl.store(wiped, tl.zeros((BJ,), tl.int64), mask=which < c)
            tl.debug_barrier()  # every program finds all the new ones itself, and reads what it wrote
        if phase + 1 < phases:
            for start in range(mine * stretch, stop, BR):
                at = start + tl.arange(0, BR)
                inside = at < stop
                own = tl.load(OFFSET + lead * p + at, mask=inside, other=float("-inf"))
                live = own > float("-inf")
                gap, cell = tl.where(live, -2 * own, float("-inf")), tl.zeros((BR,), tl.int32)
                if phase > 0:
                    norm = -2 * own
                    gap = tl.where(live, float("inf"), float("-inf"))
                    if phase > 1:
                        gap = tl.load(GAP + lead * p + at, mask=inside, other=float("-inf"))
                        cell = tl.load(CELL + lead * p + at, mask=inside, other=0)
                    w = tl.load(
                        W + (lead * p + at)[:, None] * d + dims[None, :], mask=inside[:, None] & (dims < d)[None, :],
                        other=0.0,
                    ).to(tl.float32)  # fmt: skip
                    for first in range(0, want, BC):
                        slot = first + tl.arange(0, BC)
                        pick = tl.load(CHOSEN + lead * c + grown + slot, mask=slot < want, other=-1)
                        there = pick >= 0
                        x = tl.load(
                            HELD + (lead * p + pick)[:, None] * d + dims[None, :],
                            mask=there[:, None] & (dims < d)[None, :], other=0.0,
                        )  # fmt: skip
                        theirs = -2 * tl.load(OFFSET + lead * p + pick, mask=there, other=0.0)
                        apart = norm[:, None] + theirs[None, :] - 2 * tl.dot(w, tl.trans(x), input_precision="tf32x3")
                        apart = tl.where(there[None, :], tl.maximum(apart, 0.0), float("inf"))
                        near, index = tl.min(apart, axis=1, return_indices=True)
                        cell = tl.where(near < gap, grown + first + index, cell)
                        gap = tl.minimum(gap, near)
                        taken = tl.sum((at[:, None] == pick[None, :]).to(tl.int32), 1) > 0
                        gap = tl.where(taken, float("-inf"), gap)
                    tl.store(GAP + lead * p + at, gap, mask=inside)
                    tl.store(CELL + lead * p + at, cell, mask=inside)
                bits = tl.maximum(gap, 0.0).to(tl.int32, bitcast=True).to(tl.int64)
                offer = (bits << 32) + (p - at).to(tl.int64)
                tl.atomic_max(
                    BEST + ((phase % 3) * leads + lead) * c + cell, offer, mask=inside & (gap > float("-inf")),
                    sem="relaxed",
                )  # fmt: skip
        grown += want
        if phase + 1 < end:
            meet(BARRIER, lead, programs * (phase - begin + 1))


def far(
    pool_at: Tensor, held: Buffer, w: Tensor, offset: Tensor, best: Buffer, barrier: Buffer, points: Tensor, c: int
) -> Tensor:
    """What start_kernel left of the points at pool_at (b h p) -> the positions (lead c) of those that lie far apart."""
    (b, h, _, d), p, device = points.shape, pool_at.shape[2], points.device
    lead, wide = b * h, power(d)
    tile = max(16, min(128, 8192 // wide))
    programs = together(cdiv(p, tile), lead, device)
    stretch = cdiv(cdiv(p, programs), tile) * tile
    programs = cdiv(p, stretch)
    gap, cell, chosen = workspace(
        device, ((lead, p), torch.float32), ((lead, p), torch.int32), ((lead, c), torch.int64)
    )
    out = torch.empty(lead, c, dtype=torch.int64, device=device)
    sizes = growth(c)
    phases = len(sizes) + 1
    spans = [(one, one + 1) for one in range(phases)] if INTERPRETING else [(0, phases)]
    for begin, end in spans:
        launch(
            far_kernel, (programs, lead), (pool_at, held, w, offset, gap, cell, best, chosen, barrier, out),
            (p, c, d, h, programs, stretch, begin, end, phases, *pool_at.stride()[:2]),
            (sizes[begin - 1] if begin else 0,),
            BR=tile, BC=max(16, min(64, 4096 // wide)), BJ=32 if c <= 512 else 64, BD=wide, num_warps=8, num_stages=1,
            launch_cooperative_grid=programs > 1,
        )  # fmt: skip
    return out
