"""ClusterFormer, Table 6: MNIST by self-organising map, k-means, and the paper's neural clustering by itself."""

from __future__ import annotations

import functools
import gzip
import math
import statistics
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from clusterattn._errors import bad_value
from clusterattn._rows import Row
from clusterattn.measure import plots
from clusterattn.measure.words import counted

from ..clustering import NeuralClustering, spread_out
from ..tasks.files import inside
from ._experiment import Cell, Context, Experiment, Table, apart, beside, chosen, lead

PUBLISHED = {  # per cent
    "som": {10: 59.8, 50: 80.9, 100: 87.8, 200: 91.2, 300: 93.1},
    "kmeans": {10: 59.2, 50: 82.5, 100: 87.7, 200: 90.7, 300: 92.0},
    "neural": {10: 60.7, 50: 82.5, 100: 90.1, 200: 91.8, 300: 93.6},
}
WITH_EQUATIONS = "assignment and update as in eqs. 2 to 4, cosine,"
SAYS = {
    "som": "SOM",
    "kmeans": "k-means",
    "spherical": "k-means of unit vectors",
    "neural": "neural clustering",
    "printed": f"neural clustering, {WITH_EQUATIONS[:-1]}",
}
LOOKS = {  # ClusterFormer's own clustering wears its colour; what is no attention at all is grey
    "som": ("#AAAAAA", "^", "-"),
    "kmeans": ("#555555", "s", "-"),
    "spherical": ("#555555", "D", ":"),
    "neural": (*plots.style_of("clusterformer"), "-"),
    "printed": (*plots.style_of("clusterformer"), ":"),
}
CELLS = SAYS | {"printed": "neural clustering, eqs. 2 to 6 as printed"}  # names that rows on disk go by
START_POOL = 4096  # points among which k-means++ looks for its starts, as in NeuralClustering

Clusters = Callable[[Tensor], Tensor]  # points (n features) -> labels (n)


class Images(NamedTuple):
    """Points (n pixels) in [0, 1] and their classes."""

    train: Tensor
    train_classes: Tensor
    test: Tensor
    test_classes: Tensor


@dataclass(frozen=True)
class MnistConfig:
    clusters: tuple[int, ...] = (10, 50, 100, 200, 300)
    methods: tuple[str, ...] = tuple(SAYS)
    seeds: int = 5  # three do not tell neural clustering from k-means at k = 100
    steps: int = 400  # of neural clustering
    rounds: int = 60  # at most, of k-means and of the map, each over all points
    invented: int = 0  # so many invented images instead of MNIST


