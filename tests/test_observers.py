"""Observers: what they see, what they refuse, and that their state is the same however the data came."""

import copy
import io
import pickle
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from torch_linquant.granularity import PerAxis, PerBlock, PerTensor
from torch_linquant.observers import MinMaxObserver, Observer
from torch_linquant.qparams import choose_qparams

INF = float("inf")
NAN = float("nan")
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int32]


def state(observer):
    return {key: value.clone() for key, value in observer.state_dict().items()}


def assert_same_state(observer, expected):
    """Bit for bit, so that NaN and -0.0 count."""
    actual = observer.state_dict()
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        assert actual[key].dtype == value.dtype and actual[key].shape == value.shape, key
        assert actual[key].numpy().tobytes() == value.numpy().tobytes(), (key, actual[key], value)


def numpy_range(x, axis=None):
    """The range of the float32 values of x that are finite."""
    values = x.detach().to(torch.float32).numpy()
    other = None if axis is None else tuple(d for d in range(x.dim()) if d != axis % x.dim())
    finite = np.isfinite(values)
    low = np.where(finite, values, np.inf).min(axis=other, initial=np.inf)
    high = np.where(finite, values, -np.inf).max(axis=other, initial=-np.inf)
    return torch.from_numpy(np.asarray(low)), torch.from_numpy(np.asarray(high))


@pytest.mark.parametrize("axis", [None, 0, 1, -1], ids=lambda axis: f"axis_{axis}")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_range_is_numpys(dtype, axis):
    x = (torch.randn(6, 5, 7, generator=torch.Generator().manual_seed(0)) * 50).to(dtype)
    observer = MinMaxObserver("uint8", PerTensor() if axis is None else PerAxis(axis))
    assert observer(x) is x
    low, high = observer.range()
    assert torch.equal(low, numpy_range(x, axis)[0])
    assert torch.equal(high, numpy_range(x, axis)[1])
    assert low.dtype == high.dtype == torch.float32
    assert observer.nonfinite == 0


@pytest.mark.parametrize(
    "layout", [lambda x: x.permute(0, 2, 3, 1), lambda x: x[:, ::2, 1:], lambda x: x.expand(2, 4, 6, 5).contiguous()]
)
def test_range_of_any_layout(layout):
    x = layout(torch.randn(2, 4, 6, 5).to(memory_format=torch.channels_last))
    observer = MinMaxObserver("uint8", PerAxis(1))
    observer(x)
    assert torch.equal(observer.r_min, x.amin((0, 2, 3)))
    assert torch.equal(observer.r_max, x.amax((0, 2, 3)))


@pytest.mark.parametrize("granularity", [PerTensor(), PerAxis(1)], ids=str)
def test_state_does_not_depend_on_order_or_split(granularity):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 8, generator=generator)
    x[3, 1], x[40, 2], x[41, 2] = NAN, INF, -INF
    whole = MinMaxObserver("uint8", granularity)
    whole(x)
    for sizes in ([1] * 64, [63, 1], [10, 20, 34]):
        shuffled = x[torch.randperm(64, generator=generator)]
        split = MinMaxObserver("uint8", granularity)
        for batch in shuffled.split(sizes):
            split(batch)
        assert_same_state(split, state(whole))


@pytest.mark.parametrize("power", [-20, 3, 40])
def test_range_scales_and_mirrors_exactly(power):
    x = torch.randn(1000)
    plain, scaled, mirrored = (MinMaxObserver() for _ in range(3))
    plain(x), scaled(x * 2.0**power), mirrored(-x)
    assert torch.equal(scaled.r_min, plain.r_min * 2.0**power)
    assert torch.equal(scaled.r_max, plain.r_max * 2.0**power)
    assert torch.equal(mirrored.r_min, -plain.r_max) and torch.equal(mirrored.r_max, -plain.r_min)


