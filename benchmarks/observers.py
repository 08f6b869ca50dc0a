"""How near the range of each observer comes to the best one: python -m benchmarks.observers [--quick] [--out out]

Every observer reads the same values: drawn from shapes that activations have, and the inputs of the layers of the
example's network, trained here. The error is that of the values quantized and dequantized with what it returns, over
the least error found by a search on the values themselves. Weights are searched too, beside the sweep, which is the
optimum. Tables go to the screen and, as JSON, to out/; the ranges chosen are drawn in out/observers.png.
"""

import argparse
import contextlib
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
import torch
from matplotlib import pyplot as plt
from onnxruntime.quantization.calibrate import HistogramCollector
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn
from torch.ao.quantization import HistogramObserver

import torch_linquant as lq
from examples import quickstart

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
    """The range of least error on x, shrunk or wider: a grid over its ends, then finer ones around the best."""
    low, high = min(x.min().item(), 0.0), max(x.max().item(), 0.0)
    two = not code.symmetric and low < 0 < high
    best = (math.inf, 0.0, 0.0)
    width = 7.0  # of the grid, in octaves to each side
    for turn in range(4):
        n = points * (48 if turn == 0 and not two else 1)  # errors have many minima
        _, a, b = best
        steps = np.linspace(-width, width, 2 * n + 1)
        for i in steps:
            for j in steps if two else [i]:
                f, g = min(1.0, a + i), min(1.0, b + j)
                best = min(best, (mse(x, code, (low * 2**f, high * 2**g)), f, g))
        width *= 2 / n
    return low * 2 ** best[1], high * 2 ** best[2]


def ours(kind: type[lq.Observer], **options: float) -> Callable[[Tensor, Code], Range | None]:
    def read(x: Tensor, code: Code) -> Range | None:
        is_float = code.dtype.startswith("float")
        if kind is (lq.ACIQObserver if is_float else lq.DistributionObserver):
            return None  # the one is for steps of one width, the other for those of floats
        observer = kind(code.dtype, symmetric=code.symmetric, **options)
        observer(x)
        r_min, r_max = observer.range()
        return r_min.item(), r_max.item()

    return read


def torch_ao(x: Tensor, code: Code) -> Range | None:
    """torch.ao.quantization.HistogramObserver, for the integers that it has."""
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
    "DistributionObserver": ours(lq.DistributionObserver),
    "torch.ao histogram": torch_ao,
    "ONNX Runtime 99.99": onnx_runtime("percentile"),
    "ONNX Runtime entropy": onnx_runtime("entropy"),
}


class Result(NamedTuple):
    reader: str
    code: str
    sample: str
    ratio: float  # of mean squared errors, to the least found
    bulk_sqnr: float  # dB, over the 99.9 % of smallest magnitude
    clipped: float  # fraction of values
    seconds: float


