"""prepare, calibrate, convert: which layers are taken, what is left alone, and what the reports say."""

import copy
import math

import pytest
import torch
from torch import nn

from torch_linquant.granularity import PerAxis, PerBlock, PerDims, PerTensor, PerToken
from torch_linquant.modules import QuantizedConv2d, QuantizedLayer, QuantizedLinear
from torch_linquant.observers import MinMaxObserver, Observer
from torch_linquant.weights import quantize_tensor
from torch_linquant.workflow import calibrate, convert, prepare, sqnr, weight_bytes


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(8, 16)
        self.fc2 = nn.Linear(16, 8, bias=False)
        self.drop = nn.Dropout(0.5)

    def forward(self, x, scale=1.0):
        return x + scale * self.drop(self.fc2(torch.relu(self.fc1(x))))


class Model(nn.Module):
    """Convolutions and linears, nested, a layer and a whole block used twice, a reference that no container knows."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 4, 3, groups=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 8, 3, stride=2)
        )
        self.encoder = nn.ModuleDict({"a": Block(), "b": Block()})
        self.encoder["again"] = self.encoder["a"]
        self.head = nn.Linear(8, 2)
        self.alias = self.head
        self.plain = [self.head]

    def forward(self, x):
        x = self.stem(x).mean((2, 3))
        for block in self.encoder.values():
            x = block(x)
        return self.plain[0](x) + self.head(x)


LAYERS = ["stem.0", "stem.3", "encoder.a.fc1", "encoder.a.fc2", "encoder.b.fc1", "encoder.b.fc2", "head"]


def data(n=4, count=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, 3, 10, 10, generator=generator) for _ in range(count)]


def make(seed=0):
    torch.manual_seed(seed)
    return Model()


def quantize(model, batches, **options):
    observed = prepare(model)
    calibrate(observed, batches)
    return convert(observed, **options)


def snapshot(model):
    return {key: value.clone() for key, value in model.state_dict().items()}


def unchanged(model, before):
    now = model.state_dict()
    return now.keys() == before.keys() and all(torch.equal(now[key], before[key]) for key in before)


# prepare


def test_prepare_observes_each_layer_once_and_leaves_the_model_alone():
    model = make()
    before, types = snapshot(model), [type(m) for m in model.modules()]
    observed = prepare(model)
    observers = {name: m for name, m in observed.named_modules() if isinstance(m, Observer)}
    assert list(observers) == [f"{name}.input_observer" for name in LAYERS]
    assert [o.name for o in observers.values()] == [f"{name}.input" for name in LAYERS]
    calibrate(observed, data())
    assert unchanged(model, before) and [type(m) for m in model.modules()] == types
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_prepared_model_computes_the_same_and_trains():
    model = make().eval()
    observed = prepare(model)
    x = data()[0]
    assert torch.equal(observed(x), model(x))
    observed.train()(x).sum().backward()
    assert observed.head.weight.grad is not None


def test_state_of_the_prepared_model_is_the_models_plus_the_observers():
    model = make()
    observed = prepare(model)
    missing, unexpected = observed.load_state_dict(model.state_dict(), strict=False)
    assert unexpected == [] and all(".input_observer." in key for key in missing)


def test_calibration_can_be_saved_and_resumed():
    whole, part = prepare(make()), prepare(make())
    calibrate(whole, data(count=4))
    calibrate(part, data(count=4)[:2])
    resumed = prepare(make())
    resumed.load_state_dict(part.state_dict())
    calibrate(resumed, data(count=4)[2:])
    assert unchanged(resumed, whole.state_dict())


def test_ranges_are_those_of_the_inputs():
    model = make().eval()
    observed = prepare(model, MinMaxObserver("int8"))
    batches = data()
    calibrate(observed, batches)
    low, high = observed.stem[0].input_observer.range()
    assert low == torch.cat(batches).min() and high == torch.cat(batches).max()
    assert observed.head.input_observer.dtype.name == "int8"


def test_each_layer_gets_a_fresh_observer():
    given = MinMaxObserver("int8", symmetric=True)
    given(torch.full((3,), 99.0))
    observed = prepare(make(), given)
    own = [observed.get_submodule(name).input_observer for name in LAYERS]
    assert len({id(o) for o in own}) == len(LAYERS) and given not in own
    assert not any(o.seen for o in own) and all(o.symmetric for o in own)
    assert given.r_max == 99 and given.name == ""


def test_prepare_works_on_a_single_layer():
    observed = prepare(nn.Linear(3, 2))
    assert observed.input_observer.name == "input"
    x = torch.randn(4, 3)
    calibrate(observed, [x])
    assert isinstance(convert(observed), QuantizedLinear)


@pytest.mark.parametrize(
    ("skip", "left"),
    [
        (["head"], [name for name in LAYERS if name != "head"]),
        (["alias"], [name for name in LAYERS if name != "head"]),
        (["stem", "encoder.b"], ["encoder.a.fc1", "encoder.a.fc2", "head"]),
        (["encoder.again.fc1"], [name for name in LAYERS if name != "encoder.a.fc1"]),
    ],
    ids=str,
)
def test_skipped_layers_stay_float(skip, left):
    observed = prepare(make(), skip=skip)
    calibrate(observed, data())
    quantized = convert(observed)
    assert [name for name, m in quantized.named_modules() if isinstance(m, QuantizedLayer)] == left


def test_prepare_refuses():
    with pytest.raises(ValueError, match="skip must name modules of the model, but got 'encoder.c'"):
        prepare(make(), skip=["head", "encoder.c"])
    with pytest.raises(ValueError, match="observer must be an Observer, but got <class"):
        prepare(make(), MinMaxObserver)
    with pytest.raises(ValueError, match="must be a float model, but got one with observers"):
        prepare(prepare(make()))
    with pytest.raises(ValueError, match="must hold an nn.Linear or nn.Conv2d"):
        prepare(nn.ReLU())


# calibrate


@pytest.mark.parametrize(
    "batch",
    [(torch.randn(2, 8), 0.5), [torch.randn(2, 8)], {"x": torch.randn(2, 8), "scale": 2.0}, torch.randn(2, 8)],
    ids=["tuple", "list", "dict", "tensor"],
)
def test_forms_of_a_batch(batch):
    observed = prepare(Block())
    assert calibrate(observed, [batch]) == 1
    assert observed.fc1.input_observer.seen and observed.fc2.input_observer.seen


def test_input_given_by_name():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x):
            return self.fc(input=x)

    quantized = quantize(Named(), [torch.ones(1, 2)])
    assert quantized(torch.ones(1, 2)).shape == (1, 2)


def test_steps_take_no_more_than_they_need():
    def endless():
        while True:
            taken.append(1)
            yield torch.randn(2, 8)

    taken = []
    assert calibrate(prepare(Block()), endless(), steps=5) == 5
    assert len(taken) == 5


def test_progress():
    seen = []
    batches = [torch.randn(2, 8)] * 4
    calibrate(prepare(Block()), batches, progress=lambda done, total: seen.append((done, total)))
    calibrate(prepare(Block()), (batch for batch in batches), progress=lambda done, total: seen.append((done, total)))
    calibrate(prepare(Block()), batches, steps=2, progress=lambda done, total: seen.append((done, total)))
    calibrate(prepare(Block()), batches, steps=9, progress=lambda done, total: seen.append((done, total)))
    assert seen[:4] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert seen[4:8] == [(1, None), (2, None), (3, None), (4, None)]
    assert seen[8:10] == [(1, 2), (2, 2)]
    assert seen[10:] == [(1, 4), (2, 4), (3, 4), (4, 4)]


@pytest.mark.parametrize("fails", [False, True], ids=["ends", "raises"])
def test_modes_are_as_they_were(fails):
    observed = prepare(make())
    observed.train()
    observed.stem[1].eval()
    observed.encoder["b"].eval()
    modes = [m.training for m in observed.modules()]
    statistics = observed.stem[1].running_mean.clone()

    def watch(module, args):
        assert not any(m.training for m in observed.modules()) and not torch.is_grad_enabled()
        if fails:
            raise KeyError("on purpose")

    observed.head.register_forward_pre_hook(watch)
    if fails:
        with pytest.raises(KeyError):
            calibrate(observed, data())
    else:
        calibrate(observed, data())
    assert [m.training for m in observed.modules()] == modes and torch.is_grad_enabled()
    assert torch.equal(observed.stem[1].running_mean, statistics)


def test_calibrate_refuses():
    with pytest.raises(ValueError, match="must have observers in it, but got none"):
        calibrate(make(), data())
    with pytest.raises(ValueError, match="steps must be None or at least 1, but got 0"):
        calibrate(prepare(make()), data(), steps=0)


# convert


def test_convert_replaces_each_layer_wherever_it_is():
    observed = prepare(make())
    calibrate(observed, data())
    before = snapshot(observed)
    quantized = convert(observed)
    kinds = {name: type(m) for name, m in quantized.named_modules() if isinstance(m, QuantizedLayer)}
    assert list(kinds) == LAYERS
    assert kinds["stem.0"] is QuantizedConv2d and kinds["head"] is QuantizedLinear
    assert not any(type(m) in (nn.Linear, nn.Conv2d) or isinstance(m, Observer) for m in quantized.modules())
    assert quantized.alias is quantized.head and quantized.plain[0] is quantized.head
    assert quantized.encoder["again"] is quantized.encoder["a"]
    assert unchanged(observed, before)
    x = data(seed=9)[0]
    ratio = (observed.eval()(x) - quantized.eval()(x)).norm() / observed(x).norm()
    assert 0 < ratio < 0.05


def test_convert_keeps_the_rest_and_its_modes():
    model = make()
    model.stem[1].eval()
    quantized = quantize(model, data())
    assert [m.training for m in quantized.stem] == [m.training for m in model.stem]
    assert torch.equal(quantized.stem[1].running_mean, model.stem[1].running_mean)
    assert quantized.stem[1].weight is not model.stem[1].weight


def test_converting_twice_gives_the_same_and_calibration_may_go_on():
    observed = prepare(make())
    calibrate(observed, data())
    one, two = convert(observed), convert(observed)
    assert unchanged(one, two.state_dict())
    calibrate(observed, [10 * batch for batch in data()])
    assert convert(observed).stem[0].input_scale > one.stem[0].input_scale


def test_unseen_observer_is_named():
    model = nn.ModuleDict({"encoder": Block(), "other": Block()})
    model.forward = lambda x: x
    with pytest.raises(RuntimeError) as error:
        convert(prepare(model))
    assert str(error.value) == (
        "convert: observer 'encoder.fc1.input' has seen no data. "
        "Run calibration batches between prepare() and convert()."
    )


def test_observer_of_nothing_but_nan_is_named():
    observed = prepare(nn.Sequential(nn.Linear(2, 2)))
    calibrate(observed, [torch.full((1, 2), math.nan)])
    with pytest.raises(RuntimeError, match="observer '0.input' has seen no finite value, but 2 NaN or infinite ones"):
        convert(observed)


def test_convert_refuses_a_float_model():
    with pytest.raises(ValueError, match=r"must have observers in it, but got none. Call prepare\(\) first"):
        convert(make())


def test_weight_options():
    quantized = quantize(Block(), [torch.randn(4, 8)], weight_dtype="int4", weight_granularity=PerBlock(4, axis=1))
    assert quantized.fc1.weight_dtype.name == "int4"
    assert quantized.fc1.weight_scale.shape == (16, 2)


def test_observers_per_channel():
    observed = prepare(nn.Sequential(nn.Conv2d(3, 4, 3)), MinMaxObserver("uint8", PerAxis(1)))
    calibrate(observed, data())
    quantized = convert(observed)
    assert quantized[0].input_scale.shape == (3,)
    assert quantized(data()[0]).isfinite().all()


class Scaled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


def test_subclasses_are_left_alone():
    observed = prepare(nn.Sequential(Scaled(2, 2), nn.Linear(2, 2)))
    calibrate(observed, [torch.ones(1, 2)])
    quantized = convert(observed)
    assert type(quantized[0]) is Scaled and type(quantized[1]) is QuantizedLinear


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("mask", [False, True], ids=["no_mask", "mask"])
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_transformer_encoder(grad, mask):
    """Its eval mode may hand the layers' weights to a fused float kernel, which must not get codes."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(3, 7, 16)
    padding = torch.arange(7)[None] >= torch.tensor([[7], [5], [3]]) if mask else None
    quantized = quantize(model, [{"src": x, "src_key_padding_mask": padding}])
    assert sum(isinstance(m, QuantizedLinear) for m in quantized.modules()) == 4
    with torch.set_grad_enabled(grad):
        expected = model(x, src_key_padding_mask=padding)
        actual = quantized(x, src_key_padding_mask=padding)
    keep = slice(None) if padding is None else ~padding
    assert (expected[keep] - actual[keep]).abs().max() < 0.1


