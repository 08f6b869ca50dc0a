"""Fake kernels: the checks and the outputs of every op on tensors without data, under torch.compile and torch.export.

The checks stand in the order of csrc/plan.cpp and say the same sentences; tests/test_errors.py holds both to one table.
Sizes may be symbolic: `_same` compares two without fixing them where that can be helped.
"""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

from . import _library  # noqa: F401  (the ops must exist)
from ._inductor import ensure_registered
from .dtypes import BY_NUMBER, FLOAT_NUMBERS, QuantDtype, resolve, type_name

Sizes = Sequence[int]

_FLOATS = tuple(FLOAT_NUMBERS)
_FLOAT_BY_NUMBER = {number: dtype for dtype, number in FLOAT_NUMBERS.items()}
_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.int64, torch.uint32)
_BYTES = (torch.uint8, torch.int8)
_BINS = [2**k for k in range(12, 17)]

_CODE_NUMBERS = (
    "uint8 (2), int8 (3), uint16 (4), int16 (5), int32 (6), float8_e4m3fn (17), float8_e4m3fnuz (18), "
    "float8_e5m2 (19), float8_e5m2fnuz (20), uint4 (21), int4 (22), float4_e2m1 (23), uint2 (25) or int2 (26)"
)
_FLOAT_NUMBERS = "float32 (1), float16 (10), float64 (11) or bfloat16 (16)"


def _fail(sentence: str) -> NoReturn:
    raise RuntimeError(sentence)


def _check_sizes(got: Sizes, want: Sizes, sentence: Callable[[], str]) -> None:
    """Require equal shapes; sizes that are symbolic are recorded as equal rather than fixed."""
    if len(got) != len(want):
        _fail(sentence())
    for a, b in zip(got, want, strict=True):
        torch._check(a == b, sentence)


# --- types -----------------------------------------------------------------------------------------------------------


def _check_input(op: str, x: Tensor) -> None:
    if x.dtype not in (*_FLOATS, torch.int32):
        _fail(f"{op}: x must be float32, float16, bfloat16, float64 or int32, but got {type_name(x.dtype)}.")


def _check_device(op: str, name: str, x: Tensor, t: Tensor) -> None:
    if t.device != x.device:
        _fail(f"{op}: {name} must be on x's device {x.device}, but got {t.device}.")


def _check_scale(op: str, x: Tensor, scale: Tensor, zero_point: Tensor | None) -> None:
    if scale.dtype not in (*_FLOATS, torch.float8_e8m0fnu):
        _fail(
            f"{op}: scale must be float32, float16, bfloat16, float64 or float8_e8m0fnu, "
            f"but got {type_name(scale.dtype)}."
        )
    _check_device(op, "scale", x, scale)
    if zero_point is not None:
        _check_device(op, "zero_point", x, zero_point)


def _check_zero_point_type(op: str, code: QuantDtype, zero_point: Tensor | None) -> None:
    if zero_point is None:
        return
    got = type_name(zero_point.dtype)
    if code.is_float and code.bits == 8:
        if zero_point.dtype != code.storage:
            _fail(f"{op}: zero_point must be {code.name} for {code.name} codes, but got {got}.")
    elif code.is_float:
        if zero_point.dtype != torch.uint8:
            _fail(f"{op}: zero_point must be uint8 for {code.name} codes, but got {got}.")
    elif zero_point.dtype not in (*_INTEGERS, *_FLOATS):
        _fail(
            f"{op}: zero_point must be an integer or float32, float16, bfloat16 or float64 tensor for {code.name} "
            f"codes, but got {got}."
        )


def _output_type(op: str, output_dtype: int, zero_point: Tensor | None) -> QuantDtype:
    if output_dtype != 0:
        if output_dtype not in BY_NUMBER:
            _fail(f"{op}: output_dtype must be 0 or the number of {_CODE_NUMBERS}, but got {output_dtype}.")
        return BY_NUMBER[output_dtype]
    if zero_point is None:
        return resolve("uint8")
    try:
        return resolve(zero_point.dtype)
    except ValueError:
        _fail(f"{op}: output_dtype must be given when zero_point is {type_name(zero_point.dtype)}.")


