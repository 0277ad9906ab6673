"""Pictures of the clusters of a model, as PNG bytes."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from clusterattn._extras import need
from clusterattn.measure.plots import CLUSTER_COLOURS, as_png, canvas, rules
from clusterattn.measure.plots_model import tails

from .clusters import ClusterReport, typical

TOKENS = 48  # of the first sequence, in the picture of single tokens
WRITTEN_TICKS = 24  # layers that are all named on an axis
PANELS = {
    "again": ("another draw of the same head", "adjusted Rand index"),
    "token": ("tokens of a cluster that are the same", "times as often as any two"),
    "kind": ("tokens of a cluster of one kind", "times as often as any two"),
    "looks": ("queries of a cluster with one best key", "times as often as any two"),
    "near": ("distance of two tokens of a cluster", "any two tokens: 1"),
    "largest": ("the largest cluster", "share of the tokens"),
}


def agreement(report: ClusterReport) -> bytes:
    """Every head with every other, layer by layer; and the mean of it by how far layers are apart."""
    l, h = report.agreement.shape[:2]
    names = tails(report.layers)
    with rules():
        figure = canvas(11.2, 5.2)
        left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
        grid = report.agreement.reshape(l * h, l * h).clone().fill_diagonal_(float("nan"))
        high = max(float(grid.nan_to_num(0).max()), 0.05)
        image = left.imshow(grid.numpy(), cmap="viridis", vmin=0, vmax=high, interpolation="nearest")
        for edge in range(1, l):
            left.axhline(edge * h - 0.5, color="white", lw=0.6)
            left.axvline(edge * h - 0.5, color="white", lw=0.6)
        every = -(-l // WRITTEN_TICKS)
        middles = [at * h + (h - 1) / 2 for at in range(0, l, every)]
        left.set_xticks(middles, names[::every], size=8, rotation=90 if l > 6 else 0)
        left.set_yticks(middles, names[::every], size=8)
        left.tick_params(length=0)
        left.set_title("Agreement of any two heads")
        bar = figure.colorbar(image, ax=left, fraction=0.046, pad=0.02)
        bar.set_label("adjusted Rand index: 0 chance, 1 the same clusters")
        bar.outline.set_visible(False)

        distances = list(range(1, l))
        mean = [float(torch.stack([report.agreement[at, :, at + d] for at in range(l - d)]).mean()) for d in distances]
        best = [float(report.across(d).mean()) for d in distances]
        if distances:
            right.plot(distances, best, color="#D55E00", marker="D", label="the head that fits best")
            right.plot(distances, mean, color="#0072B2", marker="s", label="any two heads")
        if h > 1:
            inside = float(report.within().mean())
            right.scatter([0], [inside], color="#0072B2", marker="o", zorder=3, label="two heads of one layer")
        right.axhline(float(report.heads["again"].mean()), color="black", ls=(0, (4, 3)), lw=1)
        right.annotate(
            "the same head, another draw",
            (1, float(report.heads["again"].mean())),
            xycoords=("axes fraction", "data"),
            xytext=(-2, 3),
            textcoords="offset points",
            ha="right",
            size=8,
        )
        right.set(title="Do clusters persist?", xlabel="layers apart", ylabel="adjusted Rand index")
        right.set_ylim(bottom=min(0.0, *mean, 0.0) if mean else 0.0)
        right.grid(True)
        right.legend(loc="best")
        return as_png(figure)


def holds(report: ClusterReport) -> bytes:
    """What clusters hold: a panel for each figure, heads across, layers down."""
    shown = {name: words for name, words in PANELS.items() if name in report.heads}
    l, h = report.agreement.shape[:2]
    names = tails(report.layers)
    with rules():
        across = 3
        down = -(-len(shown) // across)
        figure = canvas(1.5 + across * max(0.3 * h + 1.1, 2.9), down * max(0.26 * l + 1.3, 2.4))
        axes = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True)
        for axis in axes.flat[len(shown) :]:
            axis.set_axis_off()
        for axis, (name, (title, unit)) in zip(axes.flat, shown.items(), strict=False):
            values = report.heads[name]
            image = axis.imshow(values.numpy(), cmap="cividis", aspect="auto", interpolation="nearest")
            axis.set_title(title, size=9)
            axis.set_xticks(range(0, h, 1 if h <= 16 else 4))
            every = -(-l // WRITTEN_TICKS)
            axis.set_yticks(range(0, l, every), names[::every], size=8)
            axis.tick_params(length=0)
            bar = figure.colorbar(image, ax=axis, fraction=0.05, pad=0.02)
            bar.set_label(unit, size=8)
            bar.outline.set_visible(False)
        for axis in axes[-1]:
            axis.set_xlabel("head")
        return as_png(figure)


def tokens(report: ClusterReport) -> bytes | None:
    """The first tokens of the first sequence, layer by layer: one colour for one cluster of the layer's head.

    From layer to layer the head that fits best is followed, and a cluster keeps the colour of the one it shares most
    tokens with."""
    words = report.passage.words[:TOKENS]
    if not words:
        return None
    followed = path(report)
    rows = colours([report.passage.labels[layer, head] for layer, head in enumerate(followed)])
    picture = rows[:, : len(words)]
    names = [f"{name}, head {head}" for name, head in zip(tails(report.layers), followed, strict=True)]
    with rules():
        figure = canvas(2.2 + 0.2 * len(words), 1.3 + 0.3 * len(names))
        axis = figure.subplots()
        palette = need("matplotlib.colors").ListedColormap(CLUSTER_COLOURS)
        axis.imshow(picture.numpy() % len(CLUSTER_COLOURS), cmap=palette, vmin=0, vmax=len(CLUSTER_COLOURS) - 1,
                    aspect="auto", interpolation="nearest")  # fmt: skip
        for i, row in enumerate(picture.tolist()):
            for j, number in enumerate(row):
                axis.text(j, i, str(number), ha="center", va="center", size=6, color="white")
        axis.set_xticks(range(len(words)), [word.replace("$", r"\$") for word in words], rotation=90, size=8)
        axis.set_yticks(range(len(names)), names, size=8)
        axis.tick_params(length=0)
        axis.set_title("The cluster of each token; a number goes on where the next layer's cluster shares most tokens")
        return as_png(figure)


def path(report: ClusterReport) -> list[int]:
    """A head of every layer: the typical one of the middle layer, before and after it those that agree best with it."""
    layer, head = typical(report)
    found = {layer: head}
    for at in range(layer + 1, len(report.layers)):
        found[at] = int(report.agreement[at - 1, found[at - 1], at].argmax())
    for at in range(layer - 1, -1, -1):
        found[at] = int(report.agreement[at + 1, found[at + 1], at].argmax())
    return [found[at] for at in sorted(found)]


def colours(rows: list[Tensor]) -> Tensor:
    """(l n) numbers of clusters: in the first row by their first token, then each cluster takes the number of the one
    above that it shares most tokens with, the largest overlap first; what is left gets new numbers."""
    numbered = []
    above: Tensor | None = None
    free = 0
    for row in rows:
        names: dict[int, int] = {}
        if above is not None:
            shared = Counter(zip(row.tolist(), above.tolist(), strict=True))
            for pair, _ in shared.most_common():
                if pair[0] not in names and pair[1] not in names.values():
                    names[pair[0]] = pair[1]
        for name in dict.fromkeys(row.tolist()):
            if name not in names:
                names[name] = free
            free = max(free, names[name] + 1)
        above = torch.tensor([names[name] for name in row.tolist()])
        numbered.append(above)
    return torch.stack(numbered)
