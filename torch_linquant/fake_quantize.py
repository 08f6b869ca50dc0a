"""Modules for quantization-aware training: what a tensor is worth after quantization, with ranges that follow the data
(FakeQuantize) or scales that are trained (LearnedFakeQuantize).

Both take and return a tensor of any float type, so they stand in front of a layer for its input, and over a weight as
a parametrization (torch.nn.utils.parametrize). Both compile and export as one `fake_quantize_linear` node, and compute
the bits of the quantized model that they train for.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from .dtypes import resolve
from .granularity import PerTensor, check_granularity
from .histogram_observers import HistogramObserver
from .observers import MinMaxObserver, Observer, keep_dtype
from .ops import fake_quantize_linear


class FakeQuantize(nn.Module):
    """Watch the range of x, and return x as that range quantizes it.

    In training mode an observer takes x in first; in evaluation mode the range stands still. Scale and zero point are
    `choose_qparams` of the range, the one formula of observers and converted models. The gradient to x is that of
    `fake_quantize_linear`; the range has none. No value is read on the host, but for one look on the CPU, outside
    training, at whether there is a range.

    Args:
        dtype, granularity: type of the codes, and which elements share a scale.
        observer: how the range follows the data; it brings its own dtype, granularity and options, and the two above
            must then be left out. Default: `MinMaxObserver(dtype, granularity)`.
        ste: as in `fake_quantize_linear`.

    Attributes:
        observer: the observer. `observer.enabled = False` holds the range while the model trains on.
        enabled: whether x is quantized. If False, x is observed and returned as it is.

    Raises:
        ValueError: if observer is not one, or comes together with dtype or granularity.
        RuntimeError: from `forward`, as the observer does; and, on the CPU, if no data was seen before evaluation.

    >>> fake = FakeQuantize("int4", symmetric=True)
    >>> fake(torch.tensor([-1.5, 0.3, 0.7]))
    tensor([-1.6000,  0.4000,  0.8000])
    >>> fake.eval()(torch.tensor([5.0]))
    tensor([1.4000])
    """

    def __init__(
        self,
        dtype: torch.dtype | str | None = None,
        granularity: Any = None,
        observer: Observer | None = None,
        *,
        ste: str = "clipped",
        **options: Any,
    ):
        super().__init__()
        if observer is None:
            observer = MinMaxObserver(
                "uint8" if dtype is None else dtype, PerTensor() if granularity is None else granularity, **options
            )
        elif not isinstance(observer, Observer):
            raise ValueError(f"FakeQuantize: observer must be an Observer, but got {observer!r}.")
        elif isinstance(observer, HistogramObserver):
            raise ValueError(
                "FakeQuantize: observer must keep its range in r_min and r_max, but got one that searches a histogram: "
                f"{observer!r}. Train with MovingAverageMinMaxObserver, or LearnedFakeQuantize.from_observer."
            )
        elif dtype is not None or granularity is not None or options:
            raise ValueError("FakeQuantize: dtype, granularity and options must be left out where observer is given.")
        self.observer = observer
        self.ste = ste
        self.enabled = True

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.observer(x)
        if not self.enabled:
            return x
        observer = self.observer
        observing = self.training and observer.enabled
        # Where looking at a value would stop a graph or a device, what was not seen counts as [0, 0].
        if not observing and not torch.compiler.is_compiling() and observer.r_min.device.type == "cpu":
            if not observer.seen:
                observer.range()
        scale, zero_point = observer._qparams(observer.r_min, observer.r_max)
        return fake_quantize_linear(
            x,
            scale,
            zero_point,
            dtype=observer.dtype,
            quant_min=observer.quant_min,
            quant_max=observer.quant_max,
            arithmetic=observer.arithmetic,
            ste=self.ste,
            **observer.granularity.qparam_args(x.dim()),
        )

    def extra_repr(self) -> str:
        parts = [] if self.ste == "clipped" else [f"ste={self.ste}"]
        return ", ".join(parts + ([] if self.enabled else ["enabled=False"]))


class _Trained(Function):
    """A parameter on its way into the op: kept above a minimum, its gradient scaled."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, least: float | None, factor: float) -> Tensor:
        ctx.factor = factor
        return parameter.clone() if least is None else parameter.clamp(min=least)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # Passed on where the minimum holds too: the parameter can come back.
        return grads[0] * ctx.factor, None, None


