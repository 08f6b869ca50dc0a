"""Gradients against a formulation in plain PyTorch, in reverse and forward mode, of higher order, and under torch.func.

The reference detaches what is held constant and lets PyTorch differentiate the rest. It shares no code with the
package: granularity by indices, rounding by torch.
"""

import itertools

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import torch_linquant as lq
from samples import GRANULARITIES, cpu_variants

OPS = torch.ops.linquant
CODES = ["uint8", "int8", "int4", "int16", "uint2", "float8_e4m3fn", "float8_e5m2", "float4_e2m1"]


def index_of(x_shape, s_shape, axis, block_size) -> Tensor:
    """For each element of x the number of its scale."""
    numbers = torch.arange(torch.Size(s_shape).numel()).reshape(s_shape)
    rank = len(x_shape)
    if len(block_size) == rank and rank > 1 or block_size[0] > 0:
        blocks = list(block_size) if len(block_size) > 1 else [1] * rank
        if len(block_size) == 1:
            blocks[axis] = block_size[0]
        for d, block in enumerate(blocks):
            places = torch.arange(x_shape[d]) // (block or max(x_shape[d], 1))
            numbers = numbers.index_select(d, places)
        return numbers
    if numbers.numel() == 1:
        return torch.zeros(x_shape, dtype=torch.int64)
    if numbers.dim() == 1 and rank != 1:
        shape = [1] * rank
        shape[axis] = -1
        numbers = numbers.reshape(shape)
    return numbers.expand(x_shape)


def float_limit(code: str) -> float:
    """The largest quotient that does not round out of range, and whether it is itself inside."""
    return {"float8_e4m3fn": 464.0, "float8_e5m2": 61440.0, "float4_e2m1": 7.0}[code]


def reference(x, scale, zero_point, index, code, ste="clipped", low=None, high=None):
    """Fake quantization whose derivatives, by PyTorch's own rules, are the straight-through estimator's."""
    s = scale.reshape(-1)[index]
    info = lq.resolve(code)
    q = x / s
    if info.is_float:
        value = lq.fake_quantize_linear(q.detach(), torch.ones((), dtype=q.dtype), dtype=code)
        limit = float_limit(code)
        inside = (q.abs() <= limit) if code == "float8_e4m3fn" else (q.abs() < limit)
        z = torch.zeros_like(q)
    else:
        low, high = info.qmin if low is None else low, info.qmax if high is None else high
        z = torch.zeros_like(q)
        if zero_point is not None:
            z = zero_point.reshape(-1)[index].to(q.dtype)
            z = z + (z.clamp(low, high).round() - z).detach()
        rounded = q.detach().round() + z.detach()
        inside = (rounded >= low) & (rounded <= high)
        value = (rounded.clamp(low, high) - z.detach()).detach()
    # Inside: s * (round(q) + (q - q.detach()) - ...) so that the slopes are 1, r - q and 0.
    through = x + s * (value - q.detach()) if ste else None
    saturated = s * (value + (z.detach() - z if not info.is_float else 0.0))
    if ste == "identity":
        saturated = saturated + x - x.detach()
    return torch.where(q.isnan(), torch.zeros_like(q), torch.where(inside, through, saturated))


def make(granularity, code, dtype=torch.float32, floating_zero=True, seed=0):
    x_shape, s_shape, axis, block_size = GRANULARITIES[granularity]
    g = torch.Generator().manual_seed(seed)
    info = lq.resolve(code)
    spread = min(float(info.qmax - info.qmin), 2000.0) if info.qmax < 10_000 else 40_000.0
    scale = (torch.rand(s_shape, generator=g, dtype=torch.float64) + 0.5).to(dtype)
    x = (torch.randn(x_shape, generator=g, dtype=torch.float64) * spread * 0.6).to(dtype)
    zero_point = None
    if floating_zero and not info.is_float:
        width = float(info.qmax - info.qmin)
        zero_point = (info.qmin + torch.rand(s_shape, generator=g, dtype=torch.float64) * width).to(torch.float32)
    kwargs = {"axis": axis, "block_size": block_size}
    return x, scale, zero_point, kwargs, index_of(x_shape, s_shape, axis, block_size)


