"""What a pretrained model is for: how to load it, what to show it, how to judge its answer.

A task turns data into batches, a batch into an answer, and an answer beside exact attention's into sums. The sums of
all batches become figures, the first of which is the task's metric.
"""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._errors import bad_value
from .._extras import need
from . import reading
from .reading import Example

Sums = dict[str, float]
TOKENS_AT_ONCE = 1024  # rows of next-token distributions compared at a time: a vocabulary is wide
UNLIMITED = 10**6  # tokenizers without a limit of their own say 10³⁰


@dataclass(frozen=True)
class ModelBatch:
    inputs: dict[str, Tensor]
    references: tuple[str, ...] = ()

    def to(self, device: torch.device, dtype: torch.dtype) -> ModelBatch:
        moved = {k: x.to(device, dtype if x.is_floating_point() else x.dtype) for k, x in self.inputs.items()}
        return replace(self, inputs=moved)

    @property
    def tokens(self) -> Tensor | None:
        """(b n) bool: which positions are real, where the model's own mask says so."""
        mask = self.inputs.get("attention_mask")
        return None if mask is None else mask.bool()


class ModelAnswer(NamedTuple):
    hidden: Tensor  # (rows x): the last hidden states of all real positions
    output: Any  # whatever the task judges


@dataclass(frozen=True)
class Loaded:
    """A model ready to answer, what makes its inputs, and how it was called."""

    model: Any
    processor: Any
    name: str

    @property
    def device(self) -> torch.device:
        return torch.device(self.model.device)

    @property
    def longest(self) -> int | None:
        """Positions the model can take, as far as it says."""
        config = self.model.config
        limits = [getattr(config, key, None) for key in ("max_position_embeddings", "n_positions")]
        limits.append(getattr(self.processor, "model_max_length", None))
        known = [each for each in limits if isinstance(each, int) and 0 < each < UNLIMITED]
        return min(known) if known else None


def trunk(model: Any) -> Any:
    """The part whose last hidden states are compared: the encoder of an encoder-decoder, else all but the head."""
    return model.get_encoder() if getattr(model.config, "is_encoder_decoder", False) else model.base_model


def real_rows(hidden: Tensor, tokens: Tensor | None) -> Tensor:
    """(rows x) of the real positions; a mask of other positions (of samples, where frames come out) says nothing."""
    if tokens is not None and tokens.shape == hidden.shape[:2]:
        return hidden[tokens]
    return hidden.flatten(0, -2)


class ModelTask:
    """Hidden states alone: works for every model. The other tasks add an answer to it."""

    name: ClassVar[str] = "hidden"
    metric: ClassVar[str] = "hidden-state error"
    higher: ClassVar[bool] = False  # is more of the metric better?
    together: ClassVar[int] = 8  # examples in a batch
    window: ClassVar[int | None] = None  # tokens of a window where nothing else is said; None: a line is a passage

    def kind(self, config: Any) -> str:
        """The transformers class that loads the model."""
        return "AutoModel"

    def examples(self, path: str | Path, length: int | None) -> list[Example]:
        if reading_sound(path):
            return reading.speech(path)
        return reading.passages(path, whole=(length or self.window) is not None)

    def batches(
        self,
        loaded: Loaded,
        path: str | Path,
        *,
        length: int | None = None,
        size: int | None = None,
        limit: int | None = None,
    ) -> list[ModelBatch]:
        """Batches of ``size`` examples from a file or folder, of ``limit`` examples spread evenly over it.

        length   text is cut into windows of so many tokens; None: each line is a passage, cut where the model ends
        """
        found = self._batches(loaded, self.examples(path, length), length, size or self.together, limit)
        return [batch.to(loaded.device, loaded.model.dtype) for batch in found]

    def _batches(
        self, loaded: Loaded, examples: list[Example], length: int | None, size: int, limit: int | None
    ) -> list[ModelBatch]:
        if examples[0].sound is not None:
            return [sounds(loaded, part) for part in portions(reading.spread(examples, limit), size)]
        length = length or self.window
        most = min(length or UNLIMITED, loaded.longest or UNLIMITED)
        if length is None:
            examples = reading.spread(examples, limit)
        rows = list(tokenised(loaded.processor, examples, most, windowed=length is not None))
        return [padded(loaded.processor, part) for part in portions(reading.spread(rows, limit), size)]

    def answer(self, loaded: Loaded, batch: ModelBatch) -> ModelAnswer:
        hidden = trunk(loaded.model)(**batch.inputs)[0]
        return ModelAnswer(real_rows(hidden, batch.tokens), self.pooled(loaded, hidden, batch))

    def pooled(self, loaded: Loaded, hidden: Tensor, batch: ModelBatch) -> Any:
        return None

    def tally(self, answer: ModelAnswer, exact: ModelAnswer, batch: ModelBatch, loaded: Loaded) -> Sums:
        return {}

    def figures(self, sums: Sums) -> dict[str, float]:
        return {}


