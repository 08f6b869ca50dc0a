"""ONNX Runtime on the CPU, opset 25, no optimizations: equal bits for every type and granularity that it runs."""

import ctypes

import numpy as np
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor

import torch_linquant as lq
from adversary import nasty
from torch_linquant import resolve

FLOAT = {"f32": torch.float32, "f16": torch.float16}
# What ONNX Runtime hands out one an element.
CASTS = {
    "uint4": TensorProto.UINT8,
    "int4": TensorProto.INT8,
    "uint2": TensorProto.UINT8,
    "int2": TensorProto.INT8,
}
CODES = ["uint8", "int8", "uint16", "int16", "uint4", "int4", "uint2", "int2"]
FLOAT8 = ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"]
# id -> (shape of x, shape of scale, axis, block_size)
GRANULARITIES = {
    "tensor": ((9, 140), (), 1, 0),
    "axis0": ((9, 140), (9,), 0, 0),
    "axis-1": ((9, 140), (140,), -1, 0),
    "axis1of4": ((2, 5, 7, 3), (5,), 1, 0),
    "block32": ((9, 140), (9, 5), 1, 32),
    "block16": ((9, 128), (9, 8), -1, 16),
    "block_first": ((35, 20), (4, 20), 0, 10),
    "block3": ((7, 100), (7, 34), 1, 3),
}


def proto(name: str, t: Tensor, code: str | None = None) -> TensorProto:
    """A tensor as a constant; codes of fewer than 8 bits packed over the whole tensor, as ONNX has them."""
    if code is None:
        number = helper.np_dtype_to_tensor_dtype(t.numpy().dtype)
        return helper.make_tensor(name, number, t.shape, t.numpy().tobytes(), raw=True)
    flat = t.reshape(-1) if resolve(code).bits >= 8 else lq.pack(t.reshape(-1), code)
    data = (flat.view(torch.uint8) if resolve(code).is_float else flat).numpy()
    return helper.make_tensor(name, resolve(code).number, t.shape, data.tobytes(), raw=True)


def run(op: str, inputs: list[TensorProto], attributes: dict, result: int, shape: torch.Size, cast: int = 0) -> bytes:
    """The bytes of the node's result; `cast`: through a Cast to that type first."""
    names = [t.name for t in inputs]
    nodes = [helper.make_node(op, names, ["y"], **attributes)]
    if cast:
        nodes.append(helper.make_node("Cast", ["y"], ["z"], to=cast))
    output = helper.make_tensor_value_info(nodes[-1].output[0], cast or result, shape)
    graph = helper.make_graph(nodes, "g", [], [output], initializer=inputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)], ir_version=11)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    binding.bind_output(output.name)
    session.run_with_iobinding(binding)
    [value] = binding.get_outputs()
    return ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes())


def make(granularity: str, code: str, float_name: str, seed: int = 0):
    """x full of traps, scale, zero point and attributes."""
    x_shape, s_shape, axis, block_size = GRANULARITIES[granularity]
    dtype = FLOAT[float_name]
    generator = torch.Generator().manual_seed(seed)
    info = resolve(code)
    low, high = (-600, 600) if info.is_float else (int(info.qmin), int(info.qmax))
    scale = ((0.5 if info.is_float else 0.0123) * (0.5 + torch.rand(s_shape, generator=generator))).to(dtype)
    x = nasty(int(np.prod(x_shape)), float(scale.reshape(-1)[0]), low, high, seed, dtype).reshape(x_shape)
    zero_point = None
    if not info.is_float:
        zero_point = torch.randint(low, high + 1, s_shape, generator=generator).to(info.storage)
    return x, scale, zero_point, {"axis": axis, "block_size": block_size}


def constants(x, scale, zero_point, code, x_code=None):
    tensors = [proto("x", x, x_code), proto("scale", scale)]
    return tensors if zero_point is None else [*tensors, proto("zero_point", zero_point, code)]


def known_fault(code: str, saturate: bool, q: Tensor) -> Tensor:
    """Where ONNX Runtime 1.32 rounds overflow wrongly: it gives the finite maximum, and NaN for infinity."""
    if saturate:
        return torch.zeros(q.shape, dtype=torch.bool)
    if code == "float8_e4m3fn":
        return (q.abs() >= 480) & (q.abs() < 496)
    return (q.abs() >= 61440) & (q.abs() < 65536) if code == "float8_e5m2" else torch.zeros(q.shape, dtype=torch.bool)


