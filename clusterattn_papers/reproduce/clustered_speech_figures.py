"""Clustered attention's Figures 1 and 7: the speech tables' models by time and by epoch."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

from clusterattn._rows import Row
from clusterattn.measure import plots
from clusterattn.measure.words import counted

from ._experiment import Cell, Table, apart, chosen, lead, spread
from ._speech import ANSWERING, FINE_TUNED, HISTORY, SpeechConfig
from .clustered_speech import (
    DEV_LOSS,
    LOSS,
    Shown,
    pace,
    verdict_of,
)


class Figure1(Shown):
    name = "clustered-fig1"
    place = "Figure 1"
    about = "speech: phone error rate against the time of a forward pass, over layers and clusters"

    def shows(self, cell: Cell) -> bool:
        return True

    def places(self, rows: Sequence[Row]) -> dict[tuple[str, int], tuple[float, list[float]]]:
        """Milliseconds, and error rates in per cent by seed, of every model of which both are known."""
        found = {model: (pace(rows, *model, ANSWERING), chosen(each, "dev")) for model, each in self.of(rows).items()}
        return {
            model: (1e3 * time, [100 * error for error in errors])
            for model, (time, errors) in sorted(found.items())
            if time is not None
        }

    def of(self, rows: Sequence[Row]) -> dict[tuple[str, int], list[Row]]:
        """The rows of every model, evaluated with what trained it."""
        found: dict[tuple[str, int], list[Row]] = {}
        for row in rows:
            if row["trained"] == row.get("evaluated"):
                found.setdefault((row["trained"], row["layers"]), []).append(row)
        return found

    def tables(self, rows: Sequence[Row], config: SpeechConfig) -> list[Table]:
        table = Table(
            "Speed against accuracy (ours)",
            ["trained with", "layers", "forward, ms", "phone error rate, %"],
            notes=["± is the standard deviation over seeds. The paper prints no numbers."],
        )
        for (name, layers), each in sorted(self.of(rows).items()):
            cost = pace(rows, name, layers, ANSWERING)
            milliseconds = "…" if cost is None else f"{1e3 * cost:.2f}"
            table.rows.append([name, str(layers), milliseconds, spread(chosen(each, "dev"), 2, 100)])
        return [table]

    def picture(self, rows: Sequence[Row], config: SpeechConfig) -> bytes | None:
        places = self.places(rows)
        if not places:
            return None
        with plots.rules():
            figure = plots.canvas(9.2, 4.6)
            axis = figure.subplots()
            axis.margins(x=0.08, y=0.1)
            named = set[str]()
            for (name, layers), (time, errors) in places.items():
                (colour, marker), error, kind = look(name), statistics.fmean(errors), _kind(name)
                axis.errorbar(
                    [time],
                    [error],
                    [statistics.stdev(errors)] if len(errors) > 1 else None,
                    color=colour,
                    marker=marker,
                    markersize=7,
                    linestyle="",
                    elinewidth=1,
                    capsize=3,
                    zorder=3,
                    label=None if kind in named else kind,
                )
                named.add(kind)
                number = plots.short(name).removeprefix(kind).lstrip("-")
                axis.annotate(
                    f"{number} × {layers}" if number else f"× {layers}",
                    (time, error),
                    xytext=(6, -11 if kind == "refined" else 4),  # it lies near improved, in time and error
                    textcoords="offset points",
                    fontsize="small",
                    color=colour,
                    zorder=4,
                )
            axis.set(xscale="log", xlabel="time of a forward pass, ms", ylabel="phone error rate, %")
            axis.set_title("Speed against accuracy; beside each model: its clusters or rounds × its layers")
            plots.plain_log_ticks(axis.xaxis)
            axis.grid(True)
            figure.legend(loc="outside right upper")
            return plots.as_png(figure)

    def differences(self, config: SpeechConfig) -> list[str]:
        rule = FINE_TUNED.get(config)
        if rule is None:
            training = (
                "are all trained from scratch; the paper fine-tunes the larger numbers of clusters from the model "
                "with 100"
            )
        else:
            training = (
                f"with more than {rule.clusters} clusters are fine-tuned from the model with so many, for "
                f"{counted(rule.epochs, 'epoch')} at {rule.lr:g}; published: 15 epochs at 1e-05"
            )
        return [
            *super().differences(config),
            f"Models with other layers or clusters than Table 1's have one seed, and {training} (C.3.1).",
        ]

    def findings(self, rows: Sequence[Row], config: SpeechConfig) -> list[str]:
        """In the paper improved is better than all others for every budget: so nothing may be faster and better."""
        times = {point: time for point, (time, _) in self.places(rows).items()}
        judged = [{**row, "method": _called(*point)} for point, each in self.of(rows).items() for row in each]
        others = [point for point in times if not point[0].startswith(("improved", "refined"))]
        lines = []
        for mine in [point for point in times if others and point[0].startswith("improved")]:
            faster: dict[str, list[str]] = {}
            for other in others:
                more = apart(judged, "dev", _called(*other), _called(*mine))
                if more and times[other] < times[mine]:
                    faster.setdefault(verdict_of(more), []).append(_called(*other))
            better, level = (", ".join(faster.get(verdict, ())) for verdict in ("ahead", "not told apart"))
            lines.append(
                f"Both faster and better than {_called(*mine)}, of {len(others)} others: "
                + (f"{better}, unlike in the paper" if better else "none, as in the paper")
                + (f"; faster and not told apart: {level}." if level else ".")
            )
        return lines


def _called(name: str, layers: int) -> str:
    return f"{name} with {layers} layers"


def _kind(name: str) -> str:
    """improved, of improved-100."""
    return name if name == "shared-full" else plots.short(name).partition("-")[0]


def look(name: str) -> tuple[str, str]:
    colour, marker = plots.style_of(name)
    return ("#7F7F7F", marker) if name == "shared-full" else (colour, marker)


class Figure7(Shown):
    name = "clustered-fig7"
    place = "Figure 7"
    about = "speech: convergence by steps and by wall clock"

    def tables(self, rows: Sequence[Row], config: SpeechConfig) -> list[Table]:
        columns = ["trained with", "a third", "two thirds", "end"]
        tables = []
        for place, which in ((LOSS, "Training"), (DEV_LOSS, "Validation")):
            table = Table(f"{which} loss on the way (nats per phone; ours)", columns)
            for name in config.trained:
                lines = [row["history"] for row in self.with_history(rows, config, name)]
                at = [[line[(len(line) - 1) * third // 3][place] for line in lines] for third in (1, 2, 3)]
                table.rows.append([name, *(spread(each, 3) for each in at)])
            tables.append(table)
        tables[-1].notes = ["The paper shows curves without numbers."]
        return tables

    def with_history(self, rows: Sequence[Row], config: SpeechConfig, name: str) -> list[Row]:
        return [row for row in rows if row.get("history") and row["trained"] == name and row["layers"] == config.layers]

    def picture(self, rows: Sequence[Row], config: SpeechConfig) -> bytes | None:
        if not rows:
            return None
        paces = {name: pace(rows, name, config.layers) for name in config.trained}
        panels = 2 if any(paces.values()) else 1  # seconds, where they were measured
        with plots.rules():
            figure = plots.canvas(4.75 * panels + 1.6, 6.8)
            axes = figure.subplots(2, panels, sharex="col", sharey="row", squeeze=False)
            for name, seconds in paces.items():
                colour, _ = look(name)
                for (down, place), (across, factor) in itertools.product(
                    enumerate((LOSS, DEV_LOSS)), enumerate((1.0, seconds)[:panels])
                ):
                    for number, row in enumerate(self.with_history(rows, config, name) if factor is not None else ()):
                        axes[down][across].plot(
                            [factor * line[HISTORY.index("step")] for line in row["history"]],
                            [line[place] for line in row["history"]],
                            color=colour,
                            linewidth=1.2,
                            linestyle="--" if name.endswith("-4") or name == "shared-full" else "-",
                            label=None if number or down or across else plots.short(name),
                        )
            for row, which in zip(axes, ("training", "validation"), strict=True):
                row[0].set_ylabel(f"{which} loss, nats per phone")
            for column, (what, unit) in enumerate((("updates", "updates"), ("time", "seconds"))[:panels]):
                axes[0][column].set_title(f"Convergence by {what}")
                axes[1][column].set_xlabel(unit)
            for axis in axes.flat:
                axis.grid(True)
            figure.legend(loc="outside right upper")
            return plots.as_png(figure)

    def findings(self, rows: Sequence[Row], config: SpeechConfig) -> list[str]:
        """In the paper improved converges faster than clustered, and both faster than lsh."""
        ends: list[Row] = [
            {"method": name, "seed": row["seed"], "loss": row["history"][-1][LOSS]}
            for name in config.trained
            for row in self.with_history(rows, config, name)
        ]
        if not ends:
            return []
        means = {name: statistics.fmean(each) for name in config.trained if (each := chosen(ends, "loss", method=name))}
        least = ", ".join(f"{name} {means[name]:.3f}" for name in sorted(means, key=means.__getitem__))
        lines = [f"Training loss at the end, by as many updates of the same size for all, least first: {least}."]
        for one, other in CONVERGED:
            if more := apart(ends, "loss", one, other, times=1):
                text, verdict = lead(more, 3, less_is_better=True)
                lines.append(
                    f"{one} against {other}, nats at the end: {text} ({verdict or 'one run'}); in the paper "
                    f"{one} converges faster."
                )
        return lines


CONVERGED = [("improved-100", "clustered-100"), ("clustered-100", "lsh-1"), ("clustered-100", "lsh-4")]


EXPERIMENTS: list[Any] = [Figure1, Figure7]
