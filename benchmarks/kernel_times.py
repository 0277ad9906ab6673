"""Where the time of one call goes: every kernel of a method, forward and with backward, in microseconds.

    python benchmarks/kernel_times.py                              the default Refined, 6 x 64, three lengths
    python benchmarks/kernel_times.py --method smyrf --lengths 8192 --heads 32 --dim 128

Times are the device's, by torch.profiler, of a CUDA graph's replays on the embedded long sample. A kernel is brought to
the chip while the one before it ends, and chains run side by side: so beside how long each is there stands by how much
it puts off the end of the call, and these add up to the time of the call.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import clusterattn as ca
from clusterattn.measure.bench import TOKENS
from clusterattn.measure.sample import tiled
from clusterattn.measure.speed import captured

CALLS = 5


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--method", default="refined")
    arguments.add_argument("--lengths", nargs="*", type=int, default=[8192, 32768, 131072])
    arguments.add_argument("--heads", type=int, default=6)
    arguments.add_argument("--dim", type=int, default=64)
    arguments.add_argument("--backward", action="store_true")
    given = arguments.parse_args()
    for n in given.lengths:
        b = max(TOKENS // n, 1)
        made = tiled(b, given.heads, n, given.dim, "cuda", torch.bfloat16)
        q, k, v = (x.requires_grad_(given.backward) for x in (made.q, made.k, made.v))
        d_out = torch.randn_like(v)

        def once(q=q, k=k, v=v, d_out=d_out) -> Any:
            out = ca.attention(q, k, v, method=given.method)
            return torch.autograd.grad(out, (q, k, v), d_out) if given.backward else out

        print(f"\n{given.method}, {b} x {given.heads} x {n} x {given.dim}:", listed(once))


def listed(once: Any) -> str:
    """A table of the kernels of a call."""
    for _ in range(3):
        once()
    replay = captured(once)
    for _ in range(3):
        replay()
    there, more, count = (defaultdict[str, float](float) for _ in range(3))
    order: list[str] = []
    for _ in range(CALLS):
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            replay()
            torch.cuda.synchronize()
        events = [x for x in seen.events() if x.device_type == torch.autograd.DeviceType.CUDA]
        events.sort(key=lambda event: event.time_range.end)
        end = min(event.time_range.start for event in events)
        for event in events:
            name = event.name.removeprefix("_")[:60]
            there[name] += event.time_range.elapsed_us() / CALLS
            more[name] += max(event.time_range.end - end, 0.0) / CALLS
            count[name] += 1 / CALLS
            end = max(end, event.time_range.end)
            if name not in order:
                order.append(name)
    lines = [f"{sum(more.values()):.0f} µs", "     there      more", *(
        f"  {there[name]:8.1f}  {more[name]:8.1f}  {count[name]:5.1f} x  {name}" for name in order
    )]  # fmt: skip
    return "\n".join(lines)


if __name__ == "__main__":
    main()