def grads_of(y, inputs, seed=1):
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(y.dtype)
    return torch.autograd.grad(y, [t for t in inputs if t is not None], g)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("ste", ["clipped", "identity"])
def test_fake_quantize(granularity, code, ste):
    x, scale, zero_point, kwargs, index = make(granularity, code)
    inputs = [t if t is None else t.requires_grad_() for t in (x, scale, zero_point)]
    got = grads_of(lq.fake_quantize_linear(*inputs, dtype=code, ste=ste, **kwargs), inputs)
    # The reference sums in double. r - x / scale cancels: what the float32 quotient rounds is what is left.
    wide = [t if t is None else t.detach().double().requires_grad_() for t in inputs]
    y = reference(*wide, index, code, ste)
    want = grads_of(y, wide)
    assert torch.equal(got[0].double(), want[0].float().double())
    error = 2.0**-23 * (x.detach() / scale.detach().reshape(-1)[index]).abs().max().item() * x.numel()
    for a, b in zip(got[1:], want[1:], strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=error + 1e-5)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("code", ["int8", "uint4", "float8_e4m3fn"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_types(granularity, code, dtype):
    x, scale, zero_point, kwargs, index = make(granularity, code, dtype)
    scale = scale.to(torch.float32 if dtype != torch.float64 else dtype)
    inputs = [t if t is None else t.requires_grad_() for t in (x, scale, zero_point)]
    y = lq.fake_quantize_linear(*inputs, dtype=code, **kwargs)
    got = grads_of(y, inputs)
    assert [g.dtype for g in got] == [t.dtype for t in inputs if t is not None]
    wide = [t if t is None else t.detach().double().requires_grad_() for t in inputs]
    want_y = reference(*wide, index, code)
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype).double()
    want = torch.autograd.grad(want_y, [t for t in wide if t is not None], g)
    # Ties of the float32 quotient may fall to another code than those in double.
    same = (got[0].double() == want[0]).double().mean() if got[0].numel() else 1.0
    assert same > 0.99
    for a, b in zip(got[1:], want[1:], strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-3, atol=5e-3 * max(1.0, b.abs().max().item()))


@pytest.mark.parametrize("arithmetic", ["onednn", "executorch"])
def test_other_arithmetics(arithmetic):
    x = torch.tensor([0.49, 1.5, -300.0, 300.0, float("nan")], requires_grad=True)
    scale, zero_point = torch.tensor(2.0, requires_grad=True), torch.tensor(3.0, requires_grad=True)
    y = lq.fake_quantize_linear(x, scale, zero_point, dtype="int8", arithmetic=arithmetic)
    y.backward(torch.ones_like(y))
    assert x.grad.tolist() == [1, 1, 0, 0, 0]
    assert zero_point.grad.item() == -4.0
    inside = (0 - 0.245) + (1 - 0.75)
    assert scale.grad.item() == pytest.approx(inside + (-128 - 3) + (127 - 3), rel=1e-6)


def test_by_hand():
    """LSQ's formulas on five numbers: inside r - x/s, outside the limit; LSQ+'s -scale outside."""
    x = torch.tensor([0.7, 1.6, 9.0, -9.0, float("nan")], requires_grad=True)
    scale, zero_point = torch.tensor(0.5, requires_grad=True), torch.tensor(1.0, requires_grad=True)
    y = lq.fake_quantize_linear(x, scale, zero_point, dtype="int4")
    assert y.tolist()[:4] == [0.5, 1.5, 3.0, -4.5]
    y.backward(torch.tensor([1.0, 10.0, 100.0, 1000.0, 1e9]))
    assert x.grad.tolist() == [1, 10, 0, 0, 0]
    want = (1 - 1.4) + 10 * (3 - 3.2) + 100 * (7 - 1) + 1000 * (-8 - 1)
    assert scale.grad.item() == pytest.approx(want, rel=1e-6)
    assert zero_point.grad.item() == -0.5 * 1100


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("code", ["uint8", "int4", "int16", "int32", "float8_e5m2", "float4_e2m1"])
def test_float_codes(granularity, code):
    """quantize to float codes, then dequantize: values to the bit, gradients to rounding, those of fake quantize."""
    x, scale, zero_point, kwargs, _ = make(granularity, code)
    inputs = [t if t is None else t.requires_grad_() for t in (x, scale, zero_point)]
    codes = lq.quantize_linear(*inputs, dtype=code, float_codes=True, **kwargs)
    plain = lq.quantize_linear(*(t if t is None else t.detach() for t in inputs), dtype=code, **kwargs)
    if not lq.resolve(code).is_float:
        assert torch.equal(codes.double(), plain.double())
    else:
        assert torch.equal(codes, lq.dequantize_linear(plain, torch.tensor(1.0), x_dtype=code))
    y = lq.dequantize_linear(codes, *inputs[1:], x_dtype=code, **kwargs)
    fake = lq.fake_quantize_linear(*inputs, dtype=code, **kwargs)
    assert torch.equal(y, fake)
    for a, b in zip(grads_of(y, inputs), grads_of(fake, inputs), strict=True):
        error = 2.0**-22 * (x.detach() / scale.detach().min()).abs().max().item() * x.numel() * 4
        torch.testing.assert_close(a, b, rtol=1e-4, atol=error)


def test_float_codes_are_exact_for_scales_of_powers_of_two():
    """Then nothing rounds on the way, and the pair has the gradients of fake quantize to the bit."""
    x = torch.randn(64, 96, requires_grad=True)
    scale = torch.full((64, 3), 0.25, requires_grad=True)
    codes = lq.quantize_linear(x, scale, dtype="int4", block_size=32, float_codes=True)
    y = lq.dequantize_linear(codes, scale, x_dtype="int4", block_size=32)
    fake = lq.fake_quantize_linear(x, scale, dtype="int4", block_size=32)
    g = torch.randn_like(y)
    assert torch.equal(torch.autograd.grad(y, x, g)[0], torch.autograd.grad(fake, x, g)[0])


@pytest.mark.parametrize(
    ("code", "x_dtype", "want"),
    [
        ("uint8", torch.float16, torch.float16),
        ("int8", torch.bfloat16, torch.bfloat16),
        ("int16", torch.float16, torch.float32),
        ("uint16", torch.float32, torch.float32),
        ("int32", torch.float32, torch.float64),
        ("int8", torch.int32, torch.float32),
        ("int8", torch.float64, torch.float64),
        ("float8_e5m2", torch.float16, torch.float16),
    ],
)
def test_type_of_float_codes(code, x_dtype, want):
    """x's type where it holds every code."""
    x = (torch.arange(-70000, 70000, 7)).to(x_dtype)
    got = lq.quantize_linear(x, torch.tensor(1.0), dtype=code, float_codes=True)
    assert got.dtype == want
    plain = lq.quantize_linear(x, torch.tensor(1.0), dtype=code)
    assert torch.equal(got.double(), plain.double())


DEQUANTIZED = [
    (granularity, code, packed)
    for granularity in GRANULARITIES
    for code in ("uint8", "int4", "int32", "float8_e4m3fn", "float4_e2m1")
    for packed in (False, True)
    if not packed or (lq.resolve(code).bits < 8 and granularity != "0d")
]


@pytest.mark.parametrize(("granularity", "code", "packed"), DEQUANTIZED)
def test_dequantize(granularity, code, packed):
    """To scale x - zero_point, to a floating zero_point -scale; packed codes too."""
    x, scale, zero_point, kwargs, index = make(granularity, code)
    q = lq.quantize_linear(x, scale, zero_point, dtype=code, **kwargs)
    values = lq.dequantize_linear(q, torch.tensor(1.0, dtype=torch.float64), x_dtype=code)
    inputs = [t if t is None else t.requires_grad_() for t in (scale, zero_point)]
    sizes = {"packed_size": x.shape[-1]} if packed else {}
    given = lq.pack(q, code) if packed else q
    y = lq.dequantize_linear(given, *inputs, x_dtype=code, **kwargs, **sizes)
    got = grads_of(y, inputs)
    wide = [t if t is None else t.detach().double().requires_grad_() for t in inputs]
    z = 0.0
    if wide[1] is not None:
        z = wide[1].reshape(-1)[index]
        z = z + (z.round() - z).detach()
    want = grads_of(((values - z) * wide[0].reshape(-1)[index]).to(torch.float64), wide)
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    limit = (g.abs() * (values - (z if isinstance(z, float) else z.detach())).abs()).sum().item() * 1e-6 + 1e-6
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=limit)


