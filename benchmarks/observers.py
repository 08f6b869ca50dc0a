"""How near the range of each observer comes to the best one: python -m benchmarks.observers [--quick] [--out out]

Every observer reads the same values; the error is that of the values quantized and dequantized with what it returns,
over the least error found by a search on the values themselves. Tables go to the screen and, as JSON, to out/; the
ranges chosen on two shapes are drawn in out/observers.png.
"""

import argparse
import contextlib
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import torch_linquant as lq

SHAPES: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "relu": lambda x, g: x.relu(),
    "gelu": lambda x, g: torch.nn.functional.gelu(x * 2),
    "gaussian": lambda x, g: x,
    "laplace": lambda x, g: x.sign() * -torch.rand(x.shape, generator=g).clamp_min(1e-7).log(),
    "uniform": lambda x, g: torch.rand(x.shape, generator=g) * 2 - 1,
    "bimodal": lambda x, g: x * 0.1 + torch.where(torch.rand(x.shape, generator=g) < 0.5, -2.0, 3.0),
    "outliers x30": lambda x, g: _outliers(x, 30),
    "outliers x1000": lambda x, g: _outliers(x, 1000),
}


def _outliers(x: Tensor, factor: float) -> Tensor:
    """One value in 16384 is multiplied."""
    x = x.clone()
    x[::16384] *= factor
    return x


class Code(NamedTuple):
    dtype: str
    symmetric: bool

    def __str__(self) -> str:
        return f"{self.dtype} {'symmetric' if self.symmetric else 'asymmetric'}"


CODES = [Code("uint8", False), Code("int8", True), Code("int4", True), Code("float8_e4m3fn", True)]
Range = tuple[float, float]


def qparams(code: Code, r_min: float, r_max: float) -> tuple[Tensor, Tensor | None]:
    return lq.choose_qparams(torch.tensor(r_min), torch.tensor(r_max), code.dtype, symmetric=code.symmetric)


def rounded(x: Tensor, code: Code, ends: Range) -> Tensor:
    scale, zero_point = qparams(code, *ends)
    return lq.fake_quantize_linear(x, scale, zero_point, dtype=code.dtype)


def mse(x: Tensor, code: Code, ends: Range) -> float:
    return (rounded(x, code, ends) - x).double().square().mean().item()


def best_found(x: Tensor, code: Code, points: int) -> Range:
    """The shrunk range of least error on x: a grid over its ends, then four finer ones around the best."""
    low, high = min(x.min().item(), 0.0), max(x.max().item(), 0.0)
    two = not code.symmetric and low < 0 < high
    a, b, width = 0.0, 0.0, 7.0
    best = (math.inf, a, b)
    for _ in range(5):
        steps = np.linspace(-width, width, 2 * points * (1 if two else 8) + 1)
        for i in steps:
            for j in steps if two else [i]:
                f, g = min(0.0, a + i), min(0.0, b + j)
                error = mse(x, code, (low * 2**f, high * 2**g))
                best = min(best, (error, f, g))
        _, a, b = best
        width *= 2 / points if two else 0.25 / points
    return low * 2**a, high * 2**b


def ours(kind: type[lq.Observer], **options: float) -> Callable[[Tensor, Code], Range | None]:
    def read(x: Tensor, code: Code) -> Range | None:
        if kind is lq.ACIQObserver and code.dtype.startswith("float"):
            return None  # it is defined for steps of one width
        observer = kind(code.dtype, symmetric=code.symmetric, **options)
        observer(x)
        r_min, r_max = observer.range()
        return r_min.item(), r_max.item()

    return read


def torch_ao(x: Tensor, code: Code) -> Range | None:
    """torch.ao.quantization.HistogramObserver, for the integers that it has."""
    from torch.ao.quantization import HistogramObserver

    if code.dtype.startswith("float"):
        return None
    bits = 4 if code.dtype == "int4" else 8
    unsigned = code.dtype == "uint8"
    observer = HistogramObserver(
        dtype=torch.quint8 if unsigned else torch.qint8,
        qscheme=torch.per_tensor_symmetric if code.symmetric else torch.per_tensor_affine,
        quant_min=0 if unsigned else -(2 ** (bits - 1)),
        quant_max=2**bits - 1 if unsigned else 2 ** (bits - 1) - 1,
    )
    observer(x)
    r_min, r_max = observer._non_linear_param_search()
    return r_min.item(), r_max.item()


def onnx_runtime(method: str) -> Callable[[Tensor, Code], Range | None]:
    """ONNX Runtime's collector, which knows 8 bits only."""

    def read(x: Tensor, code: Code) -> Range | None:
        from onnxruntime.quantization.calibrate import HistogramCollector

        if code.dtype not in ("uint8", "int8"):
            return None
        collector = HistogramCollector(method, code.symmetric, 2048, 128, 99.99, "same")
        with contextlib.redirect_stdout(None):  # it prints its progress
            collector.collect({"x": [x.numpy()]})
            low, high = collector.compute_collection_result()["x"][:2]
        return float(low), float(high)

    return read


