"""The papers' commands, which `clusterattn` finds here: train, reproduce, clusters and report."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clusterattn._errors import bad_value
from clusterattn._extras import need
from clusterattn.cli.arguments import command_line, device_of, dtype_of, need_now, plainly
from clusterattn.measure.show import progress
from clusterattn.methods import method as method_of

from .show import Run, show_clusters, show_examples, show_experiments, show_missing, show_reproduced, show_trained

if TYPE_CHECKING:
    from clusterattn.methods import Method

    from .tasks import Task
    from .train import Fitted, Settings

BASELINE = "baseline"  # the folder, in that of the model, of the same with exact attention
Device = Annotated[str, typer.Option(help="cpu or cuda; by default cuda where there is one.", show_default=False)]


def train(
    task: Annotated[str, typer.Argument(help="classify, pairs, ranking, translate, speech or masked.")],
    data: Annotated[
        Path,
        typer.Option(
            help="classify: CSV, TSV or JSONL with text and label; pairs and ranking: text_a, text_b, label; "
            "translate: a TSV of two columns, or a folder with train.de, train.en, …; speech: a folder of .wav with "
            ".txt beside each; masked: text. A folder may hold train, dev and test; else some of it is held out."
        ),
    ],
    method: Annotated[str, typer.Option(help="NAME or NAME:key=value,…")] = "refined",
    out: Annotated[
        Path, typer.Option(help="Folder of the trained model. A training that was interrupted goes on.")
    ] = Path("clusterattn-model"),
    length: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Cut longer inputs here (default: 8192 words for classify, 128 tokens for translate and masked, which "
            "needs 15). Speech and, in training, translate leave out what is longer.",
            show_default=False,
        ),
    ] = None,
    dim: Annotated[int, typer.Option(min=1, help="Width of the model.")] = 128,
    heads: Annotated[int, typer.Option(min=1)] = 4,
    layers: Annotated[int, typer.Option(min=1)] = 2,
    dropout: Annotated[
        float,
        typer.Option(min=0.0, max=0.95, help="Of the layers; classify, pairs, ranking drop 0.3 of word vectors, too."),
    ] = 0.1,
    epochs: Annotated[int, typer.Option(min=1)] = 10,
    batch: Annotated[int, typer.Option(min=1, help="Examples in an update.")] = 32,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 5e-4,
    decay: Annotated[str, typer.Option(help="constant, linear, root or plateau.")] = "plateau",
    warmup: Annotated[int, typer.Option(min=0, help="Updates until the full learning rate.")] = 0,
    patience: Annotated[int, typer.Option(min=1, help="Stop after so many epochs without gain on dev.")] = 5,
    precision: Annotated[str, typer.Option(help="no (fp32), bf16 or fp16.")] = "no",
    seed: Annotated[int, typer.Option(help="Of splits, order, dropout and draws.")] = 0,
    device: Device = "",
    baseline: Annotated[
        bool, typer.Option("--baseline", help="Train the same model with exact attention, too, and show both.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON and nothing else.")] = False,
) -> None:
    """Train a model with any attention on your own data: a model folder, its figures, a learning curve.

    Killed at any moment, the same command goes on from its last checkpoint. One is written after an epoch, at most
    every 20 s.
    Several GPUs or machines: `accelerate launch -m clusterattn.cli train …`.

    [bold]Examples[/]

      clusterattn train classify --data reviews.csv

      clusterattn train classify --data reports.jsonl --length 8192 --method refined:clusters=64 --batch 8

      clusterattn train pairs --data questions.tsv --method smyrf:rounds=2 --out matcher --baseline

    [bold]Then, in Python[/]

      task, model = clusterattn_papers.train.load("clusterattn-model"); task.predict(model, ["some text"])
    """
    with plainly():
        need_now("rich", "matplotlib")
        from clusterattn._rows import dumps

        from .tasks import task_named
        from .train import Settings

        need("accelerate", "train")
        _check_folder(out)
        if out.is_dir() and any(out.iterdir()) and not (out / "training").is_dir():
            got = f"{out}, which holds other files, or a model without its training/"
            raise bad_value("--out, a new folder or one whose training can go on", got, "another name")
        if dim % heads:
            got = f"--dim {dim} --heads {heads}"
            raise bad_value("--heads that divides --dim", got, f"--dim {heads * -(-dim // heads)}")
        kind, chosen, where = task_named(task), method_of(method), _best_device(device)
        settings = Settings(
            epochs=epochs,
            batch=batch,
            lr=lr,
            decay=decay,
            warmup=warmup,
            patience=patience,
            precision=precision,
            seed=seed,
        )
        if baseline and chosen.name == "exact":
            raise bad_value("--baseline beside another method than exact", f"--method {method}", "leaving it out")
        made = kind.read(data, length=length, seed=seed)
        if not as_json:
            show_examples(made)
        sizes: dict[str, Any] = {"dim": dim, "heads": heads, "layers": layers, "dropout": dropout}
        wanted = {out: chosen, **({out / BASELINE: method_of("exact")} if baseline else {})}
        fitted = {folder: _fitted(made, each, sizes, settings, folder, where) for folder, each in wanted.items()}
        if not _main_process():
            return
        runs = [_judged(made, wanted[folder], sizes, folder, each) for folder, each in fitted.items()]
        if as_json:
            print(dumps({**runs[0].figures(), **({BASELINE: runs[1].figures()} if baseline else {})}))
        else:
            show_trained(made, runs)


def reproduce(
    names: Annotated[list[str] | None, typer.Argument(help="Experiments, as --list names them; or all.")] = None,
    scale: Annotated[
        str, typer.Option(help="smoke (seconds, CPU, invented data), small (minutes, one GPU), paper (as published).")
    ] = "smoke",
    data: Annotated[
        Path | None,
        typer.Option(help="Folder of the data sets (folders, or archives as published).", show_default=False),
    ] = None,
    device: Device = "",
    out: Annotated[
        Path, typer.Option(help="Folder for rows; tables and pictures go to its sub-folder reproduce.")
    ] = Path("results"),
    jobs: Annotated[int, typer.Option(min=1, help="Models trained at once, sharing the device.")] = 1,
    only: Annotated[
        str | None, typer.Option(help="Only cells whose name this regular expression finds.", show_default=False)
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Measure time anew where its rows are of another commit.")
    ] = False,
    commit: Annotated[
        str | None, typer.Option(help="What the rows say where git can not tell.", show_default=False)
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="Every table and figure of the papers, and stop.")] = False,
    missing: Annotated[
        bool, typer.Option("--missing", help="What has no rows yet at this scale, by default of all, and stop.")
    ] = False,
) -> None:
    """Run a table or a figure of the papers again, and put the paper's number beside ours.

    What was done before is not done again: an interrupted command goes on where it was.

    [bold]Examples[/]

      clusterattn reproduce --list

      clusterattn reproduce clustered-fig5

      clusterattn reproduce clustered-table1 clusterformer-table2 --scale small --data datasets --device cuda --jobs 8

      clusterattn reproduce --missing --scale small
    """
    with plainly():
        need_now("rich", "matplotlib")
        from .reproduce import experiments, page, runner

        _check_folder(out)
        found = experiments()
        if listed:
            show_experiments(found)
            return
        if not names and not missing:
            raise bad_value("the name of an experiment", "none", "`clusterattn reproduce --list`")
        wanted = list(found) if not names or names == ["all"] else names
        if missing:
            show_missing(runner.without_rows(wanted, scale, out, only), names=bool(names))
            return
        with progress() as tick:
            outcome = runner.reproduce(
                wanted,
                scale,
                data=data,
                device=_best_device(device),
                out=out,
                jobs=jobs,
                only=only,
                again=again,
                commit=commit,
                tick=tick,
            )
        for name in wanted:
            written = page.write(found[name], scale, outcome.rows[name], out / "reproduce")
            show_reproduced(found[name], scale, outcome.rows[name], written)
        for label, why in outcome.failed.items():
            typer.echo(f"failed: {label}\n{why}", err=True)
        if outcome.failed:
            raise typer.Exit(1)


def clusters(
    model: Annotated[str, typer.Argument(help="The folder of a Hugging Face model, or its id on the hub.")],
    data: Annotated[
        Path,
        typer.Option(help="Text (a passage per line, or --length), a folder of these; or a folder of .wav."),
    ],
    method: Annotated[
        str | None,
        typer.Option(
            help="Whose clusters: clustered, improved or refined, with settings. Default: refined, a cluster for every "
            "20 tokens of the longest text.",
            show_default=False,
        ),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(help="Only layers whose name this expression finds, such as encoder.", show_default=False),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(min=2, help="Cut text into windows of so many tokens (default: lines).", show_default=False),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Use so many sequences, spread evenly over the data.")] = 8,
    batch: Annotated[int, typer.Option(min=1, help="Sequences at a time.")] = 4,
    device: Device = "",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    out: Annotated[Path, typer.Option(help="Folder for clusters.md, the pictures and rows.jsonl.")] = Path(
        "clusterattn-clusters"
    ),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print rows (one for each head) as JSON; no folder is written.")
    ] = False,
) -> None:
    """The clusters of a pretrained model: do they persist over layers, do heads differ, what do they hold?

    The model runs as it is, with exact attention; beside it the queries of every head are grouped as a method would.
    Groupings are compared by the adjusted Rand index: 1 where two heads make the same clusters, 0 where they agree by
    chance alone. k-means starts from drawn queries, so the yardstick is the same head grouped from another draw: two
    heads cannot agree more than that.

    What clusters hold is told in pairs: how many times as often two queries of a cluster are the same token, tokens of
    one kind (word, short word, continuation, number, punctuation, special), or look most at the same key, as any two
    queries are (1: no more often), and how far apart they stand in the text (100 %: as far as any two).

    [bold]Examples[/]

      clusterattn clusters path/to/minilm --data book.txt --length 256

      clusterattn clusters openai/whisper-tiny.en --data clips/ --layers encoder --method refined:clusters=50

      clusterattn clusters my-model --data book.txt --length 1024 --json > heads.json
    """
    with plainly():
        need_now("rich", *(() if as_json else ("matplotlib",)))
        from clusterattn._rows import dumps
        from clusterattn.measure import tasks
        from clusterattn.methods import Refined

        from .clusters import look, usual_clusters
        from .clusters_page import write_clusters

        _check_folder(out)
        kind, where, number = tasks.task_named("hidden"), _best_device(device), dtype_of(dtype)
        asked = None if method is None else method_of(method)
        kind.examples(data, length)  # what is wrong with the data is said before a model is loaded
        loaded = tasks.load(kind, model, device=where, dtype=number)
        batches = kind.batches(loaded, data, length=length, size=batch, limit=limit)
        longest = max(each.inputs["input_ids"].shape[1] if "input_ids" in each.inputs else SOUNDS for each in batches)
        chosen = asked or Refined(clusters=usual_clusters(longest))
        with progress() as tick:
            found = look(loaded, kind, batches, chosen, only=layers, tick=tick)
        if as_json:
            print(dumps(found.rows()))
        else:
            show_clusters(found, write_clusters(found, out, command=command_line()))


SOUNDS = 1500  # positions of speech, whose number only the model knows


def report(
    results: Annotated[Path, typer.Option(help="The folder of rows.")] = Path("results"),
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("results.html"),
) -> None:
    """Everything under results/ as one self-contained page: the papers' tables and figures, and every other row.

    [bold]Example[/]

      clusterattn report --results results --out results.html
    """
    with plainly():
        need_now("jinja2", "matplotlib")
        from .reproduce.report import write_page

        if out.is_dir():
            raise bad_value("--out, a file to write", f"{out}, a folder", f"--out {out / 'results.html'}")
        typer.echo(str(write_page(results, out, command=command_line())))


def _check_folder(out: Path) -> None:
    """Complain before the work about a folder that can not be written; who writes first makes it."""

    there = next(each for each in (out.absolute(), *out.absolute().parents) if each.exists())
    if not there.is_dir():
        raise bad_value("--out, a folder", f"{there}, a file", "another name")
    if not os.access(there, os.W_OK):
        raise bad_value("--out, a folder that can be written", f"{there}, where you may not write", "another name")


def _best_device(name: str) -> str:
    import torch

    return device_of(name) if name else "cuda" if torch.cuda.is_available() else "cpu"


def _fitted(task: Task, method: Method, sizes: dict[str, Any], settings: Settings, folder: Path, device: str) -> Fitted:
    """A model of its own seed: the same weights at first, whatever the attention."""
    import torch

    from .train import fit

    torch.manual_seed(settings.seed)
    with progress() as tick:
        return fit(task, task.model(method, **sizes), settings, folder=folder / "training", device=device, tick=tick)


def _judged(task: Task, method: Method, sizes: dict[str, Any], folder: Path, fitted: Fitted) -> Run:
    from .train import judge, save

    figures = {"test": judge(task, fitted.model, "test")} if task.splits.get("test") else {}
    return Run(method, fitted, figures, save(folder, task, fitted, method, sizes, figures))


def _main_process() -> bool:

    return bool(need("accelerate", "train").PartialState().is_main_process)
