"""A converted model as a program: ops stay single nodes, any batch size runs, the file computes the same bits."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.export import Dim

import torch_linquant
from torch_linquant.granularity import PerBlock
from torch_linquant.workflow import calibrate, convert, prepare

STRICT = pytest.mark.parametrize("strict", [True, False], ids=["strict", "nonstrict"])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect", bias=False)
        self.body = nn.Sequential(nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4))

    def forward(self, x):
        x = self.body(self.conv(x))
        return self.body[3](x)  # the same layer once more


def quantized_net():
    torch.manual_seed(0)
    observed = prepare(Net().eval())
    calibrate(observed, [torch.randn(8, 3, 6, 6) for _ in range(3)])
    return convert(observed)


def graph_text(program):
    """The graph without its inputs, node by node."""
    lines = []
    for node in program.graph.nodes:
        if node.op == "call_function":
            arguments = [str(a) for a in node.args] + [f"{k}={v}" for k, v in node.kwargs.items()]
            line = f"{node.name} = {node.target}({', '.join(arguments)})"
            lines += textwrap.wrap(line, 110, subsequent_indent="    ")
    return "\n".join(lines)


@STRICT
def test_ops_stay_single_nodes(strict):
    program = torch.export.export(
        quantized_net(), (torch.randn(2, 3, 6, 6),), dynamic_shapes=({0: Dim("batch")},), strict=strict
    )
    assert_expected_inline(
        graph_text(program),
        """\
quantize_linear = linquant.quantize_linear.default(x, b_conv_input_scale, b_conv_input_zero_point,
    output_dtype=2)
dequantize_linear = linquant.dequantize_linear.default(quantize_linear, b_conv_input_scale,
    b_conv_input_zero_point, output_dtype=1, x_dtype=2)
dequantize_linear_1 = linquant.dequantize_linear.default(b_conv_weight, b_conv_weight_scale,
    b_conv_weight_zero_point, axis=0, output_dtype=1, x_dtype=3)
pad = aten.pad.default(dequantize_linear, [1, 1, 1, 1], reflect)
conv2d = aten.conv2d.default(pad, dequantize_linear_1)
relu = aten.relu.default(conv2d)
adaptive_avg_pool2d = aten.adaptive_avg_pool2d.default(relu, [1, 1])
flatten = aten.flatten.using_ints(adaptive_avg_pool2d, 1)
quantize_linear_1 = linquant.quantize_linear.default(flatten, b_body_3_input_scale, b_body_3_input_zero_point,
    output_dtype=2)
dequantize_linear_2 = linquant.dequantize_linear.default(quantize_linear_1, b_body_3_input_scale,
    b_body_3_input_zero_point, output_dtype=1, x_dtype=2)
dequantize_linear_3 = linquant.dequantize_linear.default(b_body_3_weight, b_body_3_weight_scale,
    b_body_3_weight_zero_point, axis=0, output_dtype=1, x_dtype=3)
linear = aten.linear.default(dequantize_linear_2, dequantize_linear_3, b_body_3_bias)
quantize_linear_2 = linquant.quantize_linear.default(linear, b_body_3_input_scale, b_body_3_input_zero_point,
    output_dtype=2)
dequantize_linear_4 = linquant.dequantize_linear.default(quantize_linear_2, b_body_3_input_scale,
    b_body_3_input_zero_point, output_dtype=1, x_dtype=2)
dequantize_linear_5 = linquant.dequantize_linear.default(b_body_3_weight, b_body_3_weight_scale,
    b_body_3_weight_zero_point, axis=0, output_dtype=1, x_dtype=3)
linear_1 = aten.linear.default(dequantize_linear_4, dequantize_linear_5, b_body_3_bias)""",
    )
    again = program.run_decompositions({})
    count = graph_text(program).count("linquant.")
    assert count == 9 and graph_text(again).count("linquant.") == count


@STRICT
def test_weights_are_stored_as_codes(strict):
    program = torch.export.export(quantized_net(), (torch.randn(2, 3, 6, 6),), strict=strict)
    sizes = {(value.dtype, tuple(value.shape)) for name, value in program.state_dict.items() if name.endswith("weight")}
    assert sizes == {(torch.int8, (4, 3, 3, 3)), (torch.int8, (4, 4))}


@STRICT
def test_saved_program_is_bit_equal_for_any_batch(strict, tmp_path):
    model = quantized_net()
    shapes = ({0: Dim("batch"), 2: Dim("height", min=4), 3: Dim("width", min=4)},)
    program = torch.export.export(model, (torch.randn(2, 3, 6, 8),), dynamic_shapes=shapes, strict=strict)
    torch.export.save(program, tmp_path / "net.pt2")
    loaded = torch.export.load(tmp_path / "net.pt2")
    assert graph_text(loaded) == graph_text(program)
    for shape in ((2, 3, 6, 8), (1, 3, 6, 6), (17, 3, 9, 5)):
        x = torch.randn(shape) * 3
        x[0, 0, 0, 0] = float("nan")
        x[0, 1, 0, 0] = float("inf")
        assert torch.equal(program.module()(x), model(x))
        assert torch.equal(loaded.module()(x), model(x))


def test_a_fresh_process_computes_the_same_bits(tmp_path):
    model, x = quantized_net(), torch.randn(5, 3, 6, 6)
    torch.export.save(torch.export.export(model, (x,), dynamic_shapes=({0: Dim("batch")},)), tmp_path / "net.pt2")
    torch.save(x, tmp_path / "x.pt")
    code = (
        "import torch, torch_linquant\n"
        "y = torch.export.load('net.pt2').module()(torch.load('x.pt'))\n"
        "torch.save(y, 'y.pt')\n"
    )
    package = str(Path(torch_linquant.__file__).parents[1])
    subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, check=True, env={**os.environ, "PYTHONPATH": package}, timeout=120
    )
    assert torch.equal(torch.load(tmp_path / "y.pt"), model(x))


@STRICT
def test_sequences_and_4_bit_weights(strict, tmp_path):
    torch.manual_seed(0)
    observed = prepare(nn.Sequential(nn.Linear(33, 16), nn.GELU(), nn.Linear(16, 5)).eval())
    calibrate(observed, [torch.randn(2, 7, 33)])
    model = convert(observed, weight_dtype="int4", weight_granularity=PerBlock(8, axis=1))
    shapes = ({0: Dim("batch"), 1: Dim("time")},)
    program = torch.export.export(model, (torch.randn(2, 7, 33),), dynamic_shapes=shapes, strict=strict)
    torch.export.save(program, tmp_path / "net.pt2")
    loaded = torch.export.load(tmp_path / "net.pt2").module()
    for shape in ((2, 7, 33), (1, 1, 33), (4, 19, 33)):
        x = torch.randn(shape)
        assert torch.equal(loaded(x), model(x))


def test_another_number_of_channels_is_refused():
    program = torch.export.export(quantized_net(), (torch.randn(2, 3, 6, 6),), dynamic_shapes=({0: Dim("batch")},))
    with pytest.raises((RuntimeError, AssertionError)):
        program.module()(torch.randn(2, 4, 6, 6))
