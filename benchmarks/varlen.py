"""Packed sequences: 64 documents of 10 to 8 000 tokens in one call, against a loop over them and against padding.

    python benchmarks/varlen.py                          on the CPU, fp32, 2 heads: some minutes
    python benchmarks/varlen.py --device cuda            bf16, 16 heads
    python benchmarks/varlen.py --device cuda --causal --methods refined exact
    python benchmarks/varlen.py --longest 500 --documents 16     a rehearsal of seconds

    varlen   ca.varlen_attention
    loop     ca.attention, document by document
    padded   ca.attention on a batch padded to the longest document, with masks

All three take the same sizes, those of the longest document, and have to agree before they are timed: the largest
difference, and how many documents agree with the loop in every bit, are in the row. Turns are taken in alternation, the
fastest counts; on a CPU, one thread's own time, so that other work beside it does not count. Rows go to results/ as
JSON lines; the exit code is 1 when varlen is slower than padding.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import clusterattn as ca
from clusterattn import _documents
from clusterattn.measure import Row, append, environment, interleaved, mixture, rows_path

DIM = 64
Answer = Callable[[Tensor, Tensor, Tensor], Tensor]  # of tokens (n h d) to tokens (n h e)


@dataclass(frozen=True)
class Packed:
    """Documents one behind the other, and the ways to answer for them."""

    q: Tensor  # (tokens h d)
    k: Tensor
    v: Tensor
    lengths: list[int]
    method: ca.Method
    causal: bool

    @property
    def starts(self) -> Tensor:
        return torch.tensor([0, *self.lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)

    def ways(self) -> dict[str, Answer]:
        starts, ends = self.starts.to(self.q.device), self.starts.tolist()
        spans = [slice(first, last) for first, last in itertools.pairwise(ends)]
        real = torch.arange(max(self.lengths)) < torch.tensor(self.lengths).unsqueeze(-1)
        where = real.flatten().nonzero().squeeze(-1).to(self.q.device)
        real = real.to(self.q.device)

        def varlen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            longest = max(self.lengths)
            out: Tensor = ca.varlen_attention(
                q, k, v, starts, starts, longest, longest, method=self.method, causal=self.causal
            )
            return out

        def loop(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            each = (
                ca.attention(
                    *(x[span].transpose(0, 1).unsqueeze(0) for x in (q, k, v)), method=self.method, causal=self.causal
                )
                for span in spans
            )
            return torch.cat([out[0].transpose(0, 1) for out in each])

        def padded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            rows = (
                x.new_zeros(real.numel(), *x.shape[1:]).index_copy(0, where, x).unflatten(0, real.shape).transpose(1, 2)
                for x in (q, k, v)
            )
            masks = {"key_mask": real, "query_mask": real}
            out = ca.attention(*rows, method=self.method, causal=self.causal, **masks)
            return out.transpose(1, 2).flatten(0, 1).index_select(0, where)

        return {"varlen": varlen, "loop": loop, "padded": padded}

    def run(self, answer: Answer, backward: bool) -> Callable[[], object]:
        if not backward:
            return lambda: answer(self.q, self.k, self.v)
        leaves = [x.detach().requires_grad_() for x in (self.q, self.k, self.v)]
        direction = torch.ones_like(self.v[:, :1]).expand(-1, self.q.shape[1], -1)
        return lambda: torch.autograd.grad(answer(*leaves), leaves, direction)

    def agreement(self, got: Tensor, wanted: Tensor) -> Row:
        pairs = zip(got.split(self.lengths), wanted.split(self.lengths), strict=True)
        return {
            "difference": float((got - wanted).abs().max() / wanted.abs().max()),
            "documents_equal_to_the_bit": sum(torch.equal(one, other) for one, other in pairs),
        }


def lengths(documents: int, shortest: int, longest: int, even: bool) -> list[int]:
    """From the shortest to the longest in equal steps of tokens, or of their logarithm; shuffled."""
    ends = (float(shortest), float(longest))
    spread = torch.linspace(*ends, documents) if even else torch.logspace(*torch.tensor(ends).log10(), documents)
    order = torch.randperm(documents, generator=torch.Generator().manual_seed(0))
    return [round(float(x)) for x in spread[order]]


def own_time(run: Callable[[], object]) -> float:
    started = time.process_time()
    run()
    return time.process_time() - started


def rows(args: argparse.Namespace) -> Iterator[Row]:
    device = torch.device(args.device)
    gpu = device.type == "cuda"
    dtype = torch.bfloat16 if gpu else torch.float32
    heads = args.heads or (16 if gpu else 2)
    each = lengths(args.documents, args.shortest, args.longest, args.even)
    data = mixture(1, heads, sum(each), DIM)
    q, k, v = (x[0].transpose(0, 1).contiguous().to(device, dtype) for x in (data.q, data.k, data.v))
    for spec in args.methods:
        packed = Packed(
            q, k, v, each, ca.method(spec).at(max(each), max(each), DIM, DIM, causal=args.causal), args.causal
        )
        ways = packed.ways()
        with torch.no_grad():
            wanted = ways["loop"](q, k, v)
            for name, way in ways.items():
                off = packed.agreement(way(q, k, v), wanted)["difference"]
                if off > args.room:
                    raise SystemExit(f"{name} of {spec} is off by {off:.2g} of the largest number; not timed")
            agreement = packed.agreement(ways["varlen"](q, k, v), wanted)
        for backward in (False, True):
            if gpu:
                torch.cuda.empty_cache()
            runs = {name: packed.run(way, backward) for name, way in ways.items()}
            if gpu:
                taken = interleaved(runs, repetitions=args.repetitions, device=device, seconds=args.seconds)
            else:
                taken = {name: [] for name in runs}
                for name in [*runs] * args.repetitions:
                    taken[name].append(own_time(runs[name]))
            seconds = {name: min(times) for name, times in taken.items()}
            documents = _documents.Documents(tuple(each), tuple(each))
            groups = _documents.merged(documents, _documents.alike(documents), args.causal, q.transpose(0, 1))
            yield {
                "theme": "varlen",
                "method": spec,
                "pass": "forward+backward" if backward else "forward",
                "causal": args.causal,
                "documents": len(each),
                "shortest": min(each),
                "longest": max(each),
                "tokens": sum(each),
                "heads": heads,
                "dim": DIM,
                "dtype": str(dtype).removeprefix("torch."),
                "batches": len(groups),
                "slots": sum(len(group) * max(each[i] for i in group) for group in groups),
                "padded_slots": len(each) * max(each),
                "seconds": seconds,
                "clock": "device events" if gpu else "the process's own time",
                **agreement,
                "met": seconds["varlen"] <= seconds["padded"],
                "environment": environment(device),
            }


def line(row: Row) -> str:
    times = "  ".join(f"{name} {seconds * 1e3:9.1f} ms" for name, seconds in row["seconds"].items())
    gain = row["seconds"]["padded"] / row["seconds"]["varlen"]
    verdict = "pass" if row["met"] else "FAIL"
    bits = f"{row['documents_equal_to_the_bit']} of {row['documents']} to the bit, off by {row['difference']:.1e}"
    return f"{row['method']:<10} {row['pass']:<17} {times}  {gain:6.2f}× padding {verdict}  {bits}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--methods", nargs="+", default=["refined"])
    parser.add_argument("--documents", type=int, default=64)
    parser.add_argument("--shortest", type=int, default=10)
    parser.add_argument("--longest", type=int, default=8000)
    parser.add_argument("--even", action="store_true", help="lengths in equal steps, not in equal ratios")
    parser.add_argument("--heads", type=int, help="2 on a CPU, 16 on a GPU")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=60.0, help="no new turn after so long, on a GPU")
    parser.add_argument("--room", type=float, default=0.05, help="the largest difference that is still rounding")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    path = rows_path(args.out, "varlen", args.device)
    missed = 0
    for row in rows(args):
        append(path, row)
        print(line(row), flush=True)
        missed += not row["met"]
    print(f"rows in {path}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
