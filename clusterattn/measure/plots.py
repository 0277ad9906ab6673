"""Pictures, as PNG bytes. Colour-blind safe: Okabe and Ito's colours, and a marker for every method."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._extras import need
from .._rows import Row

STYLE: dict[str, tuple[str, str]] = {  # name -> colour, marker: the one place where a method gets its looks
    "exact": ("#000000", "*"),
    "clustered": ("#56B4E9", "o"),
    "improved": ("#0072B2", "s"),
    "refined": ("#D55E00", "D"),
    "smyrf": ("#009E73", "^"),
    "reformer": ("#CC79A7", "v"),
    "routing": ("#E69F00", "P"),
    "clusterformer": ("#8C6D00", "X"),
    "oracle_top": ("#7F7F7F", "p"),
    "local": ("#B0A8A0", "h"),
    "plan": ("#7B3294", "*"),
}
OTHER = ("#444444", ".")
ALSO = {  # what the papers and PyTorch call some of them
    "sdpa": "exact",
    "full": "exact",
    "shared-full": "exact",
    "transformer": "exact",
    "lsh": "reformer",
    "oracle-top": "oracle_top",
    "tuned": "plan",
}
MAP_TOKENS = 1024  # a map with more rows or columns than this is cut to its first corner
ZOOM_TOKENS = 30
CLUSTER_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8C6D00", "#555555")
RULES = {
    "font.family": "sans-serif",
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#555555",
    "axes.labelcolor": "#222222",
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.7,
    "legend.frameon": False,
}


def named(label: str) -> str:
    """The method that a label means, also in a paper's words: reformer for `lsh-4`, exact for `full (SDPA)`."""
    word = label.partition(":")[0].partition(" ")[0]
    words = (word, word.partition("-")[0])
    return next((ALSO.get(each, each) for each in words if each in STYLE or each in ALSO), word)


def style_of(label: str) -> tuple[str, str]:
    """The colour and the marker of a method, in every picture."""
    return STYLE.get(named(label), OTHER)


def short(label: str) -> str:
    """A label for people: `refined (25 clusters, 64 top)` for `refined:clusters=25,top=64`, and one name for a method
    that papers call otherwise: `reformer-4` for `lsh-4`."""
    name, _, settings = label.partition(":")
    if name.startswith("lsh"):
        name = name.replace("lsh", named(name), 1)
    pairs = [each.partition("=") for each in settings.split(",") if each]
    words = [_setting(key, value) for key, _, value in pairs]
    return f"{name} ({', '.join(words)})" if words else name


def _setting(key: str, value: str) -> str:
    """32 clusters, 1 part; slope, no slope."""
    if value in ("True", "False"):
        return key if value == "True" else f"no {key}"
    return f"{value} {key.removesuffix('s') if value == '1' else key}"


def pareto(rows: Sequence[Row], swept: Sequence[Row]) -> bytes:
    """Error against time and against multiply-adds; a line joins half, once and twice the budget."""
    with rules():
        figure = canvas(11.5, 4.9)
        axes = figure.subplots(1, 2, sharey=True)
        shown = [row for row in rows if row["name"] != "exact"]
        everything = shown + list(swept)
        exact_ms = next(row["seconds"] for row in rows if row["name"] == "exact") * 1e3
        for axis, key, title, label in (
            (axes[0], "time", "Error against time", f"time, exact attention = 1 ({exact_ms:.3g} ms)"),
            (
                axes[1],
                "cost_share",
                "Error against arithmetic",
                "multiply-adds, exact attention = 1 (grouping included)",
            ),
        ):
            spots = {id(row): (_x(row, key), max(row["error"], 1e-9)) for row in everything}
            for row in shown:
                colour, marker = style_of(row["name"])
                family = [row] + [other for other in swept if _same_family(row, other)]
                line = [spots[id(each)] for each in sorted(family, key=lambda each: float(each["budget"]))]
                axis.plot(*zip(*line, strict=True), color=colour, lw=1.3, alpha=0.55, zorder=2)
                axis.scatter(*zip(*line, strict=True), color=colour, marker=marker, s=16, alpha=0.75, zorder=3, lw=0)
                axis.scatter(*spots[id(row)], color=colour, marker=marker, s=85, zorder=4, ec="white", lw=0.8)
            front = _front(list(spots.values()))
            axis.plot(
                *zip(*front, strict=True),
                color="#999999",
                lw=5,
                alpha=0.3,
                zorder=1,
                drawstyle="steps-post",
                solid_capstyle="round",
            )
            axis.axvline(1, color="black", lw=1, ls=(0, (4, 3)), zorder=1)
            axis.set(xscale="log", yscale="log", title=title, xlabel=label)
            axis.annotate(
                "exact",
                (1, 1),
                xycoords=("data", "axes fraction"),
                xytext=(3, -10),
                textcoords="offset points",
                size=8,
            )
            plain_log_ticks(axis.xaxis)
            plain_log_ticks(axis.yaxis)
            axis.grid(True, which="major")
        axes[0].set_ylabel("relative output error (lower is closer to exact)")
        handles = [
            _handle(style_of(row["name"]), short(row["method"]), line=True)
            for row in sorted(shown, key=lambda row: -row["error"])
        ]
        handles.append(_line("#999999", 5, 0.3, "best so far (Pareto front)"))
        figure.legend(handles=handles, loc="outside right center", title="largest error first")
        return as_png(figure)


