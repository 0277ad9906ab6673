"""error_report: the estimate is one of the truth, and its interval holds the truth as often as it says."""

from __future__ import annotations

import pytest
import torch

import clusterattn as ca
from clusterattn.measure import embedded, exact_answer, head_errors, mixture, relative_error
from clusterattn.measure.sampled import _draw_queries, _exact_rows

REFINED = "refined:clusters=25,top=32,parts=1,slope=false,steps=5"


def test_a_sample_of_everything_is_the_truth():
    sample = mixture(2, 4, 40, 8, m=50)
    k, v = sample.k[:, :2], sample.v[:, :2]  # grouped heads
    method = ca.Clustered(clusters=4)
    for causal in (False, True):
        out = ca.attention(sample.q, k, v, method=method, causal=causal)
        exact = exact_answer(sample.q, k, v, causal=causal)
        found = ca.error_report(sample.q, k, v, method, sample=64, causal=causal)
        assert found.error == pytest.approx(relative_error(out, exact), rel=1e-6)
        torch.testing.assert_close(found.heads, head_errors(out, exact))
        assert found.low == pytest.approx(found.error)
        assert found.high == pytest.approx(found.error)
        assert found.cost_share == 1


def test_masks_are_honoured_and_padding_is_never_sampled():
    sample = mixture(2, 2, 96, 8)
    real = torch.arange(96) < torch.tensor([[96], [60]])
    masks = {"key_mask": real, "query_mask": real}
    out = ca.attention(sample.q, sample.k, sample.v, method="clustered:clusters=5", **masks)
    exact = exact_answer(sample.q, sample.k, sample.v, key_mask=real)
    found = ca.error_report(sample.q, sample.k, sample.v, "clustered:clusters=5", sample=96, **masks)
    assert found.error == pytest.approx(relative_error(out, exact, real), rel=1e-6)
    torch.testing.assert_close(found.heads, head_errors(out, exact, real))
    assert (found.queries[1] < 60).all()
    assert ((found.queries[1] >= 0).sum(-1) == 60).all()
    noise = [torch.where(real[:, None, :, None], x, 1e4) for x in (sample.q, sample.k, sample.v)]
    one = ca.error_report(*noise, "clustered:clusters=5", sample=16, **masks)
    other = ca.error_report(sample.q, sample.k, sample.v, "clustered:clusters=5", sample=16, **masks)
    assert one.error == other.error


def test_exact_attention_of_single_queries_is_that_of_all():
    sample = mixture(1, 4, 30, 8, m=37)
    k, v = sample.k[:, :2], sample.v[:, :2]
    mask = torch.arange(37)[None] < 33
    at = _draw_queries(torch.ones(1, 4, 30, dtype=torch.bool), 9, 0)
    rows = sample.q.gather(2, at.unsqueeze(-1).expand(-1, -1, -1, 8))
    for causal in (False, True):
        all_rows = exact_answer(sample.q, k, v, key_mask=mask, causal=causal, scale=0.3)
        want = all_rows.gather(2, at.unsqueeze(-1).expand(-1, -1, -1, 8))
        torch.testing.assert_close(_exact_rows(rows, at, k, v, 30, mask, causal, 0.3), want)


def test_every_query_is_as_likely_and_heads_draw_by_themselves():
    real = torch.ones(1, 3, 50, dtype=torch.bool)
    drawn = torch.stack([_draw_queries(real, 10, seed) for seed in range(400)])  # (seeds 1 3 10)
    counts = torch.bincount(drawn.flatten(), minlength=50).double()
    assert len(drawn[0, 0, 0].unique()) == 10
    assert not torch.equal(drawn[0, 0, 0].sort().values, drawn[0, 0, 1].sort().values)
    expected = drawn.numel() / 50
    assert float(((counts - expected) ** 2 / expected).sum()) < 85  # chi-square, 49 degrees: 0.1 % of fair draws


@pytest.mark.parametrize("spec", [REFINED, "improved:clusters=25", "smyrf"])
def test_the_interval_holds_the_truth_as_often_as_it_says(spec):
    """On real queries, 12 heads with unequal and skewed errors. Head by head, and all together."""
    sample = embedded()
    out = ca.attention(sample.q, sample.k, sample.v, method=spec)
    exact = exact_answer(sample.q, sample.k, sample.v)
    error, heads = relative_error(out, exact), head_errors(out, exact)
    inside, all_inside, width = [], [], []
    for seed in range(60):
        found = ca.error_report(sample.q, sample.k, sample.v, spec, sample=64, seed=seed, out=out)
        inside.append(((found.heads_low <= heads) & (heads <= found.heads_high)).double())
        all_inside.append(found.low <= error <= found.high)
        width.append(found.high / found.low)
    assert torch.stack(inside).mean() > 0.92  # 720 intervals of 95 %
    assert sum(all_inside) / 60 > 0.88
    assert sum(width) / 60 < 1.5  # a bound that says little would hold always


def test_the_interval_narrows_with_the_sample():
    sample = mixture(1, 4, 2048, 16)
    out = ca.attention(sample.q, sample.k, sample.v, method="clustered:clusters=20")

    def wide(count):
        found = ca.error_report(sample.q, sample.k, sample.v, "clustered:clusters=20", sample=count, out=out)
        return found.high - found.low

    assert wide(512) < wide(128) < wide(32)
    narrow = ca.error_report(sample.q, sample.k, sample.v, "clustered:clusters=20", confidence=0.5, out=out)
    assert narrow.high - narrow.low < wide(64)


def test_same_seed_same_report_and_the_global_generator_stays():
    sample = mixture(1, 2, 128, 8)
    before = torch.random.get_rng_state()
    one, other = (ca.error_report(sample.q, sample.k, sample.v, "refined:clusters=8", sample=16, seed=3) for _ in "ab")
    assert (one.error, one.low, one.high) == (other.error, other.low, other.high)
    assert torch.equal(one.queries, other.queries)
    assert not torch.equal(
        one.queries, ca.error_report(sample.q, sample.k, sample.v, "refined:clusters=8", sample=16, seed=4).queries
    )
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_report_can_be_read():
    sample = mixture(1, 2, 200, 8)
    found = ca.error_report(sample.q, sample.k, sample.v, "refined:clusters=8", sample=20)
    assert "95% interval" in str(found)
    assert "20 queries per head, 10.0% of exact attention's work" in str(found)
    assert found.beyond == pytest.approx(1 - 0.05 ** (1 / 20))
    assert found.query_errors.shape == (1, 2, 20)
    assert float(found.query_errors.square().mean(-1).sqrt()[0, 0]) == pytest.approx(float(found.heads[0, 0]))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sample": 3}, "at least 8"),
        ({"sample": 0}, "whole number >= 1"),
        ({"confidence": 1.0}, "confidence in"),
        ({"return_lse": True}, "no return_"),
        ({"out": torch.zeros(1, 2, 3, 8)}, "one answer of shape (1, 2, 40, 8)"),
        ({"method": "nosuch"}, "nosuch"),
    ],
)
def test_bad_words_are_refused(options, said):
    sample = mixture(1, 2, 40, 8)
    with pytest.raises(ValueError) as refused:
        ca.error_report(sample.q, sample.k, sample.v, **options)
    assert said in str(refused.value)
