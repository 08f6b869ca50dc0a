"""The scale of least error for a tensor that is known: never worse than its range, and the best there is where it is
swept for."""

import math

import numpy as np
import pytest
import torch

import torch_linquant as lq
from torch_linquant import PerAxis, PerBlock, PerDims, PerTensor, PerToken
from torch_linquant.weights import _rows

DTYPES = ["int8", "int4", "int2", "uint8", "uint4", "uint2", "int16", "float8_e4m3fn", "float8_e5m2", "float4_e2m1"]
GRANULARITIES = [PerTensor(), PerAxis(0), PerAxis(-1), PerToken(), PerBlock(32), PerBlock(5, 0), PerBlock((3, 7))]
GRANULARITIES += [PerDims((1,))]


def weight(rows=12, columns=70, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    return x * torch.rand(rows, 1, generator=generator).exp2() + (torch.rand(rows, columns) < 0.01) * 3


def errors(x, qparams, dtype, granularity, **limits):
    """Of each part that shares a scale, float64, by the op."""
    y = lq.fake_quantize_linear(x, *qparams, dtype=dtype, **granularity.qparam_args(x.dim()), **limits)
    return _rows((x.double() - y.double()), granularity).square().nansum(1)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float4_e2m1"])
def test_float_codes_may_need_a_wider_range(dtype):
    """Values of one magnitude have the least error just below a power of two, where steps are finest."""
    x = 1 + 0.02 * torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    found = errors(x, lq.search_qparams(x, dtype, PerAxis(0)), dtype, PerAxis(0))
    scale = lq.search_qparams(x, dtype, PerAxis(0), method="minmax")[0]
    grid = [errors(x, (scale * 2.0**f, None), dtype, PerAxis(0)) for f in np.linspace(-2, 1, 300)]
    assert (found / torch.stack(grid).amin(0)).median() < 1.1


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("symmetric", [True, False])
def test_never_worse_than_the_range(dtype, granularity, symmetric):
    x = weight()
    plain = lq.search_qparams(x, dtype, granularity, symmetric=symmetric, method="minmax")
    found = lq.search_qparams(x, dtype, granularity, symmetric=symmetric)
    assert found[0].shape == granularity.scale_shape(x.shape)
    assert (found[0] > 0).all() and found[0].dtype == torch.float32
    ours, theirs = (errors(x, qparams, dtype, granularity) for qparams in (found, plain))
    assert (ours <= theirs).all()
    if dtype in ("int4", "int2", "float4_e2m1") and granularity == PerTensor():
        assert ours.sum() < 0.9 * theirs.sum()


@pytest.mark.parametrize(
    "options", [{}, {"quant_min": -7}, {"quant_min": -5, "quant_max": 7}, {"quant_max": 3}], ids=str
)
@pytest.mark.parametrize("dtype", ["int4", "int2", "uint4"])
def test_the_sweep_finds_the_best_scale(dtype, options):
    """Beside a dense scan in NumPy of all scales up to twice that of the range."""
    if dtype != "int4" and options:
        options = {"uint4": {"quant_min": 1}, "int2": {"quant_min": -1}}[dtype]
    x = weight(20, 24)
    q_min = options.get("quant_min", {"int4": -8, "int2": -2, "uint4": 0}[dtype])
    q_max = options.get("quant_max", {"int4": 7, "int2": 1, "uint4": 15}[dtype])
    middle = min(max(0, q_min), q_max) if dtype != "uint4" else (q_max + q_min + 1) // 2
    exact = lq.search_qparams(x, dtype, PerAxis(0), method="exact", **options)
    ours = errors(x, exact, dtype, PerAxis(0), **options).numpy()
    for row, error in zip(x.double().numpy(), ours, strict=True):
        scales = np.abs(row).max() * np.linspace(0.02, 2, 40_000)[:, None]
        codes = np.clip(np.rint(row / scales), q_min - middle, q_max - middle)
        assert error <= np.square(row - codes * scales).sum(1).min() * (1 + 1e-6)


@pytest.mark.parametrize("method", ["auto", "zoom", "minmax"])
@pytest.mark.parametrize("dtype", ["int4", "uint2", "int8"])
def test_the_sweep_is_no_worse_than_any_other_method(dtype, method):
    for columns in (8, 70):
        x = weight(40, columns)
        exact = errors(x, lq.search_qparams(x, dtype, PerAxis(0), method="exact"), dtype, PerAxis(0))
        other = errors(x, lq.search_qparams(x, dtype, PerAxis(0), method=method), dtype, PerAxis(0))
        assert (exact <= other * (1 + 1e-6)).all()


def test_what_the_search_wins():
    """Errors over those of the best scale, 4 bits."""
    generator = torch.Generator().manual_seed(0)
    for x, granularity, mean, worst in [
        (torch.randn(64, 1024, generator=generator), PerAxis(0), 1.001, 1.01),
        (torch.randn(512, 128, generator=generator), PerBlock(128), 1.003, 1.3),
        (torch.randn(2048, 32, generator=generator), PerBlock(32), 1.02, 2.5),
    ]:
        best, zoom, plain = (
            errors(x, lq.search_qparams(x, "int4", granularity, method=method), "int4", granularity)
            for method in ("exact", "zoom", "minmax")
        )
        assert (zoom / best).mean() < mean and (zoom / best).max() < worst
        assert (plain / best).mean() > 1.1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int32], ids=str)
