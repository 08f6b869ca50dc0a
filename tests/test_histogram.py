"""What is read from a histogram: quantiles, moments, the ranges of least error and least divergence."""

import math
import warnings

import numpy as np
import pytest
import torch

import torch_linquant as lq
from torch_linquant.dtypes import resolve
from torch_linquant.histogram import Distribution, ErrorModel

SHAPES = ["relu", "gelu", "gauss", "laplace", "student", "bimodal", "gauss_outliers", "relu_outliers"]


def data(shape, seed=0, n=32768):
    """Values as networks have them, and worse."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(n)
    if shape == "gelu":
        x = torch.nn.functional.gelu(torch.from_numpy(x)).numpy()
    elif shape == "laplace":
        x = rng.laplace(size=n)
    elif shape == "student":
        x = rng.standard_t(2, size=n)
    elif shape == "bimodal":
        x = np.where(rng.random(n) < 0.5, x * 0.3 - 3, x * 0.5 + 5)
    elif shape == "integers":
        x = rng.integers(0, 256, n).astype(np.float64)
    if shape.startswith("relu"):
        x = np.maximum(x, 0)
    if shape.endswith("outliers"):
        x[:20] *= 1000
    return torch.from_numpy(x.astype(np.float32))


def observed(kind, x, dtype="int8", **options):
    observer = kind(dtype, **options)
    observer(x)
    return observer


def read(observer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tuple(float(end) for end in observer.range())


def squared_error(observer, x):
    """Of the codes that the observer's range gives, by the op that will be deployed."""
    scale, zero_point = observer.calculate_qparams()
    y = lq.fake_quantize_linear(x, scale, zero_point, dtype=observer.dtype)
    return float((x.double() - y.double()).square().sum())


# --- quantiles -------------------------------------------------------------------------------------------------------


def bin_width(value, bits):
    """Of the bin that holds value."""
    magnitude = max(abs(value), 2.0**-126)
    return 2.0 ** (math.floor(math.log2(magnitude)) - bits)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bits", [3, 5, 7])
def test_quantiles_are_within_a_bin(shape, bits):
    x = data(shape)
    observer = observed(lq.PercentileObserver, x, mantissa_bits=bits)
    d = Distribution.of(observer.counts, observer.r_min, observer.r_max)
    for q in (0, 1e-5, 1e-3, 0.01, 0.25, 0.5, 0.75, 0.99, 0.999, 0.99999, 1):
        (got,) = d.real(d.quantile(q))
        want = np.quantile(x.numpy().astype(np.float64), q)
        # Between two values of different bins both are off by their own bin.
        neighbours = np.sort(x.numpy())[[math.floor(q * (len(x) - 1)), math.ceil(q * (len(x) - 1))]]
        assert abs(got - want) <= max(bin_width(float(v), bits) for v in neighbours), q
    grid = [d.quantile(q) for q in np.linspace(0, 1, 2001)]
    assert all(a <= b for a, b in zip(grid, grid[1:], strict=False))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("symmetric", [False, True])
def test_percentile_keeps_what_it_says(shape, symmetric):
    x = data(shape)
    for percentile in (99.0, 99.9, 99.99):
        observer = observed(lq.PercentileObserver, x, percentile=percentile, symmetric=symmetric)
        low, high = read(observer)
        kept = float(((x >= low) & (x <= high)).double().mean())
        at = x.abs() if symmetric else x
        ends = (high,) if symmetric else (low, high)
        two_bins = sum(float(((at - end).abs() <= 2 * bin_width(end, 5)).double().mean()) for end in ends)
        assert kept >= percentile / 100 - two_bins - 2 / len(x)  # the end may lie between two values
        assert kept <= percentile / 100 + two_bins + 2 / len(x)
        if symmetric:
            assert low == -high


def test_percentile_999_keeps_999_of_1000():
    """Percent kept, not dropped, shared by both ends."""
    x = torch.randn(2_000_000, generator=torch.Generator().manual_seed(0))
    low, high = read(observed(lq.PercentileObserver, x, percentile=99.9))
    assert abs(((x < low).double().mean() - 0.0005).item()) < 3e-5
    assert abs(((x > high).double().mean() - 0.0005).item()) < 3e-5


@pytest.mark.parametrize("shape", [*SHAPES, "integers"])
def test_percentile_100_is_min_max(shape):
    x = data(shape)
    assert read(observed(lq.PercentileObserver, x, percentile=100)) == read(observed(lq.MinMaxObserver, x))


def test_median_of_a_relu_is_zero():
    x = data("relu")
    x[:1000] = 0
    observer = observed(lq.PercentileObserver, x)
    d = Distribution.of(observer.counts, observer.r_min, observer.r_max)
    assert d.quantile(0.3) == 0


