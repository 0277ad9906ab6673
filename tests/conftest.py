"""Before any test: instructions that exist, memory that is never silently zero, one thread per worker."""

from __future__ import annotations

import os

# See the Makefile. Set here too, so that a bare `pytest` is as safe as `make test`; must precede torch.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")

import hypothesis
import pytest
import torch

if not torch.cuda.is_available():  # Triton's interpreter runs the kernels on a CPU; must precede clusterattn
    os.environ.setdefault("TRITON_INTERPRET", "1")

torch.set_num_threads(1)

# The same examples every time, no timing: a failure here is a failure everywhere.
hypothesis.settings.register_profile("laws", derandomize=True, deadline=None, database=None, max_examples=12)
hypothesis.settings.load_profile("laws")


@pytest.fixture(autouse=True)
def empty_memory_is_nan() -> object:
    """torch.empty returns NaN (or the largest integer): memory nobody wrote to cannot pass for an answer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
