"""Law 3: causality, in the two kinds a method may declare."""

from __future__ import annotations

import dataclasses
from typing import Any

import laws
import pytest
import torch
from laws import Case, Inputs, draw, over, padded, same_bits
from torch import Tensor

import clusterattn as ca


def other(x: Tensor, since: int, seed: int = 99) -> Tensor:
    """Other content from position ``since`` on."""
    new = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), dtype=x.dtype) * 3
    return torch.cat([x[:, :, :since], new[:, :, since:]], 2)


def before(parts: Any, rows: int) -> list[Tensor]:
    return [part[:, :, :rows] for part in parts]


def test_every_method_declares_its_kind() -> None:
    declared = {case.name: case.method.causality for case in laws.CASES}
    assert set(declared.values()) <= {"strict", "value", "no"}
    for name in ("exact", "clustered", "improved", "refined", "oracle_top", "local"):
        assert declared[name] == "strict", name
    for name in ("clustered-block", "improved-block", "refined-block", "smyrf", "reformer", "clusterformer"):
        assert declared[name] == "value", name


@over(laws.CASES)
def test_causal_is_supported_or_refused(case: Case) -> None:
    x = draw(case)
    if case.method.causality == "no":
        with pytest.raises(ValueError, match="causal"):
            x.attend(case.method, causal=True)
    else:
        assert x.attend(case.method, causal=True).isfinite().all()


@over(laws.CAUSAL)
@pytest.mark.parametrize("mask", ["all", "left", "holes"])
def test_no_future_key_or_value_reaches_the_past_with_the_groups_given(case: Case, mask: str) -> None:
    """Value-causal. (Reformer's keys are its queries, so a later query is a later key as well.)"""
    x = draw(case, n=37, m=37)
    x = x if mask == "all" else padded(x, mask)
    groups = x.groups(case.method, causal=True)
    wanted = x.attend(case.method, causal=True, groups=groups, return_lse=True)
    for since in (1, 20, 36):
        new = dataclasses.replace(x, k=other(x.k, since), v=other(x.v, since, 98))
        if case.name == "reformer":
            new = dataclasses.replace(new, q=other(x.q, since))
        same_bits(
            before(new.attend(case.method, causal=True, groups=groups, return_lse=True), since),
            before(wanted, since),
        )


@over(laws.CAUSAL, where=lambda case: not case.method.self_only)
def test_no_future_key_or_value_reaches_the_past_when_there_are_older_keys(case: Case) -> None:
    x = draw(n=30, m=41)
    groups = x.groups(case.method, causal=True)
    wanted = x.attend(case.method, causal=True, groups=groups, return_lse=True)
    for since in (1, 20, 29):
        new = dataclasses.replace(x, k=other(x.k, since + 11), v=other(x.v, since + 11, 98))
        same_bits(
            before(new.attend(case.method, causal=True, groups=groups, return_lse=True), since),
            before(wanted, since),
        )


@over(laws.CAUSAL, where=lambda case: case.method.causality == "strict")
@pytest.mark.parametrize("mask", ["all", *laws.PADDINGS])
@pytest.mark.parametrize("since", [36, 20, 8, 5])
def test_replacing_the_last_tokens_changes_no_earlier_answer(case: Case, mask: str, since: int) -> None:
    """Strict: groups are made anew, from whatever stands there now."""
    x = draw(case, n=37, m=37)
    x = x if mask == "all" else padded(x, mask)
    new = Inputs(other(x.q, since), other(x.k, since, 97), other(x.v, since, 98), x.key_mask, x.query_mask)
    wanted = x.attend(case.method, causal=True, return_lse=True)
    same_bits(before(new.attend(case.method, causal=True, return_lse=True), since), before(wanted, since))


@over(laws.CAUSAL, where=lambda case: case.method.causality == "strict" and not case.method.self_only)
def test_strict_holds_with_older_keys_before_the_first_query(case: Case) -> None:
    x = draw(n=30, m=41)
    new = Inputs(other(x.q, 25), other(x.k, 36, 97), other(x.v, 36, 98))
    wanted = x.attend(case.method, causal=True, return_lse=True)
    same_bits(before(new.attend(case.method, causal=True, return_lse=True), 25), before(wanted, 25))


@over(laws.CAUSAL, where=lambda case: case.method.causality == "strict")
def test_the_length_to_come_changes_no_earlier_answer(case: Case) -> None:
    """Strict is more than values: the first 25 tokens alone give what they give inside 37."""
    x = draw(n=37, m=37)
    short = Inputs(*(t[:, :, :25] for t in x.tensors))
    laws.close(
        before(x.attend(case.method, causal=True, return_lse=True), 25),
        short.attend(case.method, causal=True, return_lse=True),
    )


@pytest.mark.parametrize("name", ["clustered", "improved", "refined"])
def test_own_block_groups_are_no_worse_than_groups_of_the_past(name: str) -> None:
    """What value-causality buys: the block's own queries make the better centroids."""
    x = draw(n=96, m=96, spread=2.0)
    exact = x.attend(ca.Exact(), causal=True)
    errors = {
        kind: float(
            (x.attend(dataclasses.replace(laws.BY_NAME[name].method, centroids_from=kind), causal=True) - exact).norm()
        )
        for kind in ("past", "block")
    }
    assert errors["block"] <= errors["past"]
    assert errors["past"] < float(exact.norm())