class Embed(ModelTask):
    """Sentence embeddings: mean-pooled (or the first token, where the model's folder says so), by cosine."""

    name = "embed"
    metric = "cosine distance"

    def pooled(self, loaded: Loaded, hidden: Tensor, batch: ModelBatch) -> Tensor:
        if first_token_counts(loaded.name):
            return F.normalize(hidden[:, 0].float(), dim=-1)
        tokens = batch.tokens
        real = torch.ones_like(hidden[..., :1]) if tokens is None else tokens.unsqueeze(-1).to(hidden.dtype)
        return F.normalize(((hidden * real).sum(1) / real.sum(1).clamp(min=1)).float(), dim=-1)

    def tally(self, answer: ModelAnswer, exact: ModelAnswer, batch: ModelBatch, loaded: Loaded) -> Sums:
        distance = (answer.output - exact.output).double().square().sum(-1) / 2  # 1 − cos, without its cancellation
        return {"distance": float(distance.sum()), "passages": float(len(distance))}

    def figures(self, sums: Sums) -> dict[str, float]:
        return {self.metric: sums["distance"] / sums["passages"]}


class Headed(ModelTask):
    """A model with a head: the head is judged, the trunk's hidden states are looked at on the way."""

    def answer(self, loaded: Loaded, batch: ModelBatch) -> ModelAnswer:
        seen: list[Tensor] = []
        watch = trunk(loaded.model).register_forward_hook(lambda module, inputs, out: seen.append(out[0]))
        try:
            output = self.speak(loaded, batch)
        finally:
            watch.remove()
        return ModelAnswer(real_rows(seen[0], batch.tokens), output)

    def speak(self, loaded: Loaded, batch: ModelBatch) -> Any:
        return loaded.model(**batch.inputs).logits


class LanguageModel(Headed):
    """Next-token prediction on windows of text: perplexity, and how far the distributions moved."""

    name = "lm"
    metric = "perplexity"
    together = 1
    window = 1024

    def kind(self, config: Any) -> str:
        return "AutoModelForCausalLM"

    def tally(self, answer: ModelAnswer, exact: ModelAnswer, batch: ModelBatch, loaded: Loaded) -> Sums:
        ids = batch.inputs["input_ids"]
        real = torch.ones_like(ids, dtype=torch.bool) if batch.tokens is None else batch.tokens
        rows = (real[:, :-1] & real[:, 1:]).flatten().nonzero().squeeze(-1)
        following = ids[:, 1:].flatten()
        ours, theirs = (x.output[:, :-1].flatten(0, 1) for x in (answer, exact))
        loss = apart = 0.0
        for chunk in torch.split(rows, TOKENS_AT_ONCE):
            q, p = (x[chunk].float().log_softmax(-1) for x in (ours, theirs))
            loss += float(F.nll_loss(q, following[chunk], reduction="sum"))
            apart += float((p.exp() * (p - q)).sum(dtype=torch.float64))
        return {"loss": loss, "apart": max(apart, 0.0), "tokens": float(len(rows))}

    def figures(self, sums: Sums) -> dict[str, float]:
        tokens = max(sums["tokens"], 1.0)
        return {self.metric: math.exp(min(sums["loss"] / tokens, 700.0)), "KL to exact, nats": sums["apart"] / tokens}


class Label(Headed):
    """Labelled passages: the share that is labelled right, and the share that is labelled as with exact attention."""

    name = "classify"
    metric = "accuracy"
    higher = True

    def kind(self, config: Any) -> str:
        return "AutoModelForSequenceClassification"

    def examples(self, path: str | Path, length: int | None) -> list[Example]:
        return reading.passages(path, whole=False, labelled=True)

    def _batches(
        self, loaded: Loaded, examples: list[Example], length: int | None, size: int, limit: int | None
    ) -> list[ModelBatch]:
        examples = reading.spread(examples, limit)
        most = min(length or UNLIMITED, loaded.longest or UNLIMITED)
        rows = list(tokenised(loaded.processor, examples, most, windowed=False))
        labels = [str(label_number(loaded.model.config, each)) for each in examples]
        pairs = zip(portions(rows, size), portions(labels, size), strict=True)
        return [replace(padded(loaded.processor, part), references=tuple(theirs)) for part, theirs in pairs]

    def tally(self, answer: ModelAnswer, exact: ModelAnswer, batch: ModelBatch, loaded: Loaded) -> Sums:
        ours, theirs = (x.output.argmax(-1).tolist() for x in (answer, exact))
        right = sum(str(each) == label for each, label in zip(ours, batch.references, strict=True))
        same = sum(each == other for each, other in zip(ours, theirs, strict=True))
        return {"right": float(right), "same": float(same), "passages": float(len(ours))}

    def figures(self, sums: Sums) -> dict[str, float]:
        return {self.metric: sums["right"] / sums["passages"], "same label as exact": sums["same"] / sums["passages"]}


