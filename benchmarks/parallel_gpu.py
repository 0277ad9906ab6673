"""What the tests hold on a CPU, once on a GPU: ranks that share a sequence, packed documents, swapped models.

    python benchmarks/parallel_gpu.py                   on one GPU, a minute or so: a line for each check
    python benchmarks/parallel_gpu.py --only nccl       those whose name has the word
    python benchmarks/parallel_gpu.py                   without a GPU: a rehearsal, tiny shapes, interpreted kernels

The exit code is 1 when a check fails.

Ranks: nccl has one rank, since there is one GPU; over gloo two and four processes share it, with CUDA tensors. Shares
are uneven and padded, the last of four ranks holds none. Each rank holds its answers (out, lse, gradients of q, k and
v) against one process that holds everything, on the same device: in fp64 to rounding, in fp32 to 1e-4 (clusters lie
apart, or the order of sums would choose between them), in bf16 by the rule of the laws, at most twice (gradients: three
times) as far from fp64 as one process is.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before the kernels are imported

import torch.distributed as dist  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import clusterattn as ca  # noqa: E402
from clusterattn.measure import mixture  # noqa: E402

DEVICE = torch.device("cuda" if GPU else "cpu")
B, HEADS, KEY_HEADS = 2, 4, 2
N, DIM, CLUSTERS = (4000, 64, 40) if GPU else (90, 16, 6)
DOCUMENTS = [5, 700, 64, 1, 0, 1300, 64, 3000, 420] if GPU else [9, 5, 9, 0, 14]
ROUNDING, FP32, PLUMBING = 1e-9, 1e-4, 1e-5  # bars: relative, in the Euclidean norm
STEP = 1e-3  # below a bf16 number's own rounding, nobody is far from fp64
LIMIT = 60.0  # seconds that a rank waits for the others

FAR = {"clusters": CLUSTERS, "start": "far", "steps": 2}
REFINED = ca.Refined(top=16, parts=12, slope=True, sample=max(N // 2, CLUSTERS), **FAR)
METHODS = {
    "clustered": ca.Clustered(bits=15, **FAR),
    "improved": ca.Improved(top=16, metric="euclid", **FAR),
    "refined": REFINED,
}
WORLDS = [("nccl" if GPU else "gloo", 1), ("gloo", 2), ("gloo", 4)]


class Check(NamedTuple):
    name: str
    value: float
    bar: float  # the largest value that passes

    def __str__(self) -> str:
        verdict = "ok  " if self.value <= self.bar else "FAIL"
        return f"{verdict} {self.name:<66} {self.value:9.1e}  (at most {self.bar:.1e})"


def off(got: Tensor, wanted: Tensor) -> float:
    """Relative, in the Euclidean norm; equal infinities (lse of nothing) count as equal."""
    if got.shape != wanted.shape or got.isnan().any():
        return float("inf")
    got, wanted = got.detach().double(), wanted.detach().double()
    apart = torch.where(got == wanted, 0.0, got - wanted).norm()
    size = torch.where(wanted.isfinite(), wanted, 0.0).norm()
    return float(apart / size) if size > 0 else float(apart)


def as_good(ours: list[Tensor], plain: list[Tensor], truth: list[Tensor], times: tuple[int, ...]) -> float:
    """How far from fp64, as a share of what is allowed: so many times as far as the plain way is."""
    each = zip(ours, plain, truth, times, strict=True)
    return max(off(one, true) / (most * max(off(other, true), STEP)) for one, other, true, most in each)


# ---------------------------------------------------------------------------------------------------- ranks


def tensors(n: int = N) -> list[Tensor]:
    """q, k, v and what the answer is weighed with; whole, in fp64."""
    data = mixture(B, HEADS, n, DIM, centres=CLUSTERS, spread=0.2)
    up = torch.randn(B, HEADS, n, DIM, generator=torch.Generator().manual_seed(1))
    return [x.double().to(DEVICE) for x in (data.q, data.k[:, :KEY_HEADS], data.v[:, :KEY_HEADS], up)]


def masks() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(2)
    return {name: (torch.rand(B, N, generator=draw) < 0.9).to(DEVICE) for name in ("query_mask", "key_mask")}


def share_of(rank: int, world: int, n: int = N) -> slice:
    """Uneven; of four ranks the last holds nothing."""
    ends = {1: [0, n], 2: [0, 2 * n // 3, n], 4: [0, n // 2, 2 * n // 3, n, n]}[world]
    return slice(ends[rank], ends[rank + 1])


def answers(call: Callable[..., Any], dtype: torch.dtype, whole: list[Tensor], **options: Any) -> list[Tensor]:
    """out, lse and the gradients of a loss that reads both."""
    q, k, v = (x.to(dtype, copy=True).requires_grad_() for x in whole[:3])
    out, lse = call(q, k, v, return_lse=True, **options)
    up, seen = whole[3], torch.where(lse > float("-inf"), lse, 0.0)
    ((out * up).sum() + (seen.sin() * up[..., 0]).sum()).backward()
    return [out.detach(), lse.detach(), *(x.grad for x in (q, k, v) if x.grad is not None)]


def as_one_process(rank: int, world: int) -> Iterator[Check]:
    whole, mine = tensors(), share_of(rank, world)
    parts, real = [x[:, :, mine].contiguous() for x in whole], masks()
    shown = {name: mask[:, mine] for name, mask in real.items()}

    def both(method: ca.Method, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
        """This rank's answers, and its share of those of one process."""
        ours = answers(ca.parallel.attention, dtype, parts, method=method, **shown)
        alone = answers(ca.attention, dtype, whole, method=method, **real)
        return ours, [x[:, :, mine] for x in alone]

    for name, method in METHODS.items():
        ours, truth = both(method, torch.float64)
        yield Check(f"{name}, float64", max(map(off, ours, truth)), ROUNDING)
        yield Check(f"{name}, float32", max(map(off, *both(method, torch.float32))), FP32)
        ours, alone = both(method, torch.bfloat16)
        if mine.start < mine.stop:
            yield Check(f"{name}, bfloat16, of what is allowed", as_good(ours, alone, truth, (2, 2, 3, 3, 3)), 1.0)


