"""Write the tables of README.md and docs/ from the rows in results/, between their markers.

    python benchmarks/readme_tables.py           tables, and the pictures docs/img/pareto.png and crossings.png
    python benchmarks/readme_tables.py --check   change nothing; exit code 1 where a table is out of date

A marker is an HTML comment, `table:NAME`, and ends at the next `/table`. The newest row of its kind wins.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import clusterattn as ca
from clusterattn._files import write_whole
from clusterattn.measure import Row, read
from clusterattn.measure.speed_table import HEAD, cells, failures, joined, ordered
from clusterattn.measure.words import human_bytes, human_error, human_ratio
from clusterattn_papers.reproduce import Experiment, experiments
from clusterattn_papers.reproduce.page import best_scale, config_of, markdown, unfinished, where
from clusterattn_papers.reproduce.page import write as write_page

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PICTURE = ROOT / "results", ROOT / "docs" / "img" / "pareto.png"
PAGES = RESULTS / "reproduce"
CROSSINGS, GPU = PICTURE.with_name("crossings.png"), "gpu-bars"
MARKED = re.compile(r"(<!-- table:([\w-]+) -->\n).*?(<!-- /table -->)", re.DOTALL)
NOT_YET = "*Not measured yet.*\n"
PICTURE_COLOURS = 256  # a palette: the file shrinks to less than half


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def rows(*themes: str) -> list[Row]:
    """All rows of these themes, oldest first."""
    found = [row for path in sorted(RESULTS.glob("*.jsonl")) for row in read(path) if row.get("theme") in themes]
    return sorted(found, key=lambda row: str(row["environment"]["date"]))


def newest_run(theme: str) -> list[Row]:
    """The rows that share the environment of the last one."""
    found = rows(theme)
    return [row for row in found if row["environment"] == found[-1]["environment"]]


# ---- words ---------------------------------------------------------------------------------------


def table(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *body]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def origin(found: Sequence[Row], *more: str) -> str:
    """Where the numbers come from, in one line."""
    around = [row["environment"] for row in found]

    def all_of(key: str) -> str:
        return ", ".join(dict.fromkeys(str(each.get(key)) for each in around))

    machine = all_of("hardware")
    if found[0].get("device", "cpu") == "cpu":
        machine += f" with {all_of('threads')} threads"
    dates = ", ".join(dict.fromkeys(str(each["date"])[:10] for each in around))
    words = [machine, f"torch {all_of('torch')}", *more, f"commit {all_of('commit')}", dates]
    return f"\n<sub>{'; '.join(words)}.</sub>\n"


def spaced(number: int) -> str:
    return f"{number:,}".replace(",", " ")


def percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.0%}"


# ---- tables --------------------------------------------------------------------------------------


def compare_table(theme: str) -> Callable[[], str]:
    """Every method on one of the embedded samples."""

    def made() -> str:
        found = [row for row in newest_run(theme) if row["budget"] == 1] if rows(theme) else []
        if not found:
            return NOT_YET
        dense = found[0]["row_l1"] is not None  # on a long sample the weights are too many to lay out
        cost = ("multiply-adds, of exact's", "time, exact = 1", "memory, exact = 1")
        body = [
            (
                f"`{row['method']}`",
                human_error(row["error"]),
                *([human_error(row["row_l1"])] if dense else []),
                percent(row["cost_share"]),
                f"{1 / row['speedup']:.2f}",
                f"{row['memory_share']:.1f}",
            )
            for row in sorted(found, key=lambda row: float(row["error"]))
        ]
        milliseconds = found[0]["seconds"] * 1e3
        head = ("method", "output error", *(["row L1"] if dense else []), *cost)
        return table(head, body) + origin(found, f"exact takes {milliseconds:.1f} ms")

    return made


def speed_tables(found: Sequence[Row], peer: str) -> str:
    """One table for each machine and shape: times as fast as exact attention, by length, the passes side by side."""
    kinds: dict[tuple[object, ...], list[Row]] = {}
    for row in found:
        around = row["environment"]
        key = (around["hardware"], around["threads"], row["dtype"], row["h"], row["d"], row["causal"])
        kinds.setdefault(key, []).append(row)
    parts = []
    for same in kinds.values():
        latest = {(row["pass"], row["method"], row["n"]): row for row in same}  # later rows replace earlier ones
        shown = [row for row in latest.values() if row["method"] != "sdpa"]
        lengths = sorted({row["n"] for row in shown})
        passes = list(dict.fromkeys(row["pass"] for row in shown))
        body = [
            (f"`{method}`", *(" / ".join(speed(latest.get((which, method, n))) for which in passes) for n in lengths))
            for method in dict.fromkeys(row["method"] for row in shown)
        ]
        shape = f"{same[0]['h']} heads × {same[0]['d']}, {same[0]['dtype']}{', causal' if same[0]['causal'] else ''}"
        parts.append(
            table(("method", *(f"N = {spaced(n)}" for n in lengths)), body)
            + origin([*latest.values()], " / ".join(passes), shape, str(same[0]["data"]), f"exact is {peer}")
        )
    return "\n".join(parts) or NOT_YET


def speed(row: Row | None) -> str:
    """Bold where the method is faster; a dagger where a bar of the benchmark is missed."""
    if row is None:
        return "–"
    if row.get("failed"):
        return "wrong"
    ratio = human_ratio(row["speedup"])
    return (f"**{ratio}**" if row["speedup"] > 1 else ratio) + ("†" if row.get("met") is False else "")


def cpu_table() -> str:
    found = rows("cpu-bars", "bench")
    return speed_tables([row for row in found if _is_speed(row) and row["device"] == "cpu"], "torch's SDPA")


def gpu_rows() -> list[Row]:
    """Rows of the GPU bars at the newest commit that has some; a rehearsal's are none."""
    found = [row for row in rows(GPU) if row["device"] == "cuda"]
    return [row for row in found if row["environment"]["commit"] == found[-1]["environment"]["commit"]]


