"""A call that was made before is replayed: the same bits, forward and backward, for other tensors of the same shapes;
and everything out of the ordinary takes the ordinary way."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import clusterattn as ca
from clusterattn import _replay
from clusterattn.methods import _grouping
from clusterattn.ops._jit import HAVE_TRITON
from clusterattn.ops._recorder import MEMORY, Lanes, Launch, Recorder, Slot
from clusterattn.ops._tape import _laid_out

kernels = pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
N = 26  # tokens: interpreted kernels are slow
METHODS = [
    "refined:clusters=4,top=4,parts=3,slope=true,steps=2,sample=24,start=random",
    "refined:clusters=4,top=4,parts=1,slope=false,steps=2",
    "improved:clusters=4,top=4,steps=2",
    "clustered:clusters=4,steps=2",
    "smyrf:rounds=2,q_seats=16,k_seats=16",
    "reformer:rounds=1,chunk=16",
]


@pytest.fixture(autouse=True)
def _afresh():
    _replay.replay(True)
    yield
    _replay.replay(True)


def tensors(seed: int, n: int = N) -> list[Tensor]:
    made = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 2, n, 16, generator=made).to(DEVICE) for _ in range(3)]


def answers(x: list[Tensor], **options) -> list[Tensor]:
    """Output, and gradients where they are."""
    leaves = [each.clone().requires_grad_() for each in x]
    out = ca.attention(*leaves, backend="triton", **options)
    first = out[0] if isinstance(out, tuple) else out
    found = torch.autograd.grad(first, leaves, torch.ones_like(first) + first.detach(), allow_unused=True)
    return [first.detach(), *(each for each in found if each is not None)]


def the_kind() -> _replay.Known:
    (kind,) = _replay._known.values()
    return kind


@kernels
@pytest.mark.parametrize("method", METHODS)
def test_a_replay_has_the_same_bits(method):
    a, b = tensors(1), tensors(2)
    _replay.replay(False)
    want = [answers(x, method=method) for x in (a, b)]
    assert not _replay._known
    _replay.replay(True)
    for turn in range(4):  # ordinary; forward recorded, then both; played; played
        got = answers((a, b)[turn % 2], method=method)
        assert all(torch.equal(x, y) for x, y in zip(got, want[turn % 2], strict=True)), turn
    kind = the_kind()
    assert kind._tape is not None
    assert len(kind.joint) == 1
    assert not kind._refused
    with torch.no_grad():
        for x, known in ((a, want[0]), (b, want[1]), (a, want[0])):
            assert torch.equal(ca.attention(*x, method=method, backend="triton"), known[0])


def some(*real: int) -> Tensor:
    """A row whose first and last tokens are hidden, but for so many."""
    at = torch.arange(N, device=DEVICE)
    return ((at >= real[0]) & (at < real[0] + real[1]))[None]


@kernels
@pytest.mark.parametrize(
    ("method", "hidden"),
    [(METHODS[i], "both") for i in (0, 3, 4, 5)] + [(METHODS[3], each) for each in ("apart", "keys", "queries")],
)
def test_a_replay_reads_the_masks_of_its_own_call(method, hidden):
    """One mask for keys and queries, two, or one of them; what is hidden from everybody may be anything."""
    one, other = some(0, 20), some(3, 17)
    options = [
        {
            "both": {"key_mask": mask, "query_mask": mask},
            "apart": {"key_mask": mask, "query_mask": more},
            "keys": {"key_mask": mask},
            "queries": {"query_mask": mask},
        }[hidden]
        for mask, more in ((one, other), (other, one))
    ]
    x, nobodys = tensors(1), ~(one | other)[:, None, :, None]
    _replay.replay(False)
    want = [answers(x, method=method, **each) for each in options]
    _replay.replay(True)
    if hidden == "both":
        x = [torch.where(nobodys, float("nan"), each) for each in x]
    for turn in range(4):
        got = answers(x, method=method, **options[turn % 2])
        assert all(torch.equal(a, b) for a, b in zip(got, want[turn % 2], strict=True)), turn
    kind = the_kind()
    assert kind._tape is not None
    assert len(kind.joint) == 1
    assert not kind._refused


@kernels
def test_seeds_and_other_layouts_of_a_gradient():
    x, method = tensors(1), METHODS[0]
    leaves = [each.clone().requires_grad_() for each in x]

    def both(seed: int, back: Tensor) -> list[Tensor]:
        out = ca.attention(*leaves, method=method, backend="triton", seed=seed)
        return [out.detach(), *torch.autograd.grad(out, leaves, back)]

    dense = torch.randn(1, 2, N, 16, device=DEVICE)
    across = torch.randn(1, N, 2, 16, device=DEVICE).transpose(1, 2)
    calls = [(seed, back) for back in (dense, across, dense[:, :1].expand_as(dense)) for seed in (0, 5)]
    got = [both(*call) for call in calls]
    _replay.replay(False)
    for one, call in zip(got, calls, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, both(*call), strict=True)), call[0]


@kernels
def test_autocast_does_not_look_at_a_replay():
    """The metric of a causal call is a product of torch's own, in fp32 whatever autocast is there for."""
    method = "refined:clusters=4,top=4,parts=1,slope=false,steps=2,block=8"
    x = [each.half() for each in tensors(6)]
    leaves = [each.clone().requires_grad_() for each in x]

    def both() -> list[Tensor]:
        with torch.autocast(DEVICE, torch.float16):
            out = ca.attention(*leaves, method=method, causal=True, backend="triton")
            return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]

    _replay.replay(False)
    want = both()
    _replay.replay(True)
    for turn in range(4):
        assert all(torch.equal(a, b) for a, b in zip(both(), want, strict=True)), turn
    assert the_kind().joint


