"""Observers of several processes: on 2 and 4 of them (tests/sync_cases.py), and alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from torch_linquant import (
    FakeQuantize,
    MinMaxObserver,
    MSEObserver,
    PerAxis,
    calibrate,
    convert,
    keep_observers_local,
    prepare,
    sync_observers,
)

HERE = Path(__file__).parent

distributed = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="this torch is built without torch.distributed"
)


@distributed
@pytest.mark.xdist_group("distributed")
@pytest.mark.parametrize("world", [2, 4])
def test_every_case(world, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "sync_cases.py")]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(world), str(tmp_path / "store")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for rank, (process, output) in enumerate(zip(processes, outputs, strict=True)):
        assert process.returncode == 0 and "10 cases passed" in output, f"rank {rank}:\n{output[-4000:]}"


def state(module):
    return {key: tensor.tolist() for key, tensor in module.state_dict().items()}


def test_one_process_is_the_only_rank():
    observed = prepare(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)), MSEObserver())
    calibrate(observed, [torch.randn(16, 4) for _ in range(3)])
    synced = sync_observers(observed)
    assert state(synced) == state(observed)
    assert state(convert(synced)) == state(convert(observed))
    calibrate(synced, [torch.full((2, 4), 100.0)])  # the copy's observers are its own
    assert synced[0].input_observer.r_max == 100 > observed[0].input_observer.r_max


def test_only_observers_are_copied():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(2, 2), FakeQuantize("int8", PerAxis(1))])
            self.again = [self.layers[1]]  # where no module is looked for
            self.register_buffer("table", torch.zeros(1000))

        def forward(self, x):
            return self.again[0](self.layers[0](x))

    model = Model()
    model(torch.randn(4, 2))
    synced, before = sync_observers(model), state(model)
    assert all(a is b for a, b in zip(synced.parameters(), model.parameters(), strict=True))
    assert synced.table is model.table
    assert synced.again[0] is synced.layers[1] is not model.layers[1]
    synced(torch.full((4, 2), 100.0))
    assert state(model) == before != state(synced)


def test_observer_alone_and_in_inference_mode():
    with torch.inference_mode():
        observer = MinMaxObserver("int8", PerAxis(0))
        observer(torch.tensor([[1.0], [2.0]]))
        synced = sync_observers(observer)
    synced(torch.tensor([[3.0], [0.0]]))  # outside of it
    assert synced.r_max.tolist() == [3, 2] and observer.r_max.tolist() == [1, 2]


def test_compiled_model():
    model = torch.compile(nn.Sequential(MinMaxObserver("int8")), backend="eager")
    model(torch.tensor([1.0, 2.0]))
    synced = sync_observers(model)
    synced(torch.tensor([3.0]))
    assert [m._orig_mod[0].r_max.item() for m in (model, synced)] == [2, 3]


def test_prepare_keeps_every_observer_local():
    """And those that a user placed, under each of their names; what the list held stays."""
    observer = MSEObserver()
    model = nn.ModuleDict({"a": observer, "b": nn.Sequential(observer, FakeQuantize("int8")), "fc": nn.Linear(2, 2)})
    model._ddp_params_and_buffers_to_ignore = ["fc.weight"]
    ignored = prepare(model)._ddp_params_and_buffers_to_ignore
    keys = {
        **dict.fromkeys(["a", "b.0"], ["r_min", "r_max", "nonfinite", "counts"]),
        **dict.fromkeys(["b.1.observer", "fc.input_observer"], ["r_min", "r_max", "nonfinite"]),
    }
    assert sorted(ignored) == sorted(["fc.weight", *(f"{path}.{key}" for path in keys for key in keys[path])])
    assert model._ddp_params_and_buffers_to_ignore == ["fc.weight"]
    keep_observers_local(observer)
    assert observer._ddp_params_and_buffers_to_ignore == keys["a"]


@pytest.mark.parametrize("function", [sync_observers, keep_observers_local])
def test_needs_observers(function):
    message = f"^{function.__name__}: model must have observers in it, but got none"
    with pytest.raises(ValueError, match=message):
        function(nn.Linear(2, 2))
