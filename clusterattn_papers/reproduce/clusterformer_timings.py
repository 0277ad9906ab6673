"""Time and memory against the length: ClusterFormer's Figures 3 and 4 and Table 7."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from clusterattn._rows import Row

from ..models import Positions, Stack
from ._curves import Curves, drawn_lines, spaced
from ._experiment import Table, pinned
from ._pace import Step, casting, forward_backward
from ._readings import GROUPED, PAPERS, in_paper, reading
from ._timing import REPLAYED, TIMED_LATER, Timing, TimingsConfig, against, ahead_from, curves, number, one, sizes_note

# label -> method. "written out" is exact attention with its matrix in memory, as the paper's own baseline had it.
MODELS = {
    "transformer (written out)": "exact",
    "transformer (SDPA)": "exact",
    "reformer": "reformer:rounds=4,chunk=32",
    "routing": "routing",  # its window follows the length, see _spec
    **{label: reading(label) for label in (PAPERS, *TIMED_LATER)},
    "clustered": "clustered:clusters=100",
    "improved": "improved:clusters=100,top=32",
    "refined": "refined:clusters=100,top=32",
}
# What configurations know: rows carry their fingerprint, and ClusterFormer's other readings came later.
BEFORE = tuple(label for label in MODELS if label not in TIMED_LATER)
TABLE7 = {  # length -> MiB, seconds of 1000 training steps; absent: more than the paper's GPU holds
    "transformer (written out)": {2500: (3271, 46.5), 5000: (7663, 127.6), 7500: (15519, 260.9)},
    "reformer": {
        2500: (2699, 30.7), 5000: (3807, 51.2), 7500: (4795, 72.3), 10000: (6067, 89.0), 15000: (9515, 135.0),
        25000: (15867, 252.1),
    },
    "routing": {
        2500: (2129, 24.8), 5000: (2467, 38.5), 7500: (2841, 58.5), 10000: (3189, 69.8), 15000: (3779, 114.9),
        25000: (5477, 207.2), 35000: (7451, 343.4), 45000: (9117, 490.1), 55000: (11397, 684.6),
    },
    "clusterformer": {
        2500: (2257, 30.2), 5000: (2689, 44.8), 7500: (3165, 60.4), 10000: (3623, 77.2), 15000: (4435, 115.4),
        25000: (6839, 197.1), 35000: (9647, 277.2), 45000: (12553, 375.6), 55000: (15695, 461.3),
    },
}  # fmt: skip
PUBLISHED_LENGTHS = (2500, 5000, 7500, 10000, 15000, 25000, 35000, 45000, 55000)
SAVED = {  # at 2000 tokens against the transformer, per cent: of memory, of training time
    "clusterformer": (53.8, 51.4), "routing": (60.8, 41.8), "reformer": (31.8, 14.4),
}  # fmt: skip
STEPS = 1000  # of which the ClusterFormer paper tells the time
WORDS, CLASSES = 20_000, 20


class TimedReader(nn.Module):
    """Words to classes, without padding: exact attention may then take its fastest kernel."""

    def __init__(self, method: str, config: TimingsConfig, length: int) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, config.dim), Positions(config.dim)
        self.stack = Stack(
            pinned(method),
            config.dim,
            config.heads,
            config.layers,
            length=length,
            feedforward=config.feedforward,
            dropout=0.0,
        )
        self.head = nn.Linear(config.dim, CLASSES)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x, auxiliary = self.stack(self.positions(self.words(ids)))
        return self.head(x.mean(1)), auxiliary


def _spec(label: str, n: int) -> str:
    """Routing with √n centroids that take √n tokens each, as its paper and ClusterFormer's have it."""
    return f"routing:window={max(round(n**0.5), 1)}" if label == "routing" else MODELS[label]


