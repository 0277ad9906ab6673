"""Random calls for `fuzz.py`: a case is a function of (seed, number), and so are its tensors."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before the kernels are imported

import clusterattn as ca  # noqa: E402

PER_KIND = 6
HALVES = ("fp16", "bf16")
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
LAYOUTS = ("plain", "plain", "bshd", "bshd", "cut", "odd", "columns")


@dataclass(frozen=True)
class Case:
    """One call."""

    method: str
    causal: bool
    b: int
    h: int
    hk: int
    n: int
    m: int
    d: int
    e: int
    dtype: str
    key_mask: str  # "none", "right", "left", "holes"
    query_mask: bool
    layout: str
    given: bool  # groups made by the reference in fp64; otherwise by the kernels
    seed: int


KNOWN = [  # found by an earlier try
    Case("reformer:rounds=1,chunk=16", True, 1, 4, 2, 7, 7, 40, 32, "fp16", "holes", False, "plain", False, 1),
    Case(
        "refined:clusters=7,top=8,steps=2,parts=1,slope=false", True, 1, 2, 2, 513, 1025, 96, 64, "fp16", "none",
        False, "plain", False, 2,
    ),
    Case(  # a slope of 128 by 32
        "refined:clusters=7,steps=1,start=far,sample=300,top=8,parts=1,slope=true", False, 3, 3, 1, 1024, 1024, 128, 32,
        "fp16", "left", False, "odd", False, 3,
    ),
]  # fmt: skip


def _family(draw: random.Random, causal: bool) -> str:
    """Clustered, Improved or Refined with random settings."""
    name = draw.choice(("clustered", "improved", "refined", "refined", "refined"))
    words = [f"clusters={draw.choice((1, 3, 7, 16, 33, 100))}", f"steps={draw.choice((1, 2, 4))}"]
    metric = draw.choice(("hamming", "euclid", "keys")) if name != "refined" else "keys"
    words += [f"start={draw.choice(('random', 'far'))}"]
    words += [f"metric={metric}"] if name != "refined" else []
    words += [f"sample={draw.choice((20, 64, 300))}"] if draw.random() < 0.5 else []
    words += [f"bits={draw.choice((15, 31, 63))}"] if metric == "hamming" else []
    words += [f"rank={draw.choice((4, 8))}"] if metric == "keys" and draw.random() < 0.25 else []
    words += [f"block={draw.choice((16, 40, 64))}"] if causal and draw.random() < 0.7 else []
    words += [f"centroids_from={draw.choice(('past', 'block'))}"] if causal else []
    if name == "clustered":
        return f"{name}:{','.join(words)}"
    words.append(f"top={draw.choice((1, 5, 8, 32, 50, 130) if name == 'improved' else (0, 1, 8, 32, 50, 130))}")
    tangent = name == "refined"
    if name == "improved":
        mass = draw.choice(("cluster", "softmax", "tangent"))
        words.append(f"mass={mass}")
        tangent = mass == "tangent"
    if tangent and not causal:
        words += [f"parts={draw.choice((1, 1, 3, 8, 40))}", f"slope={draw.choice(('true', 'false'))}"]
    elif name == "refined":
        words += ["parts=1", "slope=false"]
    return f"{name}:{','.join(words)}"


def _method(draw: random.Random, causal: bool) -> str:
    kind = draw.random()
    if kind < 0.5:
        return _family(draw, causal)
    if kind < 0.55:
        return "refined"
    if kind < 0.75:
        words = [f"rounds={draw.choice((1, 2, 4))}", f"q_seats={draw.choice((16, 32, 64, 100))}"]
        words += [f"k_seats={draw.choice((16, 64, 128))}", f"dedup={draw.choice(('true', 'false'))}"]
        words += [f"transform={draw.choice(('asymmetric', 'e2lsh', 'crosspolytope'))}"]
        return f"smyrf:{','.join(words)}"
    if kind < 0.88:
        return f"reformer:rounds={draw.choice((1, 2, 4))},chunk={draw.choice((16, 32, 64))}"
    if kind < 0.94:
        return f"local:window={draw.choice((5, 40, 200))}"
    return f"clusterformer:clusters={draw.choice((2, 5, 9))}"


def case(seed: int, number: int, small: bool) -> Case:
    """The same for the same seed and number."""
    if number < len(KNOWN):
        return KNOWN[number]
    draw = random.Random(f"kind {seed} {number // PER_KIND}")
    causal = draw.random() < 0.4
    method = _method(draw, causal)
    recipe = ca.method(method)
    causal = causal and recipe.causality != "no"
    dtype = draw.choice(("fp16", "bf16", "bf16", "fp32"))
    d = draw.choice((16, 32, 40, 64, 64, 64, 80, 96, 128, 128, 256))
    e = d if draw.random() < 0.6 else draw.choice((16, 32, 64, 128))
    if dtype == "fp32" and d == 256:  # minutes of compiling
        d, e = 128, min(e, 128)
    if "refined" in method or "parts" in method:  # keys beside their values are wider than either
        e = min(e, 128)
    masks, layout = draw.choice(("none", "right", "left", "holes")), draw.choice(LAYOUTS)
    heads, given = draw.choice(((2, 2), (4, 2), (3, 1))), draw.random() < 0.5
    draw = random.Random(f"size {seed} {number}")
    lengths = (1, 2, 7, 16, 31, 64, 100, 128, 255, 257, 500, 512, 513, 1024, 1500, 2048, 3001)
    n, m = draw.choice(lengths), draw.choice(lengths)
    b = draw.choice((1, 2, 3))
    if small:
        dtype, n, m, d, e = "fp16" if dtype in HALVES else dtype, n % 71 + 1, m % 83 + 1, min(d, 40), min(e, 32)
        b, heads = min(b, 2), (2, 1)
    if recipe.self_only or draw.random() < 0.4:
        m = n
    queries = draw.random() < 0.3
    return Case(method, causal, b, *heads, n, m, d, e, dtype, masks, queries, layout, given, draw.randrange(1 << 30))


# ---------------------------------------------------------------------------------------------------- inputs


def laid(x: Tensor, layout: str) -> Tensor:
    """The same numbers in other places: (b n h d) behind it, cut out of wider rows, at an odd address, transposed."""
    if layout == "bshd":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "cut":
        return torch.cat([x, x], -1)[..., : x.shape[-1]]
    if layout == "columns":
        return x.mT.contiguous().mT
    if layout == "odd":
        room = torch.zeros(x.numel() + 1, dtype=x.dtype, device=x.device)
        room[1:] = x.flatten()
        return room[1:].view(x.shape)
    return x


def masked(kind: str, b: int, length: int, draw: torch.Generator) -> Tensor | None:
    if kind == "none":
        return None
    kept = torch.ones(b, length, dtype=torch.bool)
    for row in range(b):
        many = int(torch.randint(0, length, (), generator=draw)) // (2 if row else 1)
        if kind == "right":
            kept[row, length - many :] = False
        elif kind == "left":
            kept[row, :many] = False
        else:
            kept[row, torch.randperm(length, generator=draw)[:many]] = False
    return kept.to(DEVICE)


@dataclass(frozen=True)
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    d_out: Tensor
    d_lse: Tensor
    key_mask: Tensor | None
    query_mask: Tensor | None


def inputs(x: Case) -> Inputs:
    """Queries and keys in lumps, so that there is something to cluster."""
    draw = torch.Generator().manual_seed(x.seed)
    lumps = torch.randn(12, x.d, generator=draw) * 1.5

    def lumpy(heads: int, length: int) -> Tensor:
        which = torch.randint(12, (x.b, heads, length), generator=draw)
        return lumps[which] + 0.6 * torch.randn(x.b, heads, length, x.d, generator=draw)

    q, k = lumpy(x.h, x.n), lumpy(x.hk, x.m)
    v, d_out = (torch.randn(x.b, heads, length, x.e, generator=draw) for heads, length in ((x.hk, x.m), (x.h, x.n)))
    d_lse = torch.randn(x.b, x.h, x.n, generator=draw)
    kind = DTYPES[x.dtype]
    return Inputs(
        *(t.to(kind).to(DEVICE) for t in (q, k, v, d_out)),
        d_lse.to(DEVICE),
        masked(x.key_mask, x.b, x.m, draw),
        masked("holes", x.b, x.n, draw) if x.query_mask else None,
    )
