"""TabPFN: its registry of backends and its real architecture, with random weights."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("tabpfn", reason="needs tabpfn")

import numpy as np
from tabpfn.architectures.shared import attention_backends as registry
from tabpfn.architectures.shared.scaled_dot_product_attention import scaled_dot_product_attention
from tabpfn.architectures.tabpfn_v3 import TabPFNV3, TabPFNV3Config

import clusterattn as ca

T = ca.hosts.tabpfn
METHOD = "refined:clusters=20,top=8"
TRAIN, TEST = 300, 60


@pytest.fixture(autouse=True)
def nobody_registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test ends as it began, and none needs a network."""

    def refuse(*_: Any) -> None:
        raise AssertionError("TabPFN asked for a network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    yield
    T.unregister()
    assert "clusterattn" not in [each.name for each in registry.registered_attention_backends()]


@pytest.fixture(scope="module")
def config() -> TabPFNV3Config:
    """The architecture as published, but for fewer layers."""
    return TabPFNV3Config(max_num_classes=10, num_buckets=100, nlayers=3)


@pytest.fixture(scope="module")
def model(config: TabPFNV3Config) -> torch.nn.Module:
    torch.manual_seed(0)
    made = TabPFNV3(config=config, task_type="multiclass", n_out=10).eval()
    for weight in made.parameters():
        if weight.dim() > 1 and not weight.any():  # untrained, layers are the identity: nothing would count
            torch.nn.init.xavier_normal_(weight)
    return made


def predict(model: torch.nn.Module) -> Tensor:
    torch.manual_seed(1)
    x, y = torch.randn(TRAIN + TEST, 1, 5), torch.randint(0, 3, (TRAIN, 1)).float()
    with torch.no_grad():
        out: Tensor = model(x, y, only_return_standard_out=True)
    return out


def test_rows_are_served_and_everything_short_stays_exact(model: torch.nn.Module) -> None:
    before = predict(model)
    served = T.register(METHOD, min_rows=200)
    swapped = predict(model)
    answers = {(row.method, row.reason): row.calls for row in served.rows}
    assert answers[METHOD, ""] == 3, "the layers over rows"
    assert answers["exact", "fewer than 200 rows"] >= 7, "features, inducing points and the decoder"
    assert len(answers) == 2
    assert "3 of " in str(served)
    assert 0 < (swapped - before).norm() / before.norm() < 0.3
    T.unregister()
    assert torch.equal(predict(model), before)


def test_exact_as_a_method_gives_what_tabpfn_gives(model: torch.nn.Module) -> None:
    before = predict(model)
    served = T.register("exact", min_rows=1, min_dim=1)
    assert torch.allclose(predict(model), before, atol=1e-5)
    assert served.kept == 0


def test_a_small_table_changes_by_no_bit(model: torch.nn.Module) -> None:
    before = predict(model)
    served = T.register()
    assert torch.equal(predict(model), before)
    assert served.swapped == 0


def test_the_shapes_of_the_calls(model: torch.nn.Module) -> None:
    """Queries are all rows, keys the training rows: another TabPFN may differ, and min_rows with it."""
    met: Counter[tuple[int, int, int, int]] = Counter()

    class Watch:
        name = "watch"

        def is_preferred(self, spec: Any) -> bool:
            met[spec.seq_len_q, spec.seq_len_kv, spec.num_heads, spec.head_dim] += 1
            return False

    registry.register_attention_backend(Watch())
    try:
        predict(model)
    finally:
        registry.unregister_attention_backend("watch")
    assert met[TRAIN + TEST, TRAIN, 8, 64] == 3


@pytest.mark.parametrize(
    ("shape", "method", "reason"),
    [
        ((199, 300, 64), METHOD, "fewer than 200 rows"),
        ((300, 199, 64), METHOD, "fewer than 200 rows"),
        ((300, 300, 16), METHOD, "heads of less than 32 dimensions"),
        ((300, 299, 64), "reformer", "Reformer needs as many keys as queries"),
    ],
)
def test_what_is_declined(shape: tuple[int, int, int], method: str, reason: str) -> None:
    n, m, d = shape
    torch.manual_seed(0)
    q, k, v = torch.randn(2, n, 4, d), torch.randn(2, m, 4, d), torch.randn(2, m, 4, d)
    before = scaled_dot_product_attention(q, k, v)
    served = T.register(method, min_rows=200)
    assert torch.equal(scaled_dot_product_attention(q, k, v), before)
    assert [(row.reason, row.calls) for row in served.rows] == [(reason, 1)]


def test_grouped_heads_and_gradients() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 250, 4, 32), torch.randn(2, 220, 2, 32), torch.randn(2, 220, 2, 32)
    q.requires_grad_()
    served = T.register(METHOD, min_rows=200)
    out = scaled_dot_product_attention(q, k, v)
    ours = ca.attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), method=METHOD).transpose(1, 2)
    assert torch.equal(out, ours)
    assert served.swapped == 1
    out.square().sum().backward()
    assert q.grad is not None


def test_registering_again_replaces_the_settings() -> None:
    T.register(METHOD)
    T.register("improved")
    assert [each.method for each in registry.registered_attention_backends() if each.name == "clusterattn"] == [
        ca.Improved()
    ]
    with pytest.raises(ValueError, match="wanted a method"):
        T.register("nothing")
    with pytest.raises(ValueError, match="without trained centroids and losses"):
        T.register("clusterformer:balance=0.1")
    with pytest.raises(ValueError, match="min_rows=a whole number >= 1"):
        T.register(min_rows=0)


def test_fit_and_predict(model: torch.nn.Module, config: TabPFNV3Config) -> None:
    from tabpfn import TabPFNClassifier
    from tabpfn.base import ModelSpecs
    from tabpfn.constants import ModelVersion
    from tabpfn.inference_config import InferenceConfig

    usual = InferenceConfig.get_default(task_type="multiclass", model_version=ModelVersion.V2_5)
    specs = ModelSpecs(model=model, architecture_config=config, inference_config=usual)
    classifier = TabPFNClassifier(model_path=specs, n_estimators=1, device="cpu", random_state=0)
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(TRAIN + TEST, 4)), draw.integers(0, 3, TRAIN + TEST)
    classifier.fit(x[:TRAIN], y[:TRAIN])
    before = classifier.predict_proba(x[TRAIN:])
    served = T.register(METHOD, min_rows=200)
    classifier.fit(x[:TRAIN], y[:TRAIN])
    after = classifier.predict_proba(x[TRAIN:])
    assert served.swapped >= 3
    assert after.shape == before.shape == (TEST, 3)
    assert np.allclose(after, before, atol=0.05)
