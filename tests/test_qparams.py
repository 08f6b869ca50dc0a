"""choose_qparams and quantize_tensor: the formula to the digit, its options, and every range that could break it."""

import numpy as np
import pytest
import torch
from torch import tensor

from torch_linquant import (
    PerAxis,
    PerBlock,
    PerDims,
    PerTensor,
    PerToken,
    choose_qparams,
    dequantize_linear,
    quantize_linear,
    quantize_tensor,
    resolve,
)

INTEGERS = ["uint8", "int8", "uint16", "int16", "int32", "uint4", "int4", "uint2", "int2"]
FLOAT_CODES = ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float4_e2m1"]
BOOK = tensor([[191.6, -13.5, 728.6], [92.14, 295.5, -184.0], [0.0, 684.6, 245.5]])
BOOK2 = tensor(
    [
        [1.6714, -1.3308, 0.4337, 1.0956],
        [-1.8622, 2.4572, 1.0099, -1.0139],
        [0.2309, 1.3375, -0.8019, -0.6140],
        [-0.4675, -1.4661, -1.0904, 0.4055],
    ]
)


def test_textbook():
    scale, zero_point = choose_qparams(tensor(-184.0), tensor(728.6), "int8")
    assert scale == tensor(3.5788233, dtype=torch.float32) and zero_point == -77
    scale64, _ = choose_qparams(tensor(-184.0).double(), tensor(728.6).double(), "int8")
    assert scale64.item() == 3.578823433670343
    q, scale, zero_point = quantize_tensor(BOOK, "int8")
    error = (dequantize_linear(q, scale, zero_point) - BOOK).square().mean()
    assert f"{error:.4f}" == "1.5730"


def test_textbook_codes():
    q, scale, zero_point = quantize_tensor(BOOK2, "int8")
    want = [[81, -97, 8, 47], [-128, 127, 42, -78], [-4, 61, -65, -54], [-46, -105, -82, 6]]
    assert q.tolist() == want and zero_point == -18
    error = (dequantize_linear(q, scale, zero_point) - BOOK2).square().mean()
    assert f"{error:.2e}" == "2.77e-05"


def ranges(n=2000):
    rng = np.random.default_rng(0)
    ends = rng.standard_normal((2, n)) * 10.0 ** rng.uniform(-30, 30, n)
    return tensor(np.sort(ends, axis=0), dtype=torch.float32)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_formula(dtype):
    """The formula in NumPy's float32, for ranges that hold zero."""
    low, high = ranges()
    low, high = low.clamp(max=0), high.clamp(min=0)
    code = resolve(dtype)
    steps = np.float32(code.qmax - code.qmin)
    want = np.maximum((high.numpy() - low.numpy()) / steps, np.finfo(np.float32).tiny)
    # int32 needs more digits than float32 has.
    number = np.float64 if dtype == "int32" else np.float32
    z = number(code.qmin) - low.numpy().astype(number) / want.astype(number)
    z = np.rint(np.clip(z.astype(np.float64), code.qmin, code.qmax))
    scale, zero_point = choose_qparams(low, high, dtype)
    assert scale.numpy().tobytes() == want.tobytes()
    assert zero_point.dtype == code.storage
    assert (zero_point.numpy() == z).all()


@pytest.mark.parametrize("dtype", INTEGERS)
def test_symmetric(dtype):
    low, high = ranges()
    code = resolve(dtype)
    scale, zero_point = choose_qparams(low, high, dtype, symmetric=True)
    largest = torch.maximum(low.abs(), high.abs()).double()
    want = (2 * largest / float(np.float32(code.qmax - code.qmin))).float().clamp(min=torch.finfo(torch.float32).tiny)
    assert torch.equal(scale, want)
    middle = 0 if code.qmin < 0 else (code.qmax + 1) // 2
    assert (zero_point.to(torch.int64) == middle).all()


def test_symmetric_unsigned_middle():
    assert choose_qparams(tensor(-1.0), tensor(2.0), "uint8", symmetric=True)[1] == 128


@pytest.mark.parametrize("dtype", FLOAT_CODES)
def test_float_codes(dtype):
    scale, zero_point = choose_qparams(tensor([-3.0, 0.0]), tensor([2.0, 5.0]), dtype)
    assert zero_point is None
    assert torch.equal(scale, tensor([3.0, 5.0]) / resolve(dtype).qmax)
    x = torch.randn(64, 40)
    q, scale, _ = quantize_tensor(x, dtype, PerAxis(0))
    y = dequantize_linear(q, scale, x_dtype=dtype, axis=0)
    assert q.dtype == resolve(dtype).storage and (y - x).abs().max() < (0.7 if dtype == "float4_e2m1" else 0.3)


