"""README and docs/ keep their word: code runs, commands exist, links lead somewhere, tables say what the rows say."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from pages import PAGES, ROOT, anchors, blocks, script

import clusterattn as ca
from clusterattn.measure import read

README = ROOT / "README.md"
DOCS = ROOT / "docs"
WITH_RESULTS = pytest.mark.skipif(
    not (ROOT / "results").is_dir(), reason="no results/ here: they stay out of the sdist"
)


def test_the_readme_is_two_screens() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 200


# ---- code ----------------------------------------------------------------------------------------


def run_blocks(page: Path) -> dict[str, Any]:
    """Every Python block of the page, in order, in one namespace."""
    names: dict[str, Any] = {"__name__": page.stem}
    for number, code in enumerate(blocks(page, "python"), start=1):
        exec(compile(code, f"{page.name}, python block {number}", "exec", dont_inherit=True), names)
    return names


@pytest.mark.parametrize("page", [README, *(DOCS / name for name in ("guide.md", "index.md", "training.md"))], ids=str)
def test_every_snippet_runs_in_order(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # some write files
    torch.manual_seed(0)
    names = run_blocks(page)
    if page is README:
        assert ca.measure.relative_error(names["near"], names["exact"]) < 0.2
        assert names["lse"].shape == names["q"].shape[:3]
        assert (tmp_path / "plan.json").exists()
    if page.stem == "guide":
        assert 0 < names["share"] < 1
        assert names["prefill"].causality == "value"


def test_the_method_of_the_walk_through_is_whole() -> None:
    known = dict(ca.METHODS)
    try:
        run_blocks(DOCS / "contributing.md")
        assert isinstance(ca.METHODS["strided"](), ca.Method)
    finally:  # it registers itself
        ca.METHODS.clear()
        ca.METHODS.update(known)


# ---- files and links -----------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    if page.name == "papers.md" and not (ROOT / "results").is_dir():
        pytest.skip("no results/ here: they stay out of the sdist")
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        place = (page.parent / target) if target else page
        assert place.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in anchors(place), f"{page.name}: {target}#{anchor}"


def test_pictures_are_small() -> None:
    for path in (DOCS / "img").glob("*.png"):
        assert path.stat().st_size < 150_000, path.name


# ---- commands ------------------------------------------------------------------------------------


def commands() -> list[list[str]]:
    lines = "".join(each for page in (README, DOCS / "commands.md") for each in blocks(page, "sh")).splitlines()
    return [line.partition("#")[0].split() for line in lines if line.startswith("clusterattn ")]


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_commands_and_their_options_exist(words: list[str]) -> None:
    pytest.importorskip("typer")
    from typer.main import get_command
    from typer.testing import CliRunner

    from clusterattn import cli

    _, command, *rest = words
    shown = CliRunner().invoke(cli.build(), [command, "--help"])
    assert shown.exit_code == 0, shown.output
    parameters = get_command(cli.build()).commands[command].params  # type: ignore[attr-defined]
    known = {name for each in parameters for name in (*each.opts, *each.secondary_opts)}
    assert {word for word in rest if word.startswith("--")} <= known


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        asked = re.findall(r"(?:^|`)make ([a-z]+)", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert set(asked) <= targets, page.name


# ---- tables --------------------------------------------------------------------------------------


def test_the_table_of_methods_is_true() -> None:
    """Every class, its defaults, its kind of causality, cross-attention and state."""
    lines = re.findall(r"^\| `(\w+)\((.*?)\)` \|(.*)\|$", README.read_text(encoding="utf-8"), re.MULTILINE)
    told = {name: (defaults, [cell.strip() for cell in rest.split("|")]) for name, defaults, rest in lines}
    assert set(told) == {each.__name__ for each in ca.METHODS.values()}
    for kind in ca.METHODS.values():
        method, (defaults, cells) = kind(), told[kind.__name__]
        for name, value in re.findall(r'(\w+)=("\w+"|\w+)', defaults):
            assert getattr(method, name) == ast.literal_eval(value), f"{kind.__name__}({name}={value})"
        _, _, causal, cross, _, state = cells
        both = hasattr(method, "centroids_from")
        assert causal == ("strict or value" if both else method.causality), kind.__name__
        assert cross == ("no" if method.self_only else "yes"), kind.__name__
        assert (state != "–") == method.stateful, kind.__name__


@WITH_RESULTS
def test_tables_say_what_the_rows_say() -> None:
    tables = script("readme_tables")
    for page in tables.pages():
        text = page.read_text(encoding="utf-8")
        assert tables.filled(text) == text, f"{page.name}: run make tables"


@WITH_RESULTS
def test_every_table_is_shown() -> None:
    """A table that no page has is forgotten work."""
    marks = {mark for page in PAGES for mark in re.findall(r"<!-- table:([\w-]+) -->", page.read_text("utf-8"))}
    assert marks == set(script("readme_tables").TABLES)


def test_tables_of_nothing_are_not_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = script("readme_tables")
    monkeypatch.setattr(script("table_words"), "RESULTS", tmp_path)
    for name, write in tables.TABLES.items():
        assert name == "files" or write() == tables.NOT_YET, name


# ---- rows that the code would not repeat ---------------------------------------------------------

THEMES = ("compare", "compare-long", "settings", "pretrained", "tabpfn")  # rows that tell a share of multiply-adds


@WITH_RESULTS
def test_a_row_counts_multiply_adds_as_the_code_does_or_is_known_to_be_of_a_former_commit() -> None:
    words = script("table_words")
    found = words.rows(*THEMES)
    assert sum(words.share_now(row) is not None for row in found) > 100  # the check reaches most of them
    wrong = {
        f"{row['theme']} {row['method']}: {row['cost_share']:.3f}, now {words.share_now(row):.3f}"
        for row in found
        if words.out_of_date(row) and not words.is_former(row)
    }
    assert wrong == set(), f"measure anew, or name {words.FORMER}'s commit and what has changed"


@WITH_RESULTS
def test_no_row_is_of_code_that_was_never_committed() -> None:
    """Nobody could repeat it."""
    dirty = [
        f"{path.name}: line {number}"
        for path in sorted((ROOT / "results").glob("*.jsonl"))
        for number, row in enumerate(read(path), start=1)
        if str(row.get("environment", {}).get("commit")).endswith("-dirty")
    ]
    assert dirty == [], "measure at a commit, in a tree without changes"


@WITH_RESULTS
def test_a_former_commit_has_rows() -> None:
    words = script("table_words")
    made = {words.commit_of(row) for row in words.rows(*THEMES, "bench", "cpu-bars", "gpu-bars", "tabpfn-rows")}
    assert set(words.former()) <= made


def test_a_wrong_share_is_found() -> None:
    words = script("table_words")
    method = ca.Refined(clusters=25, top=32, parts=1, slope=False, steps=5)
    share = method.cost(512, 512, 32, 32) / ca.Exact().cost(512, 512, 32, 32)
    row = {"theme": "compare", "settings": method.to_dict(), "causal": False, "n": 512, "m": 512, "d": 32, "e": 32}
    assert not words.out_of_date({**row, "cost_share": share})
    assert words.out_of_date({**row, "cost_share": share + 0.06})
