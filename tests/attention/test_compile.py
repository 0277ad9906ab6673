"""torch.compile: one graph for every method, not one per length; and the library's ops keep torch's rules."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import laws
import pytest
import torch
from laws import Case, close, draw, gradients, kinds, over, padded
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import clusterattn as ca


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@over()
def test_every_method_compiles_to_one_graph(case: Case) -> None:
    variant = "-" in case.name and not case.name.endswith("-block")  # other settings of the same causal recipe
    for causal in [False] if variant else kinds(case):
        x = padded(draw(case, m=34, dtype=torch.float32), "holes")

        def attend(*tensors: torch.Tensor, x: laws.Inputs = x, causal: bool = causal) -> Any:
            return ca.attention(*tensors, method=case.method, causal=causal, **x.masks, return_lse=True)

        plain, compiled = x.leaves(), x.leaves()
        wanted = attend(*plain.tensors)
        got = torch.compile(attend, fullgraph=True, backend="aot_eager")(*compiled.tensors)
        close(got, wanted)
        close(gradients(got, compiled), gradients(wanted, plain))


@over(where=lambda case: "-" not in case.name or case.name.endswith("-auto"))
def test_lengths_share_a_graph(case: Case) -> None:
    counter = CompileCounter()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ca.attention(q, k, v, method=case.method)

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=counter)
    for n in (40, 57, 64, 91, 100, 128):
        x = draw(case, n=n, m=n + 7, dtype=torch.float32)
        close(compiled(*x.tensors), attend(*x.tensors))
    assert counter.frame_count <= 2, f"{counter.frame_count} graphs for 6 lengths"


@pytest.mark.parametrize("name", ["improved", "smyrf", "reformer", "routing"])
def test_seeds_in_a_tensor_share_a_graph(name: str) -> None:
    counter, case = CompileCounter(), laws.BY_NAME[name]
    x, seed = draw(case, dtype=torch.float32), torch.tensor(0)

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        return ca.attention(*tensors, method=case.method, seed=seed)

    compiled = torch.compile(attend, fullgraph=True, backend=counter)
    for number in (3, 4, 2**40):
        seed.fill_(number)
        close(compiled(*x.tensors), ca.attention(*x.tensors, method=case.method, seed=number))
    assert counter.frame_count == 1


DEFAULT_COMPILER = """
import laws, torch, clusterattn as ca