# Reports


def test_sqnr_is_the_ratio_of_powers():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    x = torch.randn(32, 8)
    quantized = quantize(model, [x])
    ratios = sqnr(model, quantized, x)
    assert list(ratios) == ["0", "2"]
    with torch.no_grad():
        exact, noisy = model(x).double(), quantized(x).double()
    expected = 10 * math.log10(exact.square().sum() / (exact - noisy).square().sum())
    assert ratios["2"] == pytest.approx(expected)
    assert 25 < ratios["0"] < 60
    assert not any(m._forward_hooks for m in [*model.modules(), *quantized.modules()])


def test_sqnr_of_the_extremes():
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    model[0].weight.data = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    quantized = quantize(model, [torch.tensor([[255.0, 0.0]])])
    quantized[0].weight_scale.copy_(torch.tensor([1 / 127, 1.0]))
    assert sqnr(model, quantized, torch.zeros(1, 2)) == {"0": math.inf}
    quantized[0].bias = torch.ones(2)
    assert sqnr(model, quantized, torch.zeros(1, 2)) == {"0": -math.inf}


def test_sqnr_counts_every_call_and_leaves_out_what_is_not_reached():
    model = make().train()
    quantized = quantize(model, data())
    ratios = sqnr(model, quantized, data(seed=5)[0])
    assert list(ratios) == LAYERS
    assert all(15 < ratio < 60 for ratio in ratios.values())
    assert model.training

    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x, both=False):
            return self.used(x) + (self.unused(x) if both else 0)

    branches = Branches()
    both = quantize(branches, [(torch.ones(1, 2), True)])
    assert list(sqnr(branches, both, torch.ones(1, 2))) == ["used"]


