"""Sizes from shapes: what is right at 512 tokens is wrong at 60 000.

A *ladder* is a list of sizes, each rung dearer and closer to exact attention than the one before; a *budget* is the
share of exact attention's multiply-adds, grouping included, that a call may take. Sizes that a method leaves open are
those of the dearest rung inside its budget whose grouping takes no more than a third of the work, with fewer parts or
clusters where that needs it; or, where it names no budget, the usual ones for the length. Lengths count in steps (512,
768, 1 024, 1 536, ...), so that sizes are step functions and a compiled graph serves a range of lengths; shares only
fall as a length grows inside its step.

Where the rungs come from (docs/pretrained.md and docs/what-did-not-work.md have the figures):

SHORT    below 2 048 attention of text and speech is sharp: near keys beat far parts and the slope at equal cost. Rungs
         are (a cluster for so many queries, near keys): MiniLM-L6 at 512, Whisper's encoder at 1 500, and the embedded
         sample. k-means takes three steps from far-apart starts, on half of the queries, along d/4 directions,
         32 at most
LONG     from 2 048 on it is diffuse: as many parts and near keys as clusters, and the slope. TabPFN v1 at 4 000, 8 192
         (the long sample: of 60 settings at 7 %, and of 40 at 15 % on its first 4 000 rows, 64 / 64 / 64 is the best),
         10 000 and 60 000 rows (of 12 settings at 1 to 1.6 %, four seeds each, 256 / 32 / 64 keeps the accuracy best)
CAUSAL   blocks make every slope and part anew, so near keys pay and nothing else does; query heads that see the same
         keys share their clusters: SmolLM2-135M at 2 048 .. 8 192
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from .exact import Exact

if TYPE_CHECKING:
    from .refined import Refined

SIZES = ("clusters", "top", "parts", "slope", "steps")  # of Refined
Rung = dict[str, Any]  # clusters, top, parts, slope
F = TypeVar("F", bound=Callable[..., object])


def constant(function: F) -> F:
    """Mark a pure function of plain values with plain values as its result: the compiler calls it while it traces,
    instead of tracing it. As ``torch.compiler.assume_constant_result``, which would import the whole compiler."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@dataclass(frozen=True)
class Shape:
    """Of a call: n queries, m keys, dimensions d of keys and e of values, query heads that share a key head."""

    n: int
    m: int
    d: int
    e: int
    causal: bool = False
    group: int = 1


DIFFUSE = 2048  # from so many keys on
FROM = 1024  # queries and keys: from there on the grouping takes at most a third of the work

# queries for each cluster, near keys
SHORT = (
    (64, 8), (64, 16), (32, 16), (32, 32), (20, 32), (20, 48), (20, 64), (20, 76), (20, 88), (20, 100), (20, 112),
    (20, 128), (20, 160), (20, 192), (20, 256), (20, 320), (20, 384), (20, 512), (20, 768), (20, 1024),
)  # fmt: skip
# clusters, near keys, parts; with parts, the slope
LONG = (
    (8, 8, 1), (16, 16, 1), (16, 16, 16), (24, 24, 24), (32, 32, 32), (48, 48, 48), (64, 64, 64), (96, 64, 96),
    (128, 64, 128), (192, 64, 128), (256, 64, 128), (256, 128, 256), (384, 128, 256), (512, 128, 256), (512, 256, 512),
    (1024, 256, 512), (1024, 512, 1024), (2048, 512, 1024), (4096, 1024, 2048), (8192, 2048, 4096),
)  # fmt: skip
# clusters of a block, near keys
CAUSAL = (
    (4, 16), (4, 32), (8, 32), (8, 64), (16, 64), (16, 96), (16, 128), (16, 192), (16, 256), (16, 320), (16, 352),
    (16, 384), (16, 512), (16, 640), (16, 768), (16, 1024), (32, 1024), (64, 1024), (128, 1024), (128, 2048),
    (256, 4096),
)  # fmt: skip

