"""The op behind the observers: one pass that takes a batch into a running range and a histogram."""

import itertools
import math

import numpy as np
import pytest
import torch

from torch_linquant.granularity import PerAxis, PerBlock, PerDims, PerTensor, PerToken, spread_parameter

observe_ = torch.ops.linquant.observe_
TYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int32]


def fresh(shape=(), mantissa_bits=None):
    state = [torch.full(shape, math.inf), torch.full(shape, -math.inf), torch.zeros((), dtype=torch.int64)]
    if mantissa_bits is not None:
        state.append(torch.zeros((*shape, 2 ** (9 + mantissa_bits)), dtype=torch.int64))
    return state


def expected(x, granularity, mantissa_bits):
    """The state after x, by NumPy, element by element."""
    shape = granularity.scale_shape(x.shape)
    args = granularity.qparam_args(x.dim())
    index = torch.arange(math.prod(shape)).reshape(shape)
    index = spread_parameter(index, x.shape, args["axis"], args["block_size"]).expand(x.shape).numpy().ravel()
    values = x.to(torch.float32).contiguous().numpy().ravel()
    finite = np.isfinite(values)
    low, high = np.full(math.prod(shape), np.inf, np.float32), np.full(math.prod(shape), -np.inf, np.float32)
    np.minimum.at(low, index[finite], values[finite] + np.float32(0))
    np.maximum.at(high, index[finite], values[finite] + np.float32(0))
    bins = np.where(finite, values, np.float32(np.inf)).view(np.uint32) >> (23 - mantissa_bits)
    counts = np.zeros((math.prod(shape), 2 ** (9 + mantissa_bits)), np.int64)
    np.add.at(counts, (index, bins), 1)
    return (
        low.reshape(shape),
        high.reshape(shape),
        np.int64((~finite).sum()),
        counts.reshape(*shape, 2 ** (9 + mantissa_bits)),
    )


def assert_state(state, want):
    for name, a, b in zip(("r_min", "r_max", "nonfinite", "counts"), state, want, strict=False):
        assert a.numpy().tobytes() == np.asarray(b).tobytes(), name


