"""The measuring itself: what is reported must be what happened."""

from __future__ import annotations

import dataclasses
import json
import os
from types import SimpleNamespace

import pytest
import torch

import clusterattn as ca
from clusterattn._files import write_whole
from clusterattn._rows import commit, dumps, rows_path
from clusterattn.measure import (
    append,
    embedded,
    environment,
    exact_answer,
    head_errors,
    interleaved,
    load,
    mixture,
    peak_memory,
    read,
    relative_error,
    row_l1,
    speed,
)
from clusterattn.measure.bench import _fault, bench
from clusterattn.measure.compare import compare, methods_for, scaled
from clusterattn.measure.error import exact_matrix
from clusterattn.measure.show import _in_lines

pytest.importorskip("safetensors")


# ---------------------------------------------------------------- error


@pytest.mark.parametrize("causal", [False, True])
def test_the_yardstick_is_exact_attention(causal):
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, m, 8, generator=draw, dtype=torch.float64) for h, m in ((4, 7), (2, 9), (2, 9)))
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1, 5:] = False
    seen = mask[:, None, None, :].expand(2, 1, 7, 9)
    if causal:
        seen = seen & torch.ones(7, 9, dtype=torch.bool).tril(2)
    right = torch.nn.functional.scaled_dot_product_attention(
        q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), attn_mask=seen
    )
    found = exact_answer(q, k, v, key_mask=mask, causal=causal, block=3)
    torch.testing.assert_close(found, right)
    weights = exact_matrix(q, k, key_mask=mask, causal=causal)
    torch.testing.assert_close(weights @ v.repeat_interleave(2, 1), right)


def test_a_row_that_sees_nothing_is_zero():
    q = torch.randn(1, 1, 3, 4)
    out = exact_answer(q, q, q, key_mask=torch.zeros(1, 3, dtype=torch.bool))
    assert torch.equal(out, torch.zeros_like(out))


def test_relative_error_by_hand():
    exact = torch.tensor([3.0, 4.0]).view(1, 1, 1, 2)
    assert relative_error(exact * 1.1, exact) == pytest.approx(0.1, rel=1e-6)
    both = head_errors(torch.cat([exact, exact * 2], 1), torch.cat([exact, exact], 1))
    assert both.tolist() == [[0, 1]]


def test_masked_rows_do_not_count_whatever_they_hold():
    exact = torch.randn(1, 2, 4, 3)
    out = exact.clone()
    out[:, :, 2:] = float("nan")
    keep = torch.tensor([[True, True, False, False]])
    assert relative_error(out, exact, keep) == 0
    assert head_errors(out, exact, keep).tolist() == [[0, 0]]


def test_row_l1_goes_from_0_to_2():
    left, right = torch.tensor([[1.0, 0]]), torch.tensor([[0, 1.0]])
    assert row_l1(left[None, None], left[None, None]) == 0
    assert row_l1(left[None, None], right[None, None]) == 2


# ---------------------------------------------------------------- speed