# Length -> the sizes of a method that names no budget, from that length on.
USUAL_SHORT = {
    1: (16, 8), 64: (16, 16), 128: (20, 24), 256: (20, 48), 512: (20, 76), 768: (20, 128), 1024: (20, 256),
    1536: (20, 256),
}  # fmt: skip
USUAL_LONG = {
    1: (64, 64, 64), 32768: (128, 32, 96), 49152: (192, 32, 96), 262144: (512, 64, 128), 1048576: (1024, 128, 256),
}  # fmt: skip
USUAL_CAUSAL = {
    1: (8, 32), 1024: (16, 64), 2048: (16, 160), 4096: (16, 256), 8192: (16, 352), 32768: (16, 768),
    131072: (32, 1024),
}  # fmt: skip
# Few queries over many keys: near keys and parts, which each query pays for, are cheap beside clusters, which each key
# pays for; and an error of such a call is not averaged out by others.
CROSS = {1: (4, 2), 32768: (32, 8)}  # keys -> so many times the near keys and the parts
CROSS_QUERIES = 8  # keys for each query up to which a call is as long as its keys are many


def step(length: int) -> int:
    """The largest 2^i or 3/2 2^i at or below. By comparisons: a symbolic length gets guards, and stays symbolic."""
    size = 1
    while 2 * size <= length:
        size *= 2
    return size + size // 2 if size + size // 2 <= length else size