@kernels
def test_lse_has_a_gradient_too():
    x = tensors(3)

    def both() -> list[Tensor]:
        leaves = [each.clone().requires_grad_() for each in x]
        out, lse = ca.attention(*leaves, method=METHODS[0], backend="triton", return_lse=True)
        return [out.detach(), lse.detach(), *torch.autograd.grad((out.sum(), lse.square().sum()), leaves)]

    _replay.replay(False)
    want = both()
    _replay.replay(True)
    for _ in range(4):
        assert all(torch.equal(a, b) for a, b in zip(both(), want, strict=True))


@kernels
def test_what_is_out_of_the_ordinary_is_not_replayed():
    x = tensors(4)
    leaves = [each.clone().requires_grad_() for each in x]
    options = {"method": METHODS[3], "backend": "triton"}
    real = torch.ones(1, N, dtype=torch.bool, device=DEVICE)
    for _ in range(3):
        ca.attention(*x, key_lengths=real.sum(-1), **options)
        ca.attention(*x, groups=ca.groups(*x, **options), **options)
        checkpoint(lambda *y: ca.attention(*y, **options), *leaves, use_reentrant=False).sum().backward()
        ca.attention(x[0], x[1], x[1], **options)  # one tensor twice: which one a kernel reads cannot be seen
    assert all(kind._tape is None for kind in _replay._known.values())


@kernels
def test_saved_tensors_are_guarded_and_second_derivatives_refused():
    x = tensors(5)
    leaves = [each.clone().requires_grad_() for each in x]
    for _ in range(3):
        out = ca.attention(*leaves, method=METHODS[0], backend="triton")
        torch.autograd.grad(out.sum(), leaves)
    out = ca.attention(*leaves, method=METHODS[0], backend="triton")
    total = out.sum()
    out.detach().mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(total, leaves)
    out = ca.attention(*leaves, method=METHODS[0], backend="triton")
    first = torch.autograd.grad(out.sum(), leaves, create_graph=True)
    with pytest.raises(NotImplementedError, match="first derivatives"):
        torch.autograd.grad(first[0].sum(), leaves)