class ModelTiming(Timing):
    def step(self, label: str, n: int, config: TimingsConfig, device: torch.device, training: bool) -> Step:
        model = TimedReader(_spec(label, n), config, n).to(device).train(training)
        ids = torch.randint(WORDS, (config.batch, n), device=device)
        classes = torch.randint(CLASSES, (config.batch,), device=device)

        def loss() -> Tensor:
            with casting(device, config.precision):
                logits, auxiliary = model(ids)
                total: Tensor = nn.functional.cross_entropy(logits, classes) + auxiliary
            return total

        @torch.no_grad()
        def forward() -> object:
            with casting(device, config.precision):
                return model(ids)[0]

        return forward_backward(list(model.parameters()), loss) if training else forward

    def _shared_differences(self, config: TimingsConfig) -> list[str]:
        return [
            f"Random words instead of 20NEWS: time and memory depend on shapes alone. Batches of {config.batch}, "
            f"{config.precision.replace('no', 'fp32')}, no padding, no optimizer's step.",
            f"Times are those of {STEPS} steps, {STEPS} times the fastest of as many as fit into {config.seconds} s; "
            f"{REPLAYED}.",
            "Memory is the peak of torch's allocator, model included; the paper's is what its GPU reported.",
            "The paper's transformer writes its attention matrix out; torch's SDPA, which does not, stands beside it. "
            "Clustered, improved and refined (100 clusters) are added.",
            "Routing has √N centroids of √N tokens, clusterformer √N clusters, reformer 4 rounds with chunks of 32.",
            *(f"{label}: {GROUPED[label]}." for label in (PAPERS, *TIMED_LATER)),
            *sizes_note(config, (2, 300, 4)),
        ]


SMOKE: dict[str, Any] = {"batch": 2, "heads": 2, "dim": 16, "feedforward": 32, "seconds": 0.0}
READER: dict[str, Any] = {"heads": 4, "dim": 256, "feedforward": 1024, "layers": 2, "precision": "bf16"}
PAPER_READER: dict[str, Any] = {"heads": 4, "dim": 300, "feedforward": 1200, "layers": 2}


class Figure3(ModelTiming):
    name = "clusterformer-fig3"
    place = "Figure 3"
    about = "time of training and of inference against the length, up to 2000 words in batches of 20"
    passes = ("training", "inference")
    scales: ClassVar[dict[str, Any]] = {
        "smoke": TimingsConfig((48,), BEFORE, **SMOKE),
        "small": TimingsConfig((250, 500, 1000, 1500, 2000), BEFORE, batch=20, **READER),
        "paper": TimingsConfig(tuple(range(200, 2001, 200)), BEFORE, batch=20, seconds=5.0, **PAPER_READER),
    }
    key: ClassVar[str] = "seconds"
    unit: ClassVar[float] = STEPS
    words: ClassVar[str] = f"s for {STEPS} steps"

    def tables(self, rows: Sequence[Row], config: TimingsConfig) -> list[Table]:
        def cell(label: str, n: int, row: Row | None) -> str:
            value = self._units(row, self.key, self.unit)
            return "…" if row is None else "–" if value is None else number(value)

        made = [self._table(f"{which.capitalize()}, {self.words}", rows, config, which, cell) for which in self.passes]
        saved = Table(
            f"Saved against the transformer at {config.lengths[-1]} words, per cent (the paper's | ours)",
            ["Attention", *self.passes],
        )
        for label in config.labels[1:]:
            saved.rows.append([label, *(self._saved(rows, config, label, which) for which in self.passes)])
        saved.notes = ["Against the transformer whose attention matrix is written out; – means not told."]
        return [*made, saved]

    def _saved(self, rows: Sequence[Row], config: TimingsConfig, label: str, which: str) -> str:
        theirs = SAVED.get(in_paper(label), (None, None))[self.key == "seconds"] if which == "training" else None
        values = [
            self._units(one(rows, each, config.lengths[-1], which), self.key, 1.0) for each in (config.labels[0], label)
        ]
        ours = "…" if values[0] is None or values[1] is None else f"{100 * (1 - values[1] / values[0]):.1f}"
        return f"{'–' if theirs is None else theirs} | {ours}"

    def picture(self, rows: Sequence[Row], config: TimingsConfig) -> bytes | None:
        panels = [
            (f"{which}: {self.words}", curves(rows, config, which, lambda row: row[self.key] * self.unit, self.key))
            for which in self.passes
        ]
        return drawn_lines(panels)

    def differences(self, config: TimingsConfig) -> list[str]:
        return self._shared_differences(config)

    def findings(self, rows: Sequence[Row], config: TimingsConfig) -> list[str]:
        lines = []
        for which in self.passes:
            for other in config.labels[:2]:
                places = {label: ahead_from(rows, config, label, other, which) for label in config.labels[2:]}
                faster = [f"{label} from {spaced(n)} words" for label, n in places.items() if n]
                if any(n is not None for n in places.values()):
                    lines.append(f"{which}, faster than {other}: {', '.join(faster) or 'none, up to this length'}.")
        return lines