def test_weight_bytes():
    assert weight_bytes(nn.Linear(10, 10)) == 440
    tied = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10))
    tied[1].weight = tied[0].weight
    assert weight_bytes(tied) == 480
    model = make()
    assert weight_bytes(prepare(model)) == weight_bytes(model)
    quantized = quantize(nn.Linear(100, 10), [torch.ones(1, 100)])
    # codes, then a scale and a zero point for each row and for the input, then the bias
    assert weight_bytes(quantized) == 1000 + 10 * 5 + 5 + 40


def test_models_copy_and_compile():
    model = make().eval()
    observed = prepare(model)
    torch._dynamo.reset()
    compiled = torch.compile(observed, fullgraph=True)
    compiled(data()[0])
    eager = prepare(model)
    eager(data()[0])
    for name in LAYERS:
        one, two = (m.get_submodule(name).input_observer.range() for m in (observed, eager))
        torch.testing.assert_close(one, two)
    quantized = convert(copy.deepcopy(observed))
    x = data(seed=3)[0]
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(quantized, fullgraph=True)(x), quantized(x), rtol=0, atol=0.05)


# What users get wrong.


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()


@pytest.mark.parametrize("granularity", [PerToken(), PerBlock(2), PerDims((0,))], ids=str)
def test_input_scales_of_tokens_or_blocks_are_refused(granularity):
    """They would fit the batches of the calibration alone."""
    with pytest.raises(ValueError, match=r"prepare: observer must be PerTensor\(\) or PerAxis\(axis\), but got"):
        prepare(small_model(), MinMaxObserver("int8", granularity))


