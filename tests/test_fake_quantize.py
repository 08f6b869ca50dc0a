"""FakeQuantize and LearnedFakeQuantize: bits, gradients, training, state, compile and export."""

import copy
import io
import math
import pickle

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import fresh_cache
from torch.nn.utils import parametrize

import torch_linquant as lq
from torch_linquant import (
    FakeQuantize,
    LearnedFakeQuantize,
    MinMaxObserver,
    PerAxis,
    PerBlock,
    PerTensor,
    PerToken,
    choose_qparams,
)

TENSOR = PerTensor()
GRAINS = [TENSOR, PerAxis(0), PerAxis(-1), PerBlock(4), PerBlock((2, 4)), PerToken()]
FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
CODES = ["uint8", "int8", "int4", "float8_e4m3fn", "float4_e2m1"]


def batch(seed=0, rows=6, columns=10, dtype=torch.float32):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)


def state(module):
    return {key: value.clone() for key, value in module.state_dict().items()}


def assert_same_state(a, b):
    assert a.keys() == b.keys()
    for key in a:
        assert torch.equal(a[key], b[key]), key


# --- FakeQuantize ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("granularity", GRAINS, ids=str)
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_what_is_trained_is_what_is_converted(granularity, code, dtype):
    """The value is dequantize(quantize(x)) with the scale of the range seen, for every float type."""
    fake = FakeQuantize(code, granularity)
    observer = MinMaxObserver(code, granularity)
    for seed in range(3):
        x = batch(seed, dtype=dtype)
        observer(x)
        y = fake(x)
        scale, zero_point = observer.calculate_qparams()
        grain = granularity.qparam_args(2)
        q = lq.quantize_linear(x, scale, zero_point, dtype=code, **grain)
        assert y.dtype == dtype
        assert torch.equal(y, lq.dequantize_linear(q, scale, zero_point, x_dtype=code, **grain).to(dtype))


def test_evaluation_holds_the_range():
    fake = FakeQuantize("int8")
    fake(batch())
    before = state(fake)
    fake.eval()(batch() * 100)
    assert_same_state(state(fake), before)
    fake.train()
    fake.observer.enabled = False
    fake(batch() * 100)
    assert_same_state(state(fake), before)
    fake.enabled = False
    x = batch()
    assert fake(x) is x


def test_gradient():
    fake = FakeQuantize("int8", observer=None)
    fake(batch())
    x = (batch(1) * 3).requires_grad_()
    fake.eval()(x).sum().backward()
    scale, zero_point = choose_qparams(fake.observer.r_min, fake.observer.r_max, "int8")
    code = (x.detach() / scale).round() + zero_point
    assert torch.equal(x.grad, ((code >= -128) & (code <= 127)).float())
    y = x.detach().requires_grad_()
    through = FakeQuantize(observer=fake.observer, ste="identity").eval()
    through(y).sum().backward()
    assert torch.equal(y.grad, torch.ones_like(y))


def test_unseen_data_is_an_error_not_garbage():
    with pytest.raises(RuntimeError, match="has seen no data"):
        FakeQuantize("int8").eval()(batch())


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"observer": 3}, "observer must be an Observer, but got 3"),
        ({"observer": MinMaxObserver(), "dtype": "int8"}, "must be left out where observer is given"),
        ({"observer": MinMaxObserver(), "symmetric": True}, "must be left out where observer is given"),
        ({"dtype": "int3"}, "dtype must be one of"),
    ],
)
def test_bad_arguments(arguments, match):
    with pytest.raises(ValueError, match=match):
        FakeQuantize(**arguments)


# --- LearnedFakeQuantize ---------------------------------------------------------------------------------------------


def learned(granularity=TENSOR, code="int4", learn_zero_point=False, **options):
    observer = MinMaxObserver(code, granularity, symmetric=not learn_zero_point)
    observer(batch())
    return LearnedFakeQuantize.from_observer(observer, learn_zero_point=learn_zero_point, **options)


@pytest.mark.parametrize("granularity", GRAINS, ids=str)
@pytest.mark.parametrize("learn_zero_point", [False, True])
def test_starts_where_the_observer_ends(granularity, learn_zero_point):
    observer = MinMaxObserver("int4", granularity, symmetric=not learn_zero_point)
    observer(batch())
    scale, zero_point = observer.calculate_qparams()
    fake = LearnedFakeQuantize.from_observer(observer, learn_zero_point=learn_zero_point)
    grain = granularity.qparam_args(2)
    want = lq.fake_quantize_linear(batch(), scale, zero_point, dtype="int4", **grain)
    assert torch.equal(fake(batch()), want)
    assert torch.equal(fake.calculate_qparams()[0].reshape(scale.shape), scale)
    assert fake.scale.dim() > 0


