"""A pretrained transformers encoder with a fresh head, by any method: the attention is swapped, nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clusterattn._errors import bad_value, check_choice
from clusterattn._extras import need
from clusterattn.methods import MethodSpec

from ._parts import Answer, mean_over

DROPOUTS = ("attention_probs_dropout_prob", "attention_dropout", "attn_pdrop")  # what configs call it
POOLS = ("first", "mean")


class Pretrained(nn.Module):
    """Tokens (b n) -> a score for each label (b labels).

    weights   a Hugging Face folder, or a hub id
    labels    1 for a number instead of a label
    pool      "first": the head reads the first token, as BERT's and RoBERTa's classifiers do; "mean": all real tokens

    No weight is ever dropped in attention, whatever the config says: methods that never have the weights could not, and
    all methods are to be trained alike. The methods' draws are the same in every layer and every step.
    """

    def __init__(
        self,
        weights: str | Path,
        labels: int,
        method: MethodSpec = "exact",
        *,
        pool: str = "first",
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        check_choice("Pretrained", "pool", pool, POOLS)
        self.encoder, self.pool = encoder(weights), pool
        dim = self.encoder.config.hidden_size
        self.head = nn.Sequential(nn.Linear(dim, dim), nn.Tanh(), nn.Dropout(dropout), nn.Linear(dim, labels))
        self.attend_with(method)

    def attend_with(self, method: MethodSpec) -> None:
        self.method = method
        need("clusterattn.hf", "train").swap(self.encoder, method)

    def extra_repr(self) -> str:
        return f"method={self.method!s}, pool={self.pool}"

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Answer:
        kinds = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask, **kinds)[0]
        pooled = hidden[:, 0] if self.pool == "first" else mean_over(hidden, attention_mask)
        return Answer(self.head(pooled), pooled.new_zeros((), dtype=torch.float32))


@contextlib.contextmanager
def answering_with(model: Pretrained, method: MethodSpec) -> Iterator[None]:
    """Another attention without retraining, for a while."""
    before = model.method
    model.attend_with(method)
    try:
        yield
    finally:
        model.attend_with(before)


# ---------------------------------------------------------------------------------------------------- loading


def encoder(weights: str | Path) -> Any:
    """The model without a head. Weights are safetensors; code from the hub never runs."""
    transformers = need("transformers", "train")
    transformers.utils.logging.disable_progress_bar()
    config = transformers.AutoConfig.from_pretrained(weights, trust_remote_code=False)
    for name in DROPOUTS:
        if hasattr(config, name):
            setattr(config, name, 0.0)
    try:
        model, loading = transformers.AutoModel.from_pretrained(
            weights,
            config=config,
            dtype=torch.float32,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except OSError as error:
        wanted = "a model whose weights are safetensors"
        raise bad_value(wanted, f"{weights} ({str(error).splitlines()[0][:160]})", "another folder") from None
    lacking = sorted(key for key in loading["missing_keys"] if not key.startswith("pooler."))  # nobody asks the pooler
    if lacking:
        wanted = f"weights for all of {type(model).__name__}"
        raise bad_value(wanted, f"{weights} without {lacking[0]}", "another model")
    return model


def tokenizer(weights: str | Path) -> Any:
    """The model's own."""
    return need("transformers", "train").AutoTokenizer.from_pretrained(weights, trust_remote_code=False)


# ---------------------------------------------------------------------------------------------------- invented

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")


def tiny(folder: Path, words: Sequence[str], *, positions: int = 128, seed: int = 0) -> str:
    """Write a random little BERT that knows these words, in the form of a pretrained one, and say where."""
    transformers, tokenizers = need("transformers", "train"), need("tokenizers", "train")
    transformers.utils.logging.disable_progress_bar()
    vocabulary = {word: at for at, word in enumerate(dict.fromkeys((*SPECIAL, *words)))}
    pieces = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    pieces.normalizer = tokenizers.normalizers.BertNormalizer()
    pieces.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    marks = [(mark, vocabulary[mark]) for mark in ("[CLS]", "[SEP]")]
    pieces.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=marks
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=pieces,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=positions,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    ).save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=positions,
        initializer_range=0.2,
    )
    state = torch.random.get_rng_state()
    try:
        torch.manual_seed(seed)
        transformers.BertModel(config).save_pretrained(folder)
    finally:
        torch.random.set_rng_state(state)
    return str(folder)
