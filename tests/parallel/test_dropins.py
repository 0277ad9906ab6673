"""Modules and models whose sequence two ranks hold together answer, and learn, as they do on one device."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run
from torch import Tensor, nn

import clusterattn as ca

METHOD = ca.Refined(clusters=7, top=5, parts=4, slope=True, steps=2, start="random", sample=30)
LENGTH = 90
SHARES = {"even": [45, 45], "uneven": [60, 30]}
TEXT = ([5, 3], [40, 32])  # of two streams, what each rank holds


def share_of(rank: int, sizes: list[int]) -> slice:
    return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))


def complaint(call: Any) -> str:
    try:
        call()
    except (ValueError, TypeError) as error:
        return str(error)
    return "no complaint"


# ---------------------------------------------------------------------------------------------------- streams and rows


def qkv(n: int = 80) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(2, 2, n, 6, generator=draw, dtype=torch.float64) for _ in range(3)]


def two_streams(rank: int) -> list[Tensor]:
    """The first stream of all ranks comes before the second of all ranks."""
    text, image = TEXT
    at = torch.arange(80)
    mine = torch.cat([at[: sum(text)][share_of(rank, text)], at[sum(text) :][share_of(rank, image)]])
    q, k, v = (x[:, :, mine].clone().requires_grad_() for x in qkv())
    sizes = [text[rank], image[rank]]
    out = ca.parallel.attention(q, k, v, method=METHOD, query_streams=sizes, key_streams=sizes)
    out.sin().sum().backward()
    return [mine, out.detach(), q.grad, k.grad, v.grad]


def exact_rows(rank: int, shares: list[int], keys: list[int]) -> list[Tensor]:
    at, theirs = share_of(rank, shares), share_of(rank, keys)
    q, k, v = qkv()
    q = q[:, :, at].clone().requires_grad_()
    k, v = (x[:, :, theirs].clone().requires_grad_() for x in (k, v))
    mask = (torch.arange(80) % 7 > 0).expand(2, 80)[:, theirs]
    out, lse = ca.parallel.few_exactly(q, k, v, key_mask=mask)
    (out.sin().sum() + lse.sum()).backward()
    return [out.detach(), lse.detach(), q.grad, k.grad, v.grad]


ROWS = {"few": ([3, 4], [50, 30]), "one rank asks": ([6, 0], [50, 30]), "one rank holds": ([2, 2], [80, 0])}


# ---------------------------------------------------------------------------------------------------- modules


def encoder() -> nn.Module:
    torch.manual_seed(0)
    return ca.nn.Encoder(16, 2, 2, METHOD, dropout=0.0).double()


def torchs() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double()


def tokens() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(2, LENGTH, 16, generator=draw, dtype=torch.float64)
    return x, (torch.arange(LENGTH) < torch.tensor([[LENGTH], [70]]))


def learned(module: nn.Module, x: Tensor, **masks: Any) -> dict[str, Tensor]:
    """The answer and the gradients of the weights."""
    out = module(x, **masks)
    out.square().sum().backward()
    found = {name: weight.grad for name, weight in module.named_parameters() if weight.grad is not None}
    return {"out": out.detach(), **found}


def with_parallel(module: nn.Module, group: Any) -> nn.Module:
    for each in module.modules():
        if isinstance(each, ca.nn.MultiheadAttention):
            each.parallel = group
    return module


# ---------------------------------------------------------------------------------------------------- a model


def bert() -> nn.Module:
    import tiny_models as tiny

    return tiny.bert().double()


def words() -> dict[str, Tensor]:
    ids = torch.randint(4, 60, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [70]])).long()
    return {"input_ids": ids, "attention_mask": mask, "position_ids": torch.arange(LENGTH).expand(2, -1)}


def hidden(model: nn.Module, given: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(**given).last_hidden_state
    return out


# ---------------------------------------------------------------------------------------------------- training


def trained(rank: int | None, steps: int = 3) -> dict[str, Tensor]:
    """A few steps of SGD under Accelerate, which averages gradients over the ranks. Every rank is given the same
    batches and takes its share of the tokens; its loss is the mean over its own tokens."""
    from accelerate import Accelerator

    if rank is not None:  # as `accelerate launch` and torchrun tell it
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="0"
        )
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == (1 if rank is None else 2)
    module = encoder()
    if rank is not None:
        with_parallel(module, dist.new_group())
    model, optimizer = accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    x, _ = tokens()
    at = slice(None) if rank is None else share_of(rank, SHARES["even"])
    for step in range(steps):
        loss = (model(x[:, at]) - x.roll(step, 2)[:, at]).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return {name: weight.detach() for name, weight in accelerator.unwrap_model(model).named_parameters()}


# ---------------------------------------------------------------------------------------------------- two ranks


def everything(rank: int, world: int) -> dict[str, Any]:
    """All that two ranks are asked, in one go: starting processes takes seconds."""
    found: dict[str, Any] = {"streams": two_streams(rank)}
    found |= {f"rows, {name}": exact_rows(rank, *given) for name, given in ROWS.items()}
    mesh = dist.device_mesh.init_device_mesh("cpu", (world,))
    x, real = tokens()
    for name, sizes in SHARES.items():
        at = share_of(rank, sizes)
        torch.manual_seed(0)
        ours = ca.nn.Encoder(16, 2, 2, METHOD, dropout=0.0, parallel=mesh).double()
        found[f"encoder, {name}"] = learned(ours, x[:, at], key_mask=real[:, at])
    at = share_of(rank, SHARES["uneven"])
    module = torchs()
    ca.nn.swap(module, METHOD, parallel=mesh)
    found["swapped"] = learned(module, x[:, at], src_key_padding_mask=~real[:, at])
    attention = ca.nn.MultiheadAttention(16, 2, "auto", parallel=mesh).double()
    y = x[:, at]
    found["auto"] = attention(y, y, y)[0].shape
    found["weights"] = complaint(lambda: attention(y, y, y, need_weights=True))
    found["causal"] = complaint(lambda: attention(y, y, y, is_causal=True))
    found["mask"] = complaint(lambda: attention(y, y, y, attn_mask=torch.zeros(at.stop - at.start, at.stop - at.start)))
    found["streams, wrong"] = complaint(lambda: ca.parallel.attention(*qkv(), method=METHOD, key_streams=[1, 2]))
    model, given = bert(), words()
    ca.hf.swap(model, METHOD, parallel=mesh, seed=3)
    found["model"] = hidden(model, {name: value[:, at] for name, value in given.items()})
    found["output_attentions"] = complaint(lambda: model(input_ids=given["input_ids"][:, at], output_attentions=True))
    ca.hf.restore(model)
    found["alone again"] = hidden(model, given)
    found["trained"] = trained(rank)
    return found


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="needs accelerate")
    return run(everything, 2)


def close(one: Tensor, other: Tensor, tolerance: float = 1e-9) -> None:
    assert one.shape == other.shape
    assert torch.where(one == other, 0.0, (one - other).abs()).max() <= tolerance * max(1.0, other.abs().max().item())


def test_two_streams_follow_one_another_as_on_one_device(two: list[dict[str, Any]]) -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    out = ca.attention(q, k, v, method=METHOD)
    out.sin().sum().backward()
    for found in two:
        at, *parts = found["streams"]
        for mine, whole in zip(parts, (out.detach(), q.grad, k.grad, v.grad), strict=True):
            close(mine, whole[:, :, at])


@pytest.mark.parametrize("name", ROWS)
def test_a_few_rows_are_answered_exactly(name: str, two: list[dict[str, Any]]) -> None:
    shares, _ = ROWS[name]
    q, k, v = qkv()
    q = q[:, :, : sum(shares)].clone()
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    mask = (torch.arange(80) % 7 > 0).expand(2, 80)
    out, lse = ca.attention(*leaves, method="exact", key_mask=mask, return_lse=True)
    (out.sin().sum() + lse.sum()).backward()
    wanted = [out.detach(), lse.detach(), *(x.grad for x in leaves)]
    for part, one in enumerate(wanted):
        close(torch.cat([found[f"rows, {name}"][part] for found in two], 2), one)


def whole_and_sum(found: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Answers side by side; gradients of shared weights added up."""
    return {
        name: torch.cat([each[name] for each in found], 1) if name == "out" else sum(each[name] for each in found)
        for name in found[0]
    }  # type: ignore[misc]