def _check_arithmetic(op: str, arithmetic: str, code: QuantDtype, precision: int) -> None:
    if arithmetic == "onnx":
        return
    if arithmetic not in ("onednn", "executorch"):
        _fail(f'{op}: arithmetic must be "onnx", "onednn" or "executorch", but got "{arithmetic}".')
    if code.is_float:
        _fail(f'{op}: arithmetic must be "onnx" for {code.name} codes, but got "{arithmetic}".')
    if precision > 1:
        _fail(f'{op}: precision must be 0 or 1 (float32) with arithmetic "{arithmetic}", but got {precision}.')


def _limit(op: str, name: str, limit: int | None, code: QuantDtype, otherwise: float) -> float:
    if limit is None:
        return otherwise
    if code.is_float:
        _fail(f"{op}: {name} must be left out for {code.name} codes, but got {limit}.")
    if not code.qmin <= limit <= code.qmax:
        _fail(f"{op}: {name} must be within [{code.qmin}, {code.qmax}] for {code.name} codes, but got {limit}.")
    return limit


def _check_quantize(
    op: str,
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    output_dtype: int,
    precision: int,
    quant_min: int | None,
    quant_max: int | None,
    arithmetic: str,
    packed: bool = False,
) -> QuantDtype:
    _check_input(op, x)
    _check_scale(op, x, scale, zero_point)
    code = _output_type(op, output_dtype, zero_point)
    _check_zero_point_type(op, code, zero_point)
    if precision != 0 and precision not in _FLOAT_BY_NUMBER:
        _fail(f"{op}: precision must be 0 or the number of {_FLOAT_NUMBERS}, but got {precision}.")
    _check_arithmetic(op, arithmetic, code, precision)
    low = _limit(op, "quant_min", quant_min, code, code.qmin)
    high = _limit(op, "quant_max", quant_max, code, code.qmax)
    if low >= high:
        _fail(f"{op}: quant_min must be less than quant_max, but got {low} and {high}.")
    if packed and code.bits >= 8:
        _fail(f"{op}: packed must be False for {code.name} codes, but got True. Only 4-bit and 2-bit codes are packed.")
    if packed and x.dim() == 0:
        _fail(f"{op}: x must have at least one dimension to be packed, but got a 0-d tensor.")
    return code


def float_code_type(code: QuantDtype, x: torch.dtype) -> torch.dtype:
    """The type of codes as numbers: x's where it holds all of them, else the next that does."""
    if code.bits == 32 or x == torch.float64:
        return torch.float64
    # float16 holds integers up to 2048, bfloat16 up to 256, and both every float8 number.
    return torch.float32 if code.bits == 16 or x == torch.int32 else x


def _check_ste(op: str, ste: str) -> None:
    if ste not in ("clipped", "identity"):
        _fail(f'{op}: ste must be "clipped" or "identity", but got "{ste}".')


def _check_gradient(op: str, grad: Tensor, x: Tensor, sizes: Sizes) -> None:
    if grad.dtype not in _FLOATS:
        _fail(f"{op}: grad must be float32, float16, bfloat16 or float64, but got {type_name(grad.dtype)}.")
    _check_device(op, "grad", x, grad)
    _check_sizes(
        grad.shape,
        sizes,
        lambda: f"{op}: grad must have shape {list(sizes)}, but got shape {list(grad.shape)}.",
    )


def _code_type(op: str, x: Tensor, x_dtype: int) -> QuantDtype:
    """The type of the codes that dequantize_linear is given."""
    name = type_name(x.dtype)
    if x.dtype in _FLOATS:
        if x_dtype not in BY_NUMBER:
            _fail(f"{op}: x_dtype must be the number of {_CODE_NUMBERS} where x is {name}, but got {x_dtype}.")
        return BY_NUMBER[x_dtype]
    own = resolve(x.dtype)
    code = own if x_dtype == 0 else BY_NUMBER.get(x_dtype)
    if x.dtype in _BYTES:
        if code is None or code.bits > 8:
            _fail(
                f"{op}: x_dtype must be 0 or the number of a type of at most 8 bits where x is {name}, "
                f"but got {x_dtype}."
            )
    elif code is not own:
        _fail(f"{op}: x_dtype must be 0 or {own.number} ({name}, the type of x), but got {x_dtype}.")
    return code