@pytest.mark.parametrize("float_name", FLOAT)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("code", CODES)
def test_quantize(code, granularity, float_name):
    x, scale, zero_point, attributes = make(granularity, code, float_name)
    cast = CASTS.get(code, 0)
    inputs = constants(x, scale, zero_point, code)
    want = run("QuantizeLinear", inputs, attributes, resolve(code).number, x.shape, cast)
    got = lq.quantize_linear(x, scale, zero_point, dtype=code, **attributes)
    assert got.numpy().tobytes() == want


@pytest.mark.parametrize("float_name", FLOAT)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("saturate", [True, False], ids=["saturate", "overflow"])
@pytest.mark.parametrize("code", FLOAT8)
def test_quantize_float8(code, saturate, granularity, float_name):
    x, scale, _, attributes = make(granularity, code, float_name, seed=1)
    node = {**attributes, "saturate": int(saturate), "output_dtype": resolve(code).number}
    raw = run("QuantizeLinear", constants(x, scale, None, code), node, resolve(code).number, x.shape)
    want = torch.frombuffer(bytearray(raw), dtype=torch.uint8).reshape(x.shape)
    got = lq.quantize_linear(x, scale, dtype=code, saturate=saturate, **attributes).view(torch.uint8)
    ones = lq.dequantize_linear(torch.ones(x.shape, dtype=torch.int8), scale, **attributes)
    wrong = known_fault(code, saturate, (x / ones).float())
    assert torch.equal(got[~wrong], want[~wrong])


@pytest.mark.parametrize("float_name", FLOAT)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("code", CODES + FLOAT8)
def test_dequantize(code, granularity, float_name):
    x, scale, zero_point, attributes = make(granularity, code, float_name, seed=2)
    codes = lq.quantize_linear(x, scale, zero_point, dtype=code, **attributes)
    if not resolve(code).is_float:  # every code, not only those near the middle
        codes = torch.arange(codes.numel()).reshape(codes.shape)
        codes = (codes % (resolve(code).qmax - resolve(code).qmin + 1) + resolve(code).qmin).to(resolve(code).storage)
    inputs = constants(codes, scale, zero_point, code, x_code=code)
    number = {"f32": TensorProto.FLOAT, "f16": TensorProto.FLOAT16}[float_name]
    raw = run("DequantizeLinear", inputs, attributes, number, codes.shape)
    want = torch.frombuffer(bytearray(raw), dtype=FLOAT[float_name]).reshape(codes.shape)
    got = lq.dequantize_linear(codes, scale, zero_point, x_dtype=code, **attributes)
    assert torch.equal(got.isnan(), want.isnan())
    bits = torch.int32 if float_name == "f32" else torch.int16
    number_bits = ~got.isnan()
    assert torch.equal(got.view(bits)[number_bits], want.view(bits)[number_bits])


@pytest.mark.parametrize("float_name", FLOAT)
@pytest.mark.parametrize("scale", [0.0, -0.0, -0.25, 1e-40, 3e38, float("inf"), float("nan"), 2.0**-126])
@pytest.mark.parametrize("code", ["uint8", "int8", "int16", "uint4"])
def test_quantize_degenerate_scale(code, scale, float_name):
    x = nasty(4000, 0.25, -300, 300, 3, FLOAT[float_name])
    s = torch.tensor(scale).to(FLOAT[float_name])
    zero_point = torch.tensor(1, dtype=resolve(code).storage)
    inputs = constants(x, s, zero_point, code)
    want = run("QuantizeLinear", inputs, {}, resolve(code).number, x.shape, CASTS.get(code, 0))
    assert lq.quantize_linear(x, s, zero_point, dtype=code).numpy().tobytes() == want


@pytest.mark.parametrize("seed", range(40))
def test_dynamic_quantize(seed):
    generator = torch.Generator().manual_seed(seed)
    n = int(torch.randint(1, 3000, (), generator=generator))
    x = torch.randn(n, generator=generator) * 10.0 ** float(torch.randn((), generator=generator) * 8)
    x = x if seed % 3 else x.abs() * (-1 if seed % 2 else 1)
    x = x if seed else torch.zeros(n)
    inputs = [proto("x", x)]
    nodes = [helper.make_node("DynamicQuantizeLinear", ["x"], ["y", "scale", "zero_point"])]
    outputs = [helper.make_empty_tensor_value_info(name) for name in ("y", "scale", "zero_point")]
    graph = helper.make_graph(nodes, "g", [], outputs, initializer=inputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)], ir_version=11)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    for got, want in zip(lq.dynamic_quantize_linear(x), session.run(None, {}), strict=True):
        assert got.numpy().tobytes() == want.tobytes()
