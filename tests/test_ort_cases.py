"""The numbers of ONNX Runtime's own unit tests, replayed: what succeeds there must be equal, what fails be refused.

The table of cases is not part of this repository. It is looked for where LINQUANT_ORT_CASES says, else beside the
repository, in shared/cases/ort_cases.json.
"""

import json
import math
import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

from torch_linquant import resolve

FILE = Path(os.environ.get("LINQUANT_ORT_CASES", Path(__file__).parents[2] / "shared" / "cases" / "ort_cases.json"))
CASES = json.loads(FILE.read_text()) if FILE.is_file() else []
ABSENT = pytest.mark.skipif(not CASES, reason=f"there is no table of ONNX Runtime's cases at {FILE}")

FLOATS = {"float32": torch.float32, "float16": torch.float16}


# Cases whose source writes values with fewer digits than the type has.
ROUNDED = {
    "QuantizeLinearOpTest.DynamicQuantizeLinear_Min_Adjusted",
    "QuantizeLinearOpTest.DynamicQuantizeLinear_Max_Adjusted",
    "js.dequantizelinear block dequantization.int32 3D blocked no zero point",
    "js.dequantizelinear block dequantization.int32 3D blocked with zero point",
}


def tensor(t: dict | None) -> torch.Tensor | None:
    if t is None:
        return None
    name, dims, data = t["dtype"], t["dims"], t["data"]
    if name.startswith("float8"):
        values = np.array([float(v) for v in data], dtype=np.float32).astype(getattr(ml_dtypes, name))
        return torch.from_numpy(values.view(np.uint8)).view(getattr(torch, name)).reshape(dims)
    dtype = FLOATS.get(name) or resolve(name).storage
    return torch.tensor([float(v) for v in data] if name in FLOATS else data, dtype=dtype).reshape(dims)


def values(t: torch.Tensor) -> list[float]:
    return t.float().flatten().tolist()


def refused_by_onnx(case: dict) -> str | None:
    """What ONNX's rules forbid and the ops, which are wider, do not."""
    out = case["outputs"][0]["dtype"]
    if case["op"] == "QuantizeLinear" and out == "int32":
        return "int32 is no output type of QuantizeLinear"
    return None


def run(case: dict) -> list[torch.Tensor]:
    inputs = [tensor(t) for t in case["inputs"]]
    if case["op"] == "DynamicQuantizeLinear":
        return list(torch.ops.linquant.dynamic_quantize_linear(inputs[0]))
    x, scale, zero_point = [*inputs, None][:3]
    attrs = case["attrs"]
    options = {"axis": attrs.get("axis", 1), "block_size": attrs.get("block_size", 0)}
    if case["op"] == "QuantizeLinear":
        code = resolve(case["outputs"][0]["dtype"])
        # Up to opset 22 float16 is divided in float32.
        precision = 1 if case["opset"] < 23 else attrs.get("precision", 0)
        options |= {"output_dtype": code.number, "saturate": bool(attrs.get("saturate", 1)), "precision": precision}
        return [torch.ops.linquant.quantize_linear(x, scale, zero_point, **options)]
    options["x_dtype"] = resolve(case["inputs"][0]["dtype"]).number
    return [torch.ops.linquant.dequantize_linear(x, scale, zero_point, **options)]


def equal(got: list[float], want: list[float], tolerance: float) -> bool:
    pairs = zip(got, want, strict=True)
    return all(math.isclose(a, b, rel_tol=tolerance) or (math.isnan(a) and math.isnan(b)) for a, b in pairs)


@ABSENT
def test_table_is_whole():
    succeed = [case for case in CASES if case["expect"] == "success"]
    refused = [case for case in CASES if case["expect"] != "success"]
    assert (len(succeed), len(refused)) == (562, 132)
    assert sum(refused_by_onnx(case) is not None for case in refused) == 6
    assert not any(refused_by_onnx(case) for case in succeed)


@ABSENT
@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_case(case):
    if case["expect"] != "success":
        if refused_by_onnx(case) is None:
            with pytest.raises(RuntimeError, match=r"_linear: \w+ must "):
                run(case)
        return
    for got, want in zip(run(case), case["outputs"], strict=True):
        assert list(got.shape) == want["dims"]
        assert equal(values(got), values(tensor(want)), 1e-5 if case["name"] in ROUNDED else 0.0)
