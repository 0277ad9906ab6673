"""Time and memory against the length: Clustered attention's Figure 4, ClusterFormer's Figures 3 and 4 and Table 7."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from clusterattn._rows import Row
from clusterattn.nn import EncoderLayer

from ..models import Positions, Stack
from ._curves import Curves, drawn_lines, spaced
from ._experiment import Cell, Context, Experiment, Table, pinned
from ._pace import Step, casting, forward_backward, measured
from ._readings import CHOSEN, PAPERS, in_paper, reading

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
MODELS = {
    "transformer (written out)": "exact",
    "transformer (SDPA)": "exact",
    "reformer": "reformer:rounds=4,chunk=32",
    "routing": "routing",  # its window follows the length, see _spec
    **{label: reading(label) for label in (PAPERS, CHOSEN)},
    "clustered": "clustered:clusters=100",
    "improved": "improved:clusters=100,top=32",
    "refined": "refined:clusters=100,top=32",
}
# What configurations know: rows carry their fingerprint, and the chosen reading of ClusterFormer came later.
BEFORE = tuple(label for label in MODELS if label != CHOSEN)
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
REPLAYED = "on a GPU replayed as CUDA graphs, so without what Python takes to launch kernels"
STEPS = 1000  # of which the ClusterFormer paper tells the time
WORDS, CLASSES = 20_000, 20


@dataclass(frozen=True)
class TimingsConfig:
    lengths: tuple[int, ...]
    methods: tuple[str, ...]
    batch: int = 0  # 0: as many sequences as make ``tokens``
    tokens: int = 32768
    heads: int = 6
    dim: int = 384
    feedforward: int = 1536
    layers: int = 1
    seconds: float = 0.15  # for each measurement, at least one call after the warm-up
    precision: str = "no"  # or "bf16", by autocast

    @property
    def labels(self) -> tuple[str, ...]:
        """The methods, and behind ClusterFormer's first reading the chosen one."""
        return tuple(each for label in self.methods for each in ((PAPERS, CHOSEN) if label == PAPERS else (label,)))


# ---------------------------------------------------------------------------------------------------- measuring


def _kernel(label: str) -> Any:
    return sdpa_kernel(SDPBackend.MATH) if "written out" in label else contextlib.nullcontext()


class Timing(Experiment):
    """Cells that measure time: one after the other, nothing beside them."""

    def cells(self, config: TimingsConfig) -> list[Cell]:
        return [
            Cell(f"{method}, {n} tokens", {"method": method, "n": n}, alone=True)
            for n in config.lengths
            for method in config.labels
        ]

    def run(self, cell: Cell, config: TimingsConfig, context: Context) -> list[Row]:
        label, n = cell.settings["method"], cell.settings["n"]
        rows: list[Row] = []
        for which in self.passes:
            context.tick(which, len(self.passes), len(rows))

            def make(which: str = which) -> Step:
                torch.manual_seed(0)
                return self.step(label, n, config, context.device, which == "training")

            with _kernel(label):
                answer = measured(make, context.device, config.seconds)
            rows.append({"pass": which, "batch": _batch(config, n), **answer})
        return rows

    passes: ClassVar[tuple[str, ...]] = ("training",)

    def step(self, label: str, n: int, config: TimingsConfig, device: torch.device, training: bool) -> Step:
        raise NotImplementedError

    def _units(self, row: Row | None, key: str, unit: float) -> float | None:
        return None if row is None or row.get("failed") or not row.get(key) else float(row[key]) * unit

    def _table(
        self,
        title: str,
        rows: Sequence[Row],
        config: TimingsConfig,
        which: str,
        cell: Callable[[str, int, Row | None], str],
    ) -> Table:
        table = Table(title, ["Attention", *(spaced(n) for n in config.lengths)])
        for label in config.labels:
            table.rows.append([label, *(cell(label, n, _one(rows, label, n, which)) for n in config.lengths)])
        return table


def _one(rows: Sequence[Row], label: str, n: int, which: str) -> Row | None:
    return next((row for row in rows if (row["method"], row["n"], row["pass"]) == (label, n, which)), None)


def _curves(rows: Sequence[Row], config: TimingsConfig, which: str, height: Callable[[Row], float], key: str) -> Curves:
    found = {}
    for label in config.methods:
        mine = [row for n in config.lengths if (row := _one(rows, label, n, which)) and row.get(key)]
        if mine:
            found[label] = [row["n"] for row in mine], [height(row) for row in mine]
    return found