def step_end(size: int) -> int:
    """The last length that has this step."""
    return max(size * 4 // 3 if size % 3 == 0 else size * 3 // 2, 2) - 1


def whole(size: int) -> int:
    """A size as the number it is. By comparisons as well: they hold a graph to it."""
    found, bit = 0, 1
    while bit <= size:
        bit *= 2
    while bit > 1:
        bit //= 2
        found += bit if found + bit <= size else 0
    return found


def block(n: int, clusters: int) -> int:
    """Causal blocks: within a block everybody is seen exactly, before it through centroids, which pass keys, values and
    mean keys: n * block multiply-adds against n / block * clusters * n / 2 * 3 / 2. They are least where they are
    equal; this is the power of two nearest to that."""
    return max(64, 1 << (math.isqrt(3 * max(clusters, 1) * step(n) // 2).bit_length() - 1))


def stepped(shape: Shape) -> Shape:
    """Lengths in steps, downwards, so that no share is larger than it seems; the rest is a model's own."""
    return Shape(step(shape.n), step(shape.m), whole(shape.d), whole(shape.e), shape.causal, step(shape.group))


def fill(method: Refined, shape: Shape) -> Refined:
    """The method with a value for every size: those that are given, and the highest rung that fits beside them."""
    at = stepped(shape)
    if not torch.compiler.is_compiling():
        return _filled(method, at)
    chosen = _plain(method.to_dict(), at.n, at.m, at.d, at.e, at.causal, at.group)
    return replace(method, **dict(chosen), budget=None)


@constant
def _plain(settings: dict[str, Any], *shape: Any) -> tuple[tuple[str, Any], ...]:
    """The chosen sizes as plain values."""
    from . import method

    filled = _filled(method(settings), Shape(*shape))
    chosen = (*SIZES, "start", "sample", "rank", "block", "share_heads")
    return tuple((name, getattr(filled, name)) for name in chosen)


@lru_cache(maxsize=4096)
def _filled(method: Refined, at: Shape) -> Refined:
    """Where nothing fits, the lowest rung: a budget of 1 % of 100 tokens is less than one cluster."""
    if method.budget is None:
        return _sensible(method, usual(at), at)
    ladder = [_sensible(method, rung, at) for rung in rungs(at)]
    ladder = [each for each in ladder if _is_sensible(each, at)] or ladder
    most = method.budget * Exact().cost(at.n, at.m, at.d, at.e, causal=at.causal)
    # Parts that are left out for few queries may make a higher rung the cheaper one.
    cost = {each: each.cost(at.n, at.m, at.d, at.e, causal=at.causal, group=at.group) for each in ladder}
    return max((each for each in ladder if cost[each] <= most), key=cost.__getitem__, default=ladder[0])


def _sensible(method: Refined, rung: Rung, at: Shape) -> Refined:
    """With as many of the rung's clusters and parts as leave the grouping a third of the work: few queries repay fewer
    parts, few keys fewer clusters."""
    halvings = rung["clusters"].bit_length() if min(at.n, at.m) >= FROM and method.clusters is None else 1
    for fewer in range(halvings):
        for less in range(6):
            clusters, parts = max(rung["clusters"] >> fewer, 1), max(rung["parts"] >> less, 1)
            filled = _with(method, {**rung, "clusters": clusters, "parts": parts}, at)
            if _is_sensible(filled, at):
                return filled
    return _with(method, {**rung, "parts": parts}, at)


def _is_sensible(method: Refined, at: Shape) -> bool:
    """At the first lengths of the step and, from FROM on, at the last ones. (Where n and m differ inside one step, the
    grouping may take up to 0.36 of the work: sizes do not see that.)"""
    ends = [(at.n, at.m)]
    if min(at.n, at.m) >= FROM:
        ends.append((step_end(at.n), step_end(at.m)))
        ends += [(at.n, step_end(at.m)), (step_end(at.n), at.m)] if at.n != at.m else []
    return all(
        3 * method.grouping_cost(n, m, at.d, at.e, causal=at.causal, group=at.group)
        <= method.cost(n, m, at.d, at.e, causal=at.causal, group=at.group)
        for n, m in ends
    )


def usual(at: Shape) -> Rung:
    """The sizes where no budget is named."""
    # Clusters are paid for by every key: few queries are worth fewer, unless they are not so few.
    length = at.m if at.m <= CROSS_QUERIES * at.n else min(at.n, at.m)
    table = USUAL_CAUSAL if at.causal else USUAL_SHORT if at.m < DIFFUSE else USUAL_LONG
    return _rung(table[max(each for each in table if each <= max(length, 1))], at)


def rungs(at: Shape) -> list[Rung]:
    """The ladder for this shape."""
    table = CAUSAL if at.causal else SHORT if at.m < DIFFUSE else LONG
    return [_rung(numbers, at) for numbers in table]


def _rung(numbers: tuple[int, ...], at: Shape) -> Rung:
    """A line of a table as sizes."""
    if at.causal:
        return {"clusters": numbers[0], "top": numbers[1], "parts": 1, "slope": False}
    if at.m < DIFFUSE:
        clusters = max(min(at.n, at.m) // numbers[0], 1)
        return {"clusters": clusters, "top": numbers[1], "parts": 1, "slope": False}
    few = 2 * at.n <= at.m and numbers[2] > 1
    near, parts = CROSS[max(each for each in CROSS if each <= at.m)] if few else (1, 1)
    return {
        "clusters": numbers[0], "top": near * numbers[1], "parts": parts * numbers[2], "slope": numbers[2] > 1
    }  # fmt: skip


def _with(method: Refined, rung: Rung, at: Shape) -> Refined:
    """The rung's sizes where the method has none, and a grouping that fits them."""
    sizes = {name: size if getattr(method, name) is None else getattr(method, name) for name, size in rung.items()}
    # With many queries random starts do as well as far-apart ones, and cost less; and the whole metric costs little.
    long = not at.causal and at.m >= DIFFUSE
    share = method.share_heads if method.share_heads is not None else at.causal and method.clusters is None
    heads = at.group if share else 1
    sizes["share_heads"] = True if heads > 1 else method.share_heads
    if method.clusters is None:  # as many in all, for the heads that share them
        sizes["clusters"] *= heads
    if at.causal and method.block is None:
        sizes["block"] = block(at.n, sizes["clusters"] // heads)
    if method.steps is None:
        sample = None  # causal: a block is small
        if not at.causal and at.m < DIFFUSE:
            sample = max(min(at.n, at.m) // 2, sizes["clusters"])
        elif not at.causal:
            sample = min(max(16 * max(sizes["clusters"], sizes["parts"]), 256), max(at.n, at.m) // 8)
        rank = min(at.d, 16 if at.causal else min(max(at.d // 4, 8), 32))  # every block finds its own directions
        sizes |= {"steps": 2 if long else 3, "sample": method.sample or sample}
        sizes |= {"rank": method.rank or (at.d if long else rank)} if method.metric == "keys" else {}
    if method.start is None:
        sizes["start"] = "random" if long and method.steps is None else "far"
    return replace(method, **sizes, budget=None)
