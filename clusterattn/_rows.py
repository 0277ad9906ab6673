"""One result is one JSON line that carries its environment: nothing else need be remembered to read it."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from ._errors import bad_value
from ._version import __version__

Row = dict[str, Any]
"""One result: what was measured, with its environment; one JSON line in a file."""


def environment(device: str | torch.device = "cpu") -> Row:
    """Where and with what a number was measured.

    Args:
        device: whose hardware is named
    """
    return {
        "hardware": hardware(device),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "clusterattn": __version__,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def hardware(device: str | torch.device = "cpu") -> str:
    """The name of a device.

    Args:
        device: "cpu", or a CUDA device
    """
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        named = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(errors="replace"), re.MULTILINE)
        if named:
            return named[1].strip()
    return platform.processor() or platform.machine()


def commit() -> str | None:
    """The commit of the checkout this package runs from; None when it was installed, or git is not there."""
    home = Path(__file__).resolve().parents[1]

    def git(*words: str) -> str:
        answer = subprocess.run(
            ["git", "-C", str(home), *words], capture_output=True, text=True, timeout=10, check=True
        )
        return answer.stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) != home:  # some other project's repository around our files
            return None
        head = git("rev-parse", "--short=12", "HEAD")
        # rows that are being written change no code
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)results")
        return head + ("-dirty" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


def rows_path(folder: str | Path, theme: str, device: str | torch.device = "cpu", around: Row | None = None) -> Path:
    """``theme_hardware_date.jsonl``: sorts by theme, and two machines never write to one file.

    Args:
        folder: where rows are kept
        theme: what was measured
        device: on which
        around: the environment that the rows tell; this one if there is none
    """
    around = around or environment(device)
    brand = re.sub(r"\((r|tm)\)|\bcpu\b|\bprocessor\b|@.*", " ", around["hardware"].lower())
    slug = re.sub(r"[^a-z0-9]+", "-", brand).strip("-")
    if torch.device(device).type == "cpu":
        slug += f"-{around['threads']}-threads"
    return Path(folder) / f"{theme}_{slug}_{around['date'][:10]}.jsonl"


def append(path: str | Path, *rows: Row) -> None:
    """Add rows in one write. A line that a crash cut short is closed first, so it can spoil no later row.

    Args:
        path: of the file; it is made where there is none
        *rows: to add
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab+") as file:
        size = file.seek(0, os.SEEK_END)
        torn = False
        if size:
            file.seek(size - 1)
            torn = file.read(1) != b"\n"
        text = ("\n" if torn else "") + "".join(dumps(row) + "\n" for row in rows)
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def read(path: str | Path) -> list[Row]:
    """All rows of a file. A last line without its newline was cut short by a crash and is left out.

    Args:
        path: of the file
    """
    whole, _, _ = Path(path).read_text(encoding="utf-8").rpartition("\n")
    found = []
    for number, line in enumerate(whole.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError as error:
            wrong = f"line {number}: {error.msg}"
            raise bad_value(f"one JSON object per line in {path}", wrong, "removing that line") from None
    return found


def dumps(row: Row | Iterable[Row]) -> str:
    """Strict JSON: NaN and infinities, which JSON has no words for, become null.

    Args:
        row: one row, or some
    """
    return json.dumps(_speakable(row), allow_nan=False, ensure_ascii=False)


def _speakable(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _speakable(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_speakable(each) for each in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value
