"""The command `clusterattn`: compare, bench and env (measured.py), advise (advice.py), approximate and tune
(pretrained.py), and, where the extra "train" is installed, train, reproduce, clusters and report of clusterattn_papers.

What the commands need beyond torch comes with the extra "cli" and is imported only when it is used.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from .. import _extras
from .._version import __version__

if TYPE_CHECKING:
    import typer

PAPERS = ("train", "reproduce", "clusters", "report")  # commands of clusterattn_papers

ABOUT = """Clustered and sparse attention, measured against exact attention.

[bold]Is it worth it on this machine, from which length, at what error?[/]

  clusterattn advise --heads 16 --dim 64 --length 30000

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

[bold]What the clusters of a model hold, by layer and head[/]

  clusterattn clusters MODEL --data book.txt --length 256

[bold]Train with any attention on your own data; run the papers' tables and figures again[/]

  clusterattn train classify --data reviews.csv --method refined

  clusterattn reproduce --list

[bold]What is installed, and which backend would run[/]

  clusterattn env
"""


def main() -> None:
    """The entry point. Without the extra it says what to install."""
    try:
        _extras.need("typer")
    except ModuleNotFoundError as missing:
        print(f"error: {missing}", file=sys.stderr)
        sys.exit(2)
    build()()


def build() -> typer.Typer:
    import typer

    from .advice import advise
    from .measured import bench, calibrate, compare, env, warm_up
    from .pretrained import approximate, tune

    app = typer.Typer(
        help=ABOUT,
        no_args_is_help=True,
        rich_markup_mode="rich",
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    def version(asked: bool) -> None:
        if asked:
            typer.echo(f"clusterattn {__version__}")
            raise typer.Exit

    @app.callback()
    def options(
        version: bool = typer.Option(False, "--version", callback=version, is_eager=True, help="Print it and stop."),
    ) -> None:
        pass

    for command in (advise, compare, bench, calibrate, warm_up, approximate, tune):
        app.command()(command)
    add_papers(app)
    app.command()(env)
    return app


def add_papers(app: typer.Typer) -> None:
    """The commands of clusterattn_papers; without what they need, commands of these names that say so."""
    module = _extras.missing("train")
    if module is None:
        commands = importlib.import_module("clusterattn_papers.commands")
        for name in PAPERS:
            app.command(name)(getattr(commands, name))
        return
    anything = {"allow_extra_args": True, "ignore_unknown_options": True}
    for name in PAPERS:
        why = _extras.absent(module, "train")
        app.command(name, help=f"Not here: {why}", context_settings=anything, add_help_option=False)(_refuse(why))


def _refuse(why: str) -> Callable[[], None]:
    def command() -> None:
        print(f"error: {why}", file=sys.stderr)
        sys.exit(2)

    return command