# What is left out.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_nonfinite_values_are_left_out_and_counted(dtype):
    x = torch.tensor([[1.0, NAN, INF], [-2.0, 3.0, -INF]], dtype=dtype)
    observer = MinMaxObserver(name="encoder.fc1.input")
    observer(x)
    observer(x)
    assert observer.nonfinite == 6
    with pytest.warns(UserWarning, match=r"observer 'encoder.fc1.input' left 6 NaN or infinite values out") as caught:
        low, high = observer.range()
    assert len(caught) == 1
    assert (low, high) == (-2, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        observer.calculate_qparams()  # what was said once is not said again


def test_a_double_beyond_float32_counts_as_infinite():
    observer = MinMaxObserver()
    observer(torch.tensor([1e300, -1.0, 2.0], dtype=torch.float64))
    assert (observer.r_min, observer.r_max, observer.nonfinite) == (-1, 2, 1)


def test_a_channel_without_finite_values_gets_a_finite_scale():
    observer = MinMaxObserver("int8", PerAxis(1))
    observer(torch.tensor([[1.0, NAN], [-1.0, INF]]))
    assert torch.equal(observer.r_min, torch.tensor([-1.0, INF]))
    with pytest.warns(UserWarning):
        scale, zero_point = observer.calculate_qparams()
    assert scale.isfinite().all() and (scale > 0).all()
    assert scale.shape == zero_point.shape == (2,)
    observer(torch.tensor([[NAN, 4.0]]))
    assert torch.equal(observer.r_min, torch.tensor([-1.0, 4.0]))


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(3),
        torch.tensor([5.0]),
        torch.tensor([-5.0]),
        torch.tensor(1e-45),
        torch.tensor([3.4028235e38, -3.4028235e38]),
    ],
    ids=["zeros", "one", "negative", "subnormal", "largest"],
)
@pytest.mark.parametrize("symmetric", [False, True])
def test_any_range_gives_a_finite_positive_scale(x, symmetric):
    observer = MinMaxObserver("int8", symmetric=symmetric)
    observer(x)
    scale, _ = observer.calculate_qparams()
    assert scale > 0 and scale.isfinite()


def test_negative_zero_never_enters_the_state():
    observer = MinMaxObserver()
    observer(torch.tensor([-0.0, 0.0, -0.0]))
    observer(torch.tensor([-0.0]))
    assert not observer.r_min.signbit() and not observer.r_max.signbit()


@pytest.mark.parametrize("sized", [False, True], ids=["unsized", "sized"])
@pytest.mark.parametrize("granularity", [PerTensor(), PerAxis(1)], ids=str)
def test_empty_batch_changes_nothing(granularity, sized):
    observer = MinMaxObserver("uint8", granularity)
    if sized:
        observer(torch.ones(2, 5))
    before = state(observer)
    for shape in ([0, 5], [5, 0], [0, 0]):
        observer(torch.empty(shape))
        assert_same_state(observer, before)


def test_another_channel_count_is_refused_and_changes_nothing():
    observer = MinMaxObserver("uint8", PerAxis(1), name="fc1.input")
    observer(torch.ones(2, 64))
    before = state(observer)
    x = torch.full((8, 32), NAN)
    with pytest.raises(RuntimeError) as error:
        observer(x)
    assert str(error.value) == (
        "observer 'fc1.input': x must give a range of shape [64], as the batches before it did, "
        "but got shape [32] from x of shape [8, 32]."
    )
    assert_same_state(observer, before)


def test_type_without_range_is_refused():
    observer = MinMaxObserver()
    before = state(observer)
    with pytest.raises(RuntimeError, match="x must be float32, float16, bfloat16, float64 or int32, but got int64"):
        observer(torch.ones(3, dtype=torch.int64))
    assert_same_state(observer, before)


# Reading.