def shaped(shape: str, size: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return SHAPES[shape](torch.randn(size, generator=generator), generator)


def trained(epochs: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """The example's network, and what reaches its layers but the first from the images that it was trained on."""
    torch.manual_seed(0)
    x, y, _, _ = quickstart.load_data()
    model = quickstart.Net()
    with Progress(disable=True) as progress:
        quickstart.train(model, x, y, epochs, progress)
    inputs: dict[str, Tensor] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            layer.register_forward_pre_hook(lambda _, args, name=name: inputs.update({name: args[0].flatten()}))
    with torch.no_grad():
        model(x[:256])
    del inputs["conv1"]  # images of 17 levels, which a few ranges hold without any error
    return model, inputs


def measure(x: Tensor, sample: str, code: Code, points: int) -> list[Result]:
    bulk = x.abs() <= x.abs().kthvalue(int(x.numel() * 0.999)).values
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
        ratio = error / least if least > 0 else 1.0 if error == 0 else math.inf
        codes = rounded(x, code, ends)
        noise = (codes - x)[bulk].double().square().sum().item()
        signal = x[bulk].double().square().sum().item()
        sqnr = 10 * math.log10(signal / noise) if noise > 0 else math.inf
        low, high = rounded(torch.tensor([-torch.inf, torch.inf]), code, ends).tolist()
        clipped = ((x < low) | (x > high)).double().mean().item()
        results.append(Result(name, str(code), sample, ratio, sqnr, clipped, seconds))
    return results


def quantiles(ratios: list[float]) -> list[str]:
    return [f"{np.quantile(ratios, q):.3f}" for q in (0.5, 0.9, 1.0)]


def new_table(title: str, first: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.MARKDOWN)
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def activations_table(results: list[Result], code: Code) -> Table:
    ends = ("median", "90 %", "max")
    outlying = ("bulk SQNR, x1000", "clipped, x1000")
    table = new_table(str(code), "Observer", *ends, *(f"{end}, network" for end in ends), *outlying, "ms")
    for name in READERS:
        mine = [r for r in results if (r.reader, r.code) == (name, str(code))]
        if mine:
            outliers = [r for r in mine if r.sample == "outliers x1000"]
            table.add_row(
                name,
                *quantiles([r.ratio for r in mine if r.sample in SHAPES]),
                *quantiles([r.ratio for r in mine if r.sample not in SHAPES]),
                f"{np.median([r.bulk_sqnr for r in outliers]):.1f} dB",
                f"{np.median([r.clipped for r in outliers]):.4%}",
                f"{1e3 * np.median([r.seconds for r in mine if r.sample in SHAPES]):.1f}",
            )
    return table


def row_errors(w: Tensor, scale: Tensor) -> Tensor:
    x = lq.fake_quantize_linear(w, scale, None, axis=0, dtype="int4")
    return (x - w).double().square().sum(1)


def shrink_grid(w: Tensor) -> Tensor:
    """The scale of each row by 20 steps from its range down to 0.8 of it: the grid that is usual for weights."""
    widest = lq.search_qparams(w, "int4", lq.PerAxis(0), method="minmax")[0]
    scales = [widest * (1 - 0.01 * step) for step in range(21)]
    best = torch.stack([row_errors(w, scale) for scale in scales]).argmin(0)
    return torch.stack(scales)[best, torch.arange(len(w))]


def weight_rows(model: nn.Module, quick: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    n = 4 if quick else 1
    t = torch.distributions.StudentT(4.0).sample((256 // n, 1024))
    rows = {
        "Gauss, rows of 1024": torch.randn(256 // n, 1024),
        "Student t (4), rows of 1024": t,
        "Gauss, groups of 128": torch.randn(2048 // n, 128),
        "Gauss, groups of 32": torch.randn(8192 // n, 32),
    }
    for name, p in model.named_parameters():
        if p.dim() > 1 and p[0].numel() > 9:
            rows[f"network, {name}"] = p.detach().flatten(1)
    return rows


def weights_table(rows: dict[str, Tensor]) -> Table:
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        method: lambda w, method=method: lq.search_qparams(w, "int4", lq.PerAxis(0), method=method)[0]
        for method in ("minmax", "zoom", "exact")
    }
    ways["20 shrink steps"] = shrink_grid
    table = new_table("int4 weights: mean (worst row), ms", "Weights", *ways)
    for name, w in rows.items():
        best = row_errors(w, ways["exact"](w))
        cells = []
        for way in ways.values():
            start = time.perf_counter()
            scale = way(w)
            seconds = time.perf_counter() - start
            ratio = row_errors(w, scale) / best
            cells.append(f"{ratio.mean().item():.4f} ({ratio.max().item():.2f}), {1e3 * seconds:.0f}")
        table.add_row(name, *cells)
    return table


def draw(path: Path, samples: dict[str, Tensor], code: Code) -> None:
    """A histogram of each sample, with the ends that our observers and torch.ao's choose."""
    matplotlib.use("Agg")
    drawn = ("MinMax", "MSE", "Percentile", "Entropy", "ACIQ", "torch.ao")
    names = [name for name in READERS if name.startswith(drawn)]
    figure, axes = plt.subplots(1, len(samples), figsize=(13, 4.2), layout="constrained")
    for ax, (title, x) in zip(axes, samples.items(), strict=True):
        ax.hist(x.numpy(), bins=200, log=True, color="0.8")
        for i, name in enumerate(names):
            ends = READERS[name](x, code)
            assert ends is not None
            for j, end in enumerate(sorted({*ends} - {0.0})):
                ax.axvline(end, color=f"C{i}", linestyle=(2 * i, (4, 4)), label=name if j == 0 else None)
        ax.set(title=title, xlabel="value", ylabel="count")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(names), title=f"ends of the range, {code}")
    figure.savefig(path, dpi=80)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> list[Result]:
    parser = argparse.ArgumentParser(description="Compare the ranges that observers choose with the best ones.")
    parser.add_argument("--quick", action="store_true", help="one seed and few values: a look, not a measurement")
    parser.add_argument("--out", type=Path, default=Path("out"), help="directory for results (default: %(default)s)")
    args = parser.parse_args(arguments)
    size, seeds, points, epochs = (8192, 1, 4, 2) if args.quick else (131072, 3, 10, 15)

    console = Console(width=160)
    with console.status("Training ..."):
        model, inputs = trained(epochs)
    samples = [(shape, shaped(shape, size, seed)) for shape in SHAPES for seed in range(seeds)]
    samples += [(f"network, {name}", x[:size]) for name, x in inputs.items()]
    console.print("Squared error over the least found, on shapes and on the inputs of the network's layers.\n")
    results: list[Result] = []
    for code in CODES:
        with console.status(f"{code} ..."):
            for name, x in samples:
                results += measure(x, name, code, points)
        console.print(activations_table(results, code))
    console.print("Squared error of each row over that of the sweep.\n")
    console.print(weights_table(weight_rows(model, args.quick)))
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "observers.json"
    path.write_text(json.dumps([r._asdict() for r in results], indent=1))
    shown = {"laplace": shaped("laplace", size, 0), "gelu": shaped("gelu", size, 0)}
    shown["network, classifier.2"] = inputs["classifier.2"]
    draw(args.out / "observers.png", shown, Code("int4", False))
    console.print(f"{len(SHAPES)} shapes, {seeds} seeds, {size} values each. Written: {path}, observers.png beside it.")
    return results


if __name__ == "__main__":
    main()
