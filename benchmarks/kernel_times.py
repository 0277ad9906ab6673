"""Where the time of one call goes: every kernel of a method, forward and with backward, in microseconds.

    python benchmarks/kernel_times.py                              the default Refined, 6 x 64, three lengths
    python benchmarks/kernel_times.py --method smyrf --lengths 8192 --heads 32 --dim 128

Times are the device's, by torch.profiler, of ordinary calls (what a replay launches, too) on the embedded long sample.
"""

from __future__ import annotations

import argparse
from collections import defaultdict

import torch
from torch.profiler import ProfilerActivity, profile

import clusterattn as ca
from clusterattn.measure.bench import TOKENS
from clusterattn.measure.sample import tiled

CALLS = 5


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--method", default="refined")
    arguments.add_argument("--lengths", nargs="*", type=int, default=[8192, 32768, 131072])
    arguments.add_argument("--heads", type=int, default=6)
    arguments.add_argument("--dim", type=int, default=64)
    arguments.add_argument("--backward", action="store_true")
    given = arguments.parse_args()
    ca.replay(False)
    for n in given.lengths:
        b = max(TOKENS // n, 1)
        made = tiled(b, given.heads, n, given.dim, "cuda", torch.bfloat16)
        q, k, v = (x.requires_grad_(given.backward) for x in (made.q, made.k, made.v))
        d_out = torch.randn_like(v)

        def once(q=q, k=k, v=v, d_out=d_out) -> None:
            out = ca.attention(q, k, v, method=given.method)
            if given.backward:
                torch.autograd.grad(out, (q, k, v), d_out)

        for _ in range(3):
            once()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(CALLS):
                once()
            torch.cuda.synchronize()
        total, count = defaultdict(float), defaultdict(int)
        for event in seen.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                total[event.name] += event.device_time_total / CALLS
                count[event.name] += 1
        print(f"\n{given.method}, {b} x {given.heads} x {n} x {given.dim}: {sum(total.values()):.0f} µs")
        for name, microseconds in sorted(total.items(), key=lambda item: -item[1]):
            print(f"  {microseconds:8.1f}  {count[name] / CALLS:5.1f} x  {name[:70]}")


if __name__ == "__main__":
    main()