def test_integer_and_float8_outputs_carry_no_gradient():
    x = torch.randn(8, requires_grad=True)
    scale = torch.tensor(0.1, requires_grad=True)
    for dtype in ("int8", "int4", torch.float8_e4m3fn, torch.float8_e5m2):
        assert not lq.quantize_linear(x, scale, dtype=dtype).requires_grad
        assert not OPS.quantize_linear(x, scale, output_dtype=lq.resolve(dtype).number).requires_grad
    codes = torch.zeros(8).to(torch.float8_e4m3fn).requires_grad_()
    y = lq.dequantize_linear(codes, scale)
    y.sum().backward()
    assert codes.grad is None and scale.grad is not None


def test_scales_that_cannot_have_a_gradient():
    x = torch.randn(8, requires_grad=True)
    y = lq.fake_quantize_linear(x, torch.tensor(0.5).to(torch.float8_e8m0fnu), dtype="int8")
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.ones(8))


def test_out_is_seen_by_autograd():
    """A tensor saved for a gradient and then written into: an error in backward, not another gradient."""
    w = torch.tensor([0.0, 1.0], requires_grad=True)
    for write in (
        lambda y: lq.fake_quantize_linear(torch.tensor([5.0, 5.0]), torch.tensor(1.0), out=y),
        lambda y: OPS.fake_quantize_linear.out(torch.tensor([5.0, 5.0]), torch.tensor(1.0), out=y),
        lambda y: lq.dequantize_linear(torch.tensor([5, 5], dtype=torch.int8), torch.tensor(1.0), out=y),
    ):
        y = w.exp()
        write(y.detach())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    leaf = torch.zeros(2, requires_grad=True)
    for out in (leaf, w * 2):
        with pytest.raises(RuntimeError, match="out must be absent where a gradient is recorded"):
            lq.fake_quantize_linear(torch.ones(2), torch.tensor(1.0), out=out)
    with pytest.raises(RuntimeError, match="min_max: out must be absent"):
        lq.min_max(w, out=(torch.empty(()), torch.empty(())))


