"""Compile kernels for a GPU that is not there, as whole calls would ask for them.

    python tests/ops/compile_kernels.py                                a few kinds of calls (test_kernels_compile.py)
    python tests/ops/compile_kernels.py --scan [--dims 16 40 256] [--dtypes fp16 fp32] [--only smyrf]     all of them:
                                                                       long, so --shard 3 16 takes a sixteenth
    python tests/ops/compile_kernels.py --scan --dims 64 --spills 64   and says which spill so many bytes a thread

Calls run on a CPU, forward and backward, with every launch collected instead of made (their answers are zeros, which
are good positions and labels); each kind of launch is then compiled by Triton for sm_90. Must not interpret. Exit
status 1 where a kernel does not compile, wants more shared memory than a program may have, or does not wait its turn.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime import driver
from triton.runtime.jit import JITFunction, create_function_from_signature

import clusterattn as ca
from clusterattn.ops import _jit, _launch
from clusterattn.ops.kmeans import kernels as kmeans
from clusterattn.ops.kmeans import train_kernels

SHARED = 232448  # bytes a program may have on sm_90
TARGET = GPUTarget("cuda", 90, 32)
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
DIMS = (16, 32, 40, 64, 80, 96, 128, 256)

# (method, causal): every kernel there is; lengths are short, tiles follow the settings
CALLS = [
    ("refined:clusters=100,top=32,parts=1,slope=false,steps=2", False),
    ("refined:clusters=64,top=64,parts=16,slope=true,steps=2,start=far", False),
    ("refined:clusters=128,top=512,parts=64,slope=true,steps=2,sample=256,rank=16,start=random", False),
    ("refined:clusters=16,top=8,parts=1,slope=false,steps=2,block=64", True),
    ("improved:clusters=100,top=32,steps=2", False),
    ("improved:clusters=20,top=16,steps=2,mass=softmax,block=64", True),
    ("clustered:clusters=100,steps=2", False),
    ("clustered:clusters=16,steps=2,metric=keys,block=64", True),
    ("smyrf:rounds=2,q_seats=64,k_seats=64", False),
    ("smyrf:rounds=2,q_seats=16,k_seats=128,dedup=true", True),
    ("reformer:rounds=2,chunk=64", False),
    ("reformer:rounds=1,chunk=16", True),
    ("routing:clusters=4,window=64", False),
    ("clusterformer:clusters=4", False),
    ("local:window=40", True),
    ("smyrf:rounds=1,q_seats=8,k_seats=8,transform=crosspolytope", False),  # many directions
    ("routing:clusters=8,window=64", False),  # queries of a bucket are one tile, its keys two
]
FEW = [
    ("bf16", 64, 64, CALLS[1:2]), ("fp16", 40, 32, CALLS[11:12]), ("bf16", 160, 160, CALLS[1:2]),
    ("fp32", 256, 256, CALLS[-2:]),
]  # fmt: skip
SHORT = 7  # tokens: tiles are no smaller than 16


class Collected:
    """Launches by what they would be compiled as: kernel, types, constants, options."""

    def __init__(self) -> None:
        self.backend = make_backend(TARGET)
        self.found: dict[tuple[str, str], tuple[Any, ...]] = {}
        self._binders: dict[str, Any] = {}

    def run(self, kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **flags: Any) -> None:
        name = f"{kernel.__module__}.{kernel.__name__}"
        if name not in self._binders:
            self._binders[name] = create_function_from_signature(kernel.signature, kernel.params, self.backend)
        bound, kinds, _ = self._binders[name](*args, **flags)
        packed = kernel._pack_args(self.backend, flags, bound, kinds, None)
        self.found.setdefault((name, f"{kinds} {packed[0]}"), (kernel, packed))


class Device:
    """The GPU that is not there, as far as kernels ask what they are compiled for."""

    def get_current_target(self) -> GPUTarget:
        return TARGET


def collecting() -> Collected:
    """From here on kernels are collected, CPU tensors are served by them, and new memory is zero."""
    collected = Collected()
    driver.set_active(Device())
    JITFunction.run = lambda kernel, *args, **flags: collected.run(kernel, *args, **flags)
    _jit.INTERPRETING = _launch.INTERPRETING = True  # "a CPU will do"; nothing is interpreted
    train_kernels.multiprocessors = lambda device: 132
    torch.empty, torch.empty_like, torch.Tensor.new_empty = torch.zeros, torch.zeros_like, torch.Tensor.new_zeros
    return collected


def call(spec: str, causal: bool, dtype: torch.dtype, d: int, e: int, n: int = 260) -> None:
    """One call, forward and backward: two heads over one, some keys masked."""
    method = ca.method(spec)
    h, hk, m = (2, 1, n if method.self_only else n + 64)
    leaves = [
        torch.zeros(1, heads, length, width, dtype=dtype, requires_grad=True)
        for heads, length, width in ((h, n, d), (hk, m, d), (hk, m, e))
    ]
    keep = torch.arange(m).expand(1, m) < m - 5
    out, lse = ca.attention(*leaves, method=method, causal=causal, key_mask=keep, backend="triton", return_lse=True)
    torch.autograd.grad((out.sum() + lse.sum()), leaves, allow_unused=True)


def compiled(kernel: JITFunction, packed: tuple[Any, ...]) -> Any:
    options, signature, constants, hints = packed
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=hints)
    return triton.compile(source, target=TARGET, options=options.__dict__)


def spilled(ptx: str) -> int:
    """Bytes that a thread keeps in memory because registers ran out."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        words = [triton.knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", file.name, "-o", os.devnull]
        said = subprocess.run(words, capture_output=True, text=True, check=True).stderr
    found = re.search(r"(\d+) bytes spill stores", said)
    return int(found[1]) if found else 0


