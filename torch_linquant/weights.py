"""Tensors that are known, such as weights: scales from the range of their values, or those of least squared error."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .dtypes import QuantDtype, resolve
from .granularity import Granularity, PerTensor, block_lengths, check_granularity
from .ops import fake_quantize_linear, min_max, quantize_linear
from .qparams import choose_qparams

_METHODS = ("minmax", "auto", "exact", "zoom")
_CELLS = 2**20  # elements that are looked at together
_SHORT = 256  # elements of a row up to which "auto" sweeps

Ends = tuple[Tensor, Tensor]  # of the ranges of rows


def quantize_tensor(
    x: Tensor,
    dtype: "QuantDtype | torch.dtype | str",
    granularity: Granularity = PerTensor(),
    *,
    method: str = "minmax",
    symmetric: bool = False,
    include_zero: bool = True,
    eps: float | None = None,
    power_of_two: bool = False,
    quant_min: int | None = None,
    quant_max: int | None = None,
    packed: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Quantize a tensor by its own finite values: `search_qparams`, then `quantize_linear`.

    Args:
        x: float32, float16, bfloat16, float64 or int32.
        dtype: type of the codes.
        granularity: which elements share a scale.
        method: "minmax" for the range of the values, or what `search_qparams` takes for the scale of least error.
        symmetric, include_zero, eps, power_of_two, quant_min, quant_max: as in `choose_qparams`.
        packed: pack codes of fewer than 8 bits, as in `quantize_linear`.

    Returns:
        (q, scale, zero_point): `dequantize_linear(q, scale, zero_point, **granularity.qparam_args(x.dim()))` gives the
        values back (with `x_dtype=dtype` for types of fewer than 8 bits). zero_point is None for float codes.

    Raises:
        RuntimeError, ValueError: as the functions do.

    >>> x = torch.tensor([[191.6, -13.5, 728.6], [92.14, 295.5, -184.0], [0.0, 684.6, 245.5]])
    >>> q, scale, zero_point = quantize_tensor(x, "int8")
    >>> q
    tensor([[ -23,  -81,  127],
            [ -51,    6, -128],
            [ -77,  114,   -8]], dtype=torch.int8)

    Weights, one scale for each output channel:

    >>> from torch_linquant.granularity import PerAxis
    >>> quantize_tensor(x, "int8", PerAxis(0), symmetric=True)[1]
    tensor([5.7145, 2.3176, 5.3694])
    """
    check_granularity("quantize_tensor", granularity)
    code = resolve(dtype)
    scale, zero_point = search_qparams(
        x,
        code,
        granularity,
        method=method,
        symmetric=symmetric,
        include_zero=include_zero,
        eps=eps,
        power_of_two=power_of_two,
        quant_min=quant_min,
        quant_max=quant_max,
    )
    q = quantize_linear(
        x,
        scale,
        zero_point,
        dtype=code,
        quant_min=quant_min,
        quant_max=quant_max,
        packed=packed,
        **granularity.qparam_args(x.dim()),
    )
    return q, scale, zero_point


