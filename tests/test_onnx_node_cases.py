"""ONNX's own single-operator cases of QuantizeLinear, DequantizeLinear and DynamicQuantizeLinear, byte for byte."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper
from onnx.backend.test.loader import load_model_tests

from onnx_calls import call_dequantize, call_dynamic, call_quantize, codes_of

OPS = {"QuantizeLinear": call_quantize, "DequantizeLinear": call_dequantize, "DynamicQuantizeLinear": call_dynamic}


def load_cases() -> dict:
    cases = {}
    for case in load_model_tests(kind="node"):
        if len(case.model.graph.node) == 1 and case.model.graph.node[0].op_type in OPS:
            [(inputs, outputs)] = case.data_sets
            cases[case.name.removeprefix("test_")] = (case.model.graph.node[0], as_tensors(inputs), as_tensors(outputs))
    return cases


def as_tensors(values) -> list[TensorProto]:
    return [v if isinstance(v, TensorProto) else numpy_helper.from_array(v) for v in values]


CASES = load_cases()


def test_all_cases_are_here():
    assert [sum(node.op_type == op for node, _, _ in CASES.values()) for op in OPS] == [13, 14, 3]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_case(case):
    node, inputs, outputs = case
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    for result, want in zip(OPS[node.op_type](inputs, attributes), outputs, strict=True):
        if want.data_type in (TensorProto.FLOAT, TensorProto.FLOAT16):
            assert result.numpy().tobytes() == numpy_helper.to_array(want).tobytes()
        else:
            np.testing.assert_array_equal(codes_of(result), codes_of(want))
