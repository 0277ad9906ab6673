"""Law 5: one seed, one answer; nobody else's random numbers are touched."""

from __future__ import annotations

import random

import laws
import pytest
import torch
from laws import Case, Inputs, close, draw, gradients, over, same_bits
from torch.utils.checkpoint import checkpoint

import clusterattn as ca

DRAWS = ["clustered", "clustered-euclid", "improved", "smyrf", "smyrf-crosspolytope", "reformer"]


@over()
def test_same_seed_same_bits(case: Case) -> None:
    x = draw(case, dtype=torch.float32)
    same_bits(x.attend(case.method, seed=3, return_lse=True), x.attend(case.method, seed=3, return_lse=True))


@pytest.mark.parametrize("name", DRAWS)
def test_another_seed_is_another_draw(name: str) -> None:
    case = laws.BY_NAME[name]
    x = draw(case)
    answers = [x.attend(case.method, seed=seed) for seed in range(4)]
    assert any(not torch.equal(answers[0], answer) for answer in answers[1:])


@over()
def test_a_tensor_may_hold_the_seed(case: Case) -> None:
    """And is read in the call, not before."""
    x, holder = draw(case, dtype=torch.float32), torch.tensor(0)
    for seed in (3, 2**40 + 5):
        holder.fill_(seed)
        wanted = x.attend(case.method, seed=seed, return_lse=True)
        same_bits(x.attend(case.method, seed=holder, return_lse=True), wanted)


@over()
def test_a_generator_only_yields_the_seed(case: Case) -> None:
    x = draw(case, dtype=torch.float32)
    one, two = (torch.Generator().manual_seed(11) for _ in range(2))
    same_bits(x.attend(case.method, generator=one), x.attend(case.method, generator=two))
    assert torch.equal(one.get_state(), two.get_state())


@pytest.mark.parametrize("name", DRAWS)
def test_a_generator_moves_on(name: str) -> None:
    """The second call of a training loop draws anew."""
    case = laws.BY_NAME[name]
    x = draw(case)
    g = torch.Generator().manual_seed(11)
    answers = [x.attend(case.method, generator=g) for _ in range(4)]
    assert any(not torch.equal(answers[0], answer) for answer in answers[1:])


@over()
def test_global_random_states_are_untouched(case: Case) -> None:
    numpy = pytest.importorskip("numpy")
    x = draw(case, dtype=torch.float32)
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].copy()
    x.attend(case.method)
    x.attend(case.method, generator=torch.Generator().manual_seed(1))
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert (before[2] == numpy.random.get_state()[1]).all()


@over()
def test_the_global_seed_changes_nothing(case: Case) -> None:
    x = draw(case, dtype=torch.float32)
    torch.manual_seed(1)
    wanted = x.attend(case.method)
    torch.manual_seed(2)
    same_bits(x.attend(case.method), wanted)


@over()
def test_activation_checkpointing_gives_the_same_gradients(case: Case) -> None:
    plain, saved = draw(case, dtype=torch.float32).leaves(), draw(case, dtype=torch.float32).leaves()

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        return ca.attention(*tensors, method=case.method, seed=5)

    out, again = attend(*plain.tensors), checkpoint(attend, *saved.tensors, use_reentrant=False)
    same_bits(again, out)
    same_bits(gradients(again, saved), gradients(out, plain))


@over()
def test_a_batch_of_one_answers_as_it_does_in_company(case: Case) -> None:
    x = draw(case, b=3)
    for causal in laws.kinds(case):
        together = x.attend(case.method, causal=causal, return_lse=True)
        for row in range(3):
            alone = Inputs(*(t[row : row + 1] for t in x.tensors))
            wanted = alone.attend(case.method, causal=causal, return_lse=True)
            close([part[row : row + 1] for part in together], wanted)


@over(where=lambda case: case.name != "clusterformer-shared")
def test_a_head_answers_as_it_does_in_company(case: Case) -> None:
    """Draws are shared over b and h, the rest is each head's own. (With scope="shared" ClusterFormer
    groups once for all.)"""
    x = draw(case, h=3, hk=3)
    together = x.attend(case.method, return_lse=True)
    alone = Inputs(*(t[:, 1:2] for t in x.tensors)).attend(case.method, return_lse=True)
    close([part[:, 1:2] for part in together], alone)


@pytest.mark.parametrize("metric", ["hamming", "euclid", "keys"])
@pytest.mark.parametrize("start", ["random", "far"])
@pytest.mark.parametrize("causal", [False, True])
def test_clustered_and_improved_with_equal_settings_have_equal_labels(metric: str, start: str, causal: bool) -> None:
    x = draw()
    same = {"clusters": 5, "bits": 31, "steps": 3, "metric": metric, "start": start, "block": 8}
    one, two = (x.groups(method, causal=causal) for method in (ca.Clustered(**same), ca.Improved(**same, top=4)))
    assert torch.equal(one.labels, two.labels)
    assert torch.equal(one.member_of, two.member_of)
