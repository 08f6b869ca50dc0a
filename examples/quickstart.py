"""Quantize a small network from end to end: train, calibrate, convert, export, reload, compare.

    python examples/quickstart.py [--epochs 15] [--out out]

The data are scikit-learn's handwritten digits, 1797 images of 8 x 8 pixels. Weights become int8 with one scale for each
output channel, the inputs of the layers uint8 with one scale each. The exit code is 1 if the reloaded program, or ONNX
Runtime where it is installed, computes other bits than the eager model.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

import torch_linquant as lq


def load_data() -> list[Tensor]:
    """Images [N, 1, 8, 8] in [0, 1] and labels [N] to train on, then those to test on."""
    digits = load_digits()
    images = digits.images.astype("float32")[:, None] / 16
    train_x, test_x, train_y, test_y = train_test_split(
        images, digits.target, test_size=0.25, random_state=0, stratify=digits.target
    )
    return [torch.from_numpy(part) for part in (train_x, train_y, test_x, test_y)]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.conv3 = nn.Conv2d(64, 64, 3, padding=1, groups=4)
        self.classifier = nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.max_pool2d(F.relu(self.conv3(x)), 2)
        return self.classifier(x.flatten(1))


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int, progress: Progress) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    task = progress.add_task("Training", total=epochs, unit="epochs")
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
        progress.advance(task)
    model.eval()


def quantize(model: nn.Module, x: Tensor, progress: Progress) -> nn.Module:
    """The three steps; any model of nn.Linear and nn.Conv2d goes in."""
    batches = x.split(64)
    task = progress.add_task("Calibrating", total=len(batches), unit="batches")

    observed = lq.prepare(model, lq.MinMaxObserver("uint8"))
    lq.calibrate(observed, batches, progress=lambda done, total: progress.update(task, completed=done))
    return lq.convert(observed, weight_dtype="int8", weight_granularity=lq.PerAxis(0))


def export(model: nn.Module, x: Tensor, path: Path) -> torch.export.ExportedProgram:
    """Save the model as a program for any batch size, and return what is read back from the file."""
    batch = torch.export.Dim("batch")
    program = torch.export.export(model, (x,), dynamic_shapes=({0: batch},))
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.export.save(program, path)
    return torch.export.load(path)


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return (model(x).argmax(1) == y).double().mean().item()


def count_ops(program: torch.export.ExportedProgram) -> Counter[str]:
    """How often each of this package's ops stands in the graph."""
    names = [str(node.target).split(".") for node in program.graph.nodes if str(node.target).startswith("linquant.")]
    return Counter(name for _, name, _ in names)


