"""Quantized layers: each computes the float layer on dequantized codes, and its state survives copies and casts."""

import copy
import pickle

import pytest
import torch
from torch import nn

from torch_linquant.granularity import PerAxis, PerBlock, PerTensor
from torch_linquant.modules import QuantizedConv2d, QuantizedLinear
from torch_linquant.observers import MinMaxObserver
from torch_linquant.qparams import choose_qparams


def observed(x, dtype="uint8", *args, **options):
    observer = MinMaxObserver(dtype, *args, **options)
    observer(x)
    return observer


def round_trip(x, scale, zero_point, low, high, axis=None):
    """dequantize(quantize(x)) written down once more, in plain torch."""
    if axis is not None:
        shape = [-1 if d == axis % x.dim() else 1 for d in range(x.dim())]
        scale, zero_point = scale.reshape(shape), zero_point.reshape(shape)
    codes = (torch.round(x / scale) + zero_point.float()).clamp(low, high)
    return (codes - zero_point.float()) * scale


def expected_output(module, quantized, x):
    """The float module itself, run on the values its codes stand for."""
    reference = copy.deepcopy(module)
    weight = module.weight.detach()
    other_dims = tuple(range(1, weight.dim()))
    scale, zero_point = choose_qparams(weight.amin(other_dims), weight.amax(other_dims), "int8", symmetric=True)
    reference.weight.data = round_trip(weight, scale, zero_point, -128, 127, axis=0)
    with torch.no_grad():
        return reference(round_trip(x, quantized.input_scale, quantized.input_zero_point, 0, 255))


def same_state(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) and a[key].dtype == b[key].dtype for key in a)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 5), (0, 5)], ids=str)
def test_linear_is_the_float_layer_on_codes(shape, bias):
    torch.manual_seed(0)
    module = nn.Linear(5, 7, bias=bias)
    x = torch.randn(shape)
    quantized = QuantizedLinear.from_float(module, observed(torch.randn(16, 5)))
    assert torch.equal(quantized(x), expected_output(module, quantized, x))
    assert quantized.weight.dtype == torch.int8 and quantized.weight.shape == (7, 5)
    assert quantized.weight_scale.shape == quantized.weight_zero_point.shape == (7,)
    assert quantized.input_scale.shape == quantized.input_zero_point.shape == ()
    assert quantized.weight_zero_point.eq(0).all()


