"""Gradients of the ops: reverse and forward mode, of any order, and vmap; for torch.ops calls and torch.func alike.

Quantization is piecewise constant, so its derivative is that of the line it steps along (straight-through estimator,
arXiv 1308.3432; for scale LSQ, arXiv 1902.08153; for zero_point LSQ+, arXiv 2004.09576). With q = x / scale, r the
rounded code and `inside` where the code did not saturate, each op has three slopes:

                     fake_quantize_linear         quantize_linear(float_codes)   dequantize_linear
    x                inside                       inside / scale                 scale
    scale            (r - q) inside, r outside    -inside * q / scale            x - zero_point
    zero_point       0 inside, -scale outside     inside                         -scale

(r without the zero point). Higher derivatives hold `inside` and r constant. NaN has slopes of 0. The gradient of
scale is summed in a fixed order, so it has the same bits on every run.

Each op has two kernels: at the Autograd key, over a Function that is cheap to call, and at the key where functorch's
transforms begin, over one with the methods that they ask for. The second key is undocumented; tests/test_autograd.py
holds it for each version of PyTorch.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from . import _fake  # noqa: F401  (loads the library and registers the fake kernels)
from ._library import default_arguments
from ._sharding import ensure_registered
from .dtypes import resolve
from .granularity import aligned_shape, block_lengths, spread_parameter

_ops = torch.ops.linquant
_library = torch.library.Library("linquant", "IMPL")
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

Grads = tuple[Tensor | None, ...]
Slopes = tuple[Tensor, Tensor, Tensor]
_vjp: Any = torch.func.vjp  # its annotation has a third result, which it returns on demand


class _Options:
    """Arguments that are not tensors. One opaque object: torch.func would look into a dict."""

    def __init__(self, values: dict[str, Any]):
        self.values = values

    def __getattr__(self, name: str) -> Any:
        return self.values[name]


# --- granularity, in plain tensor ops --------------------------------------------------------------------------------


def _spread(p: Tensor, sizes: Sequence[int], o: _Options) -> Tensor:
    return spread_parameter(p, sizes, o.axis, o.block_size)


def _collect(t: Tensor, p: Tensor, o: _Options) -> Tensor:
    """Sum what is one an element to p's shape: the transpose of `_spread`."""
    blocks = block_lengths(t.dim(), o.axis, o.block_size)
    if blocks is None:
        return t.sum_to_size(aligned_shape(p, t.dim(), o.axis)).reshape(p.shape)
    for dim, block in enumerate(blocks):
        block = block or max(t.size(dim), 1)
        if block != 1:
            after = [0, 0] * (t.dim() - dim - 1)
            t = torch.nn.functional.pad(t, [*after, 0, -t.size(dim) % block])
            t = t.unflatten(dim, (-1, block)).sum(dim + 1)
    return t.reshape(p.shape)


def _wide(*tensors: Tensor | None) -> torch.dtype:
    return torch.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else torch.float32


# --- slopes ----------------------------------------------------------------------------------------------------------
#
# `fixed` takes (x, scale, zero_point, options) to what all derivatives hold constant; `slopes` takes that, x, scale and
# zero_point, all one an element, to the slopes.


def _code_numbers(zero_point: Tensor | None, code: Any, o: _Options, dtype: torch.dtype) -> Tensor | None:
    """zero_point as the ops use it."""
    if zero_point is None or (code.is_float and code.bits == 8):
        return None
    if code.is_float:
        one = torch.ones((), dtype=dtype, device=zero_point.device)
        return _ops.dequantize_linear(zero_point, one, x_dtype=code.number)
    z = zero_point.to(dtype)
    if not zero_point.is_floating_point():
        return z
    low = o.values.get("quant_min")
    high = o.values.get("quant_max")
    low, high = code.qmin if low is None else low, code.qmax if high is None else high
    # In between to the nearest; the slope of rounding and clamping is 1.
    return z + (z.nan_to_num(nan=low).clamp(low, high).round() - z).detach()


