"""Backends are tables: a third one serves a verb without touching it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import clusterattn as ca
from clusterattn.ops import VERBS, Backend, Ops, Served, _backends, add
from clusterattn.ops.kmeans import reference

ROOT = Path(ca.__file__).parent


@pytest.fixture
def third() -> Iterator[list[str]]:
    """A backend that serves one verb, for short sequences, and counts."""
    asked: list[str] = []

    def covariance(*args: Any) -> torch.Tensor:
        asked.append("covariance")
        return reference.covariance(*args)

    def why_not(k: torch.Tensor) -> str | None:
        return None if k.shape[2] < 100 else f"{k.shape[2]} keys are too many for it"

    add(Backend("third", {"covariance": Served(why_not, covariance)}))
    yield asked
    del _backends._KNOWN["third"]


def test_a_third_backend_serves_what_it_can(third: list[str]) -> None:
    short, long = torch.randn(1, 2, 50, 8), torch.randn(1, 2, 200, 8)
    ops = ca.ops.choose("third")
    wanted = ca.ops.choose("reference").covariance(short, None, 2)
    assert torch.equal(ops.covariance(short, None, 2), wanted)
    assert third == ["covariance"]
    with pytest.raises(ValueError, match=r"wanted .*'third'.* got 200 keys are too many for it; try"):
        ops.covariance(long, None, 2)
    assert "third" in _backends.names()
    if not _backends.INTERPRETING:
        ca.ops.choose("auto").covariance(short, None, 2)
        ca.ops.choose("auto").covariance(long, None, 2)
        assert third == ["covariance"] * 2


def test_ops_are_built_from_the_one_list() -> None:
    assert set(vars(Ops("reference"))) == {verb.__name__ for verb in VERBS}
    assert [name for name, _, _ in ca.ops.verbs()] == [verb.__name__ for verb in VERBS]


def test_no_function_shadows_its_own_module() -> None:
    for folder in (ROOT / "ops").iterdir():
        name = folder.stem
        if name.startswith("_") or not (folder.is_dir() or folder.suffix == ".py"):
            continue
        assert type(getattr(ca.ops, name)).__name__ == "module", name


def test_methods_use_verbs_alone() -> None:
    for path in (ROOT / "methods").glob("*.py"):
        for line in path.read_text(encoding="utf-8").splitlines():
            reaches = line.lstrip().startswith(("from", "import")) and ("reference" in line or "kernels" in line)
            assert not reaches, f"{path.name}: {line}"
