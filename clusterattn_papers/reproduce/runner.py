"""Runs experiments: what is done already is left alone, what is left runs in one or several processes, every finished
cell is a row on disk at once."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import re
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import torch

from clusterattn import _rows as files
from clusterattn._errors import bad_value
from clusterattn._progress import Progress
from clusterattn._rows import Row

from . import experiments
from ._experiment import SCALES, Cell, Context, Experiment, as_dict

THEME = "reproduce"


@dataclass(frozen=True)
class Work:
    """One cell that is still to be done."""

    experiment: str
    scale: str
    cell: Cell


@dataclass(frozen=True)
class Outcome:
    """What came of the work: rows for all cells there are, and the cells that failed, with their last words."""

    rows: dict[str, list[Row]]  # by the name of the experiment
    failed: dict[str, str]  # "experiment: cell" -> traceback


def named(name: str) -> Experiment:
    found = experiments()
    if name not in found:
        near = [each for each in found if name.lower().replace(" ", "") in each] or list(found)
        raise bad_value("an experiment", repr(name), f"{', '.join(near)} (see --list)")
    return found[name]


def source(experiment: Experiment) -> Experiment:
    """The experiment whose cells make the rows that this one shows."""
    return named(experiment.rows_from) if experiment.rows_from else experiment


def reproduce(
    names: Sequence[str],
    scale: str = "smoke",
    *,
    data: Path | None = None,
    device: str = "cpu",
    out: Path = Path("results"),
    jobs: int = 1,
    only: str | None = None,
    again: bool = False,
    commit: str | None = None,
    tick: Progress = lambda text, total, done: None,
) -> Outcome:
    """Run what is missing of the named experiments, in their order; rows go to ``out`` as they come.

    jobs   processes that share the device; cells that measure time run alone, after the others
    only   a regular expression: only cells whose name it finds
    again  also cells that measure time, where their rows are of another commit
    """
    made = _makers(names, scale, only)
    for each in made if scale != "smoke" else ():  # miss data before the work, not after it
        each.check(each.scales[scale], Context(torch.device(device), data, out))
    around = files.environment(device)
    around["commit"] = commit or around["commit"]
    other_than = str(around["commit"]) if again else None
    left = [work for each in made for work in missing(each, scale, out, only, other_than)]
    named_so = [cell.name for each in made for cell in each.cells(each.scales[scale])]
    if only is not None and not any(re.search(only, name) for name in named_so):
        examples = "; ".join(named_so[:: max(len(named_so) // 3, 1)][:3])
        raise bad_value("--only, that finds a cell", repr(only), f"a part of a name like: {examples}")
    failed: dict[str, str] = {}
    done = 0

    def finish(work: Work, answer: list[Row] | str) -> None:
        nonlocal done
        done += 1
        label = f"{work.experiment}: {work.cell.name}"
        if isinstance(answer, str):
            failed[label] = answer
        else:
            shared = together and not work.cell.alone
            mine = {**around, "threads": threads_of(jobs)} if shared else around
            path = files.rows_path(out, f"{THEME}-{work.experiment}", device, mine)
            files.append(path, *(_whole_row(work, row, mine) for row in answer))
        tick(label, len(left), done)

    def inside(work: Work) -> Progress:
        """The progress of a cell, told beside that of all."""
        label = f"{work.experiment}: {work.cell.name}"
        return lambda text, total, step: tick(f"{label}: {step} of {total}, {text}", len(left), done)

    quiet = [work for work in left if work.cell.alone]
    # experiments as they were named; short cells first: whatever is interrupted has most of its rows
    place = {each.name: at for at, each in enumerate(made)}
    busy = [work for work in left if work not in quiet]
    busy.sort(key=lambda work: (place[work.experiment], work.cell.seconds))
    together = jobs > 1 and len(busy) > 0
    for work, answer in _together(busy, data, device, jobs) if together else _in_turn(busy, data, device, inside):
        finish(work, answer)
    for work, answer in _in_turn(quiet, data, device, inside):
        finish(work, answer)
    return Outcome({name: done_rows(named(name), scale, out) for name in names}, failed)


def without_rows(
    names: Sequence[str], scale: str, out: Path, only: str | None = None
) -> dict[str, tuple[list[str], int]]:
    """Of each experiment that makes rows for the named ones: its cells that have none, and how many it has in all."""
    return {
        each.name: ([work.cell.name for work in missing(each, scale, out, only)], len(each.cells(each.scales[scale])))
        for each in _makers(names, scale, only)
    }


def _makers(names: Sequence[str], scale: str, only: str | None) -> list[Experiment]:
    """The experiments whose cells make the rows of the named ones, each once; or what is wrong with the words."""
    if scale not in SCALES:
        raise bad_value(f"a scale: {', '.join(SCALES)}", repr(scale), "--scale small")
    try:
        re.compile(only or "")
    except re.error as error:
        raise bad_value("--only, a regular expression", f"{only!r}: {error}", "--only 'seed 0'") from None
    return list({source(each).name: source(each) for each in map(named, names)}.values())


def missing(
    experiment: Experiment, scale: str, out: Path, only: str | None = None, other_than: str | None = None
) -> list[Work]:
    """Cells without rows. ``other_than`` a commit: also those that measure time and whose rows are of another one."""
    cells = experiment.cells(experiment.scales[scale])
    timed = {cell.name for cell in cells if cell.alone and other_than is not None}
    done = {
        row["cell"]
        for row in done_rows(experiment, scale, out)
        if row["cell"] not in timed or row["environment"]["commit"] == other_than
    }
    wanted = [cell for cell in cells if cell.name not in done and (only is None or re.search(only, cell.name))]
    return [Work(experiment.name, scale, cell) for cell in wanted]


def done_rows(experiment: Experiment, scale: str, out: Path) -> list[Row]:
    """All rows of an experiment at a scale, made with today's configuration of it; of a cell that was run again those
    of its latest run."""
    made, print_of = source(experiment), fingerprint(source(experiment), scale)
    paths = sorted(Path(out).glob(f"{THEME}-{made.name}_*.jsonl"))
    rows = [row for path in paths for row in files.read(path)]
    rows = [row for row in rows if row.get("scale") == scale and row.get("config") == print_of]
    latest: dict[str, str] = {}
    for row in rows:
        latest[row["cell"]] = max(latest.get(row["cell"], ""), row["environment"]["date"])
    return [row for row in rows if row["environment"]["date"] == latest[row["cell"]]]


def fingerprint(experiment: Experiment, scale: str) -> str:
    """Changes with the configuration, so that rows of another one are never mixed in. More seeds are no other one."""
    settings = {name: value for name, value in as_dict(experiment.scales[scale]).items() if name != "seeds"}
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:8]


def _whole_row(work: Work, row: Row, around: Row) -> Row:
    head = {
        "theme": THEME,
        "experiment": work.experiment,
        "scale": work.scale,
        "config": fingerprint(named(work.experiment), work.scale),
        "cell": work.cell.name,
    }
    return {**head, **work.cell.settings, **row, "environment": around}


def _in_turn(
    works: Sequence[Work], data: Path | None, device: str, inside: Callable[[Work], Progress]
) -> Iterator[tuple[Work, list[Row] | str]]:
    for work in works:
        yield work, _do(work, data, device, inside(work))


def _together(
    works: Sequence[Work], data: Path | None, device: str, jobs: int
) -> Iterator[tuple[Work, list[Row] | str]]:
    died = []
    start = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    with ProcessPoolExecutor(min(jobs, len(works)), mp_context=start, initializer=_begin, initargs=(jobs,)) as pool:
        futures: dict[Future[list[Row] | str], Work] = {pool.submit(_do, work, data, device): work for work in works}
        for future in as_completed(futures):
            try:
                yield futures[future], future.result()
            except BrokenProcessPool:  # a process died and took the pool with it, guilty and innocent cells alike
                died.append(futures[future])
    for work in died:  # by itself, only the guilty one dies again
        if len(works) > 1:
            yield from _together([work], data, device, jobs)
        else:
            yield work, "its process died"


def _begin(jobs: int) -> None:
    torch.set_num_threads(threads_of(jobs))


def threads_of(jobs: int) -> int:
    """What each of so many processes has."""
    return max((os.cpu_count() or 1) // jobs, 1)


def _do(work: Work, data: Path | None, device: str, tick: Progress | None = None) -> list[Row] | str:
    """One cell, in whatever process this is: its rows, or how it failed."""
    experiment = named(work.experiment)
    folder = work_folder(work)
    if work.scale == "smoke":  # never worth going on with
        shutil.rmtree(folder, ignore_errors=True)
    try:
        where = Context(torch.device(device), data, folder, **({} if tick is None else {"tick": tick}))
        rows = experiment.run(work.cell, experiment.scales[work.scale], where)
    except Exception:
        return traceback.format_exc()
    shutil.rmtree(folder, ignore_errors=True)
    return rows


def work_folder(work: Work) -> Path:
    """Where a cell keeps its checkpoints until it is done."""
    slug = re.sub(r"[^A-Za-z0-9.=-]+", "_", work.cell.name)
    home = Path(tempfile.gettempdir()) / str(os.getpid()) if work.scale == "smoke" else Path.home() / ".cache"
    config = f"{work.scale}-{fingerprint(named(work.experiment), work.scale)}"
    return home / "clusterattn" / work.experiment / config / slug