case = laws.BY_NAME[{name!r}]
plain, compiled = laws.draw(dtype=torch.float32).leaves(), laws.draw(dtype=torch.float32).leaves()
attend = lambda *tensors: ca.attention(*tensors, method=case.method)
wanted, got = attend(*plain.tensors), torch.compile(attend, fullgraph=True)(*compiled.tensors)
laws.close(got, wanted)
laws.close(laws.gradients(got, compiled), laws.gradients(wanted, plain))
"""


@pytest.mark.parametrize("name", ["refined", "smyrf"])
def test_the_default_compiler_gives_the_same_answers_within_minutes(name: str) -> None:
    """In a process of its own: a compiler that never comes back is a failure, not a hanging test."""
    if not any(shutil.which(compiler) for compiler in (os.environ.get("CXX", "g++"), "g++", "clang++")):
        pytest.skip("the default compiler backend needs a C++ compiler on a CPU")
    here = Path(__file__).resolve().parents[1]
    env = {**os.environ, "PYTHONPATH": f"{here}{os.pathsep}{here.parent}"}
    code = DEFAULT_COMPILER.format(name=name)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-2000:]


@over()
def test_a_method_may_be_named_inside_a_graph(case: Case) -> None:
    text = str(case.method)
    x = draw(case, dtype=torch.float32)

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        return ca.attention(*tensors, method=text)

    close(torch.compile(attend, fullgraph=True, backend="eager")(*x.tensors), attend(*x.tensors))


@pytest.mark.parametrize("causal", [False, True])
def test_open_sizes_make_a_graph_for_every_step_of_the_lengths(causal: bool) -> None:
    """Guards at the steps, 1 024, 1 536, ...: any number of lengths between two of them share a graph."""
    counter = CompileCounter()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ca.attention(q, k, v, method=ca.Refined(), causal=causal)

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=counter)
    for n in (130, 140, 150, 160, 170, 180, 190, 200, 230, 250):
        x = draw(n=n, m=n, h=2, hk=1, b=1, dtype=torch.float32)
        close(compiled(*x.tensors), attend(*x.tensors))
    assert counter.frame_count <= 2


class Attending(torch.nn.Module):
    def __init__(self, method: Any, causal: bool = False) -> None:
        super().__init__()
        self.method, self.causal = method, causal

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = ca.attention(q, k, v, method=self.method, causal=self.causal)
        return out


def export(module: Attending, x: laws.Inputs, least: int, most: int) -> Any:
    """What the solver of shapes can not prove (that 8 ceil(n / 8) is at least n, say) is checked at run time."""
    shapes = [{2: torch.export.Dim("length", min=least, max=most)}] * 3
    return torch.export.export(
        module, x.tensors, dynamic_shapes=shapes, prefer_deferred_runtime_asserts_over_guards=True
    ).module()


@over()
def test_export_with_a_dynamic_length(case: Case) -> None:
    for causal in kinds(case) if "-" not in case.name else [False]:
        x = draw(case, n=43, m=43, b=1, h=2, hk=1, dtype=torch.float32)
        module = Attending(case.method, causal)
        exported = export(module, x, 33, 4096)
        for n in (40, 57, 96):
            x = draw(case, n=n, m=n, b=1, h=2, hk=1, dtype=torch.float32)
            close(exported(*x.tensors), module(*x.tensors))


@pytest.mark.parametrize("name", ["refined", "auto"])
def test_open_sizes_are_exported_for_a_step_of_the_lengths(name: str) -> None:
    x = draw(n=530, m=530, b=1, h=2, hk=1, dtype=torch.float32)
    exported = export(Attending(name), x, 512, 767)
    x = draw(n=700, m=700, b=1, h=2, hk=1, dtype=torch.float32)
    close(exported(*x.tensors), ca.attention(*x.tensors, method=name))


def test_state_passes_through_compiled_code() -> None:
    x = draw(n=40, m=40, dtype=torch.float32)
    for method in (ca.Routing(clusters=4, window=10), ca.ClusterFormer(clusters=4)):
        _, state = x.attend(method, return_state=True)

        def step(*tensors: torch.Tensor, method: Any = method, state: Any = state) -> Any:
            return ca.attention(*tensors, method=method, state=state, return_state=True)

        got, wanted = torch.compile(step, fullgraph=True, backend="aot_eager")(*x.tensors), step(*x.tensors)
        close(got[0], wanted[0])
        first = "means" if isinstance(method, ca.Routing) else "centroids"
        close(getattr(got[1], first), getattr(wanted[1], first))


def test_autocast_inside_compiled_code() -> None:
    x = draw(dtype=torch.float32)

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return ca.attention(*tensors, method=laws.BY_NAME["refined"].method)

    close(torch.compile(attend, fullgraph=True, backend="aot_eager")(*x.tensors), attend(*x.tensors))


# ---- the ops -------------------------------------------------------------------------------------


class Recorder(TorchDispatchMode):
    """Remembers a call of every op of the library, one for each pattern of arguments that are there."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "clusterattn":
            assert not kwargs
            pattern = tuple(arg.dtype if isinstance(arg, torch.Tensor) else arg is None for arg in tree_leaves(args))
            kept = tree_map(lambda arg: arg.detach() if isinstance(arg, torch.Tensor) else arg, args)
            self.calls.setdefault((func, pattern), (func, kept))
        return func(*args, **(kwargs or {}))


# Served by kernels alone, and checked beside them: see test_kernels.py and test_kernels_hashing.py.
KERNELS_ALONE = {
    "take",
    "take_backward",
    "broadcast",
    "broadcast_backward",
    "members",
    "codes",
    "near_and_far",
    "near_and_far_backward",
    "directions",
    "scores",
    "polytope",
    "balanced",
    "chunked",
    "unit",
    "unit_backward",
}


def ops() -> set[str]:
    names = {name.split(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    mine = {name.removeprefix("clusterattn::") for name in names if name.startswith("clusterattn::")}
    return {name for name in mine - KERNELS_ALONE if not name.startswith("test_")}  # those of test_op.py


@pytest.fixture(scope="module")
def recorded() -> list[tuple[Any, tuple[Any, ...]]]:
    with Recorder() as seen:
        for case in laws.CASES:
            for causal in kinds(case):
                x = padded(draw(case, b=1, h=2, hk=1, n=17, m=19, d=3, e=2, dtype=torch.float32), "holes").leaves()
                gradients(x.attend(case.method, causal=causal, return_lse=True), x)
        x = draw(laws.CASES[0], b=1, h=2, hk=1, n=17, m=19, d=3, e=2, dtype=torch.float32)
        x.attend(ca.Refined(clusters=4, sample=8), causal=False)  # without a mask
    return list(seen.calls.values())


def test_every_op_is_used_by_some_method(recorded: list[tuple[Any, tuple[Any, ...]]]) -> None:
    of_documents = {"by_document", "by_document_backward"}  # a compiled packed call: tests/attention/test_varlen.py
    assert {op._schema.name.removeprefix("clusterattn::") for op, _ in recorded} == ops() - of_documents


def wanting_gradient(arg: Any) -> Any:
    continuous = isinstance(arg, torch.Tensor) and arg.is_floating_point()
    return arg.detach().clone().requires_grad_() if continuous else arg


@pytest.mark.parametrize("name", sorted(ops()))
def test_opcheck(name: str, recorded: list[tuple[Any, tuple[Any, ...]]]) -> None:
    differentiable = f"{name}_backward" in ops()
    for op, args in recorded:
        if op._schema.name == f"clusterattn::{name}":
            torch.library.opcheck(op, args)
            if differentiable:
                torch.library.opcheck(op, tuple(map(wanting_gradient, args)))
