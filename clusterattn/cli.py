"""The command `clusterattn`: compare, bench, env; approximate and tune are in _cli_pretrained.py, train, reproduce and
report in _cli_train.py.

What the commands need beyond torch comes with the extra "cli" and is imported only when it is used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from .measure._extra import need
from .measure.show import progress, show_bench, show_comparison, show_env

with contextlib.suppress(ModuleNotFoundError):  # main() says what to install
    import typer

if TYPE_CHECKING:
    from ._types import Method
    from .measure.rows import Row

DTYPES = ("float32", "float64", "bfloat16", "float16")
BENCHED = ("clustered", "improved", "refined", "smyrf:rounds=2")
LENGTHS = {"cpu": "512,1024,2048,4096,8192", "cuda": "512,1024,2048,4096,8192,16384,32768"}

ABOUT = """Clustered and sparse attention, measured against exact attention.

[bold]Every method on a real sample, as a table and a report.html[/]

  clusterattn compare

[bold]The same on your own q, k, v[/]

  clusterattn compare --qkv mine.safetensors

[bold]One method at one budget, rows for machines[/]

  clusterattn compare --method refined:clusters=50,top=64 --json

[bold]Time and memory per token against the length[/]

  clusterattn bench --lengths 1024,4096,16384

[bold]A pretrained model with other attention in it; the cheapest settings inside a tolerance[/]

  clusterattn approximate MODEL --task embed --data book.txt --length 512

  clusterattn tune MODEL --data book.txt --length 512 --tolerance 0.02 --out plan.json

[bold]Train with any attention on your own data; run the papers' tables and figures again[/]

  clusterattn train classify --data reviews.csv --method refined

  clusterattn reproduce --list

[bold]What is installed, and which backend would run[/]

  clusterattn env