class Recognise(Headed):
    """Speech to words, by an encoder-decoder or by CTC: word error rate, and words that changed against exact."""

    name = "asr"
    metric = "word error rate"
    together = 1

    def kind(self, config: Any) -> str:
        return "AutoModelForSpeechSeq2Seq" if config.is_encoder_decoder else "AutoModelForCTC"

    def examples(self, path: str | Path, length: int | None) -> list[Example]:
        return reading.speech(path)

    def _batches(
        self, loaded: Loaded, examples: list[Example], length: int | None, size: int, limit: int | None
    ) -> list[ModelBatch]:
        for each in examples:
            if not plain_words(each.text, loaded.processor):
                raise bad_value("a transcript with words in it", f"none for {each.name}", "leaving that clip out")
        return super()._batches(loaded, examples, length, size, limit)

    def speak(self, loaded: Loaded, batch: ModelBatch) -> list[str]:
        if loaded.model.config.is_encoder_decoder:
            ids = loaded.model.generate(**batch.inputs, do_sample=False, num_beams=1)
        else:
            ids = loaded.model(**batch.inputs).logits.argmax(-1)
        return [str(words) for words in loaded.processor.batch_decode(ids, skip_special_tokens=True)]

    def tally(self, answer: ModelAnswer, exact: ModelAnswer, batch: ModelBatch, loaded: Loaded) -> Sums:
        ours, theirs, truth = (
            [plain_words(each, loaded.processor) for each in texts]
            for texts in (answer.output, exact.output, batch.references)
        )
        wrong, words = word_edits(truth, ours)
        changed, spoken = word_edits(theirs, ours)
        return {"wrong": wrong, "words": words, "changed": changed, "spoken": spoken}

    def figures(self, sums: Sums) -> dict[str, float]:
        changed = sums["changed"] / max(sums["spoken"], 1.0)
        return {self.metric: sums["wrong"] / max(sums["words"], 1.0), "words changed against exact": changed}


KINDS = (ModelTask(), Embed(), Recognise(), LanguageModel(), Label())
TASKS: dict[str, ModelTask] = {each.name: each for each in KINDS}


def task_named(name: str) -> ModelTask:
    if name not in TASKS:
        raise bad_value(f"--task {' or '.join(TASKS)}", repr(name), "--task hidden, which suits every model")
    return TASKS[name]


# ---------------------------------------------------------------------------------------------------- loading


