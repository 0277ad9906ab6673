"""What a call costs on the host, verb by verb: eager calls against CUDA graphs.

    python benchmarks/host_time.py                       checks, then times; about three minutes, mostly compiling
    python benchmarks/host_time.py --only kmeans nearest  verbs and methods whose name has one of these words
    python benchmarks/host_time.py --no-check --no-verbs whole calls alone
    TRITON_INTERPRET=1 python benchmarks/host_time.py --device cpu --quick       a rehearsal without a GPU

First every kernel's verb is held against the reference, on fp16, bf16 and fp32; a verb that is wrong is not timed.
Then, for each verb and for whole calls at 1 024, 8 192 and 32 768 tokens (6 heads of 64, bf16, 32 768 tokens in all):

    host    microseconds until Python has the call behind it: what a caller's own loop waits for
    eager   microseconds from call to call, device included
    graph   microseconds of a replayed CUDA graph: what the device needs
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import clusterattn as ca
from clusterattn.ops import choose, draw

HEADS, DIM, TOKENS = 6, 64, 32768
LENGTHS = (1024, 8192, 32768)
METHODS = (
    "refined",
    "refined:clusters=100,top=32,steps=2,start=random,sample=4096",
    "refined:clusters=100,top=32,steps=2,start=far,sample=4096",
    "refined:clusters=256,top=32,steps=5,start=random,sample=4096",
    "refined:clusters=256,top=32,steps=5,start=far,sample=4096",
    "clustered",
    "smyrf",
)
Run = Callable[[], Any]


@dataclass(frozen=True)
class Inputs:
    """What the verbs of one call are given."""

    q: Tensor
    k: Tensor
    v: Tensor
    clusters: int
    sample: int

    @property
    def n(self) -> int:
        return self.q.shape[2]


def inputs(b: int, h: int, n: int, d: int, clusters: int, sample: int, dtype: torch.dtype, device: str) -> Inputs:
    """Rows in clouds, as attention's are: with plain noise every label would be a tie."""
    seed = torch.Generator().manual_seed(n)
    clouds = torch.randn(b, h, 3 * clusters, d, generator=seed) * 2
    which = torch.randint(3 * clusters, (b, h, n, 1), generator=seed).expand(b, h, n, d)
    q, k, v = (clouds.gather(2, which) + torch.randn(b, h, n, d, generator=seed) for _ in range(3))
    return Inputs(*(x.to(device, dtype) for x in (q, k, v)), clusters, sample)


def verbs(x: Inputs, backend: str) -> Iterator[tuple[str, Run]]:
    """Each verb on what the verbs before it found, by the reference, so that a mistake does not travel."""
    ops, plain = choose(backend), choose("reference")
    b, h, n, _ = x.q.shape
    pool, few = min(8 * x.clusters, n), min(x.sample, n)
    form = plain.covariance(x.k, None, h)
    start_at = draw.positions(None, x.q, n, 0, draw.STREAM_STARTS, x.clusters)
    pool_at = draw.positions(None, x.q, n, 0, draw.STREAM_STARTS, pool)
    train_at = draw.positions(None, x.q, n, 0, draw.STREAM_SAMPLE, few)
    centres = plain.kmeans(x.q, None, start_at, train_at=train_at, updates=1, form=form)
    labels = plain.nearest(x.q, centres)
    members = ops.members(labels, x.clusters, x.q)
    rows = plain.means(x.q, labels, x.clusters)[0]
    yield "draw", lambda: draw.positions(None, x.q, n, 0, draw.STREAM_SAMPLE, few)
    yield "covariance", lambda: ops.covariance(x.k, None, h, at=train_at)
    yield "farthest", lambda: ops.farthest(x.q, pool_at, x.clusters, form=form)
    for updates in (1, 4):
        yield (
            f"kmeans:{updates}",
            lambda updates=updates: ops.kmeans(x.q, None, start_at, train_at=train_at, updates=updates, form=form),
        )
    yield "kmeans:all", lambda: ops.kmeans(x.q, None, start_at, updates=1)
    yield "nearest", lambda: ops.nearest(x.q, centres)
    yield "members", lambda: ops.members(labels, x.clusters, x.q)
    yield "means", lambda: ops.means(x.q, labels, x.clusters, members=members)
    yield "broadcast", lambda: ops.broadcast(rows, labels, members=members)
    drawn = draw.normals(2, x.q.shape[-1] + 2, 0, draw.STREAM_ROUNDS, x.q)
    yield "scores", lambda: ops.scores(x.q, x.k, drawn, None, None, lifted=True)


