"""Tiny random models with tokenizers, saved as Hugging Face folders: everything made here, nothing downloaded."""

from __future__ import annotations

import json
import math
import wave
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

WORDS = [f"w{i}" for i in range(60)]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}


def tokenizer(marks: bool = True) -> PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate(SPECIAL + WORDS)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    if marks:
        made.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=128,
    )


def text(words: int, seed: int = 0) -> str:
    draw = torch.Generator().manual_seed(seed)
    return " ".join(WORDS[i] for i in torch.randint(len(WORDS), (words,), generator=draw).tolist())


def sharpened(model: torch.nn.Module, times: float = 8.0) -> torch.nn.Module:
    """Random models attend to everything alike; larger weights make them look somewhere."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if any(part in name for part in ("query", "key", "q_proj", "k_proj")) and weight.dim() == 2:
                weight.mul_(times)
    return model.eval()


def bert(seed: int = 0, kind: str = "BertModel", **settings: object) -> torch.nn.Module:
    torch.manual_seed(seed)
    config = transformers.BertConfig(
        vocab_size=len(SPECIAL + WORDS), max_position_embeddings=128, initializer_range=0.1, **SMALL, **settings
    )
    return sharpened(getattr(transformers, kind)(config))


def llama(seed: int = 0, sharp: float = 8.0) -> torch.nn.Module:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=len(SPECIAL + WORDS),
        max_position_embeddings=256,
        num_key_value_heads=2,
        initializer_range=0.1,
        bos_token_id=2,
        eos_token_id=3,
        **SMALL,
    )
    return sharpened(transformers.LlamaForCausalLM(config), sharp)


def saved(folder: Path, model: torch.nn.Module, marks: bool = True) -> str:
    model.save_pretrained(folder)
    tokenizer(marks).save_pretrained(folder)
    return str(folder)


def wav2vec2(folder: Path) -> str:
    """A CTC model that hears 16 kHz and spells letters."""
    torch.manual_seed(0)
    letters = ["<pad>", "<s>", "</s>", "<unk>", "|", *"abcdefgh"]
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps({letter: i for i, letter in enumerate(letters)}))
    config = transformers.Wav2Vec2Config(
        vocab_size=len(letters),
        conv_dim=(16, 16),
        conv_stride=(20, 8),
        conv_kernel=(20, 8),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        layerdrop=0.0,
        **SMALL,
    )
    sharpened(transformers.Wav2Vec2ForCTC(config)).save_pretrained(folder)
    transformers.Wav2Vec2Processor(
        transformers.Wav2Vec2FeatureExtractor(), transformers.Wav2Vec2CTCTokenizer(str(folder / "vocab.json"))
    ).save_pretrained(folder)
    return str(folder)


def whisper(folder: Path) -> str:
    """An encoder of 100 positions (2 s) and a decoder that says a few words."""
    torch.manual_seed(0)
    vocabulary = {word: i for i, word in enumerate(SPECIAL + WORDS)}
    config = transformers.WhisperConfig(
        vocab_size=len(vocabulary),
        d_model=32,
        encoder_layers=2,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_source_positions=100,
        max_target_positions=16,
        num_mel_bins=80,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=3,
        decoder_start_token_id=2,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    model = sharpened(transformers.WhisperForConditionalGeneration(config))
    model.generation_config = transformers.GenerationConfig(
        decoder_start_token_id=2, eos_token_id=3, pad_token_id=0, max_length=8
    )
    model.save_pretrained(folder)
    extractor = transformers.WhisperFeatureExtractor(feature_size=80, chunk_length=2)
    transformers.WhisperProcessor(extractor, tokenizer(marks=False)).save_pretrained(folder)
    return str(folder)


def clips(folder: Path, transcripts: dict[str, str], rate: int = 8000, seconds: float = 0.5) -> Path:
    """Wav files of humming, each with its transcript beside it."""
    folder.mkdir(exist_ok=True)
    for i, (name, words) in enumerate(transcripts.items()):
        time = torch.arange(int(rate * seconds)) / rate
        sound = (8000 * torch.sin(2 * math.pi * (200 + 90 * i) * time * (1 + time))).to(torch.int16)
        with wave.open(str(folder / f"{name}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(rate)
            file.writeframes(sound.numpy().tobytes())
        (folder / f"{name}.txt").write_text(words)
    return folder