def search_qparams(
    x: Tensor,
    dtype: "QuantDtype | torch.dtype | str",
    granularity: Granularity = PerTensor(),
    *,
    method: str = "auto",
    symmetric: bool = True,
    include_zero: bool = True,
    eps: float | None = None,
    power_of_two: bool = False,
    quant_min: int | None = None,
    quant_max: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Choose scale and zero point so that the codes of x itself have the least squared error, sum (x - x_quantized)^2.

    Every candidate is a range that `choose_qparams` turns into a scale and a zero point, and its error is that of
    `fake_quantize_linear`. The range of the values is one of them: the result is never worse, for no part that has a
    scale of its own.

    Args:
        x: float32, float16, bfloat16, float64 or int32. NaN and infinities are left out.
        dtype: type of the codes.
        granularity: which elements share a scale.
        method: how to search.

            - "zoom": start from the range of the values, from a little more than that, which the largest code covers,
              and from the range that is best for smooth noise (OCTAV: Sakr et al. 2022, arXiv 2206.06501); then finer
              and finer around the best; then fit the scale to the codes by least squares.
            - "exact": sweep all sets of codes that some scale gives; for symmetric integer codes. The scale is the best
              there is, up to its rounding. As a scale falls, the magnitude of the code of x rises from k - 1 to k at
              |x| / (k - 1/2); for fixed codes q the least error is x.x - (x.q)^2 / (q.q). Time and memory grow with
              the number of codes.
            - "auto": "exact" for symmetric integer codes of at most 4 bits and at most 256 elements a scale, else
              "zoom".
            - "minmax": no search; the range of the values.
        symmetric, include_zero, eps, power_of_two, quant_min, quant_max: as in `choose_qparams`.

    Returns:
        (scale, zero_point), as `choose_qparams` gives them, of the granularity's shape.

    Raises:
        ValueError: if method is none of these, or "exact" for other codes than it is for, or an option does not fit the
            type.
        RuntimeError: if x's type or shape does not fit.

    >>> x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    >>> def error(**options):
    ...     q, scale, zero_point = quantize_tensor(x, "int4", PerAxis(0), symmetric=True, **options)
    ...     return (x - q * scale[:, None]).square().mean().item()
    >>> from torch_linquant.granularity import PerAxis
    >>> round(error(method="minmax"), 4), round(error(method="auto"), 4)
    (0.0145, 0.0114)
    """
    check_granularity("search_qparams", granularity)
    code = resolve(dtype)
    if method not in _METHODS:
        raise ValueError(f"search_qparams: method must be one of {', '.join(map(repr, _METHODS))}, but got {method!r}.")
    sweeps = symmetric and not code.is_float
    if method == "exact" and not sweeps:
        what = f"{code.name} codes" if code.is_float else "asymmetric codes"
        raise ValueError(f"search_qparams: method must be 'auto' or 'zoom' for {what}, but got 'exact'.")

    def choose(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor | None]:
        return choose_qparams(
            low,
            high,
            code,
            symmetric=symmetric,
            include_zero=include_zero,
            eps=eps,
            power_of_two=power_of_two,
            quant_min=quant_min,
            quant_max=quant_max,
        )

    low, high = min_max(x, **granularity.reduce_args(x.dim()))
    if method != "minmax" and x.numel() > 0:
        q_min = code.qmin if quant_min is None else quant_min
        q_max = code.qmax if quant_max is None else quant_max
        rows = _rows(x.detach(), granularity)
        exact = method == "exact" or (method == "auto" and sweeps and code.bits <= 4 and rows.size(1) <= _SHORT)
        parts = [
            _Search(part, code, choose, q_min, q_max, symmetric or code.is_float, include_zero).run(exact)
            for part in rows.split(max(1, _CELLS // max(1, rows.size(1))))
        ]
        low, high = (torch.cat(ends).reshape(low.shape) for ends in zip(*parts, strict=True))
    return choose(low, high)


def _rows(x: Tensor, granularity: Granularity) -> Tensor:
    """The elements that share a scale as a row, float32 or float64; NaN stands for what is left out."""
    x = x if x.dtype == torch.float64 else x.to(torch.float32)
    x = torch.where(x.isfinite(), x, math.nan)
    args = granularity.reduce_args(x.dim())
    axis, blocks = args["axis"], block_lengths(x.dim(), args["axis"] or 0, args["block_size"])
    if blocks is None:
        return x.reshape(1, -1) if axis is None else x.movedim(axis, 0).reshape(x.size(axis), -1)
    lengths = [size if block == 0 else block for block, size in zip(blocks, x.shape, strict=True)]
    padding = [-size % length for length, size in zip(lengths, x.shape, strict=True)]
    x = torch.nn.functional.pad(x, [n for pad in reversed(padding) for n in (0, pad)], value=math.nan)
    pairs = [n for length, size in zip(lengths, x.shape, strict=True) for n in (size // length, length)]
    order = [*range(0, len(pairs), 2), *range(1, len(pairs), 2)]
    return x.reshape(pairs).permute(order).reshape(-1, math.prod(lengths))


class _Search:
    """The best ranges found so far for some rows, and the ways to find better ones."""

    def __init__(
        self,
        rows: Tensor,
        code: QuantDtype,
        choose: Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]],
        q_min: float,
        q_max: float,
        symmetric: bool,
        include_zero: bool,
    ):
        self.rows, self.code, self.choose, self.symmetric = rows, code, choose, symmetric
        self.q_min, self.q_max = q_min, q_max
        low, high = min_max(rows, axis=0)
        seen = low <= high
        low, high = torch.where(seen, low, 0.0), torch.where(seen, high, 0.0)
        # Ranges are shrunk towards the center, which is 0 unless they need not hold it.
        self.center = torch.zeros_like(low)
        if symmetric:
            high = torch.maximum(-low, high)
            low = -high
        elif include_zero:
            low, high = low.clamp(max=0), high.clamp(min=0)
        else:
            self.center = self.center.clamp(low, high)
        # What a scale times this is is the end of its symmetric range.
        self.top = q_max if code.is_float else (q_max - q_min) / 2
        self.low, self.high = low, high
        self.error = self._errors(low, high)

    def run(self, exact: bool) -> Ends:
        if exact:
            self._sweep()
            return self.low, self.high
        if not self.code.is_float:
            if self.symmetric:
                # The scale of [-a, a] leaves +a half a step outside; that of a little more does not.
                above = self.q_max - float(self._qparams(self.low[:1], self.high[:1])[1][0])
                if above > 0:
                    self._offer_factors([self.top / above])
            self._offer(*self._smooth())
        else:
            # A wider range moves the values among the binades of the codes, where steps double.
            self._offer_factors([2 ** (i / 8) for i in range(8, -17, -1) if i])
        if self.symmetric:
            for width in (0.12, 0.015):
                self._offer_factors([1 + width * i / 8 for i in range(-8, 9) if i])
        else:
            for width in (0.2, 0.05, 0.0125):
                steps = [1 + width * i / 2 for i in range(-2, 3)]
                self._offer_factors([(f, g) for f in steps for g in steps if (f, g) != (1, 1)])
        for _ in range(3):
            self._fit()
        return self.low, self.high

    def _qparams(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        scale, zero_point = self.choose(low, high)
        return scale, torch.zeros_like(scale) if zero_point is None else zero_point

    def _values(self, rows: Tensor, low: Tensor, high: Tensor) -> Tensor:
        """What the codes of rows stand for."""
        scale, zero_point = self.choose(low, high)
        low_code, high_code = (None if self.code.is_float else int(q) for q in (self.q_min, self.q_max))
        return fake_quantize_linear(
            rows, scale, zero_point, axis=0, dtype=self.code, quant_min=low_code, quant_max=high_code
        )

    def _columns(self) -> Sequence[Tensor]:
        return self.rows.split(max(1, _CELLS // self.rows.size(0)), 1)

    def _errors(self, low: Tensor, high: Tensor) -> Tensor:
        total = torch.zeros(low.shape, dtype=torch.float64, device=low.device)
        for rows in self._columns():
            total += (rows - self._values(rows, low, high)).double().square_().nansum(1)
        return total

    def _offer(self, low: Tensor, high: Tensor) -> None:
        """Take ranges over where they are better."""
        error = self._errors(low, high)
        better = error < self.error
        self.low, self.high = torch.where(better, low, self.low), torch.where(better, high, self.high)
        self.error = torch.where(better, error, self.error)

    def _offer_factors(self, factors: Sequence[float | tuple[float, float]]) -> None:
        """Try the best ranges with their ends moved by factors."""
        low, high = self.low - self.center, self.high - self.center
        for factor in factors:
            f, g = factor if isinstance(factor, tuple) else (factor, factor)
            self._offer(self.center + low * f, self.center + high * g)

    def _smooth(self) -> Ends:
        """The ranges of least error if rounding errors were scale^2 / 12: Newton's method, from the mean magnitudes.

        For symmetric ranges OCTAV's step, high <- S / (N + 4 k N_in) with k = 1 / (12 (q_max - q_min)^2), S and N being
        the sum and the number of the magnitudes beyond high; for others the same derivation with two ends.
        """
        noise = 1 / (12 * (2 * self.top) ** 2)
        x = torch.nan_to_num(self.rows - self.center[:, None]).double()
        low, high = torch.zeros_like(x[:, :1]), torch.zeros_like(x[:, :1])
        if self.symmetric:
            x = x.abs()
        number = (x != 0).sum(1, keepdim=True)

        def beyond(outside: Tensor) -> Ends:
            return outside.sum(1, keepdim=True), torch.where(outside, x, 0.0).sum(1, keepdim=True)

        for _ in range(12):
            (n_high, s_high), (n_low, s_low) = beyond(x > high), beyond(x < low)
            inside = number - n_high - n_low
            if self.symmetric:
                high = s_high / (n_high + 4 * noise * inside).clamp(min=1e-300)
            else:
                low, high = (
                    (s_low + noise * high * inside) / (n_low + noise * inside).clamp(min=1e-300),
                    (s_high + noise * low * inside) / (n_high + noise * inside).clamp(min=1e-300),
                )
        ends = (-high if self.symmetric else low.clamp(max=0)), high.clamp(min=0)
        return tuple((self.center + end.flatten()).to(self.low.dtype) for end in ends)  # type: ignore[return-value]

    def _fit(self) -> None:
        """The scale of least error for the codes as they are: x.q / q.q."""
        scale, zero_point = self._qparams(self.low, self.high)
        product = torch.zeros(scale.shape, dtype=torch.float64, device=scale.device)
        square = torch.zeros_like(product)
        for rows in self._columns():
            q = self._values(rows, self.low, self.high) / scale[:, None]
            q = torch.nan_to_num(q if self.code.is_float else q.round()).double()
            product += (torch.nan_to_num(rows) * q).sum(1)
            square += (q * q).sum(1)
        self._offer_scales(product / square.clamp(min=1), zero_point)

    def _offer_scales(self, scale: Tensor, zero_point: Tensor) -> None:
        """Try the ranges of scales, where these are positive."""
        scale = torch.where(scale > 0, scale, 1.0)
        if self.symmetric:
            low, high = -scale * self.top, scale * self.top
        else:
            low, high = (scale * (q - zero_point.double()) for q in (self.q_min, self.q_max))
        self._offer(low.to(self.low.dtype), high.to(self.low.dtype))

    def _sweep(self) -> None:
        """The best of all scales, of symmetric integer codes."""
        zero_point = self._qparams(self.low, self.high)[1]
        middle = int(zero_point[0])
        above, below = int(self.q_max) - middle, middle - int(self.q_min)
        k = torch.arange(1, max(above, below, 1) + 1, device=self.rows.device)
        best = []
        for rows in torch.nan_to_num(self.rows).split(max(1, _CELLS // (self.rows.size(1) * k.numel()))):
            x = rows.double().abs()[:, :, None]
            reached = k <= torch.where(rows > 0, above, below)[:, :, None]  # the codes that there are on this side
            steps = torch.where(reached, x / (k - 0.5), 0.0).flatten(1)
            steps, order = steps.sort(1, descending=True)
            product = torch.where(reached, x, 0.0).flatten(1).gather(1, order).cumsum(1)
            square = torch.where(reached, 2.0 * k - 1, 0.0).flatten(1).gather(1, order).cumsum(1)
            gain = torch.where(steps > 0, product.square() / square.clamp(min=1), -1.0)
            i = gain.argmax(1, keepdim=True)
            best.append((product.gather(1, i) / square.gather(1, i).clamp(min=1)).flatten())
        self._offer_scales(torch.cat(best), zero_point)