@pytest.mark.parametrize("shape", SHAPES)
def test_moments(shape):
    x = data(shape)
    observer = observed(lq.StdObserver, x)
    d = Distribution.of(observer.counts, observer.r_min, observer.r_max)
    exact = x.numpy().astype(np.float64)
    mean, std, deviation = d.real(d.mean(), d.std(), d.deviation())
    assert abs(mean - exact.mean()) < 2e-3 * exact.std()
    assert abs(std / exact.std() - 1) < 0.01
    assert abs(deviation / np.abs(exact - exact.mean()).mean() - 1) < 5e-3


# --- scaling and mirror ----------------------------------------------------------------------------------------------

READINGS = [
    (lq.MinMaxObserver, {}),
    (lq.PercentileObserver, {"percentile": 99.9}),
    (lq.MSEObserver, {}),
    (lq.EntropyObserver, {}),
    (lq.StdObserver, {}),
    (lq.ACIQObserver, {}),
    (lq.DistributionObserver, {"dtype": "float8_e4m3fn"}),
]


@pytest.mark.parametrize(("kind", "options"), READINGS, ids=lambda v: getattr(v, "__name__", ""))
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("power", [-40, -3, 1, 60])
def test_powers_of_two_scale_every_reading_exactly(kind, options, symmetric, power):
    for shape in ("relu", "laplace", "bimodal", "gauss_outliers"):
        x = data(shape, n=8192)
        low, high = read(observed(kind, x, symmetric=symmetric, **options))
        assert read(observed(kind, x * 2.0**power, symmetric=symmetric, **options)) == (
            low * 2.0**power,
            high * 2.0**power,
        )


@pytest.mark.parametrize("shape", SHAPES)
def test_percentiles_mirror(shape):
    x = data(shape)
    for percentile in (99.0, 99.99):
        low, high = read(observed(lq.PercentileObserver, x, percentile=percentile))
        mirrored = read(observed(lq.PercentileObserver, -x, percentile=percentile))
        np.testing.assert_allclose(mirrored, (-high, -low), rtol=1e-6, atol=1e-9)


# --- least error -----------------------------------------------------------------------------------------------------


def brute_force(d, values, s, z, norm):
    """The model's error by sampling every interval densely, code by code."""
    total = 0.0
    for low, high, count in zip(d.low.tolist(), d.high.tolist(), d.counts.tolist(), strict=True):
        x = low + (high - low) * (np.arange(4001) + 0.5) / 4001
        codes = (values - z) * s
        nearest = codes[np.abs(x[:, None] - codes[None]).argmin(1)]
        total += count * np.mean(np.abs(x - nearest) ** norm)
    return total


@pytest.mark.parametrize("dtype", ["int4", "uint4", "int2", "float8_e4m3fn", "float8_e5m2", "float4_e2m1"])
@pytest.mark.parametrize("norm", [1.0, 2.0, 2.4, 3.0])
def test_error_model_is_the_integral(dtype, norm):
    code = resolve(dtype)
    x = torch.cat([data("gauss", n=500), torch.tensor([4.0, 4.0, -4.0, 0.0, 0.0])])
    observer = observed(lq.MSEObserver, x, mantissa_bits=3)
    d = Distribution.of(observer.counts, observer.r_min, observer.r_max)
    values = (
        np.unique(lq.histogram.code_values(code).numpy()) if code.is_float else np.arange(code.qmin, code.qmax + 1)
    ).astype(np.float64)
    scales = torch.tensor([0.01, 0.1, 0.3]) if not code.is_float else torch.tensor([0.5, 1.0, 4.0]) / code.qmax
    zeros = torch.tensor([0, 1, 3]) if not code.is_float else None
    got = ErrorModel(d, code, code.qmin, code.qmax, norm)(scales, zeros)
    for i, s in enumerate(scales.double().tolist()):
        z = 0 if zeros is None else int(zeros[i])
        want = brute_force(d, values, s, z, norm)
        assert abs(float(got[i]) / want - 1) < 2e-4, (s, z)


