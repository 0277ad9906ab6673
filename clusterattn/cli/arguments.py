"""What the commands share: words of the command line become values, and complaints about them one sentence."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from .._errors import bad_value
from .._extras import need

if TYPE_CHECKING:
    from .._types import Method

DTYPES = ("float32", "float64", "bfloat16", "float16")
OURS = {"clusterattn", "clusterattn_papers"}


def distinct(methods: Sequence[Method]) -> list[Method]:
    return list({str(each): each for each in methods}.values())


def lengths_of(text: str) -> list[int]:
    try:
        many = sorted({int(word) for word in text.split(",") if word.strip()})
    except ValueError:
        many = []
    if not many or many[0] < 1:
        raise bad_value("--lengths as whole numbers >= 1 with commas between", repr(text), "--lengths 1024,4096")
    return many


def device_of(name: str) -> str:
    import torch

    if name not in ("cpu", "cuda"):
        raise bad_value("--device cpu or cuda", repr(name), "--device cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise bad_value(
            "a CUDA device",
            "none that this torch can see",
            "--device cpu, or `clusterattn env` for what is here",
        )
    return name


def dtype_of(name: str) -> Any:
    import torch

    if name not in DTYPES:
        raise bad_value(f"--dtype {' or '.join(DTYPES)}", repr(name), "--dtype float32")
    return getattr(torch, name)


def need_now(*modules: str) -> None:
    """Miss a package before the work, not after it."""
    for module in modules:
        need(module)


def command_line() -> str:
    import shlex

    return shlex.join(["clusterattn", *sys.argv[1:]])


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    """Complaints about input end with one sentence and exit code 2, not with a traceback; our warnings are one
    sentence, too."""
    shown = warnings.showwarning

    def plain(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: Any = None,
        line: str | None = None,
    ) -> None:
        if OURS & set(Path(filename).parts) and category is UserWarning:
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