# ---- is it right? ---------------------------------------------------------------------------------


def flat(found: Any) -> list[Tensor]:
    """All the tensors of an answer."""
    if isinstance(found, Tensor):
        return [found]
    if isinstance(found, (tuple, list)):
        return [x for each in found for x in flat(each)]
    return [x for each in vars(found).values() if each is not None for x in flat(each)]


def difference(got: Tensor, wanted: Tensor) -> float:
    """The share of whole numbers that differ, or the relative distance of real ones."""
    if not wanted.is_floating_point():
        return float((got != wanted).float().mean())
    finite = wanted.isfinite()
    if not torch.equal(finite, got.isfinite()):
        return float("inf")
    got, wanted = got[finite].double(), wanted[finite].double()
    return float((got - wanted).norm() / wanted.norm().clamp(min=1e-30))


LOOSEST = {torch.float32: 2e-2, torch.float16: 4e-2, torch.bfloat16: 1e-1}  # a point between two centroids moves both


def check(x: Inputs, dtype: torch.dtype, wanted_names: list[str]) -> set[str]:
    """The verbs that are wrong: other answers than the reference, or other ones each time."""
    wrong = set()
    for (name, kernel), (_, plain) in zip(verbs(x, "triton"), verbs(x, "reference"), strict=True):
        if wanted_names and not any(word in name for word in wanted_names):
            continue
        started = time.perf_counter()
        try:
            got, wanted = flat(kernel()), plain()
            again = [flat(kernel()) for _ in range(3)]
            same = all(torch.equal(a, b) for one in again for a, b in zip(got, one, strict=True))
            if wanted is None:  # members, which the reference does without
                worst = 0.0 if everybody_once(got, x.n) else 1.0
            elif name == "farthest":  # other points will do when they lie as far apart
                worst = max(0.0, reach(x, got[0]) / reach(x, wanted) - 1) / 4
            else:
                worst = max(difference(a, b) for a, b in zip(got, flat(wanted), strict=True))
            right = same and worst <= LOOSEST[dtype]
            verdict = "right" if right else "WRONG" + ("" if same else ", and other bits each time")
        except Exception as problem:
            right, worst, verdict = False, float("nan"), f"FAILED: {type(problem).__name__}: {str(problem)[:160]}"
        took = time.perf_counter() - started
        print(f"  {str(dtype)[6:]:9} n={x.n:<6} {name:12} {worst:9.1e}  {took:5.1f} s  {verdict}", flush=True)
        if not right:
            wrong.add(name)
    return wrong


def everybody_once(members: list[Tensor], n: int) -> bool:
    order, first = members
    found = order.long().sort(-1).values == torch.arange(n, device=order.device)
    return bool(found.all() and (first[:, -1] == n).all())


