"""benchmarks/tabpfn_v1.py on a small random model: forward, table and rows are as they are told."""

from __future__ import annotations

import argparse
import gzip
from pathlib import Path

import pytest
import torch
from pages import script
from torch import Tensor
from torch.nn.functional import gelu, scaled_dot_product_attention

import clusterattn as ca
from clusterattn.measure import read

pytest.importorskip("safetensors")
bench = script("tabpfn_v1")
tabpfn = script("tabpfn_model")

WIDTH, LAYERS, TRAIN, TEST = 32, 2, 40, 12


def weights() -> dict[str, Tensor]:
    """As the checkpoint names them, small and random."""
    layer = torch.nn.TransformerEncoderLayer(WIDTH, tabpfn.HEADS, 2 * WIDTH, activation="gelu")
    whole = torch.nn.ModuleDict(
        {
            "transformer_encoder": torch.nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False),
            "encoder": torch.nn.Linear(tabpfn.FEATURES, WIDTH),
            "y_encoder": torch.nn.Linear(1, WIDTH),
            "decoder": torch.nn.Sequential(torch.nn.Linear(WIDTH, 64), torch.nn.GELU(), torch.nn.Linear(64, 10)),
        }
    )
    draw = torch.Generator().manual_seed(0)
    return {name: x + 0.2 * torch.randn(x.shape, generator=draw) for name, x in whole.state_dict().items()}


def data() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return {
        "features": torch.randint(-127, 128, (TRAIN + TEST, tabpfn.FEATURES), generator=draw).to(torch.int8),
        "scale": torch.rand(tabpfn.FEATURES, generator=draw) + 0.1,
        "labels": torch.randint(10, (TRAIN + TEST,), generator=draw).to(torch.uint8),
        "train_rows": torch.tensor(TRAIN),
    }


def test_the_forward_is_torchs_encoder_under_tabpfns_mask() -> None:
    """One sequence of train and test rows, each of which sees the train rows alone: torch's own layers must agree."""
    with torch.no_grad():
        named, rows = weights(), tabpfn.table(data(), TRAIN, TEST)
        layer = torch.nn.TransformerEncoderLayer(WIDTH, tabpfn.HEADS, 2 * WIDTH, 0.0, gelu, batch_first=True)
        encoder = torch.nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        prefix = "transformer_encoder."
        encoder.load_state_dict({name.removeprefix(prefix): x for name, x in named.items() if name.startswith(prefix)})
        x = torch.cat([rows.x_train, rows.x_test]) @ named["encoder.weight"].mT + named["encoder.bias"]
        x[:TRAIN] += rows.y_train[:, None] @ named["y_encoder.weight"].mT + named["y_encoder.bias"]
        hidden = torch.zeros(TRAIN + TEST, TRAIN + TEST, dtype=torch.bool)
        hidden[:, TRAIN:] = True  # nobody sees a test row
        x = encoder(x[None], mask=hidden)[0, TRAIN:]
        x = gelu(x @ named["decoder.0.weight"].mT + named["decoder.0.bias"])
        wanted = x @ named["decoder.2.weight"].mT + named["decoder.2.bias"]

        kinds: list[tuple[str, int, int]] = []

        def attend(q: Tensor, k: Tensor, v: Tensor, kind: str) -> Tensor:
            kinds.append((kind, q.shape[2], k.shape[2]))
            return scaled_dot_product_attention(q, k, v)

        torch.testing.assert_close(tabpfn.TabPFN(named)(rows, attend), wanted, rtol=1e-4, atol=1e-4)
    assert kinds == [("train", TRAIN, TRAIN), ("test", TEST, TRAIN)] * LAYERS


def test_a_table_is_standardised_on_its_own_train_rows() -> None:
    rows = tabpfn.table(data(), 30, TEST)
    raw = data()["features"].float() * data()["scale"]
    mean, spread = raw[:30].mean(0), raw[:30].std(0)
    torch.testing.assert_close(rows.x_test, ((raw[TRAIN:] - mean) / spread).clamp(-4, 4))
    assert torch.equal(rows.truth, data()["labels"][TRAIN:].long())
    assert not rows.repeated


def test_past_its_end_a_table_repeats_with_noise() -> None:
    rows = tabpfn.table(data(), 2 * TRAIN, TEST)
    first, again = rows.x_train[:TRAIN], rows.x_train[TRAIN:]
    assert rows.repeated
    assert torch.equal(rows.y_train[:TRAIN], rows.y_train[TRAIN:])
    assert 0 < (first - again).abs().mean() < 2 * tabpfn.NOISE
    with pytest.raises(ValueError, match="test rows"):
        tabpfn.table(data(), TRAIN, TEST + 1)


