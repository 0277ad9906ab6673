"""Write the tables and pictures of README.md and docs/ from the rows in results/: `make tables`.

    python benchmarks/readme_tables.py           tables between their marks, the papers' pages, the pictures in docs/img
    python benchmarks/readme_tables.py --check   change nothing; exit code 1 where a table is out of date

A mark is an HTML comment, `table:NAME`, and its table ends at the next `/table`. The newest row of its kind wins.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # what lies beside this file

import table_scale
import table_words as words
from table_auto import auto_table
from table_files import files_tree
from table_models import defaults_table, pretrained_rows, pretrained_summary, pretrained_table, tabpfn_table
from table_readings import readings_table, toy_table
from table_speed import (
    CROSSINGS,
    box,
    compare_table,
    cpu_table,
    gpu_bars,
    gpu_causal_table,
    gpu_figures,
    gpu_rows,
    gpu_table,
    host_table,
    memory_table,
    settings_table,
)
from table_sweep import sweep_table
from table_words import NOT_YET, ROOT, newest_run, rows

from clusterattn._files import write_whole
from clusterattn.measure import Row
from clusterattn_papers.reproduce import Experiment, experiments
from clusterattn_papers.reproduce.page import best_scale, markdown, shown, unfinished, where
from clusterattn_papers.reproduce.page import write as write_page
from clusterattn_papers.reproduce.runner import without_rows

DOCS = ROOT / "docs"
PICTURES = DOCS / "img"
PAGES = ROOT / "results" / "reproduce"
MARKED = re.compile(r"(<!-- table:([\w-]+) -->\n).*?(<!-- /table -->)", re.DOTALL)
PICTURE_COLOURS = 256  # a palette: the file shrinks to less than half
DRAWN = ("minilm", "whisper", "smollm2-8192")  # pretrained tasks that have a picture


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]


# ---- the papers again ----------------------------------------------------------------------------

PAPERS = {
    "clustered": "Clustered attention (Vyas, Katharopoulos, Fleuret 2020)",
    "smyrf": "SMYRF (Daras, Kitaev, Odena, Dimakis 2020), its rebuttal's experiments",
    "clusterformer": "ClusterFormer (Wang et al. 2022)",
}


def reproduced() -> list[tuple[Experiment, str, list[Row]]]:
    """Every experiment that has rows beyond smoke, at its largest scale."""
    found = [(each, best_scale(each, words.RESULTS)) for each in experiments().values()]
    return [(each, *best) for each, best in found if best is not None and best[0] != "smoke"]


def reproduced_table() -> str:
    """Paper by paper: what came out of each experiment first, and where all of it stands."""
    parts: dict[str, list[str]] = {paper: [] for paper in PAPERS}
    seen = list[Row]()
    for each, scale, some in reproduced():
        came_out = shown(each, scale, some).findings or [f"{each.about}."]
        page = f"../results/reproduce/{each.name}-{scale}"
        picture = (
            f"\n![{each.place}: {each.about}]({page}.png)\n" if (PAGES / f"{each.name}-{scale}.png").exists() else ""
        )
        text = " ".join([came_out[0], *unfinished(each, scale, some)])
        about = f"**{each.place}**, {each.about}. {text}"
        more = f"[All of it]({page}.md): tables, the paper's numbers, what differs."
        parts[each.name.partition("-")[0]].append(f"### {each.name}\n\n{about}\n{picture}\n{more}\n")
        seen += some
    if not seen:
        return NOT_YET
    body = [f"## {PAPERS[paper]}\n\n" + "\n".join(found) for paper, found in parts.items() if found]
    return "\n" + "\n".join(body) + f"\n<sub>{where(seen)}.</sub>\n"


def missing_table() -> str:
    """What has not been run at small."""
    found, made = without_rows(list(experiments()), "small", words.RESULTS), experiments()
    if all(len(cells) == count for cells, count in found.values()):
        return NOT_YET
    body = [
        (f"`{name}`", f"{made[name].place}, {made[name].about}", str(len(cells)), str(count))
        for name, (cells, count) in found.items()
        if cells
    ]
    return words.table(("experiment", "what", "cells without rows", "of"), body, words=2) if body else "None.\n"


def write_reproduced(check: bool) -> list[Path]:
    """The page of each of them, and its picture; those whose text is out of date. Pictures have no such test, so they
    are drawn anew whenever anything is written."""
    stale = []
    for each, scale, some in reproduced():
        path = PAGES / f"{each.name}-{scale}.md"
        picture = path.with_suffix(".png")
        if not path.exists() or path.read_text() != markdown(
            each, scale, some, picture.name if picture.exists() else None
        ):
            stale.append(path)
        if not check:
            write_page(each, scale, some, PAGES)
    return stale


# ---- all of them ---------------------------------------------------------------------------------

TABLES: dict[str, Callable[[], str]] = {
    "box": box,
    "files": files_tree,
    "reproduced": reproduced_table,
    "missing": missing_table,
    "readings": readings_table,
    "readings-toy": toy_table,
    "pretrained": pretrained_summary,
    "pretrained-defaults": defaults_table,
    "pretrained-minilm": pretrained_table("minilm"),
    "pretrained-xquad": pretrained_table("xquad"),
    "pretrained-whisper": pretrained_table("whisper"),
    "pretrained-smollm2": pretrained_table("smollm2-8192"),
    "tabpfn": tabpfn_table("cuda"),
    "tabpfn-cpu": tabpfn_table("cpu"),
    "compare": compare_table("compare"),
    "compare-long": compare_table("compare-long"),
    "cpu": cpu_table(causal=False),
    "cpu-causal": cpu_table(causal=True),
    "cpu-memory": memory_table,
    "gpu": gpu_table,
    "gpu-causal": gpu_causal_table,
    "sweep": sweep_table,
    "auto": auto_table,
    "gpu-figures": gpu_figures,
    "gpu-bars": gpu_bars,
    "host": host_table,
    "settings-refined": settings_table("from Improved to Refined"),
    "settings-parts": settings_table("slope and parts"),
    "settings-steps": settings_table("steps of k-means"),
    "settings-far": settings_table("starting far apart"),
    "settings-bias": settings_table("random thresholds in the hash"),
    "settings-transform": settings_table("transform of SMYRF"),
    "settings-once": settings_table("pairs counted once"),
    "settings-causal": settings_table("causal centroids"),
    **table_scale.TABLES,
}


def filled(page: str) -> str:
    """The page with every marked table written anew."""
    return MARKED.sub(lambda found: found[1] + TABLES[found[2]]() + found[3], page)


def draw() -> None:
    """The Pareto pictures of the newest comparisons, the crossings of the GPU rows of the first shape, and the curves
    of the pretrained models."""
    from pretrained_picture import FIGURES, picture

    from clusterattn.measure.plots import pareto
    from clusterattn.measure.plots_speed import crossings

    for theme, name in {"compare": "pareto", "compare-long": "pareto-long"}.items():
        found = newest_run(theme) if rows(theme) else []
        if found:
            png = pareto([row for row in found if row["budget"] == 1], [row for row in found if row["budget"] != 1])
            write_whole(PICTURES / f"{name}.png", with_palette(png))
    found = gpu_rows()
    if found:
        kind = ("h", "d", "dtype", "causal", "data")
        first = [found[0].get(key) for key in kind]
        alike = [row for row in found if [row.get(key) for key in kind] == first]
        lengths = Counter(row["method"] for row in {(row["method"], row["n"]): row for row in alike}.values())
        # a line needs points; the default is shown wherever it was measured
        alike = [row for row in alike if lengths[row["method"]] > 2 or row["method"] == "refined"]
        write_whole(DOCS / CROSSINGS, with_palette(crossings(alike)))
    for task in DRAWN:
        found = next(iter(pretrained_rows(task)), [])
        if found:
            png = picture(task, found, [key for key in FIGURES if key in found[0]])
            write_whole(PICTURES / f"pretrained-{task}.png", with_palette(png))


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