# --- shapes ----------------------------------------------------------------------------------------------------------


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _check_block_size(op: str, x_sizes: Sizes, block_size: Sizes) -> None:
    if len(block_size) != 1 and len(x_sizes) < 2:
        _fail(f"{op}: block_size must have 1 entry, but got {len(block_size)}.")
    if len(block_size) not in (1, len(x_sizes)):
        _fail(
            f"{op}: block_size must have 1 or {len(x_sizes)} entries (one per dimension of x), "
            f"but got {len(block_size)}."
        )
    for block in block_size:
        torch._check(block >= 0, lambda block=block: f"{op}: block_size must not be negative, but got {block}.")


def _check_axis(op: str, x_sizes: Sizes, axis: int) -> int:
    rank = len(x_sizes)
    if rank == 0:
        _fail(f"{op}: axis must be absent for a 0-d x, but got {axis}.")
    if not -rank <= axis < rank:
        hint = " Pass axis=0." if rank == 1 else ""
        _fail(f"{op}: axis must be in [{-rank}, {rank - 1}] for x of shape {list(x_sizes)}, but got {axis}.{hint}")
    return axis % rank


def _is_blocked(block_size: Sizes) -> bool:
    return len(block_size) > 1 or guard_or_false(block_size[0] > 0)


def _block_counts(op: str, x_sizes: Sizes, axis: int, block_size: Sizes) -> list[int]:
    """How many scales there are in each dimension of x."""
    if len(block_size) > 1:
        return [1 if block == 0 else _ceil_div(size, block) for size, block in zip(x_sizes, block_size, strict=True)]
    counts = list(x_sizes)
    axis = _check_axis(op, x_sizes, axis)
    counts[axis] = _ceil_div(counts[axis], block_size[0])
    return counts


def _check_per_axis(op: str, x_sizes: Sizes, scale: Tensor, axis: int) -> None:
    dim = _check_axis(op, x_sizes, axis)

    def sentence() -> str:
        others = [d for d, size in enumerate(x_sizes) if size == scale.shape[0]]
        hint = ""
        if len(others) == 1:
            hint = f" Pass axis={others[0]} to quantize along the dimension of size {scale.shape[0]}."
        return (
            f"{op}: scale must have {x_sizes[dim]} elements to match x.size({axis}), "
            f"but got shape {list(scale.shape)}.{hint}"
        )

    _check_sizes(scale.shape, [x_sizes[dim]], sentence)


def _check_granularity(
    op: str, x_sizes: Sizes, scale: Tensor, zero_point: Tensor | None, axis: int, block_size: Sizes
) -> None:
    shape = list(scale.shape)
    _check_block_size(op, x_sizes, block_size)
    if _is_blocked(block_size):
        counts = _block_counts(op, x_sizes, axis, block_size)
        _check_sizes(
            shape,
            counts,
            lambda: f"{op}: scale must have shape {counts} for block_size {list(block_size)}, but got shape {shape}.",
        )
    elif scale.dim() == 0 or guard_or_false(scale.numel() == 1):
        pass
    elif scale.dim() == 1 and len(x_sizes) > 0:
        _check_per_axis(op, x_sizes, scale, axis)
    elif scale.dim() == len(x_sizes):
        for dim, (got, size) in enumerate(zip(shape, x_sizes, strict=True)):
            if guard_or_false(got == 1):
                continue
            torch._check(
                got == size,
                lambda dim=dim, size=size: (
                    f"{op}: scale must have size 1 or {size} in dimension {dim} of x's shape {list(x_sizes)}, "
                    f"but got shape {shape}."
                ),
            )
    else:
        _fail(
            f"{op}: scale must have one element, one dimension or the {len(x_sizes)} dimensions of x, "
            f"but got shape {shape}."
        )
    # ONNX gives a scalar scale and a zero point of one element, or the other way round.
    if zero_point is not None and not (guard_or_false(scale.numel() == 1) and guard_or_false(zero_point.numel() == 1)):
        _check_sizes(
            zero_point.shape,
            shape,
            lambda: f"{op}: zero_point must have scale's shape {shape}, but got shape {list(zero_point.shape)}.",
        )


def _reduced_sizes(op: str, x_sizes: Sizes, axis: int | None, block_size: Sizes) -> list[int]:
    _check_block_size(op, x_sizes, block_size)
    if _is_blocked(block_size):
        if len(block_size) == 1 and axis is None:
            _fail(f"{op}: axis must be given with block_size {block_size[0]}, but got None.")
        return _block_counts(op, x_sizes, 0 if axis is None else axis, block_size)
    return [] if axis is None else [x_sizes[_check_axis(op, x_sizes, axis)]]


