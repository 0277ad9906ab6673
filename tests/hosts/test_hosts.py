"""Hosts are imported when they are used, and a missing one is named."""

from __future__ import annotations

import subprocess
import sys

import pytest

import clusterattn as ca
from clusterattn.hosts._served import CallCounts, need


def test_no_host_is_imported_before_it_is_used() -> None:
    code = (
        "import sys, clusterattn as ca; ca.hosts.tabpfn, ca.hosts.diffusers, ca.hosts.vggt; "
        "print([name for name in ('tabpfn', 'diffusers', 'vggt', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
    assert dir(ca.hosts) == ["diffusers", "tabpfn", "vggt"]
    with pytest.raises(AttributeError, match="has no attribute 'nobody'"):
        _ = ca.hosts.nobody


def test_a_missing_host_is_named() -> None:
    with pytest.raises(ModuleNotFoundError, match=r'nobody is not installed; .* pip install "nobody>=3"'):
        need("nobody", "nobody.attention", "3")
    with pytest.raises(ModuleNotFoundError, match=r"torch 2\.\S+ has no torch.nobody; .* pip install"):
        need("torch", "torch.nobody", "99")


def test_counts_of_calls() -> None:
    counts = CallCounts()
    for _ in range(3):
        counts.note("refined")
    counts.note("exact", "too short")
    assert (counts.swapped, counts.kept) == (3, 1)
    assert str(counts).splitlines() == [
        "      3  refined", "      1  exact: too short", "3 of 4 attention calls by clustering",
    ]  # fmt: skip
    counts.clear()
    assert counts.rows == ()
