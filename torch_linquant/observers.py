"""Observers: modules that watch a tensor go by and turn what they saw into a scale and a zero point.

| kind                          | r_min and r_max that it reads                                        |
|-------------------------------|----------------------------------------------------------------------|
| `MinMaxObserver`              | of all values                                                        |
| `MovingAverageMinMaxObserver` | of each batch, averaged with weights that fade                       |
| `MeanMinMaxObserver`          | of each batch, averaged                                              |
| `PercentileObserver`          | the range that holds a given part of the values                      |
| `MSEObserver`                 | the range of least squared error                                     |
| `EntropyObserver`             | the range that keeps most information                                |
| `StdObserver`                 | mean and standard deviation                                          |
| `ACIQObserver`                | what would be best for a Laplace or a normal distribution            |
| `DistributionObserver`        | equal standard deviations of values and float8 codes                 |

The last six (histogram_observers.py) keep a histogram and differ in how they read it alone: `from_observer` reads the
same data another way.

An observer returns its input untouched and keeps the range of what passed in the buffers `r_min` and `r_max`. Its
forward reads no value on the host and resizes nothing in steady state, so a model with observers in it compiles,
exports and runs without a device sync. All judgement (warnings, errors, the scale) happens when the range is read.
"""

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .dtypes import resolve, type_name
from .granularity import PerAxis, PerTensor, check_granularity
from .qparams import choose_qparams

_observe = torch.ops.linquant.observe_
_SUSPICIOUS = 1e30  # no activation; rather a mask


