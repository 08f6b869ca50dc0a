"""PyTorch's own checks of every op over every sample: schema, fake kernels, dynamic shapes, .out overloads, compile."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_linquant  # noqa: F401
from samples import FLOATS, Sample, all_samples

SAMPLES = [pytest.param(sample, id=f"{sample.op}-{sample.id}") for sample in all_samples()]
OUT_NAMES = {
    "dynamic_quantize_linear": ("y", "scale", "zero_point"),
    "min_max": ("r_min", "r_max"),
}


def as_tuple(result):
    return result if isinstance(result, tuple) else (result,)


def assert_same(got, want):
    for a, b in zip(as_tuple(got), as_tuple(want), strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
        assert a.contiguous().view(-1).view(torch.uint8).equal(b.contiguous().view(-1).view(torch.uint8))


def row_major(t):
    return t.clone(memory_format=torch.contiguous_format)


@pytest.mark.parametrize("sample", SAMPLES)
def test_opcheck(sample: Sample):
    op = sample.function
    tests = ["test_schema", "test_faketensor", "test_aot_dispatch_dynamic"]
    if any(isinstance(a, torch.Tensor) and "float8" in str(a.dtype) for a in sample.args):
        tests.remove("test_schema")  # it compares its inputs by arithmetic that PyTorch lacks for float8
    torch.library.opcheck(op, sample.args, sample.kwargs, test_utils=tests)


@pytest.mark.parametrize("sample", SAMPLES)
def test_fake_and_meta_match(sample: Sample):
    want = as_tuple(sample())
    op = sample.function
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in sample.args]
        fake = as_tuple(op(*fakes, **sample.kwargs))
    metas = [
        torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device="meta") if isinstance(a, torch.Tensor) else a
        for a in sample.args
    ]
    for got in (fake, as_tuple(op(*metas, **sample.kwargs))):
        for a, b in zip(got, want, strict=True):
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


def has_out(sample: Sample) -> bool:
    return sample.overload == "default" and not sample.op.endswith("_backward")


def differentiable(sample: Sample) -> bool:
    return sample.op == "fake_quantize_linear" or "float-" in sample.id


@pytest.mark.parametrize("sample", [s for s in SAMPLES if differentiable(s.values[0])])
def test_opcheck_with_gradients(sample: Sample):
    args = [
        a.detach().clone().requires_grad_() if isinstance(a, torch.Tensor) and a.dtype in FLOATS.values() else a
        for a in sample.args
    ]
    op = sample.function
    tests = ["test_autograd_registration", "test_aot_dispatch_dynamic"]
    torch.library.opcheck(op, tuple(args), sample.kwargs, test_utils=tests)


@pytest.mark.parametrize("sample", [s for s in SAMPLES if has_out(s.values[0])])
def test_out_overload(sample: Sample):
    want = as_tuple(sample())
    op = getattr(torch.ops.linquant, sample.op).out
    names = OUT_NAMES.get(sample.op, ("out",))
    # Memory with gaps, and dense memory of the result's layout.
    gaps = [torch.zeros((*w.shape, 2), dtype=w.dtype)[..., 0] for w in want]
    dense = [torch.zeros_like(w) for w in want]
    for outs in (gaps, dense):
        results = as_tuple(op(*sample.args, **sample.kwargs, **dict(zip(names, outs, strict=True))))
        assert all(a is b for a, b in zip(results, outs, strict=True))
        assert_same(tuple(map(row_major, outs)), tuple(map(row_major, want)))


SCALE, ZERO_POINT = torch.linspace(0.1, 0.9, 6), torch.tensor([3, 0, -2, 7, 1, 5], dtype=torch.int8)
COMPILED = {
    "quantize": lambda x: torch_linquant.quantize_linear(x, SCALE, ZERO_POINT),
    "quantize_op": lambda x: torch.ops.linquant.quantize_linear(x, SCALE, ZERO_POINT),
    "packed": lambda x: torch_linquant.quantize_linear(x, SCALE, dtype="int4", packed=True),
    "float_codes": lambda x: torch_linquant.quantize_linear(x, SCALE, dtype="int4", float_codes=True),
    "fake_quantize": lambda x: torch_linquant.fake_quantize_linear(x, SCALE, ZERO_POINT),
    "dequantize": lambda x: torch_linquant.dequantize_linear(x.to(torch.int8), SCALE, ZERO_POINT),
    "dynamic": lambda x: torch_linquant.dynamic_quantize_linear(x),
    "per_token": lambda x: torch_linquant.dynamic_quantize_linear(x, dtype="int8", block_size=[1, 0], symmetric=True),
    "dynamic_quantize": lambda x: torch_linquant.dynamic_quantize(x, SCALE, ZERO_POINT, qtype="per_channel"),
    "min_max": lambda x: torch_linquant.min_max(x, axis=1),
    "pack": lambda x: torch_linquant.pack(x.to(torch.int8), "int4"),
    "unpack": lambda x: torch_linquant.unpack(x.to(torch.uint8), "uint2", 23),
    "quantize_tensor": lambda x: torch_linquant.quantize_tensor(x, "int8", torch_linquant.PerAxis(1)),
}


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("dynamic", [None, True])
def test_compiles_without_break_or_recompile(name, dynamic):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    function = COMPILED[name]
    compiled = torch.compile(function, backend=counter, fullgraph=True, dynamic=dynamic)
    for batch in (4, 7, 9, 12):
        x = torch.randn(batch, 6) * 10
        assert_same(compiled(x), function(x))
    assert counter.frame_count <= 2


def test_compiles_blocked_and_packed_over_sizes():
    torch._dynamo.reset()
    counter = CompileCounter()

    def function(x, scale):
        q = torch_linquant.quantize_linear(x, scale, dtype="int4", block_size=32, packed=True)
        return torch_linquant.dequantize_linear(q, scale, x_dtype="int4", block_size=32, packed_size=x.size(1))

    compiled = torch.compile(function, backend=counter, fullgraph=True, dynamic=True)
    for columns in (70, 96, 101, 64):
        x, scale = torch.randn(4, columns), torch.rand(4, -(-columns // 32)) + 0.1
        assert_same(compiled(x, scale), function(x, scale))
    assert counter.frame_count == 1


def test_inductor_equals_eager():
    torch._dynamo.reset()
    x, scale = torch.randn(8, 33) * 10, torch.rand(33) + 0.1

    def function(x):
        y = torch.relu(x)
        return torch_linquant.fake_quantize_linear(y, scale, dtype="int8"), torch_linquant.quantize_tensor(y, "uint8")

    want, got = function(x), torch.compile(function, fullgraph=True)(x)
    assert_same(got[0], want[0])
    assert_same(got[1], want[1])


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_out_under_compile(backend):
    torch._dynamo.reset()
    x, scale = torch.randn(16, 3), torch.tensor(0.1)

    def function(x):
        y, low, high = torch.empty_like(x, dtype=torch.uint8), torch.empty(()), torch.empty(())
        assert torch_linquant.quantize_linear(x, scale, out=y) is y
        torch_linquant.min_max(x, out=(low, high))
        return y, low, high

    assert_same(torch.compile(function, backend=backend, fullgraph=True)(x), function(x))
    with pytest.raises(Exception, match=r"out must have shape \[16, 3\], but got shape \[3, 16\]"):
        torch.compile(lambda x: torch_linquant.quantize_linear(x, scale, out=torch.empty(3, 16)), backend=backend)(x)
