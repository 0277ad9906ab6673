"""Rows on the embedded samples: every method at one budget, and, on the short one, one setting at a time.

    python benchmarks/sample.py                     everything, some minutes
    python benchmarks/sample.py --only compare      the short sample: some seconds
    python benchmarks/sample.py --only compare-long

The rows go to results/; `make tables` then brings tables and pictures up to date.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from torch import Tensor

import clusterattn as ca
from clusterattn.measure import Row, append, cost, embedded, environment, exact_answer, relative_error, rows_path
from clusterattn.measure.compare import compare, methods_for
from clusterattn.measure.sample import Sample

SEEDS = 5
_PAPER, _OURS = ca.Improved(clusters=25), ca.Refined(clusters=25, top=32, parts=1, slope=False, steps=5)
_SMYRF = ca.Smyrf(q_seats=32, k_seats=32)
_BLOCKS = ca.Refined(clusters=8, top=16, parts=1, slope=False, steps=5, block=64)
QUESTIONS: dict[str, list[ca.Method]] = {  # what is asked -> the settings side by side
    "from Improved to Refined": [
        _PAPER,
        dataclasses.replace(_PAPER, metric="euclid"),
        dataclasses.replace(_PAPER, metric="keys"),
        dataclasses.replace(_PAPER, metric="keys", steps=5),
        dataclasses.replace(_PAPER, metric="keys", steps=5, mass="softmax"),
        dataclasses.replace(_PAPER, metric="keys", steps=5, mass="tangent"),
        _OURS,
        ca.Refined(),  # as it comes: sizes of its own
    ],
    "slope and parts": [
        _OURS,
        dataclasses.replace(_OURS, slope=True),
        dataclasses.replace(_OURS, parts=8),
        dataclasses.replace(_OURS, parts=8, slope=True),
        ca.Refined(),
    ],
    "steps of k-means": [*(dataclasses.replace(_OURS, steps=steps) for steps in (1, 2, 5, 10)), ca.Refined()],
    "random thresholds in the hash": [_PAPER, dataclasses.replace(_PAPER, bias=True)],
    "starting far apart": [
        dataclasses.replace(method, start=start)
        for method in (ca.Clustered(clusters=25), _PAPER, _OURS)
        for start in ("random", "far")
    ],
    "transform of SMYRF": [
        dataclasses.replace(_SMYRF, transform=transform) for transform in ("asymmetric", "e2lsh", "crosspolytope")
    ],
    "pairs counted once": [
        dataclasses.replace(_SMYRF, rounds=rounds, dedup=dedup) for rounds in (4, 8) for dedup in (False, True)
    ],
    "causal centroids": [
        dataclasses.replace(method, centroids_from=source)
        for method in (_BLOCKS, ca.Refined())
        for source in ("past", "block")
    ],
}


def settings(sample: Sample, only: str | None = None) -> Iterator[Row]:
    """The output error of each setting, mean and range over seeds; the processor's time beside exact's."""
    around = environment()
    (b, h, n, m, d, e), given = sample.shape, (sample.q, sample.k, sample.v)
    answers: dict[bool, Tensor] = {}
    for question, methods in QUESTIONS.items():
        if only not in (None, question):
            continue
        causal = question.startswith("causal")
        truth = answers.setdefault(causal, exact_answer(sample.q, sample.k, sample.v, causal=causal))
        for method in methods:
            runs = [partial(ca.attention, *given, method=method, causal=causal, seed=seed) for seed in range(SEEDS)]
            errors = [relative_error(run(), truth) for run in runs]
            exact = partial(ca.attention, *given, method=ca.Exact(), causal=causal)
            exact_seconds, seconds = (min(processor_seconds(each) for _ in range(SEEDS)) for each in (exact, runs[0]))
            yield {
                "theme": "settings",
                "question": question,
                "method": str(method),
                "settings": method.to_dict(),
                "error": sum(errors) / SEEDS,
                "lowest": min(errors),
                "highest": max(errors),
                "seeds": SEEDS,
                "seconds": seconds,
                "exact_seconds": exact_seconds,
                "cost_share": cost.share(method, cost.Shape(n, m, d, e, causal, h // sample.k.shape[1])),
                "causal": causal,
                **dict(zip("bhnmde", (b, h, n, m, d, e), strict=True)),
                "source": sample.source,
                "environment": around,
            }


def processor_seconds(run: Callable[[], object]) -> float:
    """Of this process alone: what else runs on the machine does not count."""
    started = time.process_time()
    run()
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("compare", "compare-long", "settings"))
    parser.add_argument("--question", help="of the settings: this one alone")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "results")
    args = parser.parse_args()
    for theme, which in {"compare": "short", "compare-long": "long"}.items():
        if args.only in (None, theme):
            sample = embedded(which)
            found = compare(sample, methods_for(*sample.shape[2:4]))
            rows = [{**row, "theme": theme} for row in (*found.rows, *found.swept)]
            append(rows_path(args.out, theme), *rows)
            print(f"{len(rows)} rows in {rows_path(args.out, theme)}")
    if args.only in (None, "settings"):
        for row in settings(embedded(), args.question):
            append(rows_path(args.out, "settings"), row)
            print(f"{row['question']:<30} {row['method']:<70} {row['error']:.4f}", flush=True)


if __name__ == "__main__":
    main()