def _batch(config: TimingsConfig, n: int) -> int:
    return config.batch or max(config.tokens // n, 1)


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


# ---------------------------------------------------------------------------------------------------- Figure 4


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
        x = torch.randn(_batch(config, n), n, config.dim, device=device, requires_grad=True)

        def loss() -> Tensor:
            with casting(device, config.precision):
                total: Tensor = layer(x).square().mean()
            return total

        return forward_backward([x, *layer.parameters()], loss)

    def tables(self, rows: Sequence[Row], config: TimingsConfig) -> list[Table]:
        def per_element(key: str, unit: float) -> Callable[[str, int, Row | None], str]:
            def cell(label: str, n: int, row: Row | None) -> str:
                value = self._units(row, key, unit)
                return "…" if row is None else "–" if value is None else _number(value / (row["batch"] * n))

            return cell

        time = self._table("Time per element, µs", rows, config, "training", per_element("seconds", 1e6))
        memory = self._table("Memory per element, KiB", rows, config, "training", per_element("memory_bytes", 1 / 1024))
        time.notes = ["Forward and backward; – means out of memory. The paper shows curves, without numbers."]
        return [time, memory]

    def picture(self, rows: Sequence[Row], config: TimingsConfig) -> bytes | None:
        def drawn(key: str, unit: float) -> Curves:
            return _curves(rows, config, "training", lambda row: row[key] * unit / (row["batch"] * row["n"]), key)

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
            *_sizes_note(config, (1, 384, 6)),
        ]

    def findings(self, rows: Sequence[Row], config: TimingsConfig) -> list[str]:
        lines = []
        for label in ("clustered", "improved", "refined"):
            for full, paper in (("full (written out)", {"clustered": 1000, "improved": 2000}), ("full (SDPA)", {})):
                at = _ahead_from(rows, config, label, full)
                if at is not None:
                    theirs = f" (the paper: about {paper[label]})" if label in paper else ""
                    where = f"from {spaced(at)} tokens on" if at else "at no length measured"
                    lines.append(f"{label} is faster than {full} {where}{theirs}.")
        return lines


def _ahead_from(
    rows: Sequence[Row], config: TimingsConfig, label: str, other: str, which: str = "training"
) -> int | None:
    """The least length from which on a method is faster wherever both ran; 0: never; None: nothing to compare."""
    pairs = [(n, _one(rows, label, n, which), _one(rows, other, n, which)) for n in config.lengths]
    faster = {
        n: "failed" in theirs or ours["seconds"] < theirs["seconds"]
        for n, ours, theirs in pairs
        if ours and theirs and "failed" not in ours
    }
    if not faster:
        return None
    slow = [n for n, yes in faster.items() if not yes]
    after = [n for n in faster if not slow or n > slow[-1]]
    return after[0] if after else 0


# ---------------------------------------------------------------------------------------------------- ClusterFormer


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
            f"{PAPERS} has one grouping for all heads, {CHOSEN} one for each.",
            *_sizes_note(config, (2, 300, 4)),
        ]


def _sizes_note(config: TimingsConfig, paper: tuple[int, int, int]) -> list[str]:
    ours = (config.layers, config.dim, config.heads)
    if ours == paper:
        return []
    return ["{} layer(s) of width {} with {} heads; the paper has {}, {} and {}.".format(*ours, *paper)]


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
            return "…" if row is None else "–" if value is None else _number(value)

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
            self._units(_one(rows, each, config.lengths[-1], which), self.key, 1.0)
            for each in (config.labels[0], label)
        ]
        ours = "…" if values[0] is None or values[1] is None else f"{100 * (1 - values[1] / values[0]):.1f}"
        return f"{'–' if theirs is None else theirs} | {ours}"

    def picture(self, rows: Sequence[Row], config: TimingsConfig) -> bytes | None:
        panels = [
            (f"{which}: {self.words}", _curves(rows, config, which, lambda row: row[self.key] * self.unit, self.key))
            for which in self.passes
        ]
        return drawn_lines(panels)

    def differences(self, config: TimingsConfig) -> list[str]:
        return self._shared_differences(config)

    def findings(self, rows: Sequence[Row], config: TimingsConfig) -> list[str]:
        lines = []
        for which in self.passes:
            for other in config.labels[:2]:
                places = {label: _ahead_from(rows, config, label, other, which) for label in config.labels[2:]}
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
            times = _against(rows, longest, config.labels[2:], peer, self.key, which)
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
                ours = "…" if row is None else "–" if value is None else _number(value)
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
            return _curves(rows, config, "training", lambda row: row[key] * unit, key)

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
        both = [n for n in config.lengths if _against(rows, n, config.labels[2:], peer)]
        if both:
            times = ", ".join(
                f"{label} {1 / each:.1f}" for label, each in _against(rows, both[-1], config.labels[2:], peer).items()
            )
            lines.append(f"At {spaced(both[-1])} tokens, times as fast as {peer}: {times}.")
        failed = {
            label: [n for n in config.lengths if (row := _one(rows, label, n, "training")) and "failed" in row]
            for label in config.labels
        }
        for label, lengths in failed.items():
            if lengths:
                lines.append(f"{label} runs out of memory at {', '.join(map(spaced, lengths))} tokens.")
        for label in config.labels[2:]:
            at = _ahead_from(rows, config, label, config.labels[1])
            if at is not None:
                where = f"from {spaced(at)} tokens on" if at else "at no length measured"
                lines.append(f"{label} trains faster than {config.labels[1]} {where}.")
        return lines


def _against(
    rows: Sequence[Row], n: int, labels: Sequence[str], peer: str, key: str = "seconds", which: str = "training"
) -> dict[str, float]:
    """How many times the peer's seconds or bytes each takes, where both were measured; the least first."""
    taken = {
        label: float(row[key]) for label in (*labels, peer) if (row := _one(rows, label, n, which)) and row.get(key)
    }
    mine = sorted((label for label in labels if label in taken), key=taken.__getitem__)
    return {label: taken[label] / taken[peer] for label in mine} if peer in taken else {}


EXPERIMENTS = (ClusteredFigure4, Figure3, Figure4, Table7)
