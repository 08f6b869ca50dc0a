"""Faults that users of quantization tools have reported in public, with the answers that are right.

Each test covers the kind of fault, and its docstring names where the fault was seen. Kinds that a whole file covers
(layouts, error messages, observers) are there.
"""

import pytest
import torch

import torch_linquant as lq
from torch_linquant import PerAxis, PerBlock, PerTensor, choose_qparams

INF, NAN = float("inf"), float("nan")
FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
INTEGERS = [t.name for t in lq.QUANT_DTYPES if not t.is_float]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("arithmetic", ["onnx", "onednn", "executorch"])
def test_fake_and_real_quantization_are_one_function(dtype, arithmetic):
    """pytorch#108639, #88800, ao#229, #1964, #2060: the trained model and the converted one differ near ties."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.rand(9, 1, generator=generator) * 0.1 + 1e-3
    x = (torch.randint(-300, 300, (9, 2000), generator=generator) / 2 * scale).to(dtype)
    zero_point = torch.randint(-128, 128, (9, 1), generator=generator, dtype=torch.int8)
    grain = {"arithmetic": arithmetic}
    for s in (scale, scale.to(dtype)):
        q = lq.quantize_linear(x, s, zero_point, **grain)
        fake = lq.fake_quantize_linear(x, s, zero_point, **grain)
        assert torch.equal(fake, lq.dequantize_linear(q, s, zero_point).to(dtype))


def test_zero_point_is_added_after_rounding():
    """pytorch#37188, #19714: x = 0.5 scale with zero point 1."""
    for s in (1.0, 0.25, 0.1):
        scale, zero_point = torch.tensor(s), torch.tensor(1, dtype=torch.uint8)
        x = torch.tensor([0.5, 1.5, 2.5, -0.5]) * scale
        assert lq.quantize_linear(x, scale, zero_point).tolist() == [1, 3, 3, 1]


def test_float16_rounds():
    """onnxruntime#18576: float16 truncated."""
    x, scale = torch.tensor([0.05002, -0.05002]).half(), torch.tensor(0.09998).half()
    assert lq.quantize_linear(x, scale, dtype="int8").tolist() == [1, -1]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("code", INTEGERS)
def test_not_a_number_is_the_lowest_code(code, dtype):
    """onnx#5879 and five answers in one stack: here one, at every length (vector body and tail)."""
    info = lq.resolve(code)
    for n in range(1, 71):
        x = torch.full((n,), NAN, dtype=dtype)
        assert (lq.quantize_linear(x, torch.tensor(0.1), dtype=code).long() == info.qmin).all()


@pytest.mark.parametrize("scale_shape", [(), (5,)], ids=["tensor", "axis"])
def test_infinity_saturates(scale_shape):
    """pytorch#106780, #116992, #154328, #168704: +inf became the lowest code, per channel still."""
    x = torch.tensor([1.0, INF, NAN, -INF, 26.0])
    got = lq.fake_quantize_linear(x, torch.full(scale_shape, 0.1), dtype="int8", axis=0)
    want = torch.tensor([10.0, 127.0, -128.0, -128.0, 127.0]) * torch.tensor(0.1)
    assert torch.equal(got, want)


@pytest.mark.parametrize("value", [2.0**32, 3e9, 4e9, 2.0**31, 1e38, INF])
@pytest.mark.parametrize("code", INTEGERS)
def test_beyond_int32_saturates(code, value):
    """pytorch#60077 and quantized_decomposed's int32: what leaves int32 wrapped, in the tail or everywhere."""
    info = lq.resolve(code)
    for n in range(1, 71):
        for sign, want in ((1, info.qmax), (-1, info.qmin)):
            x = torch.full((n,), sign * value)
            for arithmetic in ("onnx", "onednn", "executorch"):
                q = lq.quantize_linear(x, torch.tensor(0.5), dtype=code, arithmetic=arithmetic)
                assert (q.long() == want).all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_ties_go_to_even(dtype):
    """tt-metal#56525, vllm#4525: half away from zero."""
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -2.5], dtype=dtype)
    for code in ("int8", "int16", "int32", "int4"):
        assert lq.quantize_linear(x, torch.tensor(1.0), dtype=code).tolist() == [0, 2, 2, 0, -2, -2]


def test_float8_saturates_only_where_asked():
    """ao#1912, pytorch#178817, ml_dtypes#400, #260, Model-Optimizer#1633; torch's e5m2 cast never saturates."""
    x, one = torch.tensor([1000, 448, 464, 465, INF, NAN]), torch.tensor(1.0)
    for saturate, want in ((True, [448.0] * 5), (False, [NAN, 448.0, 448.0, NAN, NAN])):
        got = lq.quantize_linear(x, one, dtype=torch.float8_e4m3fn, saturate=saturate).float()
        assert torch.equal(got, torch.tensor([*want, NAN])) or torch.allclose(
            got, torch.tensor([*want, NAN]), rtol=0, atol=0, equal_nan=True
        )
    x = torch.tensor([1e5, 61440, INF])
    for saturate, value in ((True, 57344.0), (False, INF)):
        got = lq.quantize_linear(x, one, dtype=torch.float8_e5m2, saturate=saturate).float()
        assert got.tolist() == [value] * 3