"""


def main() -> None:
    """The entry point. Without the extra it says what to install."""
    try:
        need("typer")
    except ModuleNotFoundError as missing:
        print(f"error: {missing}", file=sys.stderr)
        sys.exit(2)
    build()()


def build() -> typer.Typer:
    app = typer.Typer(
        help=ABOUT,
        no_args_is_help=True,
        rich_markup_mode="rich",
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    from ._cli_pretrained import approximate, tune
    from ._cli_train import report, reproduce, train

    for command in (compare, bench, approximate, tune, train, reproduce, report, env):
        app.command()(command)
    return app


def compare(
    qkv: Annotated[
        Path | None,
        typer.Option(
            help="safetensors with q (b h n d), k (b hk m d), v (b hk m e), key_mask (b m) if any. "
            "Default: the embedded sample.",
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
        int | None, typer.Option(min=1, help="Clusters of queries (default: n/20, at most 100)")
    ] = None,
    top: Annotated[
        int | None, typer.Option(min=1, help="Exact keys per cluster or query (default: m/16, at most 32)")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Hashing rounds of smyrf and reformer (default: 4)")
    ] = None,
    seats: Annotated[
        int | None, typer.Option(min=1, help="Bucket size of smyrf (default: n/16, at most 64)")
    ] = None,
    window: Annotated[
        int | None, typer.Option(min=1, help="Window of local and routing (default: their own)")
    ] = None,
    causal: Annotated[
        bool, typer.Option(help="Causal attention; methods without a causal form are left out.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of every random draw.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[str, typer.Option(help=f"{', '.join(DTYPES)}.")] = "float32",
    repetitions: Annotated[
        int, typer.Option(min=1, help="Timed passes of each method; the fastest counts.")
    ] = 5,
    sweep: Annotated[
        bool, typer.Option(help="Also measure half and twice the budget, for the Pareto picture.")
    ] = True,
    out: Annotated[Path, typer.Option(help="Folder for report.html, the pictures and rows.jsonl.")] = Path(
        "clusterattn-report"
    ),
    report: Annotated[bool, typer.Option(help="Write that folder.")] = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print rows as one JSON list and nothing else.")
    ] = False,
) -> None:
    """Every method on the same q, k, v: error, time and memory against exact attention.

    Prints a table and writes one self-contained report.html: error against time, attention maps, clusters.

    [bold]Examples[/]

      clusterattn compare

      clusterattn compare --clusters 50 --top 64 --out wider

      clusterattn compare --qkv mine.safetensors --causal

      clusterattn compare --method refined --method smyrf:rounds=8,dedup=true --json --no-report
    """
    with _plainly():
        from .measure.compare import compare as measure
        from .measure.compare import methods_for
        from .measure.report import write_report
        from .measure.rows import dumps
        from .measure.sample import embedded, load

        _need_now("safetensors", "rich", *(("matplotlib", "jinja2") if report else ()))
        sample = (embedded() if qkv is None else load(qkv)).to(_device(device), _dtype(dtype))
        budget = methods_for(
            *sample.shape[2:4], clusters=clusters, top=top, rounds=rounds, seats=seats, window=window
        )
        chosen = [_completed(each, budget) for each in method] if method else budget
        if method:
            _insist(chosen, sample, causal)
        with progress() as tick:
            result = measure(
                sample,
                chosen,
                causal=causal,
                seed=seed,
                repetitions=repetitions,
                sweep=sweep and report,
                tick=tick,
            )
        written = write_report(result, out, command=_command()) if report else []
        if as_json:
            print(dumps(result.rows))
        else:
            show_comparison(result, written)


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
    out: Annotated[
        Path, typer.Option(help="Folder for the rows (theme_hardware_date.jsonl) and the plot.")
    ] = Path("clusterattn-bench"),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print rows as one JSON list and nothing else.")
    ] = False,
) -> None:
    """Time and peak memory per token against the length, beside PyTorch's exact attention in the same run.

    On the CPU all take turns, so that a slow moment of the machine falls on all alike. On CUDA one table:
    each method is first checked against its reference (one that fails gets no time), then timed as a CUDA
    graph beside the fastest SDPA backend, with its distance to one pass through memory and its error.

    [bold]Examples[/]

      clusterattn bench

      clusterattn bench --method refined --method clustered:steps=2 --lengths 4096,16384

      clusterattn bench --device cuda --dtype bfloat16 --lengths 1024,8192,65536 --no-backward
    """
    with _plainly():
        import torch

        from .measure import rows as files
        from .measure.bench import PASSES
        from .measure.bench import bench as measure
        from .measure.compare import refusal
        from .measure.plots import scaling
        from .measure.plots_speed import crossings
        from .measure.sample import mixture
        from .measure.speed_table import as_text

        _need_now("rich", "matplotlib")
        where = _device(device)
        many = _lengths(lengths or LENGTHS[where])
        methods = _distinct([_method(each) for each in method or BENCHED])
        for each in methods:
            why_not = refusal(each, mixture(1, 1, 1, 1), causal)
            if why_not is not None:
                raise ValueError(f"{each} can not be measured here: {why_not}")
        if threads is not None:
            torch.set_num_threads(threads)
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
                dtype=_dtype(dtype or ("bfloat16" if where == "cuda" else "float32")),
                device=where,
                causal=causal,
                passes=passes,
                repetitions=repetitions,
                seconds=seconds,
                seed=seed,
                memory=memory,
                tick=tick,
            ):
                files.append(path, row)
                found.append(row)
        draw = crossings if where == "cuda" else scaling
        picture = files.write_whole(path.with_suffix(".png"), draw(found))
        if as_json:
            print(files.dumps(found))
        elif where == "cuda":
            print(as_text(found), "", path, picture, sep="\n")
        else:
            show_bench(found, [path, picture])


def env(as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False) -> None:
    """Versions, devices, and which backend each operation would use here, and why not a faster one."""
    with _plainly():
        import importlib.metadata

        import torch

        from . import ops
        from .measure.rows import dumps, environment

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


def _method(spec: str) -> Method:
    from . import method

    made: Method = method(spec)
    return made


def _completed(spec: str, budget: Sequence[Method]) -> Method:
    """A method as asked for; settings that the words leave open come from the budget."""
    given = _method(spec)
    named = [
        setting.partition("=")[0].strip() for setting in spec.partition(":")[2].split(",") if setting.strip()
    ]
    usual = next(each for each in budget if each.name == given.name)
    return dataclasses.replace(usual, **{name: getattr(given, name) for name in named})


def _insist(methods: Sequence[Method], sample: Any, causal: bool) -> None:
    """A method asked for by name is not left out silently."""
    from .measure.compare import refusal

    for each in methods:
        why_not = refusal(each, sample, causal)
        if why_not is not None:
            raise ValueError(f"{each} can not answer here: {why_not}")


def _distinct(methods: Sequence[Method]) -> list[Method]:
    return list({str(each): each for each in methods}.values())


def _lengths(text: str) -> list[int]:
    from ._errors import bad_value

    try:
        many = sorted({int(word) for word in text.split(",") if word.strip()})
    except ValueError:
        many = []
    if not many or many[0] < 1:
        raise bad_value(
            "--lengths as whole numbers >= 1 with commas between", repr(text), "--lengths 1024,4096"
        )
    return many


def _device(name: str) -> str:
    import torch

    from ._errors import bad_value

    if name not in ("cpu", "cuda"):
        raise bad_value("--device cpu or cuda", repr(name), "--device cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise bad_value(
            "a CUDA device",
            "none that this torch can see",
            "--device cpu, or `clusterattn env` for what is here",
        )
    return name


def _dtype(name: str) -> Any:
    import torch

    from ._errors import bad_value

    if name not in DTYPES:
        raise bad_value(f"--dtype {' or '.join(DTYPES)}", repr(name), "--dtype float32")
    return getattr(torch, name)


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


def _need_now(*modules: str) -> None:
    """Miss a package before the work, not after it."""
    for module in modules:
        need(module)


def _command() -> str:
    import shlex

    return shlex.join(["clusterattn", *sys.argv[1:]])


@contextlib.contextmanager
def _plainly() -> Iterator[None]:
    """Complaints about input end with one sentence and exit code 2, not with a traceback; our warnings are one
    sentence, too."""
    shown, home = warnings.showwarning, str(Path(__file__).parent)

    def plain(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None,
        line: str | None = None,
    ) -> None:  # fmt: skip
        if filename.startswith(home) and category is UserWarning:
            print(f"warning: {message}", file=sys.stderr)
        else:
            shown(message, category, filename, lineno, file, line)

    try:
        with warnings.catch_warnings():
            warnings.showwarning = plain
            yield
    except (ValueError, TypeError, OSError, ModuleNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None


if __name__ == "__main__":
    main()