@pytest.mark.parametrize("dtype", ["int8", "int4", "int2", "uint8", "float8_e4m3fn", "float4_e2m1"])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("seed", [0, 1])
def test_least_error_is_no_worse_than_min_max(dtype, symmetric, seed):
    for shape in [*SHAPES, "integers"]:
        x = data(shape, seed)
        ours = observed(lq.MSEObserver, x, dtype, symmetric=symmetric)
        plain = lq.MinMaxObserver.from_observer(ours)
        assert squared_error(ours, x) <= 1.02 * squared_error(plain, x), shape


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("symmetric", [False, True])
def test_least_error_is_near_the_best_on_the_data(dtype, symmetric):
    """Beside a fine search on the data itself, of all pairs of ends shrunk independently."""
    ratios = []
    for shape in SHAPES:
        x = data(shape, 0, 8192)
        ours = observed(lq.MSEObserver, x, dtype, symmetric=symmetric)
        low, high = float(x.min()), float(x.max())
        grid = 2.0 ** -np.linspace(0, 4, 13)
        best = math.inf
        for f in [1.0] if symmetric else grid:
            for g in 2.0 ** -np.linspace(-0.2, 4, 120) if symmetric else grid:
                ends = (-g * max(-low, high), g * max(-low, high)) if symmetric else (low * f, high * g)
                qparams = lq.choose_qparams(*map(torch.tensor, ends), dtype, symmetric=symmetric)
                y = lq.fake_quantize_linear(x, *qparams, dtype=dtype)
                best = min(best, float((x - y).double().square().sum()))
        ratios.append(squared_error(ours, x) / best)
    assert np.median(ratios) < 1.005 and max(ratios) < 1.07, ratios


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float4_e2m1"])
def test_least_error_of_float_codes_may_need_a_wider_range(dtype):
    """Steps double from one binade to the next: where the range ends decides on which side of that values lie.

    Where a handful of values makes the whole error, a histogram, which knows them to 3 % only, cannot place them.
    """
    ratios = []
    for shape in ("relu", "gelu", "gauss", "laplace", "bimodal"):
        x = data(shape, 0, 8192)
        most = float(x.abs().max())
        best = math.inf
        for factor in 2.0 ** np.linspace(-3, 1, 400):
            qparams = lq.choose_qparams(torch.tensor(-most * factor), torch.tensor(most * factor), dtype)
            y = lq.fake_quantize_linear(x, *qparams, dtype=dtype)
            best = min(best, float((x - y).double().square().sum()))
        ratios.append(squared_error(observed(lq.MSEObserver, x, dtype), x) / best)
    assert np.median(ratios) < 1.02 and max(ratios) < 1.05, ratios


def test_integers_stay_exact():
    x = torch.arange(256.0).repeat(100)
    observer = observed(lq.MSEObserver, x, "uint8")
    assert squared_error(observer, x) == 0
    assert read(observer) == (0, 255)


@pytest.mark.parametrize("values", [[3.0] * 50, [3.0, -2.0], [0.0], [1e-45, 2e-45], [0.0, 0.0, 7.0]])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int4", "int16", "int32", "float8_e4m3fn"])
def test_least_error_of_a_few_values(values, dtype):
    x = torch.tensor(values)
    for options in ({}, {"symmetric": True}, {"include_zero": False}, {"power_of_two": True}):
        ours = observed(lq.MSEObserver, x, dtype, **options)
        plain = lq.MinMaxObserver.from_observer(ours)
        assert squared_error(ours, x) <= squared_error(plain, x) * (1 + 1e-6) + 1e-30


def test_least_error_honours_narrow_codes_and_ranges_without_zero():
    x = data("gauss") + 100
    ours = observed(lq.MSEObserver, x, "int4", include_zero=False)
    plain = lq.MinMaxObserver.from_observer(ours)
    assert squared_error(ours, x) <= 1.02 * squared_error(plain, x)
    assert read(ours)[0] > 90
    narrow = observed(lq.MSEObserver, data("gauss"), "int8", quant_min=-7, quant_max=7, symmetric=True)
    four = observed(lq.MSEObserver, data("gauss"), "int4", quant_min=-7, symmetric=True)
    assert read(narrow) == read(four)


def test_norm_weighs_outliers():
    x = data("student")
    ends = [read(observed(lq.MSEObserver, x, "int4", symmetric=True, norm=norm))[1] for norm in (1.0, 2.0, 4.0)]
    assert ends[0] < ends[1] < ends[2]


# --- least divergence ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [*SHAPES, "integers"])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int4", "float8_e4m3fn"])
@pytest.mark.parametrize("symmetric", [False, True])
def test_entropy_clips_one_percent_at_most(shape, dtype, symmetric):
    x = data(shape)
    low, high = read(observed(lq.EntropyObserver, x, dtype, symmetric=symmetric))
    values = x[x != 0]
    two_bins = float((((values - low).abs() < 2e-3 * abs(low)) | ((values - high).abs() < 2e-3 * high)).double().mean())
    assert float(((values < low) | (values > high)).double().mean()) <= 0.01 + two_bins
    assert math.isfinite(low) and math.isfinite(high) and low < high


