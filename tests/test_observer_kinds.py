"""What every kind of observer has in common, and what the averaging kinds compute."""

import copy
import io
import math
import pickle
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import torch_linquant as lq
from torch_linquant import PerAxis, PerBlock, PerTensor, PerToken

INF, NAN = math.inf, math.nan
AVERAGING = [lq.MovingAverageMinMaxObserver, lq.MeanMinMaxObserver]
HISTOGRAM = [lq.PercentileObserver, lq.MSEObserver, lq.EntropyObserver, lq.StdObserver, lq.ACIQObserver]
HISTOGRAM += [lq.DistributionObserver]
KINDS = [lq.MinMaxObserver, *AVERAGING, *HISTOGRAM]
EXACT = [lq.MinMaxObserver, *HISTOGRAM]  # functions of the multiset of values
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int32]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)


WHOLE = PerTensor()


def make(kind, granularity=WHOLE, **options):
    dtype = "float8_e4m3fn" if kind is lq.DistributionObserver else "int8"
    return kind(dtype, granularity, **options)


def state(observer):
    return {key: value.clone() for key, value in observer.state_dict().items()}


def assert_same_state(observer, expected):
    actual = observer.state_dict()
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        assert (actual[key].dtype, actual[key].shape) == (value.dtype, value.shape), key
        assert actual[key].cpu().numpy().tobytes() == value.cpu().numpy().tobytes(), (key, actual[key], value)


def batches(dtype=torch.float32):
    generator = torch.Generator().manual_seed(2)
    result = [(torch.randn(n, 4, generator=generator) * 30).to(dtype) for n in (3, 5, 2, 8, 40)]
    if dtype.is_floating_point:
        result[1][0, 0], result[2][1, 3], result[3][7, 2] = NAN, INF, -INF
        result.append(torch.full((6, 4), -0.0, dtype=dtype))
    return result


@each_kind
@pytest.mark.parametrize("granularity", [PerTensor(), PerAxis(1), PerAxis(-1), PerBlock(3, 1), PerToken()], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_types_and_granularities(kind, granularity, dtype):
    observer = make(kind, granularity)
    whole = torch.cat(batches(dtype))[:14]
    for x in (whole, whole.flip(0) * 2):
        assert observer(x) is x
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        r_min, r_max = observer.range()
        scale, zero_point = observer.calculate_qparams()
    shape = granularity.scale_shape(whole.shape)
    assert r_min.shape == r_max.shape == scale.shape == shape
    assert r_min.dtype == r_max.dtype == scale.dtype == torch.float32
    assert (scale > 0).all() and scale.isfinite().all() and (r_min <= r_max).all()
    q = lq.quantize_linear(whole, scale, zero_point, dtype=observer.dtype, **granularity.qparam_args(2))
    assert q.shape == whole.shape
    if "counts" in dict(observer.named_buffers()):
        assert observer.counts.sum() == 2 * whole.numel()
        bits = observer.counts.size(-1).bit_length() - 10
        assert observer.counts[..., 255 << bits].sum() == observer.nonfinite
        assert observer.counts[..., (255 << bits) + 1 : 256 << bits].sum() == 0
        assert observer.counts[..., 511 << bits :].sum() == 0


@pytest.mark.parametrize("kind", EXACT, ids=lambda k: k.__name__)
@pytest.mark.parametrize("granularity", [PerTensor(), PerAxis(1)], ids=str)
def test_state_does_not_depend_on_order_or_split(kind, granularity):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 8, generator=generator)
    x[3, 1], x[40, 2], x[41, 2] = NAN, INF, -INF
    whole = make(kind, granularity)
    whole(x)
    for sizes in ([1] * 64, [63, 1], [10, 20, 0, 34]):
        split = make(kind, granularity)
        for batch in x[torch.randperm(64, generator=generator)].split(sizes):
            split(batch)
        assert_same_state(split, state(whole))