def test_symmetric_zero_points():
    """pytorch#48473: the zero point of a symmetric unsigned type is the middle; of a signed one 0."""
    low, high = torch.tensor(-1.0), torch.tensor(3.0)
    assert choose_qparams(low, high, "uint8", symmetric=True)[1].item() == 128
    assert choose_qparams(low, high, "int8", symmetric=True)[1].item() == 0


def test_range_without_zero():
    """pytorch#173075: a range that does not hold 0 is widened unless asked not to be."""
    low, high = torch.tensor(3.0), torch.tensor(4.0)
    assert choose_qparams(low, high, "uint8")[0].item() == pytest.approx(4 / 255)
    assert choose_qparams(low, high, "uint8", include_zero=False)[0].item() == pytest.approx(1 / 255)


@pytest.mark.parametrize("value", [0.0, 3.0, -2.0, 1e-30, 1e-45])
@pytest.mark.parametrize("code", ["uint8", "int8", "int4", "float8_e4m3fn", "float4_e2m1"])
def test_constant_groups(code, value):
    """GPTQModel#1529, #1531, hqq#159, sparseml#1872: a group of one value had scale 0 and NaN codes."""
    x = torch.full((4, 64), value)
    for grain in (PerTensor(), PerAxis(0), PerBlock(32)):
        for symmetric in (False, True):
            q, scale, zero_point = lq.quantize_tensor(x, code, grain, symmetric=symmetric)
            assert (scale > 0).all() and scale.isfinite().all()
            back = lq.dequantize_linear(q, scale, zero_point, x_dtype=code, **grain.qparam_args(2))
            assert ((back - x).abs() <= scale.max() * 0.51).all()


def test_scale_zero_follows_division():
    """fake_quantize with scale 0 gave -0 and quantize_per_tensor 127: here what ONNX Runtime computes."""
    x = torch.tensor([0.0, 1.0, -1.0])
    for code in INTEGERS:
        info = lq.resolve(code)
        want = [info.qmin, info.qmax, info.qmin]
        assert lq.quantize_linear(x, torch.tensor(0.0), dtype=code).tolist() == want


def test_small_scales_are_not_clamped():
    """ao#4534, #3819, #3664, #2180, #4362, #1766: eps of bfloat16 (0.0078) as the smallest scale."""
    x = torch.tensor([1e-4, -2e-4], dtype=torch.bfloat16)
    q, scale, _ = lq.quantize_tensor(x, "int8", symmetric=True)
    assert scale.dtype == torch.float32 and scale.item() < 2e-6
    assert q.tolist() == [64, -128]


def test_half_inputs_have_float32_parameters():
    """ao: scales of bfloat16 tensors computed in bfloat16 moved 28 of 256 codes."""
    x = torch.randn(256, generator=torch.Generator().manual_seed(0)).bfloat16()
    q, scale, zero_point = lq.quantize_tensor(x, "uint8")
    want = lq.quantize_tensor(x.float(), "uint8")
    assert torch.equal(scale, want[1]) and torch.equal(zero_point, want[2]) and torch.equal(q, want[0])


@pytest.mark.parametrize("scale_dtype", [*FLOATS, torch.float8_e8m0fnu])
@pytest.mark.parametrize("x_dtype", FLOATS)
def test_any_scale_type_per_channel(x_dtype, scale_dtype):
    """pytorch#120903: double and bfloat16 scales per channel ended in an internal assert."""
    x = torch.tensor([[2.0, 8.0], [-4.0, 16.0]], dtype=x_dtype)
    got = lq.quantize_linear(x, torch.tensor([1.0, 4.0]).to(scale_dtype), dtype="int8")
    assert got.tolist() == [[2, 2], [-4, 4]]


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.int64])
def test_any_integer_zero_point(dtype):
    """int64 refused here, int32 there."""
    for shape in ((), (2,)):
        zero_point = torch.full(shape, 3, dtype=dtype)
        got = lq.fake_quantize_linear(torch.ones(2, 2), torch.ones(shape), zero_point, dtype="uint8")
        assert torch.equal(got, torch.ones(2, 2))


