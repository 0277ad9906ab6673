"""The same results for a terminal: tables on stdout, progress on stderr."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._extras import need
from .words import counted

if TYPE_CHECKING:
    from .._plan import Plan
    from .._rows import Row
    from .approximate import Approximation
    from .compare import Comparison


def show_comparisons(results: Mapping[str, Comparison], written: Sequence[Path]) -> None:
    """A table and a sentence for each, under its name where there are several."""
    for name, result in results.items():
        if name:
            console().rule(name, align="left")
        _show_comparison(result)
    show_written(written)


def _show_comparison(result: Comparison) -> None:
    from .report import headline, table_cells

    rich, table = console(), need("rich.table").Table(box=need("rich.box").SIMPLE_HEAD)
    b, h, n, m, d, _ = result.sample.shape
    rich.print(f"[dim]{literal(result.sample.source)}[/]", highlight=False)
    rich.print(
        f"[dim]{b} × {h} heads × {n} queries × {m} keys × {d}{', causal' if result.causal else ''}[/]",
        highlight=False,
    )
    table.add_column("method", no_wrap=True)
    for title in ("output error", "row L1", "time", "speed", "memory", "of exact's", "multiply-adds"):
        table.add_column(title, justify="right", no_wrap=True)
    exact, *others = result.rows
    table.add_row(*(f"[dim]{cell}[/]" for cell in (exact["method"], *table_cells(exact))))
    for row in sorted(others, key=lambda row: float(row["error"])):
        table.add_row(literal(row["method"]), *table_cells(row))
    rich.print(table)
    for label, why in result.skipped.items():
        rich.print(f"[dim]not measured: {literal(label)} ({why})[/]", highlight=False)
    for note in result.notes:
        rich.print(f"[dim]{note}[/]", highlight=False)
    rich.print(literal(headline(result)), highlight=False)


def show_approximation(result: Approximation, written: Sequence[Path]) -> None:
    from .report import approximation_cells, approximation_headline

    rich, table = console(), need("rich.table").Table(box=need("rich.box").SIMPLE_HEAD)
    exact, *others = result.rows
    size = f"{counted(exact['sequences'], 'sequence')} of {exact['keys_mean']:.0f} keys on average"
    rich.print(f"[dim]{literal(exact['model'])}, {exact['task']}, {size}[/]", highlight=False)
    table.add_column("method", no_wrap=True)
    for title in (*exact["figures"], "difference", "hidden-state error", "multiply-adds", "time"):
        table.add_column(title, justify="right")
    table.add_row(*(f"[dim]{cell}[/]" for cell in ("exact", *approximation_cells(exact))))
    for row in sorted(others, key=lambda row: float(row["error"])):
        table.add_row(literal(row["method"]), *approximation_cells(row))
    rich.print(table)
    for note in result.notes:
        rich.print(f"[dim]{literal(note)}[/]", highlight=False)
    rich.print(approximation_headline(result), highlight=False)
    show_written(written)


def show_plan(plan: Plan, written: Sequence[Path]) -> None:
    """Which layer got what, what it costs there, and what all of it together does to the model's output."""
    rich, table = console(), need("rich.table").Table(box=need("rich.box").SIMPLE_HEAD)
    for title in ("layer", "method", "share of exact's cost", "error in the layer"):
        table.add_column(title, justify="left" if title in ("layer", "method") else "right")
    for row in plan.note["layers"]:
        cells = row["layer"], row["method"], f"{row['cost_share']:.1%}", f"{row['error']:.4f}"
        table.add_row(*(literal(cell) for cell in cells), style="dim" if row["method"] == "exact" else None)
    rich.print(table)
    note = plan.note
    rich.print(
        f"error of the model's output {note['error']:.4f} (tolerance {note['tolerance']:g}) with "
        f"{note['cost_share']:.1%} of exact attention's {note['cost']}",
        highlight=False,
    )
    if "seconds" in note:
        exact, tuned = (note["seconds"][name] for name in ("exact", "tuned"))
        words = f"the model takes {1e3 * tuned:.1f} ms with the plan, {1e3 * exact:.1f} ms with exact attention"
        rich.print(f"{words}: {exact / tuned:.2f} times as fast", highlight=False)
        if note["exact_wins"]:
            rich.print("exact attention wins here: the plan is empty", highlight=False)
    show_written(written)


