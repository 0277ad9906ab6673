"""ClusterFormer, Table 8: pretrain a small model by masked words and next sentences, then fine-tune it on GLUE."""

from __future__ import annotations

import copy
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from clusterattn._rows import Row

from ..models.masked import Body, Tuned
from ..tasks import glue
from ..tasks.files import folder_of
from ..tasks.masked import FineTuning, Masked, published
from ..train import Settings, fit, judge
from ._experiment import Cell, Context, Experiment, Table, beside, chosen, lead, pinned, spread
from ._readings import DEFAULT, in_paper, reading
from ._readings import SAYS as READ
from ._texts import against_paper

# GLUE dev, as printed: BERT-small and the pretrained ClusterFormer
PUBLISHED: dict[str, dict[tuple[str, str], float]] = {
    "transformer": {
        ("cola", "matthews"): 27.8, ("stsb", "pearson"): 78.8, ("stsb", "spearman"): 77.0, ("mrpc", "f1"): 83.4,
        ("mrpc", "accuracy"): 76.2, ("rte", "accuracy"): 61.8, ("sst2", "accuracy"): 89.7,
    },
    "clusterformer": {
        ("cola", "matthews"): 34.2, ("stsb", "pearson"): 82.7, ("stsb", "spearman"): 82.4, ("mrpc", "f1"): 85.2,
        ("mrpc", "accuracy"): 77.7, ("rte", "accuracy"): 60.3, ("sst2", "accuracy"): 88.3,
    },
}  # fmt: skip
NOT_HERE = "MNLI 77.6/77.0 and 75.21/75.7, QQP 68.1/87.0 and 83.1/86.9, QNLI 86.4 and 82.5"
SPECS = {"transformer": "exact", DEFAULT: reading(DEFAULT, 3)}  # rows bear the reading's own name
SAYS = {"transformer": "plain attention (BERT-small)", DEFAULT: READ[DEFAULT]}
DATA = ("gutenberg", "glue-small", "matching", "stsb", "sentences")  # and enwik8, which is one file


@dataclass(frozen=True)
class PretrainingConfig:
    invented: bool = False
    pieces: tuple[str, ...] = ("cola", "mrpc", "rte", "stsb", "sst2")
    seeds: tuple[int, ...] = (0, 1, 2)
    scratch: bool = True  # fine-tune models that were not pretrained, too
    dim: int = 256
    heads: int = 4
    layers: int = 4
    length: int = 128
    vocabulary: int = 8000
    steps: int = 6000
    batch: int = 64
    lr: float = 1e-3
    tuning_epochs: int = 5
    tuning_batch: int = 32
    tuning_lr: float = 2e-4
    precision: str = "bf16"
    seconds: float = 250.0