@pytest.mark.parametrize("read", [Observer.range, Observer.calculate_qparams])
@pytest.mark.parametrize("granularity", [PerTensor(), PerAxis(0)], ids=str)
def test_reading_before_data_is_refused(granularity, read):
    with pytest.raises(RuntimeError) as error:
        read(MinMaxObserver("uint8", granularity, name="encoder.fc1.input"))
    assert str(error.value) == (
        "observer 'encoder.fc1.input' has seen no data. "
        "Run calibration batches through the model before reading its range."
    )


def test_reading_after_nothing_finite_says_so():
    observer = MinMaxObserver()
    observer(torch.tensor([NAN, INF]))
    with pytest.raises(RuntimeError, match="'MinMaxObserver' has seen no finite value, but 2 NaN or infinite ones"):
        observer.range()


def test_textbook_example():
    observer = MinMaxObserver("int8")
    observer(torch.tensor([[191.6, -13.5, 728.6], [92.14, 295.5, -184], [0, 684.6, 245.5]]))
    scale, zero_point = observer.calculate_qparams()
    assert scale.item() == np.float32(3.578823433670343)
    assert zero_point.item() == -77 and zero_point.dtype == torch.int8


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"symmetric": True},
        {"include_zero": False},
        {"eps": 0.5},
        {"power_of_two": True},
        {"quant_min": -127},
        {"quant_min": -7, "quant_max": 7},
    ],
    ids=str,
)
def test_options_are_those_of_choose_qparams(options):
    x = torch.randn(10, 4) + 3
    observer = MinMaxObserver("int8", PerAxis(1), **options)
    observer(x)
    expected = choose_qparams(x.amin(0), x.amax(0), "int8", **options)
    for actual, value in zip(observer.calculate_qparams(), expected, strict=True):
        assert torch.equal(actual, value) and actual.dtype == value.dtype


@pytest.mark.parametrize("options", [{"dtype": "int9"}, {"quant_min": -300}, {"quant_min": 5, "quant_max": 4}], ids=str)
def test_impossible_options_are_refused_at_once(options):
    with pytest.raises((ValueError, RuntimeError)):
        MinMaxObserver(**{"dtype": "int8", **options})


def test_reading_returns_copies():
    observer = MinMaxObserver()
    observer(torch.ones(2))
    observer.range()[0].fill_(-9)
    assert observer.r_min == 1


def test_blocks():
    observer = MinMaxObserver("int8", PerBlock(2, axis=1))
    observer(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
    assert torch.equal(observer.r_max, torch.tensor([[2.0, 3.0], [5.0, 6.0]]))


# What forward costs.


class Ops(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("granularity", [PerTensor(), PerAxis(1)], ids=str)
def test_forward_is_one_op_and_reads_nothing_on_the_host(granularity):
    observer = MinMaxObserver("uint8", granularity)
    observer(torch.ones(4, 3))
    with Ops() as ops:
        observer(torch.randn(4, 3))
    assert [name for name in ops.names if name.startswith("linquant")] == ["linquant.observe_.default"]
    assert not [name for name in ops.names if "_local_scalar_dense" in name or "is_nonzero" in name]


def test_switched_off_observer_sees_nothing():
    observer = MinMaxObserver()
    observer.enabled = False
    before = state(observer)
    x = torch.ones(3)
    assert observer(x) is x
    assert_same_state(observer, before)


def test_gradients_pass():
    observer = MinMaxObserver()
    x = torch.randn(3, requires_grad=True)
    (observer(x) * 2).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))
    assert not observer.r_min.requires_grad


def test_observing_in_and_out_of_inference_mode():
    observer = MinMaxObserver("uint8", PerAxis(0))
    with torch.inference_mode():
        observer(torch.ones(3))
    observer(torch.full((3,), 2.0))
    with torch.inference_mode():
        observer(torch.full((3,), -1.0))
    assert observer.r_min.tolist() == [-1] * 3 and observer.r_max.tolist() == [2] * 3


# State.