def traffic(rank: int, world: int) -> Iterator[Check]:
    sent = []
    for n in (4 * N, 8 * N):
        counted = ca.parallel.Traffic()
        parts = [x[:, :, share_of(rank, world, n)] for x in tensors(n)]
        answers(ca.parallel.attention, torch.float32, parts, method=REFINED, traffic=counted)
        sent.append(counted.by_what)
    yield Check("bytes at 4 N and at 8 N differ", float(sent[0] != sent[1]), 0.0)


def protocol(rank: int, world: int) -> Iterator[Check]:
    q, k, v = (x[:, :, share_of(rank, world)] for x in tensors()[:3])
    mesh = dist.device_mesh.init_device_mesh(DEVICE.type, (world,))
    one, other = (ca.parallel.attention(q, k, v, method=REFINED, group=group) for group in (None, mesh))
    yield Check("a DeviceMesh, in every bit", float(not torch.equal(one, other)), 0.0)
    for name, wrong in {"causal": {"causal": True}, "another seed on each rank": {"seed": rank}}.items():
        if name == "causal" or world > 1:
            said = complaint(lambda wrong=wrong: ca.parallel.attention(q, k, v, method=REFINED, **wrong))
            yield Check(f"{name}: refused by a sentence", float("; try" not in said), 0.0)
    few = slice(0, min(5, q.shape[2]))
    asked = ca.parallel.few_exactly(q[:, :, few], k, v)[0]
    whole = tensors()[:3]
    mine = whole[0][:, :, share_of(rank, world)][:, :, few]
    yield Check("few_exactly", off(asked, ca.attention(mine, *whole[1:], method="exact")), ROUNDING)


def complaint(call: Callable[[], Any]) -> str:
    try:
        call()
    except (ValueError, TypeError) as error:
        return str(error)
    return ""


