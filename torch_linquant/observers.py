"""Observers: modules that watch a tensor go by and turn what they saw into a scale and a zero point.

An observer returns its input untouched and keeps the range of what passed in the buffers `r_min` and `r_max`. Its
forward reads no value on the host and resizes nothing in steady state, so a model with observers in it compiles,
exports and runs without a device sync. All judgement (warnings, errors, the scale) happens when the range is read.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .dtypes import resolve
from .granularity import PerAxis, PerTensor, check_granularity
from .ops import min_max
from .qparams import choose_qparams


def keep_dtype(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Reduce what `nn.Module._apply` does to a tensor (a move, a cast) to the move."""

    def move(tensor: Tensor) -> Tensor:
        result = fn(tensor)
        return result if result.dtype == tensor.dtype else tensor.to(result.device)

    return move


class Observer(nn.Module):
    """Keep the range of the values that pass; the base class of every kind of observer.

    A kind says in `_update` what a batch does to its state, and may add buffers to `_fresh`. All else is here.

    State, all registered and saved: `r_min` and `r_max`, float32, of the shape of the scale (0-d per tensor; otherwise
    sized by the first batch), which start at +inf and -inf; `nonfinite`, int64, counts the NaN and infinite values,
    which are left out of the range. `.half()` and `.to(torch.bfloat16)` move this state but never round it. A state
    loads into an observer of any size, a fresh one included.

    Args:
        dtype: the quantized type that the scale is for: a torch dtype, or a name such as "uint8" or "int4".
        granularity: which elements share a scale.
        symmetric, include_zero, eps, power_of_two, quant_min, quant_max: how a range becomes a scale and a zero point,
            as in `choose_qparams`.
        name: what errors and warnings call this observer. `prepare` gives the path of the module and "input".

    Attributes:
        enabled: whether batches are taken in; False lets them pass.

    Raises:
        ValueError: if an option does not fit the type.
        RuntimeError: from `forward`, if a batch has another number of channels than the ones before it (nothing
            changes); from `range` and `calculate_qparams`, if no finite value was seen.
    """

    _version = 1

    def __init__(
        self,
        dtype: torch.dtype | str = "uint8",
        granularity: Any = PerTensor(),
        *,
        symmetric: bool = False,
        include_zero: bool = True,
        eps: float | None = None,
        power_of_two: bool = False,
        quant_min: int | None = None,
        quant_max: int | None = None,
        name: str = "",
    ):
        super().__init__()
        check_granularity(type(self).__name__, granularity)
        self.name = name
        self.dtype = resolve(dtype)
        self.granularity = granularity
        self.symmetric = symmetric
        self.include_zero = include_zero
        self.eps = eps
        self.power_of_two = power_of_two
        self.quant_min = quant_min
        self.quant_max = quant_max
        self.enabled = True  # a Python bool: torch.compile guards on it, a tensor would break the graph
        self._reported = 0  # how many non-finite values the last warning spoke of
        # Refuses impossible options here rather than after the calibration.
        self._qparams(torch.zeros((), device="cpu"), torch.ones((), device="cpu"))
        for key, value in self._fresh(self._unsized, None).items():
            self.register_buffer(key, value)

    # What a kind of observer says.

    def _fresh(self, shape: torch.Size | tuple[int, ...], device: torch.device | None) -> dict[str, Tensor]:
        """The buffers of an observer that has seen nothing; `shape` is the scale's."""
        return {
            "r_min": torch.full(shape, float("inf"), dtype=torch.float32, device=device),
            "r_max": torch.full(shape, float("-inf"), dtype=torch.float32, device=device),
            "nonfinite": torch.zeros((), dtype=torch.int64, device=device),
        }

    def _update(self, x: Tensor, r_min: Tensor, r_max: Tensor) -> None:
        """Take in a batch whose finite values lie in [r_min, r_max]: +inf, -inf where a slice of it has none.

        Only in-place tensor operations on the buffers: no `.item()`, no `if` on values.
        """
        raise NotImplementedError

    # Watching.

    def forward(self, x: Tensor) -> Tensor:
        """Observe x (float32, float16, bfloat16, float64 or int32) and return it, the same object."""
        if self.enabled:
            self._observe(x.detach())
        return x

    def _observe(self, x: Tensor) -> None:
        if x.device != self.r_min.device:
            raise RuntimeError(
                f"observer {self._called!r}: x must be on the observer's device {self.r_min.device}, "
                f"but got {x.device}."
            )
        if x.dtype == torch.float64:
            x = x.to(torch.float32)  # the state is float32: what is beyond it counts as infinite
        r_min, r_max = min_max(x, **self.granularity.reduce_args(x.dim()))
        if r_min.shape != self.r_min.shape and not self._make_room(x, r_min.shape):
            return
        if x.is_floating_point():
            # x - x is NaN, which is not zero, exactly where x is NaN or infinite. A third of the time of isfinite; and
            # Inductor takes x * 0, which would do as well, for 0.
            self.nonfinite.add_(torch.count_nonzero(x - x))
        self._update(x, r_min, r_max)

    def _make_room(self, x: Tensor, shape: torch.Size) -> bool:
        """Size the buffers for the first batch. False if the batch is empty and so changes nothing."""
        if x.numel() == 0:
            return False
        if self.r_min.shape != self._unsized:
            raise RuntimeError(
                f"observer {self._called!r}: x must give a range of shape {list(self.r_min.shape)}, as the batches "
                f"before it did, but got shape {list(shape)} from x of shape {list(x.shape)}."
            )
        if torch.compiler.is_compiling():
            raise RuntimeError(
                f"observer {self._called!r}: r_min must have its shape before the model is compiled or exported, "
                "but no batch has been seen. Run one batch first."
            )
        self._start(shape)
        return True

    # Reading.

    @property
    def seen(self) -> bool:
        """Whether any finite value was seen."""
        return bool((self.r_min <= self.r_max).any())

    def range(self) -> tuple[Tensor, Tensor]:
        """Return (r_min, r_max), float32, of the shape of the scale; 0 and 0 for a channel with no finite value.

        Warns once if NaN or infinite values were left out.
        """
        if not self.seen:
            raise RuntimeError(
                f"observer {self._called!r} {self._unseen()}. "
                "Run calibration batches through the model before reading its range."
            )
        nonfinite = int(self.nonfinite)
        if nonfinite != self._reported:
            self._reported = nonfinite
            warnings.warn(
                f"observer {self._called!r} left {nonfinite} NaN or infinite values out of its range.", stacklevel=2
            )
        seen = self.r_min <= self.r_max
        return torch.where(seen, self.r_min, 0.0), torch.where(seen, self.r_max, 0.0)

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Return (scale, zero_point) for the range seen: `choose_qparams` of `range()` and this observer's options."""
        return self._qparams(*self.range())

    def _qparams(self, r_min: Tensor, r_max: Tensor) -> tuple[Tensor, Tensor]:
        return choose_qparams(
            r_min,
            r_max,
            self.dtype.name,
            symmetric=self.symmetric,
            include_zero=self.include_zero,
            eps=self.eps,
            power_of_two=self.power_of_two,
            quant_min=self.quant_min,
            quant_max=self.quant_max,
        )

    def _unseen(self) -> str:
        """Why there is no range to read."""
        nonfinite = int(self.nonfinite)
        return f"has seen no finite value, but {nonfinite} NaN or infinite ones" if nonfinite else "has seen no data"

    # State.

    def reset(self) -> None:
        """Forget what was seen."""
        self._start(self._unsized)

    def _start(self, shape: torch.Size | tuple[int, ...]) -> None:
        self._reported = 0
        # Outside inference mode, lest later batches find buffers that they may not write to.
        with torch.inference_mode(False):
            for key, value in self._fresh(shape, self.r_min.device).items():
                buffer = getattr(self, key)
                if buffer.shape == value.shape and not buffer.is_inference():
                    buffer.copy_(value)  # the same memory: a captured graph goes on writing to it
                else:
                    setattr(self, key, value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Observer":
        return super()._apply(keep_dtype(fn), recurse)

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        missing = [prefix + key for key in self._buffers if prefix + key not in state_dict]
        if missing:
            missing_keys.extend(missing if strict else [])
            return
        problem = self._problem({key: state_dict[prefix + key] for key in self._buffers}, local_metadata.get("version"))
        if problem:
            error_msgs.append(f"observer {self._called!r}: {problem}")
            return
        shape = state_dict[prefix + "r_min"].shape
        if shape != self.r_min.shape:
            self._start(shape)
        self._reported = 0
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def _problem(self, state: dict[str, Tensor], version: int | None) -> str | None:
        """What is wrong with a state about to be loaded, if anything."""
        if version is not None and version > self._version:
            return (
                f"the state's version must be at most {self._version}, but got {version}. Use a newer torch_linquant."
            )
        for key, like in self._fresh(self._unsized, torch.device("meta")).items():
            if state[key].dtype != like.dtype:
                return f"{key} must be {_type_name(like.dtype)}, but got {_type_name(state[key].dtype)}."
        rank = 0 if isinstance(self.granularity, PerTensor) else 1 if isinstance(self.granularity, PerAxis) else None
        shape = list(state["r_min"].shape)
        if (len(shape) != rank) if rank is not None else not shape:
            dimensions = "some" if rank is None else rank
            return f"r_min must have {dimensions} dimensions for {self.granularity}, but got shape {shape}."
        for key, like in self._fresh(state["r_min"].shape, torch.device("meta")).items():
            if state[key].shape != like.shape:
                return f"{key} must have shape {list(like.shape)}, but got shape {list(state[key].shape)}."
        return None

    @property
    def _unsized(self) -> tuple[int, ...]:
        """The shape of r_min before any batch."""
        return () if isinstance(self.granularity, PerTensor) else (0,)

    @property
    def _called(self) -> str:
        return self.name or type(self).__name__

    def extra_repr(self) -> str:
        parts = [self.dtype.name, repr(self.granularity)]
        defaults = {
            "symmetric": False,
            "include_zero": True,
            "eps": None,
            "power_of_two": False,
            "quant_min": None,
            "quant_max": None,
            "enabled": True,
        }
        parts += [f"{key}={getattr(self, key)}" for key, value in defaults.items() if getattr(self, key) != value]
        return ", ".join(parts)


class MinMaxObserver(Observer):
    """Keep the smallest and the largest finite value: r_min = min x, r_max = max x over all batches.

    The result does not depend on the order or the split of the batches. Arguments, state and errors are `Observer`'s.

    >>> observer = MinMaxObserver("int8")
    >>> x = torch.tensor([[191.6, -13.5, 728.6], [92.14, 295.5, -184.0], [0.0, 684.6, 245.5]])
    >>> observer(x) is x
    True
    >>> observer.range()
    (tensor(-184.), tensor(728.6000))
    >>> observer.calculate_qparams()
    (tensor(3.5788), tensor(-77, dtype=torch.int8))

    One range for each channel:

    >>> observer = MinMaxObserver("int8", PerAxis(1), symmetric=True)
    >>> _ = observer(torch.tensor([[-1.0, 2.0], [0.5, 3.0]]))
    >>> observer.range()
    (tensor([-1.,  2.]), tensor([0.5000, 3.0000]))
    """

    def _update(self, x: Tensor, r_min: Tensor, r_max: Tensor) -> None:
        self.r_min.copy_(torch.minimum(self.r_min, r_min))
        self.r_max.copy_(torch.maximum(self.r_max, r_max))


def _type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
