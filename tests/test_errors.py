"""One table of bad calls and what they say: the CPU kernels and the fake kernels, word for word the same."""

import pytest
import torch
from torch import Tensor

import torch_linquant as lq

CODE_NUMBERS = (
    "uint8 (2), int8 (3), uint16 (4), int16 (5), int32 (6), float8_e4m3fn (17), float8_e4m3fnuz (18), "
    "float8_e5m2 (19), float8_e5m2fnuz (20), uint4 (21), int4 (22), float4_e2m1 (23), uint2 (25) or int2 (26)"
)
CODE_INPUTS = "uint8, int8, uint16, int16, int32, a float8 type, or codes as float32, float16, bfloat16 or float64"
FLOAT_NUMBERS = "float32 (1), float16 (10), float64 (11) or bfloat16 (16)"


def t(*shape, dtype=torch.float32):
    return torch.ones(shape).to(dtype)


X, S = t(4, 6), t()
U8, I8, I64, E4 = torch.uint8, torch.int8, torch.int64, torch.float8_e4m3fn
Q, D, F, DY, MM = (
    "quantize_linear",
    "dequantize_linear",
    "fake_quantize_linear",
    "dynamic_quantize_linear",
    "min_max",
)
OB, N = "observe_", t(dtype=I64)
FB, DB = "fake_quantize_linear_backward", "dequantize_linear_backward"
BACKWARD = (1, [0], 3, 0, None, None, "onnx", "clipped", True, True, True)
C8 = t(4, 6, dtype=I8)
PACKED = t(4, 3, dtype=U8)

