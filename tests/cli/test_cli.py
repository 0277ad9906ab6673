"""The commands on tiny inputs: what they print, write and refuse."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
import torch

import clusterattn as ca

pytest.importorskip("typer")
pytest.importorskip("matplotlib")
from safetensors.torch import save_file
from typer.testing import CliRunner

from clusterattn import cli
from clusterattn.measure import read


@pytest.fixture
def tiny(tmp_path):
    """The path of a small q, k, v with a mask."""
    draw = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(2, 2, 24, 8, generator=draw) for name in "qkv"}
    tensors["key_mask"] = torch.arange(24).expand(2, 24) < torch.tensor([[24], [17]])
    path = tmp_path / "tiny.safetensors"
    save_file(tensors, path, metadata={"tokens": json.dumps([f"w{i}" for i in range(24)])})
    return path


def run(*words):
    return CliRunner().invoke(cli.build(), [str(word) for word in words])


def test_help_teaches():
    shown = run("--help")
    assert shown.exit_code == 0
    assert "clusterattn compare --qkv mine.safetensors" in re.sub(r"\x1b\[[0-9;]*m", "", shown.stdout)
    for command in ("compare", "bench", "env"):
        assert run(command, "--help").exit_code == 0


def test_compare_writes_one_page_that_needs_nothing_else(tiny, tmp_path):
    out = tmp_path / "report"
    shown = run("compare", "--qkv", tiny, "--repetitions", 1, "--out", out, "--clusters", 3, "--top", 4)
    assert shown.exit_code == 0, shown.output
    for name in ca.METHODS:
        assert name in shown.stdout
    page = (out / "report.html").read_text()
    assert {each.name for each in out.iterdir()} == {
        "report.html",
        "pareto.png",
        "maps.png",
        "words.png",
        "clusters.png",
        "rows.jsonl",
    }
    assert page.count("data:image/png;base64,") == 4
    assert not re.findall(r"""(?:src|href)\s*=\s*["']?(?!data:)[a-z/]""", page)
    assert "http" not in page
    assert "refined:clusters=3,top=4" in page
    rows = read(out / "rows.jsonl")
    assert {row["name"] for row in rows} == set(ca.METHODS)
    assert {row["budget"] for row in rows} == {0.5, 1, 2}
    for png in out.glob("*.png"):
        assert png.read_bytes().startswith(b"\x89PNG")


def test_json_is_all_there_is_on_stdout(tiny, tmp_path):
    methods = ("--method", "refined:clusters=5", "--method", "smyrf", "--seats", 8, "--top", 6)
    quick = ("--no-report", "--repetitions", 1, "--out", tmp_path / "no")
    shown = run("compare", "--qkv", tiny, *methods, *quick, "--json")
    assert shown.exit_code == 0, shown.output
    rows = json.loads(shown.stdout)
    assert [row["method"] for row in rows] == [
        "exact",
        "refined:clusters=5,top=6",
        "smyrf:q_seats=8,k_seats=8",
    ]
    assert {"error", "row_l1", "seconds", "speedup", "memory_bytes", "memory_share", "cost_share"} <= set(rows[1])
    assert rows[1]["environment"]["torch"] == torch.__version__
    assert not (tmp_path / "no").exists()


def test_the_answer_depends_on_the_seed_alone(tiny):
    def errors(seed):
        words = (
            "compare",
            "--qkv",
            tiny,
            "--method",
            "clustered:clusters=4",
            "--json",
            "--no-report",
            "--repetitions",
            1,
        )
        return [row["error"] for row in json.loads(run(*words, "--seed", seed).stdout)]

    assert errors(1) == errors(1)
    assert errors(1) != errors(2)


def test_causal_leaves_out_who_has_no_causal_form(tiny, tmp_path):
    shown = run("compare", "--qkv", tiny, "--causal", "--repetitions", 1, "--no-sweep", "--out", tmp_path / "report")
    assert shown.exit_code == 0, shown.output
    for name, kind in ca.METHODS.items():
        assert ("not measured: " + name in shown.stdout) == (kind().causality == "no")
    assert (tmp_path / "report" / "report.html").exists()