class Table6(Experiment):
    name = "clusterformer-table6"
    place = "Table 6"
    about = "clustering accuracy on MNIST: SOM, k-means, neural clustering; k = 10 … 300"
    needs = ("images",)
    scales: ClassVar[dict[str, Any]] = {
        "smoke": MnistConfig(clusters=(4, 12), seeds=2, steps=20, rounds=5, invented=400),
        "small": MnistConfig(),
        "paper": MnistConfig(),
    }

    def cells(self, config: MnistConfig) -> list[Cell]:
        return [
            Cell(f"{CELLS[method]}, k={k}, seed {seed}", {"method": method, "k": k, "seed": seed}, 1 + k / 100)
            for k in config.clusters
            for method in config.methods
            for seed in range(config.seeds)
        ]

    def run(self, cell: Cell, config: MnistConfig, context: Context) -> list[Row]:
        data = invented(config.invented) if config.invented else mnist(context.folder("images"))
        data = Images(*(each.to(context.device) for each in data))
        method, k, seed = (cell.settings[name] for name in ("method", "k", "seed"))
        started = time.perf_counter()
        assign = _fitted(method, data.train, k, seed, config)
        train, test = accuracies(assign, data, k)  # the votes come back to the CPU: the device has finished
        return [{"accuracy": test, "accuracy_train": train, "seconds": time.perf_counter() - started}]

    def tables(self, rows: Sequence[Row], config: MnistConfig) -> list[Table]:
        made = []
        for key, title in (("accuracy", "test images"), ("accuracy_train", "training images")):
            theirs = "the paper's | ours" if key == "accuracy" else "ours"
            table = Table(
                f"Clustering accuracy on {title}, per cent ({theirs})",
                ["Clusters", *(SAYS[method] for method in config.methods)],
            )
            for k in config.clusters:
                cells = []
                for method in config.methods:
                    ours = chosen(rows, key, method=method, k=k)
                    both = beside(PUBLISHED.get(method, {}).get(k), ours, times=100)
                    cells.append(both if key == "accuracy" and method in PUBLISHED else both.partition("| ")[2])
                table.rows.append([f"k = {k}", *cells])
            made.append(table)
        made[0].notes = ["Each cluster says the class that most of its training images have. ± over seeds."]
        return made

    def picture(self, rows: Sequence[Row], config: MnistConfig) -> bytes | None:
        """Accuracy against k, ours with the spread over seeds, the paper's hollow."""
        with plots.rules():
            figure = plots.canvas(9.2, 4.6)
            axis = figure.subplots()
            for method in config.methods:
                colour, marker, dotted = LOOKS[method]
                ours = {k: found for k in config.clusters if (found := chosen(rows, "accuracy", method=method, k=k))}
                if ours:
                    heights = [100 * statistics.fmean(each) for each in ours.values()]
                    off = [100 * statistics.stdev(each) if len(each) > 1 else 0 for each in ours.values()]
                    axis.errorbar(
                        list(ours),
                        heights,
                        off,
                        color=colour,
                        marker=marker,
                        ls=dotted,
                        ms=5,
                        lw=1.5,
                        capsize=2,
                        label=textwrap.fill(SAYS[method], 34),
                    )
                theirs = {k: each for k, each in PUBLISHED.get(method, {}).items() if k in ours}
                axis.plot(list(theirs), list(theirs.values()), "s", mfc="none", mec=colour, ms=9)
            axis.plot([], [], "s", mfc="none", mec="#555555", ms=8, label="the paper's")
            axis.set(xlabel="clusters", ylabel="accuracy on test images (%)", title="Clusters that vote on MNIST")
            axis.grid(True)
            figure.legend(loc="outside right upper")
            return plots.as_png(figure)

    def differences(self, config: MnistConfig) -> list[str]:
        lines = [
            "The paper does not say how clusters are scored: here each takes the class most common among its training "
            "images, and accuracy is that of the test images. Classes are used for nothing else.",
            f"Neural clustering has {counted(config.steps, 'step')}, k-means (from k-means++ starts) and the map at "
            f"most {config.rounds} passes; the paper gives neither.",
            "Neural clustering compares by cosine, keeps what is in the data by a loss of its own, assigns points to "
            "the nearest centroid, and trains the centroids themselves. The last column assigns and updates as eqs. 2 "
            "to 4 have it, still by cosine and with that loss; the paper's similarity is the inner product "
            "(NeuralClustering says what is wrong with both).",
            "k-means of unit vectors is added: what the cosine alone brings, without anything neural.",
        ]
        return lines + (["Invented images, not MNIST."] if config.invented else [])

    def findings(self, rows: Sequence[Row], config: MnistConfig) -> list[str]:
        def leads(k: int, one: str, other: str) -> list[float]:
            return apart(rows, "accuracy", one, other, k=k)

        lines = []
        for other in ("kmeans", "som", "spherical"):
            found = {k: each for k in config.clusters if (each := leads(k, "neural", other))}
            texts = [
                f"{text} at k = {k}" + (f" ({verdict})" if verdict else "")
                for k, each in found.items()
                for text, verdict in [lead(each)]
            ]
            if texts:
                lines.append(f"Neural clustering against {SAYS[other]}, points of test accuracy: {', '.join(texts)}.")
            theirs = {k: PUBLISHED["neural"][k] - paper for k, paper in PUBLISHED.get(other, {}).items()}
            behind = [k for k, each in found.items() if theirs.get(k, 0) > 0 and statistics.fmean(each) <= 0]
            if behind:
                lines.append(f"Unlike in the paper, it is not ahead of {SAYS[other]} at k = {_listed(behind)}.")
        worse = [k for k in config.clusters if lead(leads(k, "printed", "kmeans"))[1] == "behind"]
        if worse:
            lines.append(f"With {WITH_EQUATIONS} it falls behind k-means at k = {_listed(worse)}.")
        return lines


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


# ---------------------------------------------------------------------------------------------------- the methods


def _fitted(method: str, x: Tensor, k: int, seed: int, config: MnistConfig) -> Clusters:
    if method in ("neural", "printed"):
        return NeuralClustering(k, steps=config.steps, seed=seed, printed=method == "printed").fit(x).predict
    if method == "som":
        return _nearest(som(x, k, config.rounds, seed))
    unit = method == "spherical"
    centres = kmeans(F.normalize(x, dim=-1) if unit else x, k, config.rounds, seed, unit)
    return _nearest(centres, unit)


def _nearest(centres: Tensor, unit: bool = False) -> Clusters:
    def assign(x: Tensor) -> Tensor:
        x = F.normalize(x, dim=-1) if unit else x
        return (x @ centres.T - centres.square().sum(-1) / 2).argmax(-1)

    return assign