BROKEN = {
    "zeros": (0.0, 0.0),
    "negative_zero": (-0.0, -0.0),
    "constant": (5.0, 5.0),
    "negative": (-5.0, -5.0),
    "unseen": (float("inf"), float("-inf")),
    "nan": (float("nan"), float("nan")),
    "half_nan": (float("nan"), 1.0),
    "infinite": (float("-inf"), float("inf")),
    "huge": (-3.4028235e38, 3.4028235e38),
    "tiny": (0.0, 1e-45),
    "close": (1e30, 1.0000001e30),
}


@pytest.mark.parametrize("dtype", INTEGERS + FLOAT_CODES)
@pytest.mark.parametrize("ends", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("include_zero", [True, False])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("power_of_two", [True, False])
def test_any_range_gives_a_finite_positive_scale(dtype, ends, include_zero, symmetric, power_of_two):
    options = {"include_zero": include_zero, "symmetric": symmetric, "power_of_two": power_of_two}
    for float_type in (torch.float32, torch.float64):
        scale, zero_point = choose_qparams(*tensor(ends, dtype=float_type), dtype, **options)
        assert scale.dtype == float_type and scale.isfinite() and scale > 0
        if zero_point is not None and (include_zero or symmetric):
            assert resolve(dtype).qmin <= zero_point.item() <= resolve(dtype).qmax
        elif zero_point is not None:
            assert zero_point.dtype == torch.int32


def test_the_widest_range_is_covered():
    scale, zero_point = choose_qparams(tensor(-3.4028235e38), tensor(3.4028235e38), "uint8")
    assert scale.item() == pytest.approx(2 * 3.4028235e38 / 255) and zero_point == 128


@pytest.mark.parametrize("c", [5.0, -5.0, 1e-30, 3e38])
def test_constant_without_zero_is_exact(c):
    for dtype in ("int8", "int32", "uint4"):
        scale, zero_point = choose_qparams(tensor(c), tensor(c), dtype, include_zero=False)
        q = quantize_linear(tensor([c]), scale, zero_point, dtype=dtype)
        assert dequantize_linear(q, scale, zero_point, x_dtype=dtype).item() == tensor(c).item()


def test_include_zero_off_is_the_formula():
    scale, zero_point = choose_qparams(tensor(2.0), tensor(4.55), "uint8", include_zero=False)
    assert scale == (tensor(4.55) - tensor(2.0)) / 255
    assert zero_point == -200  # outside the codes, as 0 is


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "int4", "uint2"])
@pytest.mark.parametrize("ends", [(100.0, 101.0), (3.0, 4.0), (-7.5, -7.25), (-1.0, 3.0), (1e-3, 2.0)])
def test_a_range_without_zero_is_covered(dtype, ends):
    """Every value comes back to within half a step, and one for the rounded zero point."""
    x = torch.linspace(*ends, 97)
    q, scale, zero_point = quantize_tensor(x, dtype, include_zero=False)
    back = dequantize_linear(q, scale, zero_point, x_dtype=dtype)
    step = (ends[1] - ends[0]) / (resolve(dtype).qmax - resolve(dtype).qmin)
    assert scale.item() == pytest.approx(step, rel=1e-4)
    assert (back - x).abs().max() <= step + 2.0**-22 * max(map(abs, ends))


def test_eps():
    assert choose_qparams(tensor(0.0), tensor(0.0), "int8")[0].item() == 2.0**-126
    assert choose_qparams(tensor(0.0), tensor(1e-4), "int8", eps=0.5)[0].item() == 0.5
    # No bfloat16 eps creeps in.
    assert choose_qparams(tensor(0.0).bfloat16(), tensor(1e-3).bfloat16(), "uint8")[0] < 1e-5


@pytest.mark.parametrize("float_type", [torch.float32, torch.float64])
def test_power_of_two_rounds_up(float_type):
    largest = torch.cat([2.0 ** torch.arange(-100.0, 100), torch.rand(500) * 1e3 + 1e-3]).to(float_type)
    plain = choose_qparams(-largest, largest, "int8", symmetric=True, quant_min=-127)[0]
    scale = choose_qparams(-largest, largest, "int8", symmetric=True, quant_min=-127, power_of_two=True)[0]
    assert (torch.frexp(scale).mantissa == 0.5).all()
    assert ((scale >= plain) & (scale / 2 < plain)).all()
    exact = choose_qparams(
        -127 * 2.0 ** tensor(-3.0), 127 * 2.0 ** tensor(-3.0), "int8", symmetric=True, quant_min=-127
    )
    assert exact[0] == 0.125


