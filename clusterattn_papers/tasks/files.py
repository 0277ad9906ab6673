"""Public data sets as a folder or the archive they came in."""

from __future__ import annotations

import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

from clusterattn._errors import bad_value


def folder_of(data: Path | None, name: str) -> Path:
    """The folder of data set ``name`` under ``data``: itself, one of its sub-folders, or an archive that is unpacked
    once beside a user's other caches.

    ``name`` is the beginning of the folder's or the archive's name: "an4" finds an4/, speech/an4.tar.xz. A ``data``
    that bears the name is the data set, unless it holds the archive.
    """
    if data is None:
        raise bad_value(f"--data, a folder that holds {name}", "none", f"--data FOLDER with {name}* in it")
    data = Path(data)
    if not data.is_dir():
        raise bad_value("--data, a folder", str(data), "the folder that holds the data sets")
    itself = data.resolve().name.startswith(name)
    for found in _deeper(data, f"{name}*"):
        if found.is_dir() and not itself:
            return found
        if found.name.endswith((".tar.xz", ".tar.gz", ".tgz", ".tar")):
            return _unpacked(found)
    if itself:
        return data
    raise bad_value(f"{name} under --data", f"nothing of that name in {data}", f"adding a folder or archive {name}*")


def inside(folder: Path, name: str) -> Path:
    """The file or folder ``name`` (``*`` for any characters) in a data set: archives differ in how deep they put
    things."""
    if folder.name == name:
        return folder
    for found in _deeper(folder, name):
        return found
    raise bad_value(f"{name} in {folder.name}", f"nothing of that name in {folder}", "the data set as it was published")


def _deeper(folder: Path, pattern: str) -> Iterator[Path]:
    """What is called so in the folder, then in its folders, then in theirs."""
    for depth in ("", "*/", "*/*/"):
        yield from sorted(folder.glob(f"{depth}{pattern}"))


def _unpacked(archive: Path) -> Path:
    """Unpack into the cache, under a name that changes with the archive; a folder is there whole or not at all."""
    about = archive.stat()
    cache = Path.home() / ".cache" / "clusterattn" / f"{archive.name.split('.')[0]}-{about.st_size:x}"
    if not cache.exists():
        cache.parent.mkdir(parents=True, exist_ok=True)
        half = Path(tempfile.mkdtemp(dir=cache.parent))
        try:
            with tarfile.open(archive) as tar:
                tar.extractall(half, filter="data")
            half.replace(cache)
        except OSError:
            if not cache.exists():  # another process may have been first
                raise
        finally:
            shutil.rmtree(half, ignore_errors=True)
    return cache