def test_the_embedded_samples_are_the_default(tmp_path):
    """Short and long, a table and a sentence for each, one page with the pictures of both."""
    out = tmp_path / "report"
    shown = run("compare", "--method", "local:window=8", "--repetitions", 1, "--no-sweep", "--out", out)
    assert shown.exit_code == 0, shown.output
    said = " ".join(shown.stdout.split())
    for words in ("Alice's Adventures in Wonderland", "TabPFN", "at 512 tokens", "at 8192 tokens"):
        assert words in said
    page = (out / "report.html").read_text()
    for words in ("<b>Short.</b>", "<b>Long.</b>", "Short: 512 tokens", "Long: 8192 tokens"):
        assert words in page
    assert page.count("Relative output error</b> is") == 1  # what the figures mean is said once
    assert {"short-pareto.png", "short-maps.png", "long-pareto.png"} <= {each.name for each in out.iterdir()}
    assert [row["n"] for row in read(out / "rows.jsonl")] == [512, 512, 8192, 8192]


def test_one_embedded_sample_can_be_asked_for():
    quick = ("--method", "local:window=8", "--no-report", "--repetitions", 1, "--json")
    assert {row["n"] for row in json.loads(run("compare", "--sample", "short", *quick).stdout)} == {512}
    assert {row["n"] for row in json.loads(run("compare", "--causal", *quick).stdout)} == {512}


def test_bench_on_an_embedded_sample(tmp_path):
    quick = ("--method", "local:window=8", "--no-backward", "--no-memory", "--repetitions", 1, "--json")
    shown = run("bench", "--sample", "short", "--lengths", "64,128", *quick, "--out", tmp_path)
    assert shown.exit_code == 0, shown.output
    rows = json.loads(shown.stdout)
    assert {(row["n"], row["h"], row["d"]) for row in rows} == {(64, 4, 32), (128, 4, 32)}
    assert all("Alice" in row["data"] for row in rows)


def broken(tmp_path, **tensors):
    path = tmp_path / "broken.safetensors"
    save_file(tensors, path)
    return path


X = torch.randn(1, 2, 6, 4)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"q": X, "keys": X + 1}, ["tensors named q, k and v", "keys, q"]),
        (
            {"q": X[0], "k": X + 0, "v": X + 1},
            ["q of shape (batch, heads, length, dim)", "(2, 6, 4)", "q[None]"],
        ),
        ({"q": X, "k": X[..., :3].clone(), "v": X + 1}, ["q (b h n d)", "k (1, 2, 6, 3)"]),
        ({"q": X.long(), "k": X + 0, "v": X + 1}, ["floating", "int64"]),
        ({"q": X[:, :1].clone(), "k": X + 0, "v": X + 1}, ["hk that divides h"]),
        (
            {"q": X, "k": X + 0, "v": X + 1, "key_mask": torch.ones(1, 5, dtype=torch.bool)},
            ["(1, 6)", "(1, 5)"],
        ),
        ({"q": X, "k": X + 0, "v": X + 1, "key_mask": torch.ones(1, 6)}, ["bool", "float32"]),
        ({"q": X, "k": X + 0, "v": X * float("nan")}, ["finite numbers in v", "NaN"]),
    ],
)
def test_bad_tensors_are_refused_in_one_sentence(tmp_path, tensors, said):
    shown = run("compare", "--qkv", broken(tmp_path, **tensors))
    assert shown.exit_code == 2
    assert shown.stdout == ""
    assert shown.stderr.startswith("error: wanted ")
    assert shown.stderr.count("\n") == 1
    for words in (*said, "; got ", "; try "):
        assert words in shown.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["compare", "--method", "nosuch"], ["nosuch", "refined"]),
        (["compare", "--method", "refined:clusters=0"], ["clusters", ">= 1"]),
        (["compare", "--method", "refined:colour=3"], ["colour", "clusters"]),
        (["compare", "--qkv", "not/there.safetensors"], ["not there"]),
        (["compare", "--sample", "middle"], ["short, long", "middle"]),
        (["compare", "--sample", "long", "--qkv", "mine.safetensors"], ["--qkv or --sample"]),
        (["compare", "--device", "abacus"], ["cpu or cuda", "abacus"]),
        (["compare", "--dtype", "int7"], ["float32", "int7"]),
        (["bench", "--lengths", "many"], ["--lengths", "many"]),
        (["bench", "--lengths", "0,4"], ["--lengths", "0,4"]),
        (["bench", "--method", "nosuch"], ["nosuch", "refined"]),
    ],
)
def test_bad_words_are_refused_in_one_sentence(words, said):
    shown = run(*words)
    assert shown.exit_code == 2
    assert shown.stdout == ""
    assert shown.stderr.startswith("error: wanted ")
    assert "Traceback" not in shown.stderr
    for each in said:
        assert each in shown.stderr