def values(n, dtype, seed=0):
    """Numbers of every size, with NaN, infinities, zeros of both signs and subnormals among them."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.int32:
        return torch.randint(-(2**31), 2**31 - 1, (n,), generator=generator, dtype=torch.int32)
    bits = torch.randint(-(2**31), 2**31 - 1, (n,), generator=generator, dtype=torch.int32).view(torch.float32)
    x = torch.where(torch.rand(n, generator=generator) < 0.5, bits, torch.randn(n, generator=generator)).to(dtype)
    special = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, -1e-40, 3.4028235e38], dtype=dtype)
    return torch.where(torch.rand(n, generator=generator) < 0.1, special[torch.arange(n) % 8], x)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("mantissa_bits", [3, 5, 7])
def test_whole_tensors(dtype, mantissa_bits):
    sizes = [*range(141), 1000, 32768, 32769, 40001, 300001]
    for n in sizes:
        x = values(n, dtype, n)
        state, plain = fresh((), mantissa_bits), fresh()
        observe_(x, *state)
        observe_(x, *plain)
        want = expected(x, PerTensor(), mantissa_bits)
        assert_state(state, want)
        assert_state(plain, want)
        assert state[3].sum() == n


GRANULARITIES = [PerAxis(0), PerAxis(1), PerAxis(-1), PerToken(), PerBlock(2), PerBlock(33, 0), PerDims((0,))]
GRANULARITIES += [PerBlock(7, 1), PerDims((0, 1))]


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_slices(granularity, dtype):
    shapes = [(3, 5, 7), (4, 2, 9, 9), (8, 70, 41), (9000, 5), (5, 9000), (520, 64), (1, 1), (0, 3), (300, 2)]
    layouts = [lambda x: x, lambda x: x.transpose(0, -1), lambda x: x[..., ::2]]
    for shape, layout in itertools.product(shapes, layouts):
        x = layout(values(math.prod(shape), dtype).reshape(shape))
        scale_shape = granularity.scale_shape(x.shape)
        if math.prod(scale_shape) > 3000:
            continue
        state, plain = fresh(scale_shape, 3), fresh(scale_shape)
        args = granularity.reduce_args(x.dim())
        observe_(x, *state, **args)
        observe_(x, *plain, **args)
        want = expected(x, granularity, 3)
        assert_state(state, want)
        assert_state(plain, want)


def test_state_is_continued():
    x = values(5000, torch.float32)
    state = fresh((), 5)
    for part in x.split([1, 0, 99, 400, 4500]):
        observe_(part, *state)
    assert_state(state, expected(x, PerTensor(), 5))


def test_nan_in_the_state_stays():
    state = fresh()
    state[0].fill_(math.nan)
    observe_(torch.ones(100), *state)
    assert state[0].isnan() and state[1] == 1


def test_counters_do_not_stick():
    """Beyond 2^24, where float counters stop, and in one bin, where threads meet."""
    state = fresh((), 5)
    zeros = torch.zeros(1).expand(2**26)
    observe_(zeros, *state)
    assert state[3][0] == state[3].sum() == 2**26


def samples():
    x = values(60, torch.float32).reshape(3, 4, 5)
    yield "tensor", (x, *fresh()), {}
    yield "counts", (x, *fresh((), 5)), {}
    yield "axis", (x.transpose(0, 2), *fresh((4,), 3)), {"axis": 1}
    yield "blocks", (x, *fresh((3, 4, 2), 3)), {"axis": -1, "block_size": [3]}
    yield "bfloat16", (x.bfloat16(), *fresh((5,))), {"axis": 2}
    yield "empty", (x[:0], *fresh((), 4)), {}


SAMPLES = list(samples())


@pytest.mark.parametrize(("args", "kwargs"), [s[1:] for s in SAMPLES], ids=[s[0] for s in SAMPLES])
def test_opcheck(args, kwargs):
    torch.library.opcheck(observe_.default, args, kwargs)


@pytest.mark.parametrize("pair", [("r_max", "r_min"), ("nonfinite", "counts"), ("x", "counts")])
def test_shared_memory_is_refused_before_anything_is_written(pair):
    memory = torch.zeros(4096, dtype=torch.int64)
    x, (r_min, r_max, nonfinite, counts) = torch.ones(8), fresh((), 3)
    if pair == ("r_max", "r_min"):
        r_max = r_min
        sentence = "observe_: r_min must not overlap r_max, but they share memory."
    elif pair == ("nonfinite", "counts"):
        nonfinite, counts = memory[5], memory
        sentence = "observe_: nonfinite must not overlap counts, but they share memory."
    else:
        x, counts = memory.view(torch.float32)[:8], memory
        sentence = "observe_: counts must not overlap x, but they share memory."
    before = [t.clone() for t in (x, r_min, r_max, nonfinite, counts)]
    with pytest.raises(RuntimeError) as error:
        observe_(x, r_min, r_max, nonfinite, counts)
    assert str(error.value) == sentence
    assert all(map(torch.equal, (x, r_min, r_max, nonfinite, counts), before))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("strides", "sentence"),
    [
        ([0], "observe_: r_max must not be expanded, but got stride 0 in dimension 0."),
        ([2], "observe_: r_max must be contiguous, but got strides [2]."),
    ],
)
def test_state_must_be_dense(strides, sentence, device):
    r_min, r_max, nonfinite = (t.to(device) for t in fresh((12,)))
    r_max = r_max.as_strided((6,), strides)
    with pytest.raises(RuntimeError) as error:
        observe_(torch.ones(4, 6, device=device), r_min[:6], r_max, nonfinite, axis=1)
    assert str(error.value) == sentence


def test_vmap_is_refused():
    state = fresh()
    with pytest.raises(RuntimeError, match="observe_: x must not be under torch.vmap"):
        torch.vmap(lambda x: observe_(x, *state))(torch.ones(3, 4))
    assert_state(state, fresh())


def test_flushed_subnormals_do_not_change_the_state():
    x = torch.tensor([1e-40, -1e-45, 3.0] * 20000)
    want = expected(x, PerTensor(), 4)
    state = fresh((), 4)
    torch.set_flush_denormal(True)
    try:
        observe_(x, *state)
    finally:
        torch.set_flush_denormal(False)
    assert_state(state, want)
