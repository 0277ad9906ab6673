"""Public data sets where a user keeps them: a folder, or the archive it came in."""

from __future__ import annotations

import shutil
import tarfile
import tempfile
from pathlib import Path

from .._errors import bad_value


def folder_of(data: Path | None, name: str) -> Path:
    """The folder of data set ``name`` under ``data``: itself, one of its sub-folders, or an archive that is unpacked
    once beside a user's other caches.

    ``name`` is the beginning of the folder's or the archive's name: "an4" finds an4/, speech/an4.tar.xz.
    """
    if data is None:
        raise bad_value(f"--data, a folder that holds {name}", "none", f"--data FOLDER with {name}* in it")
    data = Path(data)
    if not data.is_dir():
        raise bad_value("--data, a folder", str(data), "the folder that holds the data sets")
    for depth in ("", "*/", "*/*/"):
        for found in sorted(data.glob(f"{depth}{name}*")):
            if found.is_dir():
                return found
            if found.name.endswith((".tar.xz", ".tar.gz", ".tgz", ".tar")):
                return _unpacked(found)
    raise bad_value(f"{name} under --data", f"nothing of that name in {data}", f"adding a folder or archive {name}*")


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