def _fix_quantized(x: Tensor, scale: Tensor, zero_point: Tensor | None, o: _Options) -> tuple[Tensor, ...]:
    x, scale = x.detach(), scale.detach()
    zero_point = None if zero_point is None else zero_point.detach()
    dtype = _wide(x, scale)
    code = resolve(o.output_dtype or (zero_point.dtype if zero_point is not None else "uint8"))
    x = x.to(dtype) if not x.is_floating_point() else x
    ones = torch.ones_like(x)
    limits = (o.output_dtype, o.precision, o.quant_min, o.quant_max, o.arithmetic)
    needs = (True, False, False)
    inside = _ops.fake_quantize_linear_backward(
        ones, x, scale, zero_point, o.axis, o.block_size, *limits, "clipped", *needs
    )[0]
    passed = _ops.fake_quantize_linear_backward(
        ones, x, scale, zero_point, o.axis, o.block_size, *limits, "identity", *needs
    )[0]
    names = ("axis", "block_size", "output_dtype", "precision", "quant_min", "quant_max", "arithmetic")
    options = {name: o.values[name] for name in names}
    value = _ops.quantize_linear.float_codes(x, scale, zero_point, **options).to(dtype)
    z = _code_numbers(zero_point, code, o, dtype)
    if z is not None:
        value = value - _spread(z, x.shape, o)
    return inside != 0, passed != 0, value


def _fake_quantize_slopes(fixed: tuple[Tensor, ...], o: _Options, x: Tensor, s: Tensor, z: Tensor | None) -> Slopes:
    inside, number, value = fixed
    passed = number if o.ste == "identity" else inside
    quotient = torch.where(inside, x / s, 0.0)
    outside = number & ~inside
    return (
        passed.to(s.dtype),
        torch.where(number, value - quotient, 0.0),
        torch.where(outside, -s, 0.0),
    )


def _float_code_slopes(fixed: tuple[Tensor, ...], o: _Options, x: Tensor, s: Tensor, z: Tensor | None) -> Slopes:
    inside = fixed[0]
    one = inside.to(s.dtype)
    return one / s, torch.where(inside, -x / (s * s), 0.0), one


def _fix_dequantized(x: Tensor, scale: Tensor, zero_point: Tensor | None, o: _Options) -> tuple[Tensor, ...]:
    return ()


def _dequantize_slopes(fixed: tuple[Tensor, ...], o: _Options, x: Tensor, s: Tensor, z: Tensor | None) -> Slopes:
    return s.expand_as(x), x if z is None else x - z, -s.expand_as(x)


def _code_values(x: Tensor, o: _Options, dtype: torch.dtype) -> Tensor:
    """The codes that dequantize_linear is given, as numbers."""
    if x.dtype in _FLOATS:
        return x.to(dtype)
    one = torch.ones((), dtype=dtype, device=x.device)
    return _ops.dequantize_linear(x, one, x_dtype=o.x_dtype, packed_size=o.packed_size)


