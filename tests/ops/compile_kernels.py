"""Compile kernels for a GPU that is not there: run by test_kernels_compile.py in a process that does not interpret.

The verbs' host code runs on a CPU with launches collected instead of made; each is then compiled by Triton for sm_90.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from clusterattn.ops import _launch
from clusterattn.ops._jit import LOOSE
from clusterattn.ops.draw import kernels as draw
from clusterattn.ops.kmeans import kernels as kmeans
from clusterattn.ops.kmeans import moments, train_kernels
from clusterattn.ops.members import kernels as members
from clusterattn.ops.rows import kernels as rows

SHARED = 232448  # bytes a program may have on sm_90
TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int64: "i64", torch.int32: "i32",
    torch.int8: "i8", torch.bool: "i1",
}  # fmt: skip


def compiled(kernel: Any, tensors: Any, numbers: Any, loose: Any, flags: dict[str, Any]) -> Any:
    """As Triton would at the first launch with these arguments."""
    signature, constants, hints = {}, {}, {}
    values = [*tensors, *numbers, *loose, *(flags[name] for name in kernel.arg_names if name in flags)]
    for place, (name, value) in enumerate(zip(kernel.arg_names, values, strict=True)):
        if name in flags or (isinstance(value, int) and value == 1 and name not in LOOSE):
            signature[name], constants[(place,)] = "constexpr", value
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif isinstance(value, int):
            signature[name] = "i32" if abs(value) < 2**31 else "i64"
        else:
            signature[name] = "*" + TYPES[value.dtype]
        if signature[name][0] == "*" or (isinstance(value, int) and value % 16 == 0 and name not in LOOSE):
            hints[(place,)] = [["tt.divisibility", 16]]
    options = {name: value for name, value in flags.items() if name not in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=hints)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def main() -> None:
    collected: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def collect(kernel: Any, grid: Any, tensors: Any, numbers: Any = (), loose: Any = (), **flags: Any) -> None:
        key = (kernel.__name__, *(x.dtype for x in tensors), *flags.values())
        collected[key] = (kernel, tensors, numbers, loose, flags)

    for module in list(sys.modules.values()):
        if getattr(module, "launch", None) is _launch.launch and module is not _launch:
            module.launch = collect  # type: ignore[attr-defined]
    train_kernels.multiprocessors = lambda device: 132  # type: ignore[assignment]
    for dtype, d, c, n in ((torch.bfloat16, 64, 100, 512), (torch.float16, 256, 20, 64)):
        x, at = torch.zeros(1, 2, n, d, dtype=dtype), torch.zeros(1, 2, c, dtype=torch.int64)
        form, labels = torch.zeros(2, d, d), torch.zeros(2, n, dtype=torch.int64)
        for together in (1 << 16, 0):  # in one launch, and by stages
            kmeans.TOGETHER = together
            kmeans.kmeans(x, None, at, None, form, 2, False)
        kmeans.farthest(x, at, c // 2, form, False)
        kmeans.nearest(x, torch.zeros(2, c, d, dtype=dtype), torch.zeros(2, c), torch.zeros(2, 1, d))
        moments.covariance(x, None, None)
        members.sums(x, *members.by_label(labels, c))
        rows.broadcast(torch.zeros(1, 2, c, d, dtype=dtype), labels.view(1, 2, n))
    draw.stratified(1000, 7, 1, 50, torch.device("cpu"), None)
    for kernel, *given in collected.values():
        shared = compiled(kernel, *given).metadata.shared
        assert shared <= SHARED, f"{kernel.__name__} wants {shared} bytes of shared memory"
    print(len(collected))


if __name__ == "__main__":
    main()