def _packed_sizes(sizes: Sizes, code: QuantDtype) -> list[int]:
    return [*sizes[:-1], _ceil_div(sizes[-1], code.per_byte)]


def _unpacked_sizes(op: str, x: Tensor, code: QuantDtype, packed_size: int | None) -> list[int]:
    if x.dtype != torch.uint8:
        _fail(f"{op}: x must be uint8 to be unpacked, but got {type_name(x.dtype)}.")
    if x.dim() == 0:
        _fail(f"{op}: x must have at least one dimension to be unpacked, but got a 0-d tensor.")
    length = x.shape[-1]
    most = length * code.per_byte
    if isinstance(most, int) and most >= 2**63:
        _fail(f"{op}: x must not hold more codes than int64 counts, but got shape {list(x.shape)}.")
    if packed_size is None:
        return [*x.shape[:-1], most]

    def sentence() -> str:
        least = max(0, most - code.per_byte + 1)
        return (
            f"{op}: packed_size must fit the {length} bytes of x's last dimension, which hold {least} to {most} "
            f"codes, but got {packed_size}."
        )

    torch._check(packed_size >= 0, sentence)
    torch._check(_ceil_div(packed_size, code.per_byte) == length, sentence)
    return [*x.shape[:-1], packed_size]


# --- outputs ---------------------------------------------------------------------------------------------------------


def _check_out(op: str, name: str, x: Tensor, like: Tensor, out: Tensor) -> Tensor:
    _check_device(op, name, x, out)
    _check_sizes(
        out.shape,
        like.shape,
        lambda: f"{op}: {name} must have shape {list(like.shape)}, but got shape {list(out.shape)}.",
    )
    if out.dtype != like.dtype:
        _fail(f"{op}: {name} must be {type_name(like.dtype)}, but got {type_name(out.dtype)}.")
    for dim, (size, stride) in enumerate(zip(out.shape, out.stride(), strict=True)):
        if guard_or_false(stride == 0) and not guard_or_false(size <= 1):
            _fail(f"{op}: {name} must not be expanded, but got stride 0 in dimension {dim}.")
    return out


