"""dynamic_quantize against what oneDNN 3.13 answered, recorded by oracles/record_onednn.py."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import torch_linquant as lq

ANSWERS = json.loads((Path(__file__).parent / "data" / "onednn_answers.json").read_text())


def tensor(answer: dict, key: str, dtype: str, shape: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(bytes.fromhex(answer[key]), dtype=dtype).reshape(shape).copy())


def name(a: dict) -> str:
    return f"{a['dtype']}-zp_{a['zp_type']}-{a['qtype']}-{'x'.join(map(str, a['shape']))}"


@pytest.mark.parametrize("answer", [pytest.param(a, id=f"{i}-{name(a)}") for i, a in enumerate(ANSWERS)])
def test_recorded_answer(answer):
    shape, axis = answer["shape"], answer["axis"]
    x, scales = tensor(answer, "x", "float32", shape), tensor(answer, "scales", "float32", [-1])
    zps = None if answer["zps"] is None else tensor(answer, "zps", answer["zp_type"], [-1])
    want = tensor(answer, "y", answer["dtype"], shape)
    dtype = getattr(torch, answer["dtype"])
    per_tensor = answer["qtype"] == "per_tensor"
    for given in (axis, axis - len(shape)):
        got = lq.dynamic_quantize(x, scales, zps, qtype=answer["qtype"], axis=given, dtype=dtype)
        assert torch.equal(got, want)
    assert torch.equal(lq.dynamic_quantize(x, scales, zps, mask=0 if per_tensor else 1 << axis, dtype=dtype), want)


def test_answers_tell_the_arithmetics_apart():
    """Division in the place of the reciprocal's product gives other codes in most answers."""
    differ = 0
    for a in ANSWERS:
        x, scale = tensor(a, "x", "float32", a["shape"]), tensor(a, "scales", "float32", [-1])
        zero_point = None if a["zps"] is None else tensor(a, "zps", a["zp_type"], [-1])
        got = lq.quantize_linear(x, scale, zero_point, axis=a["axis"], dtype=a["dtype"])
        differ += not torch.equal(got, tensor(a, "y", a["dtype"], a["shape"]))
    assert differ > 15


def test_there_are_answers_of_every_kind():
    """oneDNN itself refuses zero points per channel: 24 of the 50 calls that the recorder makes."""
    assert len(ANSWERS) == 26
    assert {(a["dtype"], a["zp_type"]) for a in ANSWERS} == {
        (d, z) for d in ("int8", "uint8") for z in (None, "int8", "uint8", "int32")
    }