@each_kind
def test_a_batch_that_is_refused_changes_nothing(kind):
    observer = make(kind, PerAxis(1), name="fc1.input")
    for wrong, message in [
        (torch.ones(3, 4, dtype=torch.int64), "x must be float32, float16, bfloat16, float64 or int32, but got int64"),
        (torch.ones(4), "axis must be a dimension of the tensor, but got one of shape"),
        (torch.tensor(1.0), "axis must be a dimension of the tensor, but got one of shape"),
        (torch.ones(3, 4, device="meta"), "observer 'fc1.input': x must be on the observer's device cpu, but got meta"),
        (torch.ones(3, 5), "observer 'fc1.input': x must give a range of shape"),
    ]:
        for _ in range(2):  # fresh, and with data
            before = state(observer)
            if not (wrong.shape == (3, 5) and observer.r_min.numel() == 0):
                with pytest.raises((RuntimeError, ValueError), match=message):
                    observer(wrong)
            assert_same_state(observer, before)
            observer(torch.ones(2, 4))


@each_kind
@pytest.mark.parametrize("granularity", [PerTensor(), PerAxis(1)], ids=str)
def test_empty_batches_change_nothing(kind, granularity):
    observer = make(kind, granularity)
    for _ in range(2):
        before = state(observer)
        for shape in ([0, 4], [4, 0], [0, 0]):
            observer(torch.empty(shape))
            assert_same_state(observer, before)
        observer(torch.randn(3, 4))


@each_kind
def test_a_slice_without_finite_values_keeps_its_state(kind):
    observer = make(kind, PerAxis(1))
    observer(torch.tensor([[1.0, NAN], [-1.0, INF]]))
    observer(torch.tensor([[NAN, 4.0]]))
    assert observer.r_min.tolist() == [-1, 4] and observer.r_max.tolist() == [1, 4]
    assert observer.nonfinite == 3


@each_kind
def test_reading_before_data_is_refused(kind):
    observer = make(kind, name="encoder.fc1.input")
    with pytest.raises(RuntimeError, match="observer 'encoder.fc1.input' has seen no data. Run calibration batches"):
        observer.range()
    observer(torch.tensor([NAN, INF]))
    with pytest.raises(RuntimeError, match="has seen no finite value, but 2 NaN or infinite ones"):
        observer.calculate_qparams()


@each_kind
@pytest.mark.parametrize("x", [[0.0] * 3, [5.0], [-5.0], [1e-45], [-1e-45, 1e-40], [3.4028235e38, -3.4028235e38]])
@pytest.mark.parametrize("symmetric", [False, True])
def test_any_range_gives_a_finite_positive_scale(kind, x, symmetric):
    observer = make(kind, symmetric=symmetric)
    observer(torch.tensor(x))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        r_min, r_max = observer.range()
        scale, _ = observer.calculate_qparams()
    assert r_min.isfinite() and r_max.isfinite()
    assert scale > 0 and scale.isfinite()


def test_ranges_beyond_all_activations_are_named():
    observer = lq.MinMaxObserver(name="scores")
    observer(torch.tensor([1.0, -3.4e38]))
    with pytest.warns(UserWarning, match=r"observer 'scores' has a range up to 3.4e\+38: a mask rather than values"):
        observer.range()


# What NaN and infinities do.


@each_kind
def test_skip_warns_once(kind):
    observer = make(kind, name="fc")
    observer(torch.tensor([1.0, NAN, INF, -2.0]))
    with pytest.warns(UserWarning, match="observer 'fc' left 2 NaN or infinite values out of its range") as caught:
        observer.range()
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        observer.calculate_qparams()


@each_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_raise_comes_before_any_write(kind, dtype):
    observer = make(kind, PerAxis(0), nonfinite="raise", name="fc.input")
    bad = torch.tensor([[1.0, NAN], [INF, 2.0]], dtype=dtype)
    for _ in range(2):
        before = state(observer)
        with pytest.raises(RuntimeError) as error:
            observer(bad)
        assert str(error.value) == (
            "observer 'fc.input': x must be finite where nonfinite='raise', but got 2 NaN or infinite values in x of "
            "shape [2, 2]."
        )
        assert_same_state(observer, before)
        observer(torch.ones(2, 2, dtype=dtype))


def test_raise_is_refused_in_a_graph():
    observer = lq.MinMaxObserver(nonfinite="raise", name="fc.input")
    torch._dynamo.reset()
    with pytest.raises(Exception, match="observer 'fc.input': nonfinite must be 'skip' or 'propagate'"):
        torch.compile(observer, fullgraph=True)(torch.ones(3))
    with pytest.raises(Exception, match="observer 'fc.input': nonfinite must be 'skip' or 'propagate'"):
        torch.export.export(observer, (torch.ones(3),))


