"""Fusion under Inductor: quantization joins the loop that computes its input, where that gives the same bits faster.

A lowering decides call by call. Fused are quantize_linear and fake_quantize_linear of float32 on the CPU, whose input
is computed on the fly (by a normalisation, an activation) and too large to stay in a cache: there the opaque kernel
would write and read it once more. Everything else, gradients included, stays a call of the op. The lowering API is
private to PyTorch: where it is not what it was, nothing is fused.
"""

import functools
import sys
import zlib
from collections.abc import Callable
from typing import Any

import torch

from ._library import default_arguments
from .dtypes import BY_NUMBER, resolve

_ops = torch.ops.linquant
_RULES = 1  # goes into the keys of Inductor's caches: to be raised with any change of the rules below
_MAGIC = 12582912.0  # adding 1.5 * 2^23 rounds to nearest even, as csrc/core/arithmetic.h does
_SMALLEST = 1 << 20  # elements; a smaller tensor stays in the cache between two kernels
_NARROW = (torch.int8, torch.uint8, torch.int16, torch.uint16)

_enabled = True


def set_fusion(enabled: bool) -> None:
    """Choose whether Inductor may fuse quantization with what computes its input; the default is True.

    Results are the same bits either way. Takes effect for what is compiled afterwards.

    >>> set_fusion(False)
    >>> set_fusion(True)
    """
    global _enabled
    _enabled = bool(enabled)
    # Caches on disk know nothing of lowerings, nor of the arguments that our ops have in this version. The tag belongs
    # to the user: only our part of it is replaced.
    schemas = "".join(str(getattr(_ops, name).default._schema) for name in ("quantize_linear", "fake_quantize_linear"))
    config = torch.compiler.config
    parts = [part for part in config.cache_key_tag.split(";") if part and not part.startswith("linquant ")]
    config.cache_key_tag = ";".join(
        [*parts, f"linquant {_RULES} {zlib.crc32(schemas.encode()):08x} fusion={int(_enabled)}"]
    )


def ensure_registered() -> None:
    """Register the lowerings once Inductor is there; importing it for its own sake would cost a second."""
    if "torch._inductor.lowering" in sys.modules:
        _register()


@functools.cache
def _register() -> None:
    try:
        from torch._inductor import ir
        from torch._inductor.lowering import fallback_handler, register_lowering
        from torch._inductor.virtualized import V, ops
    except ImportError:
        return

    def computed_on_the_fly(x: Any) -> bool:
        return isinstance(x, ir.TensorBox) and isinstance(getattr(x.data, "data", None), ir.Pointwise)

    def large(x: Any) -> bool:
        size = 1
        for s in x.get_size():
            size = size * s
        return bool(V.graph.sizevars.optimization_hint(size, fallback=0) >= _SMALLEST)

    def code_of(zero_point: Any, o: dict[str, Any]) -> Any:
        if o["output_dtype"] == 0:
            return resolve("uint8" if zero_point is None else zero_point.get_dtype())
        return BY_NUMBER.get(o["output_dtype"])

    def fits(x: Any, scale: Any, zero_point: Any, o: dict[str, Any]) -> bool:
        code = code_of(zero_point, o)
        return (
            _enabled
            and x.get_device().type == "cpu"
            and computed_on_the_fly(x)
            and large(x)
            and x.get_dtype() == scale.get_dtype() == torch.float32
            and (zero_point is None or zero_point.get_dtype() in _NARROW)
            and not code.is_float
            and code.bits <= 16
            and o["arithmetic"] == "onnx"
            and o["precision"] in (0, 1)
            and not any(o["block_size"])
            and not o.get("packed")
        )

    def parameter_index(p: Any, index: Any, axis: int) -> Any:
        sizes = p.get_size()
        if len(sizes) == 1 and len(index) > 0 and sizes[0] != 1:
            return [index[axis]]
        return [0 if s == 1 else index[len(index) - len(sizes) + d] for d, s in enumerate(sizes)]

    def fused(x: Any, scale: Any, zero_point: Any, o: dict[str, Any], fake: bool) -> Any:
        code = code_of(zero_point, o)
        low = code.qmin if o["quant_min"] is None else o["quant_min"]
        high = code.qmax if o["quant_max"] is None else o["quant_max"]
        load_x, load_scale = x.make_loader(), scale.make_loader()
        load_zero_point = None if zero_point is None else zero_point.make_loader()

        def inner(index: Any) -> Any:
            s = load_scale(parameter_index(scale, index, o["axis"]))
            q = ops.truediv(load_x(index), s)
            least, most = ops.constant(float(low), torch.float32), ops.constant(float(high), torch.float32)
            if load_zero_point is not None:
                z = load_zero_point(parameter_index(zero_point, index, o["axis"]))
                z = ops.to_dtype(z, torch.float32)
                least, most = ops.sub(least, z), ops.sub(most, z)
            q = ops.where(ops.gt(q, least), q, least)
            q = ops.where(ops.lt(q, most), q, most)
            magic = ops.constant(_MAGIC, torch.float32)
            r = ops.sub(ops.add(q, magic), magic)
            if fake:
                return ops.mul(r, s)
            if load_zero_point is not None:
                r = ops.add(r, z)
            return ops.to_dtype(ops.to_dtype(r, torch.int32), code.storage)

        return ir.Pointwise.create(
            device=x.get_device(),
            dtype=torch.float32 if fake else code.storage,
            inner_fn=inner,
            ranges=list(x.get_size()),
        )

    def lowering(op: Any, fake: bool) -> Callable[..., Any]:
        opaque = fallback_handler(op)
        defaults = default_arguments(op)

        def lower(x: Any, scale: Any, zero_point: Any = None, **given: Any) -> Any:
            # All keyword arguments: AOTInductor fails on fewer.
            o = defaults | given
            try:
                fuse = fits(x, scale, zero_point, o)
            except (AttributeError, ValueError):  # a part of Inductor that has another name in this version
                fuse = False
            if fuse:
                return fused(x, scale, zero_point, o, fake)
            return opaque(x, scale, zero_point, **o)

        return lower

    try:
        for op, fake in ((_ops.quantize_linear.default, False), (_ops.fake_quantize_linear.default, True)):
            register_lowering(op, type_promotion_kind=None)(lowering(op, fake))
    except (AttributeError, TypeError):
        return


set_fusion(True)