@pytest.mark.parametrize("values", [[3.0] * 50, [3.0, -2.0], [0.0, 0.0], [1.0] * 100 + [2.0] * 100, [0.0] * 99 + [5.0]])
@pytest.mark.parametrize("symmetric", [False, True])
def test_entropy_of_a_few_values_is_finite(values, symmetric):
    x = torch.tensor(values)
    low, high = read(observed(lq.EntropyObserver, x, symmetric=symmetric))
    assert low <= x.min() and high >= x.max()


def test_entropy_of_wide_codes():
    x = data("laplace")
    low, high = read(observed(lq.EntropyObserver, x, "int16"))
    assert x.min() <= low < high <= x.max()
    assert read(observed(lq.EntropyObserver, x, "int32")) == read(observed(lq.MinMaxObserver, x, "int32"))


def divergence(mass, width, low_bin, high_bin, levels):
    """KL(P || Q) of a window of equal bins, in the textbook's way: cell by cell, bin by bin."""
    inside = mass[low_bin:high_bin]
    cells = np.array_split(np.arange(low_bin, high_bin), levels)
    p_cells = np.array([mass[c].sum() for c in cells])
    q = p_cells / inside.sum()
    p = p_cells.copy()
    p[0] += mass[:low_bin].sum()
    p[-1] += mass[high_bin:].sum()
    p /= mass.sum()
    total = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)
    for c, weight in zip(cells, p_cells / mass.sum(), strict=True):
        filled = c[mass[c] > 0]
        if len(filled):
            share = mass[filled] / mass[filled].sum()
            total += weight * float((share * np.log(share * len(filled))).sum())
    return total


def test_divergence_is_the_loops():
    """On equal bins the closed form is what a loop over cells and bins gives."""
    rng = np.random.default_rng(0)
    mass = rng.integers(0, 50, 64).astype(np.float64)
    mass[20:23] = 0
    edges = np.linspace(1, 3, 65)
    filled = mass > 0
    d = Distribution(
        torch.from_numpy(edges[:-1][filled]),
        torch.from_numpy(edges[1:][filled]),
        torch.from_numpy(mass[filled]).long(),
        0,
    )
    model = lq.histogram._Divergence(d, 8)
    for low_bin, high_bin in [(0, 64), (0, 56), (8, 64), (8, 48), (16, 56)]:
        low, high = (torch.tensor([[edges[b]]]) for b in (low_bin, high_bin))
        got = float(model._divergences(low, high))
        assert abs(got - divergence(mass, 1 / 32, low_bin, high_bin, 8)) < 1e-9


def test_entropy_cuts_outliers_and_keeps_two_modes():
    x = data("gauss_outliers")
    assert 3 < read(observed(lq.EntropyObserver, x, symmetric=True))[1] < 8
    x = data("bimodal")
    low, high = read(observed(lq.EntropyObserver, x))
    assert low < -3.8 and high > 6


# --- the baselines ---------------------------------------------------------------------------------------------------


def test_aciq_has_the_papers_constants():
    laplace = [2.83, 3.90, 5.03, 6.20, 7.41, 8.65, 9.90]
    normal = [1.71, 2.15, 2.56, 2.94, 3.29, 3.62, 3.92]
    for bits in range(2, 9):
        limits = {"quant_min": 0, "quant_max": 2**bits - 1, "dtype": "uint8"}
        d = Distribution(torch.tensor([-1.0]).double(), torch.tensor([1.0]).double(), torch.tensor([100]), 0)
        ours = lq.ACIQObserver(**limits)._distance(d) / d.deviation()
        assert abs(ours - laplace[bits - 2]) < 0.006
        ours = lq.ACIQObserver(**limits, distribution="normal")._distance(d) / d.std()
        assert abs(ours - normal[bits - 2]) < 0.006


def test_std_is_cut_at_the_extremes():
    x = data("relu")
    low, high = read(observed(lq.StdObserver, x, sigmas=2.0))
    assert low == 0
    assert abs(high - float(x.mean() + 2 * x.std())) < 0.01


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float4_e2m1"])
def test_distribution_gives_codes_the_data_s_deviation(dtype):
    x = data("gauss") * 3
    scale, zero_point = observed(lq.DistributionObserver, x, dtype).calculate_qparams()
    codes = lq.histogram.code_values(resolve(dtype))
    assert zero_point is None
    assert abs(float(scale) / (float(x.std()) / float(codes.std(correction=0))) - 1) < 0.01
    assert len(codes) == {"float8_e4m3fn": 254, "float8_e5m2": 248, "float8_e4m3fnuz": 255, "float4_e2m1": 16}[dtype]