def test_a_string_is_no_collection_of_paths():
    with pytest.raises(ValueError, match=r"skip must be a collection of paths, but got '0'. Pass \['0'\]"):
        prepare(small_model(), skip="0")


def test_a_tensor_is_no_iterable_of_batches():
    observed = prepare(small_model())
    with pytest.raises(ValueError, match=r"got a tensor of shape \[3, 4\]. Pass \[x\] for one batch"):
        calibrate(observed, torch.randn(3, 4))
    assert not observed[0].input_observer.seen


@pytest.mark.parametrize("granularity", [0, PerTensor, "per_tensor", None], ids=str)
def test_what_is_no_granularity_is_refused_at_once(granularity):
    sentence = r"granularity must be PerTensor\(\), PerAxis\(axis\), .*, but got"
    with pytest.raises(ValueError, match=f"MinMaxObserver: {sentence}"):
        MinMaxObserver("int8", granularity)
    with pytest.raises(ValueError, match=f"quantize_tensor: {sentence}"):
        quantize_tensor(torch.ones(3), "int8", granularity)
    observed = prepare(small_model())
    calibrate(observed, [torch.randn(3, 4)])
    with pytest.raises(ValueError, match=f"QuantizedLinear: weight_{sentence}"):
        convert(observed, weight_granularity=granularity)


def test_weights_of_32_bits_are_refused():
    observed = prepare(small_model())
    calibrate(observed, [torch.randn(3, 4)])
    with pytest.raises(ValueError, match="weight_dtype must have at most 16 bits, but got 'int32'"):
        convert(observed, weight_dtype="int32")


def test_the_users_hooks_go_along():
    model = small_model()
    model[0].register_forward_hook(lambda layer, args, output: output * 2)
    model[2].register_forward_pre_hook(lambda layer, args: (args[0] + 1,))
    model[2].register_forward_pre_hook(lambda layer, args, kwargs: (args, kwargs), with_kwargs=True)
    x = torch.randn(64, 4)
    observed = prepare(model)
    calibrate(observed, [x])
    quantized = convert(observed)
    assert (quantized(x) - model(x)).norm() < 0.05 * model(x).norm()
    assert not any("observe" in str(hook) for hook in quantized[0]._forward_pre_hooks.values())


def test_sqnr_of_models_the_wrong_way_round():
    model = small_model()
    observed = prepare(model)
    calibrate(observed, [torch.randn(3, 4)])
    with pytest.raises(ValueError, match="quantized_model must hold quantized layers"):
        sqnr(convert(observed), model, torch.randn(3, 4))


def test_integer_inputs_compute_in_float32():
    observed = prepare(small_model())
    calibrate(observed, [torch.randn(16, 4) * 5])
    quantized = convert(observed)
    x = torch.randint(-5, 5, (3, 4), dtype=torch.int32)
    assert torch.equal(quantized(x), quantized(x.float()))