def show_bench(rows: Sequence[Row], written: Sequence[Path]) -> None:
    from .plots_speed import crossing_sentences
    from .words import human_bytes, human_error, human_ratio, human_seconds

    rich = console()
    lengths = sorted({row["n"] for row in rows})
    for which in dict.fromkeys(row["pass"] for row in rows):
        table = need("rich.table").Table(
            title=f"{which}: time per token, speed against exact, peak memory per token, relative error",
            title_justify="left",
            box=need("rich.box").SIMPLE_HEAD,
        )
        table.add_column("method", no_wrap=True)
        for n in lengths:
            table.add_column(f"N = {n}", justify="right")
        mine = [row for row in rows if row["pass"] == which]
        for label in dict.fromkeys(row["method"] for row in mine):
            cells = []
            for row in (row for row in mine if row["method"] == label):
                if row.get("failed"):
                    cells.append("[red]wrong[/]")
                    continue
                memory = "" if row["memory_per_token"] is None else f"\n{human_bytes(row['memory_per_token'])}"
                error = "" if row.get("error") is None else f"\nerror {human_error(row['error'])}"
                cells.append(
                    f"{human_seconds(row['seconds_per_token'])}\n[bold]{human_ratio(row['speedup'])}[/]{memory}{error}"
                )
            table.add_row(literal(label), *cells, end_section=True)
        rich.print(table)
    for row in rows:
        if row.get("failed"):
            rich.print(f"[red]{literal(row['method'])}, N = {row['n']}, {row['pass']}: {row['failed']}; not timed")
    for sentence in crossing_sentences(rows):
        rich.print(literal(sentence), highlight=False)
    show_written(written)


def show_written(paths: Sequence[Path]) -> None:
    if paths:
        rich = console()
        rich.print()
        for path in paths:
            rich.print(f"  {path}", highlight=False, soft_wrap=True, markup=False)


def show_env(facts: Mapping[str, Any], verbs: Sequence[tuple[str, ...]]) -> None:
    rich, table = console(), need("rich.table")
    listed = table.Table.grid(padding=(0, 2))
    for key, value in facts.items():
        listed.add_row(f"[dim]{key}[/]", "[dim]not there[/]" if value is None else literal(str(value)))
    rich.print(listed)
    shown = table.Table(box=need("rich.box").SIMPLE_HEAD)
    for title in ("device", "operation", "backend", "why not a faster one"):
        shown.add_column(title)
    for each in verbs:
        shown.add_row(*("" if cell is None else literal(str(cell)) for cell in each))
    rich.print(shown)


def console(stderr: bool = False) -> Any:
    made = need("rich.console").Console(stderr=stderr)
    if not made.is_terminal:  # a pipe or a file has no width of its own: leave tables whole
        made.width = max(made.width, 140)
    return made


def literal(text: str) -> str:
    return str(need("rich.markup").escape(text))


@contextlib.contextmanager
def progress() -> Iterator[Callable[..., object]]:
    """A bar on stderr, so that stdout stays clean for --json and pipes; in a log file a line now and then.

    It is told what is being done, of how many steps, and how many are done (else it counts).
    """
    screen = console(stderr=True)
    if not screen.is_terminal:
        yield _in_lines(screen)
        return
    parts = need("rich.progress")
    bar = parts.Progress(
        parts.TextColumn("{task.description}"),
        parts.BarColumn(),
        parts.MofNCompleteColumn(),
        parts.TimeElapsedColumn(),
        console=screen,
        transient=True,
    )
    with bar:
        task = bar.add_task("measuring", total=None)
        done = -1  # the step being announced has only begun

        def tick(text: str, total: int, so_far: int | None = None) -> None:
            nonlocal done
            done = done + 1 if so_far is None else so_far
            bar.update(task, completed=done, total=total, description=literal(text))

        yield tick


def _in_lines(screen: Any, every: float = 15.0) -> Callable[..., object]:
    """Progress for a log: one line at most every so many seconds, and none twice."""
    since, done, last = time.monotonic(), -1, ""  # nothing is said of work that is soon over

    def tick(text: str, total: int, so_far: int | None = None) -> None:
        nonlocal since, done, last
        done = done + 1 if so_far is None else so_far
        line = f"{done} of {total}: {literal(text)}"
        if time.monotonic() - since >= every and line != last:
            since, last = time.monotonic(), line
            screen.print(line, highlight=False)

    return tick
