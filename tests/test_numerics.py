"""Every op against the NumPy model, bit for bit: types, granularities, sizes, special values, degenerate parameters."""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

import reference as ref
import torch_linquant as lq
from adversary import nasty
from torch_linquant import resolve

FLOATS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "f64": torch.float64}
X_TYPES = {**FLOATS, "i32": torch.int32}
SCALE_TYPES = {**FLOATS, "e8m0": torch.float8_e8m0fnu}
NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float64: "float64"}
INTEGERS = list(ref.INTEGER_RANGES)
CODES = INTEGERS + list(ref.FORMATS)
# id -> (shape of x, shape of scale, axis, block_size)
GRANULARITIES = {
    "0d": ((), (), 1, [0]),
    "tensor": ((7, 139), (), 1, [0]),
    "one": ((7, 139), (1, 1), 1, [0]),
    "axis0": ((7, 139), (7,), 0, [0]),
    "axis-1": ((7, 139), (139,), -1, [0]),
    "axis1of3": ((3, 5, 49), (5,), 1, [0]),
    "axis1of4": ((2, 70, 3, 3), (70,), 1, [0]),
    "block32": ((7, 139), (7, 5), 1, [32]),
    "block16": ((7, 128), (7, 8), -1, [16]),
    "block64": ((5, 200), (5, 4), -1, [64]),
    "block70": ((5, 200), (5, 3), -1, [70]),
    "block5": ((4, 139), (4, 28), 1, [5]),
    "block_first": ((70, 9), (3, 9), 0, [32]),
    "block_over": ((5, 7), (5, 1), 1, [9]),
    "blocks": ((130, 150), (2, 3), 1, [128, 64]),
    "blocks3": ((4, 9, 35), (2, 1, 3), 1, [2, 0, 16]),
    "token": ((3, 4, 70), (3, 4, 1), 1, [1, 1, 0]),
    "dims": ((3, 4, 5, 6), (3, 1, 5, 1), 1, [0]),
    "vector": ((139,), (139,), 0, [0]),
}


def array(t: Tensor) -> np.ndarray:
    """Values as float64; int32 as the float32 that the ops make of it."""
    return (t.float() if t.dtype in (torch.int32, torch.float8_e8m0fnu) else t).double().numpy()


def code_bits(t: Tensor, code: str) -> np.ndarray:
    return (t.view(torch.uint8) if "float8" in code else t).numpy().astype(np.int64)


def assert_equal(got: Tensor, want: np.ndarray) -> None:
    """Equal bits; NaN of any sign and payload."""
    got = got.double().numpy()
    same = (got == want) & (np.signbit(got) == np.signbit(want)) | np.isnan(got) & np.isnan(want)
    assert got.shape == want.shape and same.all(), f"{(~same).sum()} differ: {got[~same][:5]} not {want[~same][:5]}"


def limits(code: str) -> tuple[int, int]:
    low, high = ref.INTEGER_RANGES.get(code, (-600, 600) if code != "float4_e2m1" else (-8, 8))
    return max(low, -(2**20)), min(high, 2**20)


def make_scale(shape, dtype, seed=0, base=0.0123) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (base * (0.5 + torch.rand(shape, generator=generator))).to(dtype)


def make_zero_point(code, shape, seed=0, dtype=None) -> Tensor | None:
    generator = torch.Generator().manual_seed(seed)
    if code == "float4_e2m1":
        return torch.randint(0, 16, shape, generator=generator).to(torch.uint8)
    if code in ref.FORMATS:
        return torch.ones(shape).to(resolve(code).storage)
    low, high = limits(code)
    return torch.randint(low, high + 1, shape, generator=generator).to(dtype or resolve(code).storage)


def make_x(shape, scale, code, dtype, seed=0) -> Tensor:
    n = int(np.prod(shape))
    if dtype == torch.int32:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(-300, 300, (n,), generator=generator, dtype=torch.int32).reshape(shape)
    return nasty(n, float(scale.float().reshape(-1)[0]), *limits(code), seed, dtype).reshape(shape)


def model_options(x, scale, kwargs) -> dict:
    """How the model is told what the op reads off types."""
    own = torch.float32 if scale.dtype == torch.float8_e8m0fnu else scale.dtype
    precision = kwargs.pop("precision", None) or own
    wide = torch.float64 in (x.dtype, scale.dtype, precision)
    return {"precision": NAMES[precision], "wide": wide, **kwargs}


