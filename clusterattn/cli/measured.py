"""The commands that measure attention itself: compare, bench and env."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .._errors import bad_value
from ..measure.show import progress, show_bench, show_comparisons, show_env
from ..methods import method as method_of
from .arguments import DTYPES, command_line, device_of, distinct, dtype_of, lengths_of, need_now, plainly

if TYPE_CHECKING:
    from .._rows import Row
    from .._types import Method
    from ..measure.sample import Sample, Shape

BENCHED = ("refined", "auto", "clustered", "improved", "smyrf:rounds=2")
LENGTHS = {"cpu": "512,1024,2048,4096,8192", "cuda": "512,1024,2048,4096,8192,16384,32768"}
SECONDS = 60.0  # of a comparison's timed turns, over all samples; the first turn of each is always taken


def compare(
    qkv: Annotated[
        Path | None,
        typer.Option(
            help="safetensors with q (b h n d), k (b hk m d), v (b hk m e), key_mask (b m) if any. "
            "Default: the embedded samples.",
            show_default=False,
        ),
    ] = None,
    sample: Annotated[
        list[str] | None,
        typer.Option(
            help="short (512 tokens of a text) or long (8192 rows of a table); may be repeated. Default: both, and the "
            "short one with --causal, since rows of a table have no order.",
            show_default=False,
        ),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME or NAME:key=value,… May be repeated. What it leaves open follows the options below. "
            "Default: every method.",
            show_default=False,
        ),
    ] = None,
    clusters: Annotated[
        int | None,
        typer.Option(min=1, help="Clusters of queries (default: n/20, at most 100; refined chooses for itself)"),
    ] = None,
    top: Annotated[
        int | None,
        typer.Option(min=1, help="Exact keys per cluster or query (default: m/16, at most 32; refined likewise)"),
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Hashing rounds of smyrf and reformer (default: 4)")] = None,
    seats: Annotated[int | None, typer.Option(min=1, help="Bucket size of smyrf (default: n/16, at most 64)")] = None,
    window: Annotated[int | None, typer.Option(min=1, help="Window of local and routing (default: their own)")] = None,
    causal: Annotated[bool, typer.Option(help="Causal attention; methods without a causal form are left out.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of every random draw.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[str, typer.Option(help=f"{', '.join(DTYPES)}.")] = "float32",
    repetitions: Annotated[int, typer.Option(min=1, help="Timed passes of each method; the fastest counts.")] = 5,
    sweep: Annotated[bool, typer.Option(help="Also measure half and twice the budget, for the Pareto picture.")] = True,
    out: Annotated[Path, typer.Option(help="Folder for report.html, the pictures and rows.jsonl.")] = Path(
        "clusterattn-report"
    ),
    report: Annotated[bool, typer.Option(help="Write that folder.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print rows as one JSON list and nothing else.")] = False,
) -> None:
    """Every method on the same q, k, v: error, time and memory against exact attention.

    Without q, k, v of your own: two real samples, a short one, where exact attention is hard to beat, and a long one.
    Prints a table for each and writes one self-contained report.html: error against time, attention maps, clusters.

    [bold]Examples[/]

      clusterattn compare

      clusterattn compare --sample long --clusters 200 --top 64 --out wider

      clusterattn compare --qkv mine.safetensors --causal

      clusterattn compare --method refined --method smyrf:rounds=8,dedup=true --json --no-report
    """
    with plainly():
        from .._rows import dumps
        from ..measure.compare import compare as measure
        from ..measure.compare import methods_for
        from ..measure.report import write_report
        from ..measure.sample import embedded, load
        from ..measure.speed import warn_when_busy

        need_now("safetensors", "rich", *(("matplotlib", "jinja2") if report else ()))
        if qkv is not None and sample:
            raise bad_value("--qkv or --sample", "both", "leaving out one of them")
        found = {"": load(qkv)} if qkv is not None else {name: embedded(name) for name in _samples(sample, causal)}
        asked: dict[str, tuple[Sample, list[Method]]] = {}
        for name, one in found.items():
            n, m = one.shape[2:4]
            budget = methods_for(n, m, clusters=clusters, top=top, rounds=rounds, seats=seats, window=window)
            chosen = [_completed(each, budget) for each in method] if method else budget
            if method:
                _insist(chosen, one, causal)
            asked[name if len(found) > 1 else ""] = one.to(device_of(device), dtype_of(dtype)), chosen
        warn_when_busy(device)
        results = {}
        for name, (one, chosen) in asked.items():
            with progress() as tick:
                results[name] = measure(
                    one,
                    chosen,
                    causal=causal,
                    seed=seed,
                    repetitions=repetitions,
                    sweep=sweep and report,
                    seconds=SECONDS / len(asked),
                    tick=tick,
                )
        written = write_report(results, out, command=command_line()) if report else []
        if as_json:
            print(dumps([row for result in results.values() for row in result.rows]))
        else:
            show_comparisons(results, written)


def _samples(asked: Sequence[str] | None, causal: bool) -> list[str]:
    """Which of the embedded samples: rows of a table have no order, so the long one is causal only when asked for."""
    return list(dict.fromkeys(asked or (("short",) if causal else ("short", "long"))))


def bench(
    method: Annotated[
        list[str] | None,
        typer.Option(
            help=f"NAME or NAME:key=value,… May be repeated. Default: {', '.join(BENCHED)}.",
            show_default=False,
        ),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(help=f"Comma-separated. Default on the CPU: {LENGTHS['cpu']}.", show_default=False),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="Default: 1; on cuda as many as make 32768 tokens.", show_default=False),
    ] = None,
    sample: Annotated[
        str | None,
        typer.Option(
            help="Time on the beginning of an embedded sample, short or long, with its heads and dim; or on a "
            "synthetic mixture. Default: the long sample in the shape asked for, its rows coming again.",
            show_default=False,
        ),
    ] = None,
    heads: Annotated[int, typer.Option(min=1)] = 6,
    dim: Annotated[int, typer.Option(min=1, help="Of each head.")] = 64,
    dtype: Annotated[
        str | None,
        typer.Option(help=f"{', '.join(DTYPES)} (default: float32; on cuda bfloat16)", show_default=False),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    causal: Annotated[bool, typer.Option(help="Causal attention.")] = False,
    backward: Annotated[bool, typer.Option(help="Measure forward + backward as well.")] = True,
    memory: Annotated[bool, typer.Option(help="Measure peak memory as well.")] = True,
    repetitions: Annotated[
        int, typer.Option(min=1, help="Turns that every method takes; its fastest counts (on cuda: by time).")
    ] = 5,
    seconds: Annotated[float, typer.Option(help="No new turn after so long, per length and pass (cpu).")] = 30.0,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads (default: torch's)")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the data and of every random draw.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the rows (theme_hardware_date.jsonl) and the plot.")] = Path(
        "clusterattn-bench"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print rows as one JSON list and nothing else.")] = False,
) -> None:
    """Time and peak memory per token against the length, beside PyTorch's exact attention in the same run.

    On the CPU all take turns, so that a slow moment of the machine falls on all alike. On CUDA one table:
    each method is first checked against its reference (one that fails gets no time), then timed as a CUDA
    graph beside the fastest SDPA backend, with its distance to one pass through memory and its error.

    [bold]Examples[/]

      clusterattn bench

      clusterattn bench --method refined --method clustered:steps=2 --lengths 4096,16384

      clusterattn bench --sample long --lengths 2048,8192 --no-backward

      clusterattn bench --device cuda --dtype bfloat16 --lengths 1024,8192,65536 --no-backward
    """
    with plainly():
        import torch

        from .. import _rows as files
        from .._files import write_whole
        from ..measure.bench import PASSES
        from ..measure.bench import bench as measure
        from ..measure.compare import refusal
        from ..measure.plots_speed import crossings, scaling
        from ..measure.sample import embedded, like_a_model, mixture
        from ..measure.speed import warn_when_busy
        from ..measure.speed_table import as_text

        need_now("rich", "matplotlib")
        where = device_of(device)
        many = lengths_of(lengths or LENGTHS[where])
        data: Sample | Callable[[Shape], Sample] | None = like_a_model if sample is None else None
        if sample not in (None, "mixture"):
            data = embedded(sample)
            many = [n for n in many if n <= data.shape[2]] if lengths is None else many
        methods = distinct([method_of(each) for each in method or BENCHED])
        for each in methods:
            why_not = refusal(each, mixture(1, 1, 1, 1), causal)
            if why_not is not None:
                raise ValueError(f"{each} can not be measured here: {why_not}")
        if threads is not None:
            torch.set_num_threads(threads)
        warn_when_busy(where)
        passes = PASSES if backward else PASSES[:1]
        path = files.rows_path(out, "bench", where)
        found: list[Row] = []
        with progress() as tick:
            for row in measure(
                methods,
                lengths=many,
                batch=batch,
                heads=heads,
                dim=dim,
                dtype=dtype_of(dtype or ("bfloat16" if where == "cuda" else "float32")),
                device=where,
                causal=causal,
                passes=passes,
                repetitions=repetitions,
                seconds=seconds,
                seed=seed,
                memory=memory,
                data=data,
                tick=tick,
            ):
                files.append(path, row)
                found.append(row)
        draw = crossings if where == "cuda" else scaling
        picture = write_whole(path.with_suffix(".png"), draw(found))
        if as_json:
            print(files.dumps(found))
        elif where == "cuda":
            print(as_text(found), "", path, picture, sep="\n")
        else:
            show_bench(found, [path, picture])


def warm_up(
    method: Annotated[
        list[str] | None, typer.Option(help="NAME or NAME:key=value,… May be repeated. Default: auto.")
    ] = None,
    lengths: Annotated[str, typer.Option(help="Comma-separated.")] = "4096,16384,65536",
    batch: Annotated[int, typer.Option(min=1)] = 1,
    heads: Annotated[int, typer.Option(min=1)] = 8,
    key_heads: Annotated[int | None, typer.Option(min=1, help="Default: as many as heads.")] = None,
    dim: Annotated[int, typer.Option(min=1, help="Of each head.")] = 64,
    dtype: Annotated[str, typer.Option(help=", ".join(DTYPES))] = "bfloat16",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cuda",
    causal: Annotated[bool, typer.Option(help="Causal attention.")] = False,
    masked: Annotated[bool, typer.Option(help="With a key mask.")] = False,
    backward: Annotated[bool, typer.Option(help="Backward as well.")] = True,
) -> None:
    """Compile the kernels of calls to come: later processes find them in Triton's cache.

    [bold]Examples[/]

      clusterattn warm-up --lengths 8192,32768 --heads 6 --dim 64

      clusterattn warm-up --method refined --causal --no-backward --dtype float16
    """
    with plainly():
        from .._warm_up import warm_up as warm

        for each in distinct([method_of(one) for one in method or ("auto",)]):
            for n in lengths_of(lengths):
                taken = warm(
                    n,
                    method=each,
                    batch=batch,
                    heads=heads,
                    key_heads=key_heads,
                    dim=dim,
                    dtype=dtype_of(dtype),
                    device=device_of(device),
                    causal=causal,
                    masked=masked,
                    backward=backward,
                )
                print(f"{each}, {n} tokens: {taken[n]:.1f} s")


def calibrate(
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads (default: torch's)")] = None,
    repetitions: Annotated[int, typer.Option(min=1, help="Turns that both take; the fastest counts.")] = 5,
) -> None:
    """Measure where refined overtakes exact attention on this machine: what method="auto" goes by.

    Takes a minute, on a machine that has nothing else to do. The figures are kept in the user's cache folder, for this
    device (a CPU: with these threads) alone.

    [bold]Examples[/]

      clusterattn calibrate

      clusterattn calibrate --device cuda
    """
    with plainly():
        import torch

        from ..measure.crossings import crossings
        from ..measure.speed import warn_when_busy
        from ..methods.auto import Auto, keep
        from ..methods.budgets import Shape

        where = torch.device(device_of(device))
        if threads is not None:
            torch.set_num_threads(threads)
        warn_when_busy(where)
        dtypes = (torch.float32,) if where.type == "cpu" else (torch.bfloat16, torch.float16, torch.float32)
        with progress() as tick:
            path = keep(crossings(where, dtypes, repetitions=repetitions, tick=tick))
        for dtype in dtypes:
            for causal in (False, True):
                lengths = [2**i for i in range(7, 21)]
                shapes = [Shape(n, n, 64, 64, causal) for n in lengths]
                names = [Auto().choose(where, dtype, 8, shape).name for shape in shapes]
                first = next((n for n, name in zip(lengths, names, strict=True) if name != "exact"), None)
                kind = f"{dtype}".removeprefix("torch.") + (", causal" if causal else "")
                print(f"{kind}, 8 heads of 64: refined " + ("never" if first is None else f"from {first} tokens on"))
        print(path)


def env(as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False) -> None:
    """Versions, devices, and which backend each operation would use here, and why not a faster one."""
    with plainly():
        import importlib.metadata

        import torch

        from .. import ops
        from .._rows import dumps, environment

        extras: dict[str, str | None] = {}
        for name in ("triton", "numpy", "matplotlib", "safetensors", "transformers"):
            try:
                extras[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                extras[name] = None
        devices = ["cpu"] + [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        verbs = [(where, *each) for where in devices for each in ops.verbs(torch.device(where))]
        around = environment()
        if as_json:
            keys = ("device", "verb", "backend", "why_not")
            listed = [dict(zip(keys, each, strict=True)) for each in verbs]
            print(dumps({"environment": around, "packages": extras, "devices": _devices(), "verbs": listed}))
            return
        show_env({**around, **extras, **_devices()}, verbs)


def _completed(spec: str, budget: Sequence[Method]) -> Method:
    """A method as asked for; settings that the words leave open come from the budget."""
    given = method_of(spec)
    named = [setting.partition("=")[0].strip() for setting in spec.partition(":")[2].split(",") if setting.strip()]
    usual = next(each for each in budget if each.name == given.name)
    return dataclasses.replace(usual, **{name: getattr(given, name) for name in named})


def _insist(methods: Sequence[Method], sample: Any, causal: bool) -> None:
    """A method asked for by name is not left out silently."""
    from ..measure.compare import refusal

    for each in methods:
        why_not = refusal(each, sample, causal)
        if why_not is not None:
            raise ValueError(f"{each} can not answer here: {why_not}")


def _devices() -> dict[str, str]:
    import torch

    if not torch.cuda.is_available():
        return {
            "cuda": f"none that this torch can see (built for CUDA {torch.version.cuda})"
            if torch.version.cuda
            else "none: this torch is a CPU build"
        }
    found = {}
    for i in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(i)
        found[f"cuda:{i}"] = (
            f"{about.name}, {about.total_memory / 2**30:.0f} GiB, capability {about.major}.{about.minor}"
        )
    return found