CONVOLUTIONS = {
    "plain": dict(kernel_size=3),
    "pointwise": dict(kernel_size=1),
    "no_bias": dict(kernel_size=3, bias=False),
    "stride": dict(kernel_size=3, stride=(2, 1), padding=(0, 2)),
    "dilation": dict(kernel_size=(3, 2), dilation=(2, 3), padding=1),
    "groups": dict(kernel_size=3, groups=2),
    "depthwise": dict(kernel_size=5, groups=4, padding=2),
    "same": dict(kernel_size=(4, 3), padding="same", dilation=(1, 2)),
    "valid": dict(kernel_size=3, padding="valid"),
    "reflect": dict(kernel_size=3, padding=(2, 1), padding_mode="reflect"),
    "replicate": dict(kernel_size=(3, 5), padding=(1, 2), padding_mode="replicate", groups=2),
    "circular": dict(kernel_size=3, padding=1, padding_mode="circular", stride=2),
    "reflect_same": dict(kernel_size=(4, 3), padding="same", padding_mode="reflect"),
    "circular_valid": dict(kernel_size=3, padding="valid", padding_mode="circular"),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("options", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_conv2d_is_the_float_layer_on_codes(options):
    torch.manual_seed(0)
    module = nn.Conv2d(4, 8, **options)
    x = torch.randn(2, 4, 9, 10)
    quantized = QuantizedConv2d.from_float(module, observed(x))
    assert torch.equal(quantized(x), expected_output(module, quantized, x))
    torch.testing.assert_close(quantized(x[0]), quantized(x)[0])
    assert quantized.weight_scale.shape == (8,)


def test_channels_last_stays_channels_last():
    module = nn.Conv2d(4, 8, 3)
    x = torch.randn(2, 4, 9, 10).to(memory_format=torch.channels_last)
    quantized = QuantizedConv2d.from_float(module, observed(x))
    assert quantized.quantize_input(x).is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(quantized(x), expected_output(module, quantized, x))


def test_weight_error_is_at_most_half_a_step():
    torch.manual_seed(0)
    module = nn.Linear(64, 32)
    quantized = QuantizedLinear.from_float(module, observed(torch.randn(4, 64)))
    error = (quantized.dequantize_weight() - module.weight).abs()
    # The largest weight of a row saturates where it is positive: its code would be 127.5.
    steps = error / quantized.weight_scale[:, None]
    assert steps.max() <= 0.5 + 1e-4


def test_a_dead_channel_stays_zero():
    module = nn.Linear(4, 2)
    module.weight.data[1] = 0
    quantized = QuantizedLinear.from_float(module, observed(torch.ones(1, 4)))
    assert quantized.weight[1].eq(0).all() and (quantized.weight_scale > 0).all()
    assert quantized(torch.ones(1, 4))[0, 1] == module.bias[1]


def test_the_float_module_is_left_alone():
    module = nn.Linear(4, 2).eval()
    before = copy.deepcopy(module.state_dict())
    quantized = QuantizedLinear.from_float(module, observed(torch.ones(1, 4)))
    quantized.bias.zero_(), quantized.weight.zero_()
    assert same_state(module.state_dict(), before)
    assert not quantized.training and QuantizedLinear.from_float(module.train(), observed(torch.ones(1))).training


def test_activation_options_reach_the_codes():
    x = torch.linspace(-1, 1, 101).reshape(1, -1)
    quantized = QuantizedLinear.from_float(nn.Linear(101, 2), observed(x, "int8", symmetric=True, quant_min=-127))
    codes = quantized.quantize_input(x * 10)
    assert codes.dtype == torch.int8 and (codes.min(), codes.max()) == (-127, 127)
    assert quantized.input_zero_point == 0


def test_activation_per_axis():
    torch.manual_seed(0)
    x = torch.randn(8, 3, 5, 5) * torch.tensor([0.01, 1, 100]).reshape(1, 3, 1, 1)
    module = nn.Conv2d(3, 4, 3)
    quantized = QuantizedConv2d.from_float(module, observed(x, "uint8", PerAxis(1)))
    assert quantized.input_scale.shape == (3,)
    values = quantized.dequantize_input(quantized.quantize_input(x), torch.float32)
    assert torch.equal(values, round_trip(x, quantized.input_scale, quantized.input_zero_point, 0, 255, axis=1))


@pytest.mark.parametrize(
    ("dtype", "granularity", "scale_shape", "codes_bytes"),
    [
        ("uint8", PerAxis(0), (6,), 6 * 33),
        ("int8", PerTensor(), (), 6 * 33),
        ("int4", PerBlock(8, axis=1), (6, 5), 6 * 17),
        ("uint4", PerAxis(0), (6,), 6 * 17),
        ("int2", PerBlock(4, axis=1), (6, 9), 6 * 9),
    ],
    ids=str,
)
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "affine"])
def test_other_weights(dtype, granularity, scale_shape, codes_bytes, symmetric):
    torch.manual_seed(0)
    module = nn.Linear(33, 6)
    x = torch.randn(4, 33)
    quantized = QuantizedLinear.from_float(
        module,
        observed(x, "int16", symmetric=True),
        weight_dtype=dtype,
        weight_granularity=granularity,
        weight_symmetric=symmetric,
    )
    assert quantized.weight.nbytes == codes_bytes
    assert quantized.weight_scale.shape == quantized.weight_zero_point.shape == scale_shape
    weight = quantized.dequantize_weight()
    assert weight.shape == module.weight.shape
    columns = (
        torch.arange(33) // granularity.block_size if isinstance(granularity, PerBlock) else torch.zeros(33).long()
    )
    step = quantized.weight_scale if not scale_shape else quantized.weight_scale.reshape(6, -1)[:, columns]
    tolerance = 1 if symmetric else 0.5  # a symmetric range may saturate: by up to half a step more
    assert ((weight - module.weight).abs() <= step * (tolerance + 1e-3)).all()
    with torch.no_grad():
        torch.testing.assert_close(quantized(x), nn.functional.linear(x, weight, module.bias), rtol=0, atol=1e-3)