@each_kind
def test_propagate(kind):
    observer = make(kind, nonfinite="propagate", name="fc.input")
    observer(torch.arange(3.0))
    observer.range()
    observer(torch.tensor([1.0, NAN]))
    observer(torch.ones(3))
    assert observer.r_min.isnan() and observer.r_max.isnan()
    with pytest.raises(RuntimeError, match="observer 'fc.input' has seen 1 NaN or infinite values, which nonfinite="):
        observer.range()
    observer.reset()
    observer(torch.arange(3.0))
    assert observer.range()[1] > 0


@each_kind
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nonfinite": "ignore"}, "nonfinite must be 'skip', 'raise' or 'propagate', but got 'ignore'"),
        ({"arithmetic": "x"}, "arithmetic must be 'onnx', 'executorch' or 'onednn', but got 'x'"),
        ({"granularity": "tensor"}, "granularity must be PerTensor"),
        ({"eps": -1.0}, "eps must be a positive float32"),
        ({"dtype": "int9"}, "dtype must be one of"),
    ],
)
def test_impossible_options(kind, options, message):
    with pytest.raises(ValueError, match=message):
        kind(**{"dtype": "float8_e4m3fn" if kind is lq.DistributionObserver else "int8", **options})


OWN_OPTIONS = [
    (lq.MovingAverageMinMaxObserver, {"averaging_constant": 0.0}, "averaging_constant must be in (0, 1], but got 0.0."),
    (lq.MovingAverageMinMaxObserver, {"averaging_constant": NAN}, "averaging_constant must be in (0, 1], but got nan."),
    (lq.PercentileObserver, {"percentile": 0}, "percentile must be in (0, 100], but got 0."),
    (lq.PercentileObserver, {"percentile": 100.5}, "percentile must be in (0, 100], but got 100.5."),
    (lq.MSEObserver, {"norm": 0.5}, "norm must be at least 1, but got 0.5."),
    (lq.MSEObserver, {"mantissa_bits": 9}, "mantissa_bits must be 3 to 7, but got 9."),
    (lq.StdObserver, {"sigmas": -1}, "sigmas must be positive, but got -1."),
    (lq.ACIQObserver, {"distribution": "uniform"}, "distribution must be 'laplace' or 'normal', but got 'uniform'."),
    (lq.ACIQObserver, {"dtype": "float8_e5m2"}, "dtype must be an integer type, but got float8_e5m2."),
    (lq.DistributionObserver, {"dtype": "int8"}, "dtype must be a float8 or float4 type, but got int8."),
]


@pytest.mark.parametrize(("kind", "options", "sentence"), OWN_OPTIONS)
def test_options_of_a_kind(kind, options, sentence):
    with pytest.raises(ValueError) as error:
        kind(**options)
    assert str(error.value) == f"{kind.__name__}: {sentence}"


# State.


@each_kind
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("target", ["fresh", "other size", "meta"])
@pytest.mark.parametrize("granularity", [PerTensor(), PerAxis(1)], ids=str)
def test_stopped_loaded_and_continued_is_never_stopped(kind, target, granularity, assign):
    observer = make(kind, granularity)
    first, second, *rest = batches()
    observer(first), observer(second)
    file = io.BytesIO()
    torch.save(observer.state_dict(), file)
    file.seek(0)
    loaded = make(kind, granularity)
    if target == "other size":
        loaded(torch.ones(6, 8))
    if target == "meta":
        loaded.to("meta")
    result = loaded.load_state_dict(torch.load(file), assign=assign or target == "meta", strict=True)
    assert str(result) == "<All keys matched successfully>"
    assert_same_state(loaded, state(observer))
    for x in rest:
        observer(x), loaded(x)
    assert_same_state(loaded, state(observer))


@each_kind
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"])
def test_copies_go_their_own_way(kind, copied):
    observer = make(kind, PerAxis(1), name="a.input", symmetric=True)
    for x in batches():
        observer(x)
    other = copied(observer)
    before = state(observer)
    assert_same_state(other, before)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert all(map(torch.equal, other.range(), observer.range()))
    other(torch.full((1, 4), 99.0))
    assert_same_state(observer, before)
    assert repr(other) == repr(observer)


