"""The training loop: it learns, stops, goes on after being killed, and gives one answer on one process or two."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("accelerate")

from safetensors.torch import load_file, save_file
from toy_task import Toy

from clusterattn.methods import METHODS
from clusterattn.nn import Encoder
from clusterattn_papers.models import attending_with, attentions
from clusterattn_papers.tasks import batches, order, padded
from clusterattn_papers.train import Settings, fit, judge, loop
from clusterattn_papers.train.graphs import RecordedUpdate
from clusterattn_papers.train.radam import RAdam

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SHORT = {"clustered": "clustered:clusters=4", "improved": "improved:clusters=4,top=4",
         "refined": "refined:clusters=4,top=4",
         "reformer": "reformer:chunk=4", "routing": "routing:window=4", "smyrf": "smyrf:q_seats=4,k_seats=4",
         "local": "local:window=4", "oracle_top": "oracle_top:top=4"}  # fmt: skip


def trained(task, method="exact", folder=None, **settings):
    torch.manual_seed(0)
    options = {"epochs": 3, "batch": 8, "lr": 2e-3} | settings
    return fit(task, task.model(method), Settings(**options), folder=folder, device="cpu")


def weights(fitted):
    return {name: each.clone() for name, each in fitted.model.state_dict().items()}


def same(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_learns(name):
    fitted = trained(Toy(), SHORT.get(name, name), epochs=6)
    losses = [row["loss"] for row in fitted.history]
    assert losses[-1] < losses[0]
    assert fitted.steps == 30
    assert fitted.best["accuracy"] == max(row["accuracy"] for row in fitted.history)


def test_the_same_seed_gives_the_same_weights_and_another_another():
    same(weights(trained(Toy(), "reformer:chunk=4")), weights(trained(Toy(), "reformer:chunk=4")))
    other = weights(trained(Toy(), "reformer:chunk=4", seed=1))
    assert not torch.equal(other["head.weight"], weights(trained(Toy(), "reformer:chunk=4"))["head.weight"])


def test_the_best_weights_are_kept(tmp_path):
    for folder in (None, tmp_path):
        fitted = trained(Toy(), lr=0.05, epochs=6, folder=folder)
        assert judge(Toy(), fitted.model, "dev")["accuracy"] == pytest.approx(fitted.best["accuracy"])


def test_an_interrupted_training_ends_as_if_nothing_had_happened(tmp_path):
    whole = trained(Toy(), "refined:clusters=4,top=4", epochs=4, decay="plateau", plateau=1)
    trained(Toy(), "refined:clusters=4,top=4", epochs=2, decay="plateau", plateau=1, folder=tmp_path)
    resumed = trained(Toy(), "refined:clusters=4,top=4", epochs=4, decay="plateau", plateau=1, folder=tmp_path)
    same(weights(whole), weights(resumed))
    assert [row["loss"] for row in resumed.history] == [row["loss"] for row in whole.history]


def test_the_scale_of_fp16_is_taken_up_again(tmp_path, monkeypatch):
    made = []

    def scaled(*options):  # fp16 itself needs a GPU, its scaler does not
        accelerator = accelerator_of(*options)
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=3)
        made.append(accelerator)
        return accelerator

    accelerator_of = loop._accelerator
    monkeypatch.setattr(loop, "_accelerator", scaled)
    whole = trained(Toy(), epochs=4)
    trained(Toy(), epochs=2, folder=tmp_path)
    resumed = trained(Toy(), epochs=4, folder=tmp_path)
    same(weights(whole), weights(resumed))
    states = [each.scaler.state_dict() for each in made]
    assert states[0] == states[2]
    assert states[0]["scale"] > states[1]["scale"] > 2.0


def test_killed_at_any_moment_it_goes_on(tmp_path):
    script = tmp_path / "go.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(HERE)!r})\n"
        "import torch; torch.set_num_threads(1)\n"
        "from clusterattn_papers.train import loop; loop.SAVE_EVERY = 0\n"
        "from test_train import Toy, trained\n"
        f"trained(Toy(), epochs=2000, folder={str(tmp_path / 'run')!r})\n"
    )
    state = tmp_path / "run" / "state.safetensors"
    for _ in range(2):
        process = subprocess.Popen([sys.executable, str(script)], cwd=ROOT)
        before = state.stat().st_mtime_ns if state.exists() else 0
        for _ in range(600):
            time.sleep(0.1)
            if state.exists() and state.stat().st_mtime_ns > before:
                break
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert load_file(state)  # whole, whatever happened
    resumed = trained(Toy(), epochs=2000, folder=tmp_path / "run", patience=1)
    assert resumed.steps > 5
    assert [row["step"] for row in resumed.history] == [5 * (at + 1) for at in range(len(resumed.history))]


def test_a_folder_of_another_training_is_refused(tmp_path):
    trained(Toy(), folder=tmp_path)
    for task, method, settings in (
        (Toy(), "exact", {"lr": 1e-4}),
        (Toy(), "clustered:clusters=4", {}),  # the same weights by name
        (Toy(count=120), "exact", {}),
    ):
        with pytest.raises(ValueError, match="wanted the model, data and settings with which"):
            trained(task, method, folder=tmp_path, **settings)


def test_a_linear_decay_must_know_its_end(tmp_path):
    trained(Toy(), folder=tmp_path, decay="linear")
    with pytest.raises(ValueError, match="wanted the model, data and settings with which"):
        trained(Toy(), folder=tmp_path, decay="linear", epochs=5)


def test_a_device_that_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no CUDA device"):
        fit(Toy(), Toy().model("exact"), device="cuda:1")


def test_it_stops_early_and_at_a_target():
    assert trained(Toy(), lr=1e-9, epochs=50, patience=2).steps == 15  # nothing gets better after the first judgement
    assert trained(Toy(), epochs=50, target=0.5).steps == 5


def test_the_learning_rate_halves_on_a_plateau():
    rates = [row["lr"] for row in trained(Toy(), lr=1e-9, epochs=5, decay="plateau", plateau=2).history]
    assert rates[0] == pytest.approx(1e-9)
    assert rates[-1] == pytest.approx(2.5e-10)


@pytest.mark.parametrize("rate", [1e-3, torch.tensor(1e-3)], ids=["number", "tensor"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_radam_is_torchs(rate, decay):
    draw = torch.Generator().manual_seed(0)
    ours = [torch.randn(7, 5, generator=draw), torch.randn(3, generator=draw)]
    theirs = [each.clone() for each in ours]
    one = RAdam(ours, lr=rate, weight_decay=decay)
    other = torch.optim.RAdam(theirs, lr=1e-3, weight_decay=decay, decoupled_weight_decay=True)
    for step in range(40):  # the sixth is the first that trusts the squares
        for mine, its in zip(ours, theirs, strict=True):
            mine.grad = its.grad = torch.randn(mine.shape, generator=draw) * (1 + step % 3)
        one.step(), other.step()
        for mine, its in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-6, atol=1e-7)
    states = [each.state_dict()["state"] for each in (one, other)]
    assert states[0].keys() == states[1].keys()
    assert all(states[0][at].keys() == states[1][at].keys() for at in states[0])


def test_a_loss_that_is_taken_leaves_no_graph_behind():
    encoder = Encoder(16, 2, 2, SHORT["routing"]).train()
    encoder(torch.randn(2, 12, 16, generator=torch.Generator().manual_seed(0)))
    kept = encoder.auxiliary_loss
    assert kept is not None
    torch.testing.assert_close(encoder.take_auxiliary_loss(), kept)
    assert encoder.auxiliary_loss is None
    assert encoder.take_auxiliary_loss() is None


def test_learning_rates():
    rate = Settings(lr=1.0, warmup=4, decay="linear").rate
    assert [rate(step, 8) for step in range(8)] == [0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.25]
    assert Settings(lr=1.0, warmup=4, decay="root").rate(15, 100) == pytest.approx(0.5)


def test_a_loss_that_is_no_number_is_said_plainly():
    class Broken(Toy):
        def loss(self, model, batch):
            total, count = super().loss(model, batch)
            return total * float("nan"), count

    with pytest.raises(ValueError, match="a loss that is a number"):
        trained(Broken())


@pytest.mark.parametrize("bad", [{"lr": 0}, {"decay": "fast"}, {"epochs": 0}, {"precision": "fp8"}, {"patience": 0}])
def test_bad_settings(bad):
    with pytest.raises(ValueError, match="wanted"):
        Settings(**bad)


def test_bf16():
    assert trained(Toy(), precision="bf16").history[-1]["loss"] < 0.8


def test_two_processes_give_the_result_of_one(tmp_path):
    """Odd batches, and a last batch with fewer examples than processes, in which one process has nothing."""
    one = trained(Toy(count=82, dropout=0.0), batch=5, epochs=2)
    script = tmp_path / "two.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(HERE)!r})\n"
        "import torch; torch.set_num_threads(1)\n"
        "from accelerate import PartialState\n"
        "from safetensors.torch import save_file\n"
        "from test_train import Toy, trained, weights\n"
        "fitted = trained(Toy(count=82, dropout=0.0), batch=5, epochs=2)\n"
        "assert PartialState().num_processes == 2\n"
        f"save_file(weights(fitted), {str(tmp_path)!r} + f'/{{PartialState().process_index}}.safetensors')\n"
        "PartialState().destroy_process_group()\n"
    )
    # what `accelerate launch` does for GPUs; for CPUs it asks for an MPI
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(launch, capture_output=True, text=True, timeout=300, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in (0, 1):
        both = load_file(tmp_path / f"{rank}.safetensors")
        for name, each in weights(one).items():
            torch.testing.assert_close(both[name], each, atol=1e-5, rtol=1e-4)


def test_batches_hold_every_example_once_and_neighbours_are_alike():
    task = Toy(count=400)
    chosen = order(task, "train", 8, seed=3)
    assert sorted(at for rows in chosen for at in rows) == list(range(200))
    assert chosen == order(task, "train", 8, seed=3) != order(task, "train", 8, seed=4)
    lengths = [[task.length(task.splits["train"][at]) for at in rows] for rows in chosen]
    spans = [max(each) - min(each) for each in lengths]
    assert sum(spans) / len(spans) < 2
    assert order(task, "train", 8)[0] == list(range(8))
    assert len(list(batches(task, "dev", 64))) == 4


def test_padded():
    ids, mask = padded([[1, 2, 3], [4]], value=9)
    assert ids.tolist() == [[1, 2, 3], [4, 9, 9]]
    assert mask.tolist() == [[True] * 3, [True, False, False]]


def test_another_attention_for_a_while():
    task = Toy()
    fitted = trained(task)
    before = judge(task, fitted.model, "dev")
    with attending_with(fitted.model, "clustered:clusters=2"):
        assert {str(each.method) for each in attentions(fitted.model)} == {"clustered:clusters=2"}
        judge(task, fitted.model, "dev")
    assert judge(task, fitted.model, "dev") == before
    with pytest.raises(ValueError, match="shared queries and keys"), attending_with(fitted.model, "reformer"):
        pass


def test_a_recording_that_fails_leaves_updates_as_they_are(monkeypatch):
    """The part of CUDA graphs that a CPU can see: a refusal is remembered, every batch is learnt."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("no device")))
    met = []
    replayed = RecordedUpdate(lambda batch: met.append(batch) or torch.zeros(()))
    for _ in range(5):
        replayed({"x": torch.zeros(2)})
    assert len(met) == 5
    assert replayed.refused


def test_checkpoints_are_plain_safetensors(tmp_path):
    trained(Toy(), folder=tmp_path)
    names = set(load_file(tmp_path / "state.safetensors"))
    assert "model.head.weight" in names
    assert any(name.startswith("optimizer.") for name in names)
    save_file({"x": torch.zeros(1)}, tmp_path / "state.safetensors")
    with pytest.raises(ValueError, match="a checkpoint of version"):
        trained(Toy(), folder=tmp_path)
