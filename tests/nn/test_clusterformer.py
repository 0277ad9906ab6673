"""ClusterFormer's readings: the scope of a grouping, its losses, a signal from the task, and what shows a collapse."""

from __future__ import annotations

import dataclasses
import warnings
import weakref
from typing import Any

import laws
import pytest
import torch
from laws import close, draw, padded, same_bits
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import clusterattn as ca
from clusterattn._checks import checked_call, with_extras
from clusterattn.nn import (
    ClusterFormerEncoder,
    Decoder,
    Encoder,
    EncoderLayer,
    Grouping,
    MultiheadAttention,
    warn_if_collapsed,
    watched,
)
from clusterattn.nn.watch import COLLAPSED, STEADY

DIM, HEADS, N = 12, 3, 20
FIRST = {"scope": "shared", "trains": "all"}  # the first reading of this project


def tokens(seed: int = 0, b: int = 2) -> Tensor:
    return torch.randn(b, N, DIM, generator=torch.Generator().manual_seed(seed))


def encoder(layers: int = 2, clusters: int = 4, **options: Any) -> ClusterFormerEncoder:
    torch.manual_seed(3)
    return ClusterFormerEncoder(DIM, HEADS, layers, clusters, **{"dropout": 0.0, **options})


# ---- scope ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("similarity", ["inner", "cosine"])
@pytest.mark.parametrize("mask", ["all", *laws.PADDINGS])
def test_with_scope_head_every_head_is_a_shared_grouping_of_its_own(mask: str, similarity: str) -> None:
    x = draw(n=22, m=22)
    x = x if mask == "all" else padded(x, mask)
    g = torch.Generator().manual_seed(8)
    points = torch.randn(2, 22, 12, generator=g, dtype=torch.float64).requires_grad_()
    start = torch.randn(5, 12, generator=g, dtype=torch.float64).requires_grad_()
    method = ca.ClusterFormer(clusters=5, similarity=similarity, balance=1.0, trains="all")
    shared = dataclasses.replace(method, scope="shared")
    out, state = x.attend(method, points=points, state=start, return_state=True)
    names = ("clustering_loss", "sorting_loss", "balance_loss")
    losses: dict[str, list[Tensor]] = {name: [] for name in names}
    for head in range(4):
        mine = {"points": points[..., 3 * head : 3 * head + 3], "state": start[:, 3 * head : 3 * head + 3]}
        alone, own = x.attend(shared, **mine, return_state=True)
        close(out[:, head], alone[:, head])
        close(state.centroids[..., 3 * head : 3 * head + 3], own.centroids)
        assert torch.equal(state.labels[:, head], own.labels[:, 0])
        for name in names:
            losses[name].append(getattr(own, name))
    for name in names:
        together, apart = getattr(state, name), torch.stack(losses[name]).mean()
        close(together, apart)
        close(*(torch.autograd.grad(loss, (points, start), retain_graph=True) for loss in (together, apart)))


def test_points_that_cannot_be_cut_into_heads_are_refused() -> None:
    x = draw(n=22, m=22)
    with pytest.raises(ValueError, match=r"cut into 4 heads.*shared"):
        x.attend(ca.ClusterFormer(clusters=3), points=torch.zeros(2, 22, 7, dtype=torch.float64))


