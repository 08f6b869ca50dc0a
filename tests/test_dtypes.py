"""Names, numbers and ranges of the types, held against PyTorch's, NumPy's and ONNX's own."""

import ml_dtypes
import numpy as np
import pytest
import torch
from onnx import TensorProto

from torch_linquant import QUANT_DTYPES, resolve

ONNX_NAMES = {"float4_e2m1": "FLOAT4E2M1"}


@pytest.mark.parametrize("code", QUANT_DTYPES, ids=lambda code: code.name)
def test_type(code):
    onnx_name = ONNX_NAMES.get(code.name, code.name.upper().replace("FLOAT8_", "FLOAT8"))
    assert code.number == TensorProto.DataType.Value(onnx_name)
    assert resolve(code.name) is resolve(code.number) is resolve(code) is code
    limits = (ml_dtypes.finfo if code.is_float else ml_dtypes.iinfo)(
        getattr(ml_dtypes, code.name + "fn" * (code.name == "float4_e2m1"), None) or np.dtype(code.name)
    )
    assert (code.qmin, code.qmax) == (float(limits.min), float(limits.max))
    assert code.bits == limits.bits
    assert code.storage.itemsize == max(1, code.bits // 8)
    assert code.signed == (limits.min < 0)


@pytest.mark.parametrize("name", ["uint8", "int8", "int32", "float8_e5m2", "int4", "uint4", "int2", "uint2"])
def test_torch_dtypes(name):
    assert resolve(getattr(torch, name)).name == name


def test_float4_of_torch():
    assert resolve(torch.float4_e2m1fn_x2).name == "float4_e2m1"


@pytest.mark.parametrize("bad", ["int5", "", 1, True, None, torch.float32, torch.int64, 3.0])
def test_no_such_type(bad):
    with pytest.raises(ValueError, match="dtype must be one of uint8, int8, .*, but got "):
        resolve(bad)
