"""What PyTorch's own quantization computes, and how it differs.

fake_quantize_* and quantized_decomposed compute arithmetic="executorch". quantize_per_tensor adds the zero point in one
fused operation, rne(clamp(fma(x, 1 / scale, zero_point))): "onednn" wherever the product is exact or the zero point 0.
"""

import math

import numpy as np
import pytest
import torch
import torch.ao.quantization.fx._decomposed  # noqa: F401  (registers quantized_decomposed)

import torch_linquant as lq
from adversary import nasty

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated")
decomposed = torch.ops.quantized_decomposed
QTYPES = {"uint8": torch.quint8, "int8": torch.qint8}
# quantized_decomposed inverts a scale in double: given float32 values, the results are equal.
SCALES = tuple(float(np.float32(s)) for s in (0.0371, 0.25, 1 / 3, 2.0, 117.3))
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]


def limits(code: str) -> tuple[int, int]:
    info = lq.resolve(code)
    return int(info.qmin), int(info.qmax)


def finite(code: str, scale: float, zero_point: int, seed: int = 0) -> torch.Tensor:
    """Finite values; few enough codes outside for sums with the zero point not to overflow anything."""
    low, high = limits(code)
    x = nasty(20_000, scale, low - zero_point - 10, high - zero_point + 10, seed)
    # quantize_per_tensor of torch 2.13 goes astray where x / scale leaves int32.
    return x[torch.isfinite(x) & ((x / scale).abs() < 2**30)]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("code", QTYPES)
def test_per_tensor(code, scale):
    low, high = limits(code)
    for zero_point in (low, 0, 1, 77, high):
        x = finite(code, scale, zero_point)
        s, z = torch.tensor(scale), torch.tensor(zero_point)
        got = lq.quantize_linear(x, s, z, dtype=code, arithmetic="executorch")
        args = (x, scale, zero_point, low, high)
        assert torch.equal(got, decomposed.quantize_per_tensor(*args, getattr(torch, code)))
        fake = lq.fake_quantize_linear(x, s, z, dtype=code, arithmetic="executorch")
        assert torch.equal(fake, torch.fake_quantize_per_tensor_affine(*args))
        back = decomposed.dequantize_per_tensor(got, *args[1:], getattr(torch, code))
        assert torch.equal(lq.dequantize_linear(got, s, z), back)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("code", QTYPES)
def test_quantize_per_tensor(code, scale):
    low, high = limits(code)
    for zero_point in (low, 0, 1, 77, high):
        x = finite(code, scale, zero_point)
        got = lq.quantize_linear(x, torch.tensor(scale), torch.tensor(zero_point), dtype=code, arithmetic="onednn")
        want = torch.quantize_per_tensor(x, scale, zero_point, QTYPES[code]).int_repr()
        if zero_point == 0 or math.frexp(scale)[0] == 0.5:
            assert torch.equal(got, want)
        else:
            assert (got != want).float().mean() < 0.05


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("code", QTYPES)
def test_per_axis(code, axis):
    low, high = limits(code)
    x = finite(code, 0.3, 5)[:9900].reshape(12, 25, 33)
    generator = torch.Generator().manual_seed(axis)
    scale = torch.rand(x.size(axis), generator=generator) + 0.05
    zero_point = torch.randint(low, high + 1, scale.shape, generator=generator)
    got = lq.quantize_linear(x, scale, zero_point, axis=axis, dtype=code, arithmetic="executorch")
    args = (x, scale.double(), zero_point, axis, low, high, getattr(torch, code))
    assert torch.equal(got, decomposed.quantize_per_channel(*args))
    fake = lq.fake_quantize_linear(x, scale, zero_point, axis=axis, dtype=code, arithmetic="executorch")
    assert torch.equal(fake, torch.fake_quantize_per_channel_affine(x, scale, zero_point.int(), axis, low, high))


def test_the_default_is_neither():
    x = finite("uint8", SCALES[0], 77)
    s, z = torch.tensor(SCALES[0]), torch.tensor(77, dtype=torch.uint8)
    exact = lq.quantize_linear(x, s, z)
    for arithmetic in ("onednn", "executorch"):
        assert 0.01 < (lq.quantize_linear(x, s, z, arithmetic=arithmetic) != exact).float().mean() < 0.5


@pytest.mark.parametrize("dtype", FLOAT8)
def test_float8_casts(dtype):
    """At scale 1, inside the finite range, quantization is PyTorch's cast, and dequantization its inverse."""
    x = nasty(50_000, 1.0, -500, 500)
    info = torch.finfo(dtype)
    x = x[x.abs() <= info.max]
    q = lq.quantize_linear(x, torch.tensor(1.0), dtype=dtype)
    assert torch.equal(q.view(torch.uint8), x.to(dtype).view(torch.uint8))
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)
    back = lq.dequantize_linear(every, torch.tensor(1.0))
    assert torch.equal(back.nan_to_num(nan=1e9), every.float().nan_to_num(nan=1e9))