@pytest.mark.parametrize("name", SHARES)
def test_an_encoder_answers_and_learns_as_one(name: str, two: list[dict[str, Any]]) -> None:
    x, real = tokens()
    wanted = learned(encoder(), x, key_mask=real)
    found = whole_and_sum([each[f"encoder, {name}"] for each in two])
    assert set(found) == set(wanted)
    for part, one in wanted.items():
        close(found[part], one, 1e-8)


def test_torchs_encoder_swapped(two: list[dict[str, Any]]) -> None:
    x, real = tokens()
    alone = torchs()
    ca.nn.swap(alone, METHOD)
    wanted, found = learned(alone, x, src_key_padding_mask=~real), whole_and_sum([each["swapped"] for each in two])
    for part, one in wanted.items():
        close(found[part], one, 1e-8)


def test_a_transformers_model(two: list[dict[str, Any]]) -> None:
    model, given = bert(), words()
    plain = hidden(model, given)
    ca.hf.swap(model, METHOD, seed=3)
    close(torch.cat([found["model"] for found in two], 1), hidden(model, given))
    for found in two:
        close(found["alone again"], plain)


def test_training_under_accelerate(two: list[dict[str, Any]]) -> None:
    wanted, start = trained(None), dict(encoder().named_parameters())
    for found in two:
        for name, weight in wanted.items():
            close(found["trained"][name], weight, 1e-8)
    assert any(not torch.allclose(weight, start[name]) for name, weight in wanted.items())


