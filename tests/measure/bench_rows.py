"""Rows as a GPU would have said them, for tests of tables, pictures and verdicts."""

from __future__ import annotations

from typing import Any

from clusterattn._rows import Row
from clusterattn.measure.bench import PASSES


def a_row(method: str, n: int, which: str, seconds: float, **more: Any) -> Row:
    """What a GPU would have said."""
    b = max(32768 // n, 1)
    row = {
        "theme": "gpu-bars",
        "method": method,
        "b": b,
        "h": 6,
        "n": n,
        "d": 64,
        "dtype": "bfloat16",
        "device": "cuda",
        "causal": False,
        "pass": which,
        "seconds": seconds,
        "seconds_per_token": seconds / (b * n),
        "eager_seconds": seconds + 5e-5,
        "timed_as": "cuda graph",
        "why_eager": None,
        "peer": "sdpa cudnn",
        "floor_seconds": 24e-6 * b * n / 32768,
        "floor_ratio": seconds / 24e-6 * 32768 / (b * n),
        "error": 0.0123,
        "memory_bytes": 1,
        "memory_of_size": 1.25,
        "data": "a mixture",
        "environment": {"hardware": "a GPU", "threads": 8, "torch": "2.11", "commit": "abc", "date": "2026-01-01"},
    }
    return {**row, **more}


def without(row: Row, *names: str) -> Row:
    return {key: value for key, value in row.items() if key not in names}


def a_run() -> list[Row]:
    """Two methods against exact attention at four lengths: one passes it near 1 450 tokens, the other is wrong once."""
    rows = []
    for which, slower in zip(PASSES, (1, 3.5), strict=True):
        for n, exact in ((1024, 124e-6), (2048, 228e-6), (8192, 855e-6), (32768, 3440e-6)):
            ours = 180e-6 * slower
            rows.append(a_row("sdpa", n, which, exact * slower, speedup=1.0))
            rows.append(a_row("clustered:steps=2", n, which, ours, speedup=exact * slower / ours, met=n != 1024))
            rows[-1]["eager_speedup"] = 1.1 * rows[-1]["speedup"]
            rows.append(a_row("refined", n, which, 2 * ours, speedup=exact * slower / ours / 2))
    wrong = without(rows[-1], "seconds", "eager_seconds", "speedup", "floor_ratio", "error", "memory_of_size")
    rows[-1] = {**wrong, "failed": "wrong: dq is off by 0.3 where the reference allows 0.1"}
    return rows