@pytest.mark.parametrize("granularity", GRAINS, ids=str)
@pytest.mark.parametrize("gradient_scale", [False, True])
def test_gradients_are_the_ops(granularity, gradient_scale):
    """LSQ's factor, 1 / sqrt(n * q_max), multiplies those of scale and zero point."""
    fake = learned(granularity, learn_zero_point=True, gradient_scale=gradient_scale)
    x = (batch(2) * 2).requires_grad_()
    g = batch(3)
    got = torch.autograd.grad(fake(x), [x, fake.scale, fake.zero_point], g)
    inputs = [t.detach().clone().requires_grad_() for t in (x, fake.scale, fake.zero_point)]
    y = lq.fake_quantize_linear(*inputs, dtype="int4", **granularity.qparam_args(2))
    want = torch.autograd.grad(y, inputs, g)
    factor = (x.numel() // fake.scale.numel() * 7.0) ** -0.5 if gradient_scale else 1.0
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1] * factor)
    assert torch.equal(got[2], want[2] * factor)


def test_a_scale_stays_positive_and_can_come_back():
    fake = LearnedFakeQuantize(torch.tensor(0.1), eps=1e-3, gradient_scale=False)
    with torch.no_grad():
        fake.scale.fill_(-1.0)
    x = torch.full((4,), 10.0)
    y = fake(x)
    assert torch.equal(y, torch.full((4,), 127 * torch.tensor(1e-3).item()))
    assert fake.calculate_qparams()[0].item() == pytest.approx(1e-3)
    optimizer = torch.optim.SGD(fake.parameters(), lr=1e-3)
    for _ in range(20):
        optimizer.zero_grad()
        (fake(x) - x).square().mean().backward()
        optimizer.step()
    assert fake.scale.item() > 1e-3


@pytest.mark.parametrize("learn_zero_point", [False, True])
def test_training_lowers_the_error(learn_zero_point):
    """From the range of heavy tails to a scale that fits, by gradient steps alone."""
    torch.manual_seed(0)
    x = torch.distributions.StudentT(3.0).sample((4096,)).sort().values
    observer = MinMaxObserver("int4", symmetric=not learn_zero_point)
    observer(x)
    fake = LearnedFakeQuantize.from_observer(observer, learn_zero_point=learn_zero_point, gradient_scale=False)
    start = (fake(x) - x).square().mean().item()
    optimizer = torch.optim.Adam(fake.parameters(), lr=0.02)
    for _ in range(200):
        optimizer.zero_grad()
        (fake(x) - x).square().mean().backward()
        optimizer.step()
    assert (fake(x) - x).square().mean().item() < 0.5 * start


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((torch.tensor(1),), "scale must be float32 or float64, but got torch.int64"),
        ((torch.tensor(1.0).half(),), "scale must be float32 or float64"),
        ((torch.tensor(1.0), torch.zeros(2)), r"zero_point must have scale's shape \[\], but got shape \[2\]"),
    ],
)
def test_bad_tensors(arguments, match):
    with pytest.raises(ValueError, match=match):
        LearnedFakeQuantize(*arguments)


def test_bad_options():
    with pytest.raises(ValueError, match="zero_point must be left out for float8_e4m3fn codes"):
        LearnedFakeQuantize(torch.tensor(1.0), dtype="float8_e4m3fn", learn_zero_point=True)
    with pytest.raises(ValueError, match="eps must be positive, but got 0"):
        LearnedFakeQuantize(torch.tensor(1.0), eps=0)
    with pytest.raises(RuntimeError, match="has seen no data"):
        LearnedFakeQuantize.from_observer(MinMaxObserver("int8"))
    with pytest.raises(RuntimeError, match="scale must have"):
        learned(PerAxis(0))(torch.randn(5, 10))


# --- both ------------------------------------------------------------------------------------------------------------


def modules():
    yield "fake", lambda: FakeQuantize("int4", PerAxis(-1))
    yield "learned", lambda: learned(PerAxis(-1))
    yield "learned_zero_point", lambda: learned(PerAxis(-1), learn_zero_point=True)
    yield "learned_block", lambda: learned(PerBlock(4))
    yield "float8", lambda: learned(PerTensor(), "float8_e4m3fn")


MODULES = [pytest.param(make, id=name) for name, make in modules()]


@pytest.mark.parametrize("make", MODULES)
def test_copies_and_files(make):
    module = make()
    module(batch())
    want = module(batch())
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(file, weights_only=False)):
        assert torch.equal(copied(batch()), want)
    fresh = make()
    fresh.load_state_dict(module.state_dict())
    assert torch.equal(fresh.eval()(batch()), module.eval()(batch()))