def layer_inputs(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """What reaches each quantized layer when the model runs on x."""
    inputs = {}
    hooks = [
        layer.register_forward_pre_hook(lambda layer, args, name=name: inputs.update({name: args[0]}))
        for name, layer in model.named_modules()
        if isinstance(layer, lq.QuantizedLayer)
    ]
    with torch.no_grad():
        model(x)
    for hook in hooks:
        hook.remove()
    return inputs


def onnx_runtime_codes(x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor | None:
    """x quantized by ONNX Runtime's QuantizeLinear, or None where ONNX Runtime is not installed."""
    try:
        import onnxruntime
        from onnx import TensorProto, helper, numpy_helper
    except ImportError:
        return None
    graph = helper.make_graph(
        [helper.make_node("QuantizeLinear", ["x", "scale", "zero_point"], ["codes"])],
        "quantize",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info("codes", TensorProto.UINT8, x.shape)],
        [
            numpy_helper.from_array(scale.numpy(), "scale"),
            numpy_helper.from_array(zero_point.numpy(), "zero_point"),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {"x": x.numpy()})[0])


def compare_codes(model: nn.Module, x: Tensor) -> tuple[int, int] | None:
    """How many codes of all layers' inputs equal ONNX Runtime's, and how many there are."""
    equal = total = 0
    for name, value in layer_inputs(model, x).items():
        layer = model.get_submodule(name)
        theirs = onnx_runtime_codes(value, layer.input_scale, layer.input_zero_point)
        if theirs is None:
            return None
        equal += (layer.quantize_input(value) == theirs).sum().item()
        total += theirs.numel()
    return equal, total


def report_layers(console: Console, model: nn.Module, quantized: nn.Module, x: Tensor) -> None:
    table = Table(title="Layers", title_justify="left", title_style="bold")
    for title in ("Layer", "Weight", "Input"):
        table.add_column(title)
    for title in ("Input scale", "Zero point", "SQNR"):
        table.add_column(title, justify="right")
    for name, decibels in lq.sqnr(model, quantized, x).items():
        layer = quantized.get_submodule(name)
        weight = f"{layer.weight_dtype.name} {'x'.join(map(str, layer.weight.shape))}"
        scale, zero_point = layer.input_scale.item(), layer.input_zero_point.item()
        table.add_row(name, weight, layer.input_dtype.name, f"{scale:.6f}", str(zero_point), f"{decibels:.1f} dB")
    console.print(table)


def report_models(console: Console, before: nn.Module, after: nn.Module, x: Tensor, y: Tensor) -> None:
    table = Table(title="Models", title_justify="left", title_style="bold")
    table.add_column("")
    for title in ("float", "quantized", "change"):
        table.add_column(title, justify="right")
    accuracies = [100 * accuracy(model, x, y) for model in (before, after)]
    sizes = [lq.weight_bytes(model) for model in (before, after)]
    table.add_row("Accuracy", *(f"{a:.2f} %" for a in accuracies), f"{accuracies[1] - accuracies[0]:+.2f} points")
    table.add_row("Size of weights", *(f"{size:,} bytes" for size in sizes), f"{sizes[0] / sizes[1]:.2f} times smaller")
    console.print(table)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Quantize a small network from end to end.")
    parser.add_argument("--epochs", type=int, default=15, help="how long to train (default: %(default)s)")
    parser.add_argument(
        "--out", type=Path, default=Path("out"), help="directory for the program (default: %(default)s)"
    )
    args = parser.parse_args(arguments)

    torch.manual_seed(0)
    console = Console(highlight=False, markup=False)
    train_x, train_y, test_x, test_y = load_data()
    console.print(f"Handwritten digits: {len(train_x)} images to train and calibrate on, {len(test_x)} to test on.\n")

    model = Net()
    columns = [
        TextColumn("{task.description:<11}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[unit]}"),
    ]
    with Progress(*columns, console=console) as progress:
        train(model, train_x, train_y, args.epochs, progress)
        quantized = quantize(model, train_x, progress)
    console.print()
    report_layers(console, model, quantized, test_x)
    console.print()
    report_models(console, model, quantized, test_x, test_y)

    path = args.out / "quickstart.pt2"
    with console.status("Exporting ..."):
        program = export(quantized, test_x[:2].clone(), path)
        reloaded = program.module()
        bit_equal = all(torch.equal(reloaded(x), quantized(x)) for x in (test_x, test_x[:7], test_x[:1]))
    with console.status("Asking ONNX Runtime ..."):
        codes = compare_codes(quantized, test_x)

    ops = ", ".join(f"{count} {name}" for name, count in count_ops(program).items())
    console.print()
    console.print(f"Saved           {path} ({path.stat().st_size:,} bytes, the graph included)", soft_wrap=True)
    console.print(f"Exported graph  {ops}; any batch size")
    console.print(f"Reloaded        {'bit-equal to the eager model' if bit_equal else 'NOT equal to the eager model'}")
    if codes is None:
        console.print("ONNX Runtime    not installed (pip install onnx onnxruntime), not compared")
    else:
        console.print(f"ONNX Runtime    codes equal to ONNX Runtime: {codes[0]:,} of {codes[1]:,}")
    return 0 if bit_equal and (codes is None or codes[0] == codes[1]) else 1


if __name__ == "__main__":
    sys.exit(main())