@each_kind
def test_casts_do_not_round_the_state(kind):
    model = nn.Sequential(nn.Linear(4, 4), make(kind, PerAxis(1)))
    with torch.no_grad():
        model[1](torch.randn(5, 4) / 3)
    before = state(model[1])
    model.half().bfloat16().double().to(torch.float16)
    assert_same_state(model[1], before)
    with torch.autocast("cpu", torch.bfloat16):
        model[1](torch.randn(5, 4))
    assert {v.dtype for v in model[1].state_dict().values()} <= {torch.float32, torch.int64}


@each_kind
def test_reset_forgets(kind):
    observer = make(kind, PerAxis(1))
    for x in batches():
        observer(x)
    observer.reset()
    assert_same_state(observer, state(make(kind, PerAxis(1))))


def test_a_finer_histogram_loads_into_a_coarser_observer_alone():
    fine, coarse, direct = (lq.MSEObserver(mantissa_bits=m) for m in (7, 3, 3))
    x = torch.cat(batches())
    fine(x), direct(x)
    coarse.load_state_dict(fine.state_dict())
    assert_same_state(coarse, state(direct))
    before = state(fine)
    with pytest.raises(RuntimeError, match=r"counts must have shape \[65536\], but got shape \[4096\]"):
        fine.load_state_dict(coarse.state_dict())
    assert_same_state(fine, before)


# The same data, read another way.


@pytest.mark.parametrize("kind", [lq.MinMaxObserver, *HISTOGRAM], ids=lambda k: k.__name__)
def test_the_reading_changes_without_new_data(kind):
    source = lq.PercentileObserver("int8", PerAxis(1), symmetric=True, percentile=99.0, name="a.input")
    fresh = make(kind, PerAxis(1), symmetric=True)
    for x in batches():
        source(x), fresh(x)
    options = {"dtype": "float8_e4m3fn"} if kind is lq.DistributionObserver else {}
    other = kind.from_observer(source, **options)
    assert (other.name, other.symmetric, other.granularity) == ("a.input", True, PerAxis(1))
    if kind is not lq.PercentileObserver:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert all(map(torch.equal, other.range(), fresh.range()))
    before = state(source)
    other(torch.full((1, 4), 1e6))
    assert_same_state(source, before)


def test_another_reading_needs_what_it_reads():
    observer = lq.MinMaxObserver()
    observer(torch.ones(3))
    with pytest.raises(ValueError) as error:
        lq.MSEObserver.from_observer(observer)
    assert str(error.value) == "MSEObserver.from_observer: observer must hold counts, but got a MinMaxObserver."


def test_from_observer_takes_options_and_another_type():
    source = lq.PercentileObserver("int8", percentile=99.0, quant_min=-127, eps=1e-3, mantissa_bits=6)
    source(torch.randn(1000))
    same = lq.PercentileObserver.from_observer(source)
    assert (same.percentile, same.quant_min, same.eps, same.mantissa_bits) == (99.0, -127, 1e-3, 6)
    other = lq.MSEObserver.from_observer(source, dtype="int4", norm=2.4, mantissa_bits=4)
    assert (other.dtype.name, other.quant_min, other.norm, other.counts.numel()) == ("int4", None, 2.4, 2**13)
    assert other.counts.sum() == 1000


# Averages.


def reference_step(r, b, a):
    """In float32, one operation at a time."""
    a = np.float32(a)
    half = b / np.float32(2) - r / np.float32(2)
    return np.where(a < 0.5, r + np.float32(2) * a * half, b - np.float32(2) * (np.float32(1) - a) * half)


@pytest.mark.parametrize("a", [0.01, 0.1, 0.3, 0.49999, 0.5, 0.7, 0.9, 0.99, 1.0])
def test_moving_average_for_any_pair(a):
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, (2, 40_000), dtype=np.uint32).view(np.float32)
    pairs = bits[:, np.isfinite(bits).all(0)]
    far = np.array([[3.4e38, -3.4e38], [-3.4e38, 3.4e38]], np.float32)
    r, b = np.concatenate([pairs, pairs[:, :1000], far], 1)
    r[-1002:-2] = b[-1002:-2]  # equal ones
    observer = lq.MovingAverageMinMaxObserver("int8", PerAxis(0), averaging_constant=a)
    observer(torch.from_numpy(r))
    observer(torch.from_numpy(b))
    got = observer.r_min.numpy()
    assert np.array_equal(observer.r_max.numpy(), got)
    assert np.array_equal(got, reference_step(r + np.float32(0), b, a))
    assert np.isfinite(got).all()
    assert (np.minimum(r, b) <= got).all() and (got <= np.maximum(r, b)).all()
    assert np.array_equal(got[r == b], r[r == b])
    if a == 1:
        assert np.array_equal(got, b)