def load(task: ModelTask, name: str, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Loaded:
    """A model and its processor from a local folder or the hub. Code from the hub never runs; weights are safetensors,
    or pickles read with ``weights_only``."""
    transformers = need("transformers", "hf")
    transformers.utils.logging.disable_progress_bar()
    folder = Path(name)
    if not folder.is_dir() and (folder.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise bad_value("the folder of a model or a hub id", f"{name}, which is no folder", "MODEL as org/name")
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise bad_value("a Hugging Face model folder", f"{name}, without config.json", "what save_pretrained wrote")
    safely = {"trust_remote_code": False}
    try:
        config = transformers.AutoConfig.from_pretrained(name, **safely)
        made = getattr(transformers, task.kind(config))
        model, loading = made.from_pretrained(name, dtype=dtype, weights_only=True, output_loading_info=True, **safely)
        processor = _processor(transformers, task, config, name, safely)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, pickle.UnpicklingError) as error:
        first = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip().split("\n")[0][:200]
        wanted = f"a model for --task {task.name} that transformers can load"
        raise bad_value(wanted, f"{name} ({first})", "another --task, or the path of its folder") from None
    missing = sorted(key for key in loading["missing_keys"] if not key.startswith("pooler."))  # no task asks the pooler
    if missing:
        wanted = f"weights for all of {type(model).__name__}"
        raise bad_value(wanted, f"{name} without {missing[0]}", "another --task: this one's head was never trained")
    return Loaded(model.eval().requires_grad_(False).to(device), processor, name)


def _processor(transformers: Any, task: ModelTask, config: Any, name: str, safely: dict[str, Any]) -> Any:
    hears = hasattr(config, "num_mel_bins") or hasattr(config, "conv_stride") or task.name == "asr"
    if hears:
        return transformers.AutoProcessor.from_pretrained(name, **safely)
    tokenizer = transformers.AutoTokenizer.from_pretrained(name, **safely)
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ValueError("its tokenizer has no token to pad with")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def first_token_counts(name: str) -> bool:
    """Does the model's folder, as sentence-transformers writes it, ask for the first token's state?"""
    pooling = Path(name) / "1_Pooling" / "config.json"
    return pooling.is_file() and bool(re.search(r'"pooling_mode_cls_token"\s*:\s*true', pooling.read_text()))


# ---------------------------------------------------------------------------------------------------- making batches


def reading_sound(path: str | Path) -> bool:
    path = Path(path)
    return path.is_dir() and any(path.rglob("*.wav"))


def portions(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def tokenised(tokenizer: Any, examples: Sequence[Example], limit: int, windowed: bool) -> Iterator[list[int]]:
    """Token ids: each passage cut at the limit, or cut into full windows of that many (one short text stays short)."""
    for each in examples:
        ids = tokenizer(
            each.text,
            truncation=limit < UNLIMITED,
            max_length=limit if limit < UNLIMITED else None,
            return_overflowing_tokens=windowed and limit < UNLIMITED,
            verbose=False,
        )["input_ids"]
        rows = ids if ids and isinstance(ids[0], list) else [ids]
        full = [row for row in rows if len(row) == limit]
        yield from full or rows[:1]


def padded(tokenizer: Any, rows: Sequence[list[int]]) -> ModelBatch:
    made = tokenizer.pad({"input_ids": list(rows)}, return_tensors="pt")
    kept = {name: made[name] for name in ("input_ids", "attention_mask")}
    if bool(kept["attention_mask"].all()):
        del kept["attention_mask"]  # nothing is padded, and no mask is the cheapest one
    return ModelBatch(kept)


def sounds(loaded: Loaded, examples: Sequence[Example]) -> ModelBatch:
    extract = getattr(loaded.processor, "feature_extractor", loaded.processor)
    rate = int(extract.sampling_rate)
    heard = []
    for each in examples:
        assert each.sound is not None
        sound = reading.resampled(each.sound, each.rate, rate)
        most = getattr(extract, "n_samples", None)
        if most is not None and len(sound) > most:
            seconds = f"{len(sound) / rate:.0f} s in {each.name}"
            raise bad_value(f"clips of at most {most / rate:.0f} s", seconds, "cutting it into pieces")
        heard.append(sound.numpy())
    made = extract(
        heard, sampling_rate=rate, return_tensors="pt", padding="max_length" if hasattr(extract, "n_samples") else True
    )
    return ModelBatch(dict(made), tuple(each.text for each in examples))


def label_number(config: Any, example: Example) -> int:
    """The model's number for a label: its name in the model's config, or the number itself."""
    assert example.label is not None
    known = {str(key).lower(): int(value) for key, value in (config.label2id or {}).items()}
    found = known.get(example.label.lower())
    if found is not None:
        return found
    if example.label.isdigit() and int(example.label) < config.num_labels:
        return int(example.label)
    wanted = f"a label of the model: {', '.join(known)}, or 0 to {config.num_labels - 1}"
    raise bad_value(wanted, f"{example.label!r} ({example.name})", "other labels in the data")


# ---------------------------------------------------------------------------------------------------- comparing words


def plain_words(text: str, processor: Any) -> str:
    """Words without case and punctuation; with the model's own rules where its tokenizer has them (Whisper's)."""
    normalize = getattr(getattr(processor, "tokenizer", processor), "normalize", None)
    if callable(normalize):
        return str(normalize(text)).strip()
    return " ".join(re.findall(r"[^\W_]+(?:'[^\W_]+)*", text.lower()))


def word_edits(wanted: Sequence[str], got: Sequence[str]) -> tuple[float, float]:
    """Words to insert, delete or replace in all texts together, and the number of words wanted."""
    pairs = [(one.split(), other.split()) for one, other in zip(wanted, got, strict=True)]
    return float(sum(edits(one, other) for one, other in pairs)), float(sum(len(one) for one, _ in pairs))


def edits(wanted: Sequence[object], got: Sequence[object]) -> int:
    """Symbols, or words, to insert, delete or replace: Levenshtein's distance."""
    row = list(range(len(got) + 1))
    for i, symbol in enumerate(wanted, start=1):
        corner, row[0] = row[0], i
        for j, other in enumerate(got, start=1):
            corner, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, corner + (symbol != other))
    return row[-1]