def _register(op: str, kernel: Callable[..., Any], out_names: Sequence[str] = ("out",)) -> None:
    """Register `kernel` for the op, and a comparison of the given outputs with its own for the .out overload."""

    def fake(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        ensure_registered()
        return kernel(op, x, *args, **kwargs)

    def fake_out(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        outs = [kwargs.pop(name) for name in out_names]
        likes = kernel(op, x, *args, **kwargs)
        likes = likes if isinstance(likes, tuple) else (likes,)
        named = zip(out_names, likes, outs, strict=True)
        checked = tuple(_check_out(op, name, x, like, out) for name, like, out in named)
        return checked if len(checked) > 1 else checked[0]

    torch.library.register_fake(f"linquant::{op}", fake)
    if out_names:
        torch.library.register_fake(f"linquant::{op}.out", fake_out)


# --- the ops ---------------------------------------------------------------------------------------------------------


def _quantize_linear(
    op: str,
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    *,
    axis: int = 1,
    block_size: Sizes = (0,),
    output_dtype: int = 0,
    saturate: bool = True,
    precision: int = 0,
    quant_min: int | None = None,
    quant_max: int | None = None,
    arithmetic: str = "onnx",
    packed: bool = False,
    float_codes: bool = False,
) -> Tensor:
    limits = (output_dtype, precision, quant_min, quant_max, arithmetic)
    code = _check_quantize(op, x, scale, zero_point, *limits, packed)
    _check_granularity(op, x.shape, scale, zero_point, axis, block_size)
    if packed:
        return x.new_empty(_packed_sizes(x.shape, code), dtype=torch.uint8)
    return torch.empty_like(x, dtype=float_code_type(code, x.dtype) if float_codes else code.storage)


def _fake_quantize_linear(
    op: str,
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    *,
    axis: int = 1,
    block_size: Sizes = (0,),
    output_dtype: int = 0,
    saturate: bool = True,
    precision: int = 0,
    quant_min: int | None = None,
    quant_max: int | None = None,
    arithmetic: str = "onnx",
    ste: str = "clipped",
) -> Tensor:
    _check_quantize(op, x, scale, zero_point, output_dtype, precision, quant_min, quant_max, arithmetic)
    _check_ste(op, ste)
    _check_granularity(op, x.shape, scale, zero_point, axis, block_size)
    return torch.empty_like(x)


def _dequantize_linear(
    op: str,
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    *,
    axis: int = 1,
    block_size: Sizes = (0,),
    output_dtype: int = 0,
    x_dtype: int = 0,
    packed_size: int | None = None,
) -> Tensor:
    sizes = _check_dequantize(op, x, scale, zero_point, axis, block_size, output_dtype, x_dtype, packed_size)
    own = torch.float32 if scale.dtype == torch.float8_e8m0fnu else scale.dtype
    dtype = _FLOAT_BY_NUMBER.get(output_dtype, own)
    return torch.empty_like(x, dtype=dtype) if packed_size is None else x.new_empty(sizes, dtype=dtype)


def _check_dequantize(
    op: str,
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    axis: int,
    block_size: Sizes,
    output_dtype: int,
    x_dtype: int,
    packed_size: int | None,
) -> Sizes:
    """The sizes of the unpacked codes."""
    if x.dtype not in (*_FLOATS, *(code.storage for code in BY_NUMBER.values())):
        _fail(
            f"{op}: x must be uint8, int8, uint16, int16, int32, a float8 type, or codes as float32, float16, bfloat16 "
            f"or float64, but got {type_name(x.dtype)}."
        )
    _check_scale(op, x, scale, zero_point)
    if output_dtype != 0 and output_dtype not in _FLOAT_BY_NUMBER:
        _fail(f"{op}: output_dtype must be 0 or the number of {_FLOAT_NUMBERS}, but got {output_dtype}.")
    code = _code_type(op, x, x_dtype)
    _check_zero_point_type(op, code, zero_point)
    sizes: Sizes = x.shape
    if packed_size is not None:
        if code.bits >= 8:
            _fail(
                f"{op}: packed_size must be left out for {code.name} codes, but got {packed_size}. "
                "Only 4-bit and 2-bit codes are packed."
            )
        sizes = _unpacked_sizes(op, x, code, packed_size)
    _check_granularity(op, sizes, scale, zero_point, axis, block_size)
    return sizes


# --- their gradients -------------------------------------------------------------------------------------------------


def _gradients(inputs: tuple[Tensor, Tensor, Tensor | None], needs: tuple[bool, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """One for each of x, scale and zero_point; without elements where it is not needed or cannot be."""
    x, scale, zero_point = inputs
    layouts = (torch.preserve_format, torch.contiguous_format, torch.contiguous_format)
    dx, dscale, dzero = (
        torch.empty_like(t, memory_format=layout)
        if need and t is not None and t.dtype in _FLOATS
        else x.new_empty(0, dtype=torch.float32)
        for t, need, layout in zip((x, scale, zero_point), needs, layouts, strict=True)
    )
    return dx, dscale, dzero


def _quantize_linear_backward(
    op: str,
    grad: Tensor,
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    axis: int,
    block_size: Sizes,
    output_dtype: int,
    precision: int,
    quant_min: int | None,
    quant_max: int | None,
    arithmetic: str,
    *needs: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    _check_quantize(op, x, scale, zero_point, output_dtype, precision, quant_min, quant_max, arithmetic)
    _check_gradient(op, grad, x, x.shape)
    _check_granularity(op, x.shape, scale, zero_point, axis, block_size)
    return _gradients((x, scale, zero_point), needs)


def _fake_quantize_linear_backward(op: str, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    *others, ste, need_x, need_scale, need_zero_point = args
    _check_ste(op, ste)
    return _quantize_linear_backward(op, *others, need_x, need_scale, need_zero_point)


def _dequantize_linear_backward(
    op: str,
    grad: Tensor,
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    axis: int,
    block_size: Sizes,
    x_dtype: int,
    packed_size: int | None,
    *needs: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    sizes = _check_dequantize(op, x, scale, zero_point, axis, block_size, 0, x_dtype, packed_size)
    _check_gradient(op, grad, x, sizes)
    return _gradients((x, scale, zero_point), needs)


def _range_type(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _dynamic_quantize_linear(
    op: str,
    x: Tensor,
    *,
    axis: int | None = None,
    block_size: Sizes = (0,),
    output_dtype: int = 2,
    symmetric: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    _check_input(op, x)
    code = BY_NUMBER.get(output_dtype)
    if code is None or code.is_float or code.bits > 16:
        _fail(f"{op}: output_dtype must be the number of an integer type of at most 16 bits, but got {output_dtype}.")
    sizes = _reduced_sizes(op, x.shape, axis, block_size)
    return (
        torch.empty_like(x, dtype=code.storage),
        x.new_empty(sizes, dtype=_range_type(x)),
        x.new_empty(sizes, dtype=code.storage),
    )


def _min_max(op: str, x: Tensor, *, axis: int | None = None, block_size: Sizes = (0,)) -> tuple[Tensor, Tensor]:
    _check_input(op, x)
    sizes = _reduced_sizes(op, x.shape, axis, block_size)
    return x.new_empty(sizes, dtype=_range_type(x)), x.new_empty(sizes, dtype=_range_type(x))


def _observe_(
    op: str,
    x: Tensor,
    r_min: Tensor,
    r_max: Tensor,
    nonfinite: Tensor,
    counts: Tensor | None = None,
    *,
    axis: int | None = None,
    block_size: Sizes = (0,),
) -> None:
    _check_input(op, x)
    sizes = _reduced_sizes(op, x.shape, axis, block_size)

    def check(name: str, state: Tensor, shape: Sizes, dtype: torch.dtype) -> None:
        _check_out(op, name, x, x.new_empty(shape, dtype=dtype, device="meta"), state)
        if not state.is_contiguous():
            _fail(f"{op}: {name} must be contiguous, but got strides {list(state.stride())}.")

    check("r_min", r_min, sizes, torch.float32)
    check("r_max", r_max, sizes, torch.float32)
    check("nonfinite", nonfinite, [], torch.int64)
    if counts is not None:
        bins = counts.shape[-1] if counts.dim() else 0
        if bins not in _BINS:
            _fail(
                f"{op}: counts must have a power of two from {_BINS[0]} to {_BINS[-1]} bins in its last dimension, "
                f"but got shape {list(counts.shape)}."
            )
        check("counts", counts, [*sizes, bins], torch.int64)


def _sub_byte(op: str, x_dtype: int) -> QuantDtype:
    code = BY_NUMBER.get(x_dtype)
    if code is None or code.bits >= 8:
        _fail(
            f"{op}: x_dtype must be the number of uint4 (21), int4 (22), float4_e2m1 (23), uint2 (25) or int2 (26), "
            f"but got {x_dtype}."
        )
    return code


def _pack(op: str, x: Tensor, *, x_dtype: int) -> Tensor:
    if x.dtype not in _BYTES:
        _fail(f"{op}: x must be uint8 or int8, but got {type_name(x.dtype)}.")
    code = _sub_byte(op, x_dtype)
    if x.dim() == 0:
        _fail(f"{op}: x must have at least one dimension to be packed, but got a 0-d tensor.")
    return x.new_empty(_packed_sizes(x.shape, code), dtype=torch.uint8)


def _unpack(op: str, x: Tensor, *, x_dtype: int, packed_size: int | None = None) -> Tensor:
    code = _sub_byte(op, x_dtype)
    return x.new_empty(_unpacked_sizes(op, x, code, packed_size), dtype=code.storage)


_register("quantize_linear", _quantize_linear)
torch.library.register_fake(
    "linquant::quantize_linear.float_codes",
    lambda *args, **kwargs: _quantize_linear("quantize_linear", *args, **kwargs, float_codes=True),
)
_register("fake_quantize_linear", _fake_quantize_linear)
_register("dequantize_linear", _dequantize_linear)
_register("quantize_linear_backward", _quantize_linear_backward, ())
_register("fake_quantize_linear_backward", _fake_quantize_linear_backward, ())
_register("dequantize_linear_backward", _dequantize_linear_backward, ())
_register("dynamic_quantize_linear", _dynamic_quantize_linear, ("y", "scale", "zero_point"))
_register("min_max", _min_max, ("r_min", "r_max"))
_register("observe_", _observe_, ())
_register("pack", _pack)
_register("unpack", _unpack)
