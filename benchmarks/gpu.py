"""The GPU bars: from which length on, and by how much, are the kernels ahead of the best exact attention?

    python benchmarks/gpu.py --commit ID                          everything, a few minutes; what is there is kept
    python benchmarks/gpu.py --only 6x64 N=32768                  rows whose name has all of these words
    python benchmarks/gpu.py --list                               the plan, nothing is measured
    python benchmarks/gpu.py --quick [--device cpu]               a rehearsal: every step, tiny shapes, no verdict

Each row is proved right, then timed as a CUDA graph and eagerly, beside the fastest SDPA backend called the same way in
the same run (see clusterattn/measure/race.py), and appended to results/ at once. Tensors are those of a model (the
embedded long sample, tiled), and the error beside each time is that on them. Rows of the same commit and hardware that
are there already are not measured again (--again: they are). The most important rows come first, the default Refined
before all; one that fails or runs out of memory takes none of the others with it. Exit code 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import gc
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

import torch

import clusterattn as ca
from clusterattn.measure import Row, append, commit, embedded, exact_answer, hardware, read, relative_error, rows_path
from clusterattn.measure.bench import PASSES, TOKENS
from clusterattn.measure.race import Race
from clusterattn.measure.sample import Sample, tiled
from clusterattn.measure.speed_table import as_text, microseconds, spaced

FORWARD, BOTH = PASSES
ROOT = Path(__file__).resolve().parent.parent
THEME, REHEARSAL = "gpu-bars", "gpu-rehearsal"

# ---- the plan: what is measured, and the bar beside it --------------------------------------------

C, TOP = 100, 32
DEFAULT, AUTO = ca.Refined(), ca.method("auto")  # what people call
ONE_PART = {"parts": 1, "slope": False}
QUICK_GROUPING = {"metric": "keys", "start": "random", "steps": 1, "sample": 256}
SHORT = ca.Clustered(clusters=C, metric="euclid", start="random", steps=1)  # where even the metric costs too much
SHORT_REFINED = ca.Refined(clusters=C, top=TOP, metric="euclid", start="random", steps=1, **ONE_PART)
CLUSTERED = ca.Clustered(clusters=C, **QUICK_GROUPING)
REFINED = ca.Refined(clusters=C, top=TOP, **QUICK_GROUPING, **ONE_PART)
IMPROVED = ca.Improved(clusters=C, top=TOP, **QUICK_GROUPING)
RECIPE = {"metric": "hamming", "bits": 63, "steps": 10, "start": "random", "sample": None}  # the paper's
PAPER_CLUSTERED = ca.Clustered(clusters=C, **RECIPE)
PAPER_IMPROVED = ca.Improved(clusters=C, top=TOP, **RECIPE)
SMYRF = ca.Smyrf(rounds=4, q_seats=64, k_seats=64)
REFORMER = ca.Reformer(rounds=4, chunk=64)
# on the embedded sample
NO_WORSE_THAN = {
    SHORT: PAPER_CLUSTERED, CLUSTERED: PAPER_CLUSTERED,
    SHORT_REFINED: PAPER_IMPROVED, REFINED: PAPER_IMPROVED, IMPROVED: PAPER_IMPROVED,
}  # fmt: skip

NARROW, WIDE = (6, 64), (32, 128)  # heads × dim
LONGEST, MILLION = 131072, 1 << 20
NEAR = {32768: (15, 15), LONGEST: (60, 60)}
Bars = dict[int, tuple[float | None, float | None]]
BARS: dict[ca.Method, Bars] = {  # -> length -> at least so many times as fast as exact: forward, forward + backward
    DEFAULT: {8192: (3, None), 32768: (11, None), LONGEST: (60, None)},
    SHORT: {1024: (1, 1)},
    CLUSTERED: {8192: (4, 4), 32768: (20, 20), LONGEST: (80, 80)},
    SHORT_REFINED: {2048: (1, 1), 8192: (4, 4)},
    REFINED: {2048: (1, None), **NEAR},
    IMPROVED: {**NEAR},
    PAPER_CLUSTERED: {4096: (1, 1), 32768: (9, 12)},
    PAPER_IMPROVED: {4096: (1, 1), 32768: (7, 9)},
    SMYRF: {4096: (1, None), 32768: (8, 6)},
    REFORMER: {4096: (1, None), 32768: (7, 6)},
}
EAGER: dict[ca.Method, Bars] = {DEFAULT: {8192: (2.5, 3), 32768: (9, 10), LONGEST: (50, 55)}}  # called from Python
FLOOR_BAR = {(CLUSTERED, 32768): 5.0}  # forward, in times of q, k, v and out once through memory
MEMORY_BAR = 1.5  # peak extra of forward + backward, in sizes of q, k, v, out and their gradients
OURS, OTHERS = (SHORT, CLUSTERED, SHORT_REFINED, REFINED, IMPROVED), (PAPER_CLUSTERED, PAPER_IMPROVED, SMYRF, REFORMER)
DRAWN = {  # lengths without a bar, for the picture
    CLUSTERED: (512, 1024, 2048, 4096, 16384, 65536),
    REFINED: (512, 1024, 4096, 8192, 16384, 65536),
    PAPER_CLUSTERED: (1024, LONGEST),
    PAPER_IMPROVED: (1024, LONGEST),
}


@dataclass(frozen=True)
class Entry:
    """One line of the plan."""

    method: ca.Method
    n: int
    heads: tuple[int, int]  # h, d
    bars: dict[str, float | None] = field(default_factory=dict)  # pass -> speed
    eager: dict[str, float | None] = field(default_factory=dict)  # pass -> speed of eager calls
    causal: bool = False
    passes: tuple[str, ...] = PASSES
    peer: bool = True  # exact attention over a million tokens takes longer than all the rest
    tokens: int = TOKENS  # so many together where sequences are shorter

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return max(self.tokens // self.n, 1), self.heads[0], self.n, self.heads[1]

    @property
    def name(self) -> str:
        return f"{self.heads[0]}x{self.heads[1]} N={self.n} {self.method}{' causal' if self.causal else ''}"


def plan() -> list[Entry]:
    """The most important first."""

    def barred(methods: Iterable[ca.Method], heads: tuple[int, int], *lengths: int) -> list[Entry]:
        wanted = [(method, n) for n in lengths for method in methods if n in BARS[method]]
        each = [(method, n, dict(zip(PASSES, BARS[method][n], strict=True))) for method, n in wanted]
        eager = [EAGER.get(method, {}).get(n) for method, n in wanted]
        called = [dict(zip(PASSES, bars, strict=True)) if bars else {} for bars in eager]
        return [Entry(method, n, heads, bars, more) for (method, n, bars), more in zip(each, called, strict=True)]

    def all_of(heads: tuple[int, int]) -> list[Entry]:
        return barred([*OURS, *OTHERS], heads, 32768, 8192, 1024, 2048, 4096, LONGEST)

    first = [
        *barred([DEFAULT], NARROW, 32768, 8192, LONGEST),
        *(Entry(method, 8192, NARROW) for method in OTHERS),  # host time
        *(Entry(AUTO, n, NARROW) for n in (32768, 8192, LONGEST)),
        *(Entry(DEFAULT, n, NARROW, causal=True) for n in (32768, 8192)),
        *(Entry(DEFAULT, n, WIDE) for n in (32768, 8192)),
    ]
    more = [Entry(DEFAULT, n, NARROW) for n in (2048, 4096, 16384, 65536)]
    million = [Entry(method, MILLION, NARROW, passes=(BOTH,), peer=False) for method in (CLUSTERED, REFINED)]
    drawn = [Entry(method, n, NARROW) for method, lengths in DRAWN.items() for n in lengths]
    return [*first, *all_of(NARROW), *more, *all_of(WIDE), *million, *drawn]


def rehearsed(entries: Sequence[Entry]) -> list[Entry]:
    """The same plan in small: every kind of entry, nothing that takes time."""

    def small(entry: Entry) -> Entry:
        few = {"clusters": 8, "top": 4, "sample": 80, "chunk": 8, "q_seats": 8, "k_seats": 8}
        fewer = {key: value for key, value in few.items() if getattr(entry.method, key, None) is not None}
        method = dataclasses.replace(entry.method, **fewer)
        return dataclasses.replace(entry, method=method, n=max(entry.n // 512, 32), heads=(2, 32), tokens=128)

    found: dict[str, Entry] = {}
    for entry in map(small, entries):
        found.setdefault(entry.name, entry)
    return [dataclasses.replace(entry, bars={}, eager={}) for entry in found.values()]


# ---- bars -------------------------------------------------------------------------------------------


def judged(row: Row, entry: Entry, errors: tuple[float, float] | None) -> Row:
    """The row with its bars. ``met`` is the speed bar alone; ``bars`` lists all of them."""
    which, told = row["pass"], []

    def bar(what: str, wanted: float, got: float | None, most: bool = False) -> None:
        met = got is not None and (got <= wanted if most else got >= wanted)
        told.append({"what": what, "wanted": wanted, "most": most, "got": got, "met": met})

    speed = entry.bars.get(which)
    if speed is not None:
        bar("speed", speed, row.get("speedup"))
    called = entry.eager.get(which)
    if called is not None:
        bar("eager", called, row.get("eager_speedup"))
    floor = FLOOR_BAR.get((entry.method, entry.n))
    if floor is not None and which == FORWARD:
        bar("floor", floor, row.get("floor_ratio"), most=True)
    if which == BOTH and (entry.bars or not entry.peer):
        bar("memory", MEMORY_BAR, row.get("memory_of_size"), most=True)
    if errors is not None and entry.bars:
        bar("sample error", errors[1], errors[0], most=True)
    met = next((each["met"] for each in told if each["what"] == "speed"), None)
    return {**row, "bar": speed, "met": met, "bars": told}


@cache
def sample_errors(ours: ca.Method) -> tuple[float, float] | None:
    """Output error on the embedded sample, ours and the paper's, of a method that must be no worse; None of others.

    The budget follows the length, 25 clusters at 512 tokens, and so does what k-means is trained on. It is the
    setting that is judged, not the kernels: no GPU is needed."""
    if ours not in NO_WORSE_THAN:
        return None
    sample = embedded()
    truth = exact_answer(sample.q, sample.k, sample.v, key_mask=sample.key_mask)

    def error(method: ca.Method) -> float:
        scaled = {"clusters": C // 4, "sample": method.sample and method.sample // 4}
        method = dataclasses.replace(method, **scaled)
        masks = {"key_mask": sample.key_mask, "query_mask": sample.query_mask}
        outs = (ca.attention(sample.q, sample.k, sample.v, method=method, seed=seed, **masks) for seed in range(3))
        errors = [relative_error(out, truth, sample.query_mask) for out in outs]
        return sum(errors) / len(errors)

    return error(ours), error(NO_WORSE_THAN[ours])


def verdict(rows: Iterable[Row]) -> list[str]:
    """Which bars are met, the missed ones first, and how many."""
    keys = ("method", "h", "d", "n", "pass", "causal")
    latest = {tuple(row[key] for key in keys): row for row in rows if row.get("bars")}
    lines: dict[bool, list[str]] = {True: [], False: []}
    for row in latest.values():
        for each in row["bars"]:
            got = "nothing" if each["got"] is None else f"{each['got']:.3g}"
            where = f"{row['h']}x{row['d']} N = {spaced(row['n']):<9} {row['pass']:<17} {row['method']}"
            bar = f"{'≤' if each['most'] else '≥'} {each['wanted']:.3g}"
            failed = f" ({row['failed']})" if row.get("failed") else ""
            lines[each["met"]].append(
                f"{'met   ' if each['met'] else 'MISSED'} {each['what']:<12} {got:>7} {bar:>7}  {where}{failed}"
            )
    return [*lines[False], *lines[True], f"{len(lines[True])} bars met, {len(lines[False])} missed"]


# ---- the run ----------------------------------------------------------------------------------------


def earlier(folders: Iterable[Path], theme: str, device: str, commit_id: str, since: str) -> list[Row]:
    """Rows of this commit on this hardware, measured since then."""
    found = []
    for path in sorted({path.resolve() for folder in folders for path in folder.glob(f"{theme}_*.jsonl")}):
        for row in read(path):
            around = row["environment"]
            if (around["commit"], around["hardware"]) == (commit_id, hardware(device)) and around["date"] >= since:
                found.append(row)
    return found


def remaining(entries: Iterable[Entry], rows: Iterable[Row]) -> Iterator[Entry]:
    """Entries with the passes that no row has yet; one that failed is not tried again at the same commit."""
    done = {(row["method"], row["b"], row["h"], row["n"], row["d"], row["causal"], row["pass"]) for row in rows}
    for entry in entries:
        kind = str(entry.method), *entry.shape, entry.causal
        passes = tuple(which for which in entry.passes if (*kind, which) not in done)
        if passes:
            yield dataclasses.replace(entry, passes=passes)


def line(row: Row) -> str:
    causal = " causal" if row["causal"] else ""
    about = f"{row['h']}x{row['d']} N={row['n']:<8} {row['pass'] + causal:<24} {row['method']:<52}"
    if row.get("failed"):
        return f"{about} {row['failed']}"
    parts = [f"{microseconds(row['seconds']):>9} µs"]
    if row.get("speedup") is not None:
        parts.append(f"{row['speedup']:8.2f}×")
    parts.append(f"eager {microseconds(row['eager_seconds']):>9} µs")
    if row.get("eager_speedup") is not None:
        parts.append(f"{row['eager_speedup']:8.2f}×")
    if row.get("error") is not None:
        parts.append(f"error {row['error']:.4f}")
    parts.append(f"floor × {row['floor_ratio']:.1f}")
    if row.get("bar") is not None:
        parts.append(f"bar {row['bar']}× {'met' if row['met'] else 'MISSED'}")
    return f"{about} {'  '.join(parts)}"


def run(args: argparse.Namespace) -> int:
    theme = REHEARSAL if args.quick else THEME
    entries = rehearsed(plan()) if args.quick else plan()
    entries = [entry for entry in entries if all(word.lower() in entry.name.lower() for word in args.only)]
    if args.list:
        for entry in entries:
            print(entry.name, *(f"{which} ≥ {bar}" for which, bar in entry.bars.items() if bar), sep="  ")
        return 0
    path = rows_path(args.out, theme, args.device)
    rows = earlier({args.out, ROOT / "results"}, theme, args.device, args.commit, args.since)
    samples = importlib.util.find_spec("safetensors") is not None
    # tests/measure/test_bench_shown.py holds the settings to these errors, too
    sample_note = "" if samples else "errors on the embedded sample are left out: safetensors is missing"
    todo = list(remaining(entries, rows))
    print(f"{len(entries)} entries, {len(todo)} to measure; rows go to {path}", sample_note, sep="\n", flush=True)
    races: dict[bool, Race] = {}
    gc.freeze()  # everything imported so far stays: the many collections to come need not look at it
    started = time.perf_counter()
    for entry in todo:
        if time.perf_counter() - started > args.seconds:
            print(f"{args.seconds:g} seconds are over: run again for the rest", flush=True)
            break
        if entry.causal not in races:
            races[entry.causal] = _race(args, theme, entry.causal)
            print(f"a copy moves {races[entry.causal].bytes_per_second / 1e12:.2f} TB/s, read and written", flush=True)
        race = races[entry.causal]
        for row in race.rows(entry.method, entry.shape, passes=entry.passes, peer=entry.peer):
            if row["method"] == str(entry.method) and not args.quick:
                row = judged(row, entry, sample_errors(entry.method) if samples else None)
            append(path, row)
            rows.append(row)
            print(f"{time.perf_counter() - started:5.0f} s  {line(row)}", flush=True)
        if not race.alive():  # an illegal access: only a new process gets the device back, and what is done stays done
            print("the device is lost to this process; a new one goes on", flush=True)
            os.execv(sys.executable, [sys.executable, *_again(args)])
    names = {str(entry.method) for entry in entries} | {"sdpa"}
    shapes = {entry.shape for entry in entries}
    shown = [row for row in rows if row["method"] in names and (row["b"], row["h"], row["n"], row["d"]) in shapes]
    print("", as_text(shown), "", *verdict(shown), "", f"rows in {path}", sep="\n")
    return int(any(not each["met"] for row in shown for each in row.get("bars", ())))


def _race(args: argparse.Namespace, theme: str, causal: bool) -> Race:
    """On the tensors of a model, where they can be read."""
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    data: Callable[[tuple[int, int, int, int]], Sample] | None = None
    if importlib.util.find_spec("safetensors") is not None:
        data = partial(_of_a_model, device=args.device, dtype=dtype)
    seconds = 0.01 if args.quick else 0.1
    return Race(args.device, dtype, theme=theme, commit=args.commit, seconds=seconds, causal=causal, data=data)


def _of_a_model(shape: tuple[int, int, int, int], device: str, dtype: torch.dtype) -> Sample:
    return tiled(*shape, device=device, dtype=dtype)


def _again(args: argparse.Namespace) -> list[str]:
    """The same command for a new process, in which what this one measured counts as done."""
    words = [word for word in sys.argv if word != "--again"]
    return words if "--since" in words else [*words, "--since", args.since]


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="e.g. 32x128 N=8192 refined")
    parser.add_argument("--quick", action="store_true", help="a rehearsal in small; its rows are no results")
    parser.add_argument("--list", action="store_true", help="print the plan")
    parser.add_argument("--commit", default=commit(), help="where git is not there to ask")
    parser.add_argument("--again", action="store_true", help="measure also what is there already")
    parser.add_argument("--since", default="", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no new row after so long")
    parser.add_argument("--out", type=Path, default=ROOT / "results", help="folder for the rows")
    args = parser.parse_args(words)
    if args.commit is None:
        parser.error("wanted the commit that is measured; got none, as git is not there to ask; try --commit ID")
    if args.device == "cpu" and not args.quick and not args.list:
        parser.error("wanted a GPU for these lengths; got --device cpu; try --quick, or benchmarks/cpu.py")
    if args.device == "cuda" and not args.list and not torch.cuda.is_available():
        parser.error("wanted a CUDA device; got none that this torch can see; try --quick --device cpu")
    if args.again:
        args.since = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return args


def main() -> int:
    return run(arguments())


if __name__ == "__main__":
    sys.exit(main())