def test_auto_is_refined_over_ranks(two: list[dict[str, Any]]) -> None:
    assert [found["auto"] for found in two] == [(2, 60, 16), (2, 30, 16)]


def test_what_cannot_be_shared_is_refused(two: list[dict[str, Any]]) -> None:
    for found in two:
        assert "over many ranks" in found["weights"]
        assert "need_weights=True" in found["weights"]
        assert "causal=False" in found["causal"]
        assert "attn_mask" in found["mask"]
        assert "add up to the share's 80 tokens" in found["streams, wrong"]
        assert "output_attentions" in found["output_attentions"]


def test_models_that_would_see_their_share_alone_are_refused() -> None:
    pytest.importorskip("transformers")
    import tiny_models as tiny

    group = object()
    with pytest.raises(ValueError, match="exact_below=0 over many ranks"):
        ca.nn.MultiheadAttention(16, 2, METHOD, exact_below=5, parallel=group)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="it is causal, which is not made yet over many ranks"):
        ca.hf.swap(tiny.llama(), ca.Refined(parts=1, slope=False), parallel=group)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"layer.0.*no method of the clustered family"):
        ca.hf.swap(tiny.bert(), "exact", parallel=group)  # type: ignore[arg-type]
    plan = ca.Plan({"encoder.layer.0.attention.self": METHOD})
    with pytest.raises(ValueError, match=r"layer.1.*no method of the clustered family"):
        ca.hf.swap(tiny.bert(), plan, parallel=group)  # type: ignore[arg-type]
    model = copy.deepcopy(torchs())
    with pytest.raises(ValueError, match="layers that can all attend over many ranks"):
        ca.nn.swap(model, ca.Plan({"layers.0.self_attn": METHOD}), parallel=group)  # type: ignore[arg-type]