def test_components_are_the_main_directions_and_8_bits_are_enough(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(2)
    made = {}
    for part, count in (("train", 300), ("t10k", 50)):
        pixels = (torch.rand(count, 12, 12, generator=draw) * 255).to(torch.uint8)
        labels = torch.randint(10, (count,), generator=draw).to(torch.uint8)
        made[part] = pixels.flatten(1), labels
        for name, x, sizes in zip(tabpfn.IMAGES[part], (pixels, labels), ((count, 12, 12), (count,)), strict=True):
            head = bytes([0, 0, 8, len(sizes)]) + b"".join(size.to_bytes(4, "big") for size in sizes)
            (tmp_path / name).write_bytes(gzip.compress(head + x.numpy().tobytes()))
    found = tabpfn.read_images(tmp_path)
    for part, (pixels, labels) in made.items():
        assert torch.equal(found[part][0], pixels)
        assert torch.equal(found[part][1], labels)
    kept = tabpfn.principal_components(found)
    features = kept["features"].float() * kept["scale"]
    assert features.shape == (350, tabpfn.FEATURES)
    centred = made["train"][0].float() / 255
    wanted = torch.linalg.svdvals(centred - centred.mean(0))[: tabpfn.FEATURES]
    torch.testing.assert_close(features[:300].norm(dim=0), wanted, rtol=0.01, atol=0)


def test_the_run_writes_rows_that_can_be_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tabpfn.save(tmp_path / "weights_fp32.safetensors", weights())
    tabpfn.save(tmp_path / "mnist.safetensors", data())
    small = "clustered:clusters=4,bits=8"
    asked = argparse.Namespace(
        prepared=tmp_path,
        dtype="float32",
        device="cpu",
        threads=None,
        seed=0,
        seeds=2,
        commit="abc",
        rows=[TRAIN, 2 * TRAIN],
        test_rows=TEST,
        methods=[small, f"{small}/exact"],
        repetitions=2,
        seconds=None,
        out=tmp_path / "rows.jsonl",
    )
    bench.run(asked)
    rows = {(row["rows"], row["method"]): row for row in read(asked.out)}
    assert [*rows] == [(n, label) for n in asked.rows for label in ("exact", small, f"{small}/exact")]
    exact, both, half = (rows[TRAIN, label] for label in ("exact", small, f"{small}/exact"))
    assert exact["kl"] == 0
    assert exact["speedup"] == 1
    assert exact["cost_share"] == exact["train_cost_share"] == 1
    assert both["kl"] > 0
    assert half["kl"] > 0
    assert both["seeds"] == 2
    first, second = both["by_seed"]
    assert both["kl"] == pytest.approx((first["kl"] + second["kl"]) / 2)
    assert first["kl"] != second["kl"]
    assert "seeds" not in exact
    assert half["train_cost_share"] == both["train_cost_share"] < 1
    tested = TEST / (TRAIN + TEST)  # of exact attention's work
    assert half["cost_share"] == pytest.approx(half["train_cost_share"] * (1 - tested) + tested)
    assert both["repetitions"] == 2
    assert both["environment"]["commit"] == "abc"
    assert all("kl" not in row and row["seconds"] > 0 for (n, _), row in rows.items() if n > TRAIN)
    bench.show(asked)
    told = capsys.readouterr().out
    assert "time alone" in told
    assert f"{small}/exact" in told


def test_the_divergence_is_that_of_the_definition() -> None:
    exact, other = torch.tensor([[1.0, 2.0, 0.0]]), torch.tensor([[0.5, 2.5, 0.0]])
    p, q = exact.softmax(-1), other.softmax(-1)
    told = bench.quality(other, exact, torch.tensor([0]))
    assert told["kl"] == pytest.approx(float((p * (p / q).log()).sum()))
    assert (told["accuracy"], told["agreement"]) == (0, 1)


def test_what_is_missing_is_said_with_where_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"pypi\.org/project/tabpfn"):
        tabpfn.read_weights(tmp_path)
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte\.gz"):
        tabpfn.read_images(tmp_path)
    with pytest.raises(ValueError, match=r"tabpfn_v1\.py prepare"):
        tabpfn.prepared(tmp_path, torch.float32)
    (tmp_path / tabpfn.CHECKPOINT).write_bytes(b"something else")
    with pytest.raises(ValueError, match="SHA-256"):
        tabpfn.read_weights(tmp_path)


def test_a_setting_reads_back_as_it_is_written() -> None:
    both, half = bench.Setting.parse("refined:top=64"), bench.Setting.parse("refined/exact")
    assert both.test == ca.Refined(top=64)
    assert (str(both), str(half)) == ("refined:top=64", "refined/exact")
    assert bench.Setting.parse(str(half)) == half
