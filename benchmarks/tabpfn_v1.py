"""TabPFN v1 on MNIST with other attention in it, not retrained: a real long bidirectional model, up to 200 000 rows.

    python benchmarks/tabpfn_v1.py prepare --weights FOLDER --images FOLDER       weights and table, once
    python benchmarks/tabpfn_v1.py run --rows 4000 --methods refined refined/exact  rows into results/
    python benchmarks/tabpfn_v1.py run --rows 60000 200000 --device cuda --dtype bfloat16
    python benchmarks/tabpfn_v1.py show

A method alone serves all attention; TRAIN/TEST gives the train rows (quadratic in their number) one method and the test
rows, which attend to the train rows, another. Each row tells KL(exact || method) of the class probabilities and the
accuracy over all test rows, both against the model with PyTorch's SDPA in the same dtype, the time of the whole forward
(the runs take turns with exact's; the median counts) and the share of exact attention's multiply-adds. With --seeds
quality is the mean over so many draws of a method (two of 10 000 test rows are all that some of them lie apart), times
are those of the first. Past 60 000 rows the table repeats with noise: time alone is told.

MNIST: 100 principal components, standardised on the train rows and clipped at 4; the first so many train rows.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from tqdm import tqdm  # type: ignore[import-untyped]

import clusterattn as ca
from clusterattn._rows import Row, append, environment, read, rows_path
from clusterattn.measure import interleaved

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from tabpfn_model import Table, TabPFN, prepare, prepared, table  # noqa: E402 (it lies beside this file)

THEME = "tabpfn"
RESULTS, CACHE = HERE.parent / "results", HERE.parent / ".cache" / "tabpfn_v1"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
METHODS = ("refined", "refined/exact", "improved", "clustered")


@dataclass(frozen=True)
class Setting:
    """A method for the train rows among themselves and one for the test rows over them."""

    train: ca.Method
    test: ca.Method

    @classmethod
    def parse(cls, text: str) -> Setting:
        train, _, test = text.partition("/")
        return cls(ca.method(train), ca.method(test or train))

    def __str__(self) -> str:
        return str(self.train) if self.train == self.test else f"{self.train}/{self.test}"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kind: str, *, seed: int = 0) -> Tensor:
        method = self.train if kind == "train" else self.test
        if isinstance(method, ca.Exact):  # what everybody has for free, with nothing in between
            return scaled_dot_product_attention(q, k, v)
        out: Tensor = ca.attention(q, k, v, method=method, seed=seed)
        return out

    def cost(self, rows: int, test_rows: int, d: int) -> tuple[float, float]:
        """Multiply-adds of one head: the train rows' and the test rows'."""
        return float(self.train.cost(rows, rows, d, d)), float(self.test.cost(test_rows, rows, d, d))


EXACT = Setting(ca.Exact(), ca.Exact())


@torch.no_grad()
def run(args: argparse.Namespace) -> None:
    if args.threads:
        torch.set_num_threads(args.threads)
    model, data, stored = prepared(args.prepared, DTYPES[args.dtype])
    model = model.to(args.device, DTYPES[args.dtype])
    settings = [Setting.parse(each) for each in args.methods]
    path = args.out or rows_path(RESULTS, THEME, args.device)
    around = environment(args.device)
    around["commit"] = args.commit or around["commit"]
    common = {"dtype": args.dtype, "device": args.device, "weights": stored, "seed": args.seed, "environment": around}
    seeds = range(args.seed, args.seed + args.seeds)
    for count in args.rows:
        rows = table(data, count, args.test_rows).to(args.device, DTYPES[args.dtype])
        for row in measure(model, rows, settings, args.repetitions, args.seconds, args.device, seeds):
            append(path, {**row, **common})
            print(line(row), flush=True)
    print(path)


def measure(
    model: TabPFN, rows: Table, settings: Sequence[Setting], repetitions: int, seconds: float, device: str,
    seeds: Sequence[int],
) -> Iterator[Row]:  # fmt: skip
    """Exact attention first, then every setting. All of them take turns, so rows come when the last turn is over."""

    def forward(setting: Setting, seed: int) -> Tensor:
        found: Tensor = model(rows, lambda *call: setting.attend(*call, seed=seed))
        return found

    runs = {str(setting): partial(forward, setting, seeds[0]) for setting in (EXACT, *settings)}
    drawn = seeds[:1] if rows.repeated else seeds
    steps = 1 + len(settings) * len(drawn) + len(runs) * repetitions
    n, d = len(rows.x_train), model.weights["encoder.bias"].shape[0] // model.heads
    with tqdm(total=steps, desc=f"{n} rows", unit="forward", mininterval=2) as bar:
        exact_logits = forward(EXACT, seeds[0]).float()  # this also warms up
        bar.update()
        found = {str(EXACT): [quality(exact_logits, exact_logits, rows.truth)]}
        for setting in settings:
            found[str(setting)] = []
            for seed in drawn:
                found[str(setting)].append(quality(forward(setting, seed).float(), exact_logits, rows.truth))
                bar.update()
        taken = interleaved(
            runs, repetitions=repetitions, warmup=0, device=device, seconds=seconds, progress=lambda: bar.update()
        )
    exact_cost = EXACT.cost(n, len(rows.x_test), d)
    for setting in (EXACT, *settings):
        label, cost = str(setting), setting.cost(n, len(rows.x_test), d)
        median, exact = (statistics.median(taken[each]) if taken[each] else None for each in (label, "exact"))
        yield {
            "theme": THEME,
            "rows": n,
            "test_rows": len(rows.x_test),
            "method": label,
            "train_method": setting.train.at(n, n, d, d).to_dict(),  # with the sizes that it chose
            "test_method": setting.test.at(len(rows.x_test), n, d, d).to_dict(),
            **({} if rows.repeated else means(found[label])),
            "seconds": median,
            "exact_seconds": exact,
            "speedup": exact / median if exact and median else None,
            "repetitions": len(taken[label]),
            "train_cost_share": cost[0] / exact_cost[0],
            "cost_share": sum(cost) / sum(exact_cost),
        }


def quality(logits: Tensor, exact: Tensor, truth: Tensor) -> dict[str, float]:
    """Mean over the test rows."""
    told, true = logits.log_softmax(-1), exact.log_softmax(-1)
    return {
        "kl": float((true.exp() * (true - told)).sum(-1).mean()),
        "accuracy": float((logits.argmax(-1) == truth).float().mean()),
        "exact_accuracy": float((exact.argmax(-1) == truth).float().mean()),
        "agreement": float((logits.argmax(-1) == exact.argmax(-1)).float().mean()),
    }


def means(found: Sequence[dict[str, float]]) -> Row:
    """Over the seeds; where there are several, what each of them came to stands beside."""
    mean = {key: statistics.fmean(each[key] for each in found) for key in found[0]}
    return {**mean, "seeds": len(found), "by_seed": [*found]} if len(found) > 1 else mean


def line(row: Row) -> str:
    """One row for people."""
    found = f"KL {row['kl']:8.5f}  accuracy {row['accuracy']:.4f}" if "kl" in row else f"{'(time alone)':<28}"
    taken = "" if row["seconds"] is None else f"  {row['seconds'] * 1e3:9.1f} ms  {row['speedup']:6.2f}×"
    costs = f"multiply-adds {row['train_cost_share']:6.2%} (train rows) {row['cost_share']:6.2%} (all)"
    return f"{row['rows']:>7} + {row['test_rows']:<6} {found}{taken}  {costs}  {row['method']}"


def show(args: argparse.Namespace) -> None:
    paths = [args.out] if args.out else sorted(RESULTS.glob(f"{THEME}_*.jsonl"))
    found: dict[tuple[Any, ...], Row] = {}  # the newest row of each setting
    for row in (row for path in paths for row in read(path)):
        machine = row["environment"]["hardware"], row["dtype"]
        found[(*machine, row["rows"], row["test_rows"], row["method"], row["seed"])] = row
    for place in dict.fromkeys(key[:2] for key in found):
        print("\n" + ", ".join(place))
        for key, row in sorted(found.items(), key=lambda item: item[0][2:4]):
            if key[:2] == place:
                print(line(row))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    first, second, third = (parts.add_parser(name) for name in ("prepare", "run", "show"))
    first.add_argument("--weights", type=Path, required=True, help="folder with the sdist of tabpfn 0.1, or unpacked")
    first.add_argument("--images", type=Path, required=True, help="folder with MNIST's four idx files")
    for part in (first, second):
        part.add_argument("--prepared", type=Path, default=CACHE, help="what prepare writes and run reads")
    second.add_argument("--rows", type=int, nargs="+", default=[1000, 4000], help="train rows")
    second.add_argument("--test-rows", type=int, default=10000)
    second.add_argument("--methods", nargs="+", default=METHODS, help="METHOD, or TRAIN/TEST, e.g. refined/exact")
    second.add_argument("--device", default="cpu")
    second.add_argument("--dtype", choices=DTYPES, default="float32")
    second.add_argument("--repetitions", type=int, default=3, help="timed turns after the first forward; 0: none")
    second.add_argument("--seconds", type=float, help="no new round of turns after so long")
    second.add_argument("--threads", type=int)
    second.add_argument("--seed", type=int, default=0)
    second.add_argument("--seeds", type=int, default=1, help="draws of each method, from --seed on: means over them")
    second.add_argument("--commit", help="what the rows say where git can not tell")
    for part in (second, third):
        part.add_argument("--out", type=Path, help="the file of rows, instead of results/")
    args = parser.parse_args()
    try:
        if args.part == "prepare":
            print(*prepare(args.weights, args.images, args.prepared), sep="\n")
        else:
            {"run": run, "show": show}[args.part](args)
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
