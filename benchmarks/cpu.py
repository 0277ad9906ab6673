"""The CPU bars: is clustering faster than exact attention on two cores, and does memory stay linear?

    python benchmarks/cpu.py                 everything, about three minutes
    python benchmarks/cpu.py --only memory   one part of: time, memory, error

Speeds are ratios to F.scaled_dot_product_attention in the same run (fp32, B = 1, 6 heads × 64 as a model made them,
default settings, turns taken in alternation, the fastest turn counts). Memory is the growth of the resident set of a
process of its own: out and, after backward, the gradients are in it. Each figure is printed beside its bar and
appended to results/ as a JSON line; the exit code is 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

import clusterattn as ca
from clusterattn.measure import Row, append, environment, exact_answer, relative_error, rows_path
from clusterattn.measure.bench import PASSES, bench, pass_of
from clusterattn.measure.sample import like_a_model
from clusterattn.measure.speed import resident_growth

HEADS, DIM, THREADS = 6, 64, 2
METHODS = (ca.Clustered(), ca.Improved(), ca.Refined(), ca.Smyrf(rounds=2, q_seats=64, k_seats=64))
SPEED_BARS = {  # (length, pass) -> method name -> at least so many times as fast as exact attention
    (4096, "forward"): {"clustered": 1, "refined": 1},
    (4096, "forward+backward"): {"clustered": 1, "refined": 1},
    (16384, "forward"): {"clustered": 6, "improved": 5, "refined": 8, "smyrf": 12},
    (16384, "forward+backward"): {"clustered": 12, "improved": 8, "refined": 12, "smyrf": 20},
}
MEMORY_LENGTH, MEMORY_BAR = 65536, 3.0  # extra peak, in sizes of q, k, v and out together
ERROR_LENGTH = 4096


def times(repetitions: int, seconds: float) -> Iterator[Row]:
    for n, which in SPEED_BARS:
        bars = SPEED_BARS[n, which]
        measured = bench(
            METHODS,
            lengths=[n],
            passes=[which],
            heads=HEADS,
            dim=DIM,
            repetitions=repetitions,
            seconds=seconds,
            memory=False,
            data=like_a_model,
        )
        for row in measured:
            bar = bars.get(row["method"].split(":")[0])
            yield {
                **row,
                "theme": "cpu-bars",
                "what": "speed",
                "bar": bar,
                "met": None if bar is None else row["speedup"] >= bar,
            }


def memories() -> Iterator[Row]:
    together = 4 * HEADS * MEMORY_LENGTH * DIM * 4  # q, k, v, out in fp32
    for method in METHODS:
        for which in PASSES:
            child = [sys.executable, __file__, "--grow", str(method), which]
            answer = subprocess.run(child, capture_output=True, text=True, check=False)
            if answer.returncode:
                raise SystemExit(f"{method}, {which}: {answer.stderr}")
            share = int(answer.stdout) / together
            yield {
                "theme": "cpu-bars",
                "what": "memory",
                "method": str(method),
                "pass": which,
                "n": MEMORY_LENGTH,
                "memory_bytes": int(answer.stdout),
                "memory_share": share,
                "memory_by": "growth of the resident set of a process of its own",
                "bar": MEMORY_BAR,
                "met": share <= MEMORY_BAR,
                "environment": environment(),
            }


def grow(spec: str, which: str) -> int:
    """In a process of its own: peak bytes that one call adds."""
    backward = which == "forward+backward"
    method = ca.method(spec)
    # threads and libraries are not the method's
    pass_of(like_a_model((1, HEADS, 512, DIM)), method, backward=backward)()
    return resident_growth(pass_of(like_a_model((1, HEADS, MEMORY_LENGTH, DIM)), method, backward=backward))


def errors() -> Iterator[Row]:
    """Output error at the defaults; where they train k-means on a sample, also with every query."""
    sample = like_a_model((1, HEADS, ERROR_LENGTH, DIM))
    truth = exact_answer(sample.q, sample.k, sample.v)

    def error(method: ca.Method) -> float:
        out = ca.attention(sample.q, sample.k, sample.v, method=method)
        return relative_error(out, truth)

    for method in METHODS:
        filled = method.at(ERROR_LENGTH, ERROR_LENGTH, DIM, DIM)
        sampled = getattr(filled, "sample", None) is not None
        yield {
            "theme": "cpu-bars",
            "what": "error",
            "method": str(method),
            "n": ERROR_LENGTH,
            "error": error(method),
            "full_error": error(dataclasses.replace(filled, sample=ERROR_LENGTH)) if sampled else None,
            "bar": None,
            "met": None,
            "data": sample.source,
            "environment": environment(),
        }


def line(row: Row) -> str:
    """One row for people."""
    verdict = {True: "pass", False: "FAIL", None: ""}[row["met"]]
    about = f"N = {row['n']:<6} {row.get('pass', 'forward'):<17} {row['method']:<18}"
    if row["what"] == "speed":
        bar = "" if row["bar"] is None else f"bar {row['bar']:>4}×"
        return f"{about} {row['seconds'] * 1e3:9.1f} ms {row['speedup']:7.2f}×  {bar:<12} {verdict}"
    if row["what"] == "memory":
        size = f"{row['memory_bytes'] / 2**20:9.0f} MiB"
        return f"{about} {size} {row['memory_share']:6.2f}×  bar ≤ {row['bar']:.0f}× {verdict:>6}"
    full = "" if row["full_error"] is None else f"with full k-means {row['full_error']:.4f}"
    return f"{about} error {row['error']:9.4f}   {full}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("time", "memory", "error"))
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=45.0, help="no new turn after so long")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "results")
    parser.add_argument("--grow", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(THREADS)
    if args.grow:
        print(grow(*args.grow))
        return 0

    parts = {"error": errors, "time": lambda: times(args.repetitions, args.seconds), "memory": memories}
    path = rows_path(args.out, "cpu-bars")
    missed = 0
    for name, part in parts.items():
        if args.only in (None, name):
            print(f"\n{name}")
            for row in part():
                append(path, row)
                print(line(row), flush=True)
                missed += row["met"] is False
    print(f"\n{missed} bars missed; rows in {path}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
