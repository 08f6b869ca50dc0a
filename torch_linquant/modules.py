"""Quantized layers: the weight is kept as codes, the input is quantized on the way in, the product is float.

A layer computes `F.linear(dequantize(quantize(x)), dequantize(weight), bias)`, and the convolution likewise. These are
the quantize/dequantize pairs in which runtimes find their integer kernels; in the exported graph each stays one node.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .dtypes import resolve
from .granularity import PerAxis, check_granularity
from .observers import Observer, keep_dtype
from .ops import dequantize_linear, quantize_linear
from .weights import quantize_tensor


def _run_forward(layer: nn.Module, args: tuple) -> None:
    """A hook that does nothing."""


class QuantizedLayer(nn.Module):
    """Compute a float layer from codes; what the quantized layers share. `convert` makes them, through `from_float`.

    Buffers: `weight` holds the codes (packed along the last dimension where they have fewer than 8 bits) with
    `weight_scale` and `weight_zero_point`; `input_scale` and `input_zero_point` quantize the input; `bias` is float, or
    absent. `.half()` and `.to(torch.bfloat16)` cast the bias alone: a scale that is rounded after its codes were made
    no longer fits them. The result has the type of the input.
    """

    _settings: tuple[str, ...] = ()  # attributes taken over from the float module

    def __init__(
        self,
        module: nn.Module,
        observer: Observer,
        *,
        weight_dtype: torch.dtype | str = "int8",
        weight_granularity: Any = PerAxis(0),
        weight_symmetric: bool = True,
        weight_method: str = "minmax",
    ):
        super().__init__()
        check_granularity(type(self).__name__, weight_granularity, "weight_granularity")
        if resolve(weight_dtype).bits > 16:
            raise ValueError(
                f"{type(self).__name__}: weight_dtype must have at most 16 bits, but got {weight_dtype!r}."
            )
        for name in self._settings:
            setattr(self, name, getattr(module, name))
        self.weight_dtype = resolve(weight_dtype)
        self.weight_granularity = weight_granularity
        self.input_dtype = observer.dtype
        self.input_granularity = observer.granularity
        self.input_quant_min = observer.quant_min
        self.input_quant_max = observer.quant_max
        self.input_arithmetic = observer.arithmetic

        input_scale, input_zero_point = observer.calculate_qparams()
        weight, weight_scale, weight_zero_point = quantize_tensor(
            module.weight.detach(),
            self.weight_dtype.name,
            weight_granularity,
            method=weight_method,
            symmetric=weight_symmetric,
            packed=self._packed,
        )
        self.register_buffer("weight", weight)
        self.register_buffer("weight_scale", weight_scale)
        self.register_buffer("weight_zero_point", weight_zero_point)
        self.register_buffer("input_scale", input_scale)
        self.register_buffer("input_zero_point", input_zero_point)
        self.register_buffer("bias", None if module.bias is None else module.bias.detach().clone())
        # nn.TransformerEncoderLayer hands its layers' weights to one fused float kernel, unless a layer has a hook.
        self.register_forward_pre_hook(_run_forward)
        self.train(module.training)

    @classmethod
    def from_float(cls, module: nn.Module, observer: Observer, **options: Any) -> "QuantizedLayer":
        """Quantize a float layer.

        Args:
            module: the float layer; it is left untouched.
            observer: one that has seen the layer's input; it gives the input's scale, zero point and type.
            weight_dtype: a type of at most 16 bits for the codes of the weight: "int8", "int4", "float8_e4m3fn", ...
            weight_granularity: which weights share a scale. Axis 0 is the output channel.
            weight_symmetric: whether the weight's zero point is in the middle of the codes (0 for signed types).
            weight_method: "minmax" for scales from the range of the weights, or "auto", "exact", "zoom" for those of
                least error, as in `search_qparams`.

        Raises:
            RuntimeError: if the observer has seen no data.
        """
        return cls(module, observer, **options)

    @property
    def _packed(self) -> bool:
        return self.weight_dtype.bits < 8

    def _weight_columns(self) -> int:
        """The size of the weight's last dimension."""
        raise NotImplementedError

    def quantize_input(self, x: Tensor) -> Tensor:
        """Return the codes of x, of the type the observer was made for."""
        return quantize_linear(
            x,
            self.input_scale,
            self.input_zero_point,
            dtype=self.input_dtype.name,
            quant_min=self.input_quant_min,
            quant_max=self.input_quant_max,
            arithmetic=self.input_arithmetic,
            **self.input_granularity.qparam_args(x.dim()),
        )

    def dequantize_input(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the values that codes of the input stand for."""
        return dequantize_linear(
            codes,
            self.input_scale,
            self.input_zero_point,
            x_dtype=self.input_dtype.name,
            dtype=dtype,
            **self.input_granularity.qparam_args(codes.dim()),
        )

    def dequantize_weight(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the values that the codes of the weight stand for."""
        return dequantize_linear(
            self.weight,
            self.weight_scale,
            self.weight_zero_point,
            x_dtype=self.weight_dtype.name,
            dtype=dtype,
            packed_size=self._weight_columns() if self._packed else None,
            **self.weight_granularity.qparam_args(self.weight.dim()),
        )

    def forward(self, input: Tensor) -> Tensor:
        """Return the layer's output, of the type of input (float32 for int32, autocast's under torch.autocast)."""
        dtype = input.dtype if input.is_floating_point() else torch.float32
        x = self.dequantize_input(self.quantize_input(input), dtype)
        return self._compute(x, self.dequantize_weight(dtype))

    def _compute(self, x: Tensor, weight: Tensor) -> Tensor:
        """The float layer."""
        raise NotImplementedError

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "QuantizedLayer":
        move = keep_dtype(fn)
        return super()._apply(lambda tensor: fn(tensor) if tensor is self.bias else move(tensor), recurse)

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        # copy_ would turn float weights into int8 ones without a word.
        for name, buffer in self._buffers.items():
            loaded = state_dict.get(prefix + name)
            if name != "bias" and loaded is not None and buffer is None:
                error_msgs.append(f"{prefix}{name} must be absent for codes of this layer, but got a tensor.")
                return
            if name != "bias" and loaded is not None and loaded.dtype != buffer.dtype:
                error_msgs.append(
                    f"{prefix}{name} must be {buffer.dtype}, but got {loaded.dtype}.".replace("torch.", "")
                )
                return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def extra_repr(self) -> str:
        settings = [f"{name}={getattr(self, name)!r}" for name in self._settings]
        return ", ".join(
            settings
            + [
                f"bias={self.bias is not None}",
                f"weight={self.weight_dtype.name} {self.weight_granularity}",
                f"input={self.input_dtype.name} {self.input_granularity}",
            ]
        )


class QuantizedLinear(QuantizedLayer):
    """`nn.Linear` on codes: `linear(dequantize(quantize(x)), dequantize(weight), bias)`.

    Input [..., in_features], output [..., out_features], both float. See `QuantizedLayer` for the buffers.

    >>> from torch_linquant.observers import MinMaxObserver
    >>> linear = nn.Linear(2, 1, bias=False)
    >>> _ = linear.weight.data.copy_(torch.tensor([[1.0, -0.5]]))
    >>> observer = MinMaxObserver("uint8")
    >>> _ = observer(torch.tensor([[0.0, 2.55]]))
    >>> quantized = QuantizedLinear.from_float(linear, observer)
    >>> quantized.weight, quantized.weight_scale
    (tensor([[127, -64]], dtype=torch.int8), tensor([0.0078]))
    >>> quantized(torch.tensor([[1.0, 0.5]]))
    tensor([[0.7451]])
    """

    _settings = ("in_features", "out_features")

    def _weight_columns(self) -> int:
        return self.in_features

    def _compute(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight, self.bias)


class QuantizedConv2d(QuantizedLayer):
    """`nn.Conv2d` on codes: `conv2d(dequantize(quantize(x)), dequantize(weight), bias)`.

    Strides, paddings and their modes, dilations and groups are the float module's. Padding is added to the dequantized
    input, so that the zeros are exact. See `QuantizedLayer` for the buffers.
    """

    _settings = (
        "in_channels",
        "out_channels",
        "kernel_size",
        "stride",
        "padding",
        "dilation",
        "groups",
        "padding_mode",
    )

    def _weight_columns(self) -> int:
        return self.kernel_size[-1]

    def _sides(self) -> list[int]:
        """The padding as F.pad takes it: left, right, top, bottom."""
        sides = []
        for dim in (1, 0):
            if self.padding == "same":
                total = self.dilation[dim] * (self.kernel_size[dim] - 1)
                sides += [total // 2, total - total // 2]
            else:
                sides += [0, 0] if self.padding == "valid" else [self.padding[dim]] * 2
        return sides

    def _compute(self, x: Tensor, weight: Tensor) -> Tensor:
        padding = self.padding
        if self.padding_mode != "zeros":
            x, padding = F.pad(x, self._sides(), mode=self.padding_mode), 0
        return F.conv2d(x, weight, self.bias, self.stride, padding, self.dilation, self.groups)