@kernels
def test_a_replay_is_freed_when_its_answer_is():
    """Without waiting for the garbage collector: a CUDA graph in the making must not meet graphs of other streams."""
    leaves = [each.clone().requires_grad_() for each in tensors(8)]
    for _ in range(3):
        torch.autograd.grad(ca.attention(*leaves, method=METHODS[1], backend="triton").sum(), leaves)
    gc.disable()
    try:
        out = ca.attention(*leaves, method=METHODS[1], backend="triton")
        node = weakref.ref(out.grad_fn)
        del out
        assert node() is None
    finally:
        gc.enable()


def test_exact_attention_becomes_the_call_of_torch():
    x = tensors(6)
    for causal in (False, True):
        want = torch.nn.functional.scaled_dot_product_attention(*x, is_causal=causal)
        for _ in range(3):
            assert torch.equal(ca.attention(*x, method="exact", causal=causal), want)
    assert all(kind._exact is not None for kind in _replay._known.values())
    assert len(_replay._known) == 2
    with pytest.raises(ValueError, match="agree"):  # another shape is another kind, and checked
        ca.attention(x[0], x[1][..., :8], x[2], method="exact")


def test_what_is_known_is_bounded(monkeypatch):
    monkeypatch.setattr(_replay, "MOST", 4)
    for n in range(1, 12):
        ca.attention(*tensors(7, n), method="exact")
        assert len(_replay._known) <= 4


@given(
    st.lists(
        st.tuples(st.integers(1, 3000), st.integers(0, 12), st.integers(0, 12)).map(
            lambda x: Slot(MEMORY, size=x[0], first=min(x[1:]), last=max(x[1:]))
        ),
        max_size=20,
    )
)
def test_memory_is_shared_only_by_those_that_do_not_meet(slots):
    offsets, total = _laid_out(list(enumerate(slots)))
    for i, one in enumerate(slots):
        assert offsets[i] % 256 == 0
        assert offsets[i] + one.size <= total
        for j, other in enumerate(slots[:i]):
            meet = one.first <= other.last and other.first <= one.last
            apart = offsets[i] >= offsets[j] + other.size or offsets[j] >= offsets[i] + one.size
            assert apart or not meet


# ---------------------------------------------------------------------------------------------------- as graphs


class Captured:
    """Instead of a CUDA graph."""

    def __init__(self, told: list[str], name: str) -> None:
        self.told, self.name = told, name

    def replay(self) -> None:
        self.told.append(f"graph {self.name}")


def played(monkeypatch: pytest.MonkeyPatch, **limits: int):
    """A function that plays by name, what it did, and the graphs."""
    from clusterattn.ops import _graphs

    for name, most in limits.items():
        monkeypatch.setattr(_graphs, name, most)
    graphs, told = _graphs.Graphs(), []
    monkeypatch.setattr(graphs, "_captured", lambda device, run: Captured(told, run.name))

    def play(name: str) -> None:
        def run(stream: int, pair: object) -> None:
            told.append(f"play {name}")

        run.name = name
        graphs.play(name, torch.device("cpu"), run, 0)

    return play, told, graphs


@kernels
def test_a_play_that_comes_again_becomes_a_graph(monkeypatch):
    play, told, graphs = played(monkeypatch)
    for name in "abaab":
        play(name)
    assert told == ["play a", "play b", "graph a", "graph a", "graph b"]
    graphs.forget()
    play("a")
    assert told[-1] == "play a"
    assert len(graphs) == 0


@kernels
def test_graphs_are_few_and_those_in_use_stay(monkeypatch):
    play, told, graphs = played(monkeypatch, MOST=2, IDLE=7, SEEN=8)
    for name in "aabbcccc":
        play(name)
    assert told[-4:] == ["play c"] * 4  # a and b were used lately
    for name in "bccab":
        play(name)
    assert told[-5:] == ["graph b", "graph c", "graph c", "play a", "graph b"]  # a gave way
    for i in range(40):
        play(str(i))
    assert len(graphs) == 2
    assert len(graphs._seen) <= 8


