"""Train a small network for 4-bit weights: quantization-aware training with learned scales, then export.

    python examples/qat.py [--bits 4] [--epochs 15] [--qat-epochs 10] [--out out]

The data are scikit-learn's handwritten digits. Weights get one scale for each block of 16, the inputs of the layers one
int8 scale each; all scales are trained with the weights (LSQ). The exit code is 1 if the exported program computes
other bits than the trained model.

How it is put together: a weight is wrapped by PyTorch's own parametrization, an input by a module in front of the
layer. Both are `LearnedFakeQuantize`, which starts from what an observer has seen. The gradient flows through
`fake_quantize_linear`; through `dequantize_linear(quantize_linear(x))` it would not, since integers carry none.
"""

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from quickstart import Net, accuracy, load_data, train
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from torch import Tensor, nn
from torch.nn.utils import parametrize

import torch_linquant as lq


def observed_inputs(model: nn.Module, x: Tensor) -> dict[str, lq.MinMaxObserver]:
    """What reaches each layer, as ranges."""
    observed = lq.prepare(model, lq.MinMaxObserver("int8"))
    lq.calibrate(observed, x.split(64))
    names = [name for name, module in model.named_modules() if isinstance(module, (nn.Conv2d, nn.Linear))]
    return {name: observed.get_submodule(name).input_observer for name in names}


def fake_quantized(model: nn.Module, x: Tensor, bits: int) -> nn.Module:
    """The model with fake quantized weights and inputs, every scale a parameter."""
    for name, observer in observed_inputs(model, x).items():
        layer = model.get_submodule(name)
        weight = lq.MinMaxObserver(f"int{bits}", lq.PerBlock(16, axis=1), symmetric=True)
        weight(layer.weight.detach())
        parametrize.register_parametrization(layer, "weight", lq.LearnedFakeQuantize.from_observer(weight))
        parent, _, last = name.rpartition(".")
        quantize = lq.LearnedFakeQuantize.from_observer(observer)
        setattr(model.get_submodule(parent), last, nn.Sequential(quantize, layer))
    return model


def fine_tune(model: nn.Module, x: Tensor, y: Tensor, epochs: int, progress: Progress) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(epochs, 1))
    task = progress.add_task("QAT", total=epochs, unit="epochs")
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
        schedule.step()
        progress.advance(task)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Quantization-aware training with learned scales.")
    parser.add_argument("--bits", type=int, default=4, choices=(2, 4, 8), help="of a weight (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=15, help="of float training (default: %(default)s)")
    parser.add_argument("--qat-epochs", type=int, default=10, help="of training after that (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="directory (default: %(default)s)")
    args = parser.parse_args(arguments)

    torch.manual_seed(0)
    console = Console(highlight=False, markup=False)
    train_x, train_y, test_x, test_y = load_data()
    model = Net()
    columns = [
        TextColumn("{task.description:<8}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[unit]}"),
    ]
    with Progress(*columns, console=console) as progress:
        train(model, train_x, train_y, args.epochs, progress)
        scores = {"float": accuracy(model, test_x, test_y)}
        model = fake_quantized(model, train_x, args.bits)
        scores["quantized after training (PTQ)"] = accuracy(model, test_x, test_y)
        start = {name: p.detach().clone() for name, p in model.named_parameters() if name.endswith("scale")}
        fine_tune(model.train(), train_x, train_y, args.qat_epochs, progress)
        model.eval()
        scores["trained quantized (QAT)"] = accuracy(model, test_x, test_y)

    table = Table(title=f"int{args.bits} weights in blocks of 16, int8 inputs", title_justify="left")
    table.add_column("Model")
    table.add_column("Accuracy", justify="right")
    for name, score in scores.items():
        table.add_row(name, f"{100 * score:.2f} %")
    console.print(table)
    parameters = dict(model.named_parameters())
    moved = torch.cat([(parameters[name].detach() / was - 1).abs().flatten() for name, was in start.items()])
    console.print(f"Trained scales  {moved.numel():,}, moved by {100 * moved.mean():.1f} % on average")

    path = args.out / "qat.pt2"
    path.parent.mkdir(parents=True, exist_ok=True)
    with console.status("Exporting ..."):
        program = torch.export.export(model, (test_x[:2].clone(),), dynamic_shapes=({0: torch.export.Dim("batch")},))
        torch.export.save(program, path)
        reloaded = torch.export.load(path).module()
        with torch.no_grad():
            bit_equal = all(torch.equal(reloaded(x), model(x)) for x in (test_x, test_x[:7]))
    console.print(f"Saved           {path}", soft_wrap=True)
    console.print(
        f"Reloaded        {'bit-equal to the trained model' if bit_equal else 'NOT equal to the trained model'}"
    )
    return 0 if bit_equal else 1


if __name__ == "__main__":
    sys.exit(main())