def spent() -> float:
    """Seconds of processor time, of this process and of those it started (ptxas): other programs do not count."""
    return sum(os.times()[:4])


def plan(given: argparse.Namespace) -> Iterator[tuple[str, bool, str, int, int]]:
    if not given.scan:
        for dtype, d, e, calls in FEW:
            yield from ((spec, causal, dtype, d, e) for spec, causal in calls)
        return
    for d in given.dims:
        for dtype in given.dtypes:
            for e in (d, 32 if d > 32 else 48):
                yield from ((spec, causal, dtype, d, e) for spec, causal in CALLS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scan", action="store_true")
    parser.add_argument("--dims", type=int, nargs="+", default=DIMS)
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="calls or kernels with one of these")
    parser.add_argument(
        "--shard", type=int, nargs=2, default=(0, 1), metavar=("I", "OF"), help="every OF-th call alone"
    )
    parser.add_argument("--slow", type=float, default=20.0, help="say which kernels take longer to compile, in seconds")
    parser.add_argument("--spills", type=int, default=0, metavar="BYTES", help="say which kernels spill so much")
    given = parser.parse_args()
    collected, wrong, slowest = collecting(), 0, 0.0
    done: set[tuple[str, str]] = set()
    mine, of = given.shard
    for place, (spec, causal, dtype, d, e) in enumerate(plan(given)):
        if place % of != mine:
            continue
        if given.only and not any(word in spec for word in given.only):
            continue
        try:
            for together in (1 << 16, 0):  # k-means in one launch, and by stages
                kmeans.TOGETHER = together
                call(spec, causal, DTYPES[dtype], d, e)
            if given.scan:
                call(spec, causal, DTYPES[dtype], d, e, n=SHORT)
        except ValueError as error:  # a call that kernels do not serve says so
            print(f"no kernel: {spec}, {dtype}, d={d}, e={e}: {error}", flush=True)
        for key, (kernel, packed) in list(collected.found.items()):
            if key in done:
                continue
            done.add(key)
            where = f"{kernel.__name__}: {spec}{' causal' if causal else ''}, {dtype}, d={d}, e={e}"
            started, complaint = spent(), ""
            try:
                made = compiled(kernel, packed)
                if made.metadata.shared > SHARED:
                    complaint = f"wants {made.metadata.shared} bytes of shared memory"
                elif "griddepcontrol.wait" not in made.asm["ptx"]:
                    complaint = "does not begin with in_turn(): it would not wait for the kernel before"
                if given.spills and (more := spilled(made.asm["ptx"])) >= given.spills:
                    print(f"spills {more} bytes, {made.metadata.num_warps} warps: {where}", flush=True)
            except Exception as error:
                complaint = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
            taken = spent() - started
            slowest = max(slowest, taken)
            wrong += bool(complaint)
            if complaint or taken > given.slow:
                print(f"{'WRONG' if complaint else 'slow '} {taken:6.1f} s  {where}  {complaint}", flush=True)
    print(f"{wrong} wrong; the slowest took {slowest:.1f} s; kinds of kernels:", len(done))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