def test_runs_take_turns():
    order = []
    taken = interleaved({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, repetitions=2, warmup=1)
    assert order == ["a", "b"] * 3
    assert {name: len(times) for name, times in taken.items()} == {"a": 2, "b": 2}


def test_time_ends_the_turns_but_never_before_the_first():
    taken = interleaved({"a": lambda: None}, repetitions=100, seconds=0.0)
    assert len(taken["a"]) == 1


def test_peak_memory_counts_what_is_alive_together():
    def run():
        first = torch.ones(1000, 1000)  # 4 MB
        second = first + 1  # 8 MB together
        del first
        third = second * 2
        return third.sum()

    assert peak_memory(run) == pytest.approx(8e6, rel=0.01)


def test_peak_memory_is_quiet(capfd):
    peak_memory(lambda: torch.ones(10))
    assert capfd.readouterr() == ("", "")


# ---------------------------------------------------------------- rows


def test_rows_come_back(tmp_path):
    path = tmp_path / "new" / "rows.jsonl"
    append(path, {"a": 1.5, "words": "×"}, {"a": None})
    append(path, {"a": float("nan"), "b": [float("inf")]})
    assert read(path) == [{"a": 1.5, "words": "×"}, {"a": None}, {"a": None, "b": [None]}]


def test_a_line_cut_short_spoils_no_other(tmp_path):
    path = tmp_path / "rows.jsonl"
    append(path, {"a": 1})
    with open(path, "a") as file:
        file.write('{"a": ')
    assert read(path) == [{"a": 1}]
    append(path, {"a": 2})
    with pytest.raises(ValueError, match="line 2"):
        read(path)
    assert json.loads(path.read_text().splitlines()[-1]) == {"a": 2}


def test_a_row_knows_where_it_was_measured():
    around = environment()
    assert {"hardware", "threads", "torch", "python", "clusterattn", "commit", "date"} <= set(around)
    assert around["torch"] == torch.__version__
    assert around["clusterattn"] == ca.__version__
    json.loads(dumps(around))
    assert commit() is None or len(commit()) >= 12


def test_file_names_say_theme_hardware_and_date(tmp_path):
    name = rows_path(tmp_path, "bench").name
    theme, hardware, date = name.removesuffix(".jsonl").split("_")
    assert theme == "bench"
    assert hardware == hardware.lower()
    assert len(date) == len("2026-01-31")


def test_whole_files_replace_old_ones_and_leave_nothing_beside(tmp_path):
    path = tmp_path / "a.txt"
    write_whole(path, "old")
    write_whole(path, "new")
    assert path.read_text() == "new"
    assert [each.name for each in tmp_path.iterdir()] == ["a.txt"]
    assert path.stat().st_mode & 0o044  # readable as any other new file


# ---------------------------------------------------------------- sample


def test_the_embedded_sample_is_real_and_small():
    from clusterattn.measure.sample import EMBEDDED

    sample = embedded()
    assert sample.shape == (3, 4, 512, 512, 32, 32)
    assert EMBEDDED["short"].stat().st_size <= 2 * 2**20
    assert len(sample.tokens) == 512
    assert "alice" in sample.tokens
    assert "Apache-2.0" in sample.source
    assert sample.place(1, 2) == "layer 3, head 6"
    assert sample.q.dtype == torch.float32
    for x in (sample.q, sample.k, sample.v):
        assert torch.isfinite(x).all()


def test_the_long_sample_is_real_and_its_rounding_is_as_told():
    """The file holds the answers of the untouched heads: what is read back gives them but for the error it tells."""
    from safetensors import safe_open

    from clusterattn.measure.sample import EMBEDDED

    sample = embedded("long")
    assert sample.shape == (1, 3, 8192, 8192, 128, 128)
    assert EMBEDDED["long"].stat().st_size <= 4 * 2**20
    assert "TabPFN" in sample.source
    assert "MIT" in sample.source
    assert sample.place(0, 1) == "MNIST, layer 7, head 1"
    with safe_open(EMBEDDED["long"], framework="pt") as file:
        told = json.loads(file.metadata()["rounding"])
        truth = torch.stack([file.get_tensor(f"answers.{j}") for j in range(3)])[None]
    said = exact_answer(sample.q[:, :, ::128], sample.k, sample.v)
    found = head_errors(said, truth)[0].tolist()
    assert found == pytest.approx(told, rel=0.01)
    assert max(told) < 0.01


def test_an_unknown_embedded_sample_is_refused():
    with pytest.raises(ValueError, match="short, long"):
        embedded("middle")


def test_a_sample_is_cut_to_a_length_and_its_batch_comes_again():
    sample = embedded()
    cut = sample.cut(4, 20)
    assert cut.shape == (4, 4, 20, 20, 32, 32)
    assert torch.equal(cut.q[3], sample.q[0, :, :20])
    assert torch.equal(cut.v[2], sample.v[2, :, :20])


def test_the_bench_can_time_on_a_real_sample():
    data, local = embedded(), ca.Local(window=8)
    rows = list(bench([local], lengths=[32, 64], passes=["forward"], repetitions=1, memory=False, data=data))
    assert [(row["method"], row["h"], row["n"], row["d"]) for row in rows] == [
        (method, 4, n, 32) for n in (32, 64) for method in ("sdpa", str(local))
    ]
    assert {row["data"] for row in rows} == {data.source}
    with pytest.raises(ValueError, match="up to 512"):
        list(bench([local], lengths=[1024], data=data))


def test_a_key_mask_marks_the_queries_of_self_attention(tmp_path):
    from safetensors.torch import save_file

    x, mask = torch.randn(2, 1, 5, 4), torch.ones(2, 5, dtype=torch.bool)
    mask[0, 3:] = False
    save_file({"q": x, "k": x.clone(), "v": x.clone(), "key_mask": mask}, tmp_path / "self.safetensors")
    save_file({"q": x[:, :, :3].clone(), "k": x, "v": x.clone(), "key_mask": mask}, tmp_path / "cross.safetensors")
    assert torch.equal(load(tmp_path / "self.safetensors").query_mask, mask)
    assert load(tmp_path / "cross.safetensors").query_mask is None


def test_the_mixture_is_the_same_every_time_and_clusters_well():
    a, b = mixture(1, 2, 64, 8, centres=4, seed=3), mixture(1, 2, 64, 8, centres=4, seed=3)
    assert torch.equal(a.q, b.q)
    assert not torch.equal(a.q, mixture(1, 2, 64, 8, centres=4, seed=4).q)
    truth = exact_answer(a.q, a.k, a.v)
    few = relative_error(ca.attention(a.q, a.k, a.v, method=ca.Refined(clusters=4, top=8)), truth)
    noise = torch.randn(1, 2, 64, 8, generator=torch.Generator().manual_seed(0))
    iid = dataclasses.replace(a, q=noise, k=noise.flip(2))
    lost = relative_error(
        ca.attention(iid.q, iid.k, iid.v, method=ca.Refined(clusters=4, top=8)),
        exact_answer(iid.q, iid.k, iid.v),
    )
    assert few < lost


# ---------------------------------------------------------------- compare and bench


def test_every_method_has_a_budget_and_what_is_given_is_kept():
    methods = {each.name: each for each in methods_for(512, clusters=7, top=5, rounds=3, seats=16, window=20)}
    assert set(methods) == set(ca.METHODS)
    assert (methods["refined"].clusters, methods["refined"].top) == (7, 5)
    assert (methods["smyrf"].rounds, methods["smyrf"].q_seats, methods["smyrf"].k_seats) == (3, 16, 16)
    assert methods["local"].window == methods["routing"].window == 20
    assert str({each.name: each for each in methods_for(512)}["improved"]) == "improved:clusters=25"  # top is 32
    assert {each.name: each for each in methods_for(64)}["improved"].top == 4
    assert {each.name: each for each in methods_for(10_000)}["improved"].clusters == 100
    assert {each.name: each for each in methods_for(10_000)}["refined"] == ca.Refined()  # which chooses for itself


def test_a_method_that_chooses_its_sizes_has_a_curve_around_them():
    sample = mixture(1, 1, 128, 8, centres=6)
    result = compare(sample, [ca.Refined()], repetitions=1)
    _, ours = result.rows
    sizes = ca.Refined().at(128, 128, 8, 8)
    assert ours["method"] == "refined"
    assert (ours["settings"]["clusters"], ours["settings"]["top"]) == (sizes.clusters, sizes.top)
    assert {row["settings"]["clusters"] for row in result.swept} == {sizes.clusters // 2, 2 * sizes.clusters}


def test_scaling_a_budget():
    assert scaled(ca.Refined(clusters=10, top=8), 2.0) == ca.Refined(clusters=20, top=16)
    assert scaled(ca.Exact(), 2.0) is None
    assert scaled(ca.Refined(clusters=10, top=8, parts=4), 2.0) == ca.Refined(clusters=20, top=16, parts=8)
    assert scaled(ca.Improved(clusters=10, top=8), 2.0) == ca.Improved(clusters=20, top=16)


def test_compare_measures_every_method_against_exact():
    sample = mixture(2, 2, 48, 8, centres=6)
    steps = []
    result = compare(sample, methods_for(48), repetitions=1, sweep=False, tick=lambda text, total: steps.append(total))
    assert [row["name"] for row in result.rows] == list(ca.METHODS)
    assert len(steps) == steps[0]
    assert not result.skipped
    exact, *others = result.rows
    assert exact["error"] < 1e-5
    assert exact["row_l1"] < 1e-5
    assert exact["speedup"] == exact["memory_share"] == exact["cost_share"] == 1
    for row in others:
        assert row["error"] > 0
        assert 0 < row["row_l1"] <= 2.01
        assert row["seconds"] > 0
        assert row["memory_bytes"] > 0
        json.loads(dumps(row))


def test_compare_lists_who_can_not_answer():
    sample = mixture(1, 2, 32, 8, m=40)
    result = compare(sample, methods_for(32), repetitions=1, sweep=False)
    assert {label.split(":")[0] for label in result.skipped} == {
        name for name, kind in ca.METHODS.items() if kind.self_only
    }
    assert all("32 queries and 40 keys" in why for why in result.skipped.values())


def test_bench_rows_stand_beside_the_peer():
    rows = list(bench([ca.Clustered(clusters=4)], lengths=[64, 32], heads=1, dim=8, repetitions=2))
    assert [(row["n"], row["pass"], row["method"]) for row in rows] == [
        (n, which, method)
        for n in (32, 64)
        for which in ("forward", "forward+backward")
        for method in ("sdpa", "clustered:clusters=4")
    ]
    for row in rows:
        assert row["seconds_per_token"] == pytest.approx(row["seconds"] / row["n"])
        assert row["memory_bytes"] > 0
        assert (row["speedup"] == 1) == (row["method"] == "sdpa") or row["speedup"] > 0
        assert row["environment"]["torch"]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", sorted(ca.METHODS))
def test_the_check_before_timing_passes_the_reference_itself(name, backward):
    sample = mixture(1, 2, 64, 8)
    assert _fault(sample, ca.method(name), False, backward, 0) is None


def test_the_check_before_timing_catches_a_wrong_kernel(monkeypatch):
    from clusterattn.measure import bench as module

    right = module.attention

    def wrong(*args, backend="auto", **kwargs):
        out = right(*args, backend=backend, **kwargs)
        return out * 1.01 if backend == "auto" else out

    monkeypatch.setattr(module, "attention", wrong)
    assert "out is off by" in _fault(mixture(1, 2, 64, 8), ca.Clustered(clusters=4), False, False, 0)


def test_a_log_is_told_of_progress_and_never_twice_the_same():
    pytest.importorskip("rich")
    lines = []
    tick = _in_lines(SimpleNamespace(print=lambda line, highlight: lines.append(line)), every=0.0)
    for text, done in (("one", 0), ("one", 0), ("one", 1), ("two", 1)):
        tick(text, 2, done)
    assert lines == ["0 of 2: one", "1 of 2: one", "1 of 2: two"]


# ---------------------------------------------------------------- what a comparison says


def said_of(**rows):
    """The sentence about rows of (error, speedup) by method."""
    from clusterattn.measure.report import headline

    told = [
        {"name": name, "method": name, "error": error, "speedup": speedup, "cost_share": 0.0625}
        for name, (error, speedup) in {"exact": (0.0, 1.0), **rows}.items()
    ]
    return headline(SimpleNamespace(rows=told, sample=mixture(1, 1, 64, 4)))


def test_where_nothing_useful_is_faster_exact_attention_wins():
    said = said_of(refined=(0.19, 0.3), local=(0.82, 1.1), oracle_top=(0.1, 2.0))
    assert said.startswith("Here exact attention wins: at 64 tokens")
    assert "the closest, refined, is off by 0.19 with 6.2% of the multiply-adds in 3.3 times the time" in said


def test_where_something_useful_is_faster_the_closest_of_them_is_named():
    said = said_of(refined=(0.127, 4.71), smyrf=(0.25, 9.0), improved=(0.1, 0.9), oracle_top=(0.01, 2.0))
    assert said == (
        "Here refined gains: at 64 tokens it is 4.7 times as fast as exact attention, with 6.2% of its multiply-adds, "
        "at an output error of 0.127."
    )


def test_a_busy_machine_is_told(monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder) -> None:
    """Others' cores are asked of the system, while this process sleeps; one thread waits for nobody."""
    taken = speed.cores_taken(0.1)
    assert taken is None or 0 <= taken <= os.cpu_count()
    monkeypatch.setattr(speed.os, "cpu_count", lambda: 4)
    for wanted, others, told in ((4, 2.0, True), (4, 0.2, False), (2, 2.2, False), (1, 4.0, False), (4, None, False)):
        monkeypatch.setattr(speed.torch, "get_num_threads", lambda wanted=wanted: wanted)
        monkeypatch.setattr(speed, "cores_taken", lambda others=others: others)
        speed.warn_when_busy("cpu")
        assert len(recwarn) == told, (wanted, others)
        if told:
            assert "take 2.0 of 4 cores, and 4 threads are wanted" in str(recwarn.pop(UserWarning).message)
    speed.warn_when_busy("cuda")
    assert not recwarn
