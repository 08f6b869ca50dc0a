"""The algebra of quantization, for any input that hypothesis finds."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import torch_linquant as lq

INTEGERS = [t.name for t in lq.QUANT_DTYPES if not t.is_float]
FLOATS = [t.name for t in lq.QUANT_DTYPES if t.is_float]
f32 = st.floats(width=32)
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
usual_scales = st.floats(2.0**-60, 2.0**60, width=32)
lists = st.lists(f32, min_size=1, max_size=80)
common = settings(deadline=None, max_examples=150)


@st.composite
def zero_points(draw, code):
    info = lq.resolve(code)
    if info.is_float:
        return None
    # Beyond 2^22 a zero point of int32 would round in (y - zp) * scale.
    low, high = max(int(info.qmin), -(2**20)), min(int(info.qmax), 2**20)
    return torch.tensor(draw(st.integers(low, high)), dtype=info.storage)


@pytest.mark.parametrize("code", INTEGERS + FLOATS)
@common
@given(data=st.data(), xs=lists, scale=usual_scales)
def test_quantizing_again_changes_nothing(code, data, xs, scale):
    """quantize(dequantize(q)) == q, and fake quantize is idempotent."""
    scale, zero_point = torch.tensor(scale), data.draw(zero_points(code))
    q = lq.quantize_linear(torch.tensor(xs), scale, zero_point, dtype=code)
    back = lq.dequantize_linear(q, scale, zero_point, x_dtype=code)
    exact = q.to(torch.float32).double() == q.double() if code == "int32" else torch.ones_like(back, dtype=torch.bool)
    again = lq.quantize_linear(back, scale, zero_point, dtype=code)
    same = lq.dequantize_linear(again, scale, zero_point, x_dtype=code)
    # int32 codes beyond 24 bits round in float32.
    assert torch.equal(same[exact].nan_to_num(), back[exact].nan_to_num())
    if code != "int32":
        fake = lq.fake_quantize_linear(torch.tensor(xs), scale, zero_point, dtype=code)
        assert torch.equal(lq.fake_quantize_linear(fake, scale, zero_point, dtype=code).nan_to_num(), fake.nan_to_num())


@pytest.mark.parametrize("arithmetic", ["onnx", "onednn", "executorch"])
@pytest.mark.parametrize("code", INTEGERS)
@common
@given(data=st.data(), xs=st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=80), scale=usual_scales)
def test_monotone_and_inside_the_range(code, arithmetic, data, xs, scale):
    zero_point = data.draw(zero_points(code))
    x = torch.tensor(xs).sort().values
    q = lq.quantize_linear(x, torch.tensor(scale), zero_point, dtype=code, arithmetic=arithmetic).long()
    info = lq.resolve(code)
    assert (q.diff() >= 0).all()
    assert q.min() >= info.qmin and q.max() <= info.qmax


@pytest.mark.parametrize("code", FLOATS)
@common
@given(xs=st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=80), scale=usual_scales)
def test_float_codes_are_monotone(code, xs, scale):
    values = lq.fake_quantize_linear(torch.tensor(xs).sort().values, torch.tensor(scale), dtype=code)
    assert (values.diff().nan_to_num(nan=-1.0) >= 0).all()


@pytest.mark.parametrize("code", [c for c in INTEGERS if c != "int32"])
@common
@given(data=st.data(), xs=st.lists(finite, min_size=1, max_size=80), scale=usual_scales)
def test_error_is_at_most_half_a_step(code, data, xs, scale):
    """Where the code is not an end of the range. Slack: the quotient and the product round, at most 2^-24 each."""
    zero_point = data.draw(zero_points(code))
    x, s = torch.tensor(xs), torch.tensor(scale)
    q = lq.quantize_linear(x, s, zero_point, dtype=code)
    info = lq.resolve(code)
    inside = (q.long() > info.qmin) & (q.long() < info.qmax)
    error = (lq.dequantize_linear(q, s, zero_point, x_dtype=code).double() - x.double()).abs()
    bound = 0.5 * s.double() * (1 + 2.0**-22) + x.double().abs() * 2.0**-22
    assert (error[inside] <= bound[inside]).all()


@common
@given(xs=st.lists(finite, min_size=1, max_size=60), symmetric=st.booleans(), code=st.sampled_from(INTEGERS[:4]))
def test_quantize_tensor_covers_its_range(xs, symmetric, code):
    """No element is further from its value than half a step (one where the zero point rounds)."""
    x = torch.tensor(xs)
    q, scale, zero_point = lq.quantize_tensor(x, code, symmetric=symmetric)
    assert math.isfinite(scale.item()) and scale.item() > 0
    assume(scale.item() > 2.0**-100 and x.abs().max() < 2.0**127)  # beyond: the value of a code may overflow
    error = (lq.dequantize_linear(q, scale, zero_point).double() - x.double()).abs()
    assert (error <= scale.double() * 1.001 + x.double().abs() * 2.0**-22).all()


@pytest.mark.parametrize("code", ["uint4", "int4", "float4_e2m1", "uint2", "int2"])
@common
@given(codes=st.lists(st.integers(-128, 127), max_size=40))
def test_unpack_inverts_pack(code, codes):
    info = lq.resolve(code)
    x = torch.tensor(codes, dtype=torch.int8)
    got = lq.unpack(lq.pack(x, code), code, len(codes))
    assert torch.equal(got.int() & (2**info.bits - 1), x.int() & (2**info.bits - 1))
    assert torch.equal(lq.pack(got, code), lq.pack(x, code))


@common
@given(xs=lists, scale=f32, zero_point=st.integers(-(2**63), 2**63 - 1), code=st.sampled_from(INTEGERS))
def test_any_scale_and_zero_point_give_codes_in_range(xs, scale, zero_point, code):
    info = lq.resolve(code)
    for arithmetic in ("onnx", "onednn", "executorch"):
        q = lq.quantize_linear(
            torch.tensor(xs), torch.tensor(scale), torch.tensor(zero_point), dtype=code, arithmetic=arithmetic
        ).long()
        assert q.min() >= info.qmin and q.max() <= info.qmax


@common
@given(xs=lists, n=st.integers(1, 9), scale=usual_scales)
def test_a_block_for_all_is_per_tensor(xs, n, scale):
    """Granularities that say the same give the same bits."""
    x = torch.tensor(xs)
    want = lq.quantize_linear(x, torch.tensor(scale), dtype="int8")
    blocks = torch.full((-(-len(xs) // n),), scale)
    assert torch.equal(lq.quantize_linear(x, blocks, dtype="int8", axis=0, block_size=n), want)
    assert torch.equal(lq.quantize_linear(x, torch.full(x.shape, scale), dtype="int8", axis=0), want)
    rows = x.reshape(1, -1)
    assert torch.equal(lq.quantize_linear(rows, torch.full((1, 1), scale), dtype="int8", block_size=[1, 0]), want[None])
