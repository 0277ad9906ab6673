"""Masked language modelling of long texts: every model is trained, timed and shown; the findings say which is ahead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate", reason='needs the extra "train"')
pytest.importorskip("tokenizers", reason='needs the extra "train"')
pytest.importorskip("matplotlib", reason='needs the extra "cli"')

from clusterattn_papers.reproduce import Context
from clusterattn_papers.reproduce.clustered_outlook import FULL, SHORT, ClusteredOutlook

OUTLOOK, SMOKE = ClusteredOutlook(), ClusteredOutlook.scales["smoke"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    found = []
    for cell in OUTLOOK.cells(SMOKE):
        context = Context(torch.device("cpu"), None, tmp_path_factory.mktemp("work"))
        found += [{**cell.settings, "cell": cell.name, **row} for row in OUTLOOK.run(cell, SMOKE, context)]
    return found


def test_every_model_is_trained_timed_and_shown(rows: list[dict[str, Any]]) -> None:
    names = [name for name, _ in SMOKE.methods]
    assert [row["method"] for row in rows] == 2 * names
    [table] = OUTLOOK.tables(rows, SMOKE)
    assert [row[0].removesuffix(f" ({SMOKE.short})") for row in table.rows] == names
    assert "…" not in str(table.rows)
    picture = OUTLOOK.picture(rows, SMOKE)
    assert picture is not None
    assert picture.startswith(b"\x89PNG")


def test_a_batch_has_as_many_tokens_whatever_the_length(rows: list[dict[str, Any]]) -> None:
    paces = {row["method"]: (row["length"], row["batch"]) for row in rows if "pace" in row}
    assert paces[SHORT] == (SMOKE.short, SMOKE.tokens // SMOKE.short)
    assert paces[FULL] == (SMOKE.length, SMOKE.tokens // SMOKE.length)


def test_smoke_holds_texts_longer_than_the_short_model_sees() -> None:
    for scale in ("smoke", "small", "paper"):
        config = OUTLOOK.scales[scale]
        assert config.length > config.short
        assert OUTLOOK.differences(config)
        assert OUTLOOK.tables([], config)
        assert OUTLOOK.findings([], config) == []
        assert OUTLOOK.picture([], config) is None


def test_findings_count_by_seed_and_say_which_way() -> None:
    worse = {SHORT: 0.1, FULL: 0.0, "improved-4": 0.02, "refined-4": -0.01}
    made: list[dict[str, Any]] = [
        {"method": name, "seed": seed, "nll": 5 + more + seed / 10} for name, more in worse.items() for seed in range(3)
    ]
    made += [{"method": name, "pace": True, "seconds": 1 / (2 + at)} for at, name in enumerate(worse)]
    lines = OUTLOOK.findings(made, SMOKE)
    assert lines[0].startswith(f"{SMOKE.short} tokens, full attention, against full attention: +0.100")
    assert "behind" in lines[0]
    assert "refined-4, against full attention: -0.010 ± 0.000 nats a word (ahead)." in lines
    assert lines[-1] == "Updates a second, full attention's being 1: improved-4 1.33, refined-4 1.67."


def test_missing_text_is_named() -> None:
    with pytest.raises(ValueError, match="gutenberg"):
        OUTLOOK.check(OUTLOOK.scales["small"], Context(torch.device("cpu"), None, Path()))