class _Rule:
    """What an op and its backward op have in common."""

    def __init__(
        self, name: str, option_names: Sequence[str], fix: Callable, slopes: Callable, overload: str = "default"
    ):
        self.name = name
        self.full_name = name if overload == "default" else f"{name}.{overload}"
        self.op = getattr(getattr(_ops, name), overload)
        self.backward_op = getattr(_ops, f"{name}_backward").default
        # Those of the op that its backward takes too, in its order.
        self.option_names = option_names
        self.fix = fix
        self.slopes = slopes
        self.defaults = default_arguments(self.op)

    def options(self, given: dict[str, Any]) -> _Options:
        return _Options(self.defaults | given)

    def backward(self, g: Tensor, inputs: Sequence[Tensor | None], o: _Options, needs: Sequence[bool]) -> Grads:
        """The gradients of x, scale and zero_point, None where there is none."""
        needs = [need and t is not None and t.dtype in _FLOATS for t, need in zip(inputs, needs, strict=True)]
        options = [o.values[name] for name in self.option_names]
        grads = self.backward_op(g, *inputs, *options, *needs)
        return tuple(grad if need else None for grad, need in zip(grads, needs, strict=True))

    def slopes_of(self, x: Tensor, scale: Tensor, zero_point: Tensor | None, fixed: Any, o: _Options) -> Slopes:
        dtype = _wide(x, scale)
        if self.name == "dequantize_linear":
            code = resolve(o.x_dtype or x.dtype)
            x = _code_values(x, o, dtype)
            z = _code_numbers(zero_point, code, o, dtype)
            z = None if z is None else _spread(z, x.shape, o)
        else:
            x, z = x.to(dtype), None
        return self.slopes(fixed, o, x, _spread(scale.to(dtype), x.shape, o), z)

    def tangent(self, y: Tensor, inputs: Any, tangents: Any, o: _Options) -> Tensor:
        """Forward mode."""
        x, scale, zero_point = inputs
        slopes = self.slopes_of(x, scale, zero_point, self.fix(x, scale, zero_point, o), o)
        total = torch.zeros((), dtype=_wide(x, scale), device=y.device)
        for i, (slope, tangent) in enumerate(zip(slopes, tangents, strict=True)):
            if tangent is not None:
                total = total + slope * (tangent if i == 0 else _spread(tangent.to(total.dtype), y.shape, o))
        return total.expand(y.shape).to(y.dtype)

    def composite(self, x: Tensor, scale: Tensor, zero_point: Tensor | None, o: _Options) -> Callable[..., Grads]:
        """The backward op in plain tensor ops, for its own derivatives: (g, x, scale[, zero_point]) -> gradients."""
        fixed = self.fix(x, scale, zero_point, o)

        def gradients(g: Tensor, *inputs: Tensor) -> Grads:
            of = dict(zip(self._differentiable(x, scale, zero_point), inputs, strict=True))
            x_, scale_, zero_point_ = of.get("x", x), of.get("scale", scale), of.get("zero_point", zero_point)
            slopes = self.slopes_of(x_, scale_, zero_point_, fixed, o)
            terms = dict(zip(("x", "scale", "zero_point"), slopes, strict=True))
            results = []
            for name, t in of.items():
                term = g.to(_wide(x, scale, g)) * terms[name]
                results.append((term if name == "x" else _collect(term, t, o)).to(t.dtype))
            return tuple(results)

        return gradients

    def _differentiable(self, *tensors: Tensor | None) -> list[str]:
        names = ("x", "scale", "zero_point")
        return [name for name, t in zip(names, tensors, strict=True) if t is not None and t.dtype in _FLOATS]


# --- vmap ------------------------------------------------------------------------------------------------------------


def _batched(dims: Sequence[int | None], tensors: Sequence[Any]) -> list[Any]:
    """Each batched tensor with its batch first."""
    return [t if t is None or d is None else t.movedim(d, 0) for t, d in zip(tensors, dims, strict=True)]


def _batch_call(
    o: _Options, size: int, x: Tensor, parameters: Sequence[Any], dims: Sequence[int | None], each: bool
) -> tuple[list[Any], dict[str, Any]]:
    """Parameters and granularity for x with a batch in front. `each`: every sample gets parameters of its own."""
    ndim = x.dim() - 1
    blocked = ndim > 0 and o.block_size != [0] and any(o.block_size)
    axis = o.axis % ndim if ndim and -ndim <= o.axis < ndim else o.axis
    scale = parameters[0]
    shape = scale.shape if dims[0] is None else scale.shape[1:]
    # Without dimensions of its own a sample has one scale, and the batch is the one axis.
    granularity = {"axis": axis + 1 if ndim else 0, "block_size": o.block_size}
    if blocked and len(o.block_size) > 1:
        granularity["block_size"] = [1, *o.block_size]
    if not each and not blocked and all(d is None for d in dims) and (shape.numel() == 1 or len(shape) == 1):
        return list(parameters), granularity
    results: list[Any] = []
    for p, d in zip(parameters, dims, strict=True):
        if p is None:
            results.append(None)
            continue
        own = p if d is not None else p.expand(size, *p.shape)
        if blocked:
            results.append(own)
        elif own[0].numel() == 1:
            results.append(own.reshape(size, *[1] * ndim))
        else:
            results.append(own.reshape(size, *aligned_shape(own[0], ndim, axis)))
    return results, granularity


