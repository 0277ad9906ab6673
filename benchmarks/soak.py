"""A thousand training steps with changing lengths: memory and the number of compiled kernels stay bounded.

    python benchmarks/soak.py [--steps 1000] [--seconds 300]          --small: tiny shapes, on a CPU

An attention layer with projections is trained (forward, backward, Adam) on random sequences whose batch, lengths, masks
and methods change from step to step. After a first quarter, in which every kind of call has been made (every method,
with and without a mask, at lengths between all powers of two: tiles and budgets follow these):

- what torch has allocated after a step exceeds what it had then by less than 8 MiB (positions drawn for one seed are
  kept until the next): nothing else is kept of a call
- the peak of a step exceeds the earlier peak by less than a tenth: the longest calls have been seen
- no more than a tenth as many kernels again are compiled (lengths are not specialised), and plans, tapes and other
  things that are remembered stay below their limits
- the resident memory of the process grows by less than 64 MiB in steps of our methods, and the loss stays finite.
  (Steps of ``auto`` at lengths below its crossing are torch's own SDPA, which keeps a plan for every length: told, not
  judged.)
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import clusterattn as ca
from clusterattn import _replay
from clusterattn.measure import Row, append, environment, rows_path
from clusterattn.measure.speed import _status
from clusterattn.ops import _jit, _launch

ROOT = Path(__file__).resolve().parent.parent
METHODS = [
    ("refined", False), ("refined", True), ("refined:clusters=64,top=32,parts=8,slope=true,steps=2,sample=256", False),
    ("smyrf", False), ("reformer:chunk=64", True), ("clustered:steps=3", False), ("auto", False), ("auto", True),
]  # fmt: skip
GROWTH, MORE_KERNELS, RESIDENT, HELD = 1.1, 0.1, 64 << 20, 8 << 20


class Layer(nn.Module):
    """Attention with its projections, (b n width) -> (b n width); heads are views, as models hold them."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, method: str, causal: bool, keep: Tensor | None, seed: int) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        answer = ca.attention(q, k, v, method=method, causal=causal, key_mask=keep, seed=seed)
        out: Tensor = self.out(answer.transpose(1, 2).flatten(2))
        return out


def compiled_kernels() -> int:
    """Of the library, in this process."""
    if not _jit.HAVE_TRITON or _jit.INTERPRETING:
        return 0
    from triton.runtime.jit import JITFunction

    found = [x for x in gc.get_objects() if type(x) is JITFunction and x.__module__.startswith("clusterattn")]
    return sum(len(caches[0]) for x in found for caches in x.device_caches.values())


def length_and_mask(step: int, longest: int, draw: random.Random) -> tuple[int, bool]:
    """The longest first, then all powers of two, then any."""
    turn, powers = step // len(METHODS), range(4, longest.bit_length())
    if turn < 2:
        return longest, turn == 1
    which, masked = (turn - 2) % len(powers), (turn - 2) // len(powers)
    if masked < 2:
        low = 1 << powers[which]
        return draw.randrange(low, min(2 * low, longest + 1)), masked == 1
    return draw.randrange(16, longest), draw.random() < 0.5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=540.0, help="start no step after so long")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path, default=ROOT / "results")
    given = parser.parse_args()
    device, heads, width, longest = ("cpu", 2, 32, 150) if given.small else ("cuda", 6, 384, 4096)
    draw = random.Random(0)
    torch.manual_seed(0)
    layer = Layer(heads, width).to(device)
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-4)
    held: list[int] = []
    peaks: list[int] = []
    grown: dict[str, int] = {}  # resident memory, by the method of the step
    kernels, faults, step = 0, [], 0
    started, settled = time.perf_counter(), given.steps // 4
    for step in range(given.steps):
        if time.perf_counter() - started > given.seconds:
            faults.append(f"only {step} of {given.steps} steps in {given.seconds:g} s")
            break
        method, causal = METHODS[step % len(METHODS)]
        n, masked = length_and_mask(step, longest, draw)
        b = max(1, min(4, 2 * longest // n))
        x = torch.randn(b, n, width, device=device)
        lengths = torch.tensor([max(1, n - 7 * row) for row in range(b)], device=device)
        keep = torch.arange(n, device=device) < lengths[:, None] if masked else None
        before = _status("VmRSS")
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        with torch.autocast(device, torch.bfloat16, enabled=not given.small):
            loss = layer(x, method, causal, keep, seed=step).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        finite = bool(loss.isfinite())
        del x, keep, loss, lengths
        if step >= settled:
            grown[method] = grown.get(method, 0) + _status("VmRSS") - before
        if not finite:
            faults.append(f"step {step}: the loss is not finite")
            break
        if device == "cuda":
            held.append(torch.cuda.memory_allocated())
            peaks.append(torch.cuda.max_memory_allocated())
        if step + 1 == settled:
            kernels = compiled_kernels()
        if (step + 1) % max(given.steps // 10, 1) == 0:
            memory = f"{held[-1] >> 20} MiB held, peak {max(peaks) >> 20}" if held else ""
            print(
                f"{time.perf_counter() - started:5.0f} s  step {step + 1}: {compiled_kernels()} kernels, "
                f"{len(_launch._plans)} plans, {len(_replay._known)} kinds of calls, "
                f"{_status('VmRSS') >> 20} MiB resident; {memory}",
                flush=True,
            )
    after, ours = compiled_kernels(), sum(size for method, size in grown.items() if method != "auto")
    if held and len(held) > settled:
        if max(held[settled:]) > max(held[:settled]) + HELD:
            faults.append(f"{max(held[settled:])} bytes are held after a step, {max(held[:settled])} before")
        if max(peaks[settled:]) > GROWTH * max(peaks[:settled]):
            faults.append(f"the peak grew from {max(peaks[:settled])} to {max(peaks[settled:])} bytes")
    if after > kernels * (1 + MORE_KERNELS) + 2:
        faults.append(f"{after} kernels are compiled, {kernels} were after a quarter")
    for what, many, most in (
        ("plans", len(_launch._plans), _launch.PLANS),
        ("kinds of calls", len(_replay._known), _replay.MOST),
    ):
        if many > most:
            faults.append(f"{many} {what} are remembered, {most} is the limit")
    if ours > RESIDENT:
        faults.append(f"the process grew by {ours >> 20} MiB")
    row: Row = {
        "theme": "soak", "steps": step + 1, "seconds": round(time.perf_counter() - started, 1), "device": device,
        "kernels_after_a_quarter": kernels, "kernels": after, "plans": len(_launch._plans),
        "kinds_of_calls": len(_replay._known), "held_bytes": max(held, default=None),
        "peak_bytes": max(peaks, default=None), "resident_growth_bytes": ours, "resident_growth_by_method": grown,
        "faults": faults, "environment": environment(device),
    }  # fmt: skip
    if not given.small:
        append(rows_path(given.out, "soak", device), row)
    print(*(f"FAILED: {fault}" for fault in faults), f"{step + 1} steps, {len(faults)} faults", sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
