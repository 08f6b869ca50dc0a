"""Every instruction set, number of threads and split gives the same bits as the general engine on one thread."""

import math
import threading

import pytest
import torch

import torch_linquant as lq
from adversary import nasty
from samples import Sample, all_samples, cpu_variants

SAMPLES = [pytest.param(sample, id=f"{sample.op}-{sample.id}") for sample in all_samples()]
GENERAL, BASELINE, *_ = VARIANTS = cpu_variants()


def bits(result) -> list[torch.Tensor]:
    results = result if isinstance(result, tuple) else (result,)
    return [r.contiguous().view(-1).view(torch.uint8) for r in results]


@pytest.fixture
def settings():
    """Sets (variant, threads); afterwards both are what they were."""
    variant, threads = torch.ops.linquant._cpu_variant(), torch.get_num_threads()

    def apply(new_variant: int, new_threads: int = 1) -> None:
        torch.set_num_threads(new_threads)
        assert torch.ops.linquant._cpu_variant(new_variant) == new_variant

    yield apply
    torch.ops.linquant._cpu_variant(variant)
    torch.set_num_threads(threads)


def assert_all_equal(settings, call) -> None:
    settings(GENERAL)
    want = bits(call())
    for variant in VARIANTS[1:]:
        for threads in (1, 2, 3, 5):
            settings(variant, threads)
            got = bits(call())
            assert all(map(torch.equal, got, want)), f"variant {variant}, {threads} threads"


def test_this_machine_has_more_than_one_variant(settings):
    assert [GENERAL, BASELINE] == [0, 1]
    with pytest.raises(RuntimeError, match="variant"):
        settings(7)


@pytest.mark.parametrize("sample", SAMPLES)
def test_samples(sample: Sample, settings):
    assert_all_equal(settings, sample)


def observed(x, granularity):
    shape = granularity.scale_shape(x.shape)
    state = torch.full(shape, math.inf), torch.full(shape, -math.inf), torch.zeros((), dtype=torch.int64)
    counts = torch.zeros((*shape, 8192), dtype=torch.int64)
    torch.ops.linquant.observe_(x, *state, counts, **granularity.reduce_args(x.dim()))
    return *state, counts


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int32], ids=str)
def test_observe(dtype, settings):
    x = nasty(210_001, 0.7, -128, 127)
    x = x.to(dtype) if dtype.is_floating_point else x.nan_to_num(3.0).clamp(-1e9, 1e9).to(dtype)
    for shape, granularity in [
        ((210_001,), lq.PerTensor()),
        ((70_000, 3), lq.PerAxis(1)),
        ((3, 70_000), lq.PerAxis(0)),
        ((5_250, 40), lq.PerAxis(1)),
    ]:
        part = x[: math.prod(shape)].reshape(shape)
        assert_all_equal(settings, lambda part=part, granularity=granularity: observed(part, granularity))


