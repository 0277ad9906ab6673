"""How kernels are launched: plans are kept by what decides the compiled kernel, the rest takes Triton's own way."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from clusterattn.ops import _launch
from clusterattn.ops._jit import HAVE_TRITON
from clusterattn.ops._launch import Buffer, cdiv, launch, workspace

pytestmark = pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")


class Compiled:
    """What Triton hands back for a compiled kernel, as far as launches go."""

    function, packed_metadata = 7, (4, 1, 0)

    def __init__(self, launched: list[tuple[Any, ...]]) -> None:
        self.run = lambda *args: launched.append(args)


class Kernel:
    """A jitted function as Triton would have it."""

    arg_names = ("X", "Y", "n", "low", "FLAG", "BLOCK")

    def __init__(self, compiled: Any) -> None:
        self.compiled, self.ordinary = compiled, 0

    def run(self, *args: Any, grid: tuple[int, ...], warmup: bool, **flags: Any) -> Any:
        assert not any(isinstance(x, Buffer) for x in args)
        self.ordinary += 1
        return self.compiled


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is there as far as launches ask."""
    monkeypatch.setattr(_launch, "INTERPRETING", False)
    monkeypatch.setattr(_launch, "_hooks", [])
    monkeypatch.setattr(_launch, "_plans", {})
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 99, raising=False)


def test_the_second_launch_goes_straight_to_the_compiled_kernel(cuda: None) -> None:
    launched: list[tuple[Any, ...]] = []
    kernel = Kernel(Compiled(launched))
    x, (y, _) = torch.zeros(8), workspace(torch.device("cpu"), ((3, 5), torch.int32), ((4,), torch.float32))
    for low in (1, 2, 3):
        launch(kernel, (2, 3), (x, y), (8,), (low,), BLOCK=16, FLAG=True, num_warps=4)
    assert kernel.ordinary == 1
    # grid, stream, function, metadata, no hooks, addresses, numbers, and the constants in the kernel's own order
    assert launched[-1] == (2, 3, 1, 99, 7, (4, 1, 0), None, None, None, x.data_ptr(), y.address, 8, 3, True, 16)


class Launcher:
    """As Triton's own, which a kernel without memory of its own is launched by directly."""

    global_scratch_size = profile_scratch_size = 0
    launch_pdl = False

    def __init__(self, launched: list[tuple[Any, ...]], cooperative: bool) -> None:
        self.launch_cooperative_grid = cooperative
        self.launch = lambda *args: launched.append(args)


@pytest.mark.parametrize(
    ("target", "cooperative", "waits", "early"),
    [(("cuda", 90), False, True, True), (("cuda", 100), False, True, True), (("cuda", 80), False, False, False),
     (("cuda", 90), True, True, False), (("cuda", 90), False, False, False), (("hip", "gfx942"), False, False, False)],
)  # fmt: skip
def test_kernels_that_wait_for_their_turn_come_to_the_chip_before_it(
    cuda: None, target: tuple[str, Any], cooperative: bool, waits: bool, early: bool
) -> None:
    launched: list[tuple[Any, ...]] = []
    compiled = Compiled([])
    compiled.run = Launcher(launched, cooperative)
    compiled.asm = {"ptx": "ld.param; griddepcontrol.wait;" if waits else "ld.param;"}
    compiled.metadata = SimpleNamespace(target=SimpleNamespace(backend=target[0], arch=target[1]))
    kernel, x = Kernel(compiled), torch.zeros(8)
    for _ in range(2):
        launch(kernel, (1,), (x, x), (8,), (0,), FLAG=True, BLOCK=16)
    assert launched[-1][5:9] == (cooperative, early, None, None)


def test_every_kernel_waits_for_its_turn_before_anything_else() -> None:
    kernels = 0
    for path in sorted(Path(_launch.__file__).parent.rglob("*.py")):
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef) or not function.name.endswith("_kernel"):
                continue
            if [ast.unparse(each) for each in function.decorator_list] != ["jit"]:
                continue
            documented = ast.get_docstring(function) is not None
            assert ast.unparse(function.body[documented]) == "in_turn()", f"{path.name}: {function.name}"
            kernels += 1
    assert kernels > 60


def test_what_decides_the_kernel_makes_another_plan(cuda: None) -> None:
    kernel = Kernel(Compiled([]))
    x, half = torch.zeros(8), torch.zeros(8, dtype=torch.float16)
    for tensors, n, flag in (((x, x), 8, True), ((x, half), 8, True), ((x, x), 9, True), ((x, x), 8, False)):
        for _ in range(2):
            launch(kernel, (1,), tensors, (n,), (0,), FLAG=flag, BLOCK=16)
    assert kernel.ordinary == 4


def test_the_unusual_takes_the_ordinary_way(cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(9)
    kernel = Kernel(Compiled([]))
    for _ in range(2):
        launch(kernel, (1,), (x, x[1:]), (8,), (0,), FLAG=True, BLOCK=16)  # not aligned
    assert kernel.ordinary == 2
    for _ in range(2):
        launch(strange := Kernel(object()), (1,), (x, x), (8,), (0,), FLAG=True, BLOCK=16)
        launch(strange, (1,), (x, x), (8,), (0,), FLAG=True, BLOCK=16)
        assert strange.ordinary == 2
    refusing = Compiled([])

    def refuse(*_: Any) -> None:
        raise TypeError("function takes exactly 3 arguments")

    refusing.run = refuse
    other = Kernel(refusing)
    for _ in range(3):
        launch(other, (1,), (x, x), (8,), (0,), FLAG=True, BLOCK=16)
    assert other.ordinary == 3
    monkeypatch.setattr(_launch, "_hooks", [print])
    hooked = Kernel(Compiled([]))
    for _ in range(2):
        launch(hooked, (1,), (x, x), (8,), (0,), FLAG=True, BLOCK=16)
    assert hooked.ordinary == 2


def test_plans_do_not_grow_without_bound(cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_launch, "PLANS", 10)
    kernel, x = Kernel(Compiled([])), torch.zeros(8)
    for n in range(35):
        launch(kernel, (1,), (x, x), (n,), (0,), FLAG=True, BLOCK=16)
    assert len(_launch._plans) <= 10


def test_a_workspace_is_one_allocation_of_aligned_pieces() -> None:
    wanted = (((3, 5), torch.int32), ((2, 2), torch.float16), ((7,), torch.int64))
    pieces = workspace(torch.device("cpu"), *wanted)
    for piece, (shape, dtype) in zip(pieces, wanted, strict=True):
        tensor = piece.tensor()
        assert tuple(tensor.shape) == shape
        assert tensor.dtype == dtype
        assert tensor.data_ptr() == piece.address
        tensor.fill_(1)
    assert all(bool((piece.tensor() == 1).all()) for piece in pieces)
    assert len({piece.tensor().untyped_storage().data_ptr() for piece in pieces}) == 1
    assert cdiv(7, 2) == 4


def test_seeds_fit_one_kernel() -> None:
    from clusterattn.ops.draw.kernels import seed_arguments

    for seed in (0, 1, 2**31, 2**32 - 1, 2**40 + 2**31, 2**62):
        _, (low, high) = seed_arguments(seed, None, torch.empty(0))
        assert -(2**31) <= low < 2**31
        assert -(2**31) <= high < 2**31
        assert (low & 0xFFFFFFFF) + ((high & 0xFFFFFFFF) << 32) == seed


def test_every_kernel_is_launched_so() -> None:
    """No call takes Triton's own way by itself."""
    for path in Path(_launch.__file__).parent.rglob("*.py"):
        assert "_kernel[" not in path.read_text(encoding="utf-8"), path