def modules(rank: int, world: int) -> Iterator[Check]:
    """An encoder learns, and a model of transformers answers, over the ranks as in one process."""
    x = torch.randn(B, N, 32, generator=torch.Generator().manual_seed(3)).double().to(DEVICE)
    mine, found = share_of(rank, world), []
    for at, group in ((mine, dist.group.WORLD), (slice(None), None)):
        torch.manual_seed(0)
        module = ca.nn.Encoder(32, 2, 2, REFINED, dropout=0.0, parallel=group).double().to(DEVICE)
        out = module(x[:, at])
        out.square().sum().backward()
        gradient = torch.cat([each.grad.flatten() for each in module.parameters() if each.grad is not None])
        found.append((out.detach(), gradient))
    (ours, gradient), (alone, wanted) = found
    dist.all_reduce(gradient)
    yield Check("an encoder's answer, float64", off(ours, alone[:, mine]), ROUNDING)
    yield Check("an encoder's gradients, float64", off(gradient, wanted), ROUNDING)
    model, ids = bert(N).double(), words(N)
    places = torch.arange(N, device=DEVICE).expand(B, -1)
    hidden = []
    for at, group in ((mine, dist.group.WORLD), (slice(None), None)):
        ca.hf.swap(model, REFINED, parallel=group)
        with torch.no_grad():
            hidden.append(model(input_ids=ids[:, at], position_ids=places[:, at]).last_hidden_state)
    yield Check("hf.swap(parallel=...), float64", off(hidden[0], hidden[1][:, mine]), ROUNDING)


def on_a_rank(rank: int, world: int, backend: str, folder: str) -> None:
    torch.set_num_threads(1)
    found: Any
    try:
        if backend == "nccl":
            torch.cuda.set_device(0)
        dist.init_process_group(
            backend, init_method=f"file://{folder}/meet", rank=rank, world_size=world,
            timeout=timedelta(seconds=LIMIT),
        )  # fmt: skip
        asked = [as_one_process, traffic, protocol, *([modules] if world == 2 else [])]
        found = [tuple(check) for each in asked for check in each(rank, world)]
        dist.barrier()
        dist.destroy_process_group()
    except Exception:
        found = traceback.format_exc()
    torch.save(found, Path(folder) / f"{rank}.pt")
    if isinstance(found, str):
        os._exit(1)  # a broken group is not taken down in order


