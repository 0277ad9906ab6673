"""Capture q, k, v of a few heads of TabPFN v1 reading MNIST: the long sample that `clusterattn compare` shows.

    python benchmarks/capture_long_sample.py clusterattn/data/tabpfn_mnist.safetensors [--prepared FOLDER]

The rows of the table are the tokens; train rows attend to each other. A head's q, k and v are linear maps of one hidden
state, so side by side they are nearly of low rank: each head is kept as 8-bit coordinates along its main directions,
`points`, with q, k, v = points @ basis + mean. Every head is cut off at the same share of its energy, the smallest that
fits the file. `answers` are what exact attention on the untouched q, k, v says for some queries: whoever reads the file
can tell what the rounding does. Needs `benchmarks/tabpfn_v1.py prepare` to have run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).parent))

from tabpfn_model import prepared, table

from clusterattn.measure import exact_answer, relative_error

LIMIT = 4 * 2**20 - 2**16  # bytes; the rest is for headers, means and answers
ASKED = 64  # queries that answers are kept for
SOURCE = (
    "TabPFN v1 (tabpfn 0.1 on PyPI, MIT) reading {rows} rows of MNIST (100 principal components), train rows over "
    "themselves; heads kept in 8 bits along their main directions"
)


@dataclass(frozen=True)
class Head:
    """q, k and v of one head side by side, taken apart: (n, 3d) = left · values · right, blocks of equal weight."""

    left: Tensor
    values: Tensor
    right: Tensor
    mean: Tensor

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor) -> Head:
        side_by_side = torch.cat([q, k, v], dim=1).double()
        mean = side_by_side.mean(0)
        centred = side_by_side - mean
        weight = torch.cat([block.norm().expand(block.shape[1]) for block in centred.split(q.shape[1], dim=1)])
        left, values, right = torch.linalg.svd(centred / weight, full_matrices=False)
        return cls(left, values, right * weight, mean)

    def rank(self, lost: float) -> int:
        """The fewest directions that leave out no more than this share of the energy."""
        energy = self.values.square()
        left_out = energy.flip(0).cumsum(0).flip(0) / energy.sum()
        return int((left_out > lost).sum())

    def size(self, rank: int) -> int:
        """Bytes of ``points`` and ``basis``."""
        return rank * (self.left.shape[0] + 2 * self.right.shape[1])

    def rounded(self, rank: int) -> dict[str, Tensor]:
        points = self.left[:, :rank] * self.values[:rank]
        scale = points.abs().amax(0) / 127
        return {
            "points": (points / scale).round().to(torch.int8),
            "basis": (self.right[:rank] * scale[:, None]).half(),
            "mean": self.mean.float(),
        }


def capture(folder: Path, rows: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(q, k, v) of the train rows in every layer, each (1 h n d) in fp32."""
    model, data, stored = prepared(folder, torch.float32)
    if stored != "fp32":
        raise SystemExit(f"wanted weights in fp32; got {stored}; try benchmarks/tabpfn_v1.py prepare")
    seen = []

    def record(q: Tensor, k: Tensor, v: Tensor, kind: str) -> Tensor:
        if kind == "train":
            seen.append((q, k, v))
        return scaled_dot_product_attention(q, k, v)

    model(table(data, rows, 1), record)
    return seen


def share_lost(heads: list[Head]) -> float:
    """The smallest share of the energy such that all heads, cut off there, fit the file."""
    least, most = 1e-9, 1.0
    for _ in range(50):
        lost = (least * most) ** 0.5
        fits = sum(head.size(head.rank(lost)) for head in heads) <= LIMIT - len(heads) * ASKED * 2**9
        least, most = (least, lost) if fits else (lost, most)
    return most


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--prepared", type=Path, default=Path(__file__).parent.parent / ".cache" / "tabpfn_v1")
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--heads", nargs="+", default=["3.0", "7.1", "11.2"], help="LAYER.HEAD, counted from 0")
    args = parser.parse_args()

    layers = capture(args.prepared, args.rows)
    at = [tuple(map(int, each.split("."))) for each in args.heads]
    real = [tuple(x[0, head] for x in layers[layer]) for layer, head in at]
    heads = [Head.of(*qkv) for qkv in real]
    lost = share_lost(heads)
    asked = torch.arange(0, args.rows, max(args.rows // ASKED, 1))
    tensors, errors = {}, []
    for j, (head, (q, k, v)) in enumerate(zip(heads, real, strict=True)):
        kept = head.rounded(head.rank(lost))
        truth = exact_answer(q[None, None, asked], k[None, None], v[None, None])[0, 0]
        again = (kept["points"].float() @ kept["basis"].float() + kept["mean"]).split(q.shape[1], dim=1)
        said = exact_answer(again[0][None, None, asked], again[1][None, None], again[2][None, None])[0, 0]
        errors.append(relative_error(said[None, None], truth[None, None]))
        tensors |= {f"{name}.{j}": x.contiguous() for name, x in {**kept, "answers": truth.float()}.items()}
        print(f"layer {at[j][0]}, head {at[j][1]}: {kept['points'].shape[1]} directions, output error {errors[-1]:.4f}")
    metadata = {
        "source": SOURCE.format(rows=args.rows),
        "heads": json.dumps([f"layer {layer}, head {head}" for layer, head in at]),
        "batch": json.dumps(["MNIST"]),
        "rounding": json.dumps([round(error, 5) for error in errors]),
    }
    whole = args.out.with_suffix(".tmp")
    save_file(tensors, whole, metadata=metadata)
    whole.chmod(0o644)  # save_file makes it private
    os.replace(whole, args.out)
    print(f"{args.out}: {args.out.stat().st_size / 2**20:.2f} MiB")


if __name__ == "__main__":
    main()
