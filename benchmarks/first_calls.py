"""How long is the first call of a kind, forward and backward, when nothing is compiled?

    python benchmarks/first_calls.py --commit ID                     the kinds below, 6 x 64, bf16, 8 192 tokens
    python benchmarks/first_calls.py --methods smyrf --dtypes fp16 fp32
    python benchmarks/first_calls.py --one-by-one                    every kernel compiled when it is launched

In an empty cache folder, one kind after the other in one process: seconds of the first call with its backward, of the
second (which is written down, to be replayed), of the third, and of a first call with another length. What Triton
needs itself, once for a process, comes before. Rows go to results/; exit status 1 where a first call takes more than
four seconds, or another length more than half a second.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="clusterattn-")  # before Triton looks for it

import torch

import clusterattn as ca
from clusterattn.measure import Row, append, environment, rows_path
from clusterattn.ops import _ahead, choose

ROOT = Path(__file__).resolve().parent.parent
METHODS = ("refined", "clustered", "improved", "smyrf", "reformer:chunk=64")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MOST, MOST_OF_A_LENGTH = 4.0, 0.5  # seconds


def seconds(method: str, n: int, dtype: torch.dtype, given: argparse.Namespace) -> float:
    """Of one call with its backward."""
    draw = torch.Generator("cuda").manual_seed(n)
    shape = 1, given.heads, n, given.dim
    q, k, v = (torch.randn(shape, generator=draw, device="cuda").to(dtype).requires_grad_() for _ in range(3))
    torch.cuda.synchronize()
    began = time.perf_counter()
    out = ca.attention(q, k, v, method=method)
    torch.autograd.grad(out, (q, k, v), torch.ones_like(out), allow_unused=True)
    torch.cuda.synchronize()
    return time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bf16"])
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--one-by-one", action="store_true")
    parser.add_argument("--commit", help="where git is not there to ask")
    parser.add_argument("--out", type=Path, default=ROOT / "results")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("wanted a CUDA device; got none that this torch can see; a CPU compiles nothing")
    if given.one_by_one:
        _ahead._can = lambda *tensors: False
    around = environment("cuda")
    around["commit"] = given.commit or around["commit"]
    x = torch.ones(1, 1, 64, 64, device="cuda", requires_grad=True)
    torch.autograd.grad((x @ x).sum(), x)  # torch's own libraries
    choose("triton").members(torch.zeros(1, 1, 64, dtype=torch.int64, device="cuda"), 4, x)  # Triton's
    slow, path = False, rows_path(given.out, "first-calls", "cuda", around)
    for dtype in given.dtypes:
        for method in given.methods:
            first, second, third = (seconds(method, given.length, DTYPES[dtype], given) for _ in range(3))
            other = seconds(method, given.length + 808, DTYPES[dtype], given)
            row: Row = {"theme": "first-calls", "method": method, "dtype": dtype, "n": given.length, "h": given.heads}
            row |= {"d": given.dim, "one_by_one": given.one_by_one, "first_seconds": first, "second_seconds": second}
            row |= {"third_seconds": third, "other_length_seconds": other, "environment": around}
            append(path, row)
            told = f"first {first:6.2f} s  second {second:6.3f} s  third {third:7.4f} s  another length {other:6.3f} s"
            print(f"{method:24} {dtype}  {told}", flush=True)
            slow = slow or first > MOST or other > MOST_OF_A_LENGTH
    return int(slow and not given.one_by_one)


if __name__ == "__main__":
    sys.exit(main())
