"""The ops as functions: torch.ops.linquant.* with types by name, and the place where their meaning is written down.

All follow one formula, ONNX's (QuantizeLinear and DequantizeLinear, opset 25), bit for bit what ONNX Runtime computes:

    quantize      y = clamp(round(x / scale) + zero_point, quant_min, quant_max)     ties to even, true division
    dequantize    y = (x - zero_point) * scale

The shape of `scale` says which elements share one. For x of shape [O, I]:

    []                     one for the tensor (a scale of one element, of any rank)
    [O] or [I]             one for each index of `axis`, which is 1 unless given
    [O, ceil(I / B)]       one for each block of `block_size=B` along `axis`; the last block may be short
    [ceil(O/B0), ...]      N-D blocks, `block_size=[B0, B1]`: one length for each dimension, 0 for the whole dimension
    [O, 1] or [1, I]       size 1 in the dimensions that share a scale (per token; oneDNN's mask)

`zero_point` has the shape of `scale` (any shape of one element, where scale has one). Any layout of x is taken without
a copy, and a dense one is kept, as torch.empty_like keeps it. No value of a tensor is checked, so no call waits for a
device.

Which call carries a gradient. Integers and float8 cannot, so `dequantize_linear(quantize_linear(x))` trains nothing.
These do, by the straight-through estimator, to x, to scale (LSQ, arXiv 1902.08153) and to a zero_point of a floating
type (LSQ+, arXiv 2004.09576), which is rounded and clamped to the range of the codes on the way:

    fake_quantize_linear(x, scale, zero_point)
    dequantize_linear(quantize_linear(x, scale, zero_point, float_codes=True), scale, zero_point, x_dtype=...)

`dequantize_linear` alone has gradients to scale, zero_point and floating codes. All work in reverse and forward mode,
twice, under torch.func and torch.compile.

>>> x, scale = torch.tensor([0.3, 9.0], requires_grad=True), torch.tensor(0.5)
>>> dequantize_linear(quantize_linear(x, scale, dtype="int4"), scale, x_dtype="int4").requires_grad  # wrong
False
>>> fake_quantize_linear(x, scale, dtype="int4").sum().backward()  # right
>>> x.grad
tensor([1., 0.])
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._autograd import needs_autograd
from ._library import default_arguments
from ._sharding import ensure_registered
from .dtypes import QUANT_DTYPES, QuantDtype, float_number, resolve, type_name

_ops = torch.ops.linquant
_CODE_STORAGE = {t.storage for t in QUANT_DTYPES}


def _output_number(op: str, dtype: "QuantDtype | torch.dtype | str | None", zero_point: Any) -> int:
    """The number of the codes' type; 0 where zero_point's own type says it."""
    if dtype is None and isinstance(zero_point, Tensor) and zero_point.dtype not in _CODE_STORAGE:
        raise ValueError(f"{op}: dtype must be given where zero_point is {type_name(zero_point.dtype)}.")
    return _number(dtype)


def _number(dtype: "QuantDtype | torch.dtype | str | None") -> int:
    return 0 if dtype is None else resolve(dtype).number


# What each op takes for granted, read from its schema.
_DEFAULTS = {
    name: default_arguments(getattr(_ops, name).default) | {"block_size": 0}
    for name in (
        "quantize_linear",
        "dequantize_linear",
        "fake_quantize_linear",
        "dynamic_quantize_linear",
        "min_max",
        "pack",
        "unpack",
    )
}


_BOOLEANS = {"saturate", "packed", "symmetric"}
# Those whose kernel for autograd is in Python.
_DIFFERENTIABLE = ("dequantize_linear", "fake_quantize_linear")


def _call(name: str, out: Any, *args: Any, **kwargs: Any) -> Any:
    """Call an op, or its .out overload where there is something to write into.

    Arguments that the op takes for granted are left out: each one handed over costs a call as much as a small kernel.
    """
    defaults = _DEFAULTS[name]
    kwargs = {key: value for key, value in kwargs.items() if key not in defaults or value != defaults[key]}
    for key in _BOOLEANS & kwargs.keys():
        if not isinstance(kwargs[key], bool):
            raise TypeError(f"{name}: {key} must be True or False, but got {kwargs[key]!r}.")
    op = getattr(_ops, name)
    try:
        if out is not None:
            return _call_out(name, op, out, *args, **kwargs)
        if name not in _DIFFERENTIABLE or torch.compiler.is_compiling() or needs_autograd(*args):
            return op(*args, **kwargs)
        ensure_registered(*args)
        # The op would go by way of Python to find that it has nothing to do there.
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args, **kwargs)
    except (AttributeError, TypeError, RuntimeError):
        for argument, given in zip(("x", "scale", "zero_point"), args, strict=False):
            if not isinstance(given, Tensor) and given is not None:
                raise TypeError(
                    f"{name}: {argument} must be a tensor, but got {given!r}. Write torch.tensor({given!r})."
                ) from None
        raise


def _call_out(name: str, op: Any, out: Any, *args: Any, **kwargs: Any) -> Any:
    outs = out if isinstance(out, dict) else {"out": out}
    if not torch.compiler.is_compiling():
        return op.out(*args, **kwargs, **outs)
    # PyTorch's compiler takes no op that returns what it was given.
    results = op(*args, **kwargs)
    for (key, to), result in zip(outs.items(), results if isinstance(results, tuple) else (results,), strict=True):
        if to.shape != result.shape:
            raise RuntimeError(f"{name}: {key} must have shape {list(result.shape)}, but got shape {list(to.shape)}.")
        if to.dtype != result.dtype:
            raise RuntimeError(f"{name}: {key} must be {type_name(result.dtype)}, but got {type_name(to.dtype)}.")
        to.copy_(result)
    return tuple(outs.values()) if isinstance(results, tuple) else out


def quantize_linear(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    *,
    dtype: "QuantDtype | torch.dtype | str | None" = None,
    axis: int = 1,
    block_size: int | Sequence[int] = 0,
    saturate: bool = True,
    precision: torch.dtype | None = None,
    quant_min: int | None = None,
    quant_max: int | None = None,
    arithmetic: str = "onnx",
    packed: bool = False,
    float_codes: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Quantize a tensor with a given scale and zero point.

    Integers: `y = clamp(rne(q) + zero_point, quant_min, quant_max)`; float8: `y = round(q)` to the format; float4:
    `y = round(q + zero_point)`, saturating; with `q = RN_P(x / scale)`, a true division rounded to the type P. Rounding
    is to nearest, ties to even, everywhere. The division is done in float32, or in float64 where x, scale or precision
    is float64.

    NaN gives the lowest integer code, a float8 NaN, or the float4 code 7 (the value 6). Infinities and whatever is out
    of range saturate. A scale that is 0, negative, subnormal or infinite follows IEEE division: 0/0 is NaN, 1/0
    saturates.

    Args:
        x: float32, float16, bfloat16, float64 or int32 (converted to float32 first), of any shape and layout.
        scale: float32, float16, bfloat16, float64 or float8_e8m0fnu; not necessarily x's type. Its shape says which
            elements share one. For x of shape [O, I]: [] one for all; [O] or [I] one for each index of axis;
            [O, ceil(I / B)] one for each block of block_size B; [O, 1] one for each row. More at the top of this
            module: `help(torch_linquant.ops)`.
        zero_point: of scale's shape. For integer codes int8 to int64 or uint8 to uint32, of any value, or
            a floating type, which is rounded to nearest and clamped to the range; absent is 0. For float8 codes a
            tensor of that type, whose value is not used. For float4 codes float4 codes in uint8.
        dtype: type of the codes: uint8, int8, uint16, int16, int32, uint4, int4, uint2, int2, a float8 type or
            float4_e2m1, as torch dtype or name. Default: zero_point's type, else uint8. Codes of fewer than 8 bits come
            in uint8 or int8, one an element, unless packed.
        axis: the dimension that a 1-D scale or a single block length belongs to; negative counts from the end. Not
            looked at per tensor.
        block_size: length of the blocks along axis, or one length for each dimension; 0: no blocks.
        saturate: float8 only. Whether what is too large becomes the largest finite number; else it becomes infinity or
            NaN, as the format has it.
        precision: the type P. Default: scale's type (float32 for float8_e8m0fnu). ONNX opsets up to 22 divide float16
            in float32: `precision=torch.float32` computes what they do.
        quant_min, quant_max: a narrower range of integer codes, such as -127 and 127.
        arithmetic: "onnx", or another runtime's for integer codes, in float32: "onednn",
            `rne(clamp(x * (1/scale) + zero_point))` (oneDNN, OpenVINO); "executorch",
            `clamp(rne(x * (1/scale)) + zero_point)` (ExecuTorch, torch.fake_quantize_*).
        packed: 4-bit and 2-bit codes only. Pack codes along the last dimension, the first in the low bits; each row
            takes whole bytes, padding bits are 0.
        float_codes: return codes as numbers of a floating type, which carry a gradient: x's type where it holds all of
            them, else float32, for int32 codes float64. To x it is 1 / scale inside the range and 0 outside, to scale
            -(x / scale) / scale inside, to zero_point 1 inside.
        out: write into this tensor, of the result's shape and type, and return it.

    Returns:
        Codes of x's shape and layout; packed: uint8, [..., ceil(n * bits / 8)], row-major.

    Raises:
        RuntimeError: if types, shapes, axis or options do not fit, before any memory is touched.
        ValueError: if dtype or precision is no type of the lists above.

    >>> quantize_linear(torch.tensor([0.0, 2.0, 3.0, 1000.0, -254.0, float("nan")]), torch.tensor(2.0))
    tensor([  0,   1,   2, 255,   0,   0], dtype=torch.uint8)

    A scale for each row:

    >>> x = torch.tensor([[0.1, -0.3], [10.0, -30.0]])
    >>> quantize_linear(x, torch.tensor([0.01, 1.0]), dtype="int8", axis=0)
    tensor([[ 10, -30],
            [ 10, -30]], dtype=torch.int8)

    Blocks of two, packed 4-bit codes:

    >>> x, scale = torch.tensor([[1.0, 2.0, 30.0]]), torch.tensor([[1.0, 10.0]])
    >>> quantize_linear(x, scale, dtype="int4", block_size=2, packed=True)
    tensor([[33,  3]], dtype=torch.uint8)

    Near ties the runtimes differ:

    >>> x, scale = torch.tensor([1.0, 3.0, 5.0, -1.0]), torch.tensor(2.0)
    >>> zero_point = torch.tensor(1, dtype=torch.uint8)
    >>> quantize_linear(x, scale, zero_point)
    tensor([1, 3, 3, 1], dtype=torch.uint8)
    >>> quantize_linear(x, scale, zero_point, arithmetic="onednn")
    tensor([2, 2, 4, 0], dtype=torch.uint8)
    """
    if float_codes is not False:
        return _float_codes(
            x,
            scale,
            zero_point,
            float_codes,
            packed,
            out,
            dtype,
            axis=axis,
            block_size=block_size,
            saturate=saturate,
            precision=float_number("precision", precision),
            quant_min=quant_min,
            quant_max=quant_max,
            arithmetic=arithmetic,
        )
    return _call(
        "quantize_linear",
        out,
        x,
        scale,
        zero_point,
        axis=axis,
        block_size=block_size,
        output_dtype=_output_number("quantize_linear", dtype, zero_point),
        saturate=saturate,
        precision=float_number("precision", precision),
        quant_min=quant_min,
        quant_max=quant_max,
        arithmetic=arithmetic,
        packed=packed,
    )