def kmeans(x: Tensor, k: int, rounds: int, seed: int, unit: bool = False) -> Tensor:
    """Lloyd's algorithm from k-means++ starts, until nobody moves; an empty cluster takes a point by lot.

    unit   on the sphere: centres are normalised (spherical k-means)
    """
    dice = torch.Generator().manual_seed(seed)
    centres = spread_out(x[torch.randperm(len(x), generator=dice)[:START_POOL].to(x.device)], k, dice)
    before = None
    for _ in range(rounds):
        labels = _nearest(centres)(x)
        if before is not None and torch.equal(labels, before):
            break
        sums, counts = _by_cluster(x, labels, k)
        spare = x[torch.randint(len(x), (k,), generator=dice).to(x.device)]
        centres = torch.where(counts > 0, sums / counts.clamp(min=1), spare)
        centres, before = F.normalize(centres, dim=-1) if unit else centres, labels
    return centres


def som(x: Tensor, k: int, rounds: int, seed: int, widths: tuple[float, float] = (0.25, 0.2)) -> Tensor:
    """Kohonen's map on a grid as square as k allows, in its batch form: each centre is the mean of all points, weighted
    by how near their best centre lies on the grid. The neighbourhood shrinks from a share of the grid's longer side
    (the first of ``widths``) to a part of the distance between two neighbours (the second)."""
    rows = max(each for each in range(1, math.isqrt(k) + 1) if k % each == 0)
    spots = torch.cartesian_prod(torch.arange(rows), torch.arange(k // rows)).to(x)
    apart = torch.cdist(spots, spots).square()
    dice = torch.Generator().manual_seed(seed)
    centres = x[torch.randperm(len(x), generator=dice)[:k].to(x.device)]
    first, last = max(widths[0] * (k // rows), 1.0), widths[1]
    for at in range(rounds):
        width = first * (last / first) ** (at / max(rounds - 1, 1))
        near = torch.exp(-apart / (2 * width**2))
        sums, counts = _by_cluster(x, _nearest(centres)(x), k)
        centres = torch.where(near @ counts > 1e-6, near @ sums / (near @ counts).clamp(min=1e-6), centres)
    return centres


def _by_cluster(x: Tensor, labels: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Sums (k features) and counts (k 1)."""
    sums = x.new_zeros(k, x.shape[1]).index_add_(0, labels, x)
    return sums, torch.bincount(labels, minlength=k).to(x).unsqueeze(1)


def accuracies(assign: Clusters, data: Images, k: int) -> tuple[float, float]:
    """Each cluster says the class most common among its training points: how often that is right, train and test.

    A cluster without training points says class 0."""
    labels, classes = assign(data.train), data.train_classes
    kinds = int(classes.max()) + 1
    votes = torch.bincount(labels * kinds + classes, minlength=k * kinds).view(k, kinds).argmax(-1)
    right = (votes[labels] == classes), (votes[assign(data.test)] == data.test_classes)
    return float(right[0].float().mean()), float(right[1].float().mean())


# ---------------------------------------------------------------------------------------------------- the images


@functools.lru_cache(maxsize=1)
def mnist(folder: Path) -> Images:
    def part(name: str) -> tuple[Tensor, Tensor]:
        pixels, classes = (read_idx(inside(folder, f"{name}-{kind}*")) for kind in ("images-idx3", "labels-idx1"))
        return pixels.flatten(1).float() / 255, classes.long()

    return Images(*part("train"), *part("t10k"))


def read_idx(path: Path) -> Tensor:
    """An idx file of bytes, plain or gzipped."""
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if len(raw) < 4 or raw[:3] != b"\0\0\x08":
        raise bad_value("an idx file of bytes (0 0 8)", f"{path.name} begins with {raw[:3]!r}", "MNIST in idx form")
    shape = [int.from_bytes(raw[at : at + 4], "big") for at in range(4, 4 + 4 * raw[3], 4)]
    if len(raw) != 4 + 4 * len(shape) + math.prod(shape):
        raise bad_value(f"{math.prod(shape)} bytes of data", f"{len(raw)} bytes in {path.name}", "a whole file")
    return torch.frombuffer(bytearray(raw[4 + 4 * len(shape) :]), dtype=torch.uint8).view(shape)


def invented(count: int) -> Images:
    """Images of 8 x 8 in four classes of three styles each, with noise and different strengths."""
    dice = torch.Generator().manual_seed(0)
    styles = torch.rand(4, 3, 64, generator=dice)

    def part() -> tuple[Tensor, Tensor]:
        classes, style = (torch.randint(each, (count,), generator=dice) for each in (4, 3))
        strength = 0.3 + 0.7 * torch.rand(count, 1, generator=dice)
        noise = 0.1 * torch.rand(count, 64, generator=dice)
        return (styles[classes, style] + noise) * strength, classes

    return Images(*part(), *part())


EXPERIMENTS = (Table6,)
