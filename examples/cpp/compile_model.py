"""Compile a quantized model with AOTInductor, for run.cpp: compile_model.py MODEL.pt2 INPUT OUTPUT.

Writes the package, an input of 5 x 12 and what the eager model computes for it, both as raw float32.
"""

import sys

import torch
from torch import nn

import torch_linquant as lq


class Codes(nn.Module):
    """Values of dynamically quantized input, then of two fake quantized activations: sums in no order but one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        observed = lq.prepare(nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 12)).eval())
        lq.calibrate(observed, [torch.randn(64, 12)])
        self.model = lq.convert(observed, weight_dtype="int4", weight_granularity=lq.PerBlock(4, axis=1))
        self.register_buffer("scale", torch.rand(12) + 0.01)

    def forward(self, x):
        x = lq.fake_quantize_linear(x, self.scale, dtype="int8")
        y, scale, zero_point = lq.dynamic_quantize_linear(self.model(x))
        return lq.dequantize_linear(y, scale, zero_point)


def main() -> None:
    package, input_file, output_file = sys.argv[1:]
    model = Codes().eval()
    x = torch.randn(5, 12)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("rows")},))
    torch._inductor.aoti_compile_and_package(program, package_path=package)
    x.numpy().tofile(input_file)
    with torch.no_grad():
        model(x).numpy().tofile(output_file)


if __name__ == "__main__":
    main()
