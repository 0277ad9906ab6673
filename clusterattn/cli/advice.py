"""The command advise: is it worth it on this machine?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .._errors import bad_value
from .._extras import need
from ..measure.show import console, literal, progress, show_written
from .arguments import DTYPES, device_of, dtype_of, need_now, plainly
from .pretrained import BatchSize, Device, Limit, TaskName, _ready

if TYPE_CHECKING:
    from ..tuning import Advice


def advise(
    model: Annotated[
        str | None, typer.Argument(help="The folder of a Hugging Face model, or its id on the hub.", show_default=False)
    ] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Of attention.", show_default=False)] = None,
    dim: Annotated[int | None, typer.Option(min=1, help="Of each head.", show_default=False)] = None,
    length: Annotated[
        int | None,
        typer.Option(min=2, help="Tokens of a sequence (a model: text is cut into windows of so many)."),
    ] = None,
    causal: Annotated[bool, typer.Option("--causal", help="Causal attention.")] = False,
    backward: Annotated[bool, typer.Option("--backward", help="Training: forward and backward together.")] = False,
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="Largest relative error of attention's output (default: 0.05), or of a model's last hidden states "
            "(default: 0.02)",
            show_default=False,
        ),
    ] = None,
    qkv: Annotated[
        Path | None,
        typer.Option(
            help="safetensors with q (b h n d), k, v to measure errors on. Default: 8192 rows of a table that a "
            "pretrained model reads, inside the package.",
            show_default=False,
        ),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="What a model reads, as in `clusterattn tune`.", show_default=False)
    ] = None,
    task: TaskName = "hidden",
    limit: Limit = 8,
    batch: BatchSize = None,
    device: Device = "cpu",
    dtype: Annotated[
        str | None, typer.Option(help=f"{', '.join(DTYPES)} (default: float32; on cuda bfloat16)", show_default=False)
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads (default: torch's)")] = None,
    seconds: Annotated[float, typer.Option(help="For timing, about; calls that take longer are predicted.")] = 60.0,
    repetitions: Annotated[int, typer.Option(min=1, help="Turns that both take; the fastest counts.")] = 3,
    store: Annotated[
        bool, typer.Option(help='Also keep where refined overtakes exact attention here, for method="auto".')
    ] = True,
    out: Annotated[Path, typer.Option(help="Folder for plan.json, rows.jsonl and the picture advice.png.")] = Path(
        "clusterattn-advice"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Is it worth it on this machine: from which length, with which method and sizes, at what error and memory?

    Two questions, one page. Of attention itself, by its shape: a few settings are tried on q, k, v that a model made,
    the cheapest inside the tolerance is timed beside exact attention at growing lengths. Of a model with data: as
    `clusterattn tune`, and the whole model is timed. "Use exact attention" is an answer, too.

    Writes a plan that `ca.hf.swap`, `ca.nn.swap` and the hosts take, and a picture of time against length. Takes a few
    minutes on a machine that has nothing else to do.

    [bold]Examples[/]

      clusterattn advise --heads 16 --dim 64 --length 30000

      clusterattn advise --heads 16 --dim 64 --length 8192 --causal --backward --device cuda --tolerance 0.02

      clusterattn advise path/to/minilm --data book.txt --length 512
    """
    with plainly():
        import torch

        from .._files import write_whole
        from .._rows import dumps
        from ..measure.plots_speed import against_length
        from ..measure.sample import load
        from ..measure.speed import warn_when_busy
        from ..tuning import advise as measure

        need_now("rich", "matplotlib")
        shape = {"--heads": heads, "--dim": dim, "--length": length}
        if threads is not None:
            torch.set_num_threads(threads)
        warn_when_busy(device_of(device))
        common: dict[str, Any] = {
            "tolerance": tolerance, "seconds": seconds, "repetitions": repetitions, "store": store,
        }  # fmt: skip
        if model is None:
            missing = [name for name, given in shape.items() if given is None]
            if missing or data is not None:
                got = f"no {', '.join(missing)}" if missing else "--data without a MODEL"
                example = "clusterattn advise --heads 16 --dim 64 --length 30000"
                raise bad_value("--heads, --dim and --length, or a MODEL with --data", got, example)
            number = dtype_of(dtype or ("bfloat16" if device == "cuda" else "float32"))
            common |= {
                "heads": heads, "dim": dim, "length": length, "batch": batch or 1, "causal": causal,
                "backward": backward, "device": device_of(device), "dtype": number,
                "data": None if qkv is None else load(qkv),
            }  # fmt: skip
        else:
            strange = [name for name in ("--heads", "--dim") if shape[name] is not None]
            strange += ["--qkv"] * (qkv is not None) + ["--causal"] * causal + ["--backward"] * backward
            if strange or data is None:
                got = f"a MODEL and {', '.join(strange)}" if strange else "no --data"
                example = "clusterattn advise MODEL --data book.txt --length 512"
                raise bad_value("a MODEL with --data, or --heads, --dim and --length", got, example)
            loaded, _, batches = _ready(model, task, data, length, limit, batch, device, dtype or "float32")
            common |= {
                "model": loaded.model, "batches": [each.inputs for each in batches], "name": model,
                "state": out / "plan.json.state",
            }  # fmt: skip
        with progress() as tick:
            found = measure(**common, tick=tick)
        written = [found.plan.save(out / "plan.json")]
        if found.rows:
            written.append(write_whole(out / "rows.jsonl", "".join(dumps(row) + "\n" for row in found.rows)))
            written.append(write_whole(out / "advice.png", against_length(found.rows, found.crossing)))
        written += [] if found.crossings_file is None else [found.crossings_file]
        if as_json:
            print(dumps(_plain(found)))
        else:
            show_advice(found, written)