READERS: dict[str, Callable[[Tensor, Code], Range | None]] = {
    "MinMaxObserver": ours(lq.MinMaxObserver),
    "MSEObserver": ours(lq.MSEObserver),
    "PercentileObserver 99.99": ours(lq.PercentileObserver, percentile=99.99),
    "EntropyObserver": ours(lq.EntropyObserver),
    "ACIQObserver": ours(lq.ACIQObserver),
    "torch.ao HistogramObserver": torch_ao,
    "ONNX Runtime percentile 99.99": onnx_runtime("percentile"),
    "ONNX Runtime entropy": onnx_runtime("entropy"),
}


class Result(NamedTuple):
    reader: str
    code: str
    shape: str
    ratio: float  # of mean squared errors, to the least found
    bulk_sqnr: float  # dB, over the 99.9 % of smallest magnitude
    clipped: float  # fraction of values
    seconds: float


def measure(code: Code, shape: str, seed: int, size: int, points: int) -> list[Result]:
    generator = torch.Generator().manual_seed(seed)
    x = SHAPES[shape](torch.randn(size, generator=generator), generator)
    bulk = x.abs() <= x.abs().kthvalue(int(size * 0.999)).values
    found: list[tuple[str, Range, float]] = []
    for name, reader in READERS.items():
        start = time.perf_counter()
        ends = reader(x, code)
        if ends is not None:
            found.append((name, ends, time.perf_counter() - start))
    errors = [mse(x, code, ends) for _, ends, _ in found]
    least = min([mse(x, code, best_found(x, code, points)), *errors])
    results = []
    for (name, ends, seconds), error in zip(found, errors, strict=True):
        noise = (rounded(x, code, ends) - x)[bulk].double().square().sum().item()
        signal = x[bulk].double().square().sum().item()
        sqnr = 10 * math.log10(signal / noise)
        low, high = rounded(torch.tensor([-torch.inf, torch.inf]), code, ends).tolist()
        clipped = ((x < low) | (x > high)).double().mean().item()
        results.append(Result(name, str(code), shape, error / least, sqnr, clipped, seconds))
    return results


def summary(results: list[Result], code: Code) -> Table:
    table = Table(title=f"{code}: squared error over the least found", title_justify="left", title_style="bold")
    table.add_column("Observer")
    for title in ("median", "90 %", "max", "bulk SQNR, outliers x1000", "clipped there", "ms"):
        table.add_column(title, justify="right")
    for name in READERS:
        mine = [r for r in results if (r.reader, r.code) == (name, str(code))]
        if not mine:
            continue
        ratios = np.array([r.ratio for r in mine])
        outliers = [r for r in mine if r.shape == "outliers x1000"]
        table.add_row(
            name,
            *(f"{np.quantile(ratios, q):.3f}" for q in (0.5, 0.9, 1.0)),
            f"{np.median([r.bulk_sqnr for r in outliers]):.1f} dB",
            f"{np.median([r.clipped for r in outliers]):.4%}",
            f"{1e3 * np.median([r.seconds for r in mine]):.1f}",
        )
    return table


def draw(path: Path, size: int) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    code = CODES[2]
    figure, axes = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
    for ax, shape in zip(axes, ("gaussian", "laplace"), strict=True):
        generator = torch.Generator().manual_seed(0)
        x = SHAPES[shape](torch.randn(size, generator=generator), generator)
        ax.hist(x.numpy(), bins=200, log=True, color="0.8")
        for i, name in enumerate(name for name in READERS if name.endswith("Observer") or "99" in name):
            ends = READERS[name](x, code)
            if ends is not None:
                ax.axvline(max(map(abs, ends)), color=f"C{i}", label=name)
        ax.set(title=f"{shape}, {code}", xlabel="value", ylabel="count")
    axes[1].legend(fontsize="small", title="upper end chosen", loc="upper left")
    figure.savefig(path, dpi=90)


def main(arguments: list[str] | None = None) -> list[Result]:
    parser = argparse.ArgumentParser(description="Compare the ranges that observers choose with the best ones.")
    parser.add_argument("--quick", action="store_true", help="one seed and few values: a look, not a measurement")
    parser.add_argument("--out", type=Path, default=Path("out"), help="directory for results (default: %(default)s)")
    args = parser.parse_args(arguments)
    size, seeds, points = (8192, 1, 6) if args.quick else (131072, 3, 12)

    console = Console(width=120)
    results = []
    for code in CODES:
        with console.status(f"{code} ..."):
            for shape in SHAPES:
                for seed in range(seeds):
                    results += measure(code, shape, seed, size, points)
        console.print(summary(results, code))
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "observers.json"
    path.write_text(json.dumps([r._asdict() for r in results], indent=1))
    draw(args.out / "observers.png", size)
    console.print(f"{len(SHAPES)} shapes, {seeds} seeds, {size} values each. Written: {path}, observers.png beside it.")
    return results


if __name__ == "__main__":
    main()
