"""arithmetic="onednn" against OpenVINO's FakeQuantize on the CPU, which is how its models quantize."""

import numpy as np
import pytest
import torch

import torch_linquant as lq
from adversary import nasty

ov = pytest.importorskip("openvino", reason="openvino has no wheel for this machine")


def openvino_codes(x: np.ndarray, scale: np.ndarray, zero_point: np.ndarray) -> np.ndarray:
    """uint8 codes of FakeQuantize, which is given the ends of the range; parameters broadcast against x."""
    ops = ov.opset13
    ends = [((q - zero_point.astype(np.float64)) * scale).astype(np.float32) for q in (0, 255)]
    source = ops.parameter(list(x.shape), ov.Type.f32)
    codes = [ops.constant(np.float32(q)) for q in (0, 255)]
    fake = ops.fake_quantize(source, *map(ops.constant, ends), *codes, 256)
    model = ov.Model([ops.convert(fake, "u8")], [source])
    return ov.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})(x)[0]


def parameters(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Scales and zero points that FakeQuantize finds again in the ends of the range.

    Scales of few significant bits, for the ends to be exact, and zero points that -low * (1 / scale) gives exactly.
    """
    scale = (rng.integers(2**11, 2**12, 1000) * 2.0 ** rng.integers(-20, -8, 1000)).astype(np.float32)
    zero_point = rng.integers(0, 256, 1000).astype(np.uint8)
    exact = np.float32(zero_point * scale) * (np.float32(1) / scale) == zero_point
    return scale[exact][:count], zero_point[exact][:count]


@pytest.mark.parametrize("seed", range(12))
def test_per_tensor(seed):
    (scale,), (zero_point,) = parameters(np.random.default_rng(seed), 1)
    x = nasty(5000, float(scale), -int(zero_point) - 9, 264 - int(zero_point), seed)
    x = x[torch.isfinite(x)].reshape(1, -1)
    want = openvino_codes(x.numpy(), scale, zero_point)
    scale, zero_point = torch.tensor(scale), torch.tensor(zero_point)
    got = lq.quantize_linear(x, scale, zero_point, arithmetic="onednn")
    np.testing.assert_array_equal(got.numpy(), want)
    assert (lq.quantize_linear(x, scale, zero_point).numpy() != want).any()


def test_per_axis():
    rng = np.random.default_rng(7)
    scale, zero_point = parameters(rng, 6)
    halves = rng.integers(-600, 1100, (3, 6, 500)) / 2
    x = (halves * scale[:, None]).astype(np.float32)
    want = openvino_codes(x, scale[:, None], zero_point[:, None])
    got = lq.quantize_linear(
        torch.from_numpy(x), torch.from_numpy(scale), torch.from_numpy(zero_point), arithmetic="onednn"
    )
    np.testing.assert_array_equal(got.numpy(), want)


def test_int8_is_openvinos_uint8_moved():
    """Its signed FakeQuantize rounds before it moves the range, so oneDNN's int8 codes are not its oracle."""
    x, scale = torch.tensor([[-34.500004, 8.500001]]), torch.tensor(1.0)
    moved = lq.quantize_linear(x, scale, torch.tensor(130, dtype=torch.uint8), arithmetic="onednn").short() - 128
    np.testing.assert_array_equal(moved.numpy() + 128, openvino_codes(x.numpy(), np.float32(1), np.uint8(130)))
    got = lq.quantize_linear(x, scale, torch.tensor(2, dtype=torch.int8), arithmetic="onednn")
    assert (got.tolist(), moved.tolist()) == ([[-33, 11]], [[-32, 10]])
