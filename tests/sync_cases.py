"""What each process of tests/test_sync.py runs: `python sync_cases.py RANK WORLD FILE`."""

import copy
import hashlib
import os
import sys
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import torch_linquant as lq
from torch_linquant import FakeQuantize, PerAxis, PerDims, PerTensor, keep_observers_local, prepare, sync_observers

EXACT = {
    "minmax": lq.MinMaxObserver,
    "percentile": lq.PercentileObserver,
    "mse": lq.MSEObserver,
    "entropy": lq.EntropyObserver,
    "std": lq.StdObserver,
    "aciq": lq.ACIQObserver,
    "distribution": lambda dtype, *args, **options: lq.DistributionObserver("float8_e4m3fn", *args, **options),
}
AVERAGING = {"moving": lq.MovingAverageMinMaxObserver, "mean": lq.MeanMinMaxObserver}
KINDS = {**EXACT, **AVERAGING}
GRAINS = {"tensor": PerTensor(), "axis": PerAxis(1), "dims": PerDims((1,))}


class Watch(nn.Module):
    """Observers of every kind side by side, some of them deep inside."""

    def __init__(self, kinds=KINDS, grains=GRAINS, **options):
        super().__init__()
        self.observers = nn.ModuleDict(
            {
                kind: nn.ModuleDict({grain: make("int8", g, **options) for grain, g in grains.items()})
                for kind, make in kinds.items()
            }
        )

    def forward(self, x):
        for grains in self.observers.values():
            for observer in grains.values():
                observer(x)
        return x


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def batches(count=7):
    """With zeros of both signs, a channel that starts late, outliers, NaN and infinities."""
    made = [random(6, 5, 3, seed=i) * 2.0 ** (3 * i - 9) for i in range(count)]
    made[0][:, 2] = torch.nan
    made[1][0, 0, 0] = -torch.inf
    made[2].relu_()
    made[3] = -made[3].abs().clamp(min=0)
    made[5][3, 4] = 3e38
    return made


def fed(model, data):
    for x in data:
        model(x)
    return model


def bits(module):
    """A digest of each tensor of the state: equal means equal bits."""
    return {key: (t.dtype, t.shape, hashlib.sha1(t.numpy()).digest()) for key, t in module.state_dict().items()}