def test_moving_average_is_torchs():
    ours = lq.MovingAverageMinMaxObserver("int8", averaging_constant=0.1)
    torchs = torch.ao.quantization.MovingAverageMinMaxObserver(averaging_constant=0.1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        x = torch.randn(100, generator=generator)
        ours(x), torchs(x)
    torch.testing.assert_close(torch.stack(ours.range()), torch.stack([torchs.min_val, torchs.max_val]))


def test_mean_is_the_mean_of_batch_extremes():
    observer = lq.MeanMinMaxObserver("int8", PerAxis(1))
    data = [torch.randn(7, 4, generator=torch.Generator().manual_seed(i)) for i in range(20)]
    for x in data:
        observer(x)
    low = torch.stack([x.amin(0).double() for x in data]).mean(0)
    torch.testing.assert_close(observer.r_min.double(), low, rtol=1e-6, atol=1e-6)
    assert observer.batches.tolist() == [20] * 4


@pytest.mark.parametrize("kind", AVERAGING, ids=lambda k: k.__name__)
def test_averages_leave_batches_without_values_out(kind):
    observer = kind("int8", PerAxis(1))
    observer(torch.tensor([[NAN, 2.0]]))
    observer(torch.tensor([[4.0, NAN]]))
    assert observer.r_max.tolist() == [4, 2] and observer.batches.tolist() == [1, 1]


# Graphs.


@each_kind
@pytest.mark.parametrize("granularity", [PerTensor(), PerAxis(1)], ids=str)
def test_compiled_equals_eager(kind, granularity):
    torch._dynamo.reset()
    eager, compiled = make(kind, granularity), make(kind, granularity)
    run = torch.compile(compiled, fullgraph=True)
    first, *rest = batches()
    eager(first), compiled(first)
    for batch in rest:
        eager(batch), run(batch)
    assert_same_state(compiled, state(eager))


@each_kind
@pytest.mark.parametrize("strict", [True, False], ids=["strict", "nonstrict"])
def test_exported_equals_eager(kind, strict):
    eager = make(kind, PerAxis(1))
    first, *rest = batches()
    eager(first)
    dynamic = ({0: torch.export.Dim("n")},)
    for decompose in (False, True):
        program = torch.export.export(copy.deepcopy(eager), (first,), dynamic_shapes=dynamic, strict=strict)
        module = (program.run_decompositions({}) if decompose else program).module()
        reference = copy.deepcopy(eager)
        for batch in [*rest, torch.ones(1, 4), torch.empty(0, 4)]:
            reference(batch), module(batch)
        assert_same_state(module, state(reference))


@each_kind
def test_a_switch_is_a_guard(kind):
    torch._dynamo.reset()
    observer = make(kind)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    run = torch.compile(lambda x: observer(x) * 2, backend=counter, fullgraph=True)
    run(torch.ones(3))
    observer.enabled = False
    before = state(observer)
    run(torch.full((3,), 9.0))
    assert_same_state(observer, before)
    observer.enabled = True
    run(torch.full((3,), 5.0))
    assert observer.nonfinite == 0 and state(observer) != before
    assert counter.frame_count == 2


def test_a_module_used_twice_in_a_graph():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.observer = lq.MSEObserver()

        def forward(self, x):
            return self.observer(self.observer(x) * 3)

    torch._dynamo.reset()
    eager, compiled = Twice(), Twice()
    run = torch.compile(compiled, fullgraph=True)
    for x in batches():
        assert torch.equal(run(x).nan_to_num(), eager(x).nan_to_num())
    assert_same_state(compiled, state(eager))
    exported = torch.export.export(Twice(), (batches()[0],), dynamic_shapes=({0: torch.export.Dim("n")},)).module()
    for x in batches():
        exported(x)
    assert_same_state(exported, state(eager))


@each_kind
def test_forward_is_one_op_and_reads_nothing_on_the_host(kind):
    observer = make(kind, PerAxis(1))
    observer(torch.ones(4, 3))
    with torch.profiler.profile() as profile:
        observer(torch.randn(4, 3))
    names = [event.name for event in profile.events()]
    assert names.count("linquant::observe_") == 1
    assert not [n for n in names if n in ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::item")]