@pytest.mark.parametrize(
    "cast", [nn.Module.half, nn.Module.bfloat16, nn.Module.double, partial(nn.Module.to, dtype=torch.bfloat16)]
)
def test_casting_the_model_does_not_round_the_state(cast):
    model = nn.Sequential(nn.Linear(3, 3), MinMaxObserver("uint8", PerAxis(1)))
    model(torch.randn(4, 3) / 3)
    before = state(model[1])
    cast(model)
    assert model[0].weight.dtype != torch.float32
    assert_same_state(model[1], before)


def test_state_moves_with_the_model():
    observer = MinMaxObserver().to("meta", torch.float16)
    assert observer.r_min.is_meta and observer.r_min.dtype == torch.float32
    observer.to_empty(device="cpu").reset()
    assert_same_state(observer, state(MinMaxObserver()))


@pytest.mark.parametrize(
    ("target", "assign"),
    [("fresh", False), ("fresh", True), ("other size", False), ("other size", True), ("meta", True)],
)
@pytest.mark.parametrize("granularity", [PerTensor(), PerAxis(1), PerBlock(2, axis=1)], ids=str)
def test_state_dict_round_trip(granularity, target, assign):
    observer = MinMaxObserver("uint8", granularity)
    x = torch.randn(6, 4)
    x[0, 0] = NAN
    observer(x)
    file = io.BytesIO()
    torch.save(observer.state_dict(), file)
    file.seek(0)
    loaded = MinMaxObserver("uint8", granularity)
    if target == "other size":
        loaded(torch.ones(6, 8))
    if target == "meta":
        loaded.to("meta")
    assert str(loaded.load_state_dict(torch.load(file), assign=assign)) == "<All keys matched successfully>"
    assert_same_state(loaded, state(observer))
    for each in (observer, loaded):  # and it goes on as if it had never stopped
        each(x * 2)
    assert_same_state(loaded, state(observer))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.update(r_min=s["r_min"].half()), "r_min must be float32, but got float16"),
        (lambda s: s.update(nonfinite=torch.zeros(())), "nonfinite must be int64, but got float32"),
        (lambda s: s.update(r_max=torch.ones(3)), r"r_max must have shape \[4\], but got shape \[3\]"),
        (
            lambda s: s.update(r_min=torch.ones(())),
            r"r_min must have 1 dimensions for PerAxis\(.*1\), but got shape \[\]",
        ),
        (
            lambda s: s.update(nonfinite=torch.zeros(2, dtype=torch.int64)),
            r"nonfinite must have shape \[\], but got shape \[2\]",
        ),
        (lambda s: s.pop("r_max"), 'Missing key.*"r_max"'),
        (lambda s: s._metadata[""].update(version=2), "version must be at most 1, but got 2"),
    ],
)
def test_a_wrong_state_is_refused_before_anything_is_written(change, message):
    observer = MinMaxObserver("uint8", PerAxis(1))
    observer(torch.ones(2, 4))
    wrong = observer.state_dict()
    change(wrong)
    target = MinMaxObserver("uint8", PerAxis(1))
    target(torch.full((2, 7), 5.0))
    before = state(target)
    with pytest.raises(RuntimeError, match=message):
        target.load_state_dict(wrong)
    assert_same_state(target, before)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"])
def test_copies_go_their_own_way(copied):
    observer = MinMaxObserver("int8", PerAxis(1), symmetric=True, name="a.input")
    observer(torch.randn(3, 4))
    other = copied(observer)
    assert_same_state(other, state(observer))
    assert (other.name, other.symmetric, other.dtype, other.granularity) == (
        "a.input",
        True,
        observer.dtype,
        PerAxis(1),
    )
    before = state(observer)
    other(torch.full((1, 4), 99.0))
    assert_same_state(observer, before)