class Table8(Experiment):
    name = "clusterformer-table8"
    place = "Table 8"
    about = "pretraining (masked words, next sentence) with and without clustering, then GLUE; also needs enwik8"
    needs = DATA
    scales: ClassVar[dict[str, Any]] = {
        "smoke": PretrainingConfig(
            invented=True, pieces=("cola", "stsb"), seeds=(0,), dim=16, heads=2, layers=1, length=25, vocabulary=60,
            steps=4, batch=8, tuning_epochs=1, tuning_batch=16, precision="no", seconds=1.0,
        ),
        "small": PretrainingConfig(),
        "paper": PretrainingConfig(
            scratch=False, dim=512, heads=8, length=512, vocabulary=30_522, steps=1_000_000, batch=256, lr=1e-4,
            tuning_epochs=10, tuning_lr=5e-5, seconds=500_000.0,
        ),
    }  # fmt: skip

    def cells(self, config: PretrainingConfig) -> list[Cell]:
        return [
            Cell(
                f"{method}, {'pretrained' if pretrained else 'from scratch'}, seed {seed}",
                {"method": method, "spec": spec, "pretrained": pretrained, "seed": seed},
                config.seconds * (1.0 if pretrained else 0.4),
            )
            for seed in config.seeds
            for method, spec in SPECS.items()
            for pretrained in ((True, False) if config.scratch else (True,))
        ]

    def run(self, cell: Cell, config: PretrainingConfig, context: Context) -> list[Row]:
        seed = cell.settings["seed"]
        documents = invented() if config.invented else published(context.data)
        task = Masked(documents, vocabulary=config.vocabulary, length=config.length)
        torch.manual_seed(seed)
        model = task.model(pinned(cell.settings["spec"]), dim=config.dim, heads=config.heads, layers=config.layers)
        rows: list[Row] = []
        if cell.settings["pretrained"]:
            settings = Settings(
                steps=config.steps,
                batch=config.batch,
                judge_batch=256,
                optimizer="adamw",
                lr=config.lr,
                warmup=config.steps // 12,
                decay="linear",
                clip=1.0,
                precision=config.precision,
                evaluate=max(config.steps // 4, 1),
                graphs=True,
                seed=seed,
            )
            fitted = fit(task, model, settings, folder=context.work / "text", device=context.device, tick=context.tick)
            rows = [{"piece": "text", **fitted.best, "steps": fitted.steps, "seconds": fitted.seconds}]
        for name in config.pieces:
            rows.append({"piece": name, **self._tuned(name, copy.deepcopy(model.body), task, seed, config, context)})
        return rows

    def _tuned(
        self, name: str, body: Body, task: Masked, seed: int, config: PretrainingConfig, context: Context
    ) -> dict[str, float]:
        piece = glue.PIECES[name]
        if config.invented:
            texts = glue.invented(piece, {"train": 32, "dev": 16, "test": 16}, config.length, seed)
        else:
            texts = piece.read(folder_of(context.data, piece.archive), seed)
        tuning = FineTuning(piece, texts, task.tokenizer, length=config.length)
        torch.manual_seed(seed)
        model = Tuned(body, piece.labels)
        steps = config.tuning_epochs * -(-len(texts["train"]) // config.tuning_batch)
        settings = Settings(
            epochs=config.tuning_epochs,
            batch=config.tuning_batch,
            judge_batch=256,
            optimizer="adamw",
            lr=config.tuning_lr,
            warmup=steps // 10,
            decay="linear",
            clip=1.0,
            precision=config.precision,
            graphs=True,
            seed=seed,
        )
        fitted = fit(tuning, model, settings, folder=context.work / name, device=context.device, tick=context.tick)
        return judge(tuning, fitted.model, "test", batch=256, device=context.device)

    def tables(self, rows: Sequence[Row], config: PretrainingConfig) -> list[Table]:
        shown = [key for key in PUBLISHED["transformer"] if key[0] in config.pieces]
        table = Table(
            "GLUE after pretraining (the paper's | ours)",
            [
                "Model",
                *(f"{glue.PIECES[piece].title} {measure}" for piece, measure in shown),
                "hidden words, nats",
                "next text, %",
            ],
            notes=["± is the standard deviation over seeds.", f"Not here, for want of training data: {NOT_HERE}."],
        )
        for pretrained in (True, False) if config.scratch else (True,):
            for method in SPECS:
                same = {"method": method, "pretrained": pretrained}
                cells = [
                    beside(
                        PUBLISHED[in_paper(method)][piece, measure] if pretrained else None,
                        chosen(rows, measure, piece=piece, **same),
                        times=100,
                    )
                    for piece, measure in shown
                ]
                table.rows.append(
                    [
                        f"{SAYS[method]}, {'pretrained' if pretrained else 'from scratch'}",
                        *cells,
                        spread(chosen(rows, "nll", piece="text", **same), 2) if pretrained else "–",
                        spread(chosen(rows, "next_accuracy", piece="text", **same), times=100) if pretrained else "–",
                    ]
                )
        return [table]

    def differences(self, config: PretrainingConfig) -> list[str]:
        text = "enwik8, or its beginning, without its markup, and ten books"
        text = "words made up in code" if config.invented else text
        return [
            f"Pretrained on {text}, for {config.steps} batches of {config.batch} inputs of {config.length} tokens; the "
            "paper does not name its text, but compares with BERT-small (Wikipedia and 11 000 books, a million batches "
            "of 256). So the scores are far below the published ones; what can be compared is one row with the other.",
            f"{config.layers} layers of width {config.dim}, {config.heads} heads; published 4, 512, 8. The rows of "
            "plain attention are trained here in the same way, not the published BERT-small.",
            f"Lower-case WordPiece of {config.vocabulary}. An input is two runs of tokens that need not begin with a "
            "sentence; 30 % of the batches are shorter. All else as BERT: 15 % of the tokens asked for, 80/10/10. "
            f"{config.precision.replace('no', 'fp32')}, fine-tuning too.",
            "The number of clusters in pretraining is not told; k = 3, as the paper has it for sentences.",
            f"Fine-tuned for {config.tuning_epochs} epochs with one learning rate, {config.tuning_lr}; published: the "
            "best of four on the dev set. MNLI, QQP and QNLI are not run.",
            *(f"{glue.PIECES[name].title}: {glue.PIECES[name].split}." for name in config.pieces),
        ]

    def findings(self, rows: Sequence[Row], config: PretrainingConfig) -> list[str]:
        def scores(method: str, pretrained: bool) -> dict[int, float]:
            """Of each seed, in points: the mean over all the tasks."""
            found = {
                seed: [
                    chosen(rows, "score", piece=piece, method=method, pretrained=pretrained, seed=seed)
                    for piece in config.pieces
                ]
                for seed in config.seeds
            }
            return {
                seed: 100 * statistics.fmean(map(statistics.fmean, each)) for seed, each in found.items() if all(each)
            }

        def apart(one: dict[int, float], other: dict[int, float]) -> list[float]:
            return [one[seed] - other[seed] for seed in one if seed in other]

        lines = []
        found = apart(scores(DEFAULT, True), scores("transformer", True))
        if found:
            ours, verdict = lead(found)
            theirs = statistics.fmean(
                PUBLISHED["clusterformer"][piece, glue.PIECES[piece].measure]
                - PUBLISHED["transformer"][piece, glue.PIECES[piece].measure]
                for piece in config.pieces
            )
            lines.append(
                f"Pretrained, {SAYS[DEFAULT]}, is {ours} points from plain attention, the mean over "
                f"{len(config.pieces)} tasks and its standard error over seeds (paper, on these: "
                f"{theirs:+.1f}): {against_paper(verdict, theirs)}."
            )
        for method in SPECS:
            found = apart(scores(method, True), scores(method, False))
            if found:
                gain, verdict = lead(found)
                doubt = ", not told apart from none at 95 %" if verdict == "not told apart" else ""
                lines.append(f"Pretraining is worth {gain} points to {SAYS[method]}{doubt}.")
        return lines


def invented(count: int = 4, words: int = 400) -> list[str]:
    dice = random.Random(0)
    return [" ".join(dice.choices(glue.INVENTED, k=words)) + "." for _ in range(count)]


EXPERIMENTS: list[Any] = [Table8]