class Figure4(Figure3):
    name = "clusterformer-fig4"
    place = "Figure 4"
    about = "memory against the length, up to 2000 words in batches of 20"
    rows_from = "clusterformer-fig3"
    key = "memory_bytes"
    unit = 1 / 2**20
    words = "MiB"

    def findings(self, rows: Sequence[Row], config: TimingsConfig) -> list[str]:
        """The paper has the written out transformer only, for which the table says it."""
        peer, longest, lines = config.labels[1], config.lengths[-1], []
        for which in self.passes:
            times = against(rows, longest, config.labels[2:], peer, self.key, which)
            if times:
                words = ", ".join(f"{label} {each:.2f}" for label, each in times.items())
                lines.append(f"{which.capitalize()} at {spaced(longest)} words, times the memory of {peer}: {words}.")
        return lines


class Table7(ModelTiming):
    name = "clusterformer-table7"
    place = "Table 7"
    about = "memory and training time of ultra-long sequences: 2500 … 55 000 and beyond, in batches of 2"
    scales: ClassVar[dict[str, Any]] = {
        "smoke": TimingsConfig((64,), BEFORE, **SMOKE),
        "small": TimingsConfig((*PUBLISHED_LENGTHS, 100_000, 200_000), BEFORE, batch=2, **READER),
        "paper": TimingsConfig(PUBLISHED_LENGTHS, BEFORE, batch=2, seconds=10.0, **PAPER_READER),
    }

    def tables(self, rows: Sequence[Row], config: TimingsConfig) -> list[Table]:
        def column(key: str, unit: float, place: int) -> Callable[[str, int, Row | None], str]:
            def cell(label: str, n: int, row: Row | None) -> str:
                value = self._units(row, key, unit)
                ours = "…" if row is None else "–" if value is None else number(value)
                theirs = TABLE7.get(in_paper(label))
                if theirs is None or n not in PUBLISHED_LENGTHS:
                    return ours
                return f"{theirs[n][place] if n in theirs else '–'} | {ours}"

            return cell

        memory = self._table(
            "Memory, MiB (the paper's | ours)", rows, config, "training", column("memory_bytes", 2**-20, 0)
        )
        time = self._table(
            f"Training, s for {STEPS} steps (the paper's | ours)", rows, config, "training", column("seconds", STEPS, 1)
        )
        memory.notes = ["– means out of memory: 16 GB in the paper, all of this GPU here."]
        return [memory, time]

    def picture(self, rows: Sequence[Row], config: TimingsConfig) -> bytes | None:
        def drawn(key: str, unit: float) -> Curves:
            return curves(rows, config, "training", lambda row: row[key] * unit, key)

        return drawn_lines(
            [
                ("memory (MiB)", drawn("memory_bytes", 2**-20)),
                (f"training, s for {STEPS} steps", drawn("seconds", STEPS)),
            ]
        )

    def differences(self, config: TimingsConfig) -> list[str]:
        beyond = [n for n in config.lengths if n not in PUBLISHED_LENGTHS]
        more = f"{' and '.join(map(spaced, beyond))} tokens are added." if beyond else ""
        return [*self._shared_differences(config), *filter(None, [more])]

    def findings(self, rows: Sequence[Row], config: TimingsConfig) -> list[str]:
        lines = []
        peer = config.labels[1]
        both = [n for n in config.lengths if against(rows, n, config.labels[2:], peer)]
        if both:
            times = ", ".join(
                f"{label} {1 / each:.1f}" for label, each in against(rows, both[-1], config.labels[2:], peer).items()
            )
            lines.append(f"At {spaced(both[-1])} tokens, times as fast as {peer}: {times}.")
        failed = {
            label: [n for n in config.lengths if (row := one(rows, label, n, "training")) and "failed" in row]
            for label in config.labels
        }
        for label, lengths in failed.items():
            if lengths:
                lines.append(f"{label} runs out of memory at {', '.join(map(spaced, lengths))} tokens.")
        for label in config.labels[2:]:
            at = ahead_from(rows, config, label, config.labels[1])
            if at is not None:
                where = f"from {spaced(at)} tokens on" if at else "at no length measured"
                lines.append(f"{label} trains faster than {config.labels[1]} {where}.")
        return lines


EXPERIMENTS = (Figure3, Figure4, Table7)
