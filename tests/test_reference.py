"""The NumPy model against implementations that nobody here wrote."""

import ml_dtypes
import numpy as np
import pytest

import reference as ref

FLOATS = {
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "float8_e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "float4_e2m1": ml_dtypes.float4_e2m1fn,
}


def hard_floats(n=200_000) -> np.ndarray:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, n, dtype=np.uint64).astype(np.uint32)
    # Short mantissas are ties and codes; their neighbours follow.
    short = bits & np.uint32(0xFFF00000)
    values = np.concatenate([bits, short, short + np.uint32(1), short - np.uint32(1)]).view(np.float32)
    with np.errstate(invalid="ignore"):  # signalling NaN
        return values.astype(np.float64)


@pytest.mark.parametrize("name", FLOATS)
def test_codes_decode(name):
    count = 16 if name == "float4_e2m1" else 256
    codes = np.arange(count, dtype=np.uint8)
    want = codes.view(FLOATS[name]).astype(np.float64)
    np.testing.assert_array_equal(ref.decode_float(codes, name), want)
    assert (np.signbit(ref.decode_float(codes, name)) == np.signbit(want))[~np.isnan(want)].all()


@pytest.mark.parametrize("name", FLOATS)
def test_floats_encode(name):
    q = hard_floats()
    q = q[~np.isnan(q)]
    with np.errstate(over="ignore"):
        want = q.astype(np.float32).astype(FLOATS[name])
    got = ref.encode_float(q, name, saturate=name == "float4_e2m1")
    same = got == want.view(np.uint8)
    both_nan = np.isnan(want.astype(np.float32)) & np.isnan(ref.decode_float(got, name))
    assert (same | both_nan).all()


@pytest.mark.parametrize(
    ("name", "largest"), [("float8_e4m3fn", 448), ("float8_e5m2", 57344), ("float8_e4m3fnuz", 240)]
)
def test_saturation(name, largest):
    q = np.array([1e9, np.inf, -np.inf, largest * 1.04, -largest * 2])
    got = ref.decode_float(ref.encode_float(q, name, saturate=True), name)
    np.testing.assert_array_equal(got, np.sign(q) * largest)


def test_narrow_floats():
    v = hard_floats()
    with np.errstate(over="ignore"):
        half = v.astype(np.float32).astype(np.float16).astype(np.float64)
        brain = v.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)
    np.testing.assert_array_equal(ref.round_to(v, "float16"), half)
    np.testing.assert_array_equal(ref.round_to(v, "bfloat16"), brain)


def test_table_of_the_standard():
    """Saturation of e4m3fn as ONNX's table has it."""
    q = np.array([1000, 448, 464, 465, np.inf, np.nan])
    assert ref.encode_float(q, "float8_e4m3fn", True).tolist() == [0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0x7F]
    assert ref.encode_float(q, "float8_e4m3fn", False).tolist() == [0x7F, 0x7E, 0x7E, 0x7F, 0x7F, 0x7F]
    q = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 5.1, np.nan, -0.0, -9])
    assert ref.encode_float(q, "float4_e2m1", True).tolist() == [0, 2, 2, 4, 4, 6, 6, 7, 7, 8, 15]