@pytest.mark.parametrize("code", ["int8", "int4", "float8_e4m3fn"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_types(dtype, code, symmetric):
    x = (weight() * 50).to(dtype)
    plain, found = (
        lq.search_qparams(x, code, PerBlock(32), symmetric=symmetric, method=method) for method in ("minmax", "auto")
    )
    assert found[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    same = x.double() if dtype == torch.float64 else x.float()
    ours, theirs = (errors(same, qparams, code, PerBlock(32)) for qparams in (found, plain))
    assert (ours <= theirs).all()


@pytest.mark.parametrize("dtype", ["int8", "int4", "uint4", "float8_e4m3fn", "float4_e2m1"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    "row",
    [
        [0.0] * 6,
        [3.0] * 6,
        [-3.0],
        [math.nan] * 3,
        [1.0, math.nan, math.inf, -2.0],
        [1e-45, -1e-44],
        [3e38, -3e38, 1e38],
    ],
    ids=str,
)
def test_odd_rows(row, dtype, symmetric):
    x = torch.tensor([row, [1.0] * len(row)])
    plain, found = (
        lq.search_qparams(x, dtype, PerAxis(0), symmetric=symmetric, method=method) for method in ("minmax", "auto")
    )
    assert found[0].isfinite().all() and (found[0] > 0).all()
    finite = torch.where(x.isfinite(), x, 0.0)
    ours, theirs = (errors(finite, qparams, dtype, PerAxis(0)) for qparams in (found, plain))
    assert (ours <= theirs).all()


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0), (3, 0, 2)])
def test_empty(shape):
    for granularity in (PerTensor(), PerAxis(0), PerToken(), PerBlock(2, 0)):
        scale, zero_point = lq.search_qparams(torch.empty(shape), "int4", granularity)
        assert scale.shape == granularity.scale_shape(shape) == zero_point.shape
        assert (scale > 0).all()


@pytest.mark.parametrize("method", ["exact", "zoom"])
@pytest.mark.parametrize("power", [-60, -1, 30])
def test_powers_of_two_scale_the_result_exactly(method, power):
    x = weight()
    scale, zero_point = lq.search_qparams(x, "int4", PerBlock(32), method=method)
    moved = lq.search_qparams(x * 2.0**power, "int4", PerBlock(32), method=method)
    assert torch.equal(moved[0], scale * 2.0**power) and torch.equal(moved[1], zero_point)


@pytest.mark.parametrize("method", ["exact", "zoom"])
def test_options_hold_for_the_result(method):
    x = weight()
    scale, _ = lq.search_qparams(x, "int4", PerAxis(0), method=method, power_of_two=True)
    assert torch.equal(scale.log2().round().exp2(), scale)
    scale, _ = lq.search_qparams(x, "int4", PerAxis(0), method=method, eps=0.7)
    assert (scale >= 0.7).all()


def test_a_range_without_zero():
    x = weight().abs() + 100
    for dtype in ("int8", "int4"):
        plain, found = (
            lq.search_qparams(x, dtype, PerAxis(0), symmetric=False, include_zero=False, method=method)
            for method in ("minmax", "auto")
        )
        assert (errors(x, found, dtype, PerAxis(0)) <= errors(x, plain, dtype, PerAxis(0))).all()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"method": "best"}, "method must be one of 'minmax', 'auto', 'exact', 'zoom', but got 'best'."),
        (
            {"method": "exact", "symmetric": False},
            "method must be 'auto' or 'zoom' for asymmetric codes, but got 'exact'.",
        ),
        (
            {"method": "exact", "dtype": "float4_e2m1"},
            "method must be 'auto' or 'zoom' for float4_e2m1 codes, but got 'exact'.",
        ),
    ],
)
def test_errors(options, sentence):
    with pytest.raises(ValueError) as error:
        lq.search_qparams(weight(), **{"dtype": "int4", **options})
    assert str(error.value) == f"search_qparams: {sentence}"
    with pytest.raises(RuntimeError, match="x must be float32, float16, bfloat16, float64 or int32, but got int64"):
        lq.search_qparams(torch.ones(3, dtype=torch.int64), "int4")


def test_layers_take_it():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32))
    x = torch.randn(256, 64)
    observed = lq.prepare(model, lq.MinMaxObserver("int16"))
    lq.calibrate(observed, [x])
    noise = []
    for method in ("minmax", "auto"):
        options = {"weight_dtype": "int4", "weight_granularity": PerBlock(32), "weight_method": method}
        quantized = lq.convert(observed, **options)
        noise.append(float((quantized(x) - model(x)).square().mean()))
        q, scale, _ = lq.quantize_tensor(
            model[0].weight, "int4", PerBlock(32), symmetric=True, method=method, packed=True
        )
        assert torch.equal(quantized[0].weight, q) and torch.equal(quantized[0].weight_scale, scale)
    assert noise[1] < 0.9 * noise[0]
    with pytest.raises(ValueError, match="method must be one of"):
        lq.convert(observed, weight_method="best")


def test_rows_are_what_shares_a_scale():
    x = torch.arange(24.0).reshape(4, 6)
    assert _rows(x, PerTensor()).shape == (1, 24)
    assert torch.equal(_rows(x, PerAxis(1)), x.t())
    blocks = _rows(x, PerBlock((3, 4)))
    assert blocks.shape == (4, 12)
    assert blocks[1].nan_to_num(-1).tolist() == [4, 5, -1, -1, 10, 11, -1, -1, 16, 17, -1, -1]
