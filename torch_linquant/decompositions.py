"""The ops in PyTorch's own: for backends that take an exported program and know no op of this package.

The same bits as the kernels, in plain tensor ops. Exact for zero points up to 2^52.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ._fake import float_code_type
from .dtypes import BY_NUMBER, FLOAT_NUMBERS, QuantDtype, resolve
from .granularity import block_lengths, spread_parameter

_ops = torch.ops.linquant
_FLOAT_BY_NUMBER = {number: dtype for dtype, number in FLOAT_NUMBERS.items()}


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return a table for `ExportedProgram.run_decompositions` that leaves no op of this package in a program.

    It covers the ops of programs for inference; gradients are not decomposed.

    >>> class Model(torch.nn.Module):
    ...     def forward(self, x, scale):
    ...         return _ops.fake_quantize_linear(x, scale, output_dtype=3)
    >>> program = torch.export.export(Model(), (torch.randn(4), torch.tensor(0.1)))
    >>> "linquant" in str(program.run_decompositions(decompositions()).graph)
    False
    """
    table: dict[str, Callable[..., Any]] = {
        "quantize_linear": _quantize_linear,
        "dequantize_linear": _dequantize_linear,
        "fake_quantize_linear": _fake_quantize_linear,
        "dynamic_quantize_linear": _dynamic_quantize_linear,
        "min_max": _min_max,
        "pack": _pack,
        "unpack": _unpack,
    }
    plain = {getattr(_ops, name).default: function for name, function in table.items()}
    return {**plain, _ops.quantize_linear.float_codes: functools.partial(_quantize_linear, float_codes=True)}


# --- floats ----------------------------------------------------------------------------------------------------------


def _to_odd(v: Tensor) -> Tensor:
    """float64 to float32 with the last bit sticky, so that rounding once more rounds but once."""
    f = v.float()
    bits = f.view(torch.int32)
    back = f.double()
    up = torch.where(v.abs() > back.abs(), 1, -1).to(torch.int32)
    move = (back != v) & ~v.isnan() & (bits % 2 == 0)
    return torch.where(move, bits + up, bits).view(torch.float32)


def _round_to(v: Tensor, dtype: torch.dtype) -> Tensor:
    """v in a float type, rounded once."""
    if v.dtype == torch.float64 and dtype in (torch.float16, torch.bfloat16):
        v = _to_odd(v)
    return v.to(dtype)


def _encode_float(v: Tensor, code: QuantDtype, saturate: bool) -> Tensor:
    """float32 to codes; torch's cast rounds right, and every format here has its own idea of too large."""
    a = v.abs()
    if code.bits == 4:
        steps = ((0.25, a.gt), (0.75, a.ge), (1.25, a.gt), (1.75, a.ge), (2.5, a.gt), (3.5, a.ge), (5.0, a.gt))
        magnitude = sum(
            (above(limit).to(torch.uint8) for limit, above in steps), torch.zeros_like(a, dtype=torch.uint8)
        )
        sign = torch.signbit(v).to(torch.uint8) * 8
        return torch.where(v.isnan(), 7, magnitude + sign)
    bits = v.clamp(-code.qmax, code.qmax).to(code.storage).view(torch.uint8)
    negative = torch.signbit(v).to(torch.uint8) * 128
    if "fnuz" in code.name:
        nan = torch.full_like(bits, 128)
        overflow = nan
    else:
        nan = negative + 127
        overflow = nan if "e4m3" in code.name else negative + 124
    if not saturate:
        most = {"float8_e4m3fn": 464.0, "float8_e4m3fnuz": 248.0}.get(code.name, 61440.0)
        over = a > most if code.name == "float8_e4m3fn" else a >= most
        bits = torch.where(over, overflow, bits)
    return torch.where(v.isnan(), nan, bits).view(code.storage)


def _decode_float(x: Tensor, code: QuantDtype) -> Tensor:
    if code.bits == 8:
        return (x if x.dtype == code.storage else x.view(code.storage)).float()
    magnitude = x & 7
    exponent = magnitude >> 1
    large = (1.0 + 0.5 * (magnitude & 1)) * (1 << exponent.to(torch.int32)) * 0.5
    value = torch.where(exponent == 0, 0.5 * magnitude, large)
    return torch.where((x & 8) != 0, -value, value)


# --- parameters ------------------------------------------------------------------------------------------------------


def _zero_points(zero_point: Tensor, low: float, high: float) -> Tensor:
    if zero_point.is_floating_point():
        zero_point = zero_point.double().nan_to_num(nan=low).clamp(low, high).round()
    return zero_point.to(torch.int64)


