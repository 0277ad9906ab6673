"""The decoder, the translator and its search, the translation task, and the table that needs them."""

from __future__ import annotations

import gzip
import math
import warnings

import pytest
import torch

from clusterattn.nn.decoder import Decoder
from clusterattn_papers.models.translator import Translator, beam_search
from clusterattn_papers.reproduce import Context
from clusterattn_papers.reproduce._readings import READINGS
from clusterattn_papers.reproduce.clusterformer_table1 import ClusterFormerTable1
from clusterattn_papers.tasks import batches
from clusterattn_papers.tasks.translation import END, START, Translate, bleu, read_pairs
from clusterattn_papers.train import Settings, fit, judge

METHODS = [
    "exact", "clustered:clusters=2,block=4", "improved:clusters=2,top=2,block=4", "refined:clusters=2,top=2,block=4",
    "smyrf", "reformer:rounds=1,chunk=4", "routing:clusters=2,window=4", "clusterformer:clusters=3",
]  # fmt: skip
STRICT = METHODS[:4]


def little(method: str, **sizes: object) -> Translator:
    torch.manual_seed(0)
    return Translator(20, method, dim=16, heads=2, layers=2, feedforward=32, dropout=0.0, **sizes).eval()  # type: ignore[arg-type]


def some(b: int, n: int) -> torch.Tensor:
    return torch.randint(3, 20, (b, n), generator=torch.Generator().manual_seed(n))


# ------------------------------------------------------------------------------------------------ the decoder


@pytest.mark.parametrize("method", METHODS)
def test_decoder_answers_and_learns(method: str) -> None:
    torch.manual_seed(0)
    decoder = Decoder(16, 2, 2, method, dropout=0.0)
    y, memory = torch.randn(2, 9, 16), torch.randn(2, 7, 16)
    out, auxiliary = decoder(y, memory)
    assert out.shape == y.shape
    assert auxiliary.shape == ()
    (out.square().mean() + auxiliary).backward()
    left = [name for name, each in decoder.named_parameters() if each.grad is None]
    assert all("cluster_proj" in name for name in left)  # ClusterFormer's losses train its centroids alone
    assert (auxiliary != 0) == method.startswith(("clusterformer", "routing"))