def everywhere(value):
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def error_of(call, *args):
    try:
        call(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def case_equals_one_process(rank, world):
    """Any split of the data, empty ranks included: the bits of one process, on every rank, and again."""
    splits = {
        "in turn": lambda i: i % world,
        "in order": lambda i: i * world // 7,
        "rank 1 alone": lambda i: 1,
        "no data": lambda i: None,
    }
    for options in ({}, {"nonfinite": "propagate"}):
        single = bits(fed(Watch(**options), batches()))
        for name, owner in splits.items():
            shares = [[x for i, x in enumerate(batches()) if owner(i) == r] for r in range(world)]
            local = fed(Watch(**options), shares[rank])
            before = bits(local)
            synced = sync_observers(local)
            got = bits(synced)
            assert all(other == got for other in everywhere(got)), (name, options)
            assert bits(sync_observers(local)) == got and bits(local) == before, (name, options)
            for key in got:
                if name == "rank 1 alone" or (name != "no data" and key.split(".")[1] in EXACT):
                    assert got[key] == single[key], (name, options, key)
            if name == "no data":
                assert got == bits(Watch(**options))
            elif not options:
                check_averages(synced, fed(Watch(AVERAGING), batches()), [fed(Watch(AVERAGING), s) for s in shares])
            if name == "in turn":  # more data, for the local model and for the copy
                more = [random(6, 5, 3, seed=50 + r) for r in range(world)]
                want = bits(fed(Watch(EXACT, **options), [*batches(), *more]))
                for have in bits(sync_observers(fed(local, [more[rank]]))), bits(fed(synced, more)):
                    assert all(have[key] == want[key] for key in want), options
                if not options:
                    assert all((o.range()[0] <= o.range()[1]).all() for o in synced.modules() if hasattr(o, "range"))


def check_averages(synced, single, ranks):
    """`mean` is that of one process up to rounding, `moving` the ranks' mean by hand."""
    for grain in GRAINS:
        for kind in AVERAGING:
            got = synced.observers[kind][grain]
            parts = [r.observers[kind][grain] for r in ranks if r.observers[kind][grain].batches.numel()]
            parts = [p for p in parts if bool((p.batches > 0).any())]
            count = sum(p.batches for p in parts)
            assert torch.equal(got.batches, count) and torch.equal(count, single.observers[kind][grain].batches)
            for end in ("r_min", "r_max"):
                products = [torch.where(p.batches > 0, getattr(p, end).double() * p.batches, 0.0) for p in parts]
                assert torch.equal(getattr(got, end), (sum(products) / count).float())
                if kind == "mean":
                    want = getattr(single.observers[kind][grain], end)
                    torch.testing.assert_close(getattr(got, end), want, rtol=1e-5, atol=0)


def case_constant_collectives(rank, world):
    calls = []
    originals = {name: getattr(dist, name) for name in ("all_reduce", "all_gather", "all_gather_object")}

    def counted(name):
        def call(*args):
            calls.append(name)
            return originals[name](*args)

        return call

    def count(model):
        calls.clear()
        sync_observers(model)
        return calls.copy()

    for name in originals:
        setattr(dist, name, counted(name))
    try:
        minmax = {"minmax": EXACT["minmax"]}
        assert count(Watch(minmax, {"tensor": PerTensor()})) == ["all_gather_object", *["all_reduce"] * 3]
        assert count(Watch(EXACT)) == ["all_gather_object", *["all_reduce"] * 3]
        mean = {"mean": AVERAGING["mean"]}
        assert count(Watch(mean, {"tensor": PerTensor()})) == ["all_gather_object", "all_gather", "all_reduce"]
        assert count(Watch()) == ["all_gather_object", "all_gather", *["all_reduce"] * 3]
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def case_disagreement(rank, world):
    """One rank is different, each in turn: the same error everywhere, and nothing changes."""

    def model(kind=lq.MinMaxObserver, name="act", channels=None, **options):
        observer = kind("int8", PerAxis(1) if channels else PerTensor(), **options)
        observer(torch.ones(2, channels or 3))
        return nn.Sequential(nn.Linear(2, 2), nn.ModuleDict({name: observer}))

    common, options = "MinMaxObserver(int8, PerTensor())", "MinMaxObserver(int8, PerTensor(), symmetric=True)"
    cases = [
        (model(), model(symmetric=True), "observer '1.act'", common, options),
        (model(), model(lq.StdObserver), "observer '1.act'", common, "StdObserver(int8, PerTensor())"),
        (model(), nn.Linear(2, 2), "observer '1.act'", common, "no observer"),
        (model(), None, "observer '1.act'", common, "no observer"),
        (model(channels=3), model(channels=4), "the shape of observer '1.act'", "[3]", "[4]"),
        (
            model(lq.MSEObserver),
            model(lq.MSEObserver, mantissa_bits=4),
            "observer '1.act'",
            "MSEObserver(int8, PerTensor())",
            "MSEObserver(int8, PerTensor(), mantissa_bits=4)",
        ),
    ]
    for odd in range(world):
        for one, other, what, of_one, of_other in cases:
            mine = other if rank == odd else one
            before = mine and bits(mine)
            errors = everywhere(error_of(sync_observers, mine))
            assert len(set(errors)) == 1
            first, second, at = (of_other, of_one, 1) if odd == 0 else (of_one, of_other, odd)
            assert errors[0] == (
                f"RuntimeError: sync_observers: {what} must be the same on all ranks, "
                f"but got {first} on rank 0 and {second} on rank {at}."
            )
            assert (mine and bits(mine)) == before
    mine = model(name="odd" if rank == 1 else "act")
    errors = everywhere(error_of(sync_observers, mine))
    assert len(set(errors)) == 1 and "on rank 0 and no observer on rank 1." in errors[0]
    error = error_of(sync_observers, nn.Linear(2, 2))
    assert error == ("ValueError: sync_observers: model must have observers in it, but got none. Call prepare() first.")


def case_group(rank, world):
    """Ranks outside of a group have no part in it; errors name ranks as the whole job does."""
    members = list(range(1, world))
    group = dist.new_group(members)
    observer = fed(lq.MSEObserver(), [random(100, seed=rank).relu()])
    if rank == 0:
        error = error_of(sync_observers, observer, group)
        assert error == "ValueError: sync_observers: group must hold this rank, but got one without rank 0."
    else:
        assert bits(sync_observers(observer, group)) == bits(
            fed(lq.MSEObserver(), [random(100, seed=r).relu() for r in members])
        )
        if world > 2:
            error = error_of(sync_observers, lq.MSEObserver("int8" if rank == 1 else "uint8"), group)
            assert "on rank 1 and" in error and "on rank 2." in error


def case_order(rank, world):
    """Ranks may have registered their modules in another order."""
    kinds = {"a": lq.MinMaxObserver, "b": lq.MSEObserver, "c": lq.MeanMinMaxObserver}
    order = sorted(kinds, reverse=rank == 1)
    model = nn.ModuleDict({key: fed(kinds[key](), [random(100, seed=rank) * ord(key)]) for key in order})
    synced = sync_observers(model)
    for key in "ab":
        assert bits(synced[key]) == bits(fed(kinds[key](), [random(100, seed=r) * ord(key) for r in range(world)]))


def case_nothing_seen(rank, world):
    """No range has a shape yet, on any rank."""
    model = nn.ModuleList(kind("int8", PerAxis(0)) for kind in (lq.MinMaxObserver, lq.MeanMinMaxObserver))
    assert bits(sync_observers(model)) == bits(model)
    assert bits(sync_observers(model[1])) == bits(model[1])


def case_shared_observer(rank, world):
    """One observer in two places counts once."""
    observer = lq.MSEObserver()
    model = nn.ModuleList([observer, nn.Sequential(observer)])
    observer(random(100, seed=rank))
    synced = sync_observers(model)
    assert synced[0] is synced[1][0] and synced[0] is not observer
    assert int(synced[0].counts.sum()) == 100 * world


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.second = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x):
        return self.second(self.norm(self.first(x)).relu())