def gpu_table() -> str:
    """Times as fast as exact attention, by length, and the picture of the crossings."""
    found = gpu_rows()
    if not found:
        return NOT_YET
    speeds = speed_tables([row for row in found if _is_speed(row)], "the fastest SDPA backend")
    words = "Time per token against the length; rings mark where a method passes exact attention"
    return f"{speeds}\n![{words}]({CROSSINGS.relative_to(ROOT).as_posix()})\n"


def gpu_figures() -> str:
    """Everything that `benchmarks/gpu.py` prints, a line for each method and shape."""
    found = gpu_rows()
    if not found:
        return NOT_YET
    lines = ordered(joined(found))
    body = [(f"`{label}`", *others) for label, *others in map(cells, lines)]
    notes = "".join(f"- {each}\n" for each in failures(lines))
    return table(HEAD, body) + origin(found, str(found[-1]["dtype"])) + (f"\n{notes}" if notes else "")


def _is_speed(row: Row) -> bool:
    known = ("method", "pass", "n", "h", "d", "dtype", "causal", "device")
    return ("speedup" in row or "failed" in row) and all(key in row for key in known)


def memory_table() -> str:
    """Peak memory at 65 536 tokens and the error on the data of the speed table."""
    found = [row for row in rows("cpu-bars") if row["what"] in ("memory", "error")]
    if not found:
        return NOT_YET
    latest = {(row["method"], row["what"], row.get("pass")): row for row in found}
    memory = [row for row in latest.values() if row["what"] == "memory"]
    error = [row for row in latest.values() if row["what"] == "error"]

    def cell(method: str, what: str, which: str | None) -> str:
        row = latest.get((method, what, which))
        if row is None:
            return "–"
        if what == "error":
            return human_error(row["error"])
        return f"{human_bytes(row['memory_bytes'])} ({human_ratio(row['memory_share'])})"

    passes = list(dict.fromkeys(row["pass"] for row in memory))
    lengths = [f"N = {spaced(each[0]['n'])}" if each else "" for each in (memory, error)]
    head = ("method", *(f"peak memory, {which}, {lengths[0]}" for which in passes), f"output error, {lengths[1]}")
    methods = dict.fromkeys(row["method"] for row in latest.values())
    body = [
        (f"`{method}`", *(cell(method, "memory", which) for which in passes), cell(method, "error", None))
        for method in methods
    ]
    return table(head, body) + origin(found)


