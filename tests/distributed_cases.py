"""What each process of tests/test_distributed.py runs: `python distributed_cases.py RANK WORLD FILE`."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.utils import parametrize

import torch_linquant as lq
from torch_linquant import FakeQuantize, LearnedFakeQuantize, MinMaxObserver, PerAxis, PerTensor

# id -> (shape of x, shape of scale, axis, block_size, dimensions of x that may stay sharded over 2 and 4 processes)
GRAINS = {
    "tensor": ((8, 12), (1,), 1, [0], {0, 1}),
    "axis0": ((8, 12), (8,), 0, [0], {0, 1}),
    "axis1": ((8, 12), (12,), 1, [0], {0, 1}),
    "axis-1": ((6, 5, 7), (7,), -1, [0], {0, 1, 2}),
    "token": ((8, 12), (8, 1), 1, [1, 0], {0, 1}),
    "block3": ((8, 12), (8, 4), 1, [3], {0, 1}),
    "block5": ((8, 12), (8, 3), 1, [5], {0}),
    "blocks": ((8, 12), (4, 1), 1, [2, 0], {0, 1}),
    "uneven": ((7, 12), (7,), 0, [0], {0, 1}),
}


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def full(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


def case_dtensor(mesh):
    """Every placement of x: values and gradients of one process; what can stay sharded does."""
    for name, (x_shape, s_shape, axis, block_size, sharded) in GRAINS.items():
        x, g = random(*x_shape) * 4, random(*x_shape, seed=1)
        scale, zero_point = random(*s_shape, seed=2).abs() + 0.3, random(*s_shape, seed=3) * 3
        kwargs = {"axis": axis, "block_size": block_size, "dtype": "int4"}
        plain = [t.clone().requires_grad_() for t in (x, scale, zero_point)]
        y = lq.fake_quantize_linear(*plain, **kwargs)
        wants = torch.autograd.grad(y, plain, g)
        for placement in (Replicate(), *(Shard(d) for d in range(len(x_shape)))):
            tensors = [distribute_tensor(x, mesh, [placement])]
            tensors += [distribute_tensor(t, mesh, [Replicate()]) for t in (scale, zero_point)]
            tensors = [t.requires_grad_() for t in tensors]
            got = lq.fake_quantize_linear(*tensors, **kwargs)
            if isinstance(placement, Shard):
                stays = placement.dim in sharded and (x_shape[placement.dim] % mesh.size() == 0 or "block" not in name)
                assert (got.placements == (placement,)) == stays, (name, placement, got.placements)
            assert torch.equal(full(got), y), (name, placement)
            grads = torch.autograd.grad(got, tensors, distribute_tensor(g, mesh, [placement]))
            assert torch.equal(full(grads[0]), wants[0]), (name, placement)
            for a, b in zip(grads[1:], wants[1:], strict=True):
                torch.testing.assert_close(full(a), b, rtol=1e-5, atol=1e-5)
            if s_shape != (1,) and isinstance(placement, Shard):  # parameters that come sharded themselves
                cut = [distribute_tensor(t, mesh, [Shard(0)]) for t in (scale, zero_point)]
                assert torch.equal(full(lq.fake_quantize_linear(tensors[0].detach(), *cut, **kwargs)), y)
            with torch.no_grad():
                codes = lq.quantize_linear(*tensors[:2], **kwargs)
                assert torch.equal(full(codes), lq.quantize_linear(x, scale, **kwargs))
                back = lq.dequantize_linear(codes, tensors[1], x_dtype="int4", axis=axis, block_size=block_size)
                want = lq.dequantize_linear(full(codes), scale, x_dtype="int4", axis=axis, block_size=block_size)
                assert torch.equal(full(back), want)
                direct = torch.ops.linquant.fake_quantize_linear(
                    tensors[0], tensors[1], axis=axis, block_size=block_size, output_dtype=22
                )
                assert torch.equal(full(direct), lq.fake_quantize_linear(x, scale, **kwargs))


def case_cache(mesh):
    """Two calls that differ in block_size alone: the first decision must not serve the second."""
    x = random(4, 12 * mesh.size()) * 4
    sharded = distribute_tensor(x, mesh, [Shard(1)])
    for block in (12, 8, 6, 12, 8 * mesh.size(), 5):
        scale = random(4, -(-x.size(1) // block), seed=block).abs() + 0.3
        parts = distribute_tensor(scale, mesh, [Replicate()])
        got = lq.quantize_linear(sharded, parts, dtype="int8", block_size=block)
        assert torch.equal(full(got), lq.quantize_linear(x, scale, dtype="int8", block_size=block)), block
        packed = lq.quantize_linear(sharded, parts, dtype="int4", block_size=block, packed=True)
        want = lq.quantize_linear(x, scale, dtype="int4", block_size=block, packed=True)
        assert torch.equal(full(packed), want)


def case_partial(mesh):
    """The gradient of a replicated scale is a partial sum until somebody asks for it."""
    x = distribute_tensor(random(8, 4), mesh, [Shard(0)])
    scale = distribute_tensor(torch.tensor([0.3]), mesh, [Replicate()]).requires_grad_()
    y = lq.fake_quantize_linear(x, scale, dtype="int4")
    grads = torch.ops.linquant.fake_quantize_linear_backward(
        y.detach(), x, scale.detach(), None, 1, [0], 22, 0, None, None, "onnx", "clipped", True, True, False
    )
    assert isinstance(grads[1].placements[0], Partial)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 4)
        for layer, granularity in ((self.fc1, PerAxis(0)), (self.fc2, PerTensor())):
            observer = MinMaxObserver("int4", granularity, symmetric=True)
            observer(layer.weight.detach())
            parametrize.register_parametrization(layer, "weight", LearnedFakeQuantize.from_observer(observer))
        observer = MinMaxObserver("uint8")
        observer(random(64, 8) * 2)
        self.input = FakeQuantize(observer=observer)
        self.input.observer.enabled = False  # one range on every rank

    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(self.input(x))))


def losses_of(net, batches, steps=4):
    """Mean squared errors of a few steps; gradients are means over what every rank sees."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    losses = []
    for step in range(steps):
        x = batches(step)
        loss = (net(x) - x[:, :4]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def compare_with_one_process(mesh, net):
    rank, world = dist.get_rank(), dist.get_world_size()

    def own(step):
        return random(8, 8, seed=100 * step + rank)

    def all_of(step):
        return torch.cat([random(8, 8, seed=100 * step + r) for r in range(world)])

    single = Net()
    # A factor in the gradient of a scale counts elements of weights: the same here and there.
    want = torch.stack(losses_of(single, all_of))
    got = torch.stack(losses_of(net, own))
    dist.all_reduce(got)
    torch.testing.assert_close(got / world, want, rtol=1e-4, atol=1e-5)
    return single


def case_ddp(mesh):
    net = Net()
    single = compare_with_one_process(mesh, nn.parallel.DistributedDataParallel(net))
    for (name, a), b in zip(net.named_parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5, msg=name)


def case_fsdp(mesh):
    from torch.distributed.fsdp import fully_shard

    net = Net()
    fully_shard(net, mesh=mesh)
    single = compare_with_one_process(mesh, net)
    for (name, a), b in zip(net.named_parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(full(a), b, rtol=1e-3, atol=1e-5, msg=name)


CASES = (case_dtensor, case_cache, case_partial, case_ddp, case_fsdp)

if __name__ == "__main__":
    rank, world, file = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    for case in CASES:
        print(f"{case.__name__} ...", flush=True)
        case(mesh)
        dist.barrier()
    dist.destroy_process_group()
    print(f"{len(CASES)} cases passed", flush=True)