@kernels
def test_where_no_graph_can_be_the_call_is_played(monkeypatch):
    play, told, graphs = played(monkeypatch)
    monkeypatch.setattr(graphs, "_captured", lambda device, run: None)
    for _ in range(3):
        play("a")
    assert told == ["play a"] * 3


def test_what_two_lanes_use_lies_apart():
    """Between parting and meeting nobody knows who is ahead: memory of one lane is not given to the other."""
    recorder = Recorder([])
    spans = {"before": (0, 0), "of one": (2, 2), "of the other": (3, 3), "handed on": (2, 6), "after": (6, 6)}
    recorder.slots = [Slot(MEMORY, size=256, first=first, last=last) for first, last in spans.values()]
    recorder.steps = [None, Lanes(part=True), None, None, None, Lanes(part=False), None]  # type: ignore[list-item]
    recorder.spread_out()
    offsets, size = _laid_out(list(enumerate(recorder.slots)))
    at = {name: offsets[i] for i, name in enumerate(spans)}
    assert len({at["of one"], at["of the other"], at["handed on"]}) == 3
    assert at["after"] != at["handed on"]
    assert size == 3 * 256


@kernels
def test_parts_that_need_no_clusters_are_made_beside_them(monkeypatch):
    """From the first kernel on; near keys are chosen in the clusters' lane, and far keys come when both are done."""
    monkeypatch.setattr(_grouping, "FROM_STARTS", 2)
    x = tensors(3)
    _replay.replay(False)
    want = answers(x, method=METHODS[0])
    _replay.replay(True)
    for _ in range(3):
        assert all(torch.equal(got, right) for got, right in zip(answers(x, method=METHODS[0]), want, strict=True))
    with torch.no_grad(), Recorder(x) as recorder:
        the_kind().ordinary(*x, 0, None, None)
    steps, met = recorder.steps, recorder.steps.index(Lanes(part=False))
    launches = [(i, step.kernel.__name__, step.lane) for i, step in enumerate(steps) if isinstance(step, Launch)]
    assert steps[0] == Lanes(part=True)
    assert steps.count(Lanes(part=True)) == steps.count(Lanes(part=False)) == 1
    assert {name for _, name, lane in launches if lane} >= {"view_kernel", "beside_kernel", "place_kernel"}
    assert {name for i, name, lane in launches if not lane and i < met} >= {"covariance_kernel", "select_kernel"}
    assert all(lane == 0 for i, _, lane in launches if i > met)
    assert "coarse_fwd_kernel" in {name for i, name, _ in launches if i > met}


on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs want a GPU")


@on_a_gpu
@pytest.mark.parametrize("method", METHODS[:3])
def test_calls_in_the_same_memory_are_graphs_with_the_same_bits(method):
    from clusterattn.ops._graphs import graphs

    x, others = tensors(1, 2048), tensors(2, 2048)
    _replay.replay(False)
    want = [answers(each, method=method) for each in (x, others)]
    _replay.replay(True)
    leaves = [each.clone().requires_grad_() for each in x]

    def both() -> list[Tensor]:
        out = ca.attention(*leaves, method=method, backend="triton")
        found = torch.autograd.grad(out, leaves, torch.ones_like(out) + out.detach(), allow_unused=True)
        return [out.detach(), *(each for each in found if each is not None)]

    for turn in range(16):
        given, right = (x, want[0]) if turn % 3 else (others, want[1])
        with torch.no_grad():
            for leaf, value in zip(leaves, given, strict=True):
                leaf.copy_(value)
        stream = torch.cuda.Stream() if turn > 12 else torch.cuda.current_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            got = both()
        torch.cuda.current_stream().wait_stream(stream)
        assert all(torch.equal(a, b) for a, b in zip(got, right, strict=True)), turn
        torch.cuda.synchronize()
        del got  # so that the next turn gets its memory
    assert len(graphs) >= 2  # forward and backward
    _replay.replay(True, graphs=False)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(both(), right, strict=True))
    assert len(graphs) == 0
