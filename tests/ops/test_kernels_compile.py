"""Kernels compile for a GPU, also where there is none: what an interpreter accepts, the compiler may refuse."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from clusterattn.ops._jit import HAVE_TRITON

HERE = Path(__file__).resolve().parent


@pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")
def test_kernels_compile_for_sm_90() -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = str(HERE.parents[1])
    done = subprocess.run(
        [sys.executable, str(HERE / "compile_kernels.py")], env=env, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[-1]) > 40
