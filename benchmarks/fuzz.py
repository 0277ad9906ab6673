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
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from fuzz_cases import DEVICE, PER_KIND, case
from fuzz_judge import faults

from clusterattn.measure import Row, append, environment, rows_path

ROOT = Path(__file__).resolve().parent.parent


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