def maps(weights: Mapping[str, Sequence[Tensor]], places: Sequence[str]) -> bytes:
    """The weights of each method (columns) in some heads (rows), on one logarithmic colour scale."""
    with rules():
        columns = list(weights)
        figure = canvas(2.65 * len(columns) + 1.0, 2.6 * len(places) + 0.5)
        axes = figure.subplots(len(places), len(columns), squeeze=False, sharex=True, sharey=True)
        norm = _norm([each[:MAP_TOKENS, :MAP_TOKENS] for each in weights[columns[0]]])
        for i, place in enumerate(places):
            for j, label in enumerate(columns):
                picture = weights[label][i][:MAP_TOKENS, :MAP_TOKENS].float().cpu().clamp_min(1e-12).numpy()
                image = axes[i][j].imshow(picture, norm=norm, cmap="magma", aspect="auto", interpolation="nearest")
                if i == 0:
                    axes[i][j].set_title(textwrap.fill(label, 28))
                if i == len(places) - 1:
                    axes[i][j].set_xlabel("key position")
            axes[i][0].set_ylabel(f"{place}\nquery position")
        weight_bar(figure, image, axes)
        return as_png(figure, dpi=220, few_colours=True)


def zoom(weights: Mapping[str, Tensor], tokens: Sequence[str], place: str) -> bytes:
    """One corner of one head with its words on the axes, two maps beside each other."""
    with rules():
        words = [_word(token) for token in tokens[:ZOOM_TOKENS]]
        size, high = len(words), -(-len(weights) // 2)
        figure = canvas(11.2, 4.95 * high + 0.2)
        axes = figure.subplots(high, 2, squeeze=False, sharex=True, sharey=True)
        norm = _norm([each[:size, :size] for each in list(weights.values())[:1]])
        for axis in axes.flat[len(weights) :]:
            axis.set_axis_off()
        for axis, (label, matrix) in zip(axes.flat, weights.items(), strict=False):
            picture = matrix[:size, :size].float().cpu().clamp_min(1e-12).numpy()
            image = axis.imshow(picture, norm=norm, cmap="magma", interpolation="nearest")
            axis.set_title(label)
            axis.set_xticks(range(size), words, rotation=90, size=8)
            axis.set_yticks(range(size), words, size=8)
            axis.tick_params(length=0, pad=1.5)
        figure.supxlabel("key", size=9.5)
        figure.supylabel(f"query ({place})", size=9.5)
        weight_bar(figure, image, axes)
        return as_png(figure, few_colours=True)


def clusters(queries: Tensor, keys: Tensor, labels: Mapping[str, Tensor], place: str) -> bytes:
    """Queries of one head as its keys see them, in the two widest directions, each tied to its cluster."""
    matplotlib = need("matplotlib")
    with rules():
        spots, kept = _plane(queries.float().cpu(), keys.float().cpu())
        figure = canvas(5.5 * len(labels) + 0.3, 5.6)
        axes = figure.subplots(1, len(labels), squeeze=False, sharex=True, sharey=True)[0]
        for axis, (method, label) in zip(axes, labels.items(), strict=True):
            label = label.cpu()
            names = sorted({int(name) for name in label.tolist() if name >= 0})
            axis.set_title(f"{method}, {int((label >= 0).sum())} queries")
            axis.set(xticks=[], yticks=[], xlabel="widest direction")
            if not names:  # every query is masked
                continue
            middles = torch.stack([spots[label == name].mean(0) for name in names])
            for name, middle, colour in zip(names, middles, _map_colours(middles), strict=True):
                members = spots[label == name]
                ties = torch.stack([members, middle.expand_as(members)], dim=1)
                lines = matplotlib.collections.LineCollection(ties.numpy(), colors=colour, lw=0.6, alpha=0.35, zorder=1)
                axis.add_collection(lines)
                axis.scatter(*members.T.numpy(), color=colour, s=10, lw=0, alpha=0.9, zorder=2)
                axis.text(
                    *middle.tolist(),
                    str(name),
                    size=6.5,
                    weight="bold",
                    color="white",
                    ha="center",
                    va="center",
                    zorder=4,
                    bbox={"boxstyle": "circle,pad=0.2", "fc": colour, "ec": "white", "lw": 0.7},
                )
        axes[0].set_ylabel(f"{place}\nsecond widest direction")
        figure.supxlabel(
            f"{kept:.0%} of what the keys tell apart lies in this plane; the rest is unseen here",
            size=8.5,
            color="#555",
        )
        return as_png(figure)


def _x(row: Row, key: str) -> float:
    return float(1 / row["speedup"] if key == "time" else row["cost_share"])


def _same_family(row: Row, other: Row) -> bool:
    """Is `other` this very method at another budget?"""
    from .compare import SWEPT

    fixed = [{key: value for key, value in each["settings"].items() if key not in SWEPT} for each in (row, other)]
    return bool(fixed[0] == fixed[1])


def _front(spots: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """From cheap to dear, those that nothing cheaper beats."""
    front: list[tuple[float, float]] = []
    for x, y in sorted(spots):
        if not front or y < front[-1][1]:
            front.append((x, y))
    return front


def _plane(queries: Tensor, keys: Tensor) -> tuple[Tensor, float]:
    """Two coordinates for each query, and the share of the spread they keep.

    Distances are those between rows of logits, less what softmax does not feel (a shift of a whole row): the
    keys are centred.
    """
    centred, keys = queries - queries.mean(0), keys - keys.mean(0)
    values, vectors = torch.linalg.eigh(keys.T @ keys / max(len(keys), 1))
    seen = centred @ (vectors * values.clamp_min(0).sqrt()) @ vectors.T
    _, widths, directions = torch.linalg.svd(seen, full_matrices=False)
    kept = widths[:2].square().sum() / widths.square().sum().clamp_min(1e-30)
    spots = seen @ directions[:2].T
    return torch.nn.functional.pad(spots, (0, 2 - spots.shape[1])), float(kept)


def _map_colours(middles: Tensor) -> list[str]:
    """As on a map of countries: each cluster takes the colour least used near it, so neighbours differ."""
    apart = torch.cdist(middles, middles)
    chosen: list[int] = []
    for i in range(len(middles)):
        crowd = [0.0] * len(CLUSTER_COLOURS)
        for j, colour in enumerate(chosen):
            crowd[colour] += 1 / (float(apart[i, j]) ** 2 + 1e-6)
        chosen.append(crowd.index(min(crowd)))
    return [CLUSTER_COLOURS[colour] for colour in chosen]


def _word(token: str) -> str:
    return "·" + token[2:] if token.startswith("##") else token.replace("$", r"\$")


def _norm(weights: Sequence[Tensor]) -> Any:
    """A logarithmic colour scale that exact attention's own weights fill."""
    values = torch.cat([each.flatten().float().cpu() for each in weights])
    values = values[values > 0].sort().values
    low, high = (float(values[int(share * (len(values) - 1))]) for share in (0.05, 0.9995))
    return need("matplotlib.colors").LogNorm(vmin=max(low, 1e-6), vmax=max(high, 2e-6), clip=True)


def weight_bar(figure: Any, image: Any, axes: Any) -> None:
    bar = figure.colorbar(image, ax=axes, fraction=0.025, pad=0.012, aspect=40, extend="both", extendfrac=0.015)
    bar.set_label("attention weight (log scale)")
    bar.outline.set_visible(False)


def plain_log_ticks(axis: Any) -> None:
    """0.2 and 30, not 2×10⁻¹ and 3×10¹; with 2 and 5 between the decades where there is room."""
    ticker = need("matplotlib.ticker")
    low, high = axis.get_view_interval()
    decades = high / max(low, 1e-30)
    subs = (1.0,) if decades > 3000 else (1.0, 3.0) if decades > 100 else (1.0, 2.0, 5.0)
    axis.set_major_locator(ticker.LogLocator(base=10, subs=subs))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(ticker.NullFormatter())


def _handle(style: tuple[str, str], label: str, line: bool = False) -> Any:
    colour, marker = style
    width = 1.3 if line else 0
    return need("matplotlib.lines").Line2D(
        [], [], color=colour, marker=marker, ms=7, mec="white", lw=width, label=label
    )


def _line(colour: str, width: float, alpha: float, label: str) -> Any:
    return need("matplotlib.lines").Line2D([], [], color=colour, lw=width, alpha=alpha, label=label)


def rules() -> Any:
    return need("matplotlib").rc_context(RULES)


def canvas(width: float, height: float) -> Any:
    """A figure without pyplot: no window, no global state."""
    need("matplotlib.backends.backend_agg")
    need("matplotlib.collections"), need("matplotlib.colors")
    return need("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")


def as_png(figure: Any, dpi: int = 150, few_colours: bool = False) -> bytes:
    """``few_colours``: only those of the maps' scale, and greys for words. The file shrinks to a third."""
    into = io.BytesIO()
    figure.savefig(into, format="png", dpi=dpi, facecolor="white")
    if not few_colours:
        return into.getvalue()
    scale = (need("matplotlib").colormaps["magma"].resampled(216)(range(216))[:, :3] * 255).round().astype(int)
    greys = [[round(255 * level / 39)] * 3 for level in range(40)]
    image = need("PIL.Image")
    palette = image.new("P", (1, 1))
    palette.putpalette([part for colour in (*scale.tolist(), *greys) for part in colour])
    small = io.BytesIO()
    image.open(into).convert("RGB").quantize(palette=palette, dither=0).save(small, format="png", optimize=True)
    return small.getvalue()
