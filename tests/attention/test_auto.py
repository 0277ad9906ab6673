"""method="auto": exact attention where it is faster, Refined elsewhere, by the data of the device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from laws import draw, same_bits
from torch.utils.checkpoint import checkpoint

import clusterattn as ca
from clusterattn.measure.crossings import crossings
from clusterattn.methods import auto
from clusterattn.methods.budgets import Shape

FAST, SLOW = (0.0, 1e-9, 1e15), (0.0, 0.0, 1e6)  # seconds of a call, of a row; multiply-adds in a second


def entry(forward: Any, both: Any, causal: bool = False, device: str = "cpu", dtype: str = "float32") -> dict[str, Any]:
    """Exact and Refined in each pass."""
    passes = {"forward": forward, "forward+backward": both}
    named = {name: {"exact": pair[0], "refined": pair[1]} for name, pair in passes.items()}
    return {"device": device, "dtypes": [dtype], "causal": causal, "passes": named, "source": "made up"}


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and nothing shipped."""
    monkeypatch.setattr(auto, "_user_file", lambda: tmp_path / "cache" / "crossings.json")
    monkeypatch.setattr(auto, "SHIPPED", tmp_path / "nothing.json")
    auto._predicted.cache_clear()
    auto._entries.cache_clear()
    yield tmp_path / "cache" / "crossings.json"
    auto._predicted.cache_clear()
    auto._entries.cache_clear()


def chosen(n: int = 512, rows: int = 4, causal: bool = False, dtype: torch.dtype = torch.float32) -> str:
    return ca.Auto().choose(torch.device("cpu"), dtype, rows, Shape(n, n, 64, 64, causal)).name


def test_it_is_the_default_and_a_method_like_any_other(user: Path) -> None:
    x = draw(dtype=torch.float32)
    for method in (None, "auto", ca.Auto(), {"method": "auto"}):
        given = {} if method is None else {"method": method}
        same_bits(ca.attention(*x.tensors, **given), ca.attention(*x.tensors, method="exact"))
    assert ca.Plan({"layer": "auto"}).layers["layer"] == ca.Auto()
    assert ca.Plan.from_dict(ca.Plan({"layer": "auto:budget=0.1"}).to_dict()).layers["layer"] == ca.Auto(budget=0.1)
    assert ca.nn.MultiheadAttention(16, 2, "auto").method == ca.Auto()
    with pytest.raises(ValueError, match="budget"):
        ca.Auto(budget=-1)


def test_without_data_of_a_device_it_is_exact(user: Path) -> None:
    assert chosen(1 << 20) == "exact"


def test_refined_must_win_forward_and_with_backward(user: Path) -> None:
    auto.keep([entry((SLOW, FAST), (SLOW, FAST))])
    assert chosen() == "refined"
    assert chosen(causal=True) == chosen(dtype=torch.bfloat16) == "exact"  # nothing is known of those
    for forward, both in (((SLOW, FAST), (FAST, SLOW)), ((FAST, SLOW), (SLOW, FAST)), ((FAST, SLOW), (FAST, SLOW))):
        auto.keep([entry(forward, both)])
        assert chosen() == "exact"
    auto.keep([entry((SLOW, FAST), (SLOW, FAST), causal=True)])
    assert chosen(causal=True) == "refined"
    assert len(json.loads(user.read_text())["entries"]) == 2  # one for each causality: the latest


def test_the_choice_crosses_once_and_depends_on_the_work_of_a_call(user: Path) -> None:
    line = ((0.0, 0.0, 1e11), (1e-1, 0.0, 1e10))
    auto.keep([entry(line, line)])
    names = [chosen(2**i) for i in range(6, 18)]
    assert names == sorted(names)
    assert {"exact", "refined"} == set(names)
    assert chosen(8192, rows=1) == "exact"
    assert chosen(8192, rows=64) == "refined"  # the fixed time of a call is shared