def keep_dtype(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Reduce what `nn.Module._apply` does to a tensor (a move, a cast) to the move."""

    def move(tensor: Tensor) -> Tensor:
        result = fn(tensor)
        return result if result.dtype == tensor.dtype else tensor.to(result.device)

    return move


class Observer(nn.Module):
    """Keep the range of the values that pass; the base class of every kind of observer.

    A kind says in `_update` what the extremes of a batch do to its state (or in `_take` what the batch does), in
    `_read` what range that is, and may add buffers to `_fresh`. All else is here.

    State, all registered and saved: `r_min` and `r_max`, float32, of the shape of the scale (0-d per tensor; otherwise
    sized by the first batch), which start at +inf and -inf; `nonfinite`, int64, counts the NaN and infinite values.
    `.half()` and `.to(torch.bfloat16)` move this state but never round it. A state loads into an observer of any size,
    a fresh one included.

    Args:
        dtype: the quantized type that the scale is for: a torch dtype, or a name such as "uint8" or "int4".
        granularity: which elements share a scale.
        symmetric, include_zero, eps, power_of_two, quant_min, quant_max: how a range becomes a scale and a zero point,
            as in `choose_qparams`.
        arithmetic: of the ops that quantize with this observer's scale, as in `quantize_linear`.
        nonfinite: what NaN and infinities do. "skip": they are left out of the range and counted, with one warning when
            the range is read. "raise": `forward` refuses the batch; it reads a value on the host to know, and neither
            compiles nor exports. "propagate": r_min and r_max become NaN, and reading the range raises.
        name: what errors and warnings call this observer. `prepare` gives the path of the module and "input".

    Attributes:
        enabled: whether batches are taken in; False lets them pass.

    Raises:
        ValueError: if an option does not fit the type; from `forward`, if x lacks the dimension of the granularity.
        RuntimeError: from `forward`, if a batch has another number of channels than the ones before it (nothing
            changes); from `range` and `calculate_qparams`, if no finite value was seen.
    """

    _version = 1
    _options: dict[str, Any] = {
        "symmetric": False,
        "include_zero": True,
        "eps": None,
        "power_of_two": False,
        "quant_min": None,
        "quant_max": None,
        "arithmetic": "onnx",
        "nonfinite": "skip",
    }

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
        arithmetic: str = "onnx",
        nonfinite: str = "skip",
        name: str = "",
    ):
        super().__init__()
        check_granularity(type(self).__name__, granularity)
        for argument, value, allowed in (
            ("arithmetic", arithmetic, ("onnx", "executorch", "onednn")),
            ("nonfinite", nonfinite, ("skip", "raise", "propagate")),
        ):
            if value not in allowed:
                choices = " or ".join(map(repr, allowed[-2:]))
                raise ValueError(
                    f"{type(self).__name__}: {argument} must be {allowed[0]!r}, {choices}, but got {value!r}."
                )
        self.name = name
        self.dtype = resolve(dtype)
        self.granularity = granularity
        self.symmetric = symmetric
        self.include_zero = include_zero
        self.eps = eps
        self.power_of_two = power_of_two
        self.quant_min = quant_min
        self.quant_max = quant_max
        self.arithmetic = arithmetic
        self.on_nonfinite = nonfinite
        self.enabled = True  # a Python bool: torch.compile guards on it, a tensor would break the graph
        self._reported = 0  # how many non-finite values the last warning spoke of
        # Refuses impossible options here rather than after the calibration.
        self._qparams(torch.zeros((), device="cpu"), torch.ones((), device="cpu"))
        for key, value in self._fresh(self._unsized, None).items():
            self.register_buffer(key, value)

    @classmethod
    def from_observer(cls, observer: "Observer", **options: Any) -> "Observer":
        """Read what another observer has seen in the way of this class, without new data.

        The other observer must hold all that this kind keeps: any reading of a histogram can be made from any other, a
        `MinMaxObserver` from those too. Options are this class's constructor's and default to the other observer's,
        granularity excepted, which must stay: the same data may so be read for another dtype.

        Raises:
            ValueError: if the other observer holds less than this kind needs.

        >>> from torch_linquant import MSEObserver, PercentileObserver
        >>> observer = PercentileObserver("uint8", percentile=99.0)
        >>> _ = observer(torch.arange(1000.0))
        >>> MSEObserver.from_observer(observer, dtype="int8", symmetric=True).calculate_qparams()
        (tensor(7.8353), tensor(0, dtype=torch.int8))
        """
        missing = [key for key in cls._keys if key not in observer._buffers]
        if missing:
            raise ValueError(
                f"{cls.__name__}.from_observer: observer must hold {', '.join(missing)}, but got a "
                f"{type(observer).__name__}."
            )
        inherited = {key: observer._option(key) for key in cls._options if key in observer._options}
        if "dtype" not in options:
            options["dtype"] = observer.dtype.name
        if resolve(options["dtype"]) != observer.dtype:  # these are codes of the other type
            inherited.pop("quant_min"), inherited.pop("quant_max")
        result = cls(**{**inherited, "granularity": observer.granularity, "name": observer.name, **options})
        result.to(observer.r_min.device)
        result.load_state_dict({key: observer._buffers[key] for key in result._buffers})
        return result

    # What a kind of observer says.

    _keys: tuple[str, ...] = ("r_min", "r_max", "nonfinite")  # of the buffers
    r_min: Tensor
    r_max: Tensor
    nonfinite: Tensor

    def _fresh(self, shape: torch.Size | tuple[int, ...], device: torch.device | None) -> dict[str, Tensor]:
        """The buffers of an observer that has seen nothing; `shape` is the scale's."""
        return {
            "r_min": torch.full(shape, math.inf, dtype=torch.float32, device=device),
            "r_max": torch.full(shape, -math.inf, dtype=torch.float32, device=device),
            "nonfinite": torch.zeros((), dtype=torch.int64, device=device),
        }

    def _take(self, x: Tensor, **grain: Any) -> None:
        """Take in a batch. Only in-place operations on the buffers: no `.item()`, no `if` on values."""
        self._update(*self._extremes(x, self.nonfinite, **grain))

    def _update(self, r_min: Tensor, r_max: Tensor) -> None:
        """Take in a batch whose finite values lie in [r_min, r_max]: +inf, -inf where a slice of it has none."""
        raise NotImplementedError

    def _read(self) -> tuple[Tensor, Tensor]:
        """The range that the state stands for; where nothing was seen, anything."""
        return self.r_min, self.r_max

    # Watching.

    def forward(self, x: Tensor) -> Tensor:
        """Observe x (float32, float16, bfloat16, float64 or int32) and return it, the same object."""
        if self.enabled:
            self._watch(x.detach())
        return x

    def _watch(self, x: Tensor) -> None:
        if x.device != self.r_min.device:
            raise RuntimeError(
                f"observer {self._called!r}: x must be on the observer's device {self.r_min.device}, "
                f"but got {x.device}."
            )
        grain = self.granularity.reduce_args(x.dim())
        shape = self.granularity.scale_shape(x.shape)
        if self.on_nonfinite == "raise":
            self._refuse_nonfinite(x, grain)
        if shape != self.r_min.shape and not self._make_room(x, shape, grain):
            return
        self._take(x, **grain)
        if self.on_nonfinite == "propagate":
            lost = self.nonfinite > 0
            self.r_min.masked_fill_(lost, math.nan)
            self.r_max.masked_fill_(lost, math.nan)

    def _extremes(self, x: Tensor, nonfinite: Tensor, **grain: Any) -> tuple[Tensor, Tensor]:
        """The range of the finite values of each slice of a batch; `nonfinite` counts the others."""
        shape = self.granularity.scale_shape(x.shape)
        r_min = torch.full(shape, math.inf, dtype=torch.float32, device=x.device)
        r_max = torch.full(shape, -math.inf, dtype=torch.float32, device=x.device)
        _observe(x, r_min, r_max, nonfinite, **grain)
        return r_min, r_max

    def _refuse_nonfinite(self, x: Tensor, grain: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            raise RuntimeError(
                f"observer {self._called!r}: nonfinite must be 'skip' or 'propagate' in a model that is compiled or "
                "exported, but got 'raise'."
            )
        found = torch.zeros((), dtype=torch.int64, device=x.device)
        self._extremes(x, found, **grain)
        if found:
            raise RuntimeError(
                f"observer {self._called!r}: x must be finite where nonfinite='raise', but got {int(found)} NaN or "
                f"infinite values in x of shape {list(x.shape)}."
            )

    def _make_room(self, x: Tensor, shape: tuple[int, ...], grain: dict[str, Any]) -> bool:
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
        # The op refuses x before the buffers get their size.
        self._extremes(x.new_empty(x.shape, device="meta"), self.nonfinite.to("meta"), **grain)
        self._start(shape)
        return True

    # Reading.

    @property
    def seen(self) -> bool:
        """Whether any finite value was seen."""
        return bool((self.r_min <= self.r_max).any())

    def range(self) -> tuple[Tensor, Tensor]:
        """Return (r_min, r_max), float32, of the shape of the scale; 0 and 0 for a channel with no finite value.

        Warns once if NaN or infinite values were left out, and if values beyond 1e30 were not: they are most likely a
        mask, and leave nothing for the rest.
        """
        self._check_seen()
        nonfinite = int(self.nonfinite)
        if nonfinite != self._reported:
            self._reported = nonfinite
            warnings.warn(
                f"observer {self._called!r} left {nonfinite} NaN or infinite values out of its range.", stacklevel=2
            )
        seen = self.r_min <= self.r_max
        r_min, r_max = self._read()
        r_min, r_max = torch.where(seen, r_min, 0.0), torch.where(seen, r_max, 0.0)
        if bool(((-r_min > _SUSPICIOUS) | (r_max > _SUSPICIOUS)).any()):
            warnings.warn(
                f"observer {self._called!r} has a range up to {float(torch.maximum(-r_min, r_max).max()):.3g}: a mask "
                "rather than values? Observe what is masked before the mask is added.",
                stacklevel=2,
            )
        return r_min, r_max

    def _check_seen(self) -> None:
        nonfinite = int(self.nonfinite)
        if nonfinite and self.on_nonfinite == "propagate":
            raise RuntimeError(
                f"observer {self._called!r} has seen {nonfinite} NaN or infinite values, which nonfinite='propagate' "
                "does not leave out."
            )
        if not self.seen:
            raise RuntimeError(
                f"observer {self._called!r} {self._unseen()}. "
                "Run calibration batches through the model before reading its range."
            )

    def calculate_qparams(self) -> tuple[Tensor, Tensor | None]:
        """Return (scale, zero_point) for the range seen: `choose_qparams` of `range()` and this observer's options."""
        return self._qparams(*self.range())

    def _qparams(self, r_min: Tensor, r_max: Tensor, unit: float = 1.0) -> tuple[Tensor, Tensor | None]:
        """Scale and zero point for a range; both it and the scale are in units of `unit`."""
        eps = self.eps
        if eps is not None and unit != 1.0:
            eps = min(max(eps / unit, 2.0**-149), torch.finfo(torch.float32).max)
        return choose_qparams(
            r_min,
            r_max,
            self.dtype.name,
            symmetric=self.symmetric,
            include_zero=self.include_zero,
            eps=eps,
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
        state = self._adapted({key: state_dict[prefix + key] for key in self._buffers})
        problem = self._problem(state, local_metadata.get("version"))
        if problem:
            error_msgs.append(f"observer {self._called!r}: {problem}")
            return
        state_dict = {**state_dict, **{prefix + key: value for key, value in state.items()}}
        shape = state["r_min"].shape
        if shape != self.r_min.shape:
            self._start(shape)
        self._reported = 0
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def _adapted(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """A state about to be loaded, in the form that this observer keeps it."""
        return state

    def _problem(self, state: dict[str, Tensor], version: int | None) -> str | None:
        """What is wrong with a state about to be loaded, if anything."""
        if version is not None and version > self._version:
            return (
                f"the state's version must be at most {self._version}, but got {version}. Use a newer torch_linquant."
            )
        for key, like in self._fresh(self._unsized, torch.device("meta")).items():
            if state[key].dtype != like.dtype:
                return f"{key} must be {type_name(like.dtype)}, but got {type_name(state[key].dtype)}."
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
    def _lowest(self) -> float:
        """The smallest code."""
        return self.dtype.qmin if self.quant_min is None else self.quant_min

    @property
    def _highest(self) -> float:
        return self.dtype.qmax if self.quant_max is None else self.quant_max

    @property
    def _called(self) -> str:
        return self.name or type(self).__name__

    def _option(self, key: str) -> Any:
        return self.on_nonfinite if key == "nonfinite" else getattr(self, key)

    def extra_repr(self) -> str:
        parts = [self.dtype.name, repr(self.granularity)]
        changed = {key: self._option(key) for key, default in self._options.items() if self._option(key) != default}
        parts += [f"{key}={value!r}" for key, value in changed.items()]
        return ", ".join(parts + ([] if self.enabled else ["enabled=False"]))


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

    def _take(self, x: Tensor, **grain: Any) -> None:
        _observe(x, self.r_min, self.r_max, self.nonfinite, **grain)


class _AveragingObserver(Observer):
    """The extremes of each batch, averaged. `batches` counts, slice by slice, those that had a finite value."""

    _keys = (*Observer._keys, "batches")
    batches: Tensor

    def _fresh(self, shape: torch.Size | tuple[int, ...], device: torch.device | None) -> dict[str, Tensor]:
        return {**super()._fresh(shape, device), "batches": torch.zeros(shape, dtype=torch.int64, device=device)}

    def _weight(self) -> Tensor:
        """The weight of the latest batch, float32."""
        raise NotImplementedError

    def _update(self, r_min: Tensor, r_max: Tensor) -> None:
        seen = r_min <= r_max
        first = ~(self.r_min <= self.r_max)
        self.batches.add_(seen)
        weight = self._weight()

        def step(r: Tensor, b: Tensor) -> None:
            # Halves, so that their difference does not overflow; from the nearer end, so that the result stays between
            # r and b, and is b for a weight of 1.
            half = b / 2 - r / 2
            moved = torch.where(weight < 0.5, r + 2 * weight * half, b - 2 * (1 - weight) * half)
            r.copy_(torch.where(seen, torch.where(first, b, moved), r))

        step(self.r_min, r_min)
        step(self.r_max, r_max)


class MovingAverageMinMaxObserver(_AveragingObserver):
    """Average the extremes of the batches, later ones with more weight: r <- r + averaging_constant (b - r).

    r_min and r_max start as those of the first batch. The result depends on the order and the split of the batches.
    For training, where old ranges should fade; `torch.ao`'s observer of this name and ONNX Runtime's calibration with
    a moving average compute the same. A batch, or a slice of one, without finite values changes nothing.

    Args:
        averaging_constant: the weight of a batch, in (0, 1]. 1 keeps the latest batch alone.
        Others as in `Observer`.

    >>> observer = MovingAverageMinMaxObserver("int8", averaging_constant=0.25)
    >>> for high in (1.0, 3.0):
    ...     _ = observer(torch.tensor([0.0, high]))
    >>> observer.range()
    (tensor(0.), tensor(1.5000))
    """

    _options: dict[str, Any] = {**Observer._options, "averaging_constant": 0.01}

    def __init__(
        self,
        dtype: torch.dtype | str = "uint8",
        granularity: Any = PerTensor(),
        *,
        averaging_constant: float = 0.01,
        **options: Any,
    ):
        if not 0 < averaging_constant <= 1:
            raise ValueError(
                f"{type(self).__name__}: averaging_constant must be in (0, 1], but got {averaging_constant}."
            )
        super().__init__(dtype, granularity, **options)
        self.averaging_constant = averaging_constant

    def _weight(self) -> Tensor:
        return torch.full((), self.averaging_constant, dtype=torch.float32, device=self.r_min.device)


class MeanMinMaxObserver(_AveragingObserver):
    """Average the extremes of the batches: r_min = mean of min x, r_max = mean of max x, one batch as good as another.

    One outlier in one batch moves the range by 1 / batches of what it would move `MinMaxObserver`'s. A batch, or a
    slice of one, without finite values does not count. Arguments, state and errors are `Observer`'s.

    >>> observer = MeanMinMaxObserver("int8")
    >>> for high in (1.0, 3.0):
    ...     _ = observer(torch.tensor([0.0, high]))
    >>> observer.range()
    (tensor(0.), tensor(2.))
    """

    def _weight(self) -> Tensor:
        return 1 / self.batches.clamp(min=1).to(torch.float32)