def settings_table(*questions: str) -> Callable[[], str]:
    def write() -> str:
        found = [row for row in (newest_run("settings") if rows("settings") else []) if row["question"] in questions]
        if not found:
            return NOT_YET
        body = [
            (
                f"`{row['method']}`",
                f"{row['error']:.4f}",
                f"{row['lowest']:.4f} – {row['highest']:.4f}",
                percent(row["cost_share"]),
                time_of(row),
            )
            for row in found
        ]
        seeds = f"range over {found[0]['seeds']} seeds"
        head = ("method", "output error, mean", seeds, "multiply-adds, of exact's", "time, exact = 1")
        return table(head, body) + origin(found, "the embedded sample")

    return write


# task -> what it is, its main figure, which way is better, and the share of exact attention's cost that the bars allow
PRETRAINED = {
    "minilm": ("MiniLM-L6, 512 tokens", "distance", "cosine distance of embeddings", -1, 0.35),
    "xquad": ("MiniLM-L6, question → paragraph", "top1", "top-1 accuracy", 1, 0.35),
    "whisper": ("Whisper tiny.en's encoder, 1 500 frames", "wer", "word error rate", -1, 0.35),
    "smollm2-8192": ("SmolLM2-135M, 8 192 tokens, prefill", "kl", "KL to exact, nats", -1, 0.30),
}
FIGURES = {
    "distance": "cosine distance", "top1": "top-1", "wer": "word error rate", "changed": "words changed",
    "kl": "KL, nats", "perplexity": "perplexity", "hidden": "hidden-state error",
}  # fmt: skip


def pretrained_rows(task: str) -> list[Row]:
    """The newest row of each method, cheapest first."""
    newest = {row["method"]: row for row in rows("pretrained") if row["task"] == task}
    return sorted(newest.values(), key=lambda row: float(row["cost_share"]))


def settings_named(row: Row) -> str:
    """The method by settings that differ from today's defaults: rows without parts come from before there were any."""
    settings = row["settings"]
    if settings["method"] != "refined" or "parts" in settings:
        return str(row["method"])
    block = settings["block"] if row["task"].startswith("smollm2") else None  # of causal calls
    return str(ca.method({**settings, "parts": 1, "slope": False, "block": block}))


def time_of(row: Row) -> str:
    """Of the whole model's answer."""
    return f"{row['seconds'] / row['exact_seconds']:.2f}" if row.get("exact_seconds") else "–"


def pretrained_table(task: str) -> Callable[[], str]:
    def write() -> str:
        found = pretrained_rows(task)
        if not found:
            return NOT_YET
        figures = [key for key in FIGURES if key in found[0]]
        body = [
            (
                f"`{settings_named(row)}`",
                percent(row["cost_share"]),
                time_of(row),
                *(f"{row[key]:.4f}" for key in figures),
            )
            for row in found
        ]
        head = ("method", "multiply-adds, of exact's", "time, exact = 1", *(FIGURES[key] for key in figures))
        return table(head, body) + origin(found, ", ".join(dict.fromkeys(row["examples"] for row in found)))

    return write


def pretrained_summary() -> str:
    """For each task: exact attention, and the best of the paper's recipe and of Refined inside the allowed cost."""
    body, seen = [], []
    for task, (name, key, words, better, most) in PRETRAINED.items():
        found = pretrained_rows(task)
        if not found:
            continue

        def told(kind: str, found: list[Row] = found, key: str = key, better: int = better, most: float = most) -> str:
            mine = [row for row in found if row["settings"]["method"] == kind]
            if key == "kl":  # strict centroids are another question
                mine = [row for row in mine if row["settings"].get("centroids_from", "block") == "block"]
            inside = [row for row in mine if row["cost_share"] <= most] or mine[:1]
            if not inside:
                return "–"
            best = max(inside, key=lambda row: better * float(row[key]))
            taken = f", time × {time_of(best)}" if best.get("exact_seconds") else ""
            return f"{best[key]:.4f} at {percent(best['cost_share'])}{taken}"

        exact = next((f"{row[key]:.4f}" for row in found if row["method"] == "exact"), "–")
        body.append((name, words, exact, told("improved"), told("refined"), told("tuned")))
        seen += found
    if not body:
        return NOT_YET
    head = ("model and task", "figure", "exact", "the paper's `improved`", "`refined`", "chosen by `tune`")
    return table(head, body) + origin(seen)


# ---- the papers again ----------------------------------------------------------------------------


def reproduced() -> list[tuple[Experiment, str, list[Row]]]:
    """Every experiment that has rows beyond smoke, at its largest scale."""
    found = [(each, best_scale(each, RESULTS)) for each in experiments().values()]
    return [(each, *best) for each, best in found if best is not None and best[0] != "smoke"]