# (op, arguments, keyword arguments, the sentence after "<op>: ")
TABLE = {
    "x-type": (Q, (t(4, dtype=I64), S), {}, "x must be float32, float16, bfloat16, float64 or int32, but got int64."),
    "x-bool": (F, (t(4, dtype=torch.bool), S), {}, "x must be float32, float16, bfloat16, float64 or int32, but got bool."),
    "x-complex": (MM, (t(4, dtype=torch.complex64),), {}, "x must be float32, float16, bfloat16, float64 or int32, but got complex64."),
    "codes-type": (D, (t(4, dtype=torch.bool), S), {}, f"x must be {CODE_INPUTS}, but got bool."),
    "codes-int64": (D, (t(4, dtype=I64), S), {}, f"x must be {CODE_INPUTS}, but got int64."),
    "scale-type": (Q, (X, t(dtype=torch.int32)), {}, "scale must be float32, float16, bfloat16, float64 or float8_e8m0fnu, but got int32."),
    "observe-type": (OB, (t(4, dtype=I64), S, S, N), {}, "x must be float32, float16, bfloat16, float64 or int32, but got int64."),
    "observe-shape": (OB, (X, S, S, N), {"axis": 1}, "r_min must have shape [6], but got shape []."),
    "observe-r_max": (OB, (X, t(6), t(4), N), {"axis": 1}, "r_max must have shape [6], but got shape [4]."),
    "observe-r_min-type": (OB, (X, t(dtype=torch.float64), S, N), {}, "r_min must be float32, but got float64."),
    "observe-nonfinite": (OB, (X, S, t(), t(dtype=torch.int32)), {}, "nonfinite must be int64, but got int32."),
    "observe-nonfinite-shape": (OB, (X, S, t(), t(1, dtype=I64)), {}, "nonfinite must have shape [], but got shape [1]."),
    "observe-bins": (OB, (X, S, t(), N, t(5000, dtype=I64)), {}, "counts must have a power of two from 4096 to 65536 bins in its last dimension, but got shape [5000]."),
    "observe-bins-few": (OB, (X, S, t(), N, t(2048, dtype=I64)), {}, "counts must have a power of two from 4096 to 65536 bins in its last dimension, but got shape [2048]."),
    "observe-bins-0d": (OB, (X, S, t(), N, N), {}, "counts must have a power of two from 4096 to 65536 bins in its last dimension, but got shape []."),
    "observe-counts": (OB, (X, t(6), t(6), N, t(4096, dtype=I64)), {"axis": 1}, "counts must have shape [6, 4096], but got shape [4096]."),
    "observe-counts-type": (OB, (X, S, t(), N, t(4096, dtype=torch.int32)), {}, "counts must be int64, but got int32."),
    "observe-axis": (OB, (X, S, t(), N), {"axis": 2}, "axis must be in [-2, 1] for x of shape [4, 6], but got 2."),
    "output_dtype": (Q, (X, S), {"output_dtype": 7}, f"output_dtype must be 0 or the number of {CODE_NUMBERS}, but got 7."),
    "output_dtype-negative": (F, (X, S), {"output_dtype": -3}, f"output_dtype must be 0 or the number of {CODE_NUMBERS}, but got -3."),
    "output_dtype-values": (D, (C8, S), {"output_dtype": 3}, f"output_dtype must be 0 or the number of {FLOAT_NUMBERS}, but got 3."),
    "output_dtype-huge": (D, (C8, S), {"output_dtype": 2**40}, f"output_dtype must be 0 or the number of {FLOAT_NUMBERS}, but got 1099511627776."),
    "output_dtype-dynamic": (DY, (X,), {"output_dtype": 6}, "output_dtype must be the number of an integer type of at most 16 bits, but got 6."),
    "output_dtype-dynamic-float8": (DY, (X,), {"output_dtype": 17}, "output_dtype must be the number of an integer type of at most 16 bits, but got 17."),
    "output_dtype-absent": (Q, (X, S, t(dtype=I64)), {}, "output_dtype must be given when zero_point is int64."),
    "zero_point-bool": (Q, (X, S, t(dtype=torch.bool)), {"output_dtype": 3}, "zero_point must be an integer or float32, float16, bfloat16 or float64 tensor for int8 codes, but got bool."),
    "zero_point-floating": (Q, (X, S, t()), {}, "output_dtype must be given when zero_point is float32."),
    "zero_point-floating-float8": (Q, (X, S, t()), {"output_dtype": 17}, "zero_point must be float8_e4m3fn for float8_e4m3fn codes, but got float32."),
    "ste": (F, (X, S), {"ste": "straight"}, 'ste must be "clipped" or "identity", but got "straight".'),
    "x_dtype-floating": (D, (X, S), {}, f"x_dtype must be the number of {CODE_NUMBERS} where x is float32, but got 0."),
    "packed-floating": (D, (X, S), {"x_dtype": 22, "packed_size": 6}, "x must be uint8 to be unpacked, but got float32."),
    "grad-type": (FB, (C8, X, S, None, *BACKWARD), {}, "grad must be float32, float16, bfloat16 or float64, but got int8."),
    "grad-shape": (FB, (t(6, 4), X, S, None, *BACKWARD), {}, "grad must have shape [4, 6], but got shape [6, 4]."),
    "grad-ste": (FB, (X, X, S, None, *BACKWARD[:7], "no", True, True, True), {}, 'ste must be "clipped" or "identity", but got "no".'),
    "grad-scale": (FB, (X, X, t(3), None, *BACKWARD), {}, "scale must have 6 elements to match x.size(1), but got shape [3]."),
    "grad-codes": (DB, (t(4), C8, S, None, 1, [0], 0, None, True, True, True), {}, "grad must have shape [4, 6], but got shape [4]."),
    "zero_point-float8": (Q, (X, S, t(dtype=I8)), {"output_dtype": 17}, "zero_point must be float8_e4m3fn for float8_e4m3fn codes, but got int8."),
    "zero_point-float8-for-int": (F, (X, S, t(dtype=E4)), {"output_dtype": 3}, "zero_point must be an integer or float32, float16, bfloat16 or float64 tensor for int8 codes, but got float8_e4m3fn."),
    "zero_point-float4": (Q, (X, S, t(dtype=I8)), {"output_dtype": 23}, "zero_point must be uint8 for float4_e2m1 codes, but got int8."),
    "zero_point-codes": (D, (t(4, dtype=E4), S, t(dtype=U8)), {}, "zero_point must be float8_e4m3fn for float8_e4m3fn codes, but got uint8."),
    "precision": (Q, (X, S), {"precision": 2}, f"precision must be 0 or the number of {FLOAT_NUMBERS}, but got 2."),
    "precision-huge": (Q, (X, S), {"precision": -4294967295}, f"precision must be 0 or the number of {FLOAT_NUMBERS}, but got -4294967295."),
    "block_size-none-0d": (Q, (t(), S), {"block_size": []}, "block_size must have 1 entry, but got 0."),
    "block_size-none-range": (MM, (t(),), {"block_size": []}, "block_size must have 1 entry, but got 0."),
    "block_size-vector": (Q, (t(4), S), {"block_size": [1, 2]}, "block_size must have 1 entry, but got 2."),
    "packed-huge": ("unpack", (t(1, dtype=U8).expand(2**62),), {"x_dtype": 25}, "x must not hold more codes than int64 counts, but got shape [4611686018427387904]."),
    "precision-negative": (Q, (X, S), {"precision": -1}, f"precision must be 0 or the number of {FLOAT_NUMBERS}, but got -1."),
    "arithmetic": (Q, (X, S), {"arithmetic": "tflite"}, 'arithmetic must be "onnx", "onednn" or "executorch", but got "tflite".'),
    "arithmetic-float8": (F, (X, S), {"arithmetic": "onednn", "output_dtype": 19}, 'arithmetic must be "onnx" for float8_e5m2 codes, but got "onednn".'),
    "arithmetic-precision": (Q, (X, S), {"arithmetic": "executorch", "precision": 10}, 'precision must be 0 or 1 (float32) with arithmetic "executorch", but got 10.'),
    "quant_min-float8": (Q, (X, S), {"quant_min": -5, "output_dtype": 17}, "quant_min must be left out for float8_e4m3fn codes, but got -5."),
    "quant_max-float4": (Q, (X, S), {"quant_max": 5, "output_dtype": 23}, "quant_max must be left out for float4_e2m1 codes, but got 5."),
    "quant_min": (Q, (X, S), {"quant_min": -1}, "quant_min must be within [0, 255] for uint8 codes, but got -1."),
    "quant_max": (F, (X, S), {"quant_max": 8, "output_dtype": 22}, "quant_max must be within [-8, 7] for int4 codes, but got 8."),
    "quant_min-order": (Q, (X, S), {"quant_min": 7, "quant_max": 7}, "quant_min must be less than quant_max, but got 7 and 7."),
    "packed": (Q, (X, S), {"packed": True}, "packed must be False for uint8 codes, but got True. Only 4-bit and 2-bit codes are packed."),
    "packed-0d": (Q, (t(), S), {"packed": True, "output_dtype": 22}, "x must have at least one dimension to be packed, but got a 0-d tensor."),
    "x_dtype": (D, (C8, S), {"x_dtype": 4}, "x_dtype must be 0 or the number of a type of at most 8 bits where x is int8, but got 4."),
    "x_dtype-unknown": (D, (C8, S), {"x_dtype": 99}, "x_dtype must be 0 or the number of a type of at most 8 bits where x is int8, but got 99."),
    "x_dtype-other": (D, (t(4, dtype=torch.int16), S), {"x_dtype": 3}, "x_dtype must be 0 or 5 (int16, the type of x), but got 3."),
    "packed_size-type": (D, (C8, S), {"packed_size": 6}, "packed_size must be left out for int8 codes, but got 6. Only 4-bit and 2-bit codes are packed."),
    "packed_size": (D, (PACKED, S), {"packed_size": 4, "x_dtype": 21}, "packed_size must fit the 3 bytes of x's last dimension, which hold 5 to 6 codes, but got 4."),
    "packed_size-negative": (D, (PACKED, S), {"packed_size": -1, "x_dtype": 21}, "packed_size must fit the 3 bytes of x's last dimension, which hold 5 to 6 codes, but got -1."),
    "packed_size-int8": (D, (C8, S), {"packed_size": 12, "x_dtype": 22}, "x must be uint8 to be unpacked, but got int8."),
    "packed_size-0d": (D, (t(dtype=U8), S), {"packed_size": 1, "x_dtype": 22}, "x must have at least one dimension to be unpacked, but got a 0-d tensor."),
    "block_size-count": (Q, (X, S), {"block_size": [2, 2, 2]}, "block_size must have 1 or 2 entries (one per dimension of x), but got 3."),
    "block_size-negative": (Q, (X, S), {"block_size": -2}, "block_size must not be negative, but got -2."),
    "block_size-negative-nd": (F, (X, S), {"block_size": [2, -1]}, "block_size must not be negative, but got -1."),
    "block_size-no-axis": (MM, (X,), {"block_size": 2}, "axis must be given with block_size 2, but got None."),
    "axis": (Q, (X, t(6)), {"axis": 2}, "axis must be in [-2, 1] for x of shape [4, 6], but got 2."),
    "axis-wild": (F, (X, t(6)), {"axis": -1250999896764}, "axis must be in [-2, 1] for x of shape [4, 6], but got -1250999896764."),
    "axis-wild-codes": (D, (C8, t(6)), {"axis": -1250999896764}, "axis must be in [-2, 1] for x of shape [4, 6], but got -1250999896764."),
    "axis-wild-blocks": (Q, (X, t(4, 3)), {"axis": 2**62, "block_size": 2}, f"axis must be in [-2, 1] for x of shape [4, 6], but got {2**62}."),
    "axis-wild-reduce": (DY, (X,), {"axis": -1250999896764}, "axis must be in [-2, 1] for x of shape [4, 6], but got -1250999896764."),
    "axis-vector": (Q, (t(6), t(6)), {}, "axis must be in [-1, 0] for x of shape [6], but got 1. Pass axis=0."),
    "axis-0d": (MM, (t(),), {"axis": 0}, "axis must be absent for a 0-d x, but got 0."),
    "blocks": (Q, (X, t(4, 2)), {"axis": 1, "block_size": 2}, "scale must have shape [4, 3] for block_size [2], but got shape [4, 2]."),
    "blocks-rank": (D, (C8, t(3)), {"axis": 1, "block_size": 2}, "scale must have shape [4, 3] for block_size [2], but got shape [3]."),
    "blocks-one-scale": (Q, (X, S), {"axis": 1, "block_size": 2}, "scale must have shape [4, 3] for block_size [2], but got shape []."),
    "blocks-nd": (Q, (X, t(2, 2)), {"block_size": [2, 2]}, "scale must have shape [2, 3] for block_size [2, 2], but got shape [2, 2]."),
    "blocks-packed": (D, (PACKED, t(4, 2)), {"axis": 1, "block_size": 2, "packed_size": 5, "x_dtype": 22}, "scale must have shape [4, 3] for block_size [2], but got shape [4, 2]."),
    "per-axis": (Q, (X, t(5)), {}, "scale must have 6 elements to match x.size(1), but got shape [5]."),
    "per-axis-hint": (Q, (X, t(4)), {}, "scale must have 6 elements to match x.size(1), but got shape [4]. Pass axis=0 to quantize along the dimension of size 4."),
    "per-axis-empty": (F, (X, t(0)), {"axis": -1}, "scale must have 6 elements to match x.size(-1), but got shape [0]."),
    "dims": (Q, (X, t(4, 3)), {}, "scale must have size 1 or 6 in dimension 1 of x's shape [4, 6], but got shape [4, 3]."),
    "rank": (Q, (X, t(1, 4, 6)), {}, "scale must have one element, one dimension or the 2 dimensions of x, but got shape [1, 4, 6]."),
    "rank-0d": (Q, (t(), t(3)), {}, "scale must have one element, one dimension or the 0 dimensions of x, but got shape [3]."),
    "zero_point-shape": (Q, (X, t(6), t(1, 6, dtype=I8)), {}, "zero_point must have scale's shape [6], but got shape [1, 6]."),
    "zero_point-shape-size": (D, (C8, t(6), t(4, dtype=I8)), {}, "zero_point must have scale's shape [6], but got shape [4]."),
    "zero_point-shape-scalar": (F, (X, t(6), t(1, dtype=I8)), {}, "zero_point must have scale's shape [6], but got shape [1]."),
    "zero_point-shape-vector": (F, (X, S, t(6, dtype=I8)), {}, "zero_point must have scale's shape [], but got shape [6]."),
    "pack-type": ("pack", (t(4),), {"x_dtype": 22}, "x must be uint8 or int8, but got float32."),
    "pack-x_dtype": ("pack", (C8,), {"x_dtype": 3}, "x_dtype must be the number of uint4 (21), int4 (22), float4_e2m1 (23), uint2 (25) or int2 (26), but got 3."),
    "pack-0d": ("pack", (t(dtype=U8),), {"x_dtype": 22}, "x must have at least one dimension to be packed, but got a 0-d tensor."),
    "unpack-type": ("unpack", (C8,), {"x_dtype": 22}, "x must be uint8 to be unpacked, but got int8."),
    "unpack-x_dtype": ("unpack", (PACKED,), {"x_dtype": 17}, "x_dtype must be the number of uint4 (21), int4 (22), float4_e2m1 (23), uint2 (25) or int2 (26), but got 17."),
    "unpack-size": ("unpack", (PACKED,), {"x_dtype": 25, "packed_size": 13}, "packed_size must fit the 3 bytes of x's last dimension, which hold 9 to 12 codes, but got 13."),
    "unpack-0d": ("unpack", (t(dtype=U8),), {"x_dtype": 25}, "x must have at least one dimension to be unpacked, but got a 0-d tensor."),
}  # fmt: skip


