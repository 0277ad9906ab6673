"""TabPFN's real architecture (v3, random weights) end to end: how much faster is it with attention by clustering?

    python benchmarks/tabpfn_rows.py                    10 000 and 500 training rows, a row each into results/
    python benchmarks/tabpfn_rows.py --rows 30000 --repetitions 1 --threads 16

Both bars on a CPU: with the default of `ca.hosts.tabpfn.register()` at least twice as fast at 10 000 rows, and never
slower at 500 (within 5 %: what a clock can tell). A tenth as many test rows come with the training rows. The forward
passes with TabPFN's own attention and with ours take turns; the median of the ratios of neighbours counts, so that a
slow moment falls on both. Random weights tell time, never quality: for that see tabpfn_v1.py.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from tabpfn.architectures.tabpfn_v3 import TabPFNV3, TabPFNV3Config

import clusterattn as ca
from clusterattn._rows import Row, append, environment, rows_path
from clusterattn.measure.speed import once

RESULTS = Path(__file__).resolve().parent.parent / "results"
BARS = {10_000: 2.0, 500: 0.95}
TEST_SHARE, FEATURES, CLASSES = 0.1, 10, 10


def architecture() -> torch.nn.Module:
    torch.manual_seed(0)
    config = TabPFNV3Config(max_num_classes=CLASSES, num_buckets=100)
    made: torch.nn.Module = TabPFNV3(config=config, task_type="multiclass", n_out=CLASSES).eval()
    return made


def forward(model: torch.nn.Module, rows: int, device: str) -> Callable[[], object]:
    draw = torch.Generator().manual_seed(1)
    many = rows + round(rows * TEST_SHARE)
    x = torch.randn(many, 1, FEATURES, generator=draw).to(device)
    y = torch.randint(CLASSES, (rows, 1), generator=draw).float().to(device)

    def run() -> object:
        with torch.no_grad():
            return model(x, y, only_return_standard_out=True)

    return run


def measure(model: torch.nn.Module, rows: int, method: str, repetitions: int, device: str) -> Row:
    run = forward(model, rows, device)
    ratios, taken = [], {"exact": [], "ours": []}
    calls: dict[str, int] = {}
    once(forward(model, 200, device), device)  # what is loaded and compiled when it is first used
    for turn in range(repetitions):
        for which in ("exact", "ours") if turn % 2 == 0 else ("ours", "exact"):
            ca.hosts.tabpfn.unregister()
            served = ca.hosts.tabpfn.register(method) if which == "ours" else None
            taken[which].append(once(run, device))
            if served is not None:
                calls = {row.reason or row.method: row.calls for row in served.rows}
        ratios.append(taken["exact"][-1] / taken["ours"][-1])
    ca.hosts.tabpfn.unregister()
    speedup, bar = statistics.median(ratios), BARS.get(rows) if method == "auto" and device == "cpu" else None
    return {
        "theme": "tabpfn-rows", "method": method, "rows": rows, "test_rows": round(rows * TEST_SHARE), "device": device,
        "seconds": statistics.median(taken["ours"]), "peer_seconds": statistics.median(taken["exact"]),
        "speedup": speedup, "ratios": ratios, "repetitions": repetitions, "calls": calls, "bar": bar,
        "met": None if bar is None else speedup >= bar, "weights": "random", "environment": environment(device),
    }  # fmt: skip


def main() -> int:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--rows", type=int, nargs="+", default=list(BARS), help="training rows")
    parse.add_argument("--method", default="auto")
    parse.add_argument("--repetitions", type=int, help="turns of both (default: 3; of tables below 2 000 rows 15)")
    parse.add_argument("--threads", type=int, help="of the CPU (default: torch's)")
    parse.add_argument("--device", default="cpu")
    parse.add_argument("--out", type=Path, default=RESULTS)
    given = parse.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    model, missed = architecture().to(given.device), 0
    for rows in given.rows:
        turns = given.repetitions or (3 if rows >= 2000 else 15)
        row = measure(model, rows, given.method, turns, given.device)
        append(rows_path(given.out, row["theme"], given.device), row)
        missed += row["met"] is False
        bar = "" if row["bar"] is None else f" (bar {row['bar']:g}: {'met' if row['met'] else 'MISSED'})"
        times = f"{row['seconds']:.3g} s, TabPFN's own {row['peer_seconds']:.3g} s"
        print(
            f"{rows} rows, {given.method}: {row['speedup']:.2f} times as fast{bar}; {times}; {row['calls']}", flush=True
        )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