def reach(x: Inputs, at: Tensor) -> float:
    """How far a thousand queries are from the nearest of those at these positions: the mean of the farthest tenth."""
    starts = x.q.float().gather(2, at.clamp(min=0).unsqueeze(-1).expand(*at.shape, x.q.shape[-1]))
    apart = torch.cdist(x.q[:, :, :: max(1, x.n // 1000)].float(), starts).amin(-1)
    return float(apart.sort(-1).values[..., -apart.shape[-1] // 10 :].mean())


# ---- how long? ------------------------------------------------------------------------------------


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def eager(run: Run, device: str, calls: int = 10, batches: int = 7) -> tuple[float, float]:
    """Microseconds on the host, and from call to call: medians over batches of calls."""
    hosts, walls = [], []
    for _ in range(batches):
        wait(device)
        started = time.perf_counter()
        for _ in range(calls):
            run()
        hosts.append(time.perf_counter() - started)
        wait(device)
        walls.append(time.perf_counter() - started)
    return statistics.median(hosts) / calls * 1e6, statistics.median(walls) / calls * 1e6


def replayed(run: Run, device: str) -> float:
    """Microseconds of a replay; nan where there are no graphs."""
    if device != "cuda":
        return float("nan")
    try:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        for _ in range(3):
            graph.replay()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(20):
            graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 20 * 1e3
    except Exception as problem:
        print(f"    no graph: {type(problem).__name__}: {str(problem)[:160]}", flush=True)
        return float("nan")


def timed(name: str, run: Run, device: str, peer: float = float("nan")) -> float:
    """Print a row; the time from call to call."""
    try:
        for _ in range(3 if device == "cuda" else 1):
            run()
        host, wall = eager(run, device) if device == "cuda" else eager(run, device, calls=1, batches=1)
        graph = replayed(run, device) if "+ backward" not in name else float("nan")
        print(f"  {name:78} {host:9.0f} {wall:9.0f} {graph:9.0f} {peer / wall:7.2f}x", flush=True)
        return wall
    except Exception as problem:
        print(f"  {name:78} FAILED: {type(problem).__name__}: {str(problem)[:160]}", flush=True)
        return float("nan")


def calls(x: Inputs, method: str | None) -> Iterator[tuple[str, Run]]:
    """Forward without gradients, and forward + backward."""
    name = method or "SDPA"

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if method is None:
            return F.scaled_dot_product_attention(q, k, v)
        out: Tensor = ca.attention(q, k, v, method=method)
        return out

    def forward() -> Tensor:
        with torch.no_grad():
            return attend(x.q, x.k, x.v)

    leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
    d_out = torch.randn_like(x.v)

    def both() -> Any:
        return torch.autograd.grad(attend(*leaves), leaves, d_out)

    yield name, forward
    yield f"{name} + backward", both


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments.add_argument("--quick", action="store_true", help="tiny shapes: a rehearsal")
    arguments.add_argument("--only", nargs="*", default=[], metavar="WORD", help="verbs and methods with one of these")
    arguments.add_argument("--no-check", action="store_true")
    arguments.add_argument("--no-verbs", action="store_true")
    arguments.add_argument("--no-calls", action="store_true")
    given = arguments.parse_args()
    started, device, wrong = time.perf_counter(), given.device, set()
    narrow = (2, 16) if given.quick else (HEADS, DIM)
    half = torch.float16 if device == "cpu" else torch.bfloat16  # Triton's interpreter knows no bf16
    if not given.no_check:
        print("against the reference (difference, seconds with compiling):")
        shapes = ((1, 90, 7, 64),) if given.quick else ((2, 500, 20, 300), (1, 8192, 100, 4096))
        for dtype in dict.fromkeys((torch.float32, torch.float16, half)):
            for b, n, clusters, sample in shapes:
                x = inputs(b, narrow[0], n, narrow[1], clusters, sample, dtype, device)
                wrong |= check(x, dtype, given.only)
        if device == "cuda":  # several blocks of clusters, wide points: the largest tiles
            wrong |= check(inputs(1, 2, 4096, 128, 512, 2048, half, device), half, ["farthest", "kmeans:1", "nearest"])
    head = f"  {'':78} {'host':>9} {'eager':>9} {'graph':>9} {'to SDPA':>8}"
    for n in (128,) if given.quick else LENGTHS:
        b = 1 if given.quick else TOKENS // n
        x = inputs(b, *narrow[:1], n, narrow[1], 7 if given.quick else 100, 64 if given.quick else 4096, half, device)
        print(f"\nN = {n}, batch {b}, {narrow[0]} x {narrow[1]}, {str(half)[6:]}; microseconds\n{head}")
        if not given.no_verbs:
            for name, run in verbs(x, "triton"):
                if name not in wrong and (not given.only or any(word in name for word in given.only)):
                    timed(name, run, device)
        if not given.no_calls:
            peers = [timed(name, run, device) for name, run in calls(x, None)]
            for method in ("refined:clusters=7,top=8", "smyrf") if given.quick else METHODS:
                if not given.only or any(word in method for word in given.only):
                    for (name, run), peer in zip(calls(x, method), peers, strict=True):
                        timed(name, run, device, peer)
        gc.collect()
    verdict = f"WRONG: {', '.join(sorted(wrong))}" if wrong else "all right"
    print(f"\n{time.perf_counter() - started:.0f} s in all; {verdict}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