def check(x, scale, zero_point, code, **kwargs) -> None:
    """quantize, packed quantize, dequantize, fake quantize of one call."""
    block_size = kwargs.pop("block_size", 0)
    kwargs["block_size"] = [block_size] if isinstance(block_size, int) else block_size
    grain = {key: kwargs[key] for key in ("axis", "block_size") if key in kwargs}
    options = model_options(x, scale, dict(kwargs))
    z = None if zero_point is None or "float8" in code else zero_point.numpy()
    want = ref.quantize(array(x), array(scale), z, code=code, **options)
    q = lq.quantize_linear(x, scale, zero_point, dtype=code, **kwargs)
    assert q.dtype == resolve(code).storage and q.stride() == torch.empty_like(x).stride()
    np.testing.assert_array_equal(code_bits(q, code), want)
    if code in ref.BITS and x.dim() > 0:
        packed = lq.quantize_linear(x, scale, zero_point, dtype=code, packed=True, **kwargs)
        np.testing.assert_array_equal(packed.numpy(), ref.pack(want, ref.BITS[code]))
    between = torch.float32 if scale.dtype == torch.float8_e8m0fnu else scale.dtype
    wide = scale.dtype == torch.float64
    values = ref.dequantize(want, array(scale), z, code=code, output=NAMES[between], wide=wide, **grain)
    back = lq.dequantize_linear(q, scale, zero_point, x_dtype=code, **grain)
    assert back.dtype == between
    assert_equal(back, values)
    fake = lq.fake_quantize_linear(x, scale, zero_point, dtype=code, **kwargs)
    assert fake.dtype == x.dtype and fake.stride() == torch.empty_like(x).stride()
    assert_equal(fake, array(back.to(x.dtype)))


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("has_zero_point", [True, False], ids=["zp", "nozp"])
def test_granularity(granularity, code, has_zero_point):
    x_shape, s_shape, axis, block_size = GRANULARITIES[granularity]
    scale = make_scale(s_shape, torch.float32)
    zero_point = make_zero_point(code, s_shape) if has_zero_point else None
    x = make_x(x_shape, scale, code, torch.float32)
    check(x, scale, zero_point, code, axis=axis, block_size=block_size)


@pytest.mark.parametrize("x_type", X_TYPES)
@pytest.mark.parametrize("scale_type", SCALE_TYPES)
@pytest.mark.parametrize("code", CODES)
def test_types(x_type, scale_type, code):
    for granularity in ("tensor", "axis-1", "block16"):
        x_shape, s_shape, axis, block_size = GRANULARITIES[granularity]
        scale = make_scale(s_shape, SCALE_TYPES[scale_type], base=0.7)
        x = make_x(x_shape, scale, code, X_TYPES[x_type])
        check(x, scale, make_zero_point(code, s_shape), code, axis=axis, block_size=block_size)


@pytest.mark.parametrize("precision", FLOATS)
@pytest.mark.parametrize("x_type", X_TYPES)
@pytest.mark.parametrize("scale_type", SCALE_TYPES)
def test_precision(precision, x_type, scale_type):
    for code in ("int8", "uint16", "int4", "float8_e5m2", "float8_e4m3fn", "float4_e2m1"):
        scale = make_scale((), SCALE_TYPES[scale_type], base=0.05)
        x = make_x((3, 200), scale, code, X_TYPES[x_type])
        check(x, scale, make_zero_point(code, ()), code, precision=FLOATS[precision])


@pytest.mark.parametrize("x_type", X_TYPES)
@pytest.mark.parametrize("arithmetic", ["onednn", "executorch"])
@pytest.mark.parametrize("code", INTEGERS)
def test_arithmetic(x_type, arithmetic, code):
    for granularity, scale_type in itertools.product(("tensor", "axis0", "axis-1", "block32"), ("f32", "f16")):
        x_shape, s_shape, axis, block_size = GRANULARITIES[granularity]
        scale = make_scale(s_shape, SCALE_TYPES[scale_type], base=0.3)
        x = make_x(x_shape, scale, code, X_TYPES[x_type])
        zero_point = make_zero_point(code, s_shape)
        check(x, scale, zero_point, code, axis=axis, block_size=block_size, arithmetic=arithmetic)