def show_advice(found: Advice, written: Sequence[Path]) -> None:
    """The page: the answer first, then what it rests on."""
    from ..measure.bench import PEER
    from ..measure.words import human_bytes, human_error, human_ratio, human_seconds

    rich, table = console(), need("rich.table")
    rich.print(f"[dim]{literal(found.about)}, {found.length} tokens[/]", highlight=False)
    rich.print(f"\n[bold]{literal(found.answer)}[/]\n", highlight=False)
    by_length: dict[int, list[Any]] = {}
    for row in found.rows:
        by_length.setdefault(row["n"], []).append(row)
    if by_length:
        shown = table.Table(box=need("rich.box").SIMPLE_HEAD)
        for title in ("tokens", "exact attention", "ours", "speed", "memory, exact", "memory, ours"):
            shown.add_column(title, justify="right")
        for n, (one, other) in by_length.items():
            exact, ours = (one, other) if one["method"] == PEER else (other, one)
            about = "" if exact["measured"] else "~ "
            held = ["" if each["memory_bytes"] is None else human_bytes(each["memory_bytes"]) for each in (exact, ours)]
            cells = [f"{about}{human_seconds(each['seconds'])}" for each in (exact, ours)]
            pays = found.crossing is not None and n >= found.crossing
            speed = f"{about}{human_ratio(exact['seconds'] / ours['seconds'])}"
            shown.add_row(str(n), *cells, f"[bold]{speed}[/]" if pays else speed, *held)
        rich.print(shown)
    if found.candidates:
        shown = table.Table(box=need("rich.box").SIMPLE_HEAD)
        for title in ("setting", "multiply-adds", "error", ""):
            shown.add_column(title, justify="left" if title == "setting" else "right")
        for each in found.candidates:
            cells = [f"{each.cost_share:.1%}", human_error(each.error), "" if each.inside else "over the tolerance"]
            shown.add_row(literal(str(each.method)), *cells, style=None if each.inside else "dim")
        rich.print(shown)
    for row in found.plan.note.get("layers", []):
        if row["method"] != "exact":
            rich.print(f"  {literal(row['layer'])}: {literal(row['method'])}", highlight=False)
    for note in found.notes:
        rich.print(f"[dim]{literal(note)}[/]", highlight=False)
    if found.crossings_file is not None:
        rich.print('[dim]method="auto" goes by this machine\'s crossings now[/]', highlight=False)
    show_written(written)


def _plain(found: Advice) -> dict[str, Any]:
    """As JSON."""
    return {
        "about": found.about, "length": found.length, "worth": found.worth, "answer": found.answer,
        "crossing": found.crossing, "speedup": found.speedup, "error": found.error, "tolerance": found.tolerance,
        "plan": found.plan.to_dict(), "notes": list(found.notes), "rows": list(found.rows),
        "candidates": [
            {"method": each.method.to_dict(), "cost_share": each.cost_share, "error": each.error, "inside": each.inside}
            for each in found.candidates
        ],
    }  # fmt: skip