class LearnedFakeQuantize(nn.Module):
    """Fake quantization whose scale, and on demand zero point, are trained: LSQ (arXiv 1902.08153), LSQ+ (2004.09576).

    Args:
        scale: where training starts, float32 or float64, of the granularity's shape. `from_observer` finds it in data.
        zero_point: of scale's shape; None for 0, and for float codes.
        dtype, granularity: type of the codes, and which elements share a scale.
        learn_zero_point: train a floating zero point as well, which is rounded and clamped in every step.
        gradient_scale: whether the gradients of scale and zero point are multiplied by 1 / sqrt(n * q_max), n being the
            elements that share a scale (LSQ, section 2.2): steps of a scale are then in proportion to those of weights.
        eps: the smallest scale. A parameter below it counts as eps, and can come back.
        quant_min, quant_max: a narrower range of integer codes.
        ste: as in `fake_quantize_linear`.

    State: `scale` is a parameter; `zero_point` a parameter if learned, else an integer buffer, or None. One scale for
    the whole tensor has shape [1], which FSDP2 can share out. `.half()` and `.to(torch.bfloat16)` move the state but
    never round it.

    Raises:
        ValueError: if an option does not fit the type.
        RuntimeError: from `forward`, if scale does not fit x.

    >>> observer = MinMaxObserver("int4", symmetric=True)
    >>> _ = observer(torch.tensor([-1.5, 0.3, 0.7]))
    >>> fake = LearnedFakeQuantize.from_observer(observer)
    >>> fake(torch.tensor([-1.5, 0.3, 0.7])).sum().backward()
    >>> fake.scale, fake.scale.grad.shape
    (Parameter containing:
    tensor([0.2000], requires_grad=True), torch.Size([1]))
    """

    def __init__(
        self,
        scale: Tensor,
        zero_point: Tensor | None = None,
        *,
        dtype: torch.dtype | str = "int8",
        granularity: Any = PerTensor(),
        learn_zero_point: bool = False,
        gradient_scale: bool = True,
        eps: float = torch.finfo(torch.float32).tiny,
        quant_min: int | None = None,
        quant_max: int | None = None,
        ste: str = "clipped",
    ):
        super().__init__()
        check_granularity("LearnedFakeQuantize", granularity)
        self.dtype = resolve(dtype)
        self.granularity = granularity
        self.gradient_scale = gradient_scale
        self.eps = eps
        self.quant_min = quant_min
        self.quant_max = quant_max
        self.ste = ste
        if not scale.dtype.is_floating_point or scale.dtype.itemsize < 4:
            raise ValueError(f"LearnedFakeQuantize: scale must be float32 or float64, but got {scale.dtype}.")
        if not eps > 0:
            raise ValueError(f"LearnedFakeQuantize: eps must be positive, but got {eps}.")
        if self.dtype.is_float and (learn_zero_point or zero_point is not None):
            raise ValueError(f"LearnedFakeQuantize: zero_point must be left out for {self.dtype.name} codes.")
        if zero_point is not None and zero_point.shape != scale.shape:
            raise ValueError(
                f"LearnedFakeQuantize: zero_point must have scale's shape {list(scale.shape)}, "
                f"but got shape {list(zero_point.shape)}."
            )
        self.scale = nn.Parameter(scale.detach().clone().reshape(scale.shape or (1,)))
        if zero_point is not None:
            zero_point = zero_point.detach().clone().reshape(self.scale.shape)
        if learn_zero_point:
            start = torch.zeros_like(self.scale) if zero_point is None else zero_point.to(scale.dtype)
            self.zero_point = nn.Parameter(start)
        else:
            self.register_buffer("zero_point", zero_point)

    @classmethod
    def from_observer(cls, observer: Observer, **options: Any) -> "LearnedFakeQuantize":
        """Start from the scale and zero point of what an observer has seen; options are the constructor's.

        Raises:
            RuntimeError: if the observer has seen no data.
        """
        scale, zero_point = observer.calculate_qparams()
        symmetric_at_zero = zero_point is not None and observer.symmetric and observer.dtype.signed
        return cls(
            scale,
            None if symmetric_at_zero and not options.get("learn_zero_point") else zero_point,
            dtype=observer.dtype.name,
            granularity=copy.deepcopy(observer.granularity),
            quant_min=observer.quant_min,
            quant_max=observer.quant_max,
            **options,
        )

    def calculate_qparams(self) -> tuple[Tensor, Tensor | None]:
        """Return (scale, zero_point) as `forward` uses them, detached; zero_point of the codes' storage type."""
        scale = self.scale.detach().clamp(min=self.eps)
        if self.zero_point is None:
            return scale, None
        low = self.dtype.qmin if self.quant_min is None else self.quant_min
        high = self.dtype.qmax if self.quant_max is None else self.quant_max
        zero_point = self.zero_point.detach()
        if zero_point.is_floating_point():
            zero_point = zero_point.nan_to_num(nan=low).clamp(low, high).round().to(self.dtype.storage)
        return scale, zero_point

    def forward(self, x: Tensor) -> Tensor:
        factor = 1.0
        if self.gradient_scale:
            count = max(x.numel() // max(self.scale.numel(), 1), 1)
            factor = (count * float(self.dtype.qmax if self.quant_max is None else self.quant_max or 1)) ** -0.5
        zero_point = self.zero_point
        if isinstance(zero_point, nn.Parameter):
            zero_point = _Trained.apply(zero_point, None, factor)
        return fake_quantize_linear(
            x,
            _Trained.apply(self.scale, self.eps, factor),
            zero_point,
            dtype=self.dtype,
            quant_min=self.quant_min,
            quant_max=self.quant_max,
            ste=self.ste,
            **self.granularity.qparam_args(x.dim()),
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "LearnedFakeQuantize":
        return super()._apply(keep_dtype(fn), recurse)

    def extra_repr(self) -> str:
        parts = [self.dtype.name, repr(self.granularity)]
        defaults = {"gradient_scale": True, "quant_min": None, "quant_max": None, "ste": "clipped"}
        parts += [f"{key}={getattr(self, key)}" for key, value in defaults.items() if getattr(self, key) != value]
        if isinstance(self.zero_point, nn.Parameter):
            parts.append("learn_zero_point=True")
        return ", ".join(parts)
