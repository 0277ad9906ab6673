"""Capture q, k, v of some layers and heads of a pretrained encoder: what `clusterattn compare` shows.

    python benchmarks/capture_sample.py MODEL TEXT OUT.safetensors --layers 1 3 5 --heads 0 3 6 9

MODEL is a folder or hub name that transformers can load, TEXT a plain text file. The heads listed become
dimension h, the layers dimension b of one (b h n d) tensor each for q, k, v, in fp16; the tokens travel in
the metadata.
Needs `pip install transformers safetensors`.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def capture(model_name: str, text: str, tokens: int) -> tuple[list[str], list[tuple[Tensor, Tensor, Tensor]]]:
    """The tokens of the passage, and (q, k, v) of every layer, each (1 h n d)."""
    from transformers import AttentionInterface, AutoModel, AutoTokenizer

    seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def record(
        module: torch.nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        scaling: float | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        if scaling is not None:  # fold an unusual scale into q, so that whoever reads the file may use 1/sqrt(d)
            q = q * (scaling * q.shape[-1] ** 0.5)
        seen.append((q, k, v))
        return scaled_dot_product_attention(q, k, v).transpose(1, 2).contiguous(), None

    AttentionInterface.register("record", record)
    tokenizer = AutoTokenizer.from_pretrained(model_name)
    model = AutoModel.from_pretrained(model_name, attn_implementation="record").float().eval()
    words = tokenizer(text, truncation=True, max_length=tokens, return_tensors="pt")
    if words["input_ids"].shape[1] < tokens:
        raise SystemExit(f"wanted a text of {tokens} tokens; got {words['input_ids'].shape[1]}; try a longer text")
    with torch.no_grad():
        model(**words)  # one unpadded passage: no mask is needed
    return tokenizer.convert_ids_to_tokens(words["input_ids"][0]), seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 3, 5])
    parser.add_argument("--heads", type=int, nargs="+", default=[0, 3, 6, 9])
    parser.add_argument("--encoding", default="latin-1", help="of the text file")
    parser.add_argument("--start", default="", help="begin the passage where these words first occur")
    parser.add_argument("--source", default="", help="model, text and licences in words, kept in the file")
    args = parser.parse_args()

    text = args.text.read_text(encoding=args.encoding)
    text = text[max(text.find(args.start), 0) :]
    tokens, layers = capture(args.model, text, args.tokens)
    tensors = {
        name: torch.cat([layers[layer][i][:, args.heads] for layer in args.layers]).half().contiguous()
        for i, name in enumerate("qkv")
    }
    metadata = {
        "source": args.source or f"{args.model}, {args.text.name}",
        "tokens": json.dumps(tokens),
        "batch": json.dumps([f"layer {layer}" for layer in args.layers]),
        "heads": json.dumps([f"head {head}" for head in args.heads]),
    }
    whole = args.out.with_suffix(".tmp")
    save_file(tensors, whole, metadata=metadata)
    whole.chmod(0o644)  # save_file makes it private
    os.replace(whole, args.out)
    print(f"{args.out}: q, k, v {tuple(tensors['q'].shape)} fp16, {args.out.stat().st_size / 2**20:.2f} MiB")
    print(" ".join(tokens[:24]), "...", " ".join(tokens[-8:]))


if __name__ == "__main__":
    main()