def test_4_bit_convolution_with_an_odd_kernel():
    torch.manual_seed(0)
    module = nn.Conv2d(3, 4, 3)
    x = torch.randn(2, 3, 8, 8)
    quantized = QuantizedConv2d.from_float(module, observed(x), weight_dtype="int4")
    assert quantized.weight.shape == (4, 3, 3, 2)
    assert quantized.dequantize_weight().shape == module.weight.shape
    assert quantized(x).shape == module(x).shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_casting_keeps_scales_and_codes(dtype):
    torch.manual_seed(0)
    module = nn.Linear(6, 3)
    x = torch.randn(8, 6)
    quantized = QuantizedLinear.from_float(module, observed(x))
    before = {key: value.clone() for key, value in quantized.state_dict().items() if key != "bias"}
    quantized.to(dtype)
    after = quantized.state_dict()
    assert after.pop("bias").dtype == dtype
    assert same_state(after, before)
    y = quantized(x.to(dtype))
    assert y.dtype == dtype
    torch.testing.assert_close(y.float(), module(x).detach(), rtol=0, atol=0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_models_quantize(dtype):
    torch.manual_seed(0)
    module = nn.Linear(16, 8).to(dtype)
    x = torch.randn(4, 16).to(dtype)
    quantized = QuantizedLinear.from_float(module, observed(x))
    assert quantized.weight_scale.dtype == quantized.input_scale.dtype == torch.float32
    y = quantized(x)
    assert y.dtype == dtype
    torch.testing.assert_close(y.float(), module(x).float(), rtol=0, atol=0.1)


def test_autocast():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))
    x = torch.randn(4, 16)
    quantized = nn.Sequential(
        QuantizedLinear.from_float(module[0], observed(x)),
        QuantizedLinear.from_float(module[1], observed(module[0](x))),
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = quantized(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), module(x).detach(), rtol=0, atol=0.1)


def test_state_dict_round_trip():
    torch.manual_seed(0)
    x = torch.randn(8, 6)
    one = QuantizedLinear.from_float(nn.Linear(6, 3), observed(x))
    two = QuantizedLinear.from_float(nn.Linear(6, 3), observed(x * 7))
    assert set(one.state_dict()) == {
        "weight",
        "weight_scale",
        "weight_zero_point",
        "input_scale",
        "input_zero_point",
        "bias",
    }
    two.load_state_dict(one.state_dict())
    assert same_state(two.state_dict(), one.state_dict())
    assert torch.equal(two(x), one(x))


@pytest.mark.parametrize("strict", [True, False])
def test_float_weights_are_not_taken_for_codes(strict):
    module = nn.Linear(6, 3)
    quantized = QuantizedLinear.from_float(module, observed(torch.randn(2, 6)))
    before = copy.deepcopy(quantized.state_dict())
    with pytest.raises(RuntimeError, match="weight must be int8, but got float32"):
        quantized.load_state_dict(module.state_dict(), strict=strict)
    assert same_state(quantized.state_dict(), before)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies(copied):
    x = torch.randn(2, 3, 8, 8)
    quantized = QuantizedConv2d.from_float(nn.Conv2d(3, 4, 3, padding_mode="circular", padding=1), observed(x))
    assert torch.equal(copied(quantized)(x), quantized(x))


def test_unseen_observer_is_refused():
    with pytest.raises(RuntimeError, match="'fc.input' has seen no data"):
        QuantizedLinear.from_float(nn.Linear(2, 2), MinMaxObserver(name="fc.input"))


def test_repr():
    text = repr(QuantizedConv2d.from_float(nn.Conv2d(3, 4, 3, bias=False), observed(torch.ones(1))))
    for part in ("in_channels=3", "kernel_size=(3, 3)", "bias=False", f"weight=int8 {PerAxis(0)}", "input=uint8"):
        assert part in text


def test_compiled_equals_eager():
    torch.manual_seed(0)
    x = torch.randn(8, 6)
    quantized = QuantizedLinear.from_float(nn.Linear(6, 3), observed(x))
    # Inductor may sum a product of float matrices in its own order: bits are promised up to there.
    same_sums = torch.compile(quantized, fullgraph=True, backend="aot_eager")
    own_sums = torch.compile(quantized, fullgraph=True)
    for batch in (x, x[:3], x[:1] * 100):
        assert torch.equal(same_sums(batch), quantized(batch))
        torch.testing.assert_close(own_sums(batch), quantized(batch))