def _batch_forward(op: Any, size: int, dims: Sequence[int | None], tensors: Sequence[Any], o: _Options) -> Tensor:
    """An op on (x, scale, zero_point) for a whole batch at once; the batch comes first in the result."""
    x, *parameters = _batched(dims[:3], tensors)
    if dims[0] is None:
        x = x.expand(size, *x.shape)
    parameters, granularity = _batch_call(o, size, x, parameters, dims[1:3], False)
    return op(x, *parameters, **(o.values | granularity))


# --- Functions and kernels -------------------------------------------------------------------------------------------


def _mark(ctx: Any, y: Tensor) -> None:
    if y.dtype not in _FLOATS:
        ctx.mark_non_differentiable(y)  # a float8 gradient would itself be rounded to float8


def _forward_function(rule: _Rule) -> tuple[Any, Any]:
    def call(x: Tensor, scale: Tensor, zero_point: Tensor | None, o: _Options) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            return rule.op(x, scale, zero_point, **o.values)

    def save(ctx: Any, inputs: Any, y: Tensor) -> None:
        *tensors, ctx.o = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.y = (y.shape, y.dtype)
        _mark(ctx, y)

    class Common(Function):
        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            return (*rule.backward(g, ctx.saved_tensors, ctx.o, ctx.needs_input_grad[:3]), None)

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:
            shape, dtype = ctx.y
            if dtype not in _FLOATS:
                return None
            inputs = ctx.saved_tensors
            y = torch.empty((), dtype=dtype, device=inputs[0].device).expand(shape)
            return rule.tangent(y, inputs, tangents[:3], ctx.o)

    class Cheap(Common):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Tensor:
            y = call(*inputs)
            save(ctx, inputs, y)
            return y

    class Func(Common):
        @staticmethod
        def forward(*inputs: Any) -> Tensor:
            return call(*inputs)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
            save(ctx, inputs, output)

        @staticmethod
        def vmap(info: Any, dims: Any, *inputs: Any) -> tuple[Tensor, int]:
            *tensors, o = inputs
            return _batch_forward(rule.op, info.batch_size, dims, tensors, o), 0

    Cheap.__name__ = f"{rule.name}"
    return Cheap, Func


