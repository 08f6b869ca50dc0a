"""Layouts: any strides in, the layout of empty_like out, and sizes beyond 2^31."""

import os

import pytest
import torch

import torch_linquant as lq
from samples import GRANULARITIES, LAYOUTS, scales, values, zero_points

MORE_LAYOUTS = {
    **LAYOUTS,
    "0d": lambda: values(),
    "negative_offset": lambda: values(3, 2, 3, 4, 5)[1],
    "channels_last_sliced": lambda: values(2, 6, 4, 5).contiguous(memory_format=torch.channels_last)[:, 1:4],
    "channels_last_3d": lambda: values(2, 3, 4, 5, 6).contiguous(memory_format=torch.channels_last_3d),
    "overlapping": lambda: values(30).as_strided((3, 4, 5), (7, 2, 1)),
    "ten_dimensions": lambda: values(2, 3, 1, 2, 1, 3, 2, 1, 2, 2).permute(9, 0, 8, 1, 7, 2, 6, 3, 5, 4),
    "chunk": lambda: values(6, 10).chunk(3, dim=1)[1],
    "transposed_matrix": lambda: values(70, 9).t(),
    "row_stride": lambda: values(9, 100)[:, :70],
}


def grains(x):
    """Every granularity that a tensor of this rank can have: (scale, arguments)."""
    yield scales(), {}
    for axis in range(x.dim()):
        yield scales(x.size(axis)), {"axis": axis}
        blocks = list(x.shape)
        blocks[axis] = -(-blocks[axis] // 2)
        yield scales(*blocks), {"axis": axis, "block_size": 2}
    if x.dim() >= 2:
        yield scales(*[-(-size // 2) for size in x.shape]), {"block_size": [2] * x.dim()}
        yield scales(*[size if d % 2 else 1 for d, size in enumerate(x.shape)]), {}


@pytest.mark.parametrize("layout", MORE_LAYOUTS)
def test_any_layout_equals_contiguous(layout):
    x = MORE_LAYOUTS[layout]()
    plain = x.contiguous()
    for scale, grain in grains(x):
        for code in ("uint8", "int16", "int4", "float8_e5m2", "float4_e2m1"):
            q, want = (lq.quantize_linear(t, scale, dtype=code, **grain) for t in (x, plain))
            assert q.stride() == torch.empty_like(x).stride()
            assert torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (q, want)))
            fake = lq.fake_quantize_linear(x, scale, dtype=code, **grain)
            assert fake.stride() == torch.empty_like(x).stride()
            assert torch.equal(fake, lq.fake_quantize_linear(plain, scale, dtype=code, **grain))
            # Codes in the layout of x, gaps and overlaps included.
            codes = want.as_strided(want.shape, want.stride())
            back = lq.dequantize_linear(q, scale, x_dtype=code, **grain)
            assert back.stride() == torch.empty_like(q).stride()
            assert torch.equal(back, lq.dequantize_linear(codes, scale, x_dtype=code, **grain))
            if code in ("int4", "float4_e2m1") and x.dim() > 0:
                packed = lq.quantize_linear(x, scale, dtype=code, packed=True, **grain)
                assert torch.equal(packed, lq.pack(want, code))


@pytest.mark.parametrize("layout", MORE_LAYOUTS)
def test_reductions_of_any_layout(layout):
    x = MORE_LAYOUTS[layout]()
    for axis in (None, *range(x.dim())):
        for a, b in zip(lq.min_max(x, axis=axis), lq.min_max(x.contiguous(), axis=axis), strict=True):
            assert torch.equal(a, b)
        y, scale, zero_point = lq.dynamic_quantize_linear(x, axis=axis)
        want = lq.dynamic_quantize_linear(x.contiguous(), axis=axis)
        assert torch.equal(y, want[0]) and torch.equal(scale, want[1]) and torch.equal(zero_point, want[2])
        assert y.stride() == torch.empty_like(x).stride()


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_strided_scales_and_zero_points(granularity):
    x_shape, s_shape, axis, block_size = GRANULARITIES[granularity]
    x, scale, zero_point = values(*x_shape), scales(*s_shape), zero_points(*s_shape)
    want = lq.quantize_linear(x, scale, zero_point, axis=axis, block_size=block_size)
    gaps = [torch.stack([t, torch.zeros_like(t)], dim=-1)[..., 0] for t in (scale, zero_point)]
    assert torch.equal(lq.quantize_linear(x, *gaps, axis=axis, block_size=block_size), want)
    order = tuple(reversed(range(scale.dim())))
    turned = [t.permute(order).contiguous().permute(order) for t in gaps]
    assert torch.equal(lq.quantize_linear(x, *turned, axis=axis, block_size=block_size), want)


def test_codes_with_gaps():
    codes = torch.randint(-128, 128, (6, 40), dtype=torch.int8)
    scale = scales(10)
    for view in (codes[:, 3:13], codes[:, ::4], codes.t()[:10].t(), codes[:1, :10].expand(6, 10)):
        got = lq.dequantize_linear(view, scale)
        assert torch.equal(got, lq.dequantize_linear(view.contiguous(), scale))


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (2, 0, 3)])
def test_no_elements(shape):
    x = torch.empty(shape)
    for axis in range(x.dim()):
        scale = torch.ones(x.size(axis))
        for fn in (lq.quantize_linear, lq.fake_quantize_linear):
            assert fn(x, scale, axis=axis).shape == x.shape
        assert lq.dequantize_linear(x.to(torch.int8), scale, axis=axis).shape == x.shape
    assert lq.dynamic_quantize_linear(x)[0].shape == x.shape


def available_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.xdist_group("memory")
def test_more_than_2_to_the_31_elements():
    """int64 indexing: float16 in, int8 out, 2^31 + 1 elements; what lies at and beyond 2^31 is right."""
    n = 2**31 + 1
    need = 4 * n + 2**30
    if available_bytes() < need:
        pytest.skip(f"needs {need / 2**30:.0f} GiB of memory, {available_bytes() / 2**30:.0f} GiB are free")
    x = torch.zeros(n, dtype=torch.float16)
    places = torch.tensor([0, 1, 2**31 - 65, 2**31 - 1, 2**31])
    x[places] = torch.tensor([-3.0, 5.0, 7.0, -9.0, 100.0], dtype=torch.float16)
    q = lq.quantize_linear(x, torch.tensor(0.5), dtype="int8")
    assert q[places].tolist() == [-6, 10, 14, -18, 127]
    assert torch.count_nonzero(q) == 5
    r_min, r_max = lq.min_max(x)
    assert (r_min.item(), r_max.item()) == (-9.0, 100.0)
    del x
    back = lq.dequantize_linear(q, torch.tensor(0.5), dtype=torch.float16)
    assert back[places].tolist() == [-3.0, 5.0, 7.0, -9.0, 63.5]
