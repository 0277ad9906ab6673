"""Speech that must be heard far apart: what the inputs are, and Table 1 with them at its smallest."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("accelerate", reason='needs the extra "train"')

from clusterattn_papers.reproduce import Context
from clusterattn_papers.reproduce._speech import INVENTED_PHONES
from clusterattn_papers.reproduce.clustered_far import ABOUT, ClusteredTable1Far, invented_speakers
from clusterattn_papers.tasks.far_speech import SILENT, STRETCH, Echoed, far_speech, joined_within
from clusterattn_papers.tasks.speech import Recording

FAR, SMOKE = ClusteredTable1Far(), ClusteredTable1Far.scales["smoke"]


def recordings(count: int, n: int = 200) -> list[Recording]:
    dice = torch.Generator().manual_seed(0)
    return [Recording(torch.randn(n, 3, generator=dice), torch.randint(5, (4,), generator=dice)) for _ in range(count)]


def test_an_echo_says_everything_twice_and_hides_stretches_of_the_second_time() -> None:
    whole = recordings(30)
    echoed = Echoed(whole, seed=1)
    silent = []
    for at, (frames, symbols) in enumerate(whole):
        heard, said = echoed[at]
        assert said.tolist() == [*symbols.tolist(), *symbols.tolist()]
        assert heard[:200].equal(frames)
        off = (heard[200:] == 0).all(1)
        assert heard[200:][~off].equal(frames[~off])
        assert off.view(-1, STRETCH).all(1).sum() * STRETCH == off.sum()  # whole stretches
        silent.append(off.double().mean())
    assert torch.stack(silent).mean().item() == pytest.approx(SILENT, abs=0.05)
    assert Echoed(whole, seed=1)[3].frames.equal(echoed[3].frames)
    assert not Echoed(whole, seed=2)[3].frames.equal(echoed[3].frames)


def test_nobody_speaks_into_another_s_input() -> None:
    spoken = [(f"speaker {at % 3}", each) for at, each in enumerate(recordings(24, n=40))]
    made = joined_within(spoken, frames=100, times=2, seed=0)
    assert sorted(at for group in made.groups for at in group) == sorted(2 * list(range(24)))  # each once a joining
    assert all(len({spoken[at][0] for at in group}) == 1 for group in made.groups)
    assert any(len(group) > 1 for group in made.groups)
    assert made.groups != joined_within(spoken, frames=100, times=2, seed=1).groups


@pytest.mark.parametrize("inputs", list(ABOUT))
def test_seeds_join_training_anew_and_judge_the_same(inputs: str) -> None:
    one, again, other = (
        far_speech(inputs, INVENTED_PHONES, invented_speakers(), frames=60, joinings=2, seed=seed) for seed in (0, 0, 1)
    )
    for split in ("train", "dev", "test"):
        same = [a.frames.equal(b.frames) for a, b in zip(one.splits[split], again.splits[split], strict=True)]
        assert all(same)
    assert [len(each.frames) for each in one.splits["dev"]] == [len(each.frames) for each in other.splits["dev"]]
    assert any(
        a.frames.shape != b.frames.shape or not a.frames.equal(b.frames)
        for a, b in zip(one.splits["train"], other.splits["train"], strict=False)
    )


def test_unknown_inputs_are_named() -> None:
    with pytest.raises(ValueError, match="carrier"):
        far_speech("anything", INVENTED_PHONES, invented_speakers())


def test_smoke_trains_and_shows_both_kinds(tmp_path: Any) -> None:
    rows: list[dict[str, Any]] = []
    cells = FAR.cells(SMOKE)
    assert len({cell.name for cell in cells}) == len(cells) == 2 * len(SMOKE.trained)
    for at, cell in enumerate(cells):
        context = Context(torch.device("cpu"), None, tmp_path / str(at))
        rows += [{**cell.settings, **row} for row in FAR.run(cell, SMOKE, context)]
    tables = FAR.tables(rows, SMOKE)
    assert len(tables) == 4
    assert not any("…" in cell for table in tables for line in table.rows for cell in line)
    said = FAR.findings(rows, SMOKE)
    assert sum("the paper's +39.7" in line for line in said) == 2
    assert FAR.findings([], SMOKE) == []
    for scale in ("smoke", "small", "paper"):
        assert FAR.differences(FAR.scales[scale])
        assert FAR.tables([], FAR.scales[scale])