def _backward_function(rule: _Rule) -> tuple[Any, Any]:
    names = [*rule.option_names, "need_x", "need_scale", "need_zero_point"]

    def call(g: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor | None, o: _Options) -> Grads:
        with torch._C._AutoDispatchBelowAutograd():
            return rule.backward_op(g, x, scale, zero_point, *(o.values[name] for name in names))

    def save(ctx: Any, inputs: Any) -> None:
        *tensors, ctx.o = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)

    def second(ctx: Any) -> tuple[Callable[..., Grads], tuple[Tensor, ...], list[int]]:
        g, x, scale, zero_point = ctx.saved_tensors
        gradients = rule.composite(x, scale, zero_point, ctx.o)
        present = [i for i, t in enumerate((x, scale, zero_point)) if t is not None and t.dtype in _FLOATS]
        return gradients, (g, *((x, scale, zero_point)[i] for i in present)), present

    class Common(Function):
        @staticmethod
        def backward(ctx: Any, *given: Any) -> Any:
            gradients, inputs, present = second(ctx)
            outputs, pull = _vjp(gradients, *inputs)
            heads = [given[i] for i in present]
            if all(h is None for h in heads):
                return (None,) * 5
            seeds = tuple(torch.zeros_like(y) if h is None else h for y, h in zip(outputs, heads, strict=True))
            pulled = pull(seeds)
            results: list[Any] = [pulled[0], None, None, None, None]
            for i, grad in zip(present, pulled[1:], strict=True):
                results[i + 1] = grad
            return tuple(results)

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:
            gradients, inputs, present = second(ctx)
            seeds = [tangents[0], *(tangents[i + 1] for i in present)]
            seeds = [torch.zeros_like(t) if d is None else d for t, d in zip(inputs, seeds, strict=True)]
            # Forward mode does not nest in itself; the transpose of the transpose is the same map.
            outputs, pull = _vjp(gradients, *inputs)
            _, push = _vjp(pull, tuple(map(torch.zeros_like, outputs)))
            (pushed,) = push(tuple(seeds))
            results: list[Any] = [inputs[0].new_empty(0, dtype=torch.float32) for _ in range(3)]
            for i, tangent in zip(present, pushed, strict=True):
                if (ctx.o.need_x, ctx.o.need_scale, ctx.o.need_zero_point)[i]:
                    results[i] = tangent
            return tuple(results)

    class Cheap(Common):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Grads:
            save(ctx, inputs)
            return call(*inputs)

    class Func(Common):
        @staticmethod
        def forward(*inputs: Any) -> Grads:
            return call(*inputs)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            save(ctx, inputs)

        @staticmethod
        def vmap(info: Any, dims: Any, *inputs: Any) -> tuple[Grads, tuple[int, ...]]:
            *tensors, o = inputs
            size = info.batch_size
            g, x, *parameters = _batched(dims[:4], tensors)
            shapes = [
                None if p is None else p.shape if d is None else p.shape[1:]
                for p, d in zip(parameters, dims[2:4], strict=True)
            ]
            x = x if dims[1] is not None else x.expand(size, *x.shape)
            g = g if dims[0] is not None else g.expand(size, *g.shape)
            each = o.need_scale or o.need_zero_point
            parameters, granularity = _batch_call(o, size, x, parameters, dims[2:4], each)
            changed = o.values | granularity
            grads = list(rule.backward_op(g, x, *parameters, *(changed[name] for name in names)))
            for i, shape in enumerate(shapes):
                if shape is not None and grads[i + 1].numel() == size * shape.numel():
                    grads[i + 1] = grads[i + 1].reshape(size, *shape)
            # What is not needed has no element, and no batch either.
            return tuple(t if t.dim() and t.size(0) == size else t.new_empty(size, 0) for t in grads), (0, 0, 0)

    return Cheap, Func


def _register(rule: _Rule) -> None:
    cheap, func = _forward_function(rule)

    def autograd(keyset: Any, x: Tensor, scale: Tensor, zero_point: Tensor | None = None, **given: Any) -> Tensor:
        ensure_registered(x, scale, zero_point)
        if needs_autograd(x, scale, zero_point):
            return cheap.apply(x, scale, zero_point, rule.options(given))
        with torch._C._AutoDispatchBelowAutograd():
            return rule.op.redispatch(keyset & torch._C._after_autograd_keyset, x, scale, zero_point, **given)

    def functorch(x: Tensor, scale: Tensor, zero_point: Tensor | None = None, **given: Any) -> Tensor:
        return func.apply(x, scale, zero_point, rule.options(given))

    _library.impl(rule.full_name, autograd, "Autograd", with_keyset=True)
    _library.impl(rule.full_name, functorch, "FuncTorchDynamicLayerFrontMode")

    cheap_backward, func_backward = _backward_function(rule)
    names = [*rule.option_names, "need_x", "need_scale", "need_zero_point"]

    def backward_options(args: Any) -> _Options:
        # Further options that the slopes ask for.
        return _Options({"packed_size": None, "ste": "clipped"} | dict(zip(names, args, strict=True)))

    def autograd_backward(keyset: Any, g: Tensor, x: Tensor, scale: Tensor, zero_point: Any, *args: Any) -> Grads:
        if needs_autograd(g, x, scale, zero_point):
            return cheap_backward.apply(g, x, scale, zero_point, backward_options(args))
        with torch._C._AutoDispatchBelowAutograd():
            keyset = keyset & torch._C._after_autograd_keyset
            return rule.backward_op.redispatch(keyset, g, x, scale, zero_point, *args)

    def functorch_backward(g: Tensor, x: Tensor, scale: Tensor, zero_point: Any, *args: Any) -> Grads:
        return func_backward.apply(g, x, scale, zero_point, backward_options(args))

    _library.impl(f"{rule.name}_backward", autograd_backward, "Autograd", with_keyset=True)
    _library.impl(f"{rule.name}_backward", functorch_backward, "FuncTorchDynamicLayerFrontMode")


