"""Tiny models of transformers with random weights, a batch for each, and how their answers are compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as T
from torch import Tensor, nn

import clusterattn as ca

T.logging.set_verbosity_error()

VOCABULARY, LENGTHS = 99, (40, 27)  # two sequences, the second padded
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
TEXT = {**SIZES, "vocab_size": VOCABULARY, "max_position_embeddings": 128, "pad_token_id": 0}
DECODER = {**TEXT, "num_key_value_heads": 2, "head_dim": 8, "bos_token_id": 1, "eos_token_id": 2}
PAIR = {
    "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 37, "decoder_ffn_dim": 37, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
WAVES = {
    "conv_dim": (16, 16), "conv_stride": (4, 4), "conv_kernel": (8, 8), "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
}  # fmt: skip

MAKERS: dict[str, Callable[[], nn.Module]] = {
    "bert": lambda: T.BertForMaskedLM(T.BertConfig(**TEXT, **QUIET)),
    "roberta": lambda: T.RobertaForMaskedLM(T.RobertaConfig(**TEXT, **QUIET)),
    "distilbert": lambda: T.DistilBertForMaskedLM(
        T.DistilBertConfig(vocab_size=VOCABULARY, dim=32, n_layers=2, n_heads=4, hidden_dim=37)
    ),
    "modernbert": lambda: T.ModernBertForMaskedLM(
        T.ModernBertConfig(
            **TEXT, local_attention=8, global_attn_every_n_layers=2,
            bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2,
        )
    ),
    "vit": lambda: T.ViTForImageClassification(T.ViTConfig(**SIZES, image_size=28, patch_size=4)),
    "whisper": lambda: T.WhisperForConditionalGeneration(
        T.WhisperConfig(**PAIR, max_source_positions=40, max_target_positions=60, num_mel_bins=8)
    ),
    "wav2vec2": lambda: T.Wav2Vec2ForCTC(T.Wav2Vec2Config(**SIZES, **WAVES, vocab_size=VOCABULARY)),
    "t5": lambda: T.T5ForConditionalGeneration(
        T.T5Config(
            vocab_size=VOCABULARY, d_model=32, d_kv=8, num_heads=4, num_layers=2, d_ff=37, decoder_start_token_id=0
        )
    ),
    "llama": lambda: T.LlamaForCausalLM(T.LlamaConfig(**DECODER)),
    "qwen3": lambda: T.Qwen3ForCausalLM(T.Qwen3Config(**DECODER)),
    "gpt2": lambda: T.GPT2LMHeadModel(
        T.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2)
    ),
    "gemma3": lambda: T.Gemma3ForCausalLM(
        T.Gemma3TextConfig(**DECODER, sliding_window=8, layer_types=["sliding_attention", "full_attention"])
    ),
    # not in the list of those that must be swappable, but in that of those that teach something
    "bart": lambda: T.BartForConditionalGeneration(T.BartConfig(**PAIR, max_position_embeddings=128)),
    "mistral": lambda: T.MistralForCausalLM(T.MistralConfig(**DECODER, sliding_window=8)),
    "gemma2": lambda: T.Gemma2ForCausalLM(T.Gemma2Config(**DECODER, sliding_window=8)),
    "gpt_oss": lambda: T.GptOssForCausalLM(
        T.GptOssConfig(**DECODER, sliding_window=8, num_local_experts=2, num_experts_per_tok=1)
    ),
    "clip": lambda: T.CLIPModel(
        T.CLIPConfig(
            text_config={**TEXT, "bos_token_id": 1, "eos_token_id": 2},
            vision_config={**SIZES, "image_size": 28, "patch_size": 4},
        )
    ),
    "pix2struct": lambda: T.Pix2StructForConditionalGeneration(
        T.Pix2StructConfig(
            text_config={"vocab_size": VOCABULARY, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "d_kv": 8},
            vision_config={"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "d_kv": 8},
        )
    ),
}  # fmt: skip

ISSUE = [
    "bert", "roberta", "distilbert", "modernbert", "vit", "whisper",
    "wav2vec2", "t5", "llama", "qwen3", "gpt2", "gemma3",
]  # fmt: skip
GENERATING = ["llama", "qwen3", "gpt2", "gemma3", "whisper", "t5"]


def make(name: str, seed: int = 0) -> Any:
    """A model in eval mode. Weights are enlarged, so that attention is not nearly uniform."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = MAKERS[name]()
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.data.normal_(std=0.3)
    return model.eval()


def real(lengths: tuple[int, ...] = LENGTHS, side: str = "right") -> Tensor:
    """(b n) bool: the tokens that are not padding."""
    at = torch.arange(max(lengths))
    rows = [at < one if side == "right" else at >= max(lengths) - one for one in lengths]
    return torch.stack(rows)


def tokens(lengths: tuple[int, ...] = LENGTHS, side: str = "right", positions: bool = False) -> dict[str, Tensor]:
    """A padded batch of text; the same tokens whichever side is padded."""
    kept = real(lengths, side)
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(3, VOCABULARY, (one,), generator=generator) for one in lengths]
    ids = torch.zeros(kept.shape, dtype=torch.long).masked_scatter(kept, torch.cat(drawn))
    batch = {"input_ids": ids, "attention_mask": kept.long()}
    return {**batch, "position_ids": (kept.cumsum(-1) - 1).clamp(min=0)} if positions else batch


def inputs(name: str, side: str = "right") -> tuple[dict[str, Tensor], Tensor | None]:
    """A batch for the model, and which of the answers are real (None: all)."""
    generator = torch.Generator().manual_seed(2)
    if name in ("vit", "clip"):
        pixels = {"pixel_values": torch.randn(2, 3, 28, 28, generator=generator)}
        return (pixels if name == "vit" else {**pixels, **tokens()}), None
    if name == "whisper":
        heard = torch.randn(2, 8, 80, generator=generator)
        return {"input_features": heard, "decoder_input_ids": tokens()["input_ids"][:, :30]}, None
    if name == "wav2vec2":
        waves = torch.randn(2, 640, generator=generator)
        kept = real((640, 400))  # the only side it can be padded on
        return {"input_values": waves * kept, "attention_mask": kept.long()}, real((38, 23))
    batch = tokens(side=side, positions=name in ("llama", "qwen3", "gpt2", "gemma3", "mistral", "gemma2", "gpt_oss"))
    if name in ("t5", "bart"):
        return {**batch, "decoder_input_ids": tokens((30, 30))["input_ids"]}, None
    return batch, batch["attention_mask"].bool()


def logits(model: Any, batch: dict[str, Tensor], kept: Tensor | None = None) -> Tensor:
    """What the model answers, where it counts."""
    out = model(**batch)
    said: Tensor = out.logits if "logits" in out else torch.cat([out.text_embeds, out.image_embeds])
    return said if kept is None else said[kept]


def answers(model: Any, batch: dict[str, Tensor], kept: Tensor | None = None) -> Tensor:
    with torch.no_grad():
        return logits(model, batch, kept)


_SIZES = {"block": 8, "parts": 1, "slope": False, "steps": 5}
NEAR = ca.Refined(clusters=4, top=128, **_SIZES)  # every key is near: exact, by way of the method
ROUGH = ca.Refined(clusters=3, top=2, **_SIZES)  # far from exact: shows that the method is at work


def close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def same(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=0.0, atol=0.0)


def differ(got: Tensor, wanted: Tensor) -> None:
    assert (got - wanted).abs().max() > 1e-2 * wanted.abs().max()
