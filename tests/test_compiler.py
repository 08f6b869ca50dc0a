"""What PyTorch's compiler makes of the ops: fusion, its flag and its caches, decompositions."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.utils import fresh_cache, run_and_get_code

import torch_linquant as lq
from samples import FLOATS, Sample, all_samples

SAMPLES = [pytest.param(s, id=f"{s.op}-{s.id}") for s in all_samples() if not s.op.endswith("_backward")]


def as_tuple(result):
    return result if isinstance(result, tuple) else (result,)


def same_bits(a, b) -> bool:
    a, b = a.contiguous().view(-1), b.contiguous().view(-1)
    if a.is_floating_point():  # NaN of any sign
        number = ~(a.float().isnan() & b.float().isnan())
        return a.dtype == b.dtype and a[number].view(torch.uint8).equal(b[number].view(torch.uint8))
    return a.dtype == b.dtype and a.view(torch.uint8).equal(b.view(torch.uint8))


@pytest.mark.parametrize("sample", SAMPLES)
def test_decomposition(sample: Sample):
    op = sample.function
    kwargs = dict(sample.kwargs)
    if isinstance(kwargs.get("block_size"), int):
        kwargs["block_size"] = [kwargs["block_size"]]  # as PyTorch hands it over
    got = as_tuple(lq.decompositions()[op](*sample.args, **kwargs))
    for a, b in zip(got, as_tuple(sample()), strict=True):
        assert a.shape == b.shape and same_bits(a, b)


@pytest.mark.parametrize("code", [t.name for t in lq.QUANT_DTYPES])
@pytest.mark.parametrize("saturate", [True, False])
def test_decomposition_of_hard_values(code, saturate):
    from adversary import nasty

    table = lq.decompositions()
    info = lq.resolve(code)
    for x_dtype in FLOATS.values():
        x = nasty(4000, 0.37, -500, 500, dtype=x_dtype)
        for s_dtype in FLOATS.values():
            scale = torch.tensor(0.37).to(s_dtype)
            kwargs = {"output_dtype": info.number, "saturate": saturate}
            for name in ("quantize_linear", "fake_quantize_linear"):
                op = getattr(torch.ops.linquant, name).default
                assert same_bits(table[op](x, scale, **kwargs), op(x, scale, **kwargs)), (name, x_dtype, s_dtype)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(12, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)).eval()
        observed = lq.prepare(model)
        lq.calibrate(observed, [torch.randn(32, 12)])
        self.model = lq.convert(observed, weight_dtype="int4", weight_granularity=lq.PerBlock(4, axis=1))

    def forward(self, x):
        y, scale, zero_point = lq.dynamic_quantize_linear(x)
        return self.model(lq.dequantize_linear(y, scale, zero_point))


@pytest.mark.parametrize("strict", [True, False])
def test_decomposed_program(strict):
    model = Model()
    shapes = ({0: torch.export.Dim("n")},)
    program = torch.export.export(model, (torch.randn(5, 12),), dynamic_shapes=shapes, strict=strict)
    plain = program.run_decompositions(torch.export.default_decompositions() | lq.decompositions())
    assert "linquant" in str(program.graph) and "linquant" not in str(plain.graph)
    for rows in (1, 5, 40):
        x = torch.randn(rows, 12) * 3
        # A product decomposed by default may be summed in another order.
        torch.testing.assert_close(plain.module()(x), model(x), rtol=1e-5, atol=1e-5)


# --- fusion ----------------------------------------------------------------------------------------------------------

ROWS, COLUMNS = 1100, 1024  # more elements than stay in a cache
SCALE = torch.tensor(0.02)
ZERO_POINT = torch.tensor(3, dtype=torch.int8)
PRODUCERS = {
    "relu": torch.relu,
    "layer_norm": lambda x: F.layer_norm(x, (COLUMNS,)),
    "silu": F.silu,
    "add": lambda x: x + 1.5,
    "none": lambda x: x,
}
CONSUMERS = {
    "fake": lambda x: lq.fake_quantize_linear(x, SCALE, ZERO_POINT, dtype="int8"),
    "fake_uint4": lambda x: lq.fake_quantize_linear(x, SCALE * 9, dtype="uint4"),
    "quantize": lambda x: lq.quantize_linear(x, SCALE, ZERO_POINT),
    "uint16": lambda x: lq.quantize_linear(x, SCALE, dtype="uint16"),
    "per_axis": lambda x: lq.fake_quantize_linear(x, torch.full((COLUMNS,), 0.03), dtype="int8"),
    "per_axis0": lambda x: lq.quantize_linear(x, torch.full((x.size(0),), 0.03), dtype="int8", axis=0),
    "per_token": lambda x: lq.quantize_linear(x, torch.full((x.size(0), 1), 0.03), dtype="int8"),
    "narrow": lambda x: lq.fake_quantize_linear(x, SCALE, dtype="int8", quant_min=-100, quant_max=90),
    "negative": lambda x: lq.fake_quantize_linear(x, -SCALE, dtype="int8"),
    "subnormal": lambda x: lq.fake_quantize_linear(x, SCALE * 1e-38, dtype="int8"),
}
OPAQUE = {
    "blocks": lambda x: lq.quantize_linear(x, torch.full((x.size(0), 32), 0.03), dtype="int8", block_size=32),
    "float8": lambda x: lq.quantize_linear(x, SCALE, dtype="float8_e4m3fn"),
    "onednn": lambda x: lq.quantize_linear(x, SCALE, dtype="int8", arithmetic="onednn"),
    "half_scale": lambda x: lq.quantize_linear(x, SCALE.half(), dtype="int8"),
    "wide_zero_point": lambda x: lq.quantize_linear(x, SCALE, ZERO_POINT.int(), dtype="int8"),
    "packed": lambda x: lq.quantize_linear(x, SCALE, dtype="int4", packed=True),
}


def hard_rows(rows=ROWS):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, COLUMNS, generator=generator)
    x[: rows // 2] = torch.randint(-300, 300, (rows // 2, COLUMNS), generator=generator) / 2 * SCALE
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-45, 3e38, -1e-3])
    x[0, :7] = special
    return x


def compiled(f, x):
    torch._dynamo.reset()
    with fresh_cache(), torch.no_grad():
        y, code = run_and_get_code(torch.compile(f, fullgraph=True), x)
    return y, any("torch.ops.linquant" in text for text in code)


@pytest.mark.parametrize("consumer", CONSUMERS)
@pytest.mark.parametrize("producer", ["relu", "layer_norm"])
def test_fused_is_the_same_bits(producer, consumer):
    def f(x):
        return CONSUMERS[consumer](PRODUCERS[producer](x))

    x = hard_rows()
    y, calls = compiled(f, x)
    lq.set_fusion(False)
    try:
        opaque, opaque_calls = compiled(f, x)
    finally:
        lq.set_fusion(True)
    assert opaque_calls and not calls
    assert same_bits(y, opaque)


@pytest.mark.parametrize("producer", ["silu", "add"])
def test_other_producers(producer):
    def f(x):
        return CONSUMERS["fake"](PRODUCERS[producer](x)) * 2.0

    x = hard_rows()
    y, calls = compiled(f, x)
    lq.set_fusion(False)
    try:
        assert same_bits(y, compiled(f, x)[0])
    finally:
        lq.set_fusion(True)
    assert not calls


@pytest.mark.parametrize("consumer", OPAQUE)
def test_what_would_not_be_exact_stays_opaque(consumer):
    y, calls = compiled(lambda x: OPAQUE[consumer](torch.relu(x)), hard_rows())
    assert calls
    assert torch.equal(y.view(torch.uint8), OPAQUE[consumer](torch.relu(hard_rows())).view(torch.uint8))


def test_what_would_not_be_faster_stays_opaque():
    assert compiled(lambda x: CONSUMERS["fake"](torch.relu(x)), hard_rows(64))[1]  # small
    assert compiled(CONSUMERS["fake"], hard_rows())[1]  # nothing to fuse with


def test_gradients_under_fusion():
    x = hard_rows().nan_to_num(0.0, 1.0, -1.0)
    torch._dynamo.reset()
    with fresh_cache():
        f = torch.compile(lambda x: CONSUMERS["fake"](torch.relu(x)), fullgraph=True)
        results = []
        for g in (f, lambda x: CONSUMERS["fake"](torch.relu(x))):
            t = x.clone().requires_grad_()
            y = g(t)
            y.backward(torch.ones_like(y))
            results.append((y.detach(), t.grad))
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))


def test_the_flag_is_part_of_the_cache_key():
    """A warm cache must not serve code of the other setting; tags of others stay."""
    config = torch.compiler.config
    before = config.cache_key_tag
    try:
        config.cache_key_tag = "mine;" + before
        on = config.cache_key_tag
        lq.set_fusion(False)
        assert config.cache_key_tag.startswith("mine;") and config.cache_key_tag != on
        lq.set_fusion(True)
        assert config.cache_key_tag == on
        counters, hits = torch._dynamo.utils.counters["inductor"], []
        before_loop = counters["fxgraph_cache_hit"]
        with fresh_cache():
            for enabled in (True, False, True):
                lq.set_fusion(enabled)
                torch._dynamo.reset()
                f = torch.compile(lambda x: CONSUMERS["fake"](torch.relu(x)), fullgraph=True)
                with torch.no_grad():
                    f(hard_rows())
                hits.append(counters["fxgraph_cache_hit"] - before_loop)
        assert hits == [0, 0, 1]  # the second setting finds nothing of the first, the third all of it
    finally:
        config.cache_key_tag = before
        lq.set_fusion(True)


def test_importing_the_package_does_not_import_inductor():
    code = "import sys, torch_linquant; print([m for m in sys.modules if m.startswith('torch._inductor.lowering')])"
    package = str(Path(lq.__file__).parents[1])
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": package},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.stdout.strip() == "[]", run.stderr
