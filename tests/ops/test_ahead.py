"""The kernels of a first call are compiled together, before it: those that it launches, and no others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clusterattn.ops._jit import HAVE_TRITON

HERE = Path(__file__).resolve().parent
pytestmark = pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": str(HERE.parents[1]), "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    done = subprocess.run(
        [sys.executable, str(HERE / "rehearsals.py")], env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_what_a_call_launches_was_compiled_before(told: dict[str, Any]) -> None:
    assert told["forward"]["compiled"] == told["forward"]["launched"]
    assert "coarse_fwd_kernel" in told["forward"]["launched"]


def test_a_call_with_a_gradient_compiles_its_backward_too(told: dict[str, Any]) -> None:
    both, forward = told["both"], told["forward"]
    new = set(both["launched"]) - set(forward["launched"])
    assert new <= set(both["compiled"]) <= set(both["launched"])  # some of forward's are there in another kind
    assert "coarse_bwd_kv_kernel" in both["compiled"]


def test_each_kind_is_rehearsed_once_and_only_where_nobody_watches(told: dict[str, Any]) -> None:
    assert told["kinds"] == 2
    assert told["can"] == {"plain": True, "rehearsed": False, "fake": False, "captured": False}


def test_a_checkpoint_around_a_first_call_sees_nothing_of_its_rehearsal(told: dict[str, Any]) -> None:
    assert told["kinds checkpointed"] == 1
    assert told["kept"] == 0


def test_a_method_of_ones_own_runs_no_more_often_than_it_is_called(told: dict[str, Any]) -> None:
    assert told["runs"] == 1


def test_an_interrupt_leaves_nothing_behind(told: dict[str, Any]) -> None:
    assert told["interrupted"]
    assert not told["left"]
    assert not told["mode left"]
