"""From a range to a scale and a zero point."""

import torch
from torch import Tensor

from .dtypes import QuantDtype, resolve, type_name

_SMALLEST = torch.finfo(torch.float32).tiny


def choose_qparams(
    r_min: Tensor,
    r_max: Tensor,
    dtype: "QuantDtype | torch.dtype | str",
    *,
    symmetric: bool = False,
    include_zero: bool = True,
    eps: float | None = None,
    power_of_two: bool = False,
    quant_min: int | None = None,
    quant_max: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Choose scale and zero point so that the codes cover the range [r_min, r_max].

        scale = (r_max - r_min) / (q_max - q_min)        zero_point = rne(clamp(q_min - r_min / scale, q_min, q_max))

    in float32, or float64 where r_min is float64, whatever type the tensor had that the range is of. Plain tensor ops:
    any device, no value is read on the host.

    A range that is empty (r_min > r_max, or NaN) counts as [0, 0]; infinities count as the largest finite number. The
    scale is always finite and positive.

    Args:
        r_min, r_max: tensors of one shape.
        dtype: type of the codes. For float8 and float4 the scale is max(|r_min|, |r_max|) / (largest finite value), and
            there is no zero point.
        symmetric: the range [-a, a] with a = max(|r_min|, |r_max|): scale = 2 a / (q_max - q_min), and the zero point
            is 0 for signed types and the middle, (q_max + q_min + 1) // 2 (128 for uint8), for unsigned ones.
        include_zero: widen the range to hold 0, so that 0 is exact. If False, the codes cover the range as it is, with
            a zero point that is int32 and not clamped, since it lies outside the codes where the range does not hold 0
            (ONNX Runtime takes none such). A range of one value c != 0 then has the scale |c|, which is exact.
        eps: the smallest scale. Default: the smallest normal float32, 2^-126.
        power_of_two: round the scale up to a power of two, at most 2^127.
        quant_min, quant_max: a narrower range of integer codes.

    Returns:
        (scale, zero_point): of r_min's shape; zero_point has the storage type of the codes and is None for float codes.
        Symmetric codes do not reach +a: the range's upper end saturates by half a step.

    Raises:
        ValueError: if shapes differ, or an option does not fit the type.

    >>> scale, zero_point = choose_qparams(torch.tensor(-184.0), torch.tensor(728.6), "int8")
    >>> scale.item(), zero_point.item()
    (3.5788233280181885, -77)
    >>> choose_qparams(torch.tensor(-1.0), torch.tensor(3.0), "int8", symmetric=True, power_of_two=True)
    (tensor(0.0312), tensor(0, dtype=torch.int8))
    """
    code = resolve(dtype)
    for name, r in (("r_min", r_min), ("r_max", r_max)):
        if not isinstance(r, Tensor):
            raise ValueError(f"choose_qparams: {name} must be a tensor, but got {r!r}. Write torch.tensor({r!r}).")
        if r.is_complex():
            raise ValueError(f"choose_qparams: {name} must be real, but got {type_name(r.dtype)}.")
    if r_min.shape != r_max.shape:
        raise ValueError(
            f"choose_qparams: r_max must have r_min's shape {list(r_min.shape)}, but got shape {list(r_max.shape)}."
        )
    if eps is not None and not 2.0**-149 <= eps <= torch.finfo(torch.float32).max:
        raise ValueError(f"choose_qparams: eps must be a positive float32, but got {eps}.")
    q_min, q_max = _code_range(code, quant_min, quant_max)
    low, high = _finite_range(r_min, r_max, include_zero or symmetric or code.is_float)
    if symmetric or code.is_float:
        largest = torch.maximum(low.abs(), high.abs())
        scale = largest / (q_max if code.is_float else (q_max - q_min) / 2)
    else:
        steps = q_max - q_min
        width = high - low
        # Where the difference overflows, its two halves do not.
        scale = torch.where(width.isinf(), high / steps - low / steps, width / steps)
        if not include_zero:
            scale = torch.where(width == 0, low.abs(), scale)
    scale = scale.clamp(_SMALLEST if eps is None else eps, torch.finfo(scale.dtype).max)
    if power_of_two:
        scale = _up_to_power_of_two(scale)
    if code.is_float:
        return scale, None
    if symmetric:
        middle = min(max(0, q_min), q_max) if code.signed else (q_max + q_min + 1) // 2
        return scale, torch.full_like(scale, middle, dtype=code.storage)
    if not include_zero:
        # Codes cover a range without 0 only where 0 has no code: the zero point lies outside the range of the codes.
        zero_point = q_min - low.double() / scale.double()
        return scale, zero_point.clamp(-(2.0**31), 2.0**31 - 1).round().to(torch.int32)
    # In float32 the numbers around the bounds of int32 would not be exact.
    zero_point = q_min - low.double() / scale.double() if code.bits == 32 else q_min - low / scale
    return scale, zero_point.clamp(q_min, q_max).round().to(code.storage)


def _code_range(code: QuantDtype, quant_min: int | None, quant_max: int | None) -> tuple[float, float]:
    for name, limit in (("quant_min", quant_min), ("quant_max", quant_max)):
        if limit is None:
            continue
        if not isinstance(limit, int):
            raise ValueError(f"choose_qparams: {name} must be an integer, but got {limit!r}.")
        if code.is_float:
            raise ValueError(f"choose_qparams: {name} must be left out for {code.name} codes, but got {limit}.")
        if not code.qmin <= limit <= code.qmax:
            raise ValueError(
                f"choose_qparams: {name} must be within [{code.qmin}, {code.qmax}] for {code.name} codes, "
                f"but got {limit}."
            )
    q_min = code.qmin if quant_min is None else quant_min
    q_max = code.qmax if quant_max is None else quant_max
    if q_min >= q_max:
        raise ValueError(f"choose_qparams: quant_min must be less than quant_max, but got {q_min} and {q_max}.")
    return q_min, q_max


def _finite_range(r_min: Tensor, r_max: Tensor, include_zero: bool) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if r_min.dtype == torch.float64 else torch.float32
    low, high = r_min.to(dtype), r_max.to(dtype)
    seen = low <= high
    largest = torch.finfo(dtype).max
    low = torch.where(seen, low, 0.0).clamp(-largest, largest)
    high = torch.where(seen, high, 0.0).clamp(-largest, largest)
    return (low.clamp(max=0.0), high.clamp(min=0.0)) if include_zero else (low, high)


def _up_to_power_of_two(scale: Tensor) -> Tensor:
    """The next power of two, by the bits: all mantissa bits added carry into the exponent unless there were none."""
    mantissa, dtype = (52, torch.int64) if scale.dtype == torch.float64 else (23, torch.int32)
    finfo = torch.finfo(scale.dtype)
    largest = 2.0 ** (1023 if scale.dtype == torch.float64 else 127)
    ones = (1 << mantissa) - 1
    # Subnormal numbers have no exponent to carry into.
    bits = scale.clamp(finfo.tiny, largest).view(dtype)
    return ((bits + ones) & ~ones).view(scale.dtype)