@pytest.mark.parametrize("setting", ["affinity=8", "straight=True"])
def test_a_decoder_whose_memberships_tell_of_later_tokens_warns(setting: str) -> None:
    with pytest.warns(UserWarning, match="read later tokens"):
        Decoder(16, 2, 1, f"clusterformer:clusters=3,{setting}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Decoder(16, 2, 1, "clusterformer:clusters=3")


@pytest.mark.parametrize("method", STRICT)
def test_no_token_depends_on_a_later_one(method: str) -> None:
    torch.manual_seed(0)
    decoder = Decoder(16, 2, 2, method, dropout=0.0).eval()
    y, memory = torch.randn(2, 9, 16), torch.randn(2, 7, 16)
    changed = torch.cat([y[:, :6], torch.randn(2, 3, 16)], 1)
    torch.testing.assert_close(decoder(y, memory)[0][:, :6], decoder(changed, memory)[0][:, :6])


@pytest.mark.parametrize("norm_first", [True, False])
def test_decoder_hears_the_memory_where_it_is_real(norm_first: bool) -> None:
    torch.manual_seed(0)
    decoder = Decoder(16, 2, 2, "exact", dropout=0.0, norm_first=norm_first).eval()
    y, memory = torch.randn(1, 5, 16), torch.randn(1, 7, 16)
    mask = torch.arange(7).unsqueeze(0) < 4
    out, _ = decoder(y, memory, None, mask)
    torch.testing.assert_close(out, decoder(y, memory[:, :4])[0])
    assert not torch.allclose(out, decoder(y, memory)[0], atol=1e-3)


# ------------------------------------------------------------------------------------------------ the translator


@pytest.mark.parametrize("method", METHODS)
def test_padding_changes_nothing(method: str) -> None:
    model = little(method)
    source, target = some(1, 8), some(1, 6)
    alone = model(source, torch.ones(1, 8, dtype=torch.bool), target, torch.ones(1, 6, dtype=torch.bool)).logits
    wide = torch.nn.functional.pad
    masks = torch.arange(11).unsqueeze(0) < 8, torch.arange(10).unsqueeze(0) < 6
    logits = model(wide(source, (0, 3), value=5), masks[0], wide(target, (0, 4), value=5), masks[1]).logits
    torch.testing.assert_close(logits[:, :6], alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("method", ["exact", "clusterformer:clusters=3"])
def test_sentences_translate_in_a_batch_as_they_do_alone(method: str) -> None:
    model = little(method)
    torch.manual_seed(1)
    torch.nn.init.normal_(model.embedding.weight)  # opinions strong enough that no rounding turns them
    source = some(3, 8)
    mask = torch.arange(8) < torch.tensor([[8], [5], [2]])
    together = model.translate(source, mask, beam=3)
    for row, n in enumerate((8, 5, 2)):
        alone = model.translate(source[row : row + 1, :n], torch.ones(1, n, dtype=torch.bool), beam=3)
        assert together[row] == alone[0]
        assert len(alone[0]) < n * 3 // 2 + 10


@pytest.mark.parametrize("method", ["exact", "improved:clusters=2,top=3,block=3", "clusterformer:clusters=3"])
def test_the_surprise_of_a_prefix_knows_nothing_of_what_follows(method: str) -> None:
    model = little(method)
    source, mask, target = some(3, 8), torch.ones(3, 8, dtype=torch.bool), some(3, 7)
    wanted = target.roll(-1, 1)
    wanted[1, 4:] = -100
    found = model.surprise(source, mask, target, wanted, -100)
    assert bool((found[1, 4:] == 0).all())
    for n in (1, 4, 7):  # the last token of every prefix is what forward says when it sees no more
        logits = model(source, mask, target[:, :n]).logits[:, -1]
        alone = torch.nn.functional.cross_entropy(logits, wanted[:, n - 1], ignore_index=-100, reduction="none")
        torch.testing.assert_close(found[:, n - 1], alone)
    whole = torch.nn.functional.cross_entropy(model(source, mask, target).logits.mT, wanted, reduction="none")
    assert torch.allclose(found, whole, atol=1e-4) == model.strict == (method != "clusterformer:clusters=3")


def test_judge_tells_the_likelihood_of_prefixes_from_that_of_whole_sentences() -> None:
    task = Translate({"train": LINES, "dev": LINES[:4]}, vocabulary=300, length=40)
    torch.manual_seed(0)
    for method, same in (("exact", True), ("clusterformer:clusters=3", False)):
        figures = judge(task, task.model(method, dim=32, heads=2, layers=2, dropout=0.0), "dev")
        assert (figures["nll"] == figures["prefix_nll"]) == same
        assert figures["prefix_nll"] == pytest.approx(figures["nll"], rel=0.2)


def test_one_beam_is_the_greedy_choice() -> None:
    model = little("exact")
    torch.nn.init.normal_(model.embedding.weight, generator=torch.Generator().manual_seed(3))
    source, mask = some(4, 6), torch.ones(4, 6, dtype=torch.bool)
    found = model.translate(source, mask, beam=1, longest=7)
    for row in range(4):
        prefix = [START]
        for _ in range(6):
            logits = model(source[row : row + 1], mask[:1], torch.tensor([prefix])).logits[0, -1]
            logits[[0, START]] = -math.inf
            if int(logits.argmax()) == END:
                break
            prefix.append(int(logits.argmax()))
        assert found[row] == prefix[1:]


# tokens: 1 starts, 2 ends. Greedy takes 3 (0.6) and must then end badly; 4 (0.4) leads to a sure end.
TELLING = {(1,): {3: 0.6, 4: 0.4}, (1, 3): {3: 0.5, 4: 0.3, 2: 0.2}, (1, 4): {2: 1.0}}


def telling(prefix: torch.Tensor) -> torch.Tensor:
    told = torch.full((len(prefix), 5), 1e-9)
    for row, tokens in enumerate(prefix.tolist()):
        for token, chance in TELLING.get(tuple(tokens), {2: 1.0}).items():
            told[row, token] = chance
    return told.log()


def test_the_beam_finds_what_greed_misses() -> None:
    room = torch.tensor([6, 6])
    options = {"start": 1, "end": 2, "penalty": 0.0}
    assert beam_search(telling, room, beam=1, **options) == [[3, 3]] * 2  # 0.6 · 0.5 = 0.30
    assert beam_search(telling, room, beam=2, **options) == [[4]] * 2  # 0.4
    # judged by log-probability per token, (3 3): log 0.3 / 3 beats (4): log 0.4 / 2
    assert beam_search(telling, room, beam=3, start=1, end=2, penalty=1.0) == [[3, 3]] * 2


def test_every_sentence_ends_in_its_own_room() -> None:
    def never_ends(prefix: torch.Tensor) -> torch.Tensor:
        return torch.tensor([1e-9, 1e-9, 1e-4, 0.6, 0.39]).log().expand(len(prefix), -1)

    found = beam_search(never_ends, torch.tensor([1, 3, 5]), start=1, end=2, beam=2, penalty=0.0)
    assert [len(each) for each in found] == [0, 2, 4]
    assert found[2] == [3, 3, 3, 3]


# ------------------------------------------------------------------------------------------------ the task


def test_bleu_by_hand() -> None:
    # precisions 4/5, 3/4, 2/3, 1/2, no brevity penalty
    wanted = 100 * (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25
    figures = bleu(["a b c d e"], ["a b c d f"])
    assert figures["bleu"] == pytest.approx(wanted)
    # case and the comma count in sacreBLEU; lower-cased words and marks are the same
    assert bleu(["A dog , here, runs by ."], ["A dog, here, runs by."])["bleu"] == pytest.approx(100)
    figures = bleu(["a Dog runs by the lake"], ["A dog runs by the lake"])
    assert figures["tokenized_bleu"] == pytest.approx(100)
    assert figures["bleu"] < 100


LINES = [("ein Hund läuft .", "a dog runs ."), ("zwei Hunde laufen .", "two dogs run .")] * 20


def test_reads_parallel_files_and_tables(tmp_path) -> None:  # type: ignore[no-untyped-def]
    for end, side in (("de", 0), ("en", 1)):
        text = "".join(pair[side] + "\n" for pair in LINES)
        with gzip.open(tmp_path / f"train.{end}.gz", "wt", encoding="utf-8") as file:
            file.write(text)
        for name in ("val", "test_2016_flickr", "test_2017_flickr"):
            (tmp_path / f"{name}.{end}").write_text(text[: text.index("\n") + 1], encoding="utf-8")
    found = read_pairs(tmp_path)
    assert found == {"train": LINES, "dev": LINES[:1], "test": LINES[:1]}
    assert read_pairs(tmp_path, source="en")["dev"] == [LINES[0][::-1]]
    (tmp_path / "train.fr").write_text("un chien\n")
    with pytest.raises(ValueError, match="source= and target="):
        read_pairs(tmp_path)

    table = tmp_path / "pairs.tsv"
    table.write_text("".join(f"{a}\t{b}\n" for a, b in LINES), encoding="utf-8")
    task = Translate.read(table, vocabulary=300)
    assert len(task.splits["train"]) == 38
    assert len(task.splits["dev"]) == 2
    table.write_text("only one column\n")
    with pytest.raises(ValueError, match="tab"):
        Translate.read(table)


def test_refuses_files_of_different_length(tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "train.de").write_text("eins\nzwei\n")
    (tmp_path / "train.en").write_text("one\n")
    with pytest.raises(ValueError, match="2 and 1 lines"):
        read_pairs(tmp_path)


def test_tokens_give_back_the_text_and_batches_are_shifted() -> None:
    task = Translate({"train": LINES, "dev": [("ein Übel — 你好", "an evil, “quoted” …")]}, vocabulary=300)
    [(source, target)] = task.splits["dev"]
    assert task._texts([target.tolist(), source[:-1].tolist()]) == ["an evil, “quoted” …", "ein Übel — 你好"]
    batch = task.collate([task.splits["train"][0], (source, target)])
    row = batch["target"][1][batch["target_mask"][1]]
    assert row.tolist() == [START, *target.tolist()]
    assert batch["wanted"][1][batch["wanted"][1] >= 0].tolist() == [*target.tolist(), END]
    assert batch["source"].shape == batch["source_mask"].shape


def test_learns_to_translate_and_comes_back_from_its_folder(tmp_path) -> None:  # type: ignore[no-untyped-def]
    task = Translate({"train": LINES, "dev": LINES[:2], "test": LINES[:2]}, vocabulary=300, length=40)
    torch.manual_seed(0)
    model = task.model("exact", dim=32, heads=2, layers=1, dropout=0.0)
    settings = Settings(steps=60, batch=8, lr=5e-3, optimizer="adamw", warmup=5, evaluate=30)
    fitted = fit(task, model, settings, device="cpu")
    assert fitted.best["bleu"] == pytest.approx(100)
    task.beam = 3
    assert judge(task, fitted.model, "test")["bleu"] == pytest.approx(100)
    task.save(tmp_path)
    again = Translate.restore(tmp_path)
    assert len(again._source([5] * 99)) == len(task._source([5] * 99)) == 40
    said = again.predict(fitted.model, ["zwei Hunde laufen .", "ein Hund läuft ."])
    assert said == ["two dogs run .", "a dog runs ."]


# ------------------------------------------------------------------------------------------------ the table


def test_smoke_scale_runs_for_every_method(tmp_path) -> None:  # type: ignore[no-untyped-def]
    table, config = ClusterFormerTable1(), ClusterFormerTable1.scales["smoke"]
    rows = []
    for cell in table.cells(config):
        context = Context(torch.device("cpu"), None, tmp_path / cell.name.replace(" ", "-"))
        rows += [{**cell.settings, **row} for row in table.run(cell, config, context)]
    assert {row["method"] for row in rows} == set(config.methods)
    assert all(0 <= row["bleu"] <= 100 for row in rows)
    shown, grouped = table.tables(rows, config)
    assert len(shown.rows) == len(config.methods)
    assert len(grouped.rows) == len(READINGS)
    assert all(len(row) == len(shown.columns) for row in shown.rows)
    assert any("34.9" in text for row in shown.rows for text in row)
    assert table.differences(config)
    assert table.findings(rows, config)
    assert table.tables([], config)[0].rows  # before anything has run


def test_the_pairs_of_a_batch_are_all_there() -> None:
    task = Translate({"train": LINES, "dev": LINES[:1]}, vocabulary=300)
    assert sum(len(batch["source"]) for batch in batches(task, "train", 16, seed=0)) == len(LINES)


def test_the_page_knows_what_strict_decoders_make_of_a_prefix() -> None:
    """It is what they make of the whole reference, also where a row does not say so; of other methods nobody knows."""
    table, config = ClusterFormerTable1(), ClusterFormerTable1.scales["small"]
    rows = [{"method": method, "seed": 0, "nll": 1.8} for method in ("transformer", "improved", "refined", "routing")]
    rows += [{"method": "clusterformer-head", "seed": 0, "nll": 1.8, "prefix_nll": 1.9}]
    shown = {method: row[4] for method, row in zip(config.methods, table.tables(rows, config)[0].rows, strict=True)}
    assert {shown[method] for method in ("transformer", "improved", "refined")} == {"1.800"}
    assert (shown["routing"], shown["clusterformer-head"], shown["reformer"]) == ("–", "1.900", "…")