def test_padded_points_change_nothing_whatever_they_hold() -> None:
    x = padded(draw(n=22, m=22), "right")
    points = torch.randn(2, 22, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    bad = torch.where(x.key_mask.unsqueeze(-1), points, float("nan"))
    method, start = ca.ClusterFormer(clusters=3), torch.eye(3, 12, dtype=torch.float64)
    one, other = (x.attend(method, points=each, state=start, return_state=True) for each in (points, bad))
    for name in ("centroids", "clustering_loss", "sorting_loss"):
        same_bits(getattr(one[1], name), getattr(other[1], name))
    same_bits(one[0], other[0])


# ---- nothing of a method's settings is dropped ------------------------------------------------------------------

OTHER = {
    "clusters": 3, "blocks": 3, "scope": "shared", "similarity": "inner", "sharpness": 5.0, "assign": "similarity",
    "ties": "turns", "compare": "given", "spread": True, "trains": "all", "affinity": 2.0, "straight": True,
    "mu": 0.3, "nu": 0.0, "balance": 0.2, "fade": 7, "pass_on": False,
}  # fmt: skip


def test_all_settings_are_tried() -> None:
    assert OTHER.keys() == {field.name for field in dataclasses.fields(ca.ClusterFormer)}
    plain = ca.ClusterFormer()
    assert all(getattr(plain, name) != value for name, value in OTHER.items())


def test_modules_keep_every_setting() -> None:
    method = ca.ClusterFormer(**OTHER)
    decoder = Decoder(DIM, HEADS, 2, method)
    assert decoder.clustering == method
    assert all(layer.attention.method == method for layer in decoder.layers)
    assert all(layer.attention.method == method for layer in encoder(**OTHER).layers)
    assert ca.method(str(method)) == method  # and the command line's words for it say them all


ASKED = {name: OTHER[name] for name in ("compare", "trains", "mu", "balance", "fade", "pass_on")}


@pytest.mark.parametrize("name", ASKED)
def test_settings_of_the_state_are_refused_where_nobody_keeps_one(name: str) -> None:
    method = ca.ClusterFormer(**{name: ASKED[name]})
    x = tokens()
    for given in (
        lambda: Encoder(DIM, HEADS, 1, method),
        lambda: EncoderLayer(DIM, HEADS, str(method)),
        lambda: MultiheadAttention(DIM, HEADS, method)(x, x, x),
        lambda: ca.nn.swap(torch.nn.TransformerEncoderLayer(DIM, HEADS, batch_first=True), method),
    ):
        with pytest.raises(
            ValueError, match=rf"without trained centroids and losses; got {name}=.*ClusterFormerEncoder"
        ):
            given()
    start = ca.ClusterFormerState(torch.randn(3, DIM))
    more = {"points": x, "state": start, "return_state": True}
    assert MultiheadAttention(DIM, HEADS, method).attend(x, x, x, **more)[2].labels is not None  # here it is kept


def test_the_other_settings_serve_everywhere() -> None:
    rest = {name: value for name, value in OTHER.items() if name not in ASKED and name != "nu"}
    method, x = ca.ClusterFormer(**rest, mu=0.0, nu=0.0), tokens()  # no losses are asked for, and none computed
    assert Encoder(DIM, HEADS, 1, method)(x).isfinite().all()
    assert len(ca.nn.swap(torch.nn.TransformerEncoderLayer(DIM, HEADS, batch_first=True), method).swapped) == 1


@pytest.mark.parametrize("name", ["scope", "similarity", "sharpness", "assign", "ties", "spread", "affinity", "blocks"])
def test_a_setting_changes_what_an_encoder_answers(name: str) -> None:
    x = tokens()
    assert not torch.allclose(encoder()(x)[0], encoder(**{name: OTHER[name]})(x)[0])


# ---- losses -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("trains", "reached"), [("all", 3), ("map", 2), ("centroids", 1)])
def test_trains_says_how_far_the_losses_reach(trains: str, reached: int) -> None:
    model = encoder(layers=1, trains=trains)
    x = tokens().requires_grad_()
    _, losses = model(x)
    wanted = (model.centroids, model.layers[0].cluster_proj.weight, x)
    total = losses.clustering + losses.sorting
    found = torch.autograd.grad(total, wanted, allow_unused=True)
    moved = [each is not None and bool(each.abs().sum() > 0) for each in found]
    assert moved == [True] * reached + [False] * (3 - reached)


def trained_inputs(padded: bool) -> tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Inputs of a call, and with a gradient its points and centroids; a mask that hides the end of one sequence."""
    g = torch.Generator().manual_seed(2)
    points = torch.randn(2, 22, 12, generator=g, dtype=torch.float64).requires_grad_()
    start = torch.randn(3, 12, generator=g, dtype=torch.float64).requires_grad_()
    mask = torch.arange(22) < torch.tensor([[22], [13]]) if padded else None
    return draw(n=22, m=22, h=4, hk=4), points, start, mask


@pytest.mark.parametrize(
    "settings", [{}, {"similarity": "inner"}, {"scope": "shared", "sharpness": 5.0}, {"spread": True}]
)
@pytest.mark.parametrize("padded", [False, True])
def test_centroids_have_one_gradient_whatever_else_is_trained(settings: dict[str, Any], padded: bool) -> None:
    """Trained alone, theirs is written out (shares are made anew in the backward); else it is autograd's."""
    x, points, start, mask = trained_inputs(padded)
    found = []
    for trains in ("centroids", "all"):
        method = ca.ClusterFormer(clusters=3, trains=trains, **settings)
        more = {"key_mask": mask, "query_mask": mask}
        _, state = x.attend(method, points=points, state=start, return_state=True, **more)
        total = state.clustering_loss + state.sorting_loss + state.centroids.sin().sum()
        found += torch.autograd.grad(total, start)
    close(*found)


@pytest.mark.parametrize(
    "settings",
    [{}, {"similarity": "inner"}, {"scope": "shared"}, {"assign": "similarity"}, {"spread": True, "ties": "turns"}],
)
@pytest.mark.parametrize("padded", [False, True])
def test_memberships_have_one_gradient_wherever_they_are_made(settings: dict[str, Any], padded: bool) -> None:
    """Made with the groups, their backward is written out; for groups that are given, and where the losses train all of
    the model, it is autograd's."""
    x, points, start, mask = trained_inputs(padded)
    found = []
    for trains in ("centroids", "all"):
        method = ca.ClusterFormer(clusters=3, trains=trains, affinity=3.0, sharpness=2.0, balance=1.0, **settings)
        more = {"points": points, "state": start, "key_mask": mask, "query_mask": mask}
        groups = x.groups(method, **more)
        for given in (None, groups):
            out, state = x.attend(method, **more, groups=given, return_state=True)
            task = torch.autograd.grad(out.sin().sum(), (points, start), retain_graph=True)
            found.append((out, *task, *torch.autograd.grad(state.balance_loss + state.clustering_loss, start)))
    for each in found[1:]:
        close(found[0], each)


@pytest.mark.parametrize("blocks", [1, 2, 4])
@pytest.mark.parametrize(("n", "clusters"), [(24, 4), (22, 4), (22, 9), (3, 5)])
@pytest.mark.parametrize("ties", ["forward", "turns"])
def test_a_mask_that_hides_nobody_changes_no_seat(n: int, clusters: int, blocks: int, ties: str) -> None:
    """Without a mask lengths are known beforehand, and tables are cut another way."""
    x = draw(n=n, m=n)
    method = ca.ClusterFormer(clusters=clusters, blocks=blocks, ties=ties)
    everyone = torch.ones(2, n, dtype=torch.bool)
    plain, masked = x.groups(method), x.groups(method, key_mask=everyone, query_mask=everyone)
    for one, other in ((plain.queries, masked.queries), (plain.keys, masked.keys)):
        for row, its in zip(one.flatten(0, 1), other.flatten(0, 1), strict=True):
            seats, wanted = ([sorted(each[each >= 0].tolist()) for each in table] for table in (row, its))
            assert [each for each in seats if each] == [each for each in wanted if each]


class Counted(TorchDispatchMode):
    """How many operators ran that are more than another view of the same numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not (op.is_view or "empty" in op.name() or op.name() in ("aten::_unsafe_view", "aten::detach"))
        return op(*args, **(kwargs or {}))


def test_a_grouping_takes_few_operators() -> None:
    """Each is a launch on a GPU, where small models wait for launches: it once took 258 of them."""
    x, size = draw(n=64, m=64, h=4, hk=4, dtype=torch.float32), 24
    points = torch.randn(2, 64, size, requires_grad=True)
    start = torch.randn(8, size, requires_grad=True)
    method = ca.ClusterFormer(clusters=8, affinity=8.0, sharpness=5.0, ties="turns", balance=0.1)
    call = checked_call(method, x.q, x.k, x.v, None, None, None, False, None, None, 0, "reference", points)
    call = dataclasses.replace(with_extras(call, method, x.q, x.k, None, 0.0, start, False, True), soon=True)
    with Counted() as counted:
        groups, state = method.group(x.q, x.k, call)
        loss = state.clustering_loss + state.sorting_loss + state.balance_loss
        (loss + groups.member.sin().sum() + state.centroids.sum()).backward()
    assert counted.count < 140


def test_losses_that_train_the_centroids_keep_no_more_than_the_points() -> None:
    n, dim = 400, 32  # 20 clusters: as many shares in each head as features
    x = draw(b=1, n=n, m=n, h=4, hk=4)
    points = torch.randn(1, n, dim, dtype=torch.float64)
    start = torch.randn(20, dim, dtype=torch.float64).requires_grad_()
    kept: dict[int, int] = {}

    def keep(saved: Tensor) -> Tensor:
        kept[saved.untyped_storage().data_ptr()] = saved.untyped_storage().nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        _, state = x.attend(ca.ClusterFormer(clusters=20), points=points, state=start, return_state=True)
    assert state.clustering_loss.requires_grad
    assert sum(kept.values()) < 1.6 * n * dim * points.element_size()  # and a few tensors of the centroids' size


class Held(TorchDispatchMode):
    """How many bytes of tensors that were made inside lived at once."""

    def __init__(self, *given: Tensor) -> None:
        super().__init__()
        self.before = {each.untyped_storage().data_ptr() for each in given}
        self.living: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = op(*args, **(kwargs or {}))
        for each in found if isinstance(found, (tuple, list)) else [found]:
            room = each.untyped_storage() if isinstance(each, Tensor) else None
            if room is not None and room.data_ptr() not in {*self.living, *self.before}:
                self.living[room.data_ptr()] = room.nbytes()
                weakref.finalize(room, self.living.pop, room.data_ptr(), None)
        self.most = max(self.most, sum(self.living.values()))
        return found


@pytest.mark.parametrize(("trains", "forward", "backward"), [("centroids", 4, 5), ("all", 7, 8)])
def test_losses_hold_few_tensors_of_the_size_of_the_shares_at_once(trains: str, forward: int, backward: int) -> None:
    n, c, heads = 512, 16, 4  # as many clusters as features of a head: shares are as large as the points
    x = draw(b=1, n=n, m=n, h=heads, hk=heads)
    points = torch.randn(1, n, heads * c, dtype=torch.float64, requires_grad=trains == "all")
    start = torch.randn(c, heads * c, dtype=torch.float64, requires_grad=True)
    method = ca.ClusterFormer(clusters=c, trains=trains)
    call = checked_call(method, x.q, x.k, x.v, None, None, None, False, None, None, 0, "reference", points)
    call = with_extras(call, method, x.q, x.k, None, 0.0, start, False, True)
    size = points.untyped_storage().nbytes()
    with Held(x.q, points, start) as held:
        _, state = method.group(x.q, x.k, call)
        assert held.most < forward * size
        (state.clustering_loss + state.sorting_loss + state.centroids.sum()).backward()
    assert held.most < backward * size


def test_without_gradients_no_losses_are_computed() -> None:
    x = draw(n=22, m=22)
    with torch.no_grad():
        _, state = x.attend(ca.ClusterFormer(clusters=3, balance=1.0), return_state=True)
        _, losses = encoder()(tokens())
    assert state.clustering_loss is state.sorting_loss is state.balance_loss is None
    assert all(float(each) == 0 for each in losses)


def test_a_loss_without_weight_is_not_computed() -> None:
    x = draw(n=22, m=22)
    _, state = x.attend(ca.ClusterFormer(clusters=3, mu=0.0), return_state=True)
    assert state.clustering_loss is None
    assert state.sorting_loss is not None


def test_losses_may_compare_with_the_given_centroids() -> None:
    x = draw(n=22, m=22)
    g = torch.Generator().manual_seed(2)
    points = torch.randn(2, 22, 12, generator=g, dtype=torch.float64)
    start = torch.randn(3, 12, generator=g, dtype=torch.float64).requires_grad_()
    method = ca.ClusterFormer(clusters=3, scope="shared", similarity="inner", compare="given", assign="similarity")
    _, state = x.attend(method, points=points, state=start, return_state=True)
    close(state.clustering_loss, -(points @ start.T).amax(-1).mean())
    close(state.sorting_loss, -(start * start.roll(1, 0)).sum(-1).mean())


def test_balance_is_zero_for_even_clusters_and_log_c_for_one() -> None:
    x = draw(n=22, m=22)
    method = ca.ClusterFormer(clusters=2, scope="shared", assign="similarity", sharpness=200.0, balance=1.0)
    start = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64)
    even = torch.cat([start[:1].expand(11, 2), start[1:].expand(11, 2)]).expand(2, 22, 2)
    for points, wanted in ((even, 0.0), (start[0].expand(2, 22, 2), torch.tensor(2.0).log().item())):
        _, state = x.attend(method, points=points, state=start, return_state=True)
        assert abs(float(state.balance_loss) - wanted) < 1e-6


def test_spread_points_tell_apart_what_differs_little() -> None:
    """An offset that all tokens share hides the rest from the cosine; spread points know nothing of it."""
    x = draw(n=22, m=22)
    points = torch.randn(2, 22, 12, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    start = torch.randn(3, 12, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    method = ca.ClusterFormer(clusters=3, spread=True)
    one, other = (x.attend(method, points=each, state=start) for each in (points, 1e-2 * points + 5.0))
    assert float((one - other).abs().max()) < 0.1 * float(one.abs().max())
    plain = dataclasses.replace(method, spread=False)
    one, other = (x.attend(plain, points=each, state=start) for each in (points, 1e-2 * points + 5.0))
    assert float((one - other).abs().max()) > 0.1 * float(one.abs().max())


def test_weights_fade() -> None:
    model = encoder(layers=1, fade=4, nu=0.0)
    added = []
    for _ in range(6):
        _, losses = model(tokens())
        added.append(float((model.joint_loss(torch.zeros(()), losses) / losses.clustering).detach()))
    close(torch.tensor(added), 0.1 * torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0, 0.0]))
    model.eval()
    model(tokens())
    assert float(model.updates) == 6  # evaluation is no update
    assert "updates" in model.state_dict()
    assert "updates" not in encoder().state_dict()


def test_layers_may_train_centroids_of_their_own() -> None:
    model = encoder(pass_on=False)
    assert model.centroids.shape == (2, 4, DIM)
    _, losses = model(tokens())
    (grad,) = torch.autograd.grad(losses.clustering + losses.sorting, model.centroids)
    assert all(float(each.abs().sum()) > 0 for each in grad)


# ---- a signal from the task -------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["head", "shared"])
def test_straight_changes_no_answer_and_trains_the_grouping(scope: str) -> None:
    plain, straight = (encoder(straight=each, scope=scope, trains="map", mu=0.0, nu=0.0) for each in (False, True))
    one, other = (model(tokens())[0] for model in (plain, straight))
    close(one, other)
    other.sin().sum().backward()
    assert float(straight.centroids.grad.abs().sum()) > 0
    assert float(straight.layers[0].cluster_proj.weight.grad.abs().sum()) > 0


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("scope", "hk", "clusters"), [("head", 4, 2), ("head", 2, 2), ("shared", 2, 2), ("head", 2, 260)]
)
def test_affinity_adds_the_product_of_memberships(scope: str, hk: int, clusters: int, causal: bool) -> None:
    """One block for all: exact attention whose logits have 3 A_i · A_j added."""
    x = draw(n=22, m=22, h=4, hk=hk)
    g = torch.Generator().manual_seed(6)
    points = torch.randn(2, 22, 12, generator=g, dtype=torch.float64)
    start = torch.randn(clusters, 12, generator=g, dtype=torch.float64)
    method = ca.ClusterFormer(clusters=clusters, blocks=clusters, scope=scope, similarity="inner", affinity=3.0)
    out, lse = x.attend(method, points=points, state=start, causal=causal, return_lse=True)
    parts = 4 if scope == "head" else 1
    cut, centroids = points.unflatten(-1, (parts, -1)).transpose(1, 2), start.unflatten(-1, (parts, -1)).transpose(0, 1)
    member = (centroids @ cut.mT).softmax(-1).log().softmax(2)  # U over tokens, then over centroids
    k, v = (each.repeat_interleave(4 // hk, 1) for each in (x.k, x.v))
    logits = x.q @ k.mT * x.q.shape[-1] ** -0.5 + 3 * member.mT @ member
    if causal:
        logits = logits.masked_fill(torch.ones(22, 22).triu(1).bool(), float("-inf"))
    close((out, lse), (logits.softmax(-1) @ v, logits.logsumexp(-1)))


@pytest.mark.parametrize(("trains", "reaches_tokens"), [("centroids", True), ("map", False), ("all", True)])
def test_affinity_trains_the_grouping_whatever_the_losses_train(trains: str, reaches_tokens: bool) -> None:
    model = encoder(layers=1, affinity=3.0, mu=0.0, nu=0.0, trains=trains)
    x = tokens().requires_grad_()
    points: list[Tensor] = []
    model.layers[0].cluster_proj.register_forward_hook(lambda module, given, found: points.append(found))
    out = model(x)[0]
    out.sin().sum().backward(inputs=[model.centroids, model.layers[0].cluster_proj.weight], retain_graph=True)
    assert float(model.centroids.grad.abs().sum()) > 0
    assert float(model.layers[0].cluster_proj.weight.grad.abs().sum()) > 0
    assert bool(torch.autograd.grad(points[0].sum(), x, allow_unused=True)[0] is not None) == reaches_tokens


# ---- diagnosis --------------------------------------------------------------------------------------------------


def test_watched_layers_tell_how_they_grouped() -> None:
    model, kept = encoder(), torch.arange(N) < torch.tensor([[N], [11]])
    with torch.no_grad(), watched(model) as seen:
        model(tokens(), kept)
    assert [each.layer for each in seen] == ["layers.0", "layers.1"]
    points = model.layers[0].cluster_proj(model.layers[0].norm1(tokens()))
    wanted = []
    for row, many in ((0, N), (1, 11)):
        for head in points[row, :many].unflatten(-1, (HEADS, -1)).unbind(1):
            unit = torch.nn.functional.normalize(head, dim=-1)
            wanted.append((unit @ unit.T)[~torch.eye(many, dtype=torch.bool)].mean())
    assert abs(seen[0].points - float(torch.stack(wanted).mean().detach())) < 1e-4
    assert 1 <= seen[0].used <= 4
    assert 0.25 <= seen[0].largest <= 1
    assert "cosine of points" in str(seen[0])
    before = len(seen)
    model(tokens())
    assert len(seen) == before  # outside of the block nobody watches


def test_decoders_are_watched_too() -> None:
    decoder = Decoder(DIM, HEADS, 1, "clusterformer:clusters=3", dropout=0.0)
    with watched(decoder) as seen:
        decoder(tokens(), tokens(1))
    assert [each.clusters for each in seen] == [3]


@pytest.mark.parametrize("settings", [{}, {"similarity": "inner"}, FIRST, {"pass_on": False}, {"spread": True}])
@pytest.mark.parametrize(("layers", "clusters"), [(1, 1), (1, 2), (3, 4)])
def test_a_fresh_model_has_not_collapsed(layers: int, clusters: int, settings: dict[str, Any]) -> None:
    """Its updated centroids may well be near: U is flat. What they differ by still sorts, and says where."""
    model = encoder(layers, clusters, **settings)
    with torch.no_grad(), watched(model) as seen, warnings.catch_warnings():
        warnings.simplefilter("error")
        model(tokens(), torch.arange(N) < torch.tensor([[N], [11]]))
        model(tokens(), torch.arange(N) < torch.tensor([[1], [0]]))  # a token alone, and none at all
        assert not warn_if_collapsed(seen)
    own = [at == 0 or not model.clustering.pass_on for at in range(layers)]
    assert [each.trained is not None for each in seen] == own * 2
    assert all(each.steady == 1 for each in seen)
    if settings == FIRST and layers > 1:
        assert seen[layers - 1].centroids > COLLAPSED


def test_a_collapse_is_warned_of() -> None:
    seen = [
        Grouping("layers.0", 4, 0.1, 0.99, 3.9, 0.3, 1.0, 0.2),
        Grouping("layers.1", 4, 0.98, 0.9, 3.1, 0.5, 1.0, None),
    ]
    with pytest.warns(UserWarning, match=r"1 of 2 ClusterFormer layers has collapsed.*layers\.1.*0\.98"):
        assert warn_if_collapsed(seen)


def watched_after(model: ClusterFormerEncoder, *, steps: int, lr: float) -> list[Grouping]:
    """What the watch sees of a model that its own losses have trained alone."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for step in range(steps):
        _, losses = model(tokens(step, b=8))
        optimizer.zero_grad()
        model.joint_loss(torch.zeros(()), losses).backward()
        optimizer.step()
    with torch.no_grad(), watched(model) as seen:
        model(tokens(99, b=8))
    return seen


@pytest.mark.parametrize("compare", ["updated", "given"])
def test_the_sorting_loss_alone_makes_one_vector_of_the_centroids_and_the_watch_sees_it(compare: str) -> None:
    model = encoder(mu=0.0, nu=1.0, compare=compare)
    seen = watched_after(model, steps=80, lr=2e-2)
    assert seen[0].points < 0.2
    assert seen[0].trained > COLLAPSED
    with pytest.warns(UserWarning, match="collapsed"):
        assert warn_if_collapsed(seen)


@pytest.mark.parametrize("similarity", ["cosine", "inner"])
def test_equal_centroids_tell_nothing_apart(similarity: str) -> None:
    model = encoder(layers=1, similarity=similarity)
    with torch.no_grad(), watched(model) as seen:
        model.centroids.copy_(model.centroids[:1].expand(4, -1))
        model(tokens())
        model.centroids.mul_(torch.tensor([[1.0], [2.0], [4.0], [8.0]]))  # which the inner product tells apart
        model(tokens())
    assert seen[0].steady < STEADY
    assert seen[0].trained > 0.999
    assert [each.collapsed for each in seen] == [True, similarity == "cosine"]


def test_centroids_that_many_layers_hand_on_end_in_rounding() -> None:
    """Flat shares bring them nearer at every layer; own ones for each layer, or sharper shares, stay apart."""
    gone, x = {}, torch.randn(2, 40, 48, generator=torch.Generator().manual_seed(0))
    for name, settings in (("handed on", {}), ("own", {"pass_on": False}), ("sharp", {"sharpness": 5.0})):
        torch.manual_seed(3)
        model = ClusterFormerEncoder(48, 4, 12, 6, dropout=0.0, scope="shared", **settings)
        with torch.no_grad(), watched(model) as seen:
            model(x)
        gone[name] = [each.layer for each in seen if each.collapsed]
    assert "layers.11" in gone["handed on"]
    assert "layers.2" not in gone["handed on"]
    assert gone["own"] == gone["sharp"] == []


def test_the_first_reading_collapses_and_the_watch_sees_it() -> None:
    """L1 and L2 with gradient to everything make one vector of all points; the default does not reach the tokens."""
    found = {}
    for name, settings in (("first", FIRST), ("default", {})):
        model = encoder(layers=1, mu=1.0, nu=1.0, **settings)
        found[name] = watched_after(model, steps=60, lr=1e-2)[0].points
    assert found["first"] > 0.5
    assert found["default"] < found["first"]


def test_training_reports_its_groupings_and_warns_once() -> None:
    from clusterattn_papers.tasks.copying import Copying
    from clusterattn_papers.train import Settings, fit

    task = Copying(7, examples=400, judged=16)
    torch.manual_seed(0)
    sizes = {"dim": 16, "heads": 2, "layers": 1, "feedforward": 32, "dropout": 0.0}
    model = task.model("clusterformer:clusters=3,trains=all,mu=5,nu=5", **sizes)
    with pytest.warns(UserWarning, match="collapsed") as seen:
        fitted = fit(task, model, Settings(steps=90, batch=8, lr=2e-2, optimizer="adamw", evaluate=30), device="cpu")
    assert sum("collapsed" in str(each.message) for each in seen) == 1
    groupings = [each["groupings"] for each in fitted.history]
    assert groupings[-1]["points"][0] > 0.95
    assert all(len(each["used"]) == len(each["largest"]) == len(each["centroids"]) == 1 for each in groupings)
    plain = fit(task, task.model("exact", **sizes), Settings(steps=2, batch=8), device="cpu")
    assert all("groupings" not in each for each in plain.history)


def test_models_keep_every_setting() -> None:
    from clusterattn_papers.models.tagger import Tagger
    from clusterattn_papers.models.translator import Translator

    method = ca.ClusterFormer(**OTHER)
    tagger, translator = Tagger(5, 5, method, dim=12, heads=3, layers=2), Translator(9, str(method), dim=12, heads=3)
    found = [layer.attention.method for stack in (tagger.stack.layers, translator.encoder.layers, translator.decoder)
             for layer in stack.layers]  # fmt: skip
    assert len(found) == 2 + 3 + 3
    assert set(found) == {method}


def test_a_trained_model_is_evaluated_with_the_settings_asked_for() -> None:
    from clusterattn_papers.models import attending_with
    from clusterattn_papers.models.tagger import Tagger
    from clusterattn_papers.models.translator import Translator

    torch.manual_seed(0)
    trained = ca.ClusterFormer(clusters=3, mu=0.1)
    tagger, ids = Tagger(5, 5, trained, dim=12, heads=3, layers=2).eval(), torch.arange(40).view(2, 20) % 5
    mask = torch.ones(2, 20, dtype=torch.bool)
    stack = tagger.stack.layers
    with torch.no_grad():
        before = tagger(ids, mask)
    other = ca.ClusterFormer(mu=0.7, nu=0.1, blocks=1)
    with attending_with(tagger, other):
        assert stack.clustering == other
        found = tagger(ids, mask)
    assert not torch.allclose(found.logits, before.logits)
    weighted = []
    for method in (trained, "clusterformer:clusters=3,mu=0.7"):
        with attending_with(tagger, method):
            weighted.append(tagger(ids, mask).auxiliary.detach())
    assert weighted[0] != weighted[1]
    assert stack.clustering == trained
    assert torch.equal(tagger(ids, mask).logits, before.logits)
    for given in ("exact", "clusterformer:clusters=4", "clusterformer:clusters=3,pass_on=false"):
        with (
            pytest.raises(ValueError, match="trained centroids: clusters=3, pass_on=True"),
            attending_with(tagger, given),
        ):
            pass
    plain = Translator(9, "exact", dim=12, heads=3, layers=1)
    with pytest.raises(ValueError, match="got trains='all'"), attending_with(plain, "clusterformer:trains=all"):
        pass
    with attending_with(plain, "local:window=3"):
        assert [str(each.attention.method) for each in plain.decoder.layers] == ["local:window=3"]
        assert [str(each.cross.method) for each in plain.decoder.layers] == ["exact"]


def test_rows_from_before_the_readings_are_still_shown() -> None:
    """A reading is a cell with a name of its own: no configuration changed, and no row lost its cell."""
    from pathlib import Path

    from clusterattn_papers.reproduce import runner

    results = Path(__file__).parents[2] / "results"
    tables = [f"clusterformer-table{at}" for at in range(1, 6)]
    for name in ("clustered-fig5", "clusterformer-fig3", "clusterformer-table7", *tables):
        experiment = runner.named(name)
        rows = runner.done_rows(experiment, "small", results)
        named = {cell.name for cell in experiment.cells(experiment.scales["small"])}
        assert rows, name
        assert {row["cell"] for row in rows} <= named, name
        assert any(row["cell"].startswith("clusterformer") or "clusterformer" in str(row.get("spec")) for row in rows)


def test_the_first_reading_is_what_it_was() -> None:
    """Its label means the same whatever the defaults become; others have labels of their own."""
    from clusterattn_papers.reproduce._readings import CHOSEN, PAPERS, READINGS, reading

    first = ca.method(reading(PAPERS, 3))
    assert first == ca.ClusterFormer(
        clusters=3, scope="shared", similarity="cosine", sharpness=1.0, trains="all", compare="updated", mu=0.1, nu=0.1
    )
    everything = {field.name for field in dataclasses.fields(ca.ClusterFormer)} - {"clusters", "blocks"}
    assert all(settings.keys() == everything for settings in READINGS.values())
    assert ca.method(reading(CHOSEN)) == ca.ClusterFormer(spread=True)  # the default, its points standardised
    assert len({reading(label) for label in READINGS}) == len(READINGS)


def test_a_grouping_that_nothing_trains_keeps_no_graph() -> None:
    x = draw(n=22, m=22).leaves()
    start = torch.randn(3, 24, dtype=torch.float64).requires_grad_()
    for method, learns in (
        (ca.ClusterFormer(clusters=3, mu=0.0, nu=0.0), False),
        (ca.ClusterFormer(clusters=3), True),
        (ca.ClusterFormer(clusters=3, mu=0.0, nu=0.0, affinity=1.0), True),
    ):
        _, state = x.attend(method, state=start, return_state=True)
        assert state.centroids.requires_grad == learns == method.learns
