"""What sequence-parallel attention sends: counted on gloo processes, beside the formulas of exact attention's ways.

    python benchmarks/parallel.py                                   2 and 4 processes, 4 096 and 16 384 tokens
    python benchmarks/parallel.py --processes 4 --lengths 16384 65536
    python benchmarks/parallel.py --compare                         and the error against one process that holds all
    python benchmarks/parallel.py --plan 10000000 --processes 64    by formula alone: no process is started

Megabytes that one rank sends in one layer, forward and backward together, as the ring algorithms send them (see
``ca.parallel.Traffic``). The counted bytes have to equal the formula, or the run fails.

    ring         keys and values go round; backward: keys, values and their gradients
    all-gather   keys and values to everybody; backward: again, and their gradients back to their owners
    Ulysses      q, k, v and the answer change from shares of tokens to shares of heads, and their gradients back; needs
                 as many key heads as ranks
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import clusterattn as ca
from clusterattn.methods._grouping import DIRECTIONS, FAR_POOL, SPREAD_SAMPLE

NUMBER, WHOLE = 4, 8  # bytes: everything is fp32 here, counts and positions are int64


@dataclass(frozen=True)
class Layer:
    """One call: n tokens over so many ranks."""

    n: int
    ranks: int
    heads: int
    d: int
    method: ca.Refined  # all sizes filled in

    def ours(self) -> tuple[int, int]:
        """Bytes that one rank sends, forward and backward."""
        size, h, d, r = self.method, self.heads, self.d, self.ranks
        c, t, p, width = size.clusters, size.top, size.parts, size.width(d)
        updates, pool = size.steps - 1, 1 if size.start == "random" else FAR_POOL
        summed = [  # numbers of every sum over the ranks, in the order of the call
            h * (d + 1), h * d * d, h * d if width < d else 0, h * pool * c * d, *[h * c * (width + 1)] * updates,
            h * c * (d + 1),
        ]  # fmt: skip
        if p > 1:
            summed += [h * DIRECTIONS * d, h * DIRECTIONS * WHOLE // NUMBER, h * (SPREAD_SAMPLE + pool * p) * 2 * d]
            summed += [h * p * (DIRECTIONS + d + 1)] * updates
        both = [h * c * t * 2 * d, h * c * p * (1 + 2 * d), h * d * d if size.slope else 0]
        agreed = (r - 1) * WHOLE * (13 + 4)
        gathered = (r - 1) * h * c * t * NUMBER + agreed
        forward = gathered + sum(_sum(each, r) for each in (*summed, h * c * p, *both))
        return forward, sum(_sum(each, r) for each in (h * c * (d + 1), *both))

    def ring(self) -> int:
        return 3 * (self.ranks - 1) * self._share(2)

    def all_gather(self) -> int:
        return 3 * (self.ranks - 1) * self._share(2)

    def ulysses(self) -> int:
        return 2 * (self.ranks - 1) * self._share(4) // self.ranks

    def _share(self, tensors: int) -> int:
        """Bytes of one rank's share of so many tensors."""
        return tensors * self.n // self.ranks * self.heads * self.d * NUMBER


def _sum(numbers: int, ranks: int) -> int:
    return 2 * (ranks - 1) * numbers * NUMBER // ranks


def one(rank: int, folder: str, layer: Layer, compare: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=layer.ranks, timeout=timedelta(minutes=10)
    )
    whole = [
        torch.randn(1, layer.heads, layer.n, layer.d, generator=torch.Generator().manual_seed(i)) for i in (0, 1, 2)
    ]
    share = slice(rank * layer.n // layer.ranks, (rank + 1) * layer.n // layer.ranks)
    q, k, v = (x[:, :, share].clone().requires_grad_() for x in whole)
    traffic, found = ca.parallel.Traffic(), {}
    out = ca.parallel.attention(q, k, v, method=layer.method, traffic=traffic)
    found["forward"] = traffic.sent
    out.backward(v.detach())
    found["sent"], found["calls"], found["by_what"] = traffic.sent, traffic.calls, traffic.by_what
    if compare and rank == 0:
        alone = [x.clone().requires_grad_() for x in whole]
        answer = ca.attention(*alone, method=layer.method)
        answer.backward(whole[2])
        found["out"] = (answer[:, :, share] - out).abs().max().item()
        pairs = zip((q, k, v), alone, strict=True)
        found["gradients"] = max((a.grad - b.grad[:, :, share]).abs().max().item() for a, b in pairs)
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def counted(layer: Layer, compare: bool) -> dict[str, Any]:
    """What rank 0 sent; every rank sends as much."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=one, args=(rank, folder, layer, compare)) for rank in range(layer.ranks)]
        for each in processes:
            each.start()
        for each in processes:
            each.join()
        found = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(layer.ranks)]
    assert all(each["sent"] == found[0]["sent"] for each in found)
    return found[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--method", default="refined:clusters=100,top=32,parts=16,slope=true,steps=3,sample=1600")
    parser.add_argument("--compare", action="store_true", help="with one process that holds everything")
    parser.add_argument("--plan", type=int, metavar="N", help="by formula alone, for N tokens")
    asked = parser.parse_args()
    names = ("ring", "all-gather", "Ulysses")
    print(
        f"{'tokens':>10} {'ranks':>5} {'forward':>9} {'both':>9} {' '.join(f'{each:>11}' for each in names)}   MB sent"
    )
    for ranks in asked.processes:
        for n in [asked.plan] if asked.plan else asked.lengths:
            method = ca.method(asked.method).at(n, n, asked.dim, asked.dim)
            layer = Layer(n, ranks, asked.heads, asked.dim, method)
            forward, backward = layer.ours()
            ours, others = (forward, forward + backward), (layer.ring(), layer.all_gather(), layer.ulysses())
            note = f"{ours[1] / others[0]:.1%} of ring"
            if not asked.plan:
                found = counted(layer, asked.compare)
                assert (found["forward"], found["sent"]) == ours, (found, ours)
                note += f", {found['calls']} collectives"
                if asked.compare:
                    note += f", off by {found['out']:.1e}, gradients {found['gradients']:.1e}"
            cells = " ".join(f"{each / 1e6:>11.1f}" for each in others)
            print(f"{n:>10} {ranks:>5} {ours[0] / 1e6:>9.1f} {ours[1] / 1e6:>9.1f} {cells}   {note}", flush=True)


if __name__ == "__main__":
    main()
