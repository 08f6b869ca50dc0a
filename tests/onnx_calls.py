"""From ONNX's nodes and tensors to calls of torch.ops.linquant."""

from typing import Any

import ml_dtypes
import numpy as np
import torch
from onnx import TensorProto, numpy_helper
from torch import Tensor

import torch_linquant  # noqa: F401

ops = torch.ops.linquant
FLOATS = {TensorProto.FLOAT: torch.float32, TensorProto.FLOAT16: torch.float16, TensorProto.BFLOAT16: torch.bfloat16}
FLOAT8 = {
    TensorProto.FLOAT8E4M3FN: torch.float8_e4m3fn,
    TensorProto.FLOAT8E4M3FNUZ: torch.float8_e4m3fnuz,
    TensorProto.FLOAT8E5M2: torch.float8_e5m2,
    TensorProto.FLOAT8E5M2FNUZ: torch.float8_e5m2fnuz,
}
SUB_BYTE = {
    TensorProto.UINT4: np.uint8,
    TensorProto.INT4: np.int8,
    TensorProto.UINT2: np.uint8,
    TensorProto.INT2: np.int8,
}


def to_torch(t: TensorProto) -> Tensor:
    """The tensor in the storage that the ops take: sub-byte codes one an element, floats of 8 bits as themselves."""
    array = numpy_helper.to_array(t)
    if t.data_type in FLOAT8:
        return torch.from_numpy(array.view(np.uint8).copy()).view(FLOAT8[t.data_type])
    if t.data_type == TensorProto.FLOAT4E2M1:
        return torch.from_numpy(array.astype(ml_dtypes.float4_e2m1fn).view(np.uint8).copy())
    if t.data_type == TensorProto.BFLOAT16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(array, dtype=SUB_BYTE.get(t.data_type, array.dtype)))


def codes_of(t: "Tensor | TensorProto") -> np.ndarray:
    """Codes as integers; float8 and float4 by their bits."""
    if isinstance(t, TensorProto):
        t = to_torch(t)
    return (t.view(torch.uint8) if "float8" in str(t.dtype) else t).numpy()


def granularity(attributes: dict[str, Any]) -> dict[str, Any]:
    return {"axis": attributes.get("axis", 1), "block_size": attributes.get("block_size", 0)}


def call_quantize(inputs: list[TensorProto], attributes: dict[str, Any]) -> list[Tensor]:
    x, scale, *zero_point = inputs
    number = attributes.get("output_dtype", 0) or (zero_point[0].data_type if zero_point else TensorProto.UINT8)
    options = {"saturate": bool(attributes.get("saturate", 1)), "precision": attributes.get("precision", 0)}
    zero = to_torch(zero_point[0]) if zero_point else None
    return [
        ops.quantize_linear(
            to_torch(x), to_torch(scale), zero, output_dtype=number, **granularity(attributes), **options
        )
    ]


def call_dequantize(inputs: list[TensorProto], attributes: dict[str, Any]) -> list[Tensor]:
    x, scale, *zero_point = inputs
    number = x.data_type if x.data_type in SUB_BYTE or x.data_type == TensorProto.FLOAT4E2M1 else 0
    zero = to_torch(zero_point[0]) if zero_point else None
    options = {"output_dtype": attributes.get("output_dtype", 0), "x_dtype": number}
    return [ops.dequantize_linear(to_torch(x), to_torch(scale), zero, **granularity(attributes), **options)]


def call_dynamic(inputs: list[TensorProto], attributes: dict[str, Any]) -> list[Tensor]:
    return list(ops.dynamic_quantize_linear(to_torch(inputs[0])))