@pytest.mark.parametrize("make", MODULES)
def test_meta_and_casts(make):
    module = make()
    module(batch())
    want = module.eval()(batch())
    meta = copy.deepcopy(module).to("meta")
    assert all(t.device.type == "meta" for t in meta.state_dict().values())
    empty = meta.to_empty(device="cpu")
    empty.load_state_dict(module.state_dict())
    assert torch.equal(empty.eval()(batch()), want)
    before = state(module)
    module.half().to(torch.bfloat16)
    assert_same_state(state(module), before)
    assert module(batch(dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("make", MODULES)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dynamic", [None, True])
def test_compiles_once_for_any_batch(make, training, dynamic):
    torch._dynamo.reset()
    module, eager = make(), make()
    for m in (module, eager):
        m(batch())
        m.train(training)
    rows = (6, 9, 4, 12) if not isinstance(getattr(module, "granularity", None), PerBlock) else (6,) * 4
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=counter, fullgraph=True, dynamic=dynamic)
    for i, n in enumerate(rows):
        x = (batch(i, n) * 2).requires_grad_()
        y = x.detach().clone().requires_grad_()
        got, want = compiled(x), eager(y)
        assert torch.equal(got, want)
        got.square().sum().backward()
        want.square().sum().backward()
        assert torch.equal(x.grad, y.grad)
    for a, b in zip(module.parameters(), eager.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    assert_same_state(state(module), state(eager))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("make", MODULES)
@pytest.mark.parametrize("strict", [True, False])
def test_exports_as_one_node(make, strict, tmp_path):
    module = make()
    module(batch())
    module.eval()
    program = torch.export.export(module, (batch(),), strict=strict)
    targets = [str(node.target) for node in program.graph.nodes if "linquant" in str(node.target)]
    assert targets == ["linquant.fake_quantize_linear.default"]
    torch.export.save(program, tmp_path / "m.pt2")
    for p in (program, torch.export.load(tmp_path / "m.pt2")):
        assert torch.equal(p.module()(batch(5)), module(batch(5)))


class Net(nn.Module):
    """A network whose weights and inputs are fake quantized, by the tools that PyTorch has for it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc1, self.fc2 = nn.Linear(10, 16), nn.Linear(16, 4)
        self.input1, self.input2 = FakeQuantize("uint8"), FakeQuantize("int8", symmetric=True)
        for layer in (self.fc1, self.fc2):
            observer = MinMaxObserver("int4", PerBlock(5), symmetric=True)
            observer(layer.weight.detach())
            parametrize.register_parametrization(layer, "weight", LearnedFakeQuantize.from_observer(observer))

    def forward(self, x):
        return self.fc2(self.input2(torch.relu(self.fc1(self.input1(x)))))


def train(net, forward, steps=6):
    losses = []
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for i in range(steps):
        x = batch(i, (8, 8, 5, 9, 8, 7)[i])
        loss = (forward(x) - x[:, :4]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("dynamic", [None, True])
def test_training_compiled_is_training_eager_to_the_bit(dynamic):
    """With the kernels that eager has: a QAT step, whole, over changing batch sizes, two graphs."""
    torch._dynamo.reset()
    eager, other = Net(), Net()
    counter = CompileCounterWithBackend("aot_eager")
    assert train(eager, eager) == train(other, torch.compile(other, backend=counter, fullgraph=True, dynamic=dynamic))
    assert_same_state(state(eager), state(other))
    assert counter.frame_count <= 2


def test_training_under_inductor():
    """Inductor sums products in an order of its own, which moves a code here and there, and more with every step."""
    torch._dynamo.reset()
    eager, other = Net(), Net()
    with fresh_cache():
        want, got = train(eager, eager), train(other, torch.compile(other, fullgraph=True))
    assert math.isclose(got[0], want[0], rel_tol=1e-2)
    assert all(math.isclose(a, b, rel_tol=0.2) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("strict", [True, False])
def test_a_trained_network_exports_to_the_bit(strict):
    net = Net()
    train(net, net)
    net.eval()
    program = torch.export.export(net, (batch(),), dynamic_shapes=({0: torch.export.Dim("n")},), strict=strict)
    for rows in (1, 6, 33):
        assert torch.equal(program.module()(batch(9, rows)), net(batch(9, rows)))


def test_amp():
    """Reported of other tools: observers and fake quantization fail under autocast or for half types."""
    net = Net()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = net(batch()).square().mean()
    loss.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in net.parameters())


@pytest.mark.parametrize("kind", [lq.MovingAverageMinMaxObserver, lq.MeanMinMaxObserver])
def test_ranges_that_average(kind):
    observer, fake = kind("int8"), lq.FakeQuantize(observer=kind("int8"))
    for i in range(5):
        x = torch.randn(100, generator=torch.Generator().manual_seed(i))
        observer(x)
        y = fake(x)
        assert torch.equal(y, lq.fake_quantize_linear(x, *observer.calculate_qparams()))
    assert torch.equal(fake.observer.r_max, observer.r_max)


def test_ranges_that_are_searched_are_refused():
    with pytest.raises(ValueError, match="FakeQuantize: observer must keep its range in r_min and r_max"):
        lq.FakeQuantize(observer=lq.MSEObserver("int8"))


def test_arithmetic_is_the_observers():
    x = torch.arange(-40.0, 40.0) * 0.05
    observer = lq.MinMaxObserver("int8", arithmetic="onednn")
    fake = lq.FakeQuantize(observer=observer)
    y = fake(x)
    scale, zero_point = observer.calculate_qparams()
    assert torch.equal(y, lq.fake_quantize_linear(x, scale, zero_point, arithmetic="onednn"))
    layer = lq.QuantizedLinear.from_float(torch.nn.Linear(80, 2), observer)
    assert torch.equal(layer.quantize_input(x), lq.quantize_linear(x, scale, zero_point, arithmetic="onednn"))