def test_a_file_of_another_kind_is_refused(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("no tensors here")
    shown = run("compare", "--qkv", path)
    assert shown.exit_code == 2
    assert "wanted a safetensors file" in shown.stderr


def test_a_method_asked_for_by_name_is_not_left_out_silently(tmp_path):
    path = broken(tmp_path, q=X[:, :, :4].clone(), k=X + 0, v=X + 1)
    shown = run("compare", "--qkv", path, "--method", "reformer", "--no-report")
    assert shown.exit_code == 2
    assert "4 queries and 6 keys" in shown.stderr


def test_bench_writes_rows_and_a_plot(tmp_path):
    methods = ("--method", "clustered:clusters=4", "--method", "refined:clusters=4,top=4")
    shape = ("--lengths", "32,64", "--heads", 2, "--dim", 8)
    shown = run("bench", *methods, *shape, "--repetitions", 1, "--out", tmp_path)
    assert shown.exit_code == 0, shown.output
    (rows,) = tmp_path.glob("bench_*_*.jsonl")
    assert len(read(rows)) == 2 * 2 * 3
    assert rows.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "forward+backward" in shown.stdout
    assert "N = 64" in shown.stdout
    for row in read(rows):
        assert (row["error"] is None) == (row["method"] == "sdpa")
    assert shown.stdout.count("error 0.") + shown.stdout.count("error 1") >= 8
    ends = [line for line in shown.stdout.splitlines() if "beside exact attention" in line]
    assert [line.split(",")[0] for line in ends] == ["forward", "forward+backward"]


def test_bench_prints_json_and_no_time_for_a_method_that_fails_its_check(tmp_path, monkeypatch):
    from clusterattn.measure import bench

    words = (
        "bench",
        "--method",
        "local",
        "--lengths",
        "32",
        "--heads",
        1,
        "--dim",
        8,
        "--repetitions",
        1,
        "--no-backward",
        "--no-memory",
        "--out",
        tmp_path,
    )
    rows = json.loads(run(*words, "--json").stdout)
    assert [row["method"] for row in rows] == ["sdpa", "local"]
    assert rows[1]["memory_bytes"] is None

    monkeypatch.setattr(bench, "CHECKED_ON", ("cpu", "cuda"))
    monkeypatch.setattr(bench, "_fault", lambda *_: "out is off by 1")
    failed = json.loads(run(*words, "--json").stdout)[1]
    assert failed["failed"] == "out is off by 1"
    assert "seconds" not in failed
    assert "not timed" in run(*words).stdout


def test_env_says_which_backend_would_run():
    shown = run("env")
    assert shown.exit_code == 0
    assert torch.__version__ in shown.stdout
    assert "reference" in shown.stdout
    facts = json.loads(run("env", "--json").stdout)
    assert {each["verb"] for each in facts["verbs"]} == {verb for verb, _, _ in ca.ops.verbs("cpu")}


@pytest.mark.parametrize("missing", ["typer", "rich", "matplotlib", "safetensors"])
def test_without_the_extra_it_says_what_to_install(missing):
    code = (
        f"import sys; sys.modules[{missing!r}] = None; sys.argv = ['clusterattn', 'compare']\n"
        "from clusterattn.cli import main; main()"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert shown.returncode == 2
    assert 'pip install "clusterattn[cli]"' in shown.stderr
    assert "Traceback" not in shown.stderr


def test_version():
    shown = run("--version")
    assert shown.exit_code == 0
    assert shown.stdout.strip() == f"clusterattn {ca.__version__}"


@pytest.mark.parametrize("command", ["train", "reproduce", "report"])
def test_without_their_extra_the_papers_commands_say_so(command, monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate", None)
    told = 'accelerate is not installed; it comes with training: pip install "clusterattn[train]"'
    refused = run(command, "classify", "--data", "reviews.csv", "--help")
    assert refused.exit_code == 2
    assert refused.stderr.strip() == f"error: {told}"
    assert "Not here: accelerate is not installed" in " ".join(run("--help").stdout.split())