@pytest.mark.parametrize("code", list(ref.FORMATS))
def test_not_saturating(code):
    scale = make_scale((), torch.float32, base=0.5)
    for dtype in FLOATS.values():
        x = make_x((4, 500), scale, code, dtype) * 100
        check(x, scale, None, code, saturate=False)
        check(x, scale, None, code, saturate=True)


@pytest.mark.parametrize("code", ["uint8", "int8", "int16", "int4", "int2", "int32", "float8_e4m3fn", "float4_e2m1"])
@pytest.mark.parametrize(
    "n", [0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 63, 64, 65, 72, 73, 127, 128, 129, 136, 137, 140, 1003]
)
def test_sizes(code, n):
    for s_shape, axis in (((), 0), ((n,), 0)):
        scale = make_scale(s_shape, torch.float32)
        x = make_x((n,), make_scale((), torch.float32), code, torch.float32, seed=n)
        check(x, scale, make_zero_point(code, s_shape), code, axis=axis)
    check(make_x((3, n), scale.new_ones(1), code, torch.float16), torch.ones(3, -(-n // 16)), None, code, block_size=16)


@pytest.mark.parametrize(
    "scale", [0.0, -0.0, -0.5, 1e-40, 2.0**-126, 2.0**-91, 2.0**91, 3e38, float("inf"), float("nan")]
)
@pytest.mark.parametrize("code", CODES)
def test_degenerate_scale(scale, code):
    x = torch.cat([nasty(600, 0.5, -300, 300), nasty(300, 1e-38, -300, 300), nasty(300, 1e37, -9, 9)])
    for dtype in (torch.float32, torch.float64):
        check(x, torch.tensor(scale, dtype=dtype), make_zero_point(code, ()), code)
    mixed = torch.where(torch.arange(1200) % 7 == 0, scale, 0.5)
    check(x, mixed, make_zero_point(code, (1200,)), code, axis=0)


@pytest.mark.parametrize(
    "zero_point",
    [300, -300, 33000, -33000, 66000, -66000, 2**20, 2**21, 2**22, 2**24 + 1, 2**31 - 1, -(2**31), 2**40 + 1, -(2**52)],
)
@pytest.mark.parametrize("code", ["uint8", "int8", "uint16", "int4", "int32"])
def test_far_zero_point(zero_point, code):
    dtype = torch.int32 if abs(zero_point) < 2**31 or zero_point == -(2**31) else torch.int64
    scale = torch.tensor(0.25)
    around = torch.arange(-400, 400).float() * 0.25
    x = torch.cat([nasty(500, 0.25, -300, 300), around, around - zero_point * 0.25])
    z = torch.tensor(zero_point, dtype=dtype)
    check(x, scale, z, code)
    check(x.double(), scale, z, code)
    # A float16 quotient becomes infinite where a float32 one comes back into the range.
    check(x, scale.half(), z, code)
    check(x.bfloat16(), scale.bfloat16(), z, code)


def test_oracle_for_out_of_range_zero_point():
    got = lq.quantize_linear(torch.zeros(1), torch.tensor(1.0), torch.tensor(300), dtype="uint8", arithmetic="onednn")
    assert got.item() == 255


@pytest.mark.parametrize("zero_dtype", [torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.int64])
def test_zero_point_types(zero_dtype):
    scale = make_scale((139,), torch.float32)
    zero_point = torch.arange(139).to(zero_dtype)
    for code in ("int8", "uint16", "uint4"):
        x = make_x((7, 139), scale, code, torch.float32)
        check(x, scale, zero_point, code, axis=1)


@pytest.mark.parametrize(
    ("code", "low", "high"), [("int8", -127, 127), ("uint8", 3, 200), ("int4", -7, 6), ("int16", 0, 9)]
)
def test_narrow_range(code, low, high):
    for arithmetic in ("onnx", "onednn", "executorch"):
        scale = torch.tensor(0.3)
        x = make_x((5, 200), scale, code, torch.float32)
        check(x, scale, make_zero_point(code, ()), code, quant_min=low, quant_max=high, arithmetic=arithmetic)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_16_bit_input(dtype):
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    for scale, code in itertools.product((0.0371, 1.0, 300.0), ("uint8", "int16", "float8_e4m3fn", "float4_e2m1")):
        for scale_type in (torch.float32, dtype):
            check(x, torch.tensor(scale, dtype=scale_type), None, code)


@pytest.mark.parametrize("code", list(ref.FORMATS))
def test_every_exponent(code):
    """All exponents of float32 with ties of the format and their neighbours."""
    steps = torch.arange(0, 2**32, 2**18, dtype=torch.int64)
    bits = torch.cat([steps, steps + 1, steps - 1]).clamp(0, 2**32 - 1)
    x = torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(torch.float32)
    for saturate in (True, False):
        check(x, torch.tensor(1.0), None, code, saturate=saturate)


@pytest.mark.parametrize("output", FLOATS)
@pytest.mark.parametrize("code", CODES)
def test_every_code_dequantizes(code, output):
    info = resolve(code)
    if info.is_float:
        codes = torch.arange(2**info.bits).to(torch.uint8)
    else:
        low, high = limits(code)
        codes = torch.cat([torch.arange(low, min(high, low + 70000) + 1), torch.tensor([low, high])]).to(info.storage)
    bits = codes.numpy().astype(np.int64)
    for scale_type in SCALE_TYPES.values():
        scale = torch.tensor(0.37).to(scale_type)
        zero_point = make_zero_point(code, ())
        wide = scale_type == torch.float64
        z = None if "float8" in code else zero_point.numpy()
        want = ref.dequantize(bits, array(scale), z, code=code, output=NAMES[FLOATS[output]], wide=wide)
        assert_equal(lq.dequantize_linear(codes, scale, zero_point, x_dtype=code, dtype=FLOATS[output]), want)


def test_dequantize_int32_differences_are_exact():
    x = torch.tensor([2**31 - 1, -(2**31), 16777217, 0], dtype=torch.int32)
    z = torch.tensor(-(2**31), dtype=torch.int32)
    got = lq.dequantize_linear(x, torch.tensor(1.0, dtype=torch.float64), z)
    assert got.tolist() == [2.0**32 - 1, 0.0, 2.0**31 + 16777217, 2.0**31]
    assert lq.dequantize_linear(x, torch.tensor(1.0), z).tolist() == [2.0**32, 0.0, 2164260864.0, 2.0**31]


def test_int32_input_becomes_float32():
    x = torch.tensor([16777217, 2**31 - 1], dtype=torch.int32)
    assert lq.quantize_linear(x, torch.tensor(1.0), dtype="int32").tolist() == [16777216, 2**31 - 1]


def test_fake_quantize_of_int32_truncates():
    x = torch.arange(-50, 50, dtype=torch.int32)
    q = lq.dequantize_linear(lq.quantize_linear(x, torch.tensor(0.7), dtype="int8"), torch.tensor(0.7))
    assert torch.equal(lq.fake_quantize_linear(x, torch.tensor(0.7), dtype="int8"), q.to(torch.int32))


@pytest.mark.parametrize("code", list(ref.BITS))
@pytest.mark.parametrize("n", [*range(0, 18), 63, 64, 65, 127, 130, 1001])
def test_packing(code, n):
    info = resolve(code)
    bits = torch.randint(-128, 128, (3, n), dtype=torch.int8)
    packed = lq.pack(bits, code)
    np.testing.assert_array_equal(packed.numpy(), ref.pack(bits.numpy().astype(np.int64), info.bits))
    codes = lq.unpack(packed, code, n)
    assert codes.dtype == info.storage
    want = bits.numpy().astype(np.int64) & (2**info.bits - 1)
    if info.qmin < 0 and not info.is_float:
        want = np.where(want >= 2 ** (info.bits - 1), want - 2**info.bits, want)
    np.testing.assert_array_equal(codes.numpy(), want)
    for scale in (torch.rand(()) + 0.1, torch.rand(3, 1) + 0.1, torch.rand(3, -(-n // 5)) + 0.1):
        block_size = 5 if scale.dim() == 2 and scale.shape[1] != 1 else 0
        kwargs = {"x_dtype": code, "block_size": block_size if n > 5 else 0}
        scale = scale if n > 5 else torch.rand(()) + 0.1
        unpacked = lq.dequantize_linear(codes, scale, **kwargs)
        assert torch.equal(lq.dequantize_linear(packed, scale, packed_size=n, **kwargs), unpacked)


DYNAMIC = {
    "tensor": ((7, 139), None, [0]),
    "axis0": ((7, 139), 0, [0]),
    "axis-1": ((7, 139), -1, [0]),
    "axis1of3": ((3, 5, 49), 1, [0]),
    "block32": ((7, 139), 1, [32]),
    "block_first": ((70, 9), 0, [32]),
    "token": ((3, 4, 70), None, [1, 1, 0]),
    "blocks": ((130, 150), None, [128, 64]),
}


def slices(x: np.ndarray, axis, block_size):
    """(index in the result, part of x) for every part that shares a scale."""
    rank = x.ndim
    if axis is None and block_size == [0]:
        yield (), x
        return
    if len(block_size) == 1 and block_size[0] == 0:
        for i in range(x.shape[axis]):
            yield (i,), np.take(x, i, axis)
        return
    blocks = block_size if len(block_size) > 1 else [1] * rank
    if len(block_size) == 1:
        blocks[axis] = block_size[0]
    blocks = [size if b == 0 else b for b, size in zip(blocks, x.shape, strict=True)]
    counts = [-(-size // b) for size, b in zip(x.shape, blocks, strict=True)]
    for index in np.ndindex(*counts):
        yield index, x[tuple(slice(i * b, (i + 1) * b) for i, b in zip(index, blocks, strict=True))]


@pytest.mark.parametrize("x_type", X_TYPES)
@pytest.mark.parametrize("granularity", DYNAMIC)
def test_min_max(granularity, x_type):
    shape, axis, block_size = DYNAMIC[granularity]
    x = make_x(shape, torch.tensor(0.5), "int8", X_TYPES[x_type])
    low, high = lq.min_max(x, axis=axis, block_size=block_size)
    assert low.dtype == (torch.float64 if x_type == "f64" else torch.float32)
    for index, part in slices(array(x), axis, list(block_size)):
        finite = part[np.isfinite(part)]
        assert low[index].item() == finite.min(initial=np.inf) + 0.0
        assert high[index].item() == finite.max(initial=-np.inf) + 0.0
        assert not np.signbit(low[index].item()) or low[index] != 0


@pytest.mark.parametrize("symmetric", [False, True], ids=["asymmetric", "symmetric"])
@pytest.mark.parametrize("code", ["uint8", "int8", "uint16", "int16", "uint4", "int4", "uint2", "int2"])
@pytest.mark.parametrize("granularity", DYNAMIC)
def test_dynamic_quantize(granularity, code, symmetric):
    shape, axis, block_size = DYNAMIC[granularity]
    for x_type in X_TYPES.values():
        x = (torch.randn(shape, generator=torch.Generator().manual_seed(4)) * 30).to(x_type)
        if x_type.is_floating_point:
            x.view(-1)[5::97] = float("nan")
        kwargs = {"axis": axis, "block_size": list(block_size)}
        y, scale, zero_point = lq.dynamic_quantize_linear(x, dtype=code, symmetric=symmetric, **kwargs)
        real = np.float64 if x_type == torch.float64 else np.float32
        for index, part in slices(array(x), axis, list(block_size)):
            part = part[~np.isnan(part)]
            want_scale, want_zero = ref.dynamic(part.min(initial=0), part.max(initial=0), code, symmetric, real)
            assert scale[index].item() == float(want_scale)
            assert zero_point[index].item() == int(want_zero)
        again = {"axis": 1 if axis is None else axis, "block_size": list(block_size)}
        assert torch.equal(y, lq.quantize_linear(x, scale, zero_point, dtype=code, **again))


def test_dynamic_of_the_standard():
    """ONNX's own corner cases: ties of the zero point, zeros, nothing, NaN."""
    for ends, zero in (((-0.5, 254.5), 0), ((-1.5, 253.5), 2), ((-2.5, 252.5), 2)):
        assert lq.dynamic_quantize_linear(torch.tensor(ends))[2].item() == zero
    for x in (torch.zeros(4), torch.empty(0), torch.full((3,), float("nan"))):
        y, scale, zero_point = lq.dynamic_quantize_linear(x)
        assert (scale.item(), zero_point.item(), y.tolist()) == (1.0, 0, [0] * x.numel())