def on(device: str, args: tuple) -> tuple:
    return tuple(a.to(device) if isinstance(a, Tensor) else a for a in args)


def message(op, args, kwargs) -> str:
    with pytest.raises(RuntimeError) as raised:
        op(*args, **kwargs)
    assert type(raised.value) is RuntimeError
    return str(raised.value)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("case", TABLE.values(), ids=TABLE)
def test_sentence(case, device):
    name, args, kwargs, sentence = case
    op = getattr(torch.ops.linquant, name)
    assert message(op, on(device, args), kwargs) == f"{name}: {sentence}"


@pytest.mark.parametrize("name", [Q, F, D])
@pytest.mark.parametrize("argument", ["scale", "zero_point"])
def test_devices(name, argument):
    x, scale, zero_point = C8 if name == D else X, t(6), t(6, dtype=I8)
    args = (x, scale.to("meta"), zero_point) if argument == "scale" else (x, scale, zero_point.to("meta"))
    sentence = message(getattr(torch.ops.linquant, name), args, {})
    assert sentence == f"{name}: {argument} must be on x's device cpu, but got meta."


OUTS = {
    "shape": (t(4, 5, dtype=U8), "out must have shape [4, 6], but got shape [4, 5]."),
    "rank": (t(24, dtype=U8), "out must have shape [4, 6], but got shape [24]."),
    "type": (t(4, 6), "out must be uint8, but got float32."),
    "expanded": (t(1, 6, dtype=U8).expand(4, 6), "out must not be expanded, but got stride 0 in dimension 0."),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("case", OUTS.values(), ids=OUTS)
def test_out(case, device):
    out, sentence = case
    x, scale, given = on(device, (X, S, out))
    given = given.as_strided(out.shape, out.stride())
    assert message(torch.ops.linquant.quantize_linear.out, (x, scale), {"out": given}) == f"{Q}: {sentence}"
    assert out.eq(1).all()


def test_out_is_left_alone_by_a_refused_call():
    out = torch.full((4, 6), 77, dtype=U8)
    for name, args, kwargs, sentence in TABLE.values():
        if name == Q and not kwargs.get("packed"):
            got = message(torch.ops.linquant.quantize_linear.out, args, {**kwargs, "out": out})
            assert got == f"{Q}: {sentence}"
    assert out.eq(77).all()


def test_out_overlapping_an_input():
    buffer = torch.ones(40)
    x, scale = buffer[:24].view(4, 6), t()
    inside = buffer.view(U8)[8:32].view(4, 6)
    got = message(torch.ops.linquant.quantize_linear.out, (x, scale), {"out": inside})
    assert got == f"{Q}: out must not overlap x, but they share memory."
    shifted = buffer[1:25].view(4, 6)
    got = message(torch.ops.linquant.fake_quantize_linear.out, (x, scale), {"out": shifted})
    assert got == f"{F}: out must not overlap x, but they share memory."
    got = message(torch.ops.linquant.fake_quantize_linear.out, (t(40), buffer, None), {"axis": 0, "out": buffer})
    assert got == f"{F}: out must not overlap scale, but they share memory."
    assert buffer.eq(1).all()


def test_fake_quantize_in_place():
    for n in (1, 63, 64, 100, 1003, 70000):
        x = torch.randn(n) * 10
        want = lq.fake_quantize_linear(x, torch.tensor(0.3), dtype="int8")
        assert lq.fake_quantize_linear(x, torch.tensor(0.3), dtype="int8", out=x) is x
        assert x.equal(want)


VALUE_ERRORS = {
    "dtype": (lambda: lq.quantize_linear(X, S, dtype="int5"), "dtype must be one of uint8, int8, "),
    "dtype-float": (lambda: lq.quantize_linear(X, S, dtype=torch.float32), "but got 'float32'."),
    "precision": (lambda: lq.quantize_linear(X, S, precision=I8), "precision must be torch.float32, "),
    "values": (lambda: lq.dequantize_linear(C8, S, dtype=I8), "dtype must be torch.float32, float16, "),
    "src": (lambda: lq.dynamic_quantize(X.half(), t(1)), "dynamic_quantize: src must be float32, but got float16."),
    "scales": (lambda: lq.dynamic_quantize(X, t(1).half()), "scales must be float32, but got float16."),
    "zps": (lambda: lq.dynamic_quantize(X, t(1), t(1, dtype=I64)), "zps must be int8, uint8 or int32, but got int64."),
    "zps-shape": (lambda: lq.dynamic_quantize(X, t(1), t(2, dtype=I8)), "zps must be of scales' shape [1], but"),
    "qtype": (lambda: lq.dynamic_quantize(X, t(1), qtype="per_group"), 'qtype must be "per_tensor" or "per_channel"'),
    "mask-qtype": (lambda: lq.dynamic_quantize(X, t(6), qtype="per_channel", mask=2), "mask must be absent with qtype"),
    "mask-range": (lambda: lq.dynamic_quantize(X, t(1), mask=4), "mask must be in [0, 3], but got 4."),
    "mask-negative": (lambda: lq.dynamic_quantize(X, t(1), mask=-1), "mask must be in [0, 3], but got -1."),
    "onednn-dtype": (lambda: lq.dynamic_quantize(X, t(1), dtype="int4"), "dtype must be int8 or uint8, but got int4."),
    "axis": (lambda: lq.dynamic_quantize(X, t(6), qtype="per_channel", axis=9), "axis must be in [-2, 1], but got 9."),
    "count": (lambda: lq.dynamic_quantize(X, t(5), mask=2), "scales must have 6 elements, but got shape [5]."),
    "block": (lambda: lq.PerBlock(0), "block_size must be positive, but got 0."),
    "blocks": (lambda: lq.PerBlock((2, 2)).qparam_args(3), "block_size must have 3 entries, but got 2."),
    "dims": (lambda: lq.PerDims((3,)).qparam_args(2), "dims must be in [-2, 1], but got 3."),
}


@pytest.mark.parametrize("case", VALUE_ERRORS.values(), ids=VALUE_ERRORS)
def test_value_error(case):
    call, part = case
    with pytest.raises(ValueError) as raised:
        call()
    assert part in str(raised.value)


SENTENCES = {
    "float_codes-packed": (
        lambda: lq.quantize_linear(X, S, dtype="int4", float_codes=True, packed=True),
        "quantize_linear: packed must be False with float_codes, but got True.",
    ),
    "float_codes-out": (
        lambda: lq.quantize_linear(X, S, float_codes=True, out=X),
        "quantize_linear: out must be absent with float_codes, but got a tensor.",
    ),
    "float_codes-none": (
        lambda: lq.quantize_linear(X, S, float_codes=None),
        "quantize_linear: float_codes must be True or False, but got None.",
    ),
    "saturate-none": (
        lambda: lq.quantize_linear(X, S, dtype=E4, saturate=None),
        "quantize_linear: saturate must be True or False, but got None.",
    ),
    "packed-int": (
        lambda: lq.quantize_linear(X, S, dtype="int4", packed=1),
        "quantize_linear: packed must be True or False, but got 1.",
    ),
    "eps-small": (
        lambda: lq.choose_qparams(S, S, "int8", eps=1e-50),
        "choose_qparams: eps must be a positive float32, but got 1e-50.",
    ),
    "eps-large": (
        lambda: lq.choose_qparams(S, S, "int8", eps=1e300),
        "choose_qparams: eps must be a positive float32, but got 1e+300.",
    ),
    "quant_min-float": (
        lambda: lq.choose_qparams(S, S, "int8", quant_min=0.5),
        "choose_qparams: quant_min must be an integer, but got 0.5.",
    ),
    "range-complex": (
        lambda: lq.choose_qparams(S + 0j, S, "int8"),
        "choose_qparams: r_min must be real, but got complex64.",
    ),
    "scale-number": (
        lambda: lq.quantize_linear(X, 0.1),
        "quantize_linear: scale must be a tensor, but got 0.1. Write torch.tensor(0.1).",
    ),
    "zero_point-number": (
        lambda: lq.quantize_linear(X, S, 128),
        "quantize_linear: zero_point must be a tensor, but got 128. Write torch.tensor(128).",
    ),
    "fake-scale-number": (
        lambda: lq.fake_quantize_linear(X, 2),
        "fake_quantize_linear: scale must be a tensor, but got 2. Write torch.tensor(2).",
    ),
    "x-list": (lambda: lq.min_max([1.0]), "min_max: x must be a tensor, but got [1.0]. Write torch.tensor([1.0])."),
    "range-number": (
        lambda: lq.choose_qparams(-1.0, 1.0, "int8"),
        "choose_qparams: r_min must be a tensor, but got -1.0. Write torch.tensor(-1.0).",
    ),
    "dtype-absent": (
        lambda: lq.quantize_linear(X, S, t(dtype=I64)),
        "quantize_linear: dtype must be given where zero_point is int64.",
    ),
    "dtype-absent-float": (
        lambda: lq.fake_quantize_linear(X, S, t()),
        "fake_quantize_linear: dtype must be given where zero_point is float32.",
    ),
    "dynamic-float8": (
        lambda: lq.dynamic_quantize_linear(X, dtype="float8_e4m3fn"),
        "dynamic_quantize_linear: dtype must be an integer type of at most 16 bits, but got float8_e4m3fn.",
    ),
    "pack-int8": (
        lambda: lq.pack(C8, "int8"),
        "pack: dtype must be uint4, int4, float4_e2m1, uint2 or int2, but got int8.",
    ),
    "unpack-uint16": (
        lambda: lq.unpack(PACKED, "uint16"),
        "unpack: dtype must be uint4, int4, float4_e2m1, uint2 or int2, but got uint16.",
    ),
    "dynamic_quantize-number": (
        lambda: lq.dynamic_quantize(X, 0.1),
        "dynamic_quantize: scales must be a tensor, but got 0.1. Write torch.tensor(0.1).",
    ),
}


@pytest.mark.parametrize("case", SENTENCES.values(), ids=SENTENCES)
def test_sentences_of_the_functions(case):
    """What the functions say names their own arguments."""
    call, sentence = case
    with pytest.raises((TypeError, ValueError)) as error:
        call()
    assert str(error.value) == sentence