def _guard_out(name: str) -> None:
    """What every op that writes into a tensor owes autograd: no gradient through it, and a new version after it."""
    op = getattr(_ops, name).out
    outs = [a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]

    def write(keyset: Any, *args: Any, **given: Any) -> Any:
        tensors = [t for t in (*args, *given.values()) if isinstance(t, Tensor)]
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            raise RuntimeError(
                f"{name}: out must be absent where a gradient is recorded, but a tensor requires one. "
                "Call under torch.no_grad()."
            )
        torch.autograd.graph.increment_version([given[out] for out in outs])
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return op.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args, **given)

    _library.impl(f"{name}.out", write, "ADInplaceOrView", with_keyset=True)


def needs_autograd(*tensors: Tensor | None) -> bool:
    """Whether a call must be recorded: a tensor wants a gradient, or forward mode is on."""
    return (torch.is_grad_enabled() and torch._C._any_requires_grad(*tensors)) or forward_ad._current_level >= 0


_QUANTIZE = ("axis", "block_size", "output_dtype", "precision", "quant_min", "quant_max", "arithmetic")
_register(_Rule("quantize_linear", _QUANTIZE, _fix_quantized, _float_code_slopes, "float_codes"))
_register(_Rule("fake_quantize_linear", (*_QUANTIZE, "ste"), _fix_quantized, _fake_quantize_slopes))
_register(
    _Rule("dequantize_linear", ("axis", "block_size", "x_dtype", "packed_size"), _fix_dequantized, _dequantize_slopes)
)


def _without_gradient() -> None:
    """quantize_linear to codes: integers and float8 carry none, so a call need not pass by Python to find that out."""
    op = _ops.quantize_linear.default
    defaults = default_arguments(op)

    def rule(info: Any, dims: Any, x: Tensor, scale: Tensor, zero_point: Tensor | None = None, **given: Any) -> Any:
        dims = (*dims, None)[:3]
        return _batch_forward(op, info.batch_size, dims, (x, scale, zero_point), _Options(defaults | given)), 0

    _library.impl("quantize_linear", torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_vmap("linquant::quantize_linear", rule)


_without_gradient()


def _one_by_one(name: str) -> None:
    """vmap of an op without gradients: sample by sample."""
    op = getattr(_ops, name)

    def rule(info: Any, dims: Any, x: Tensor, **options: Any) -> Any:
        results = [op(sample, **options) for sample in x.unbind(dims[0])]
        if isinstance(results[0], tuple):
            return tuple(map(torch.stack, zip(*results, strict=True))), (0,) * len(results[0])
        return torch.stack(results), 0

    torch.library.register_vmap(f"linquant::{name}", rule)


def _no_vmap(info: Any, dims: Any, x: Tensor, *state: Any, **options: Any) -> Any:
    raise RuntimeError(
        "observe_: x must not be under torch.vmap, where samples would meet in one state, but it is. "
        "Observe the whole batch."
    )


torch.library.register_vmap("linquant::observe_", _no_vmap)
for _name in ("min_max", "dynamic_quantize_linear", "pack", "unpack"):
    _one_by_one(_name)
    _guard_out(_name)
for _name in ("quantize_linear", "dequantize_linear", "fake_quantize_linear"):
    _guard_out(_name)