@pytest.mark.parametrize("granularity", [PerTensor(), PerAxis(1)], ids=str)
def test_reset_forgets(granularity):
    observer = MinMaxObserver("uint8", granularity)
    observer(torch.tensor([[NAN, 1.0]]))
    observer.reset()
    assert_same_state(observer, state(MinMaxObserver("uint8", granularity)))
    observer(torch.ones(2, 3))
    assert observer.range()[0].eq(1).all()


def test_a_new_kind_says_only_what_differs():
    class LastBatchObserver(Observer):
        def _update(self, r_min, r_max):
            self.r_min.copy_(r_min)
            self.r_max.copy_(r_max)

    observer = LastBatchObserver("int8", PerAxis(0))
    observer(torch.tensor([5.0, 6.0]))
    observer(torch.tensor([1.0, 2.0]))
    assert observer.range()[1].tolist() == [1, 2]


def test_repr():
    assert repr(MinMaxObserver()) == f"MinMaxObserver(uint8, {PerTensor()!r})"
    assert "int8" in repr(MinMaxObserver("int8", symmetric=True)) and "symmetric=True" in repr(
        MinMaxObserver("int8", symmetric=True)
    )


# Graphs.


def batches():
    generator = torch.Generator().manual_seed(2)
    result = [torch.randn(n, 4, generator=generator) for n in (3, 5, 2, 8)]
    result[1][0, 0], result[2][1, 3], result[3][7, 2] = NAN, INF, -INF
    result.append(torch.full((6, 4), -0.0))
    return result


@pytest.mark.parametrize("granularity", [PerTensor(), PerAxis(1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_compiled_equals_eager(granularity, dtype):
    torch._dynamo.reset()
    eager, compiled = MinMaxObserver("uint8", granularity), MinMaxObserver("uint8", granularity)
    run = torch.compile(compiled, fullgraph=True)
    first, *rest = (batch.to(dtype) for batch in batches())
    eager(first), compiled(first)
    for batch in rest:
        eager(batch)
        assert torch.equal(run(batch).isfinite(), batch.isfinite())
    assert_same_state(compiled, state(eager))


def test_compiling_before_the_first_batch_of_channels_says_what_to_do():
    torch._dynamo.reset()
    observer = MinMaxObserver("uint8", PerAxis(1), name="fc.input")
    with pytest.raises(Exception, match="observer 'fc.input'.*Run one batch first"):
        torch.compile(observer, fullgraph=True)(torch.ones(3, 4))


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "nonstrict"])
@pytest.mark.parametrize("granularity", [PerTensor(), PerAxis(1)], ids=str)
def test_exported_equals_eager(granularity, strict):
    eager = MinMaxObserver("uint8", granularity)
    first, *rest = batches()
    eager(first)
    exported = torch.export.export(
        copy.deepcopy(eager), (first,), dynamic_shapes=({0: torch.export.Dim("n")},), strict=strict
    )
    module = exported.module()
    for batch in [*rest, torch.ones(1, 4), torch.empty(0, 4)]:
        eager(batch)
        module(batch)
    assert {key: value.tolist() for key, value in module.state_dict().items()} == {
        key: value.tolist() for key, value in eager.state_dict().items()
    }


def test_a_batch_on_another_device_changes_nothing():
    observer = MinMaxObserver("int8", PerAxis(1), name="fc.input")
    with pytest.raises(RuntimeError, match="observer 'fc.input': x must be on the observer's device cpu, but got meta"):
        observer(torch.ones(4, 7, device="meta"))
    observer(torch.ones(4, 6))
    assert observer.r_min.shape == (6,)


@pytest.mark.parametrize("granularity", [PerTensor(), PerAxis(1)], ids=str)
def test_made_and_used_in_and_out_of_inference_mode(granularity):
    with torch.inference_mode():
        observer = MinMaxObserver("int8", granularity)
        observer.reset()
        observer(torch.ones(4, 6))
    observer.reset()
    observer(torch.ones(4, 6) * 2)
    assert observer.range()[1].max() == 2