# Large enough to be shared among threads, and odd, so that pieces end inside blocks and vectors.
SHAPES = {
    "tensor": ((333_337,), (), 0, 0),
    "axis0": ((37, 9_011), (37,), 0, 0),
    "axis-1": ((9_011, 37), (37,), 1, 0),
    "axis-1-long": ((37, 9_011), (9_011,), 1, 0),
    "axis1of3": ((3, 131, 857), (131,), 1, 0),
    "block16": ((37, 9_011), (37, 564), 1, 16),
    "block32": ((37, 9_011), (37, 282), 1, 32),
    "block70": ((37, 9_011), (37, 129), 1, 70),
    "block3": ((37, 9_011), (37, 3_004), 1, 3),
    "block32_first": ((9_011, 37), (282, 37), 0, 32),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("code", ["uint8", "int16", "int4", "uint2", "float8_e4m3fn", "float8_e5m2", "float4_e2m1"])
def test_large(code, shape, settings):
    x_shape, s_shape, axis, block_size = SHAPES[shape]
    grain = {"axis": axis, "block_size": block_size}
    generator = torch.Generator().manual_seed(0)
    scale = torch.rand(s_shape, generator=generator) + 0.01
    size = torch.Size(x_shape).numel()
    for dtype in (torch.float32, torch.float16):
        x = nasty(size, 0.5, -300, 300, dtype=dtype).reshape(x_shape)
        assert_all_equal(settings, lambda x=x: lq.quantize_linear(x, scale, dtype=code, **grain))
        assert_all_equal(settings, lambda x=x: lq.fake_quantize_linear(x, scale, dtype=code, **grain))
    q = lq.quantize_linear(x, scale, dtype=code, **grain)
    assert_all_equal(settings, lambda: lq.dequantize_linear(q, scale, x_dtype=code, **grain))
    if lq.resolve(code).bits < 8:
        packed = lq.quantize_linear(x, scale, dtype=code, packed=True, **grain)
        size = x_shape[-1]
        assert_all_equal(settings, lambda: lq.quantize_linear(x, scale, dtype=code, packed=True, **grain))
        assert_all_equal(settings, lambda: lq.dequantize_linear(packed, scale, x_dtype=code, packed_size=size, **grain))
        assert_all_equal(settings, lambda: (lq.pack(q, code), lq.unpack(packed, code, size)))


@pytest.mark.parametrize("shape", SHAPES)
def test_large_reductions(shape, settings):
    x_shape, s_shape, axis, block_size = SHAPES[shape]
    axis = axis if s_shape else None
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        x = nasty(torch.Size(x_shape).numel(), 0.5, -300, 300, dtype=dtype).reshape(x_shape)
        grain = {"axis": axis, "block_size": block_size}
        assert_all_equal(settings, lambda x=x, grain=grain: lq.min_max(x, **grain))
        assert_all_equal(settings, lambda x=x, grain=grain: lq.dynamic_quantize_linear(x, **grain))


def test_division_by_a_corrected_product_is_ieee_division(settings):
    """Blocks whose scale allows it are divided without a division instruction: same codes for any mantissa."""
    generator = torch.Generator().manual_seed(3)
    for round_ in range(20):
        exponent = torch.randint(-90, 90, (64, 1), generator=generator)
        scale = torch.ldexp(1 + torch.rand(64, 1, generator=generator), exponent)
        halves = torch.randint(-600, 600, (64, 4096), generator=generator) / 2
        x = (halves.double() * scale.double()).float()
        x = (x.view(torch.int32) + torch.randint(-2, 3, x.shape, generator=generator, dtype=torch.int32)).view(
            torch.float32
        )
        assert_all_equal(settings, lambda x=x, s=scale: lq.quantize_linear(x, s, dtype="int8", block_size=4096))
        exact = torch.round(x / scale).nan_to_num(-128.0).clamp(-128, 127)
        got = lq.quantize_linear(x, scale, dtype="int8", block_size=4096)
        assert torch.equal(got.float(), exact), round_


def test_flushing_subnormal_numbers_changes_nothing(settings):
    """torch.set_flush_denormal reaches one thread of the pool only: all must compute alike, as IEEE has it."""
    x = torch.full((1 << 20,), 0x400000, dtype=torch.int32).view(torch.float32)
    x[1::2] *= -1
    brain = torch.full((1 << 20,), 0x0040, dtype=torch.int16).view(torch.bfloat16)
    tiny = torch.tensor(0, dtype=torch.uint8).view(torch.float8_e8m0fnu)

    def results():
        yield lq.quantize_linear(x, x[0].clone(), dtype="int8")
        yield lq.quantize_linear(x, x[0].clone(), dtype="float8_e4m3fn").view(torch.uint8)
        yield lq.quantize_linear(brain, brain[0].clone(), dtype="int32")
        yield lq.quantize_linear(x, tiny, dtype="int8")
        yield lq.dequantize_linear(torch.ones(1 << 20, dtype=torch.int8), tiny).view(torch.int32)
        yield torch.stack(lq.min_max(x)).view(torch.int32)
        yield lq.dynamic_quantize_linear(x)[0]

    for variant in VARIANTS:
        settings(variant, 2)
        want = list(results())
        torch.set_flush_denormal(True)
        try:
            got = list(results())
        finally:
            torch.set_flush_denormal(False)
        assert all(map(torch.equal, got, want))
    assert want[0].unique().tolist() == [-1, 1]


def test_threads_with_small_stacks(settings):
    settings(torch.ops.linquant._cpu_variant(), 1)
    x, scale = torch.randn(1000, 103), torch.rand(1000) + 0.01
    want = lq.quantize_linear(x, scale, dtype="int8", axis=0)
    got = []

    def work():
        torch.set_num_threads(1)
        got.append(lq.quantize_linear(x, scale, dtype="int8", axis=0))
        got.append(lq.quantize_linear(x.double(), scale.double(), dtype="int8", axis=0))
        got.append(lq.min_max(x.t(), axis=0)[0])

    before = threading.stack_size(128 * 1024)
    try:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    finally:
        threading.stack_size(before)
    assert len(got) == 3 and torch.equal(got[0], want)