def _code(output_dtype: int, zero_point: Tensor | None) -> QuantDtype:
    if output_dtype:
        return BY_NUMBER[output_dtype]
    return resolve("uint8" if zero_point is None else zero_point.dtype)


# --- ops -------------------------------------------------------------------------------------------------------------


def _quantize_linear(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    *,
    axis: int = 1,
    block_size: Sequence[int] = (0,),
    output_dtype: int = 0,
    saturate: bool = True,
    precision: int = 0,
    quant_min: int | None = None,
    quant_max: int | None = None,
    arithmetic: str = "onnx",
    packed: bool = False,
    float_codes: bool = False,
) -> Tensor:
    code = _code(output_dtype, zero_point)
    own = torch.float32 if scale.dtype == torch.float8_e8m0fnu else scale.dtype
    to = _FLOAT_BY_NUMBER.get(precision, own)
    wide = torch.float64 in (x.dtype, scale.dtype, to)
    number = float_code_type(code, x.dtype)
    x = x.float() if x.dtype == torch.int32 else x

    def spread(p: Tensor) -> Tensor:
        return spread_parameter(p, x.shape, axis, block_size)

    if code.is_float:
        dtype = torch.float64 if wide else torch.float32
        q = _round_to(x.to(dtype) / spread(scale.to(dtype)), to).to(dtype)
        if zero_point is not None and code.bits == 4:
            q = _round_to(q + spread(_decode_float(zero_point, code)).to(dtype), to).to(dtype)
        y = _encode_float(_to_odd(q) if wide else q, code, saturate)
        if packed:
            return _pack(y, x_dtype=code.number)
        return _decode_float(y, code).to(number) if float_codes else y
    low = code.qmin if quant_min is None else quant_min
    high = code.qmax if quant_max is None else quant_max
    z = None if zero_point is None else spread(_zero_points(zero_point, low, high))
    if arithmetic == "onnx":
        dtype = torch.float64 if wide else torch.float32
        q = _round_to(x.to(dtype) / spread(scale.to(dtype)), to).double().round()
        q = q if z is None else q + z
    else:
        q = x.float() * spread(1.0 / scale.float())
        if arithmetic == "onednn":
            q = (q if z is None else q + z.float()).clamp(low, high).round()
        else:
            q = q.double().round()
            q = q if z is None else q + z
    y = torch.where(q.isnan(), low, q.clamp(low, high))
    if float_codes:
        return y.to(number)
    y = y.to(torch.int32).to(code.storage) if code.bits < 32 else y.to(torch.int64).to(code.storage)
    return _pack(y, x_dtype=code.number) if packed else y


def _dequantize_linear(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    *,
    axis: int = 1,
    block_size: Sequence[int] = (0,),
    output_dtype: int = 0,
    x_dtype: int = 0,
    packed_size: int | None = None,
) -> Tensor:
    code = BY_NUMBER[x_dtype] if x_dtype else resolve(x.dtype)
    dtype = torch.float64 if scale.dtype == torch.float64 else torch.float32
    own = torch.float32 if scale.dtype == torch.float8_e8m0fnu else scale.dtype
    floating = x.dtype in FLOAT_NUMBERS
    if packed_size is not None:
        x = _unpack(x, x_dtype=code.number, packed_size=packed_size)

    def spread(p: Tensor) -> Tensor:
        return spread_parameter(p, x.shape, axis, block_size)

    if code.is_float:
        d = x if floating else _decode_float(x, code)
        if zero_point is not None and code.bits == 4:
            d = d - spread(_decode_float(zero_point, code))
    else:
        z = None if zero_point is None else spread(_zero_points(zero_point, code.qmin, code.qmax))
        if floating:
            d = x.double() if z is None else x.double() - z
        else:
            codes = x.to(torch.int64)
            if code.bits < 8:
                codes = codes & ((1 << code.bits) - 1)
                if code.signed:
                    sign = 1 << (code.bits - 1)
                    codes = (codes ^ sign) - sign
            d = codes if z is None else codes - z
    return _round_to(d.to(dtype) * spread(scale.to(dtype)), _FLOAT_BY_NUMBER.get(output_dtype, own))


