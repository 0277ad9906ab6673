"""Kernels against fp64 on random calls: methods, sizes, dtypes, head dims, masks, strides, grouped heads, given groups.

    python benchmarks/fuzz.py --cases 360 --jobs 12 --seconds 540      on a GPU: compiles in so many processes at once
    python benchmarks/fuzz.py --case 17 --seed 3                       one of them again, in this process
    python benchmarks/fuzz.py --cases 12 --jobs 2                      without a GPU: tiny shapes, interpreted

A case is a function of (seed, number). PER_KIND cases in a row are of one kind (method, dtype, head dims, masks: what
kernels are compiled for) and differ in their sizes and numbers. Each holds the kernels to the two rules of the laws.

As good as the plain run: out, lse, dq, dk and dv are as close to fp64 as the reference in the kernel's dtype, times 2
(gradients 3), the largest error and the l2 error alike; 8 roundings of the largest number (l2: one) are always allowed,
a rounding being that of the dtype and, since weights are exponentials, of the largest lse in fp32.
The reference runs plainly and with every product rounded to the dtype, as the kernels' are: the larger error counts.

An equal choice or an equally good one: both references attend with the groups and the near keys that the kernel chose,
so that a tie is no difference; what the kernel chose must then be as good as the best, within the rounding of a score,
and its clusters as tight as those of the reference.

And the same bits again, other calls between; and what stands in padded positions (NaN) reaches nobody. Exit status 1
where a case fails; each failure is printed with the line that repeats it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before the kernels are imported

import clusterattn as ca  # noqa: E402
from clusterattn.measure import Row, append, environment, rows_path  # noqa: E402
from clusterattn.measure.bench import RoundedProducts  # noqa: E402
from clusterattn.ops.coarse import kernels as coarse_kernels  # noqa: E402
from clusterattn.ops.coarse import reference as coarse  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
PER_KIND = 6
HALVES = ("fp16", "bf16")
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
PARTS = ("out", "lse", "dq", "dk", "dv")
LAYOUTS = ("plain", "plain", "bshd", "bshd", "cut", "odd", "columns")
LOOSE_CLUSTERS = 1.1  # the kernel's clusters may be so much wider than the reference's


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
]  # fmt: skip


# ---------------------------------------------------------------------------------------------------- cases


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
        *(t.to(kind).to(DEVICE) for t in (q, k, v, d_out)), d_lse.to(DEVICE), masked(x.key_mask, x.b, x.m, draw),
        masked("holes", x.b, x.n, draw) if x.query_mask else None,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------- near keys


class Near:
    """The near keys that a kernel chose, put in the place of the reference's own; and how good they were."""

    def __init__(self, eps: float) -> None:
        self.eps, self.worst = eps, 0.0
        self.chosen: Tensor | None = None
        self._sequence = 0

    @contextmanager
    def seen(self) -> Iterator[None]:
        """Note what kernels choose: (b*h c t), positions among the keys as they came."""
        select = coarse_kernels.select

        def noted(c: Tensor, keys: Any, reach: Any, top: int) -> tuple[Tensor, Tensor]:
            near, bits = select(c, keys, reach, top)
            if not first:  # a call may be made once more, to be written down
                first.append((near, keys.order, c.shape[1] // keys.k.shape[1]))
            return near, bits

        first: list[tuple[Tensor, Tensor | None, int]] = []
        coarse_kernels.select = noted
        try:
            yield
        finally:
            coarse_kernels.select = select
        for near, order, group in first:
            self.chosen = near
            if order is not None:
                order = order.long().repeat_interleave(group, 0)
                at = order.gather(1, near.clamp(min=0).flatten(1)).view_as(near)
                self.chosen = at.masked_fill(near < 0, -1)

    @contextmanager
    def taken(self) -> Iterator[None]:
        """The reference takes them."""
        if self.chosen is None:
            yield
            return
        best, one = coarse._best, coarse._forward
        self._sequence = 0

        def forward(c: Tensor, k: Tensor, *rest: Any) -> Any:
            (b, h), hk = c.shape[:2], k.shape[1]
            assert self.chosen is not None
            lead = self.chosen.shape[0] // h  # batch of the whole call
            table = self.chosen.view(lead, h, *self.chosen.shape[1:])
            mine = table if b == lead else table[self._sequence : self._sequence + 1]
            self._sequence = (self._sequence + 1) % lead if b != lead else 0
            self._table = mine.reshape(b * hk, h // hk, *mine.shape[2:])
            self._m = k.shape[2]
            return one(c, k, *rest)

        coarse._best, coarse._forward = self._given, forward
        try:
            yield
        finally:
            coarse._best, coarse._forward = best, one

    def _given(self, p: Any, keys: Any, few: int) -> tuple[Tensor, Tensor]:
        at = self._table[p.heads][:, :, p.rows][..., :few]
        at = at.reshape(*p.scores.shape[:2], few)
        real = at >= 0
        places = keys.places(self._m)
        if places is not None:
            at = places[p.heads].gather(1, at.clamp(min=0).flatten(1)).view_as(at)
        at = torch.where(real, at, at.where(real, -1).amax(-1, keepdim=True).clamp(min=0))  # hidden with one of them
        best = torch.where(real, p.scores.gather(-1, at), float("-inf"))
        if p.scores.dtype == torch.float64:  # how much better was the best of the others?
            others = p.scores.scatter(-1, at, float("-inf")).amax(-1)
            least = torch.where(real, best, float("inf")).amin(-1)
            size = p.c.norm(dim=-1) * p.k.norm(dim=-1).amax(-1, keepdim=True) * self._scale
            gap = torch.where(others.isfinite(), (others - least) / (4 * self.eps * size.clamp(min=1e-6)), 0.0)
            self.worst = max(self.worst, float(gap.amax()) if gap.numel() else 0.0)
        return best, at

    _table: Tensor
    _m: int
    _scale: float = 1.0


# ---------------------------------------------------------------------------------------------------- one case


def answers(
    x: Case, given: Inputs, dtype: torch.dtype, backend: str, groups: Any, poison: bool = False
) -> list[Tensor | None]:
    """out, lse, dq, dk, dv."""
    leaves = []
    for name, mask in (("q", given.query_mask), ("k", given.key_mask), ("v", given.key_mask)):
        t = getattr(given, name).to(dtype)
        if poison and mask is not None:
            t = t.masked_fill(~mask[:, None, :, None], float("nan"))
        leaves.append(laid(t, x.layout if poison else "plain").detach().requires_grad_())
    out, lse = ca.attention(
        *leaves, method=x.method, causal=x.causal, key_mask=given.key_mask, query_mask=given.query_mask,
        groups=groups, backend=backend, return_lse=True, seed=x.seed,
    )  # fmt: skip
    total = (out * given.d_out.to(dtype)).sum()
    total = total + (torch.where(lse.isfinite(), lse, 0.0) * given.d_lse.to(lse.dtype)).sum()
    with torch.autograd.set_multithreading_enabled(False):  # rounded products belong to this thread
        grads = torch.autograd.grad(total, leaves, allow_unused=True)
    return [out.detach(), lse.detach(), *grads]


def spread(q: Tensor, clusters: ca.Clusters) -> Tensor:
    """Mean squared distance of the queries from the centroids of their members."""
    labels, means = clusters.member_of, clusters.means.float()
    mine = means.gather(2, labels.clamp(min=0).unsqueeze(-1).expand(*labels.shape, means.shape[-1]))
    return ((q.float() - mine).square().sum(-1) * (labels >= 0)).sum()


def faults(x: Case) -> list[str]:
    """What is wrong with the kernels' answer; nothing where it is right."""
    dtype, given = DTYPES[x.dtype], inputs(x)
    call: dict[str, Any] = {"method": x.method, "causal": x.causal, "seed": x.seed}
    call |= {"key_mask": given.key_mask, "query_mask": given.query_mask}
    qkv, found = (given.q, given.k, given.v), []
    if x.given:
        handed = groups = ca.groups(*(t.double() for t in qkv), backend="reference", **call)
    else:
        handed, groups = None, ca.groups(*qkv, backend="triton", **call)
        if isinstance(groups, ca.Clusters) and groups.means.numel():
            usual = ca.groups(*qkv, backend="reference", **call)
            wide, right = float(spread(given.q, groups)), float(spread(given.q, usual))
            if not wide <= LOOSE_CLUSTERS * right + 1e-3 * float(given.q.float().square().sum()):
                found.append(f"clusters are loose: {wide:.4g}, the reference's {right:.4g}")
    near = Near(torch.finfo(dtype).eps)
    near._scale = x.d**-0.5
    with near.seen():
        kernel = answers(x, given, dtype, "triton", handed, poison=True)
    if handed is None:  # a call that was made before is replayed: with other numbers, then with these
        for seed in range(2):
            answers(x, inputs(replace(x, seed=seed)), dtype, "triton", None)
    again = answers(x, given, dtype, "triton", handed, poison=True)
    with near.taken():
        exact = answers(x, given, torch.float64, "reference", groups)
        yardsticks = [answers(x, given, dtype, "reference", groups)]
        with RoundedProducts(dtype) if x.dtype in HALVES else nullcontext():
            yardsticks.append(answers(x, given, dtype, "reference", groups))
    if near.worst > 1:
        found.append(f"near keys: one left out was better by {near.worst:.3g} times what rounding allows")
    assert exact[1] is not None
    level = exact[1][exact[1].isfinite()].abs()
    rounding = torch.finfo(dtype).eps + torch.finfo(torch.float32).eps * (float(level.max()) if level.numel() else 0.0)
    for place, name in enumerate(PARTS):
        ours, right, usual = kernel[place], exact[place], [each[place] for each in yardsticks]
        if right is None or ours is None:
            if (right is None) != (ours is None) and float((right if ours is None else ours).abs().max()):
                found.append(f"{name}: only one of kernel and reference has it")
            continue
        if not torch.equal(ours.nan_to_num(), again[place].nan_to_num()):
            found.append(f"{name}: not the same bits twice")
        found += compared(name, ours, right, [one for one in usual if one is not None], rounding)
    return found


def compared(name: str, ours: Tensor, right: Tensor, usual: Sequence[Tensor], eps: float) -> list[str]:
    finite = right.isfinite()
    if not torch.equal(ours.isfinite(), finite):
        return [f"{name}: {int((ours.isfinite() != finite).sum())} numbers are finite in one alone"]
    times, truth = 2 if name in PARTS[:2] else 3, right[finite]
    if not truth.numel():
        return []
    miss, errors = ours.double()[finite] - truth, [one.double()[finite] - truth for one in usual]
    for what, size, roundings in (("largest", lambda t: float(t.abs().max()), 8), ("l2", lambda t: float(t.norm()), 1)):
        allowed = max(times * max(size(one) for one in errors), roundings * eps * size(truth))
        if not size(miss) <= allowed:
            return [f"{name}: {what} error {size(miss):.3g}, allowed {allowed:.3g}"]
    return []


# ---------------------------------------------------------------------------------------------------- the run


def here(numbers: Sequence[int], seed: int, deadline: float, loud: bool) -> int:
    """Cases in this process, a JSON line before and after each."""
    failed = 0
    for number in numbers:
        if time.time() > deadline:
            break
        x = case(seed, number, DEVICE == "cpu")
        print(json.dumps({"started": number}), flush=True)
        began = time.perf_counter()
        try:
            found = faults(x)
        except Exception as error:
            if loud:
                traceback.print_exc()
            first = str(error).strip().splitlines() or ["no words"]
            found = [f"{type(error).__name__}: {first[0][:300]}"]
        failed += bool(found)
        told = {"done": number, "faults": found, "seconds": round(time.perf_counter() - began, 2), "case": asdict(x)}
        print(json.dumps(told), flush=True)
        if any("CUDA error" in fault for fault in found):
            os._exit(3)  # the device is lost to this process
    return failed


class Shard(threading.Thread):
    """Some cases in a process of their own; one that dies is started again with the rest."""

    def __init__(self, numbers: list[int], given: argparse.Namespace, deadline: float, told: Any) -> None:
        super().__init__(daemon=True)
        self.numbers, self.given, self.deadline, self.told = numbers, given, deadline, told

    def run(self) -> None:
        left = list(self.numbers)
        while left and time.time() < self.deadline:
            words = [sys.executable, __file__, "--seed", str(self.given.seed), "--until", str(self.deadline)]
            words += ["--numbers", *map(str, left)]
            child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            watch = threading.Timer(max(self.deadline + 30 - time.time(), 1), child.kill)  # a compiler that hangs
            watch.start()
            current = None
            assert child.stdout is not None
            for line in child.stdout:
                if not line.startswith("{"):
                    continue
                told = json.loads(line)
                current = told.get("started")
                if "done" in told:
                    left.remove(told["done"])
                    self.told(told)
            child.wait()
            watch.cancel()
            if current is not None and current in left:  # it died over this one
                left.remove(current)
                late = time.time() > self.deadline
                why = "not done in time" if late else f"the process died ({child.returncode})"
                x = asdict(case(self.given.seed, current, DEVICE == "cpu"))
                self.told({"done": current, "faults": [] if late else [why], "late": late, "seconds": 0, "case": x})
            elif child.returncode == 0:
                return


def described(x: dict[str, Any]) -> str:
    flags = [name for name in ("causal", "given", "query_mask") if x[name]]
    sizes = f"b {x['b']}, h {x['h']} over {x['hk']}, n {x['n']}, m {x['m']}, d {x['d']}, e {x['e']}, {x['dtype']}"
    return ", ".join([x["method"], sizes, f"keys {x['key_mask']}", x["layout"], *flags])


def sharded(given: argparse.Namespace) -> int:
    started, deadline = time.perf_counter(), time.time() + given.seconds
    done: list[dict[str, Any]] = []
    lock = threading.Lock()

    def told(one: dict[str, Any]) -> None:
        with lock:
            done.append(one)
            if one["faults"]:
                print(f"FAILED {described(one['case'])}", flush=True)
                print(*(f"         {fault}" for fault in one["faults"]), sep="\n")
                print(f"         python benchmarks/fuzz.py --seed {given.seed} --case {one['done']}", flush=True)
            elif len(done) % 25 == 0:
                print(f"{time.perf_counter() - started:4.0f} s  {len(done)} cases", flush=True)

    kinds: dict[int, list[int]] = {}
    for number in range(given.first, given.first + given.cases):
        kinds.setdefault(number // PER_KIND, []).append(number)
    piles: list[list[int]] = [[] for _ in range(given.jobs)]
    for place, numbers in enumerate(kinds.values()):
        piles[place % given.jobs] += numbers
    shards = [Shard(pile, given, deadline, told) for pile in piles if pile]
    for shard in shards:
        shard.start()
    for shard in shards:
        shard.join()
    right = [one for one in done if not one["faults"] and not one.get("late")]
    failed = [one for one in done if one["faults"]]

    def counted(of: str) -> dict[str, int]:
        return dict(Counter(str(one["case"][of]).split(":")[0] for one in right).most_common())

    row: Row = {
        "theme": "fuzz", "seed": given.seed, "first": given.first, "cases": given.cases, "right": len(right),
        "failed": [{"case": one["done"], "faults": one["faults"], **one["case"]} for one in failed],
        "seconds": round(time.perf_counter() - started, 1), "jobs": given.jobs, "device": DEVICE,
        "interpreted": DEVICE == "cpu", "methods": counted("method"), "dtypes": counted("dtype"), "dims": counted("d"),
        "environment": environment(DEVICE),
    }  # fmt: skip
    path = rows_path(given.out, "fuzz", DEVICE)
    append(path, row)
    print(f"\n{len(right)} right, {len(failed)} failed, {given.cases - len(right) - len(failed)} not done")
    print(f"{row['methods']} {row['dtypes']} head dims {row['dims']}; a row in {path}")
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=360)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--case", type=int, help="this one alone, in this process")
    parser.add_argument("--here", action="store_true", help="in this process (for compute-sanitizer)")
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=540.0, help="start no case after so long")
    parser.add_argument("--out", type=Path, default=ROOT / "results")
    parser.add_argument("--numbers", type=int, nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=float("inf"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.numbers:
        here(given.numbers, given.seed, given.until, loud=False)
        return 0
    if given.case is not None or given.here:
        numbers = range(given.first, given.first + given.cases) if given.case is None else [given.case]
        return 1 if here(numbers, given.seed, time.time() + given.seconds, loud=True) else 0
    return sharded(given)


if __name__ == "__main__":
    sys.exit(main())
