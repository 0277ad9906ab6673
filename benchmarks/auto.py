"""Is ``ca.attention(q, k, v)`` never slower than SDPA? The default method, at every length.

    python benchmarks/auto.py --device cuda [--seconds 300] [--heads 32 --dim 128]
    python benchmarks/auto.py --device cpu [--seconds 300] [--threads 2]

For N = 64, 128, ... 131 072 (a CPU: as far as the time goes), forward and forward + backward, causal and not, both
called eagerly and, on CUDA, replayed as graphs: turns taken in alternation, the fastest of each counts (on a CPU with
--threads 1 by the process's own clock, so that other programs do no harm). The rule: at
most 5 % or 20 microseconds slower than SDPA called the same way; where auto is Refined, the speed says what it gains.
Tensors are those of a model (the embedded long sample, tiled). Rows go to results/; exit status 1 where it is broken.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import clusterattn as ca
from clusterattn.measure import Row, append, environment, rows_path
from clusterattn.measure.sample import tiled
from clusterattn.measure.speed import captured, once_alone

ROOT = Path(__file__).resolve().parent.parent
TOKENS = 32768
SHARE, MORE = 1.05, 20e-6
AGAIN = 3  # a length that breaks the rule is measured again: a moment of noise is no answer


def calls(leaves: list[Tensor], causal: bool, backward: bool) -> dict[str, Callable[[], object]]:
    d_out = torch.ones_like(leaves[0])

    def passed(attend: Callable[..., Tensor]) -> Callable[[], object]:
        def forward() -> object:
            with torch.no_grad():
                return attend(*leaves)

        return (lambda: torch.autograd.grad(attend(*leaves), leaves, d_out)) if backward else forward

    return {
        "auto": passed(lambda q, k, v: ca.attention(q, k, v, causal=causal)),
        "sdpa": passed(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal)),
    }


def fastest(runs: dict[str, Any], device: str, seconds: float) -> dict[str, float]:
    """Seconds of one call of each. Short calls are timed several at a time, as a program makes them."""
    first = max(min(once_alone(run, device) for _ in range(2)) for run in runs.values())
    many = max(1, min(50, int(2e-3 / max(first, 1e-7))))

    def several(run: Callable[[], object]) -> Callable[[], None]:
        def repeated() -> None:
            for _ in range(many):
                run()

        return repeated

    best = dict.fromkeys(runs, float("inf"))
    began, turns = time.perf_counter(), 0
    while turns < 3 or (time.perf_counter() - began < seconds and turns < 200):
        for name, run in runs.items():
            best[name] = min(best[name], once_alone(several(run), device) / many)
        turns += 1
        if time.perf_counter() - began > 4 * seconds:
            break
    return best


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2**i for i in range(6, 18)])
    parser.add_argument("--out", type=Path, default=ROOT / "results")
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    device, started, broken, rows = given.device, time.perf_counter(), [], 0
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    around = environment(device)
    path = rows_path(given.out, "auto", device, around)
    for n, causal, backward in product(given.lengths, (False, True), (False, True)):
        if time.perf_counter() - started > given.seconds:
            print(f"{given.seconds:g} s are over at {n} tokens")
            break
        b = max(TOKENS // n, 1) if device == "cuda" else 1
        sample = tiled(b, given.heads, n, given.dim, device, dtype)
        leaves = [x.requires_grad_(backward) for x in (sample.q, sample.k, sample.v)]
        runs = calls(leaves, causal, backward)
        shape = ca.methods.budgets.Shape(n, n, given.dim, given.dim, causal)
        chosen = ca.method("auto").choose(torch.device(device), dtype, b * given.heads, shape)
        for _ in range(3):  # everything is compiled, known and replayed
            for run in runs.values():
                run()
        for how in ("eager", "graph") if device == "cuda" else ("eager",):
            timed = {name: captured(run) for name, run in runs.items()} if how == "graph" else runs
            for _ in range(AGAIN):
                took = fastest(timed, device, 0.05)
                met = took["auto"] <= max(SHARE * took["sdpa"], took["sdpa"] + MORE)
                if met:
                    break
            row: Row = {
                "theme": "auto", "how": how, "b": b, "h": given.heads, "n": n, "d": given.dim, "causal": causal,
                "pass": "forward+backward" if backward else "forward", "seconds": took["auto"],
                "sdpa_seconds": took["sdpa"], "speedup": took["sdpa"] / took["auto"], "met": met,
                "chosen": chosen.name, "dtype": str(dtype)[6:], "data": sample.source, "environment": around,
            }  # fmt: skip
            append(path, row)
            rows += 1
            line = (
                f"{n:7} {row['pass']:17} {'causal' if causal else '':7} {how:6} {chosen.name:8}"
                f"{took['auto'] * 1e6:11.1f} µs, SDPA {took['sdpa'] * 1e6:11.1f} {row['speedup']:7.2f}x"
            )
            print(line, "" if met else "  BROKEN", flush=True)
            if not met:
                broken.append(line)
            del timed
        del runs, leaves, sample
    print(f"\n{rows} rows in {path}; {len(broken)} break the rule", *broken, sep="\n")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
