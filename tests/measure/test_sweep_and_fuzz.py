"""The scripts that look for cliffs and for wrong kernels: what they would call one."""

from __future__ import annotations

from dataclasses import asdict
from types import ModuleType

import pytest
import torch
from pages import script


@pytest.fixture(scope="module")
def cases() -> ModuleType:
    return script("fuzz_cases")


@pytest.fixture(scope="module")
def judge() -> ModuleType:
    return script("fuzz_judge")


@pytest.fixture(scope="module")
def sweep() -> ModuleType:
    return script("sweep")


def test_a_case_is_a_function_of_its_number(cases: ModuleType) -> None:
    drawn = [cases.case(3, number, small=False) for number in range(120)]
    assert drawn == [cases.case(3, number, small=False) for number in range(120)]
    assert drawn[: len(cases.KNOWN)] == cases.KNOWN
    assert drawn[2:] != [cases.case(4, number, small=False) for number in range(2, 120)]
    kinds = {(each.method, each.dtype, each.d, each.e) for each in drawn[6:]}
    assert len(kinds) <= 114 / cases.PER_KIND  # few kinds of kernels ...
    assert len({(each.n, each.m, each.b) for each in drawn}) > 80  # ... and many sizes
    assert {each.dtype for each in drawn} == set(cases.DTYPES)
    assert all(each.n == each.m for each in drawn if "reformer" in each.method)


@pytest.mark.parametrize("layout", ["plain", "bshd", "cut", "odd", "columns"])
def test_layouts_hold_the_same_numbers(cases: ModuleType, layout: str) -> None:
    x = torch.randn(2, 3, 5, 8)
    assert torch.equal(cases.laid(x, layout), x)


def test_errors_are_held_to_the_plain_runs(judge: ModuleType) -> None:
    right = torch.linspace(-1, 1, 100, dtype=torch.float64)
    plain = [right + 0.01]
    assert judge.compared("out", right + 0.019, right, plain, 1e-4) == []
    (fault,) = judge.compared("out", right + 0.021, right, plain, 1e-4)
    assert fault.startswith("out: largest error")
    assert judge.compared("dq", right + 0.029, right, plain, 1e-4) == []
    assert judge.compared("out", right.where(right < 0.9, torch.nan), right, plain, 1e-4)


def test_a_cliff_is_far_above_the_rest(sweep: ModuleType) -> None:
    rows = []
    for number in range(60):
        x = sweep.drawn(0, number, "cpu")
        usual = 2.0 * x.share
        rows.append({"case": number, **asdict(x), "cost_share": x.share, "sdpa_seconds": 1.0, "time_share": usual})
    assert sweep.judged(rows, "cpu") == []
    rows[7]["time_share"] *= 4
    faults = sweep.judged(rows, "cpu")
    assert any(fault.startswith("apart") and "--case 7" in fault for fault in faults)
    assert not any("--case 8" in fault for fault in faults)