def test_short_last_blocks():
    """torchchat#522, #1362, llm-compressor#1489, #2082: a group size that does not divide the row."""
    x, scale = torch.ones(1, 7) * 2, torch.tensor([[1.0, 2.0, 4.0]])
    x = torch.tensor([[0.0, 1, 2, 4, 4, 4, 8]])
    assert lq.quantize_linear(x, scale, block_size=3).tolist() == [[0, 1, 2, 2, 2, 2, 2]]
    for columns, block in ((288, 256), (4304, 32), (7, 100)):
        x = torch.randn(3, columns)
        q, scale, _ = lq.quantize_tensor(x, "int8", PerBlock(block), symmetric=True)
        assert scale.shape == (3, -(-columns // block))
        assert ((lq.dequantize_linear(q, scale, block_size=block) - x).abs() <= 0.51 * scale.max()).all()


def test_a_vector_can_be_blocked():
    """onnxruntime#32730: blocks of a 1-D tensor treated as per axis."""
    x = torch.arange(10, 90, 10, dtype=torch.int8)
    scale, zero_point = torch.tensor([0.5, 2.0]), torch.tensor([0, 10], dtype=torch.int8)
    got = lq.dequantize_linear(x, scale, zero_point, axis=0, block_size=4)
    assert got.tolist() == [5, 10, 15, 20, 80, 100, 120, 140]


def test_axis_far_outside_is_an_error():
    """pytorch#128693, #128694, torch-xpu-ops#3963: a segmentation fault."""
    for fn in (lq.quantize_linear, lq.fake_quantize_linear):
        with pytest.raises(RuntimeError, match="axis must be in"):
            fn(torch.ones(2, 3), torch.ones(3), axis=-1250999896764)
    with pytest.raises(RuntimeError, match="axis must be in"):
        lq.dequantize_linear(torch.ones(2, 3, dtype=torch.int8), torch.ones(3), axis=-1250999896764)
    for fn in (lq.min_max, lq.dynamic_quantize_linear):
        with pytest.raises(RuntimeError, match="axis must be in"):
            fn(torch.ones(2, 3), axis=-1250999896764)


def test_no_dimension_and_no_channel():
    """vllm#7342 and observers that failed on 0-d tensors: () in, () out; no channels in, none out."""
    for x in (torch.tensor(3.0), torch.zeros(3, 0), torch.zeros(0, 3)):
        q, scale, zero_point = lq.quantize_tensor(x, "uint8")
        assert q.shape == x.shape and scale.shape == ()
        assert lq.dequantize_linear(q, scale, zero_point).shape == x.shape
    x = torch.zeros(3, 0)
    for axis in (0, 1):
        q, scale, _ = lq.quantize_tensor(x, "uint8", PerAxis(axis))
        assert q.shape == (3, 0) and scale.shape == (x.size(axis),)


def test_a_scale_is_never_changed_after_its_codes_were_made():
    """Model-Optimizer#2243, transformers#47030: codes of one scale, stored with another."""
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    q, scale, _ = lq.quantize_tensor(x, "int8", PerBlock(32), symmetric=True, power_of_two=True)
    assert torch.equal(q, lq.quantize_linear(x, scale, dtype="int8", block_size=32))
    stored = scale.to(torch.float8_e8m0fnu)
    assert torch.equal(stored.float(), scale)
    assert torch.equal(lq.dequantize_linear(q, stored, block_size=32), lq.dequantize_linear(q, scale, block_size=32))


@pytest.mark.parametrize("kind", [lq.MinMaxObserver, lq.MovingAverageMinMaxObserver, lq.PercentileObserver])
def test_one_nan_does_not_poison_calibration(kind):
    """onnxruntime#23749, modelopt#729: one NaN made every later scale NaN."""
    clean, spoilt = kind("uint8"), kind("uint8")
    for batch in torch.randn(4, 1000, generator=torch.Generator().manual_seed(0)):
        clean(batch)
        spoilt(torch.cat([batch, torch.tensor([NAN, INF, -INF])]))
    with pytest.warns(UserWarning, match="12"):
        assert [t.item() for t in spoilt.calculate_qparams()] == [t.item() for t in clean.calculate_qparams()]


def test_percentile_says_what_is_kept():
    """onnxruntime#10571, #13346: percent to keep taken for percent to drop, and one tail forgotten."""
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0)) + 1
    observer = lq.PercentileObserver("uint8", percentile=99.9)
    observer(x)
    r_min, r_max = observer.range()
    assert 0.998 <= ((x >= r_min) & (x <= r_max)).double().mean() < 1
    assert (x <= r_max).double().mean() >= 0.999 - 1e-4 and (x >= r_min).double().mean() >= 0.999 - 1e-4


def test_least_error_remembers_every_batch():
    """torchao's MSE observer forgot all batches but the last: the scale of (100 x, x) was that of x alone."""
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    observers = [lq.MSEObserver("uint8") for _ in range(3)]
    for observer, batches in zip(observers, [(100 * x, x), (x, 100 * x), (x,)], strict=True):
        for batch in batches:
            observer(batch)
    first, second, alone = (observer.calculate_qparams()[0].item() for observer in observers)
    assert first == second > 10 * alone


def test_a_double_beyond_float32_leaves_a_finite_scale():
    """pytorch#100051 and the like: a histogram whose range had to be known before it could be filled."""
    observer = lq.PercentileObserver("uint8")
    for batch in ([1e300, 1.0], [1e-30, 0.0], [0.5, -0.25]):
        observer(torch.tensor(batch, dtype=torch.float64))
    with pytest.warns(UserWarning, match="1 "):
        scale, _ = observer.calculate_qparams()
    assert 0 < scale < 0.01