def test_out_and_gradients_exclude_each_other():
    x = torch.randn(8, requires_grad=True)
    with pytest.raises(RuntimeError, match="fake_quantize_linear: out must be absent where a gradient is recorded"):
        lq.fake_quantize_linear(x, torch.tensor(0.1), out=torch.empty(8))
    with torch.no_grad():
        lq.fake_quantize_linear(x, torch.tensor(0.1), out=torch.empty(8))


def test_empty_and_zero_dimensional():
    for shape in ((), (0,), (3, 0)):
        x = torch.randn(shape, requires_grad=True)
        scale = torch.tensor(0.3, requires_grad=True)
        y = lq.fake_quantize_linear(x, scale, dtype="int8")
        y.sum().backward()
        assert x.grad.shape == shape and scale.grad.shape == ()
        if x.numel() == 0:
            assert scale.grad.item() == 0.0


LAYOUTS = {
    "channels_last": lambda: torch.randn(2, 6, 5, 7).contiguous(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(7, 6, 5).permute(2, 1, 0),
    "sliced": lambda: torch.randn(4, 6, 20)[..., 3:14],
    "stepped": lambda: torch.randn(4, 6, 20)[..., ::2],
    "expanded": lambda: torch.randn(4, 6, 1).expand(4, 6, 9),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    torch.manual_seed(0)
    x = LAYOUTS[layout]() * 5
    g = torch.randn(x.shape).transpose(0, -1).contiguous().transpose(0, -1)
    for scale, kwargs in (
        (torch.tensor(0.3), {}),
        (torch.rand(6) + 0.1, {"axis": 1}),
        (torch.rand(x.size(-1)) + 0.1, {"axis": -1}),
        (torch.rand(*x.shape[:-1], -(-x.size(-1) // 4)) + 0.1, {"axis": -1, "block_size": 4}),
    ):
        results = []
        for t in (x, x.contiguous()):
            t, s = t.detach().requires_grad_(), scale.clone().requires_grad_()
            y = lq.fake_quantize_linear(t, s, dtype="int4", **kwargs)
            results.append(torch.autograd.grad(y, [t, s], g))
        (dx, ds), (want_x, want_s) = results
        assert torch.equal(dx, want_x)
        # The order of the sum is the order in memory.
        torch.testing.assert_close(ds, want_s, rtol=1e-4, atol=1e-4)


# --- determinism -----------------------------------------------------------------------------------------------------

SHAPES = {
    "tensor": ((333_337,), (), 0, 0),
    "axis0": ((37, 9_011), (37,), 0, 0),
    "axis-1": ((9_011, 37), (37,), 1, 0),
    "axis-1-long": ((301, 9_011), (9_011,), 1, 0),
    "axis1of3": ((3, 131, 857), (131,), 1, 0),
    "axis1of4": ((300, 16, 3, 3), (16,), 1, 0),
    "block32": ((37, 9_011), (37, 282), 1, 32),
    "block3000": ((37, 9_011), (37, 4), 1, 3000),
    "block32_first": ((9_011, 37), (282, 37), 0, 32),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("code", ["int8", "float8_e4m3fn"])
def test_same_bits_for_every_variant_and_thread_count(shape, code):
    x_shape, s_shape, axis, block_size = SHAPES[shape]
    generator = torch.Generator().manual_seed(0)
    scale = torch.rand(s_shape, generator=generator) + 0.5
    zero_point = torch.rand(s_shape, generator=generator) * 9 if code == "int8" else None
    variant, threads = OPS._cpu_variant(), torch.get_num_threads()
    for dtype in (torch.float32, torch.float16):
        x = (torch.randn(x_shape, generator=generator) * 150).to(dtype)
        x.view(-1)[::1001] = float("nan")
        g = torch.randn(x_shape, generator=generator).to(dtype)
        want = None
        try:
            for new_variant, new_threads in itertools.product(cpu_variants(), (1, 2, 3, 5)):
                torch.set_num_threads(new_threads)
                assert OPS._cpu_variant(new_variant) == new_variant
                args = (axis, [block_size], lq.resolve(code).number, 0, None, None, "onnx")
                needs = (True, True, True)
                got = OPS.fake_quantize_linear_backward(g, x, scale, zero_point, *args, "clipped", *needs)
                got += OPS.quantize_linear_backward(g, x, scale, zero_point, *args, *needs)
                got = [t.contiguous().view(-1).view(torch.uint8) for t in got]
                want = want or got
                assert all(map(torch.equal, got, want)), (new_variant, new_threads)
        finally:
            OPS._cpu_variant(variant)
            torch.set_num_threads(threads)


@pytest.mark.parametrize("shape", SHAPES)
def test_sums_are_those_of_double(shape):
    x_shape, s_shape, axis, block_size = SHAPES[shape]
    x = torch.randn(x_shape) * 150
    scale = (torch.rand(s_shape) + 0.5).requires_grad_()
    g = torch.randn(x_shape)
    kwargs = {"axis": axis, "block_size": block_size}
    y = lq.fake_quantize_linear(x, scale, dtype="int8", **kwargs)
    got = torch.autograd.grad(y, scale, g)[0]
    index = index_of(x_shape, s_shape, axis, [block_size])
    with torch.no_grad():
        q = x / scale.reshape(-1)[index]
        r = q.round()
        term = torch.where((r >= -128) & (r <= 127), r - q, r.clamp(-128, 127)) * g
        want = torch.zeros(scale.numel(), dtype=torch.float64).index_add_(
            0, index.reshape(-1), term.double().reshape(-1)
        )
        most = torch.zeros(scale.numel(), dtype=torch.float64)
        most.index_add_(0, index.reshape(-1), term.double().abs().reshape(-1))
    assert ((got.double().reshape(-1) - want).abs() <= most * 2.0**-20 + 1e-30).all()


# --- higher order, forward mode, torch.func --------------------------------------------------------------------------

SMALL = {
    "tensor": ((3, 7), (), 1, 0),
    "axis0": ((3, 7), (3,), 0, 0),
    "axis1": ((3, 7), (7,), -1, 0),
    "block": ((3, 7), (3, 3), 1, 3),
    "blocks": ((3, 7), (2, 3), 1, [2, 3]),
    "token": ((3, 7), (3, 1), 1, [1, 0]),
}


def inside_points(shape, scale, index, code, seed=0):
    """x whose quotients lie away from where codes change, so that finite differences are those of one line."""
    g = torch.Generator().manual_seed(seed)
    info = lq.resolve(code)
    steps = torch.randint(int(info.qmin) - 3, int(info.qmax) + 4, shape, generator=g)
    offset = torch.rand(shape, generator=g, dtype=torch.float64) * 0.6 - 0.3
    return (steps + offset) * scale.reshape(-1)[index]


def frozen(x, scale, zero_point, index, code, base):
    """fake_quantize_linear's first derivatives as a function: codes as they are at `base`."""
    x0, s0, z0 = base
    info = lq.resolve(code)
    z = z0.round().clamp(info.qmin, info.qmax).reshape(-1)[index]
    rounded = (x0 / s0.reshape(-1)[index]).round() + z
    inside = (rounded >= info.qmin) & (rounded <= info.qmax)
    value = rounded.clamp(info.qmin, info.qmax) - z
    s = scale.reshape(-1)[index]
    slope_x = inside.double()
    slope_s = torch.where(inside, value - x / s, value)
    slope_z = torch.where(inside, torch.zeros_like(s), -s)
    return slope_x, slope_s, slope_z


@pytest.mark.parametrize("granularity", SMALL)
def test_double_backward(granularity):
    """Against derivatives of the first ones, codes held constant."""
    x_shape, s_shape, axis, block_size = SMALL[granularity]
    blocks = block_size if isinstance(block_size, list) else [block_size]
    index = index_of(x_shape, s_shape, axis, blocks)
    scale = torch.rand(s_shape, dtype=torch.float64) + 0.5
    x = inside_points(x_shape, scale, index, "int4")
    zero_point = torch.randint(-3, 4, s_shape).double()
    base = (x, scale, zero_point)
    x, scale, zero_point = (t.clone().requires_grad_() for t in base)
    g = torch.randn(x_shape, dtype=torch.float64, requires_grad=True)
    y = lq.fake_quantize_linear(x, scale, zero_point, dtype="int4", axis=axis, block_size=block_size)
    first = torch.autograd.grad(y, [x, scale, zero_point], g, create_graph=True)
    h = [torch.randn_like(t) for t in first]
    got = torch.autograd.grad(first, [g, x, scale], h)

    def firsts(g_, x_, s_):
        slopes = frozen(x_, s_, zero_point, index, "int4", base)
        terms = [g_ * slope for slope in slopes]
        sums = [
            torch.zeros(s_.numel(), dtype=torch.float64).index_add(0, index.reshape(-1), t.reshape(-1))
            for t in terms[1:]
        ]
        return terms[0], *(t.reshape(s_.shape) for t in sums)

    inputs = [t.detach().clone().requires_grad_() for t in (g, x, scale)]
    outputs = firsts(*inputs)
    for a, b in zip(first, outputs, strict=True):
        torch.testing.assert_close(a, b)
    for a, b in zip(got, torch.autograd.grad(outputs, inputs, h), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("granularity", SMALL)
@pytest.mark.parametrize("op", ["quantize", "fake", "dequantize"])
def test_gradgradcheck(op, granularity):
    """PyTorch's own checker, on each op as a function of what it is differentiable in between two steps.

    gradcheck's finite differences see a staircase; so x is a linear function whose straight-through slope it is not
    asked for: first derivatives are checked above, and here those of the backward ops, which are smooth in g, x, scale.
    """
    x_shape, s_shape, axis, block_size = SMALL[granularity]
    blocks = block_size if isinstance(block_size, list) else [block_size]
    index = index_of(x_shape, s_shape, axis, blocks)
    scale = torch.rand(s_shape, dtype=torch.float64) + 0.5
    x = inside_points(x_shape, scale, index, "int4")
    g = torch.randn(x_shape, dtype=torch.float64)
    inputs = [t.clone().requires_grad_() for t in (g, x, scale)]
    number = lq.resolve("int4").number
    options = (axis, blocks, number, 0, None, None, "onnx")

    def call(g_, x_, s_):
        if op == "fake":
            return OPS.fake_quantize_linear_backward(g_, x_, s_, None, *options, "clipped", True, True, False)[:2]
        if op == "quantize":
            return OPS.quantize_linear_backward(g_, x_, s_, None, *options, True, True, False)[:2]
        return OPS.dequantize_linear_backward(g_, x_, s_, None, axis, blocks, number, None, True, True, False)[:2]

    assert torch.autograd.gradcheck(call, inputs, check_forward_ad=True, eps=1e-6, atol=1e-5)


def functions(code="int4"):
    scale, zero_point = torch.tensor(0.3), torch.tensor(1.0)

    def public(x, s=scale, z=zero_point):
        return lq.fake_quantize_linear(x, s, z, dtype=code)

    def direct(x, s=scale, z=zero_point):
        return OPS.fake_quantize_linear(x, s, z, output_dtype=lq.resolve(code).number)

    return [public, direct]


@pytest.mark.parametrize("f", functions(), ids=["public", "torch.ops"])
def test_forward_mode(f):
    x, s, z = torch.randn(9), torch.tensor(0.3), torch.tensor(1.0)
    tangents = (torch.randn(9), torch.tensor(0.7), torch.tensor(-0.4))
    y, got = torch.func.jvp(f, (x, s, z), tangents)
    assert torch.equal(y, f(x, s, z))
    rows = [torch.autograd.grad(f(*(t.requires_grad_() for t in (x, s, z)))[i], (x, s, z)) for i in range(9)]
    want = torch.stack([sum((a * b).sum() for a, b in zip(row, tangents, strict=True)) for row in rows])
    torch.testing.assert_close(got, want)
    x, s, z = (t.detach() for t in (x, s, z))
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(t, d) for t, d in zip((x, s, z), tangents, strict=True)]
        torch.testing.assert_close(forward_ad.unpack_dual(f(*duals)).tangent, want)
    torch.testing.assert_close(torch.func.jacfwd(f)(x, s, z), torch.func.jacrev(f)(x, s, z))


@pytest.mark.parametrize("f", functions(), ids=["public", "torch.ops"])
def test_torch_func(f):
    x = torch.randn(5, 8)
    w = torch.randn(8)

    def loss(x, s):
        return (f(x, s) * w).sum() ** 2

    s = torch.tensor(0.3)
    plain = x[0].clone().requires_grad_()
    want = torch.autograd.grad(loss(plain, s), plain)[0]
    torch.testing.assert_close(torch.func.grad(loss)(x[0], s), want)
    each = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)), in_dims=(0, None))(x, s)
    for i in range(5):
        for a, b in zip(each, torch.func.grad(loss, argnums=(0, 1))(x[i], s), strict=True):
            torch.testing.assert_close(a[i], b)
    both = torch.func.grad(lambda x: torch.func.vmap(f, in_dims=(0, None))(x, s).square().sum())(x)
    plain = x.clone().requires_grad_()
    torch.testing.assert_close(both, torch.autograd.grad(f(plain, s).square().sum(), plain)[0])
    twice = torch.func.grad(lambda x: torch.func.grad(loss)(x, s).sum())(x[0])
    assert twice.shape == (8,)
    hessian = torch.func.hessian(loss)(x[0], s)
    torch.testing.assert_close(hessian, torch.func.jacrev(torch.func.jacrev(loss))(x[0], s))
    # The curvature of the square, where the slope of f is 1.
    slope = torch.func.vjp(lambda x: f(x, s), x[0])[1](torch.ones(8))[0]
    torch.testing.assert_close(hessian, 2 * torch.outer(w * slope, w * slope))


BATCHES = {
    "x": (0, None, None),
    "x_last": (-1, None, None),
    "scale": (None, 0, None),
    "all": (0, 0, 0),
    "x_scale": (0, 0, None),
    "zero_point": (None, None, 0),
}


@pytest.mark.parametrize("granularity", [*SMALL, "axis-2", "scalar"])
@pytest.mark.parametrize("batch", BATCHES)
def test_vmap(granularity, batch):
    shapes = {**SMALL, "axis-2": ((3, 7), (3,), -2, 0), "scalar": ((), (), 0, 0)}
    x_shape, s_shape, axis, block_size = shapes[granularity]
    dims = BATCHES[batch]
    torch.manual_seed(0)

    def make_one(shape, dim, low, high):
        t = torch.rand((4, *shape)) * (high - low) + low
        return t[0] if dim is None else t.movedim(0, dim)

    inputs = [
        make_one(x_shape, dims[0], -9, 9),
        make_one(s_shape, dims[1], 0.2, 0.9),
        make_one(s_shape, dims[2], -3, 3),
    ]

    def fake(*inputs):
        return lq.fake_quantize_linear(*inputs, dtype="int4", axis=axis, block_size=block_size)

    def integers(*inputs):
        return lq.quantize_linear(*inputs, dtype="int4", axis=axis, block_size=block_size)

    def pair(*inputs):
        codes = lq.quantize_linear(*inputs, dtype="int4", axis=axis, block_size=block_size, float_codes=True)
        return lq.dequantize_linear(codes, *inputs[1:], x_dtype="int4", axis=axis, block_size=block_size)

    def loss(*inputs):
        return (fake(*inputs) ** 2).sum() + pair(*inputs).sum()

    every = torch.func.grad(loss, argnums=(0, 1, 2))
    for f in (fake, integers, pair, every):
        got = torch.func.vmap(f, in_dims=dims)(*inputs)
        for i in range(4):
            one = f(*(t if d is None else t.select(d, i) for t, d in zip(inputs, dims, strict=True)))
            if f is every:
                for a, b in zip(got, one, strict=True):
                    torch.testing.assert_close(a[i], b)
            else:
                assert torch.equal(got[i], one)


def test_vmap_of_ops_without_gradients():
    x = torch.randn(4, 3, 6)
    for f in (
        lambda t: OPS.min_max(t, axis=0),
        lambda t: OPS.dynamic_quantize_linear(t),
        lambda t: (OPS.pack(t.to(torch.int8), x_dtype=22),),
        lambda t: (OPS.unpack(t.to(torch.uint8), x_dtype=25),),
    ):
        got = torch.func.vmap(f, in_dims=1)(x)
        for i in range(3):
            for a, b in zip(got, f(x[:, i]), strict=True):
                assert torch.equal(a[i], b)


def test_checkpoint_and_hooks():
    from torch.utils.checkpoint import checkpoint

    x = torch.randn(6, 8, requires_grad=True)
    scale = torch.tensor(0.2, requires_grad=True)

    def f(x, scale):
        return lq.fake_quantize_linear(torch.relu(x), scale, dtype="uint4")

    want = grads_of(f(x, scale), [x, scale])
    got = grads_of(checkpoint(f, x, scale, use_reentrant=False), [x, scale])
    assert all(map(torch.equal, got, want))


def test_what_is_saved_is_x():
    saved = []
    x = torch.randn(1000, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        lq.fake_quantize_linear(x, torch.tensor(0.1), dtype="int8")
    assert sorted(t.numel() for t in saved) == [1, 1000]
    assert any(t.data_ptr() == x.data_ptr() for t in saved)


def test_autocast_leaves_types_alone():
    x = torch.randn(8, 8, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = x @ x
        y = lq.fake_quantize_linear(h, torch.tensor(0.1), dtype="int8")
        assert h.dtype == y.dtype == torch.bfloat16
        assert lq.fake_quantize_linear(x, torch.tensor(0.1), dtype="int8").dtype == torch.float32
    y.sum().backward()
    assert x.grad.dtype == torch.float32
