"""The recipes of docs/hosts.md, each with the real package, a tiny model and random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clusterattn as ca

METHOD = "refined:clusters=8,top=8"
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "an", "old", "dog", "walk", "by", "in", "rain"]


def bert(**options: Any) -> Any:
    transformers = pytest.importorskip("transformers", reason='needs the extra "hf"')
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
        initializer_range=0.5, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **options,
    )  # fmt: skip
    return transformers.BertModel(config).eval()


def hidden(model: nn.Module) -> Tensor:
    torch.manual_seed(1)
    with torch.no_grad():
        out: Tensor = model(input_ids=torch.randint(0, 20, (2, 48))).last_hidden_state
    return out


def test_sentence_transformers(tmp_path: Path) -> None:
    st = pytest.importorskip("sentence_transformers", reason="needs sentence-transformers")
    import transformers

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *dict.fromkeys(WORDS)]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    bert().save_pretrained(tmp_path)
    model = st.SentenceTransformer(str(tmp_path), device="cpu")
    texts = [" ".join(WORDS * 4), " ".join(WORDS[::-1] * 3), "a cat"]
    before = model.encode(texts, convert_to_tensor=True)

    report = ca.hf.swap(model, METHOD, exact_below=16)

    assert len(report.swapped) == 2
    after = model.encode(texts, convert_to_tensor=True)
    assert not torch.allclose(after[:2], before[:2], atol=1e-4)
    assert torch.nn.functional.cosine_similarity(after, before).min() > 0.8
    alone = model.encode(texts[2:], convert_to_tensor=True)
    assert torch.allclose(alone[0], before[2], atol=1e-5), "a short batch is exact"


def test_timm() -> None:
    timm = pytest.importorskip("timm", reason="needs timm (and a torchvision that fits torch)")
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", pretrained=False, num_classes=3, depth=2).eval()
    images = torch.randn(1, 3, 224, 224)
    before = model(images)

    report = ca.hosts.vggt.swap(model, METHOD, blocks=model.blocks, exact_below=100)

    assert report.swapped == ["blocks.0.attn", "blocks.1.attn"]
    assert not torch.equal(model(images), before)
    assert report.served.swapped == 2
    ca.hosts.vggt.swap(model, "exact", blocks=model.blocks, exact_below=0)
    assert torch.allclose(model(images), before, atol=1e-5)


@pytest.mark.parametrize("first", ["swap", "lora"])
def test_peft(first: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="needs peft")
    model, lora = bert(), peft.LoraConfig(r=4, target_modules=["query", "value"], init_lora_weights="gaussian")
    exact = hidden(model)
    if first == "swap":
        ca.hf.swap(model, METHOD)
        tuned = peft.get_peft_model(model, lora)
    else:
        tuned = peft.get_peft_model(model, lora)
        ca.hf.swap(tuned, METHOD)

    swapped = hidden(tuned)
    assert not torch.allclose(swapped, exact, atol=1e-4)
    tuned.train()
    tuned(input_ids=torch.randint(0, 20, (2, 48))).last_hidden_state.square().mean().backward()
    trained = {name for name, weight in tuned.named_parameters() if weight.grad is not None and weight.grad.any()}
    assert trained
    assert all("lora_" in name for name in trained)
    with torch.no_grad():
        for name, weight in tuned.named_parameters():
            if "lora_" in name:
                weight.normal_()
    adapted = hidden(tuned.eval())
    tuned.save_pretrained(tmp_path)
    read = peft.PeftModel.from_pretrained(bert(), tmp_path).eval()
    ca.hf.swap(read, METHOD)
    assert torch.allclose(hidden(read), adapted, atol=1e-5)
    ca.hf.restore(read)
    merged = read.merge_and_unload()
    ca.hf.swap(merged, METHOD)
    assert torch.allclose(hidden(merged), adapted, atol=1e-3), "merged weights answer as adapted ones"


def test_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning", reason="needs lightning")

    class Tagger(lightning.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self, method: str) -> None:
            super().__init__()
            self.save_hyperparameters()
            layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
            self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(16, 1)
            ca.nn.swap(self.encoder, method)  # before configure_optimizers: the weights are new ones

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.encoder(x))
            return out

        def training_step(self, batch: Tensor) -> Tensor:
            return (self(batch).squeeze(-1) - batch.mean(-1)).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), 1e-2)

    torch.manual_seed(0)
    batches = torch.utils.data.DataLoader(torch.randn(8, 40, 16), 4)
    model = Tagger(METHOD)
    before = [weight.detach().clone() for weight in model.parameters()]
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(model, batches)
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    (path,) = tmp_path.rglob("*.ckpt")
    read = Tagger.load_from_checkpoint(path).eval()
    x = torch.randn(1, 40, 16)
    assert torch.equal(read(x), model.eval()(x))