def _float_codes(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    float_codes: bool,
    packed: bool,
    out: Tensor | None,
    dtype: Any,
    **options: Any,
) -> Tensor:
    for name, holds, what, got in (
        ("float_codes", float_codes is True, "True or False", float_codes),
        ("packed", packed is False, "False with float_codes", packed),
        ("out", out is None, "absent with float_codes", "a tensor"),
    ):
        if not holds:
            raise ValueError(f"quantize_linear: {name} must be {what}, but got {got}.")
    options["output_dtype"] = _output_number("quantize_linear", dtype, zero_point)
    return _ops.quantize_linear.float_codes(x, scale, zero_point, **options)


def dequantize_linear(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    *,
    x_dtype: "QuantDtype | torch.dtype | str | None" = None,
    dtype: torch.dtype | None = None,
    axis: int = 1,
    block_size: int | Sequence[int] = 0,
    packed_size: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Turn codes back into numbers.

    `y = (x - zero_point) * scale`: the difference is exact, the product is in float32 (in float64 where scale is
    float64), and the result is rounded once to `dtype`. The zero point of float8 codes is not used. NaN and infinity
    codes of float8 become NaN and infinity.

    Args:
        x: codes: uint8, int8, uint16, int16, int32 or a float8 type; packed codes in uint8; codes as numbers of a
            floating type (`float_codes`), with x_dtype.
        scale, zero_point, axis, block_size: as in `quantize_linear`; they refer to the shape of the unpacked codes.
        x_dtype: what a uint8 or int8 tensor holds: any type of at most 8 bits, float8 in uint8 included. Of codes of
            fewer than 8 bits only the low bits count. Default: x's type.
        dtype: float32, float16, bfloat16 or float64. Default: scale's type (float32 for float8_e8m0fnu).
        packed_size: given if x is packed: how many codes its last dimension holds.
        out: write into this tensor, of the result's shape and type, and return it.

    Returns:
        Values of the shape of the codes; laid out as x is, row-major where x is packed.

    Raises:
        RuntimeError: if types, shapes, axis or options do not fit, before any memory is touched.
        ValueError: if x_dtype or dtype is no type of the lists above.

    >>> codes, zero_point = torch.tensor([0, 3, 128, 255], dtype=torch.uint8), torch.tensor(128, dtype=torch.uint8)
    >>> dequantize_linear(codes, torch.tensor(2.0), zero_point)
    tensor([-256., -250.,    0.,  254.])
    >>> packed, scale = torch.tensor([[33, 3]], dtype=torch.uint8), torch.tensor([[1.0, 10.0]])
    >>> dequantize_linear(packed, scale, x_dtype="int4", block_size=2, packed_size=3)
    tensor([[ 1.,  2., 30.]])
    """
    return _call(
        "dequantize_linear",
        out,
        x,
        scale,
        zero_point,
        axis=axis,
        block_size=block_size,
        output_dtype=float_number("dtype", dtype),
        x_dtype=_number(x_dtype),
        packed_size=packed_size,
    )


def fake_quantize_linear(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    *,
    dtype: "QuantDtype | torch.dtype | str | None" = None,
    axis: int = 1,
    block_size: int | Sequence[int] = 0,
    saturate: bool = True,
    precision: torch.dtype | None = None,
    quant_min: int | None = None,
    quant_max: int | None = None,
    arithmetic: str = "onnx",
    ste: str = "clipped",
    out: Tensor | None = None,
) -> Tensor:
    """Quantize and dequantize in one pass: what x is worth after quantization.

    Bit for bit `dequantize_linear(quantize_linear(x, ...), ...).to(x.dtype)`, with no codes stored in between. An int32
    x is truncated, as `.to` does. Arguments and errors are those of `quantize_linear`; `out` may be x itself. The
    result has x's type, under torch.autocast too.

    Gradients, for the incoming gradient g: to x g inside the range and 0 outside; `ste="identity"` passes g everywhere.
    To scale g * (round(x / scale) - x / scale) inside and g * (limit - zero_point) outside, summed. To a floating
    zero_point 0 inside and -g * scale outside, summed. Inside is where round(x / scale) + zero_point is in the range of
    the codes; for float codes, where x / scale rounds to a finite number. NaN gives 0 to all three. Sums have a fixed
    order, and so equal bits on every run.

    >>> x = torch.tensor([0.0, 0.13, 1.0, 100.0])
    >>> fake_quantize_linear(x, torch.tensor(0.25), dtype="int4")
    tensor([0.0000, 0.2500, 1.0000, 1.7500])
    """
    return _call(
        "fake_quantize_linear",
        out,
        x,
        scale,
        zero_point,
        axis=axis,
        block_size=block_size,
        output_dtype=_output_number("fake_quantize_linear", dtype, zero_point),
        saturate=saturate,
        precision=float_number("precision", precision),
        quant_min=quant_min,
        quant_max=quant_max,
        arithmetic=arithmetic,
        ste=ste,
    )


def dynamic_quantize_linear(
    x: Tensor,
    *,
    dtype: "QuantDtype | torch.dtype | str" = "uint8",
    axis: int | None = None,
    block_size: int | Sequence[int] = 0,
    symmetric: bool = False,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize a tensor with the scale and zero point of its own range.

    By default ONNX's DynamicQuantizeLinear (opset 11), bit for bit: with `mx = max(0, max x)` and `mn = min(0, min x)`,

        scale = (mx - mn) / (qmax - qmin)      zero_point = rne(clamp(qmin - mn / scale, qmin, qmax))

    in float32 (float64 for float64 x), then `quantize_linear`. `symmetric` takes the range [-a, a] with
    a = max(-mn, mx) and the zero point 0, or the middle of the codes where they are unsigned. A slice of zeros, or one
    with no element, has scale 1. NaN is left out of the range and becomes the lowest code. Infinity is not, as in ONNX:
    the scale is then infinite. `quantize_tensor` leaves it out.

    Args:
        x: float32, float16, bfloat16, float64 or int32.
        dtype: an integer type of at most 16 bits.
        axis, block_size: None and 0: one scale for the tensor. axis alone: one for each index of it. With block_size:
            one for each block. `block_size=[1, 1, 0]`: one for each token of a 3-D tensor (PerToken).
        symmetric: whether the zero point is fixed.
        out: (y, scale, zero_point) to write into.

    Returns:
        (y, scale, zero_point); the last two have the shape that `quantize_linear` takes for the granularity, and
        zero_point has the type of y.

    Raises:
        RuntimeError: if types, axis or block_size do not fit.
        ValueError: if dtype is no type of quantized values.

    >>> dynamic_quantize_linear(torch.tensor([0.0, 2.0, -3.0, -2.5, 1.34, 0.5]))
    (tensor([153, 255,   0,  26, 221, 179], dtype=torch.uint8), tensor(0.0196), tensor(153, dtype=torch.uint8))
    """
    code = resolve(dtype)
    if code.is_float or code.bits > 16:
        raise ValueError(
            f"dynamic_quantize_linear: dtype must be an integer type of at most 16 bits, but got {code.name}."
        )
    outs = None if out is None else dict(zip(("y", "scale", "zero_point"), out, strict=True))
    return _call(
        "dynamic_quantize_linear",
        outs,
        x,
        axis=axis,
        block_size=block_size,
        output_dtype=_number(dtype),
        symmetric=symmetric,
    )


def dynamic_quantize(
    src: Tensor,
    scales: Tensor,
    zps: Tensor | None = None,
    *,
    qtype: str = "per_tensor",
    axis: int = 1,
    mask: int | None = None,
    dtype: "QuantDtype | torch.dtype | str" = torch.int8,
) -> Tensor:
    """Quantize as oneDNN Graph's DynamicQuantize does: scales and zero points are known at run time only.

    `y = rne(clamp(src * (1 / scales) + zps, qmin, qmax))` in float32, oneDNN's arithmetic: `quantize_linear` with
    `arithmetic="onednn"`.

    Args:
        src: float32.
        scales: float32. One element for qtype "per_tensor"; src.size(axis) elements in one dimension for
            "per_channel"; for mask the product of the sizes of the dimensions in it, in row-major order.
        zps: int8, uint8 or int32 whatever dtype is, of scales' shape; values outside the range of the codes count
            too. Absent is 0.
        qtype: "per_tensor" or "per_channel".
        axis: the channel dimension; negative counts from the end.
        mask: bit d set: parameters vary along dimension d. Takes the place of qtype.
        dtype: int8 or uint8.

    Raises:
        ValueError: if an argument is none of the above, or mask and qtype are both given.
        RuntimeError: if the shape of scales or zps does not fit.

    >>> src = torch.tensor([[1.0, 3.0], [5.0, -1.0]])
    >>> dynamic_quantize(src, torch.tensor([2.0]), torch.tensor([1], dtype=torch.int32), dtype=torch.uint8)
    tensor([[2, 2],
            [4, 0]], dtype=torch.uint8)
    >>> dynamic_quantize(src, torch.tensor([1.0, 0.5]), mask=0b01)
    tensor([[ 1,  3],
            [10, -2]], dtype=torch.int8)
    """
    code = resolve(dtype)
    for name, given in (("src", src), ("scales", scales), ("zps", zps)):
        if not isinstance(given, Tensor) and given is not None:
            raise TypeError(
                f"dynamic_quantize: {name} must be a tensor, but got {given!r}. Write torch.tensor({given!r})."
            )
    checks = [
        ("src", src.dtype == torch.float32, "float32", type_name(src.dtype)),
        ("scales", scales.dtype == torch.float32, "float32", type_name(scales.dtype)),
        ("dtype", code.name in ("int8", "uint8"), "int8 or uint8", code.name),
        ("qtype", qtype in ("per_tensor", "per_channel"), '"per_tensor" or "per_channel"', repr(qtype)),
        ("mask", mask is None or qtype == "per_tensor", 'absent with qtype "per_channel"', repr(mask)),
        ("mask", mask is None or 0 <= mask < 2 ** src.dim(), f"in [0, {2 ** src.dim() - 1}]", repr(mask)),
    ]
    if zps is not None:
        zero_types = (torch.int8, torch.uint8, torch.int32)
        checks.append(("zps", zps.dtype in zero_types, "int8, uint8 or int32", type_name(zps.dtype)))
        checks.append(
            ("zps", zps.shape == scales.shape, f"of scales' shape {list(scales.shape)}", f"shape {list(zps.shape)}")
        )
    for name, holds, what, got in checks:
        if not holds:
            raise ValueError(f"dynamic_quantize: {name} must be {what}, but got {got}.")
    shape = _parameter_shape(src, scales, qtype, axis, mask)
    zero_point = None if zps is None else zps.reshape(shape)
    return quantize_linear(src, scales.reshape(shape), zero_point, dtype=code, axis=axis, arithmetic="onednn")


def _parameter_shape(src: Tensor, scales: Tensor, qtype: str, axis: int, mask: int | None) -> list[int]:
    """The shape that quantize_linear wants of parameters given in oneDNN's form."""
    if mask is not None:
        shape = [size if mask >> dim & 1 else 1 for dim, size in enumerate(src.shape)]
    elif qtype == "per_tensor":
        shape = []
    elif -src.dim() <= axis < src.dim():
        shape = [src.size(axis)]
    else:
        raise ValueError(f"dynamic_quantize: axis must be in [{-src.dim()}, {src.dim() - 1}], but got {axis}.")
    wanted = 1
    for size in shape:
        wanted *= size
    if scales.numel() != wanted:
        raise ValueError(f"dynamic_quantize: scales must have {wanted} elements, but got shape {list(scales.shape)}.")
    return shape


def min_max(
    x: Tensor,
    *,
    axis: int | None = None,
    block_size: int | Sequence[int] = 0,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Find the smallest and the largest finite value of each part of a tensor that shares a scale.

    Args:
        x: float32, float16, bfloat16, float64 or int32.
        axis, block_size: as in `dynamic_quantize_linear`.
        out: (r_min, r_max) to write into.

    Returns:
        (r_min, r_max), float32 (float64 for float64 x). NaN and infinities are left out; a part with nothing left gives
        (inf, -inf). Zeros are +0.

    Raises:
        RuntimeError: if x's type, axis or block_size does not fit.

    >>> min_max(torch.tensor([[1.0, float("nan"), -3.0], [float("inf"), 4.0, 5.0]]), axis=0)
    (tensor([-3.,  4.]), tensor([1., 5.]))
    """
    outs = None if out is None else dict(zip(("r_min", "r_max"), out, strict=True))
    return _call("min_max", outs, x, axis=axis, block_size=block_size)


def _packed_number(op: str, dtype: "QuantDtype | torch.dtype | str") -> int:
    code = resolve(dtype)
    if code.bits >= 8:
        raise ValueError(f"{op}: dtype must be uint4, int4, float4_e2m1, uint2 or int2, but got {code.name}.")
    return code.number


def pack(x: Tensor, dtype: "QuantDtype | torch.dtype | str", *, out: Tensor | None = None) -> Tensor:
    """Pack 4-bit or 2-bit codes, one an element, into bytes along the last dimension.

    The first code is in the low bits; each row takes whole bytes, padding bits are 0. For rows of whole bytes this is
    the raw data of ONNX's tensors.

    Args:
        x: uint8 or int8 of any layout, at least one dimension. Only the low bits of an element count.
        dtype: uint4, int4, uint2, int2 or float4_e2m1.

    Returns:
        uint8, [..., ceil(n * bits / 8)].

    Raises:
        RuntimeError, ValueError: if x or dtype is of another type.

    >>> pack(torch.tensor([1, -1, 7], dtype=torch.int8), "int4")
    tensor([241,   7], dtype=torch.uint8)
    """
    return _call("pack", out, x, x_dtype=_packed_number("pack", dtype))


def unpack(
    x: Tensor,
    dtype: "QuantDtype | torch.dtype | str",
    packed_size: int | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Take packed 4-bit or 2-bit codes apart, one an element: the inverse of `pack`.

    Args:
        x: uint8, at least one dimension.
        dtype: uint4, int4, uint2, int2 or float4_e2m1.
        packed_size: how many codes the last dimension holds. Default: as many as fit.

    Returns:
        int8 for int4 and int2, else uint8; [..., packed_size].

    Raises:
        RuntimeError, ValueError: if x or dtype is of another type, or packed_size does not fit.

    >>> unpack(torch.tensor([241, 7], dtype=torch.uint8), "int4", 3)
    tensor([ 1, -1,  7], dtype=torch.int8)
    """
    return _call("unpack", out, x, x_dtype=_packed_number("unpack", dtype), packed_size=packed_size)
