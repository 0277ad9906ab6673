"""The masked language model, its text, and the table that pretrains with it."""

from __future__ import annotations

import lzma

import pytest
import torch

from clusterattn_papers.models.masked import MaskedLM, Tuned
from clusterattn_papers.reproduce import Context
from clusterattn_papers.reproduce.clusterformer_table8 import PUBLISHED, SPECS, Table8, invented
from clusterattn_papers.tasks import batches
from clusterattn_papers.tasks.masked import CLS, MASK, PAD, SEP, SPECIALS, Masked, articles, documents_in
from clusterattn_papers.train import Settings, fit, load, save

METHODS = [
    "exact", "clustered:clusters=3", "improved:clusters=3,top=4",
    "refined:clusters=3,top=4,parts=1,slope=false,steps=5", "smyrf",
    "reformer:rounds=1,chunk=8", "routing:clusters=2,window=8", "clusterformer:clusters=3",
]  # fmt: skip


@pytest.fixture(scope="module")
def task() -> Masked:
    return Masked(invented(), vocabulary=60, length=25)


# ------------------------------------------------------------------------------------------------ the model


@pytest.mark.parametrize("method", METHODS)
def test_padding_changes_nothing(method: str) -> None:
    torch.manual_seed(0)
    model = MaskedLM(40, method, dim=16, heads=2, layers=2, length=16, dropout=0.0).eval()
    tokens, kinds, asked = torch.randint(5, 40, (2, 12)), torch.zeros(2, 12).long(), torch.tensor([[3, 7], [0, 11]])
    alone = model(tokens, None, kinds, asked)
    real = torch.arange(17).expand(2, -1) < 12
    wide = torch.nn.functional.pad
    padded = model(wide(tokens, (0, 5), value=9), real, wide(kinds, (0, 5)), asked)
    torch.testing.assert_close(padded.logits, alone.logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(padded.follows, alone.follows, atol=1e-4, rtol=1e-4)
    assert alone.logits.shape == (2, 2, 40)


def test_the_second_text_is_told_from_the_first() -> None:
    torch.manual_seed(0)
    model = MaskedLM(40, "exact", dim=16, heads=2, layers=1, dropout=0.0).eval()
    tokens, asked = torch.randint(5, 40, (1, 8)), torch.tensor([[2]])
    zeros = torch.zeros(1, 8).long()
    one, two = (model(tokens, None, kinds, asked).follows for kinds in (zeros, (torch.arange(8) > 3).long()[None]))
    assert not torch.allclose(one, two, atol=1e-3)


def test_a_tuned_model_keeps_the_body() -> None:
    model = MaskedLM(40, "clusterformer:clusters=2", dim=16, heads=2, layers=1)
    tuned = Tuned(model.body, 3)
    answer = tuned(torch.randint(5, 40, (2, 9)), torch.ones(2, 9, dtype=torch.bool))
    assert answer.logits.shape == (2, 3)
    assert answer.auxiliary != 0
    assert tuned.body.words.weight is model.body.words.weight


# ------------------------------------------------------------------------------------------------ the task


def test_inputs_have_berts_form(task: Masked) -> None:
    batch = task.collate(list(task.splits["dev"])[:4])
    tokens, kinds, asked, wanted = (batch[name] for name in ("tokens", "kinds", "asked", "wanted"))
    truth = tokens.scatter(1, asked, wanted)
    width = task.width
    assert tokens.shape == (len(tokens), 2 * width + 3)
    assert (truth[:, 0] == CLS).all()
    assert (truth[:, width + 1] == SEP).all()
    assert (truth[:, -1] == SEP).all()
    assert (kinds[:, : width + 2] == 0).all()
    assert (kinds[:, width + 2 :] == 1).all()
    assert (wanted >= len(SPECIALS)).all()
    assert asked.shape[1] == round(0.15 * tokens.shape[1])
    assert all(len(set(row)) == len(row) for row in asked.tolist())


def test_pairs_follow_where_they_say_so(task: Masked) -> None:
    flat = {tuple(a + b) for a, b in zip(task.runs[:-1].tolist(), task.runs[1:].tolist(), strict=True)}
    told = {True: 0, False: 0}
    for at in range(0, 80, 8):
        batch = task.collate(list(range(at, at + 8)))
        whole = batch["tokens"].scatter(1, batch["asked"], batch["wanted"])
        width = (whole.shape[1] - 3) // 2
        if width < task.width:
            continue  # cut on both sides of the seam
        for row, follows in zip(whole.tolist(), batch["follows"].tolist(), strict=True):
            assert (tuple(row[1 : width + 1] + row[width + 2 : -1]) in flat) == bool(follows)
            told[bool(follows)] += 1
    assert min(told.values()) > 5


def test_masks_are_eighty_ten_ten_and_new_in_every_pass(task: Masked) -> None:
    kept = hidden = count = 0
    for batch in batches(task, "train", 64, seed=0):
        put = batch["tokens"].gather(1, batch["asked"])
        hidden, kept, count = (
            hidden + int((put == MASK).sum()),
            kept + int((put == batch["wanted"]).sum()),
            count + put.numel(),
        )
    assert hidden / count == pytest.approx(0.8, abs=0.03)
    assert 0.07 < kept / count < 0.16  # a tenth, and those another token drawn at random hits by chance
    one = len(task.pairs["train"])
    first, second = task.collate([0, 1]), task.collate([one, one + 1])
    assert first["tokens"].shape != second["tokens"].shape or not torch.equal(first["asked"], second["asked"])
    again = task.collate([0, 1])
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_dev_text_is_never_trained_on(task: Masked) -> None:
    pool = {name: set(each.tolist()) for name, each in task.pool.items()}
    assert not pool["train"] & pool["dev"]
    for split in ("train", "dev"):
        for first in task.pairs[split].tolist():
            assert {first, first + 1} <= pool[split]


def test_too_little_text_is_refused() -> None:
    with pytest.raises(ValueError, match="more or longer documents"):
        Masked(["ba do fi ku le " * 10], vocabulary=40, length=25)


def test_learns_which_word_stands_where(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """A text that repeats six words: chance is one in six, the rhythm tells all."""
    task = Masked(["ban dor fis kut lelo bama " * 120] * 3, vocabulary=60, length=27)
    torch.manual_seed(0)
    model = task.model("exact", dim=32, heads=2, layers=2, dropout=0.0)
    settings = Settings(steps=200, batch=16, lr=2e-3, optimizer="adamw", warmup=10, evaluate=100)
    fitted = fit(task, model, settings, device="cpu")
    assert fitted.best["accuracy"] > 0.6
    assert fitted.best["nll"] < 1.0
    assert set(fitted.best) == {"nll", "accuracy", "next_accuracy"}
    task.save(tmp_path)
    again = Masked.restore(tmp_path)
    [one, two] = again.predict(fitted.model, ["ban dor [MASK] kut lelo bama", "ban dor fis kut lelo bama ban dor"])
    assert one.split()[:2] + one.split()[3:] == ["ban", "dor", "kut", "lelo", "bama"]
    assert one.split()[2] in two.split()
    assert two == "ban dor fis kut lelo bama ban dor"


def test_a_model_of_another_length_comes_back(tmp_path, task: Masked) -> None:  # type: ignore[no-untyped-def]
    sizes = {"dim": 16, "heads": 2, "layers": 1}
    fitted = fit(task, task.model("clusterformer", **sizes), Settings(steps=2, batch=4), device="cpu")
    save(tmp_path, task, fitted, "clusterformer", sizes, {})
    again, model = load(tmp_path)
    asked = ["ba [MASK] " * 30]  # longer than the task is
    assert again.predict(model, asked) == task.predict(fitted.model, asked)
    assert len(asked[0].split()) > len(again.predict(model, asked)[0].split())


# ------------------------------------------------------------------------------------------------ text

DUMP = """<mediawiki xml:lang="en"><page><text xml:space="preserve">#REDIRECT [[Other]]</text></page>
<page><text xml:space="preserve">{{Box|a={{b}}|c}}'''Dogs''' are [[mammal|mammals]] of the [[Canidae]].&lt;ref&gt;a
book&lt;/ref&gt; See [http://dogs.org the site].
== Kinds ==
* [[Image:dog.png|thumb|a [[brown]] dog]]&quot;Small&quot; &amp;amp; big
{| class="x"
| cell
|}
[[de:Hund]] [[Category:Dogs]]</text></page></mediawiki>"""


def test_markup_is_taken_off(tmp_path) -> None:  # type: ignore[no-untyped-def]
    assert articles(DUMP, least=10) == ['Dogs are mammals of the Canidae. See the site. "Small" & big']
    assert articles(DUMP) == []  # too short for an article
    with lzma.open(tmp_path / "dump.xz", "wt") as file:
        file.write(DUMP.replace(" are ", " " + "bark " * 200 + "are "))
    (tmp_path / "book.txt").write_bytes("Caf\xe9  au\n\nlait".encode("latin-1"))
    (tmp_path / "notes.md").write_text("not read")
    book, article = documents_in(tmp_path)
    assert book == "Café au lait"
    assert article.startswith("Dogs bark bark")


# ------------------------------------------------------------------------------------------------ the table


def test_smoke_scale_runs_for_every_method(tmp_path) -> None:  # type: ignore[no-untyped-def]
    table, config = Table8(), Table8.scales["smoke"]
    rows = []
    for at, cell in enumerate(table.cells(config)):
        context = Context(torch.device("cpu"), None, tmp_path / str(at))
        rows += [{**cell.settings, **row} for row in table.run(cell, config, context)]
    assert {(row["method"], row["pretrained"]) for row in rows} == {
        (method, told) for method in SPECS for told in (True, False)
    }
    [shown] = table.tables(rows, config)
    assert len(shown.rows) == 4
    assert all(len(row) == len(shown.columns) for row in shown.rows)
    assert any("34.2" in text for text in shown.rows[1])
    assert len(table.findings(rows, config)) == 3
    assert table.differences(config)
    assert table.tables([], config)[0].rows
    assert table.findings([], config) == []


def test_every_published_measure_is_one_that_is_taken() -> None:
    assert PUBLISHED["transformer"].keys() == PUBLISHED["clusterformer"].keys()
    assert {piece for piece, _ in PUBLISHED["transformer"]} == set(Table8.scales["small"].pieces)
    assert PAD == 0  # what the pieces of GLUE pad with
