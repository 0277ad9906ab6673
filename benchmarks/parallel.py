"""What sequence-parallel attention sends: counted on gloo processes, ours beside exact attention's three ways.

    python benchmarks/parallel.py                                   the bars: 2, 4, 8 processes, rows into results/
    python benchmarks/parallel.py --processes 4 --lengths 4096 --out /tmp/rows
    python benchmarks/parallel.py --plan 10000000 --processes 64    by formula alone: no process is started

Megabytes that one rank sends in one layer, forward and backward together, and the steps that wait for one another: a
sum over R ranks takes 2 (R - 1), a gather or an exchange R - 1, a shift 1. Ours are counted by ``ca.parallel.Traffic``
and have to equal the formula, the others by the real exchange (parallel_peers.py); what they answer is held against one
process that holds everything: ours always, the others at a length that they can compute in a minute.

    ring         keys and values go round; backward: keys, values and their gradients
    all-gather   keys and values to everybody; backward: again, and their gradients back to their owners
    Ulysses      q, k, v and the answer change from shares of tokens to shares of heads, and their gradients back; needs
                 as many heads for each rank
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import clusterattn as ca
from clusterattn._rows import Row, append, environment, rows_path
from clusterattn.methods._grouping import DIRECTIONS, FAR_POOL, MOST_STARTS, SPREAD_SAMPLE, from_starts

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from parallel_peers import PEERS, Wire, exactly  # noqa: E402 (it lies beside this file)

NUMBER, WHOLE = 4, 8  # bytes: everything is fp32 here, counts and positions are int64
PROVED_LENGTH = 512  # at which exact attention's ways really compute
RING_BAR, FAR_BAR, FAR = 0.15, 0.01, 1_000_000  # of ring's bytes at the longest length, and by formula at a million
OUT_BAR, GRADIENT_BAR = 1e-5, 1e-4


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
            asked = [DIRECTIONS * d, DIRECTIONS * WHOLE // NUMBER]  # queries, and their labels
            asked = [(DIRECTIONS + min(c, MOST_STARTS)) * d] if from_starts(size) else asked
            summed += [h * each for each in asked] + [h * (SPREAD_SAMPLE + pool * p) * 2 * d]
            summed += [h * p * (DIRECTIONS + d + 1)] * updates
        both = [h * c * t * 2 * d, h * c * p * (1 + 2 * d), h * d * d if size.slope else 0]
        agreed = (r - 1) * WHOLE * (13 + 4)
        gathered = (r - 1) * h * c * t * NUMBER + agreed
        forward = gathered + sum(_sum(each, r) for each in (*summed, h * c * p, *both))
        return forward, sum(_sum(each, r) for each in (h * c * (d + 1), *both))

    def peers(self) -> dict[str, tuple[int, int]]:
        """Of exact attention's ways: bytes forward, and both together."""
        r, two, four = self.ranks, self._share(2), self._share(4)
        return {
            "ring": ((r - 1) * two, 2 * (r - 1) * two + r * two),
            "all-gather": ((r - 1) * two, 3 * (r - 1) * two),
            "Ulysses": ((r - 1) * four // r, 2 * (r - 1) * four // r),
        }

    def _share(self, tensors: int) -> int:
        """Bytes of one rank's share of so many tensors."""
        return tensors * (self.n // self.ranks) * self.heads * self.d * NUMBER

    def can(self, way: str) -> bool:
        return way != "Ulysses" or self.heads % self.ranks == 0


def _sum(numbers: int, ranks: int) -> int:
    return 2 * (ranks - 1) * numbers * NUMBER // ranks


# ---------------------------------------------------------------------------------------------------- real calls


def one(rank: int, folder: str, layer: Layer) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=layer.ranks, timeout=timedelta(minutes=20)
    )
    found: dict[str, dict[str, Any]] = {"ours": _ours(rank, layer)}
    short = Layer(PROVED_LENGTH, layer.ranks, layer.heads, layer.d, layer.method)
    for way in PEERS:
        if layer.can(way):
            found[way] = _peer(way, rank, layer, proved=False)
            found[way] |= {f"{name}_at_{short.n}": off for name, off in _peer(way, rank, short, proved=True).items()
                           if name in ("out", "gradients")}  # fmt: skip
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def _tensors(layer: Layer) -> list[torch.Tensor]:
    """q, k, v and the gradient of the answer, whole."""
    shape = (1, layer.heads, layer.n, layer.d)
    return [torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]


def _mine(rank: int, layer: Layer) -> slice:
    return slice(rank * layer.n // layer.ranks, (rank + 1) * layer.n // layer.ranks)


def _ours(rank: int, layer: Layer) -> dict[str, Any]:
    whole, share = _tensors(layer), _mine(rank, layer)
    q, k, v = (x[:, :, share].clone().requires_grad_() for x in whole[:3])
    traffic = ca.parallel.Traffic()
    out = ca.parallel.attention(q, k, v, method=layer.method, traffic=traffic)
    forward = traffic.sent
    out.backward(whole[3][:, :, share])
    found = {"forward": forward, "sent": traffic.sent, "calls": traffic.calls, "by_what": traffic.by_what}
    sums = traffic.calls - 3  # agreement, lengths and the scores of near keys are gathered
    found["steps"] = (2 * sums + 3) * (layer.ranks - 1)
    if rank == 0:
        found |= _off(layer, layer.method, share, [out.detach(), *(x.grad for x in (q, k, v))], whole)
    return found


def _peer(way: str, rank: int, layer: Layer, proved: bool) -> dict[str, Any]:
    whole, share, wire = _tensors(layer), _mine(rank, layer), Wire()
    mine = [x[:, :, share].clone() for x in whole]
    *answers, forward = PEERS[way](wire, *mine, exactly if proved else None)
    found: dict[str, Any] = {"forward": int(forward), "sent": wire.sent, "steps": wire.steps}
    return found | (_off(layer, ca.Exact(), share, answers, whole) if proved and rank == 0 else {})


def _off(
    layer: Layer, method: ca.Method, share: slice, answers: list[torch.Tensor], whole: list[torch.Tensor]
) -> dict[str, float]:
    """The largest difference from one process that holds everything: of the answer, and of the gradients."""
    alone = [x.clone().requires_grad_() for x in whole[:3]]
    out = ca.attention(*alone, method=method)
    out.backward(whole[3])
    wanted = [out.detach(), *(x.grad for x in alone)]
    off = [(a - b[:, :, share]).abs().max().item() for a, b in zip(answers, wanted, strict=True)]
    return {"out": off[0], "gradients": max(off[1:])}


def counted(layer: Layer) -> dict[str, dict[str, Any]]:
    """What rank 0 sent; every rank sends as much."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=one, args=(rank, folder, layer)) for rank in range(layer.ranks)]
        for each in processes:
            each.start()
        for each in processes:
            each.join()
        found = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(layer.ranks)]
    for way, first in found[0].items():
        assert all(each[way]["sent"] == first["sent"] for each in found), way
    return dict(found[0])


# ---------------------------------------------------------------------------------------------------- rows and bars


def rows(layer: Layer, plan: bool) -> Iterator[Row]:
    """Ours, then the others: counted, or by formula where no process is started or a way cannot be gone."""
    forward, backward = layer.ours()
    wanted = {"ours": (forward, forward + backward), **layer.peers()}
    found = {} if plan else counted(layer)
    around = environment()
    for way, numbers in wanted.items():
        seen = found.get(way, {})
        if seen:
            assert (seen["forward"], seen["sent"]) == numbers, (way, seen, numbers)
        yield {
            "theme": "parallel", "way": way, "n": layer.n, "ranks": layer.ranks, "h": layer.heads, "d": layer.d,
            "method": str(layer.method) if way == "ours" else "exact", "forward_bytes": numbers[0],
            "bytes": numbers[1], "counted": bool(seen), "possible": layer.can(way),
            "of_ring": numbers[1] / wanted["ring"][1],
            **{name: value for name, value in seen.items() if name not in ("forward", "sent")}, "environment": around,
        }  # fmt: skip


def bars(found: list[Row], layer: Layer) -> Iterator[tuple[str, bool]]:
    """Of four processes, in words, and whether they are met."""
    ours = {row["n"]: row for row in found if row["way"] == "ours" and row["ranks"] == layer.ranks}
    if len(ours) > 1:
        yield f"bytes the same at {', '.join(map(str, ours))} tokens", len({row["bytes"] for row in ours.values()}) == 1
    last = ours[max(ours)]
    yield f"{last['of_ring']:.1%} of ring's bytes at {last['n']} (bar {RING_BAR:.0%})", last["of_ring"] <= RING_BAR
    far = Layer(FAR, layer.ranks, layer.heads, layer.d, layer.method)
    part = sum(far.ours()) / far.peers()["ring"][1]
    yield f"{part:.2%} of ring's bytes at a million, by formula (bar {FAR_BAR:.0%})", part <= FAR_BAR
    out, gradients = (max(row[name] for row in ours.values()) for name in ("out", "gradients"))
    yield f"answers within {out:.1e} of one process (bar {OUT_BAR:g})", out <= OUT_BAR
    yield f"gradients within {gradients:.1e} (bar {GRADIENT_BAR:g})", gradients <= GRADIENT_BAR


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--lengths", type=int, nargs="+", default=[16384, 65536])
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--method", default="refined:clusters=100,top=32,parts=16")
    parser.add_argument("--plan", type=int, metavar="N", help="by formula alone, for N tokens")
    parser.add_argument("--out", type=Path, default=HERE.parent / "results")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    found: list[Row] = []
    layer = None
    print(f"{'tokens':>10} {'ranks':>5} {'way':>10} {'forward':>9} {'both':>9} MB sent")
    for ranks in asked.processes:
        for n in [asked.plan] if asked.plan else asked.lengths:
            layer = Layer(n, ranks, asked.heads, asked.dim, ca.method(asked.method).at(n, n, asked.dim, asked.dim))
            for row in rows(layer, bool(asked.plan)):
                found.append(row)
                note = f"{row['of_ring']:.1%} of ring" if row["way"] == "ours" else ""
                note += (
                    "" if row["counted"] else ", by formula" + ("" if row["possible"] else ": heads do not go round")
                )
                note += f", {row['steps']} steps" if "steps" in row else ""
                note += f", off by {row['out']:.1e}, gradients {row['gradients']:.1e}" if "out" in row else ""
                sent = f"{row['forward_bytes'] / 1e6:>9.1f} {row['bytes'] / 1e6:>9.1f}"
                print(f"{n:>10} {ranks:>5} {row['way']:>10} {sent} {note.removeprefix(', ')}", flush=True)
                if not asked.plan:
                    append(rows_path(asked.out, "parallel"), row)
    if asked.plan or layer is None:
        return 0
    missed = 0
    for ranks in asked.processes:
        for words, met in bars(found, Layer(layer.n, ranks, layer.heads, layer.d, layer.method)):
            missed += not met and ranks == 4
            print(f"{ranks} processes: {words}: {'met' if met else 'missed'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