class Placed(Net):
    """Observers of which `prepare` knows nothing."""

    def __init__(self):
        super().__init__()
        self.watch, self.fake = lq.MSEObserver("int8", PerAxis(1)), FakeQuantize("int8")
        keep_observers_local(self)

    def forward(self, x):
        return super().forward(self.fake(self.watch(x)))


def own_batch(rank, step):
    return random(8, 4, seed=10 * step + rank) * (rank + 1)


def case_ddp(rank, world):
    """Default settings, forward and backward: each rank keeps what it saw, and what all saw can be loaded."""
    for model, paths in (prepare(Net()), ["first.input_observer"]), (Placed(), ["watch", "fake.observer"]):
        fresh = {path: bits(model.get_submodule(path)) for path in paths}
        reference = {path: copy.deepcopy(model.get_submodule(path)) for path in paths}
        wrapped = nn.parallel.DistributedDataParallel(model)
        for step in range(3):
            wrapped(own_batch(rank, step)).sum().backward()
        before = bits(model)
        synced = sync_observers(wrapped)
        assert type(synced) is type(model) and bits(model) == before
        assert all(a is b for a, b in zip(synced.parameters(), model.parameters(), strict=True))
        for path, observer in reference.items():
            alone = fed(copy.deepcopy(observer), [own_batch(rank, step) for step in range(3)])
            assert bits(model.get_submodule(path)) == bits(alone) != fresh[path], path
            want = bits(fed(observer, [own_batch(r, step) for r in range(world) for step in range(3)]))
            assert bits(synced.get_submodule(path)) == want, path
        model.load_state_dict(synced.state_dict())
        assert bits(model.get_submodule(path)) == want
    outputs = everywhere(bits(nn.ParameterList([model.fake.eval()(random(9) * 3)])))
    assert all(output == outputs[0] for output in outputs)


def case_fsdp(rank, world):
    """What is sharded stays as it is; the copy's state serves an unsharded model."""
    model = prepare(Net(), lq.MSEObserver("int8"))
    fully_shard(model.first)
    fully_shard(model)
    model.eval()
    data = [own_batch(r, step) for r in range(world) for step in range(2)]
    with torch.no_grad():
        first = fed(model, [own_batch(rank, step) for step in range(2)])(own_batch(rank, 1))
    local = bits(model.first.input_observer)
    for _ in range(2):
        synced = sync_observers(model)
    want = fed(lq.MSEObserver("int8"), [*data, *(own_batch(r, 1) for r in range(world))])
    assert bits(synced.first.input_observer) == bits(want)
    assert bits(model.first.input_observer) == local and type(synced) is type(model)
    with torch.no_grad():
        assert torch.equal(synced(own_batch(rank, 1)), first)  # parameters are gathered for the copy as well
        assert bits(model.first.input_observer) == local
        assert torch.equal(model(own_batch(rank, 1)), first)
    state = {k: t.full_tensor() if isinstance(t, DTensor) else t for k, t in synced.state_dict().items()}
    assert any(isinstance(t, DTensor) for t in synced.state_dict().values())
    plain = prepare(Net(), lq.MSEObserver("int8")).eval()
    plain.load_state_dict(state)
    assert torch.equal(plain(own_batch(rank, 1)), first)
    outputs = everywhere(lq.convert(plain)(data[0]).detach().numpy().tobytes())
    assert all(o == outputs[0] for o in outputs)
    model(own_batch(rank, 0)).sum().backward()  # and it trains on
    assert all(isinstance(p.grad, DTensor) for p in model.parameters())


def case_absent(rank, world):
    """A rank that does not call, and one that dies half-way: errors within the time-out, and nothing changes."""
    late, dead = (dist.new_group(timeout=timedelta(seconds=3)) for _ in range(2))
    last = rank == world - 1
    local = fed(Watch(), batches(6))
    before = bits(local)
    if not last:
        assert error_of(sync_observers, local, late).startswith("RuntimeError")
        assert bits(local) == before
    dist.barrier()
    if last:
        dist.all_reduce = lambda *args: finish()
    assert error_of(sync_observers, local, dead).startswith("RuntimeError")
    assert bits(local) == before


def finish():
    print(f"{len(CASES)} cases passed", flush=True)
    os._exit(0)  # without good-byes, as a process that dies


CASES = [case for name, case in list(globals().items()) if name.startswith("case_")]  # case_absent is the last

if __name__ == "__main__":
    rank, world, file = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="observer .* (left|has a range)")
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    for case in CASES:
        print(f"{case.__name__} ...", flush=True)
        case(rank, world)
    finish()
