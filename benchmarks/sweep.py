"""No cliffs: does time follow multiply-adds at every setting?

    python benchmarks/sweep.py --device cpu --cases 200                    one thread, forward, fp32
    python benchmarks/sweep.py --device cuda --cases 240 --jobs 12 --seconds 540
    python benchmarks/sweep.py --device cpu --case 17                      one of them again
    python benchmarks/sweep.py --device cpu --only starts views            far-apart starts; (b n h d) views

A case is a random setting of Refined or Improved: clusters 16 ... 2 048, top 0 ... 1 024, parts 1 ... 512, steps 1 ...
10, any start, metric, rank and sample, head dims 16 ... 256 (d and e different), n and m different, dtypes. Its time is
told as a share of SDPA's on the same tensors in the same process, turns taken in alternation (on a CPU one thread, by
the process's own clock: other programs do no harm); beside it stands its share of the multiply-adds. Two rules:

within   on a CPU, for top <= 512, parts <= 128 and lengths >= 4 096: time share <= 2.5 x multiply-add share, and 0.01
         of SDPA's time and 5 ms for what is no multiply-add (reading q, k, v, writing out; Python)
apart    everywhere: no case takes more than 3 times what is usual for its multiply-adds: the median ratio of time
         share to multiply-add share among the 31 cases whose multiply-add shares are nearest

starts   far-apart starts at most 1.3 x the time of random ones, at the same settings
views    (b n h d) views at most 1.1 x the time of contiguous tensors, forward and backward

On CUDA every kind is compiled first, by --jobs processes at once, and times are of CUDA graphs. The cases are written
to results/ and drawn beside them; exit status 1 where a rule is broken.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import clusterattn as ca
from clusterattn.measure import Row, append, cost, environment, rows_path
from clusterattn.measure.speed import captured, once_alone

ROOT = Path(__file__).resolve().parent.parent
WITHIN, WITHIN_MORE, PYTHON, APART, NEIGHBOURS, FAR, VIEWS = 2.5, 0.01, 5e-3, 3.0, 31, 1.3, 1.1
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Case:
    method: str
    n: int
    m: int
    d: int
    e: int
    dtype: str
    heads: int

    @property
    def share(self) -> float:
        return cost.share(ca.method(self.method), cost.Shape(self.n, self.m, self.d, self.e))

    @property
    def must_be_within(self) -> bool:
        method: Any = ca.method(self.method)
        return method.top <= 512 and method.parts <= 128 and min(self.n, self.m) >= 4096

    def __str__(self) -> str:
        return f"{self.method}, n {self.n}, m {self.m}, d {self.d}, e {self.e}, {self.dtype}"


def drawn(seed: int, number: int, device: str) -> Case:
    """The same for the same numbers; settings that take more than 60 % of exact attention are drawn again."""
    draw = random.Random(f"{seed} {number} {device}")
    cuda = device == "cuda"
    while True:
        clusters, top = 2 ** draw.randrange(4, 12), draw.choice((0, 1, 8, 16, 32, 64, 100, 128, 256, 300, 512, 1024))
        parts = draw.choice((1, 1, 2, 8, 16, 32, 64, 100, 128, 256, 512))
        words = [f"clusters={clusters}", f"steps={draw.choice((1, 2, 3, 5, 10))}"]
        words += [f"start={draw.choice(('random', 'far'))}"]
        words += [f"sample={draw.choice((256, 1024, 4096))}"] if draw.random() < 0.7 else []
        if draw.random() < 0.75:
            name = "refined"
            words += [f"top={top}", f"parts={parts}", f"slope={draw.choice(('true', 'false'))}"]
            metric = "keys"
        else:
            name, metric = "improved", draw.choice(("hamming", "euclid", "keys"))
            words += [f"top={max(top, 1)}", f"metric={metric}", f"mass={draw.choice(('cluster', 'softmax'))}"]
        d = draw.choice((16, 32, 64, 64, 64, 80, 96, 128, 256))
        e = d if draw.random() < 0.7 else draw.choice((16, 32, 64, 128))
        words += [f"rank={draw.choice((8, 16))}"] if metric == "keys" and d > 16 and draw.random() < 0.4 else []
        n, m = (draw.choice((8192, 16384, 32768) if cuda else (4096, 4096, 6000, 8192)) for _ in range(2))
        m = n if draw.random() < 0.6 else m
        dtype = draw.choice(("bf16", "bf16", "fp16", "fp32")) if cuda else "fp32"
        if cuda and dtype == "fp32":
            d, e = min(d, 128), min(e, 128)  # minutes of compiling
        if cuda and name == "refined" and e > 224:  # keys beside their values: wider than kernels hold
            e = 128
        found = Case(f"{name}:{','.join(words)}", n, m, d, e, dtype, 8 if cuda else 2)
        if found.share <= 0.6:
            return found


def tensors(x: Case, device: str, bshd: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator(device).manual_seed(1)
    lumps = torch.randn(200, x.d, generator=draw, device=device)

    def lumpy(length: int) -> Tensor:
        which = torch.randint(200, (1, x.heads, length), generator=draw, device=device)
        return lumps[which] + 0.5 * torch.randn(1, x.heads, length, x.d, generator=draw, device=device)

    v = torch.randn(1, x.heads, x.m, x.e, generator=draw, device=device)
    q, k, v = (t.to(DTYPES[x.dtype]) for t in (lumpy(x.n), lumpy(x.m), v))
    if bshd:
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    return q, k, v


def fastest(runs: Mapping[str, Callable[[], object]], repetitions: int, device: str) -> dict[str, float]:
    """Seconds of the fastest turn of each, turns taken in alternation."""
    for run in runs.values():
        run()
    turns = [{name: once_alone(run, device) for name, run in runs.items()} for _ in range(repetitions)]
    return {name: min(turn[name] for turn in turns) for name in runs}


def measured(x: Case, device: str, repetitions: int) -> Row:
    """Seconds of the method and of SDPA."""
    q, k, v = tensors(x, device)

    def ours() -> object:
        with torch.no_grad():
            return ca.attention(q, k, v, method=x.method)

    def exact() -> object:
        with torch.no_grad():
            return F.scaled_dot_product_attention(q, k, v)

    runs: dict[str, Any] = {"ours": ours, "exact": exact}
    if device == "cuda":
        for run in runs.values():
            run()
        runs = {name: captured(run) for name, run in runs.items()}
    best = fastest(runs, repetitions, device)
    mine, theirs = best["ours"], best["exact"]
    return {**asdict(x), "seconds": mine, "sdpa_seconds": theirs, "time_share": mine / theirs, "cost_share": x.share}


def judged(rows: Sequence[Row], device: str) -> list[str]:
    """What breaks a rule; writes ``usual`` into the rows."""
    faults = []
    order = sorted(rows, key=lambda row: row["cost_share"])
    for place, row in enumerate(order):
        low = min(max(place - NEIGHBOURS // 2, 0), max(len(order) - NEIGHBOURS, 0))
        near = order[low : low + NEIGHBOURS]
        usual = statistics.median(one["time_share"] / one["cost_share"] for one in near)
        row["usual"] = usual
        x = Case(**{name: row[name] for name in Case.__dataclass_fields__})
        told = f"{row['time_share']:.4f} of SDPA's time at {row['cost_share']:.4f} of its multiply-adds"
        again = f"--case {row['case']}"
        most = WITHIN * row["cost_share"] + WITHIN_MORE + PYTHON / row["sdpa_seconds"]
        if device == "cpu" and x.must_be_within and row["time_share"] > most:
            faults.append(f"within  {row['time_share'] / most:5.2f}  {told}: {x}  {again}")
        if len(order) >= NEIGHBOURS and row["time_share"] > APART * usual * row["cost_share"]:
            faults.append(f"apart   {row['time_share'] / row['cost_share'] / usual:5.2f}  {told}: {x}  {again}")
    return faults


def starts(device: str, repetitions: int) -> list[str]:
    """Far-apart starts beside random ones."""
    faults = []
    n, heads = (8192, 8) if device == "cuda" else (4096, 2)
    dtype = "bf16" if device == "cuda" else "fp32"
    for clusters, parts, sample in ((64, 64, 1024), (100, 1, 256), (256, 64, 2048), (512, 128, 4096)):
        runs: dict[str, Any] = {}
        for start in ("random", "far"):
            spec = f"refined:clusters={clusters},top=32,parts={parts},slope=true,steps=3,sample={sample},start={start}"
            q, k, v = tensors(Case(spec, n, n, 64, 64, dtype, heads), device)

            def run(spec: str = spec, q: Tensor = q, k: Tensor = k, v: Tensor = v) -> object:
                with torch.no_grad():
                    return ca.attention(q, k, v, method=spec)

            run()
            runs[start] = captured(run) if device == "cuda" else run
        times = fastest(runs, repetitions, device)
        ratio = times["far"] / times["random"]
        line = f"clusters {clusters}, parts {parts}, sample {sample}: far-apart starts {ratio:.2f} x random ones"
        print(line, flush=True)
        if ratio > FAR:
            faults.append(f"starts  {line}")
    return faults


def passes(leaves: Sequence[Tensor], method: str, backward: bool) -> Callable[[], object]:
    d_out = torch.ones_like(leaves[0])

    def run() -> object:
        with torch.set_grad_enabled(backward):
            out = ca.attention(*leaves, method=method)
        return torch.autograd.grad(out, leaves, d_out, allow_unused=True) if backward else out

    return run


def views(device: str, repetitions: int) -> list[str]:
    """(b n h d) behind it, as most models hold their tensors."""
    faults = []
    n, heads = (8192, 8) if device == "cuda" else (4096, 4)
    dtype = "bf16" if device == "cuda" else "fp32"
    for spec in ("refined", "refined:clusters=100,top=32,parts=1,slope=false,steps=2", "clustered", "smyrf", "exact"):
        x = Case(spec, n, n, 64, 64, dtype, heads)
        for backward in (False, True):
            runs: dict[str, Any] = {}
            for name, bshd in (("contiguous", False), ("views", True)):
                run = passes([t.requires_grad_(backward) for t in tensors(x, device, bshd)], spec, backward)
                run()
                runs[name] = captured(run) if device == "cuda" else run
            times = fastest(runs, repetitions, device)
            ratio = times["views"] / times["contiguous"]
            line = f"{spec}, {'forward + backward' if backward else 'forward'}: views {ratio:.2f} x contiguous"
            print(line, flush=True)
            if ratio > VIEWS:
                faults.append(f"views   {line}")
    return faults


def picture(rows: Sequence[Row], path: Path, device: str) -> None:
    from clusterattn.measure.plots import as_png, canvas, rules

    with rules():
        figure = canvas(6.0, 5.0)
        axes = figure.subplots()
        kinds = sorted({row["dtype"] for row in rows})
        for kind in kinds:
            some = [row for row in rows if row["dtype"] == kind]
            shares, times = ([row[name] for row in some] for name in ("cost_share", "time_share"))
            axes.scatter(shares, times, s=14, label=kind, alpha=0.7)
        ends = [min(row["cost_share"] for row in rows), max(row["cost_share"] for row in rows)]
        axes.plot(ends, ends, color="#999999", linewidth=1)
        axes.plot(ends, [WITHIN * x for x in ends], color="#999999", linewidth=1, linestyle="--")
        axes.set(xscale="log", yscale="log", xlabel="share of exact attention's multiply-adds")
        axes.set_ylabel("share of SDPA's time")
        axes.set_title(f"{len(rows)} random settings, {device}; lines: equal, and {WITHIN:g} times")
        axes.legend()
        path.write_bytes(as_png(figure))


def warm(given: argparse.Namespace, numbers: Sequence[int], deadline: float) -> None:
    """Compile in several processes; what they made is in Triton's cache."""
    children = []
    for job in range(given.jobs):
        mine = [str(number) for number in numbers[job :: given.jobs]]
        words = [sys.executable, __file__, "--device", given.device, "--seed", str(given.seed), "--warm", *mine]
        if mine:
            children.append(subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
    for child in children:
        try:
            child.wait(max(deadline - time.perf_counter(), 1))
        except subprocess.TimeoutExpired:
            child.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--case", type=int, nargs="+", help="these alone")
    parser.add_argument("--only", nargs="+", choices=("cases", "starts", "views"), default=["cases", "starts", "views"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=540.0, help="start no case after so long")
    parser.add_argument("--jobs", type=int, default=12, help="processes that compile (CUDA)")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "results")
    parser.add_argument("--warm", type=int, nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.warm:
        for number in given.warm:
            x = drawn(given.seed, number, given.device)
            with torch.no_grad():
                ca.attention(*tensors(x, given.device), method=x.method)
        return 0
    started, faults, rows = time.perf_counter(), [], []
    if "starts" in given.only and given.case is None:
        faults += starts(given.device, given.repetitions)
    if "views" in given.only and given.case is None:
        faults += views(given.device, given.repetitions)
    numbers = (given.case or range(given.cases)) if "cases" in given.only else []
    if given.device == "cuda" and given.case is None and numbers:
        warm(given, list(numbers), started + 0.6 * given.seconds)
        print(f"{time.perf_counter() - started:4.0f} s  compiled", flush=True)
    for number in numbers:
        if time.perf_counter() - started > given.seconds:
            print(f"{len(rows)} of {len(numbers)} cases in {given.seconds:g} s")
            break
        x = drawn(given.seed, number, given.device)
        row: Row = {"theme": "sweep", "case": number, **measured(x, given.device, given.repetitions)}
        rows.append(row)
        share = row["time_share"] / row["cost_share"]
        print(f"{number:4} {row['time_share']:8.4f} {row['cost_share']:8.4f} {share:6.2f}  {x}", flush=True)
    if rows:
        faults += judged(rows, given.device)
        if given.case is None:
            around = environment(given.device)
            path = rows_path(given.out, "sweep", given.device, around)
            append(path, *({**row, "environment": around} for row in rows))
            picture(rows, path.with_suffix(".png"), given.device)
            print(f"rows in {path}")
    print(*sorted(faults), f"{len(rows)} cases, {len(faults)} faults", sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
