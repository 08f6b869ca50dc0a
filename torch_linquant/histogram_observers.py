"""Observers that keep a histogram, and the ways to read one.

All keep the same state, a histogram on a grid that never moves (see `HistogramObserver`), and differ in `_read_slice`.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .dtypes import resolve
from .granularity import PerTensor
from .histogram import Distribution, coarsen, code_values, entropy_range, error_range
from .observers import Observer

_observe = torch.ops.linquant.observe_


class HistogramObserver(Observer):
    """Keep a histogram of all values; the base class of the kinds that read one.

    The bin of x is the top 9 + mantissa_bits bits of its float32 pattern (sign, exponent, the first bits of the
    mantissa), so that no range is needed beforehand, and the counts depend on the values alone: not on their order,
    their split into batches, threads or processes. A bin is at most 2^-mantissa_bits of its values wide, which bounds
    the error of a percentile. NaN and infinities are counted in the bin of infinity.

    State beside `Observer`'s: `counts`, int64, the scale's shape and 2^(9 + mantissa_bits) bins: 128 KiB for 5. A state
    with finer bins loads into an observer with coarser ones.

    Args:
        mantissa_bits: 3 to 7. Default: 5 for one scale, 4 otherwise.
        Others as in `Observer`.
    """

    _keys = (*Observer._keys, "counts")
    counts: Tensor
    _options: dict[str, Any] = {**Observer._options, "mantissa_bits": None}

    def __init__(
        self,
        dtype: torch.dtype | str = "uint8",
        granularity: Any = PerTensor(),
        *,
        mantissa_bits: int | None = None,
        **options: Any,
    ):
        if mantissa_bits not in (None, 3, 4, 5, 6, 7):
            raise ValueError(f"{type(self).__name__}: mantissa_bits must be 3 to 7, but got {mantissa_bits!r}.")
        self.mantissa_bits = mantissa_bits
        self._bins = 2 ** (9 + (mantissa_bits or (5 if isinstance(granularity, PerTensor) else 4)))
        super().__init__(dtype, granularity, **options)

    def _fresh(self, shape: torch.Size | tuple[int, ...], device: torch.device | None) -> dict[str, Tensor]:
        counts = torch.zeros((*shape, self._bins), dtype=torch.int64, device=device)
        return {**super()._fresh(shape, device), "counts": counts}

    def _take(self, x: Tensor, **grain: Any) -> None:
        _observe(x, self.r_min, self.r_max, self.nonfinite, self.counts, **grain)

    def _read(self) -> tuple[Tensor, Tensor]:
        """Slice by slice, on the CPU."""
        shape, device = self.r_min.shape, self.r_min.device
        r_min, r_max, counts = (
            t.cpu().reshape(-1, *t.shape[len(shape) :]) for t in (self.r_min, self.r_max, self.counts)
        )
        ends = [
            self._read_slice(c, low, high) if low <= high else (0.0, 0.0)
            for c, low, high in zip(counts, r_min, r_max, strict=True)
        ]
        result = torch.tensor(ends, dtype=torch.float64).reshape(-1, 2).T
        largest = torch.finfo(torch.float32).max
        low, high = result.clamp(-largest, largest).to(torch.float32).reshape(2, *shape).to(device)
        return low, high

    def _read_slice(self, counts: Tensor, r_min: Tensor, r_max: Tensor) -> tuple[float, float]:
        """The range of one slice, from its histogram and its extremes."""
        raise NotImplementedError

    def _adapted(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        counts = state["counts"]
        bins = counts.size(-1) if counts.dim() else 0
        if counts.dtype == torch.int64 and bins > self._bins and bins & (bins - 1) == 0:
            return {**state, "counts": coarsen(counts, self._bins)}
        return state


class PercentileObserver(HistogramObserver):
    """Keep a given part of the values inside the range, and clip as many at both ends.

        r_min = Q((1 - p) / 2)        r_max = Q(1 - (1 - p) / 2)        p = percentile / 100

    Q being the quantile function of the values; symmetric: r_max = -r_min = Q(p) of the magnitudes. Quantiles are off
    by 2^-mantissa_bits of their size at most, and by 0.1 % as a rule. 100 gives the extremes.

    Args:
        percentile: the percentage of values to keep, in (0, 100].
        Others as in `HistogramObserver`.

    >>> observer = PercentileObserver("uint8", percentile=90.0)
    >>> _ = observer(torch.arange(10001.0))
    >>> observer.range()
    (tensor(500.5000), tensor(9500.5000))
    """

    _options: dict[str, Any] = {**HistogramObserver._options, "percentile": 99.99}

    def __init__(
        self,
        dtype: torch.dtype | str = "uint8",
        granularity: Any = PerTensor(),
        *,
        percentile: float = 99.99,
        **options: Any,
    ):
        if not 0 < percentile <= 100:
            raise ValueError(f"{type(self).__name__}: percentile must be in (0, 100], but got {percentile}.")
        super().__init__(dtype, granularity, **options)
        self.percentile = percentile

    def _read_slice(self, counts: Tensor, r_min: Tensor, r_max: Tensor) -> tuple[float, float]:
        d = Distribution.of(counts, r_min, r_max, magnitudes=self.symmetric)
        cut = 1 - self.percentile / 100
        if self.symmetric:
            (high,) = d.real(d.quantile(1 - cut))
            return -high, high
        low, high = d.real(d.quantile(cut / 2), d.quantile(1 - cut / 2))
        return low, high


class MSEObserver(HistogramObserver):
    """Find the range whose codes are nearest to the values: least sum of |x - x_quantized|^norm.

    The error of a range is computed exactly for values spread evenly inside each bin, clipped ones included, for
    integer and float codes alike. The range is searched coarse to fine, from far shrunk to that of the values, for
    symmetric and float codes to twice that, and stays that of `MinMaxObserver` unless 1 % is won.

    Sums of squares are ruled by the largest values: with a few outliers of 1000 times the rest, the least error keeps
    them and rounds the rest to zero. `PercentileObserver` and `EntropyObserver` do not.

    Args:
        norm: at least 1. Smaller norms give less weight to clipped outliers.
        Others as in `HistogramObserver`.

    >>> observer = MSEObserver("int4", symmetric=True)
    >>> _ = observer(torch.randn(100_000, generator=torch.Generator().manual_seed(0)))
    >>> r_min, r_max = observer.range()
    >>> bool(2.4 < r_max < 2.8), bool(observer.r_max > 4)
    (True, True)
    """

    _options: dict[str, Any] = {**HistogramObserver._options, "norm": 2.0}

    def __init__(
        self,
        dtype: torch.dtype | str = "uint8",
        granularity: Any = PerTensor(),
        *,
        norm: float = 2.0,
        **options: Any,
    ):
        if not 1 <= norm < math.inf:
            raise ValueError(f"{type(self).__name__}: norm must be at least 1, but got {norm}.")
        super().__init__(dtype, granularity, **options)
        self.norm = norm

    def _read_slice(self, counts: Tensor, r_min: Tensor, r_max: Tensor) -> tuple[float, float]:
        d = Distribution.of(counts, r_min, r_max)
        low, high = error_range(
            d,
            self.dtype,
            self._lowest,
            self._highest,
            lambda low, high: self._qparams(low, high, 2.0**d.exponent),
            symmetric=self.symmetric,
            include_zero=self.include_zero,
            norm=self.norm,
        )
        low, high = d.real(low, high)
        return low, high


class EntropyObserver(HistogramObserver):
    """Find the range whose codes keep most of what the distribution says: least Kullback-Leibler divergence.

    TensorRT's calibration (Migacz, GTC 2017), on the exact distribution rather than 2048 bins, and for ranges with two
    ends. It clips 1 % of the values at most. Formula: `torch_linquant.histogram.entropy_range`. Arguments, state and
    errors are `HistogramObserver`'s.

    >>> observer = EntropyObserver("int8", symmetric=True)
    >>> x = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    >>> x[:20] = 1000.0
    >>> _ = observer(x)
    >>> bool(3 < observer.range()[1] < 6)
    True
    """

    def _read_slice(self, counts: Tensor, r_min: Tensor, r_max: Tensor) -> tuple[float, float]:
        one = self.symmetric or self.dtype.is_float
        d = Distribution.of(counts, r_min, r_max, magnitudes=one)
        levels = 2**self.dtype.bits if self.dtype.is_float else int(self._highest - self._lowest) + 1
        low, high = d.real(*entropy_range(d, levels // 2 if one else levels, upper_only=one))
        return (-high, high) if one else (low, high)


class _MomentsObserver(HistogramObserver):
    """A range around the mean, cut at the extremes."""

    def _read_slice(self, counts: Tensor, r_min: Tensor, r_max: Tensor) -> tuple[float, float]:
        d = Distribution.of(counts, r_min, r_max)
        (mean,) = d.real(d.mean())
        (distance,) = d.real(self._distance(d))
        return max(mean - distance, float(r_min)), min(mean + distance, float(r_max))

    def _distance(self, d: Distribution) -> float:
        raise NotImplementedError


class StdObserver(_MomentsObserver):
    """Keep what lies within some standard deviations of the mean: mean -+ sigmas * std, cut at the extremes.

    Args:
        sigmas: how many.
        Others as in `HistogramObserver`.
    """

    _options: dict[str, Any] = {**HistogramObserver._options, "sigmas": 3.0}

    def __init__(
        self,
        dtype: torch.dtype | str = "uint8",
        granularity: Any = PerTensor(),
        *,
        sigmas: float = 3.0,
        **options: Any,
    ):
        if not 0 < sigmas < math.inf:
            raise ValueError(f"{type(self).__name__}: sigmas must be positive, but got {sigmas}.")
        super().__init__(dtype, granularity, **options)
        self.sigmas = sigmas

    def _distance(self, d: Distribution) -> float:
        return self.sigmas * d.std()


class ACIQObserver(_MomentsObserver):
    """Clip where the squared error would be least if the values had a Laplace or a normal distribution.

    mean -+ t * mean|x - mean| with t exp(t) = 3 n^2 (Laplace), or mean -+ t * std with phi(t) - t Q(t) = t / (6 n^2)
    (normal; phi its density, Q its upper tail), n being the number of codes; cut at the extremes. From Banner, Nahshan,
    Hoffer, Soudry 2018 (arXiv 1810.05723). It looks at one number of the data: a baseline, or a start.

    Args:
        distribution: "laplace" or "normal".
        Others as in `HistogramObserver`.

    Raises:
        ValueError: for float codes, whose steps are not equal.
    """

    _options: dict[str, Any] = {**HistogramObserver._options, "distribution": "laplace"}

    def __init__(
        self,
        dtype: torch.dtype | str = "uint8",
        granularity: Any = PerTensor(),
        *,
        distribution: str = "laplace",
        **options: Any,
    ):
        name = type(self).__name__
        if distribution not in ("laplace", "normal"):
            raise ValueError(f"{name}: distribution must be 'laplace' or 'normal', but got {distribution!r}.")
        if resolve(dtype).is_float:
            raise ValueError(f"{name}: dtype must be an integer type, but got {resolve(dtype).name}.")
        super().__init__(dtype, granularity, **options)
        self.distribution = distribution

    def _distance(self, d: Distribution) -> float:
        n = self._highest - self._lowest + 1
        if self.distribution == "laplace":
            return d.deviation() * _root(lambda t: 3 * n * n - t * math.exp(t))
        density = 1 / math.sqrt(2 * math.pi)
        return d.std() * _root(
            lambda t: density * math.exp(-t * t / 2) - t * math.erfc(t / math.sqrt(2)) / 2 - t / (6 * n * n)
        )


def _root(falling: Callable[[float], float]) -> float:
    """Where a falling function is 0, between 0 and 64."""
    low, high = 0.0, 64.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return low


class DistributionObserver(HistogramObserver):
    """Give float codes the standard deviation of the values: scale = std(x) / std(all finite codes).

    As ONNX Runtime calibrates float8 ("distribution"): small values get the codes that float8 is dense in, large ones
    saturate. r_max = -r_min = scale * (largest code).

    Arguments, state and errors are `HistogramObserver`'s, but for dtype, which must be a float type.

    >>> observer = DistributionObserver("float8_e4m3fn")
    >>> _ = observer(torch.linspace(-1.0, 1.0, 1001))
    >>> observer.calculate_qparams()
    (tensor(0.0058), None)
    """

    def __init__(self, dtype: torch.dtype | str = "float8_e4m3fn", granularity: Any = PerTensor(), **options: Any):
        if not resolve(dtype).is_float:
            raise ValueError(
                f"{type(self).__name__}: dtype must be a float8 or float4 type, but got {resolve(dtype).name}."
            )
        super().__init__(dtype, granularity, **options)

    def _read_slice(self, counts: Tensor, r_min: Tensor, r_max: Tensor) -> tuple[float, float]:
        d = Distribution.of(counts, r_min, r_max)
        (high,) = d.real(d.std() / float(code_values(self.dtype).std(correction=0)) * self.dtype.qmax)
        return -high, high
