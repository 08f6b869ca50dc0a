"""Readings of a histogram whose bins are the top bits of float32 numbers.

The bin of x is the top 9 + m bits of its float32 pattern: sign, exponent and m bits of the mantissa. Such bins need no
range beforehand and never move, so the counts are a function of the values alone, whatever their order and split, and
histograms add up. A bin is at most 2^-m of its values wide.

Everything here looks at one slice (what shares a scale) at a time, in float64 on the CPU. Values are divided by a power
of two first, so that a range scales with its data exactly.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .dtypes import QuantDtype
from .ops import dequantize_linear

# From the ends of ranges to scales and zero points: `choose_qparams` with an observer's options.
Choose = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]

_CELLS = 2**15  # numbers in a temporary: they stay in the cache, and in one thread
_MOST_CLIPPED = 0.01  # of the values, by `entropy_range`
_MOST_LEVELS = 2**16  # more lose nothing in any range
_WORTH = 0.01  # a gain of less than this part of the error is no reason to clip


def mantissa_bits(counts: Tensor) -> int:
    """m, from the number of bins."""
    return counts.size(-1).bit_length() - 10


def coarsen(counts: Tensor, bins: int) -> Tensor:
    """The histogram with fewer bins, exactly: neighbours share all bits but the last ones."""
    return counts.unflatten(-1, (bins, -1)).sum(-1)


@dataclass(frozen=True)
class Distribution:
    """Values spread evenly over intervals: what a histogram and two extremes say of a slice.

    Attributes:
        low, high: the intervals' ends, ascending, float64, in units of 2^exponent: the largest magnitude is in
            [1/2, 1). Where both are equal the values are that number.
        counts: how many values lie in each interval, int64.
        exponent: see above.
    """

    low: Tensor
    high: Tensor
    counts: Tensor
    exponent: int

    @staticmethod
    def of(counts: Tensor, r_min: Tensor, r_max: Tensor, *, magnitudes: bool = False) -> "Distribution":
        """Read the histogram of one slice with the extremes r_min <= r_max; or that of its magnitudes.

        The outermost intervals end at the extremes. The two bins next to zero, which begin with the subnormal numbers,
        are read as 0: the median of a ReLU's output is 0 and not 1e-39.
        """
        bits = mantissa_bits(counts)
        finite = 255 << bits
        half = counts.numel() // 2
        positive, negative = counts[:finite].clone(), counts[half : half + finite].clone()
        least, most = float(r_min), float(r_max)
        if magnitudes:
            positive += negative
            negative.zero_()
            least, most = 0.0, max(-least, most)
        zeros = positive[:1] + negative[:1]
        positive[0] = negative[0] = 0
        below, above = negative.nonzero().flatten().flip(0), positive.nonzero().flatten()
        point = torch.zeros(int(zeros > 0), dtype=torch.float64)
        low = torch.cat([-_edge(below + 1, bits), point, _edge(above, bits)])
        high = torch.cat([-_edge(below, bits), point, _edge(above + 1, bits)])
        exponent = math.frexp(max(-least, most))[1]
        unit = 2.0**-exponent
        return Distribution(
            low.clamp(least, most) * unit,
            high.clamp(least, most) * unit,
            torch.cat([negative[below], zeros[zeros > 0], positive[above]]),
            exponent,
        )

    @property
    def extremes(self) -> tuple[float, float]:
        return float(self.low[0]), float(self.high[-1])

    @property
    def middle(self) -> Tensor:
        return (self.low + self.high) / 2

    def real(self, *ends: float) -> tuple[float, ...]:
        """Ends of a range in the units of the values."""
        return tuple(math.ldexp(end, self.exponent) for end in ends)

    def without_zero(self) -> "Distribution":
        keep = (self.low != 0) | (self.high != 0)
        return Distribution(self.low[keep], self.high[keep], self.counts[keep], self.exponent)

    def quantile(self, q: float) -> float:
        """The value of rank (N - 1) q, between ranks linearly (NumPy's default): off by a bin's width at most."""
        total = int(self.counts.sum())
        rank = min(max(q, 0.0), 1.0) * (total - 1)
        below = min(int(rank), max(total - 2, 0))
        one, other = (self._ranked(r, total) for r in (below, min(below + 1, total - 1)))
        return one + (rank - below) * (other - one)

    def _ranked(self, rank: int, total: int) -> float:
        if rank in (0, total - 1):
            return self.extremes[rank > 0 or total == 1]
        until = self.counts.cumsum(0)
        i = int(torch.searchsorted(until, rank, right=True))
        count = int(self.counts[i])
        place = (rank - (int(until[i]) - count) + 0.5) / count
        return float(self.low[i] + (self.high[i] - self.low[i]) * place)

    def mean(self) -> float:
        return float(self.counts.double() @ self.middle / self.counts.sum())

    def std(self) -> float:
        """Of the whole population, not of a sample."""
        low, high = self.low - self.mean(), self.high - self.mean()
        squares = (low * low + low * high + high * high) / 3
        return math.sqrt(float(self.counts.double() @ squares / self.counts.sum()))

    def deviation(self) -> float:
        """Mean distance from the mean."""
        mean, width = self.mean(), self.high - self.low
        inside = (self.low < mean) & (mean < self.high)
        split = ((mean - self.low) ** 2 + (self.high - mean) ** 2) / torch.where(inside, 2 * width, 1.0)
        distance = torch.where(inside, split, (self.middle - mean).abs())
        return float(self.counts.double() @ distance / self.counts.sum())


def _edge(index: Tensor, bits: int) -> Tensor:
    """The smallest magnitude in a bin."""
    edge = (index << (23 - bits)).to(torch.int32).view(torch.float32).double()
    return edge.clamp(max=2.0**128)  # the end of the last finite bin has the pattern of infinity


# --- least error -----------------------------------------------------------------------------------------------------


class ErrorModel:
    """The sum of |x - x_quantized|^norm over a distribution, exactly, for many scales at once.

    Over an interval of density 1 it is a difference of antiderivatives F, so that over all of them it is
    s^(norm+1) * sum_k F(e_k / s) (density before e_k - density after e_k), e_k being the edges.
    """

    def __init__(self, distribution: Distribution, code: QuantDtype, q_min: float, q_max: float, norm: float):
        d, points = distribution, distribution.low == distribution.high
        self.norm = norm
        self.points, self.masses = d.low[points], d.counts[points].double()
        self.low, self.high, self.counts = d.low[~points], d.high[~points], d.counts[~points].double()
        density = self.counts / (self.high - self.low)
        self.edges, place = torch.cat([self.low, self.high]).unique(return_inverse=True)
        self.steps = torch.zeros_like(self.edges).index_add_(0, place, torch.cat([-density, density]))
        self.q_min, self.q_max = q_min, q_max
        self.values = code_values(code).unique() if code.is_float else None
        if self.values is not None:
            self.borders = (self.values[1:] + self.values[:-1]) / 2
            cells = self._power(self.borders - self.values[:-1]) - self._power(self.borders - self.values[1:])
            self.until = torch.cat([torch.zeros(1, dtype=torch.float64), cells.cumsum(0)])
            # Antiderivatives from 0 rather than from the smallest code: small numbers stay exact.
            self.until = self.until - self.until[self.values.numel() // 2]

    def __call__(self, scale: Tensor, zero_point: Tensor | None) -> Tensor:
        """The error for each scale, 1-D."""
        z = torch.zeros_like(scale) if zero_point is None else zero_point.double()
        some = max(1, _CELLS // max(1, self.edges.numel() + self.points.numel()))
        parts = zip(scale.double().split(some), z.split(some), strict=True)
        return torch.cat([self._errors(s[:, None], z[:, None]) for s, z in parts])

    def _errors(self, s: Tensor, z: Tensor) -> Tensor:
        over = self._antiderivative(self.edges / s, z) @ self.steps
        at = self._distance(self.points / s, z).abs().pow(self.norm) @ self.masses
        s = s.flatten()
        return s.pow(self.norm + 1) * over + s.pow(self.norm) * at

    def means(self, scale: Tensor, zero_point: Tensor | None) -> Tensor:
        """The mean error in each interval for one scale."""
        s = scale.double().reshape(1, 1)
        z = torch.zeros_like(s) if zero_point is None else zero_point.double().reshape(1, 1)
        low, high = self.low / s, self.high / s
        over = self._antiderivative(high, z) - self._antiderivative(low, z)
        return (s.pow(self.norm) * over / (high - low)).flatten()

    def _power(self, t: Tensor) -> Tensor:
        """The antiderivative of |t|^norm."""
        return t * t.abs().pow(self.norm) / (self.norm + 1)

    def _nearest(self, u: Tensor) -> tuple[Tensor, Tensor]:
        assert self.values is not None
        i = torch.searchsorted(self.borders, u)
        return i, self.values[i]

    def _distance(self, u: Tensor, z: Tensor) -> Tensor:
        if self.values is not None:
            return u - self._nearest(u)[1]
        return u - torch.minimum(torch.maximum(u, self.q_min - z), self.q_max - z).round()

    def _antiderivative(self, u: Tensor, z: Tensor) -> Tensor:
        if self.values is not None:
            i, value = self._nearest(u)
            return self.until[i] + self._power(u - value)
        v = torch.minimum(torch.maximum(u, self.q_min - z), self.q_max - z)
        r = v.round()
        cell = 2 * 0.5 ** (self.norm + 1) / (self.norm + 1)
        return r * cell + self._power(v - r) + self._power(u - v)


def code_values(code: QuantDtype) -> Tensor:
    """What each code of a float type stands for, in no order; NaN and infinities left out."""
    codes = torch.arange(2**code.bits, dtype=torch.uint8)
    codes = codes if code.bits < 8 else codes.view(code.storage)
    values = dequantize_linear(codes, torch.ones(()), x_dtype=code).double()
    return values[values.isfinite()]


def error_range(
    d: Distribution,
    code: QuantDtype,
    q_min: float,
    q_max: float,
    choose: Choose,
    *,
    symmetric: bool,
    include_zero: bool,
    norm: float = 2.0,
) -> tuple[float, float]:
    """The range of least error: candidates on a grid, then finer and finer around the best ones.

    The range of the extremes stays unless another is better by 1 %, and by more than chance may hide: a histogram does
    not see where values lie in its bins, such as integers, which the extremes' range may hold without error.
    """
    least, most = d.extremes
    if least == most == 0:
        return least, most
    center = 0.0 if include_zero else min(max(0.0, least), most)
    starts = [[1.0, 1.0]]  # factors of the distances from the center to both ends
    steps = q_max - q_min
    reach = 1.0
    if symmetric or code.is_float:
        # A range up to twice as wide may put values nearer to codes: those of modes, or of a binade with finer steps.
        reach = 2.0
        center, least, most = 0.0, min(least, -most), max(most, -least)
        if not code.is_float:
            # The scale of [-a, a] leaves +a half a step outside; that of a little more does not.
            above = q_max - float(choose(torch.tensor([-1.0]), torch.tensor([1.0]))[1])  # type: ignore[arg-type]
            covering = max(1.0, steps / (2 * above)) if above > 0 else 1.0
            starts += [[covering] * 2, [_smooth_range(d, steps)[1] / most] * 2]
        one = True  # both ends move together, or there is one
    else:
        least, most = min(least, center), max(most, center)
        if center == 0 and least < 0 < most:
            low, high = _smooth_range(d, steps, two=True)
            starts += [[low / least, high / most]]
        elif center == 0:
            starts += [[_smooth_range(d, steps)[1] / max(-least, most)] * 2]
        one = center in (least, most)
    error = ErrorModel(d, code, q_min, q_max, norm)
    ends = torch.tensor([least, most], dtype=torch.float64)

    def errors(factors: Tensor) -> Tensor:
        ranges = (center + (ends - center) * factors).float()
        found = error(*choose(ranges[:, 0], ranges[:, 1]))
        return torch.where(found.isnan(), math.inf, found)  # NaN where a wider range is none of float32

    step, points = (2**0.25, 17) if one else (2**0.5, 9)
    powers = reach * step ** -torch.arange(100 if one else 24, dtype=torch.float64)
    grid = powers[:, None].expand(-1, 2) if one else torch.cartesian_prod(powers, powers)
    factors = torch.cat([torch.tensor(starts, dtype=torch.float64), grid])
    found = errors(factors)
    plain = found[0]
    best = torch.cat([factors[: len(starts)], factors[found.topk(3, largest=False).indices]])
    lowest = torch.cat([found[: len(starts)], found.topk(3, largest=False).values])
    around = torch.linspace(-1, 1, points, dtype=torch.float64)
    around = around[:, None].expand(-1, 2) if one else torch.cartesian_prod(around, around)
    for _ in range(4):
        factors = (best[:, None] * step**around).clamp(max=reach)
        found, which = errors(factors.flatten(0, 1)).view(len(best), -1).min(1)
        nearby = factors[torch.arange(len(best)), which]
        best = torch.where((found < lowest)[:, None], nearby, best)
        lowest = torch.minimum(found, lowest)
        step = step ** (2 / (points - 1))
    winner = int(lowest.argmin())
    factors = torch.stack([best[winner], torch.ones(2, dtype=torch.float64)])
    ranges = (center + (ends - center) * factors).float()
    scales, zero_points = choose(ranges[:, 0], ranges[:, 1])
    fourth = ErrorModel(d, code, q_min, q_max, 2 * norm)
    variance = 0.0
    for i in range(2):
        qparams = scales[i], None if zero_points is None else zero_points[i]
        variance += float(error.counts @ (fourth.means(*qparams) - error.means(*qparams).square()))
    gain = float(plain - lowest[winner])
    if gain <= _WORTH * float(plain) or gain <= 2 * math.sqrt(max(variance, 0.0)):
        return least, most
    low, high = best[winner].tolist()
    return center + (least - center) * low, center + (most - center) * high


def _smooth_range(d: Distribution, steps: float, *, two: bool = False) -> tuple[float, float]:
    """A start: the range of least error if the rounding error were scale^2 / 12 everywhere.

    OCTAV, Newton's method of Sakr et al. 2022 (arXiv 2206.06501), of magnitudes or, by the same derivation, of both
    ends. Alone it is far off where steps are larger than most values.
    """
    d = d.without_zero()
    x, order = (d.middle if two else d.middle.abs()).sort()
    counts = d.counts[order].double()
    number = torch.cat([torch.zeros(1, dtype=torch.float64), counts.cumsum(0)])
    total = torch.cat([torch.zeros(1, dtype=torch.float64), (counts * x).cumsum(0)])
    noise = 1 / (12 * steps * steps)

    def beyond(end: float, above: bool) -> tuple[float, float]:
        i = int(torch.searchsorted(x, end, right=above))
        n, s = float(number[i]), float(total[i])
        return (float(number[-1]) - n, float(total[-1]) - s) if above else (n, s)

    most, least = float(x[-1]) if x.numel() else 0.0, float(x[0]) if x.numel() and two else 0.0
    low, high = 0.0, 0.0
    for _ in range(12):
        (n_high, s_high), (n_low, s_low) = beyond(high, True), beyond(low, False) if two else (0.0, 0.0)
        inside = float(number[-1]) - n_high - n_low
        if two:
            low, high = (
                (s_low + noise * high * inside) / max(n_low + noise * inside, 1e-300),
                (s_high + noise * low * inside) / max(n_high + noise * inside, 1e-300),
            )
        else:
            high = s_high / max(n_high + 4 * noise * inside, 1e-300)
        low, high = min(max(low, least), 0.0), max(min(high, most), 0.0)
    return low, high


# --- least divergence ------------------------------------------------------------------------------------------------


def entropy_range(d: Distribution, levels: int, *, upper_only: bool) -> tuple[float, float]:
    """The range whose `levels` equal cells keep most of what the distribution says: least KL(P || Q).

    P is the distribution with what is clipped added to the end cells, Q the mass of each cell spread over the part of
    it where values are. With m and w a cell's mass and that part's width, p the density, N the number of values, N_in
    that of values inside and o what is clipped at an end:

        KL = (int_inside p ln p - sum_cells m ln(m / w) + sum_ends (m + o) ln((m + o) / m)) / N + ln(N_in / N)

    The idea is TensorRT's (Migacz, GTC 2017), without its bins, on which the answer depended. Zeros are left out, since
    every range holds them exactly. At most 1 % of the other values is clipped, and of equal ranges the wider is taken.

    Args:
        upper_only: d holds magnitudes, and the range is [0, h].
    """
    others = d.without_zero()
    low, high = d.extremes
    if low == high or levels > _MOST_LEVELS:
        return low, high
    if upper_only or others.low.numel() < d.low.numel():
        low, high = min(low, 0.0), max(high, 0.0)
    model = _Divergence(others, levels)
    for _ in range(1 if upper_only else 3):
        before = low, high
        high = model.best_high(low, high)
        if not upper_only:
            low = model.best_low(low, high)
        if (low, high) == before:
            break
    return low, high


class _Divergence:
    def __init__(self, d: Distribution, levels: int):
        mass = d.counts.double()
        # Points are as wide as what float32 tells apart.
        width = torch.maximum(d.high - d.low, d.middle.abs() * 2.0**-23)
        self.levels = levels
        self.total = float(mass.sum())
        self.low, self.high, self.width = d.low, d.high, width
        zero = torch.zeros(1, dtype=torch.float64)
        self.mass = torch.cat([zero, mass.cumsum(0)])
        self.room = torch.cat([zero, width.cumsum(0)])
        self.information = torch.cat([zero, (mass * (mass / width).log()).cumsum(0)])

    def _until(self, sums: Tensor, t: Tensor) -> Tensor:
        """A cumulated sum up to t, which runs evenly through each interval."""
        i = torch.searchsorted(self.high, t, right=True).clamp(max=self.high.numel() - 1)
        width = self.high[i] - self.low[i]
        part = torch.where(width > 0, ((t - self.low[i]) / width).clamp(0, 1), (t >= self.low[i]).double())
        return sums[i] + (sums[i + 1] - sums[i]) * part

    def best_high(self, low: float, high: float) -> float:
        candidates = self.high[self.high > max(low, 0.0)].flip(0)
        return self._best(torch.full_like(candidates, low), candidates, high, candidates)

    def best_low(self, low: float, high: float) -> float:
        candidates = self.low[self.low < min(high, 0.0)]
        return self._best(candidates, torch.full_like(candidates, high), low, candidates)

    def _best(self, lows: Tensor, highs: Tensor, present: float, candidates: Tensor) -> float:
        """The candidate of least divergence, of equal ones the first, that clips little enough."""
        clipped = self._until(self.mass, lows) + (self.total - self._until(self.mass, highs))
        fits = clipped <= _MOST_CLIPPED * self.total
        if not fits.any():
            return present
        lows, highs, candidates = lows[fits], highs[fits], candidates[fits]
        some = max(1, _CELLS // self.levels)
        parts = zip(lows.split(some), highs.split(some), strict=True)
        divergence = torch.cat([self._divergences(a[:, None], b[:, None]) for a, b in parts])
        least = divergence.min()
        if not least.isfinite():
            return present
        return float(candidates[int((divergence <= least + 1e-9).nonzero()[0])])

    def _divergences(self, low: Tensor, high: Tensor) -> Tensor:
        edges = low + (high - low) * torch.linspace(0, 1, self.levels + 1, dtype=torch.float64)
        until = self._until(self.mass, edges)
        mass, room = until.diff(dim=1), self._until(self.room, edges).diff(dim=1)
        cells = torch.where(mass > 0, mass * (mass / room.clamp(min=1e-300)).log(), 0.0).sum(1)
        inside = until[:, -1] - until[:, 0]
        information = self._until(self.information, high) - self._until(self.information, low)
        total = information.flatten() - cells
        for clipped, end in ((until[:, 0], mass[:, 0]), (self.total - until[:, -1], mass[:, -1])):
            both = clipped + end
            total = total + torch.where(clipped > 1e-9 * self.total, both * (both / end).log(), 0.0)
        return total / self.total + (inside / self.total).log()