def test_a_machine_of_its_own_comes_before_its_kind(user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = auto.place(torch.device("cpu"), torch.get_num_threads())
    auto.keep([entry((SLOW, FAST), (SLOW, FAST)), entry((FAST, SLOW), (FAST, SLOW), device=here)])
    assert chosen() == "exact"


def test_a_broken_file_is_named(user: Path) -> None:
    user.parent.mkdir()
    user.write_text("{")
    with pytest.raises(ValueError, match=r"crossings.*removing it"):
        chosen()


def test_masks_and_biases_and_dropout_and_groups(user: Path) -> None:
    auto.keep([entry((SLOW, FAST), (SLOW, FAST))])
    x = draw(n=60, m=60, dtype=torch.float32)
    mask = (torch.arange(60) < 50).expand(2, 60)
    refined = ca.Refined().at(60, 60, 6, 5, group=2)
    same_bits(ca.attention(*x.tensors, key_mask=mask), ca.attention(*x.tensors, key_mask=mask, method=refined))
    bias = torch.zeros(60, 60)
    same_bits(ca.attention(*x.tensors, attn_mask=bias), ca.attention(*x.tensors, attn_mask=bias, method="exact"))
    ca.attention(*x.tensors, dropout_p=0.1)
    auto.keep([entry((FAST, SLOW), (FAST, SLOW))])
    groups = ca.groups(*x.tensors)
    assert isinstance(groups, ca.Clusters)
    same_bits(ca.attention(*x.tensors, groups=groups), ca.attention(*x.tensors, groups=groups, method=refined))
    rows = ca.attention_matrix(*x.tensors)
    same_bits(rows, ca.attention_matrix(*x.tensors, method="exact"))
    rows = ca.attention_matrix(*x.tensors, groups=groups)
    same_bits(rows, ca.attention_matrix(*x.tensors, groups=groups, method=refined))


def test_gradients_do_not_change_the_choice(user: Path) -> None:
    """A checkpointed forward runs without and again with them."""
    auto.keep([entry((SLOW, FAST), (SLOW, FAST))])
    x = draw(n=60, m=60, dtype=torch.float32)
    plain, saved = x.leaves(), x.leaves()
    out, again = ca.attention(*plain.tensors), checkpoint(ca.attention, *saved.tensors, use_reentrant=False)
    with torch.no_grad():
        same_bits(ca.attention(*x.tensors), out)
    same_bits(again, out)
    out.sum().backward()
    again.sum().backward()
    same_bits([t.grad for t in saved.tensors], [t.grad for t in plain.tensors])


@pytest.mark.parametrize("wins", [False, True])
@pytest.mark.parametrize("dynamic", [None, True])
def test_inside_a_compiled_graph(user: Path, wins: bool, dynamic: bool | None) -> None:
    torch._dynamo.reset()
    pair = (SLOW, FAST) if wins else (FAST, SLOW)
    auto.keep([entry(pair, pair)])
    x = draw(n=40, m=40, dtype=torch.float32)
    compiled = torch.compile(ca.attention, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    same_bits(compiled(*x.tensors), ca.attention(*x.tensors))
    torch._dynamo.reset()


def test_the_shipped_data_are_whole_and_name_their_sources() -> None:
    entries = json.loads(auto.SHIPPED.read_text())["entries"]
    assert {"cpu", "cuda", "nvidia-h200"} <= {each["device"] for each in entries}
    for each in entries:
        assert each["source"]
        assert set(each["passes"]) == set(auto.PASSES)
        for methods in each["passes"].values():
            assert set(methods) == {"exact", "refined"}
            for call, row, rate in methods.values():
                assert call >= 0 <= row
                assert rate > 0


def test_this_machine_can_be_measured(user: Path) -> None:
    entries = crossings(lengths=(64, 128), heads=1, dim=8, repetitions=1)
    assert [each["causal"] for each in entries] == [False, True]
    assert auto.keep(entries) == user
    found = auto.crossing(torch.device("cpu"), "torch.float32", torch.get_num_threads(), True)
    assert found == json.loads(json.dumps(entries[1]["passes"]))


def test_the_command_measures_and_says_from_where_refined_is_taken(user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from clusterattn import cli
    from clusterattn.measure import crossings as measuring

    monkeypatch.setattr(measuring, "LENGTHS", {"cpu": (64, 128)})
    shown = CliRunner().invoke(cli.build(), ["calibrate", "--repetitions", "1"])
    assert shown.exit_code == 0, shown.output
    assert "float32, 8 heads of 64: refined " in shown.stdout
    assert "float32, causal, 8 heads of 64: refined " in shown.stdout
    assert len(json.loads(user.read_text())["entries"]) == 2
