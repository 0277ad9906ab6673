"""What all kernels share: how dtypes multiply, how tensors are passed, and whether Triton is there at all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = [
    "HAVE_TRITON", "HEAD_DIMS", "INTERPRETING", "THIN", "in_turn", "jit", "narrow", "power", "precision", "registers",
    "rows", "tl", "triton", "why_no_kernels", "widths",
]  # fmt: skip

try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
    from triton.language.target_info import cuda_capability_geq

    HAVE_TRITON = True
except ImportError:  # CPU-only installations of torch come without it
    triton, tl, HAVE_TRITON = None, None, False

# TRITON_INTERPRET=1: kernels run on a CPU, for tests
INTERPRETING = HAVE_TRITON and bool(triton.knobs.runtime.interpret)
HEAD_DIMS = 256  # the largest key or value dimension a kernel holds in one tile


# Lengths, seeds, what is counted, and strides of masks and lists: a kernel compiled for one value of them serves all.
# Not among them are strides of queries, keys and values, and the widths of lists that are read many at a time (rows,
# top, few, per, r, width): where 16 divides them, a thread reads or writes up to eight numbers at once.
LOOSE = (
    "n", "m", "total", "length", "taken", "low", "high", "stretch", "stretches", "row_stretch", "turns", "grown",
    "words", "tiles", "splits", "of_keys", "programs", "share", "g", "c", "near_rows", "parts", "begin", "end", "picks",
    "p", "heads", "q_width", "k_width", "directions", "many", "step", "steps", "buckets", "copies", "each",
    "seb", "seh", "sab", "sah", "spb",
)  # fmt: skip


def jit(function: Any) -> Any:
    """triton.jit; _launch.py runs what it makes."""
    if not HAVE_TRITON:
        return function
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return triton.jit(function, do_not_specialize=[name for name in LOOSE if name in names])


if INTERPRETING:

    @jit
    def in_turn() -> None:
        """One kernel after the other is how they are interpreted."""

else:

    @jit
    def in_turn() -> None:
        """The first statement of every kernel: wait until the kernel before has ended and its writes are seen, then let
        the one behind get ready. So a kernel is on the chip, with its registers and shared memory, before its turn
        comes: those of a call are short, and many (see ``_planned`` in _launch.py, which asks for it)."""
        if cuda_capability_geq(9, 0):
            gdc_wait()
            gdc_launch_dependents()


def why_no_kernels(x: Tensor) -> str | None:
    """Why no kernel at all can run on this tensor; None when they can."""
    if not HAVE_TRITON:
        return "Triton is not installed"
    if x.device.type != "cuda" and not (x.device.type == "cpu" and INTERPRETING):
        return f"kernels run on CUDA devices, the tensors are on {x.device.type}"
    if x.dtype == torch.float64:
        return "kernels compute in fp32 with fp16, bf16 or fp32 inputs, the tensors are fp64"
    if x.shape[-1] > HEAD_DIMS:
        added = "an affinity of ClusterFormer adds one for every cluster"
        return f"kernels hold head dimensions up to {HEAD_DIMS}, this one is {x.shape[-1]} ({added})"
    return None


# The narrowest tile that a product sums over. With 16 rows Triton 3.6 lets some kernels read past their shared memory
# (head dims of keys and values that differ, on sm_90; found by compute-sanitizer); in the interpreter narrow ones are
# quicker.
THIN = 16 if INTERPRETING else 32


def power(x: int, least: int = 16) -> int:
    """The next power of two: the width of a tile that holds x."""
    return max(least, 1 << (max(int(x), 1) - 1).bit_length())


def widths(k: Tensor, v: Tensor) -> tuple[int, int]:
    """Of tiles that hold keys and values. Where they differ, Triton 3.6 reads matrices of both (the slope: 128 by 32)
    from wrong places in shared memory when they are used as they are and transposed, unless their rows have 128 bytes
    (on sm_90; found by compute-sanitizer)."""
    d, e = power(k.shape[-1]), power(v.shape[-1])
    least = 16 if d == e or INTERPRETING else 128 // k.element_size()
    return max(d, least), max(e, least)


def narrow(k: Tensor, v: Tensor) -> bool:
    """A tile of keys and one of values leave room for more: half precision, heads of up to 64."""
    return max(k.shape[-1], v.shape[-1]) <= 64 and k.element_size() == 2


def registers(k: Tensor, v: Tensor) -> dict[str, int]:
    """A limit for kernels that wait for memory most of the time: three programs of four warps on a multiprocessor wait
    side by side, where the compiler would make room for two."""
    return {"maxnreg": 168} if narrow(k, v) and k.is_cuda else {}


def rows(x: Tensor) -> Tensor:
    """Kernels take any strides but the last dimension's, which must be 1."""
    return x if x.stride(-1) == 1 or x.numel() == 0 else x.contiguous()


def precision(x: Tensor) -> str:
    """fp32 inputs are multiplied as fp32: by three products of tf32, on tensor cores. The compiler would write one
    of fp32 out, number by number: minutes for a kernel, and slow ones."""
    return "tf32x3" if x.dtype == torch.float32 else "tf32"