def _fake_quantize_linear(
    x: Tensor, scale: Tensor, zero_point: Tensor | None = None, *, ste: str = "clipped", **options: Any
) -> Tensor:
    code = _code(options.get("output_dtype", 0), zero_point)
    if zero_point is not None and zero_point.is_floating_point():
        limits = (options.get("quant_min"), options.get("quant_max"))
        ends = (code.qmin if limits[0] is None else limits[0], code.qmax if limits[1] is None else limits[1])
        zero_point = _zero_points(zero_point, *ends)
    grain = {key: options[key] for key in ("axis", "block_size") if key in options}
    q = _quantize_linear(x, scale, zero_point, **{**options, "output_dtype": code.number})
    return _dequantize_linear(q, scale, zero_point, x_dtype=code.number, **grain).to(x.dtype)


def _ends(x: Tensor, keep: Tensor, axis: int | None, block_size: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The smallest and the largest of the elements to keep, for each part."""
    x = x.double() if x.dtype == torch.float64 else x.float()
    infinity = float("inf")
    parts = [torch.where(keep, x, infinity), torch.where(keep, x, -infinity)]
    blocks = block_lengths(x.dim(), 0 if axis is None else axis, block_size)
    if blocks is not None:
        for dim, block in enumerate(blocks):
            if block == 1:
                continue
            after = [0, 0] * (x.dim() - dim - 1)
            block = block or x.size(dim)
            for i, (fill, reduce) in enumerate(((infinity, torch.amin), (-infinity, torch.amax))):
                t = torch.nn.functional.pad(parts[i], [*after, 0, -parts[i].size(dim) % block], value=fill)
                parts[i] = reduce(t.unflatten(dim, (-1, block)), dim + 1)
    else:
        dims = [d for d in range(x.dim()) if axis is None or d != axis % x.dim()]
        if dims:
            # An end that is always there: a part may have no element.
            for i, (fill, reduce) in enumerate(((infinity, torch.amin), (-infinity, torch.amax))):
                parts[i] = reduce(torch.nn.functional.pad(parts[i], [0, 1] * x.dim(), value=fill), dims)
                if axis is not None:
                    parts[i] = parts[i][:-1]
    return parts[0] + 0.0, parts[1] + 0.0


def _min_max(x: Tensor, *, axis: int | None = None, block_size: Sequence[int] = (0,)) -> tuple[Tensor, Tensor]:
    return _ends(x, torch.isfinite(x), axis, block_size)


def _dynamic_quantize_linear(
    x: Tensor,
    *,
    axis: int | None = None,
    block_size: Sequence[int] = (0,),
    output_dtype: int = 2,
    symmetric: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    code = BY_NUMBER[output_dtype]
    low, high = _ends(x, ~torch.isnan(x), axis, block_size)
    low, high = low.clamp(max=0.0), high.clamp(min=0.0)
    width = 2 * torch.maximum(-low, high) if symmetric else high - low
    scale = torch.where(width == 0, 1.0, width / (code.qmax - code.qmin))
    if symmetric:
        middle = 0 if code.signed else (int(code.qmax) + 1) // 2
        zero_point = torch.full_like(scale, middle, dtype=torch.int32).to(code.storage)
    else:
        z = code.qmin - low / scale
        z = torch.where(z.isnan(), code.qmin, z.clamp(code.qmin, code.qmax)).round()
        zero_point = z.to(torch.int32).to(code.storage)
    axis = 1 if axis is None else axis
    y = _quantize_linear(x, scale, zero_point, output_dtype=output_dtype, axis=axis, block_size=block_size)
    return y, scale, zero_point


def _pack(x: Tensor, *, x_dtype: int) -> Tensor:
    code = BY_NUMBER[x_dtype]
    x = x.to(torch.int32) & ((1 << code.bits) - 1)
    x = torch.nn.functional.pad(x, [0, -x.size(-1) % code.per_byte])
    parts = x.unflatten(-1, (x.size(-1) // code.per_byte, code.per_byte)).unbind(-1)
    return sum((p << (code.bits * i) for i, p in enumerate(parts[1:], 1)), parts[0]).to(torch.uint8)


def _unpack(x: Tensor, *, x_dtype: int, packed_size: int | None = None) -> Tensor:
    code = BY_NUMBER[x_dtype]
    mask = (1 << code.bits) - 1
    codes = torch.stack([(x >> (code.bits * i)) & mask for i in range(code.per_byte)], -1).flatten(-2)
    if packed_size is not None:
        codes = codes.narrow(-1, 0, packed_size)
    if code.signed and not code.is_float:
        sign = 1 << (code.bits - 1)
        return ((codes.to(torch.int32) ^ sign) - sign).to(torch.int8)
    return codes
