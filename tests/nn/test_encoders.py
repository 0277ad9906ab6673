"""Encoders, ClusterFormer's among them: torch's layer where the method is Exact, checkpoints, compilers, learning."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from laws import close, same_bits
from small_layers import DIM, HEADS, SMALL, B, N, grads, padding, tokens
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import clusterattn as ca
from clusterattn.nn import ClusterFormerEncoder, Encoder, EncoderLayer, MultiheadAttention


@pytest.fixture(autouse=True)
def fixed_weights() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()


@pytest.mark.parametrize("method", SMALL.values(), ids=str)
def test_activation_checkpointing_changes_nothing(method: ca.Method) -> None:
    plain = Encoder(DIM, HEADS, 2, method, dropout=0.1)
    again = copy.deepcopy(plain)
    kept = ~padding()

    def step(encoder: Encoder, x: Tensor, recompute: bool) -> dict[str, Tensor]:
        torch.manual_seed(3)  # dropout
        for layer in encoder.layers:
            x = checkpoint(layer, x, kept, use_reentrant=False) if recompute else layer(x, kept)
        loss = encoder.norm(x).sin().sum()
        if encoder.auxiliary_loss is not None:
            loss = loss + encoder.auxiliary_loss
        return grads(loss, encoder)

    for seed in (1, 2, 3):  # Routing moves between steps
        wanted, got = step(plain, tokens(seed), False), step(again, tokens(seed), True)
        assert wanted.keys() == got.keys()
        for name in wanted:
            same_bits(got[name], wanted[name])
        for name, buffer in plain.state_dict().items():
            same_bits(again.state_dict()[name], buffer)


@pytest.mark.parametrize("kind", ["encoder", "clusterformer"])
def test_encoders_compile_to_one_graph(kind: str) -> None:
    mixed = Encoder(DIM, HEADS, 2, [SMALL["refined"], SMALL["routing"]], dropout=0.0)
    encoder: nn.Module = mixed if kind == "encoder" else clusterformer()
    twin, kept = copy.deepcopy(encoder), ~padding()
    compiled = torch.compile(encoder, fullgraph=True, backend="eager")
    for seed in (1, 2, 3):
        close(compiled(tokens(seed), kept), twin(tokens(seed), kept))
    close(list(encoder.buffers()), list(twin.buffers()))
    if encoder is mixed:
        close(mixed.auxiliary_loss, twin.auxiliary_loss)
        close(compiled.eval()(tokens(), kept), twin.eval()(tokens(), kept))


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_a_layer_is_torchs_layer(norm_first: bool, activation: str) -> None:
    same: dict[str, Any] = {"dropout": 0.0, "activation": activation, "norm_first": norm_first}
    theirs = nn.TransformerEncoderLayer(DIM, HEADS, 24, batch_first=True, **same)
    ours = EncoderLayer(DIM, HEADS, "exact", feedforward=24, **same)
    ours.attention = MultiheadAttention.from_torch(theirs.self_attn, "exact")
    for name in ("linear1", "linear2", "norm1", "norm2"):
        getattr(ours, name).load_state_dict(getattr(theirs, name).state_dict())
    x, pad = tokens(), padding()
    close(ours(x, ~pad)[~pad], theirs(x, src_key_padding_mask=pad)[~pad])


def test_a_method_for_each_layer() -> None:
    encoder = Encoder(DIM, HEADS, 2, ["smyrf:rounds=2", ca.Local(window=3)], activation=torch.tanh)
    found = [layer.attention for layer in encoder.layers]
    assert [each.method for each in found] == [ca.Smyrf(rounds=2), ca.Local(window=3)]
    assert [each.seed for each in found] == [0, 1]
    assert encoder(tokens(), ~padding()).shape == (B, N, DIM)
    assert isinstance(encoder.norm, nn.LayerNorm)
    assert isinstance(Encoder(DIM, HEADS, 1, norm_first=False).norm, nn.Identity)
    assert "method=local:window=3" in repr(encoder)


def learn(encoder: nn.Module, answer: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> list[float]:
    """Which of four symbols is the most frequent in the sequence? The losses of the task on the way."""
    embed, head = nn.Embedding(4, DIM), nn.Linear(DIM, 4)
    optimizer = torch.optim.AdamW([*encoder.parameters(), *embed.parameters(), *head.parameters()], lr=5e-3)
    task_losses = []
    for _ in range(40):
        favourite, noise = torch.randint(4, (32, 1)), torch.randint(4, (32, 24))
        symbols = torch.where(torch.rand(32, 24) < 0.5, favourite, noise)
        kept = torch.rand(32, 24) < 0.9
        kept[:, 0] = True  # the answer is read there
        out, extra = answer(embed(symbols), kept)
        task = F.cross_entropy(head(out[:, 0]), favourite.squeeze(1))
        task_losses.append(task.item())
        optimizer.zero_grad()
        (task + extra).backward()
        optimizer.step()
    return task_losses


@pytest.mark.parametrize("method", [SMALL["refined"], SMALL["smyrf"], ca.Routing(clusters=2, window=16)])
def test_a_small_task_is_learned(method: ca.Method) -> None:
    encoder = Encoder(DIM, HEADS, 1, method, dropout=0.0)

    def answer(x: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        out, loss = encoder(x, kept), encoder.auxiliary_loss
        return out, x.new_zeros(()) if loss is None else 1e-4 * loss

    losses = learn(encoder, answer)
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])


def clusterformer(**options: Any) -> ClusterFormerEncoder:
    return ClusterFormerEncoder(DIM, HEADS, 2, 4, **{"dropout": 0.0, **options})


def test_clusterformer_is_its_layers_in_a_row() -> None:
    encoder, x, pad = clusterformer(), tokens(), padding()
    out, losses = encoder(x, ~pad)
    elsewhere = encoder(torch.where(pad.unsqueeze(-1), 100.0, x), ~pad)  # padding changes nothing
    same_bits((elsewhere[0][~pad], *elsewhere[1]), (out[~pad], *losses))
    state = ca.ClusterFormerState(encoder.centroids)
    clustering, sorting = [], []
    for layer in encoder.layers:
        y = layer.norm1(x)
        projected = (getattr(layer.attention, f"{which}_proj")(y) for which in "qkv")
        q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in projected)
        answer, state = ca.attention(
            q,
            k,
            v,
            method=ca.ClusterFormer(clusters=4),
            key_mask=~pad,
            query_mask=~pad,
            points=layer.cluster_proj(y),
            state=state,
            return_state=True,
        )
        x = x + layer.attention.out_proj(answer.transpose(1, 2).flatten(2))
        x = x + layer.linear2(F.gelu(layer.linear1(layer.norm2(x))))
        clustering.append(state.clustering_loss)
        sorting.append(state.sorting_loss)
    close(out, encoder.norm(x))
    close(losses[:2], (sum(clustering) / 2, sum(sorting) / 2))


def test_only_the_joint_losses_train_the_centroids() -> None:
    for mu, nu, trained in ((0.0, 0.0, False), (0.1, 0.0, True), (0.0, 0.1, True)):
        encoder = clusterformer(mu=mu, nu=nu, trains="map")
        out, losses = encoder(tokens())
        found = grads(encoder.joint_loss(out.sin().sum(), losses), encoder)
        assert ("centroids" in found) == ("layers.0.cluster_proj.weight" in found) == trained
        assert "layers.0.attention.q_proj.weight" in found


@pytest.mark.parametrize(("similarity", "weight"), [("inner", 0.01), ("cosine", 0.1)])
def test_the_clustering_loss_falls_and_the_centroids_move(similarity: str, weight: float) -> None:
    encoder = clusterformer(mu=weight, nu=weight, similarity=similarity, trains="all")
    first = encoder.centroids.detach().clone()
    clustering = []

    def answer(x: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        out, losses = encoder(x, kept)
        clustering.append(losses.clustering.item())
        return out, encoder.joint_loss(x.new_zeros(()), losses)

    task = learn(encoder, answer)
    assert sum(task[-5:]) < 0.7 * sum(task[:5])
    assert sum(clustering[-5:]) < sum(clustering[:5])
    assert float((encoder.centroids.detach() - first).abs().max()) > 0.01