def reproduced_table() -> str:
    """What came out first, and where all of it stands."""
    lines, seen = [], list[Row]()
    for each, scale, some in reproduced():
        said = each.findings(some, config_of(each, scale))
        page = f"[{each.name}]({PAGES.relative_to(ROOT)}/{each.name}-{scale}.md)"
        told = " ".join([*(said or [each.about + "."])[:1], *unfinished(each, scale, some)])
        lines.append(f"- {page} ({each.place}): {told}\n")
        seen += some
    return "".join(lines) + f"\n<sub>{where(seen)}.</sub>\n" if lines else NOT_YET


def write_reproduced(check: bool) -> list[Path]:
    """The page of each of them, and its picture; those whose text is out of date."""
    stale = []
    for each, scale, some in reproduced():
        path = PAGES / f"{each.name}-{scale}.md"
        picture = path.with_suffix(".png")
        text = markdown(each, scale, some, picture.name if picture.exists() else None)
        if not path.exists() or path.read_text() != text:
            stale.append(path)
            if not check:
                write_page(each, scale, some, PAGES)
    return stale


TABLES: dict[str, Callable[[], str]] = {
    "reproduced": reproduced_table,
    "pretrained": pretrained_summary,
    "pretrained-minilm": pretrained_table("minilm"),
    "pretrained-xquad": pretrained_table("xquad"),
    "pretrained-whisper": pretrained_table("whisper"),
    "pretrained-smollm2": pretrained_table("smollm2-8192"),
    "pretrained-smollm2-4096": pretrained_table("smollm2-4096"),
    "pretrained-smollm2-2048": pretrained_table("smollm2-2048"),
    "compare": compare_table("compare"),
    "compare-long": compare_table("compare-long"),
    "cpu": cpu_table,
    "cpu-memory": memory_table,
    "gpu": gpu_table,
    "gpu-figures": gpu_figures,
    "settings-refined": settings_table("from Improved to Refined"),
    "settings-parts": settings_table("slope and parts"),
    "settings-steps": settings_table("steps of k-means"),
    "settings-far": settings_table("starting far apart"),
    "settings-bias": settings_table("random thresholds in the hash"),
    "settings-transform": settings_table("transform of SMYRF"),
    "settings-once": settings_table("pairs counted once"),
    "settings-causal": settings_table("causal centroids"),
}


def filled(page: str) -> str:
    """The page with every marked table written anew."""
    return MARKED.sub(lambda found: found[1] + TABLES[found[2]]() + found[3], page)


def draw() -> None:
    """The Pareto picture of the newest comparison, and the crossings of the GPU rows of the first shape."""
    from clusterattn.measure.plots import pareto
    from clusterattn.measure.plots_speed import crossings

    found = newest_run("compare") if rows("compare") else []
    if found:
        png = pareto([row for row in found if row["budget"] == 1], [row for row in found if row["budget"] != 1])
        write_whole(PICTURE, with_palette(png))
    found = gpu_rows()
    if found:
        kind = ("h", "d", "dtype", "causal")
        first = [found[0][key] for key in kind]
        alike = [row for row in found if [row[key] for key in kind] == first]
        lengths = Counter(row["method"] for row in {(row["method"], row["n"]): row for row in alike}.values())
        alike = [row for row in alike if lengths[row["method"]] > 2]  # a line needs points
        write_whole(CROSSINGS, with_palette(crossings(alike)))


def with_palette(png: bytes) -> bytes:
    from PIL import Image

    small = io.BytesIO()
    image = Image.open(io.BytesIO(png)).convert("RGB")
    image = image.quantize(PICTURE_COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    image.save(small, format="png", optimize=True)
    return small.getvalue()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say which pages are out of date")
    args = parser.parse_args()
    stale = [path for path in pages() if filled(path.read_text()) != path.read_text()]
    for path in stale:
        if not args.check:
            write_whole(path, filled(path.read_text()))
        print(f"{path.relative_to(ROOT)} {'is out of date' if args.check else 'written'}")
    pages_of_papers = write_reproduced(args.check)
    for path in pages_of_papers:
        print(f"{path.relative_to(ROOT)} {'is out of date' if args.check else 'written'}")
    stale += pages_of_papers
    if not args.check:
        draw()
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