def test_narrow_range():
    scale, zero_point = choose_qparams(tensor(-1.0), tensor(1.0), "int8", symmetric=True, quant_min=-127, quant_max=127)
    assert scale == tensor(1.0) / 127 and zero_point == 0


@pytest.mark.parametrize("x_dtype", [torch.float16, torch.bfloat16, torch.int32])
def test_qparams_are_float32_whatever_x_is(x_dtype):
    x = (torch.randn(7, 9) * 50).to(x_dtype)
    q, scale, zero_point = quantize_tensor(x, "uint8", PerAxis(0))
    want = quantize_tensor(x.float(), "uint8", PerAxis(0))
    assert scale.dtype == torch.float32
    assert all(torch.equal(a, b) for a, b in zip((q, scale, zero_point), want, strict=True))


GRANULARITIES = {
    "tensor": (PerTensor(), []),
    "axis0": (PerAxis(0), [6]),
    "axis-1": (PerAxis(-1), [70]),
    "token": (PerToken(), [6, 5, 1]),
    "block32": (PerBlock(32), [6, 5, 3]),
    "blocks": (PerBlock((2, 0, 64)), [3, 1, 2]),
    "dims": (PerDims((0, -1)), [6, 1, 70]),
}


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int4", "int16"])
@pytest.mark.parametrize(("granularity", "shape"), GRANULARITIES.values(), ids=GRANULARITIES)
def test_quantize_tensor(granularity, shape, dtype):
    x = torch.randn(6, 5, 70) * torch.rand(6, 1, 70) * 10
    x[0, 0, 0], x[1, 1, 1] = float("nan"), float("inf")
    q, scale, zero_point = quantize_tensor(x, dtype, granularity)
    assert list(scale.shape) == list(zero_point.shape) == shape
    args = granularity.qparam_args(3)
    y = dequantize_linear(q, scale, zero_point, x_dtype=dtype, **args)
    finite = x.isfinite()
    step = dequantize_linear(torch.ones_like(q), scale, torch.zeros_like(zero_point), x_dtype=dtype, **args).abs()
    assert ((y - x).abs()[finite] <= 0.501 * step[finite] + 1e-5).all()
    if resolve(dtype).bits < 8:
        packed = quantize_tensor(x, dtype, granularity, packed=True)[0]
        assert torch.equal(packed, torch.ops.linquant.pack(q, x_dtype=resolve(dtype).number))


@pytest.mark.parametrize(
    "granularity", [PerTensor(), PerAxis(0), PerToken(), PerDims(()), PerDims((0,)), PerBlock((3,))]
)
def test_vectors(granularity):
    x = torch.randn(7)
    q, scale, zero_point = quantize_tensor(x, "int8", granularity)
    y = dequantize_linear(q, scale, zero_point, **granularity.qparam_args(1))
    assert (y - x).abs().max() < 0.05


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
def test_empty(shape):
    for granularity in (PerTensor(), PerAxis(0), PerToken()):
        q, scale, _ = quantize_tensor(torch.empty(shape), "int8", granularity)
        assert q.shape == shape and scale.isfinite().all()


def test_traces_without_reading_values():
    def function(x):
        return quantize_tensor(x, "int8", PerAxis(0), power_of_two=True)

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (4, 6):
        x = torch.randn(rows, 9)
        for a, b in zip(compiled(x), function(x), strict=True):
            assert torch.equal(a, b)


BAD = {
    "shape": (dict(r_max=torch.ones(3)), "r_max must have r_min's shape [2], but got shape [3]."),
    "eps": (dict(eps=0.0), "eps must be a positive float32, but got 0.0."),
    "eps-nan": (dict(eps=float("nan")), "eps must be a positive float32, but got nan."),
    "dtype": (dict(dtype="int7"), "dtype must be one of "),
    "quant_min": (dict(quant_min=-129), "quant_min must be within [-128, 127] for int8 codes, but got -129."),
    "order": (dict(quant_min=5, quant_max=5), "quant_min must be less than quant_max, but got 5 and 5."),
    "float": (dict(dtype="float8_e5m2", quant_max=5), "quant_max must be left out for float8_e5m2 codes, but got 5."),
}


@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
def test_bad_options(case):
    given, part = case
    arguments = {"r_min": torch.zeros(2), "r_max": torch.ones(2), "dtype": "int8", **given}
    with pytest.raises(ValueError) as raised:
        choose_qparams(arguments.pop("r_min"), arguments.pop("r_max"), arguments.pop("dtype"), **arguments)
    assert part in str(raised.value)
