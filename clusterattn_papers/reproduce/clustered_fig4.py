"""Time and memory against the length: Clustered attention's Figure 4."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from clusterattn._rows import Row
from clusterattn.nn import EncoderLayer

from ._curves import Curves, drawn_lines, spaced
from ._experiment import Table, pinned
from ._pace import Step, casting, forward_backward
from ._timing import REPLAYED, Timing, TimingsConfig, ahead_from, batch_of, curves, number, sizes_note

# label -> method. "written out" is exact attention with its matrix in memory, as the papers' own baseline had it.
LAYER = {
    "full (written out)": "exact",
    "full (SDPA)": "exact",
    "clustered": "clustered:clusters=100",
    "improved": "improved:clusters=100,top=32",
    "refined": "refined:clusters=100,top=32",
    "lsh-1": "reformer:rounds=1,chunk=32",
    "lsh-4": "reformer:rounds=4,chunk=32",
    "smyrf": "smyrf:rounds=4",
}


class ClusteredFigure4(Timing):
    name = "clustered-fig4"
    place = "Figure 4"
    about = "time and memory per element against the length, 2^9 … 2^15: one layer, forward and backward"
    scales: ClassVar[dict[str, Any]] = {
        "smoke": TimingsConfig((64, 128), tuple(LAYER), tokens=128, heads=2, dim=16, feedforward=32, seconds=0.0),
        "small": TimingsConfig(tuple(2**each for each in range(9, 16)), tuple(LAYER), precision="bf16"),
        "paper": TimingsConfig(tuple(2**each for each in range(9, 16)), tuple(LAYER), seconds=3.0),
    }

    def step(self, label: str, n: int, config: TimingsConfig, device: torch.device, training: bool) -> Step:
        layer = EncoderLayer(
            config.dim, config.heads, pinned(LAYER[label]), feedforward=config.feedforward, dropout=0.0, device=device
        )
        x = torch.randn(batch_of(config, n), n, config.dim, device=device, requires_grad=True)

        def loss() -> Tensor:
            with casting(device, config.precision):
                total: Tensor = layer(x).square().mean()
            return total

        return forward_backward([x, *layer.parameters()], loss)

    def tables(self, rows: Sequence[Row], config: TimingsConfig) -> list[Table]:
        def per_element(key: str, unit: float) -> Callable[[str, int, Row | None], str]:
            def cell(label: str, n: int, row: Row | None) -> str:
                value = self._units(row, key, unit)
                return "…" if row is None else "–" if value is None else number(value / (row["batch"] * n))

            return cell

        time = self._table("Time per element, µs", rows, config, "training", per_element("seconds", 1e6))
        memory = self._table("Memory per element, KiB", rows, config, "training", per_element("memory_bytes", 1 / 1024))
        time.notes = ["Forward and backward; – means out of memory. The paper shows curves, without numbers."]
        return [time, memory]

    def picture(self, rows: Sequence[Row], config: TimingsConfig) -> bytes | None:
        def drawn(key: str, unit: float) -> Curves:
            return curves(rows, config, "training", lambda row: row[key] * unit / (row["batch"] * row["n"]), key)

        return drawn_lines(
            [
                ("time per element (µs)", drawn("seconds", 1e6)),
                ("memory per element (KiB)", drawn("memory_bytes", 1 / 1024)),
            ]
        )

    def differences(self, config: TimingsConfig) -> list[str]:
        return [
            f"Batches of {spaced(config.tokens)} tokens where the paper takes the largest that fits; "
            f"{config.precision.replace('no', 'fp32')}; {REPLAYED}.",
            "The paper's full attention writes its matrix out; torch's SDPA, which does not, stands beside it.",
            f"Each call is repeated for {config.seconds} s or once. Refined and smyrf are added.",
            *sizes_note(config, (1, 384, 6)),
        ]

    def findings(self, rows: Sequence[Row], config: TimingsConfig) -> list[str]:
        lines = []
        for label in ("clustered", "improved", "refined"):
            for full, paper in (("full (written out)", {"clustered": 1000, "improved": 2000}), ("full (SDPA)", {})):
                at = ahead_from(rows, config, label, full)
                if at is not None:
                    theirs = f" (the paper: about {paper[label]})" if label in paper else ""
                    where = f"from {spaced(at)} tokens on" if at else "at no length measured"
                    lines.append(f"{label} is faster than {full} {where}{theirs}.")
        return lines


EXPERIMENTS = (ClusteredFigure4,)
