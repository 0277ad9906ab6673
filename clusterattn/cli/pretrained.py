"""The commands for pretrained models: approximate and tune."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..measure.show import progress, show_approximation, show_plan
from ..methods import method as method_of
from .arguments import DTYPES, command_line, device_of, distinct, dtype_of, need_now, plainly

if TYPE_CHECKING:
    from .._types import Method
    from ..measure.approximate import Given
    from ..measure.tasks import Loaded, ModelBatch, ModelTask

COMPARED = ("refined", "improved", "clustered")
SOUNDS = 1500  # positions of speech, whose number only the model knows

Model = Annotated[str, typer.Argument(help="The folder of a Hugging Face model, or its id on the hub.")]
TaskName = Annotated[str, typer.Option("--task", help="hidden, embed, asr, lm or classify.")]
Data = Annotated[
    Path,
    typer.Option(
        help="Text (a passage per line, or --length), .tsv (label<tab>text), .jsonl (text, label), a folder of these; "
        "for asr a folder of .wav with .txt beside each, or transcripts.tsv."
    ),
]
Length = Annotated[
    int | None,
    typer.Option(min=2, help="Cut text into windows of so many tokens (default: lines; lm: 1024)", show_default=False),
]
Limit = Annotated[int | None, typer.Option(min=1, help="Use so many examples, spread evenly over the data.")]
BatchSize = Annotated[int | None, typer.Option("--batch", min=1, help="Examples at a time (default: 8; asr, lm: 1)")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Dtype = Annotated[str, typer.Option(help=f"{', '.join(DTYPES)}.")]


def approximate(
    model: Model,
    data: Data,
    task: TaskName = "hidden",
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME or NAME:key=value,… May be repeated. Default: refined, improved and clustered.",
            show_default=False,
        ),
    ] = None,
    plan: Annotated[
        list[Path] | None, typer.Option(help="A plan of `clusterattn tune`. May be repeated.", show_default=False)
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(help="Only layers whose name this expression finds (plans name theirs).", show_default=False),
    ] = None,
    exact_below: Annotated[
        int | None, typer.Option(min=0, help="Shorter sequences stay exact.", show_default=False)
    ] = None,
    length: Length = None,
    limit: Limit = None,
    batch: BatchSize = None,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    out: Annotated[Path, typer.Option(help="Folder for report.html, the pictures and rows.jsonl.")] = Path(
        "clusterattn-approximate"
    ),
    report: Annotated[bool, typer.Option(help="Write that folder.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print rows as one JSON list and nothing else.")] = False,
) -> None:
    """A pretrained model with each method in the place of its attention: its metric, its hidden states, the cost.

    Nothing is trained. Weights are safetensors, or pickles read without code; no remote code runs.

    [bold]Examples[/]

      clusterattn approximate path/to/minilm --task embed --data book.txt --length 512 --limit 16

      clusterattn approximate openai/whisper-tiny.en --task asr --data clips/ --layers encoder

      clusterattn approximate my-model --task lm --data book.txt --length 4096 --plan plan.json --method refined
    """
    with plainly():
        from .._plan import Plan
        from .._rows import dumps
        from ..measure.approximate import approximate as measure
        from ..measure.report import write_approximation

        need_now("rich", *(("matplotlib", "jinja2") if report else ()))
        given: dict[str, Given] = {}
        for path in plan or ():
            given[_plan_name(path, given)] = Plan.load(path)
        asked = distinct([method_of(each) for each in method or ()])
        loaded, kind, batches = _ready(model, task, data, length, limit, batch, device, dtype)
        given.update({str(each): each for each in (asked if asked or plan else _usual(batches))})
        with progress() as tick:
            result = measure(
                loaded,
                kind,
                batches,
                given,
                exact_below=exact_below,
                only=layers,
                data=data.name,
                tick=tick,
            )
        written = write_approximation(result, out, command=command_line()) if report else []
        if as_json:
            print(dumps(result.rows))
        else:
            show_approximation(result, written)


def tune(
    model: Model,
    data: Data,
    tolerance: Annotated[
        float, typer.Option(help="Largest relative error of the model's last hidden states on the data.")
    ] = 0.02,
    out: Annotated[Path, typer.Option(help="Where to write the plan.")] = Path("plan.json"),
    task: TaskName = "hidden",
    cost: Annotated[str, typer.Option(help="What to save: time on this device, or multiply-adds.")] = "time",
    heads: Annotated[bool, typer.Option(help="Let heads of one layer differ where it pays.")] = True,
    method: Annotated[
        list[str] | None,
        typer.Option(help="A candidate, NAME:key=value,… May be repeated. Default: by length.", show_default=False),
    ] = None,
    prefill: Annotated[
        bool, typer.Option("--prefill", help="Causal layers may take value-causal methods: closer, but no likelihood.")
    ] = False,
    layers: Annotated[
        str | None, typer.Option(help="Only layers whose name this expression finds.", show_default=False)
    ] = None,
    length: Length = None,
    limit: Limit = 8,
    batch: BatchSize = None,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan and nothing else.")] = False,
) -> None:
    """Find the cheapest method, clusters and top of each layer that keep the model's output inside a tolerance.

    The error is that of the whole model with the whole plan in place, measured on the data. What was measured is kept
    beside the plan (plan.json.state), so that an interrupted run goes on where it was, and another --tolerance is
    nearly free.

    [bold]Examples[/]

      clusterattn tune path/to/minilm --data book.txt --length 512 --tolerance 0.02 --out plan.json

      clusterattn approximate path/to/minilm --task embed --data other.txt --length 512 --plan plan.json
    """
    with plainly():
        from .._rows import dumps
        from ..tuning import tune as choose

        need_now("rich")
        loaded, kind, batches = _ready(model, task, data, length, limit, batch, device, dtype)
        with progress() as tick:
            plan = choose(
                loaded.model,
                [each.inputs for each in batches],
                tolerance=tolerance,
                cost=cost,
                methods=method or None,
                heads=heads,
                strict=not prefill,
                only=layers,
                state=out.with_name(out.name + ".state"),
                name=model,
                tick=tick,
            )
        plan.save(out)
        if as_json:
            print(dumps(plan.to_dict()))
        else:
            show_plan(plan, [out])


def _ready(
    model: str, task: str, data: Path, length: int | None, limit: int | None, batch: int | None, device: str, dtype: str
) -> tuple[Loaded, ModelTask, list[ModelBatch]]:
    """The model and what it will be shown. Words that are wrong are found before anything is loaded."""
    from ..measure import tasks

    kind, where, number = tasks.task_named(task), device_of(device), dtype_of(dtype)
    kind.examples(data, length)
    loaded = tasks.load(kind, model, device=where, dtype=number)
    return loaded, kind, kind.batches(loaded, data, length=length, size=batch, limit=limit)


def _usual(batches: list[ModelBatch]) -> list[Method]:
    """The paper's pair and ours, at the budget that the longest text suggests."""
    from ..measure.compare import methods_for

    longest = max((each.inputs["input_ids"].shape[1] for each in batches if "input_ids" in each.inputs), default=SOUNDS)
    return [each for each in methods_for(longest) if each.name in COMPARED]


def _plan_name(path: Path, taken: dict[str, Any]) -> str:
    return f"plan {path.stem}" if f"plan {path.stem}" not in taken else f"plan {path}"