def over_ranks(backend: str, world: int) -> Iterator[Check]:
    """Of each check the worst that a rank saw."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=on_a_rank, args=(rank, world, backend, folder)) for rank in range(world)]
        for each in processes:
            each.start()
        for each in processes:
            each.join(3 * LIMIT)
            if each.is_alive():
                each.kill()
        places = [Path(folder) / f"{rank}.pt" for rank in range(world)]
        found = [torch.load(place) if place.exists() else "it died" for place in places]
    about = f"{backend}, {world} {'rank' if world == 1 else 'ranks'}"
    for rank, each in enumerate(found):
        if isinstance(each, str):
            print(f"rank {rank}: {each}")
            yield Check(f"{about}: rank {rank} failed", 1.0, 0.0)
    lists = [each for each in found if not isinstance(each, str)]
    worst: dict[str, Check] = {}
    for check in (Check(*each) for one in lists for each in one):
        if check.name not in worst or check.value > worst[check.name].value:
            worst[check.name] = check
    for check in worst.values():
        yield check._replace(name=f"{about}: {check.name}")


# ---------------------------------------------------------------------------------------------------- documents


def documents(word: str) -> Iterator[Check]:
    """Packed sequences by the kernels, against a loop over the documents by the kernels."""
    total = sum(DOCUMENTS)
    sizes = {"clusters": 6, "top": 8, "start": "far", "steps": 2}
    data = mixture(1, HEADS, total, DIM, centres=6, spread=0.2)
    whole = [x[0].transpose(0, 1).double().to(DEVICE) for x in (data.q, data.k[:, :KEY_HEADS], data.v[:, :KEY_HEADS])]
    starts = torch.tensor([0, *DOCUMENTS]).cumsum(0).int().to(DEVICE)
    asked: list[tuple[Any, bool]] = [
        (ca.Refined(parts=6, slope=True, **sizes), False),
        (ca.Refined(parts=1, slope=False, **sizes), True),
        (ca.Smyrf(rounds=2, q_seats=16, k_seats=16), False),
        (ca.Exact(), True),
    ]

    def found(method: ca.Method, causal: bool, dtype: torch.dtype, packed: bool, backend: str) -> list[Tensor]:
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in whole]
        options: dict[str, Any] = {"method": method, "causal": causal, "backend": backend}
        if packed:
            out = ca.varlen_attention(*leaves, starts, **options)
        else:
            rows = zip(*(x.split(DOCUMENTS) for x in leaves), strict=True)
            each = [ca.attention(*(x.transpose(0, 1).unsqueeze(0) for x in row), **options) for row in rows]
            out = torch.cat([x[0].transpose(0, 1) for x in each])
        out.sin().sum().backward()
        return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]

    for method, causal in asked if word in "varlen" else ():
        name = f"varlen, {type(method).__name__.lower()}{', causal' if causal else ''}"
        backend = "auto" if isinstance(method, ca.Exact) else "triton"
        ours, loop = (found(method, causal, torch.float32, packed, backend) for packed in (True, False))
        yield Check(f"{name}, float32", max(map(off, ours, loop)), FP32)
        if GPU:  # interpreted, bf16 says nothing about a GPU
            truth = found(method, causal, torch.float64, False, "reference")
            ours, loop = (found(method, causal, torch.bfloat16, packed, backend) for packed in (True, False))
            yield Check(f"{name}, bfloat16, of what is allowed", as_good(ours, loop, truth, (2, 3, 3, 3)), 1.0)


# ---------------------------------------------------------------------------------------------------- models


def bert(most: int) -> Any:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 4 * DIM, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    return BertModel(BertConfig(vocab_size=64, max_position_embeddings=most, **sizes)).eval().to(DEVICE)


def words(n: int) -> Tensor:
    return torch.randint(4, 64, (B, n), generator=torch.Generator().manual_seed(4)).to(DEVICE)


def swapped(
    name: str, swap: Callable[..., Any], restore: Callable[..., Any], model: Any, ask: Callable[[], Tensor]
) -> Iterator[Check]:
    """A model answers as before with exact attention, by the kernels with as many clusters as tokens, nearly so with
    Refined, and to the bit as before when the swap is undone."""
    with torch.no_grad():
        before = ask()
        swap(model, "exact")
        yield Check(f"{name}, exact", off(ask(), before), PLUMBING)
        report = swap(model, ca.Refined(clusters=2 * N, top=8, parts=1, slope=False))
        yield Check(f"{name}, a cluster for each token", off(ask(), before), 100 * PLUMBING)
        report = swap(model, REFINED)
        yield Check(f"{name}, no layer swapped, of {len(report.rows)}", float(not report.swapped), 0.0)
        yield Check(f"{name}, refined", off(ask(), before), 0.5)
    ask().square().sum().backward()
    bad = sum(not weight.grad.isfinite().all() for weight in model.parameters() if weight.grad is not None)
    yield Check(f"{name}, gradients that are not finite", float(bad), 0.0)
    restore(model)
    with torch.no_grad():
        yield Check(f"{name}, restored, not to the bit", float(not torch.equal(ask(), before)), 0.0)


def models(word: str) -> Iterator[Check]:
    x = torch.randn(B, N, 4 * DIM, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    torch.manual_seed(0)
    options: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "device": DEVICE}
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4 * DIM, 4, 64, **options), 2).eval()
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(4 * DIM, 4, 64, **options), 1).eval()
    padded = (torch.arange(N, device=DEVICE) >= N - 7).expand(B, -1)
    both = (ca.nn.swap, ca.nn.restore)
    if word in "nn.swap":
        yield from swapped("nn.swap, encoder", *both, encoder, lambda: encoder(x, src_key_padding_mask=padded)[:, :-7])
        yield from swapped("nn.swap, decoder", *both, decoder, lambda: decoder(x[:, : N // 2], x))
    if word not in "hf.swap":
        return
    model, ids = bert(N), words(N)
    mask = (~padded).long()
    yield from swapped(
        "hf.swap", ca.hf.swap, ca.hf.restore, model,
        lambda: model(input_ids=ids, attention_mask=mask).last_hidden_state[:, :-7],
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------- everything


def checks(word: str) -> Iterator[Check]:
    yield from documents(word)
    yield from models(word)
    for backend, world in WORLDS:
        if word in f"{backend} {world} ranks":
            yield from over_ranks(backend, world)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", default="", metavar="WORD", help="varlen, nn.swap, hf.swap, nccl, gloo, '2 ranks', ..."
    )
    word, started, missed = parser.parse_args().only, time.monotonic(), 0
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if GPU else 'no GPU: a rehearsal'}")
    for check in checks(word):
        missed += not check.value <= check.bar  # NaN is a failure
        print(f"{time.monotonic() - started:5.1f} s  {check}", flush=True)
    print(f"{missed} failed" if missed else "all passed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
