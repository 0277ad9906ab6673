"""torch.compile of every method on a GPU, and what else must simply work there.

    python benchmarks/compiled.py [--seconds 540] [--only refined reduce]      --small: tiny shapes, on a CPU

compile         each method named by a string inside the compiled region, causal and not, forward and backward, by the
                default mode and by "reduce-overhead" (CUDA graphs: called thrice, the third with other numbers); no
                graph break; out and gradients as close to the eager call as two runs of one arithmetic are
rank            k-means along a few directions of the keys, in half precision, against the same call in fp32
million         32 heads x 128 over 1 048 576 tokens, forward and backward: finite, and on some queries closer to exact
                attention than half of what the mean of the values is

Each check is a line, failures last and in a row of results/; exit status 1 where there is one.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

import clusterattn as ca
from clusterattn.measure import Row, append, environment, rows_path

ROOT = Path(__file__).resolve().parent.parent
METHODS = [
    "refined", "auto", "smyrf", "refined:clusters=64,top=32,parts=16,slope=true,steps=2,sample=256,rank=16",
    "refined:clusters=64,top=32,parts=1,slope=false,steps=2,start=far", "improved", "clustered",
    "reformer:chunk=64", "routing", "clusterformer", "local:window=64", "oracle_top:top=32", "exact",
]  # fmt: skip
MODES = {"default": {}, "reduce-overhead": {"mode": "reduce-overhead"}}
ROOM = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}  # l2, of two orders of the same sums


def drawn(b: int, h: int, hk: int, n: int, d: int, dtype: torch.dtype, device: str, seed: int = 0) -> list[Tensor]:
    """q, k, v as leaves: queries and keys in lumps, and the values of alike keys alike: whoever finds some of them has
    their answer."""
    draw = torch.Generator(device).manual_seed(seed)
    lumps, contents = torch.randn(2, 50, d, generator=draw, device=device).to(dtype)
    asked, held = (torch.randint(50, (b, heads, n), generator=draw, device=device) for heads in (h, hk))

    def around(middles: Tensor, which: Tensor) -> Tensor:
        near = torch.randn(*which.shape, d, generator=draw, device=device, dtype=dtype)
        return near.mul_(0.4).add_(middles[which])

    return [x.requires_grad_() for x in (around(lumps, asked), around(lumps, held), around(contents, held))]


def apart(x: Tensor, y: Tensor) -> float:
    return float((x.detach().float() - y.detach().float()).norm() / y.detach().float().norm().clamp_min(1e-30))


def passes(attend: Callable[..., Tensor], leaves: list[Tensor]) -> list[Tensor]:
    out = attend(*leaves)
    direction = torch.randn(out.shape, generator=torch.Generator(out.device).manual_seed(3), device=out.device)
    grads = torch.autograd.grad(out, leaves, direction.to(out.dtype), allow_unused=True)
    return [x.detach().clone() for x in (out, *grads) if x is not None]


def compiles(spec: str, causal: bool, mode: str, device: str, small: bool) -> str | None:
    """What is wrong; None where nothing is."""
    n, d = (70, 16) if small else (2048, 64)
    dtype = torch.float32 if small else torch.bfloat16

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = ca.attention(q, k, v, method=spec, causal=causal)
        return out

    torch._dynamo.reset()
    backend = {"backend": "aot_eager"} if small else MODES[mode]
    compiled = torch.compile(attend, fullgraph=True, **backend)
    for turn, seed in enumerate((0, 0, 1)):
        leaves = drawn(1, 4, 2, n, d, dtype, device, seed)
        if mode == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        got, wanted = passes(compiled, leaves), passes(attend, leaves)
        for name, mine, right in zip(("out", "dq", "dk", "dv"), got, wanted, strict=False):
            if not apart(mine, right) <= ROOM[dtype]:
                return f"{name} of call {turn} is {apart(mine, right):.3g} from the eager one in l2"
    return None


def ranks(device: str, small: bool) -> str | None:
    shape = (1, 2, 2, 300, 32) if small else (2, 6, 6, 8192, 64)
    found = {}
    for dtype in (torch.float32, torch.float32 if small else torch.bfloat16):
        q, k, v = drawn(*shape, torch.float32, device)
        with torch.no_grad():
            for rank in (4, 16, 24):
                method = ca.Refined(clusters=64, top=16, parts=1, slope=False, steps=2, sample=256, rank=rank)
                tensors = (x.detach().to(dtype) for x in (q, k, v))
                out = ca.attention(*tensors, method=method)
                exact = ca.attention(q, k, v, method="exact")
                if not out.isfinite().all():
                    return f"rank={rank}, {dtype}: not finite"
                found[rank, dtype] = apart(out, exact)
    for (rank, dtype), error in found.items():
        if not error <= 1.2 * found[rank, torch.float32] + 0.02:
            return f"rank={rank}: error {error:.3g} in {dtype}, {found[rank, torch.float32]:.3g} in fp32"
    return None


def million(spec: str, device: str, small: bool) -> str | None:
    h, n, d = (2, 512, 16) if small else (32, 1 << 20, 128)
    leaves = drawn(1, h, h, n, d, torch.float32 if small else torch.bfloat16, device)
    out = ca.attention(*leaves, method=spec)
    grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
    few = slice(0, None, max(n // 16, 1))
    with torch.no_grad():
        for name, x in zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True):
            if not x.isfinite().all() or not x.any():
                return f"{name} is not finite, or nothing"
        mean = leaves[2].mean(2, keepdim=True).float()
        exact = ca.attention(leaves[0][:, :2, few], leaves[1][:, :2], leaves[2][:, :2], method="exact")
    worst, spread = apart(out[:, :2, few], exact), apart(mean[:, :2].expand_as(exact), exact)
    return None if worst < 0.5 * spread else f"out is {worst:.3g} from exact, the mean value {spread:.3g}"


def checks(device: str, small: bool) -> Iterator[tuple[str, Callable[[], str | None]]]:
    for mode in MODES:
        for spec in METHODS:
            for causal in (False, True):
                if causal and ("parts=16" in spec or ca.method(spec).causality == "no"):
                    continue
                name = f"compile {mode}: {spec}{', causal' if causal else ''}"
                yield name, lambda s=spec, c=causal, m=mode: compiles(s, c, m, device, small)
        if mode == "default":
            yield "rank", lambda: ranks(device, small)
            for spec in ("refined", "clustered:clusters=100,steps=1,metric=keys,sample=256", "smyrf"):
                yield f"million: {spec}, 32 x 128, 1 048 576 tokens", lambda s=spec: million(s, device, small)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=540.0, help="start no check after so long")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="checks with all of these words")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path, default=ROOT / "results")
    given = parser.parse_args()
    device = "cpu" if given.small else "cuda"
    started, right, failed, left = time.perf_counter(), 0, [], 0
    for name, check in checks(device, given.small):
        if not all(word in name for word in given.only):
            continue
        if time.perf_counter() - started > given.seconds:
            left += 1
            continue
        began = time.perf_counter()
        try:
            fault = check()
        except Exception as error:  # the other checks are still worth having
            words = str(error).strip().splitlines() or ["no words"]
            fault = f"{type(error).__name__}: {words[0][:300]}"
        if device == "cuda":
            torch.cuda.empty_cache()
        taken = time.perf_counter() - began
        print(f"{'FAILED' if fault else 'ok    '} {taken:6.1f} s  {name}{'  ' + fault if fault else ''}", flush=True)
        if fault:
            failed.append({"check": name, "fault": fault})
        else:
            right += 1
    row: Row = {
        "theme": "compiled", "right": right, "failed": failed, "left": left, "device": device,
        "seconds": round(time.perf_counter() - started, 1), "environment": environment(device),
    }  # fmt: skip
    if not given.small:
        append(rows_path(given.out, "compiled", device), row)
    print(f"\n{right} right, {len(failed)} failed, {left} left for want of time", *map(str, failed), sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
