"""Files: text as people keep it, and public data sets as a folder or the archive they came in."""

from __future__ import annotations

import codecs
import gzip
import lzma
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

from clusterattn._errors import bad_value


def text_of(path: Path) -> str:
    """A file's text, also of .gz and .xz: UTF-8, UTF-16 that says so, else what Windows and old data sets wrote."""
    raw = path.read_bytes()
    unpack = {".gz": gzip.decompress, ".xz": lzma.decompress}.get(path.suffix)
    try:
        raw = unpack(raw) if unpack else raw
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise bad_value(f"a whole {path.suffix} file", f"{path} ({error})", "copying it again") from None
    marked = raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    if b"\0" in raw and not marked:
        raise bad_value("a text file", f"{path}, with bytes that are no text", "saving it as text, in UTF-8")
    for encoding in ("utf-16",) if marked else ("utf-8-sig", "cp1252", "latin-1"):
        try:
            text = raw.decode(encoding)
        except UnicodeDecodeError:
            continue
        return text if "\n" in text else text.replace("\r", "\n")  # old Macs end lines so
    raise bad_value("a text file", f"{path}, which begins like UTF-16 and is not", "saving it in UTF-8")


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
