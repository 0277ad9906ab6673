"""Pretrained models with other attention in them, not retrained: the whole curve of error against cost, and the bars.

    python benchmarks/pretrained.py prepare --data DATA --cache CACHE --prepared FOLDER    weights and data, once
    python benchmarks/pretrained.py run --prepared FOLDER [--device cuda] [--task minilm]  rows into results/, resumable
    python benchmarks/pretrained.py run --prepared FOLDER --task minilm --limit 40 --tune 0.14    what ca.tune chooses
    python benchmarks/pretrained.py show                                                   table, bars, pictures

`prepare` needs a network, scipy, gguf and accelerate, and flite for speech; `run` needs torch, transformers and
safetensors alone, and `show` matplotlib for the pictures.
Cost is the share of exact attention's multiply-adds in the swapped layers, grouping included; causal exact attention is
counted with the visible half alone. Seconds are those of the whole answer of the model, on a CPU of the processor.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm  # type: ignore[import-untyped]

import clusterattn as ca
from clusterattn._plan import LayerPlan
from clusterattn.measure import Row, append, environment, read, rows_path
from clusterattn.measure.cost import Shape, of_layer, shapes

HERE = Path(__file__).parent
RESULTS, PICTURES = HERE.parent / "results", HERE.parent / "docs" / "img"
sys.path.insert(0, str(HERE))


# ------------------------------------------------------------------------------------------------ what is compared


# by length: clusters, near keys from few to many, and how k-means looks at the queries
BUDGETS: dict[int, tuple[int, tuple[int, ...], dict[str, Any]]] = {
    256: (12, (6, 12, 24, 48, 96), {"rank": 8, "steps": 2}),
    512: (25, (16, 32, 64, 105, 160), {"rank": 12, "steps": 2}),
    1500: (100, (32, 64, 128, 256, 384), {"rank": 16, "steps": 3}),
}


def whole(n: int) -> list[ca.Method]:
    """For bidirectional attention over n tokens: every method at several budgets, exact attention first."""
    few, tops, look = BUDGETS[n]
    look = {**look, "parts": 1, "slope": False}
    return [
        ca.Exact(),
        ca.Refined(),  # as it comes
        *(ca.OracleTop(top=top) for top in tops),
        *(ca.Clustered(clusters=c) for c in (few, 2 * few, 4 * few)),
        *(ca.Improved(clusters=few, top=top) for top in tops[1:4]),
        ca.Improved(clusters=few, top=tops[2], steps=3),  # the paper's recipe at a cost near the bars'
        ca.Improved(clusters=2 * few, top=tops[2]),
        *(ca.Smyrf(rounds=r, q_seats=s, k_seats=s, dedup=True) for r, s in ((4, 32), (8, 32), (4, 64), (8, 64))),
        *(
            ca.Refined(clusters=few, top=32, **{**look, "steps": 5, "rank": None}, start=start)
            for start in ("random", "far")
        ),
        *(ca.Refined(clusters=few, top=top, **look) for top in tops),
        ca.Refined(clusters=few, top=tops[3], start="random", **look),
        ca.Refined(clusters=2 * few, top=tops[2], **look),
    ]


def blockwise(n: int) -> list[ca.Method]:
    """For causal attention. Strict unless it says centroids_from="block"."""
    look: dict[str, Any] = {"rank": 16, "steps": 2, "block": 256, "parts": 1, "slope": False}
    found: list[ca.Method] = [ca.Exact(), ca.Refined(), *(ca.OracleTop(top=top) for top in (32, 128, 512))]
    for source in ("block", "past"):
        found += [ca.Clustered(clusters=32, block=256, centroids_from=source)]
        found += [ca.Improved(clusters=32, top=top, block=256, centroids_from=source) for top in (32, 128, 512)]
        budgets = ((32, 32), (32, 128), (16, 128), (16, 256), (16, 512), (8, 512))
        found += [ca.Refined(clusters=c, top=top, centroids_from=source, **look) for c, top in budgets]
        found += [ca.Refined(clusters=16, top=256, centroids_from=source, start="random", **look)]
    return [*found, *(ca.Smyrf(rounds=r, q_seats=64, k_seats=64, dedup=True) for r in (4, 16))]


# (task, figure, at most this share of the cost, holds, in words); ``holds`` sees the row and exact attention's
Bar = tuple[str, str, float, Callable[[Row, Row], bool], str]
BARS: tuple[Bar, ...] = (
    ("minilm", "hidden", 0.27, lambda row, exact: row["hidden"] <= 0.15, "hidden-state error ≤ 0.15"),
    ("minilm", "hidden", math.inf, lambda row, exact: row["hidden"] <= 0.215 and _sloped(row, 25, 32),
     "hidden-state error ≤ 0.215 with 25 clusters, 32 near keys, one part and the slope"),
    ("minilm", "distance", 0.35, lambda row, exact: row["distance"] <= 0.0022, "embeddings' cosine distance ≤ 0.0022"),
    ("xquad", "top1", 0.35, lambda row, exact: row["top1"] >= exact["top1"] - 0.005, "top-1 within 0.5 points"),
    ("whisper", "wer", 0.25, lambda row, exact: row["wer"] <= exact["wer"] + 0.003 and row.get("seeds", 1) >= 5,
     "word error rate within 0.3 points, mean of five seeds"),
    ("smollm2-8192", "kl", 0.25, lambda row, exact: row["kl"] <= 0.007 and _centroids(row) == "block",
     "prefill (value-causal): KL ≤ 0.007 nats"),
    ("smollm2-8192", "perplexity", 0.25,
     lambda row, exact: row["perplexity"] <= 1.018 * exact["perplexity"] and _centroids(row) == "past",
     "strict: perplexity within 1.8 %"),
)  # fmt: skip


def _sloped(row: Row, clusters: int, top: int) -> bool:
    sizes = {"clusters": clusters, "top": top, "parts": 1, "slope": True}
    return all(row["settings"].get(name) == size for name, size in sizes.items())


def _centroids(row: Row) -> str | None:
    found: str | None = row["settings"].get("centroids_from")
    return found


# ------------------------------------------------------------------------------------------------ run


class Contender(NamedTuple):
    """What serves the layers of a model."""

    name: str
    settings: dict[str, Any]
    layers: Mapping[str, LayerPlan]  # those that are not named stay exact


def run(args: argparse.Namespace) -> None:
    from pretrained_tasks import TASKS

    from clusterattn import hf

    torch.set_grad_enabled(False)
    path = args.rows or rows_path(RESULTS, "pretrained", args.device)
    for name, make in TASKS.items():
        if args.task and not any(name.startswith(one) for one in args.task):
            continue
        if not (args.prepared / name.split("-")[0].replace("xquad", "minilm")).exists():
            print(f"{name}: not in {args.prepared}, left out")
            continue
        kept = [row for row in rows_of(path) if row["task"] == name and row["limit"] == args.limit]
        done = {row["method"] for row in kept if row.get("seeds", 1) == args.seeds}
        task = make(args.prepared, args.device, args.limit)
        wanted = [ca.method(one) for one in args.method] or (blockwise if task.causal else whole)(task.length)
        left = [each for each in wanted if str(each) not in done and not args.tune]
        asked = [each for each in args.tune if tuned_name(each, args.output) not in done]
        if not left and not asked:
            continue
        met: dict[str, list[Shape]] = {}
        started = clock(args.device)
        with hf.observe(task.part, partial(note, met)):
            exact = task.answer()
        exact_seconds = clock(args.device) - started
        around = {**environment(args.device), "transformers": __import__("transformers").__version__}
        around["commit"] = args.commit or around["commit"]
        contenders = [Contender(str(each), each.to_dict(), dict.fromkeys(met, each)) for each in left]
        contenders += [tuned(task, tolerance, args.output, args.state) for tolerance in asked]
        for each in tqdm(contenders, desc=name, unit="method"):
            figures, seconds = [], 0.0
            for seed in range(args.seeds):
                hf.swap(task.part, ca.Plan(each.layers, task.exact_below), seed=seed)
                started = clock(args.device)
                try:
                    answer = task.answer() if each.layers and each.name != "exact" else exact
                finally:
                    hf.restore(task.part)
                seconds += (clock(args.device) - started) / args.seeds
                figures.append(task.judge(answer, exact))
            share = sum(
                of_layer(each.layers.get(layer, ca.Exact()), task.heads, at, task.exact_below)
                for layer, at in met.items()
            ) / sum(of_layer(ca.Exact(), task.heads, at) for at in met.values())
            append(
                path,
                {
                    "theme": "pretrained",
                    "task": name,
                    "method": each.name,
                    "settings": each.settings,
                    "cost_share": share,
                    **{key: sum(one[key] for one in figures) / len(figures) for key in figures[0]},
                    "seeds": args.seeds,
                    "each_seed": figures if args.seeds > 1 else None,
                    "seconds": exact_seconds if each.name == "exact" else seconds,
                    "exact_seconds": exact_seconds,
                    "limit": args.limit,
                    "examples": task.examples,
                    "exact_below": task.exact_below,
                    "environment": around,
                },
            )
        del task
    print(path)


def clock(device: str) -> float:
    """Seconds. On a CPU those of this process alone: what else runs there does not count."""
    if torch.device(device).type == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def tuned(task: Any, tolerance: float, output: str | None, state: Path | None) -> Contender:
    """What ``ca.tune`` chooses by multiply-adds on examples that the task does not judge."""
    judge = None if output is None else getattr(task, output)
    plan = ca.tune(task.part, task.held_out(), tolerance, cost="multiply-adds", output=judge, state=state)
    print(f"tolerance {tolerance}: {plan.note['error']:.4f} at {plan.note['cost_share']:.1%} on what is not judged")
    named = {row["layer"]: row["method"] for row in plan.note["layers"]}
    settings = {"method": "tuned", "tolerance": tolerance, "output": output or "hidden states", "layers": named}
    return Contender(tuned_name(tolerance, output), settings, plan.layers)


def tuned_name(tolerance: float, output: str | None) -> str:
    return f"tuned:tolerance={tolerance}" + (f",output={output}" if output else "")


def note(seen: dict[str, list[Shape]], layer: str, call: Any) -> None:
    """The real lengths of every sequence that a layer meets."""
    if call.q.shape[2] > 1:  # single-token decoding is exact
        seen.setdefault(layer, []).extend(shapes(call.q, call.k, call.v, call.key_mask, call.query_mask, call.causal))


def rows_of(path: Path) -> list[Row]:
    return [row for row in read(path) if row.get("theme") == "pretrained"] if path.exists() else []


# ------------------------------------------------------------------------------------------------ show


def show(args: argparse.Namespace) -> int:
    from pretrained_picture import FIGURES, picture

    paths = [args.rows] if args.rows else sorted(RESULTS.glob("pretrained_*.jsonl"))
    rows = {(row["task"], row["method"]): row for path in paths for row in rows_of(path) if row["limit"] == args.limit}
    missed = 0
    for task in dict.fromkeys(task for task, _ in rows):
        mine = sorted((row for (name, _), row in rows.items() if name == task), key=lambda row: row["cost_share"])
        figures = [key for key in FIGURES if key in mine[0]]
        head = f"{'cost':>7}  {'time':>6}  " + "  ".join(f"{key:>10}" for key in figures)
        print(f"\n{task}: {mine[0]['examples']}\n{head}")
        for row in mine:
            told = "  ".join(f"{row[key]:10.4f}" for key in figures)
            taken = f"{row['seconds'] / row['exact_seconds']:6.2f}" if row.get("exact_seconds") else f"{'–':>6}"
            print(f"{row['cost_share']:7.1%}  {taken}  {told}  {row['method']}")
        for name, _, most, holds, words in BARS:
            exact = rows.get((task, "exact"))
            if name == task and exact is not None:
                met = [
                    row
                    for row in mine
                    if row["settings"]["method"] in ("refined", "tuned")
                    and row["cost_share"] <= most
                    and holds(row, exact)
                ]
                missed += not met
                by = f"{met[0]['method']} at {met[0]['cost_share']:.1%}" if met else "nothing"
                print(
                    f"{'MET ' if met else 'MISSED'}  {words} at ≤ {most:.0%}: {by}"
                    if most < 1
                    else f"{'MET ' if met else 'MISSED'}  {words}: {by}"
                )
        if args.pictures:
            args.pictures.mkdir(parents=True, exist_ok=True)
            (args.pictures / f"pretrained-{task}.png").write_bytes(picture(task, mine, figures))
    return 1 if missed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    first = parts.add_parser("prepare")
    first.add_argument("--data", type=Path, required=True, help="the folder of data sets")
    first.add_argument("--cache", type=Path, required=True, help="what is downloaded stays here")
    first.add_argument("--prepared", type=Path, required=True, help="the folder to write")
    second = parts.add_parser("run")
    second.add_argument("--prepared", type=Path, required=True)
    second.add_argument("--device", default="cpu")
    second.add_argument("--task", nargs="*", default=[], help="minilm, xquad, whisper, smollm2-8192, … or a beginning")
    second.add_argument("--method", nargs="*", default=[], help="these methods instead of the whole curve")
    second.add_argument("--seeds", type=int, default=1, help="figures are means over so many seeds")
    second.add_argument(
        "--tune", nargs="*", type=float, default=[], help="plans of ca.tune at these tolerances instead"
    )
    second.add_argument("--output", choices=("embeddings",), help="what a tuned plan is judged by; else hidden states")
    second.add_argument("--state", type=Path, help="a file in which tune keeps its measurements")
    second.add_argument("--commit", help="what the rows say where git can not tell")
    third = parts.add_parser("show")
    third.add_argument("--pictures", type=Path, default=PICTURES)
    for part in (second, third):
        part.add_argument("--limit", type=int, help="a few examples of each task, for trying things out")
        part.add_argument("--rows", type=Path, help="the file of rows, instead of results/")
    args = parser.parse_args()
    if args.part == "prepare":
        from pretrained_data import prepare

        prepare(args.data, args.cache, args.prepared)
        return 0
    if args.part == "run":
        run(args)
        return 0
    return show(args)


if __name__ == "__main__":
    sys.exit(main())
