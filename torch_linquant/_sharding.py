"""DTensor: how a call on sharded tensors splits into calls on the shards, with the bits of the whole.

Registered when the first tensor that is not a plain one comes by, so that importing the package does not import
torch.distributed. Per dimension d of x, over one dimension of the mesh:

    x            scale, zero_point                      where
    Shard(d)     Replicate                              d shares a scale
    Shard(d)     sharded with it                        d has a scale for each index
    Shard(d)     sharded with it                        d is cut into blocks and every shard holds whole ones

The gradients of a replicated scale and zero point are partial sums.
"""

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .granularity import block_lengths

_ops = torch.ops.linquant
# Keyword arguments on which the rules depend.
_STATIC = {
    "quantize_linear": ["axis", "block_size", "packed"],
    "fake_quantize_linear": ["axis", "block_size"],
    "dequantize_linear": ["axis", "block_size", "packed_size"],
}


def ensure_registered(*tensors: Any) -> None:
    """Register the rules if there is a DTensor among the tensors."""
    for t in tensors:
        if type(t) not in (torch.Tensor, torch.nn.Parameter, type(None)) and "torch.distributed.tensor" in sys.modules:
            _register()


def _parameter_dims(x: Any, scale: Any, axis: int, block_size: Sequence[int], whole: int) -> Iterator[tuple[int, Any]]:
    """(d, dimension of scale that goes with x's d, or None where d shares a scale), for each d that may be sharded."""
    ndim = len(x.shape)
    blocks = block_lengths(ndim, axis, block_size)
    for d in range(ndim):
        if blocks is not None:
            if blocks[d] == 0:
                yield d, None
            elif blocks[d] == 1 or x.shape[d] % (blocks[d] * whole) == 0:
                yield d, d
        elif scale.shape.numel() == 1:
            yield d, None
        elif len(scale.shape) == 1 and ndim > 0:
            yield d, 0 if d == axis % ndim else None
        else:
            yield d, None if scale.shape[d] == 1 else d


@functools.cache
def _register() -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    # The cache of decisions tells calls apart by numbers, as register_sharding leaves it, but not by lists. Where that
    # cannot be mended, blocks are not sharded: one decision would serve every block_size.
    try:
        from torch.distributed.tensor._op_schema import RuntimeSchemaInfo

        remembered = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
    except (ImportError, AttributeError):
        remembered = None

    def register(op: Any, rule: Callable[..., Any], first_static: int, names: list[str] | None) -> None:
        register_sharding(op)(rule)
        if remembered is not None:
            remembered[op] = RuntimeSchemaInfo(first_static, names, needs_pytree=True)

    def placements(x: Any, scale: Any, axis: int, block_size: Sequence[int], packed: bool) -> Iterator[tuple[Any, Any]]:
        """(placement of x, of its parameters)."""
        yield Replicate(), Replicate()
        if remembered is None and any(block_size):
            return
        for d, parameter in _parameter_dims(x, scale, axis, block_size, x.mesh.size()):
            if not (packed and d == len(x.shape) - 1):
                yield Shard(d), Replicate() if parameter is None else Shard(parameter)

    def forward(x: Any, scale: Any, zero_point: Any = None, **o: Any) -> Any:
        packed = bool(o.get("packed")) or o.get("packed_size") is not None
        parameters = 1 if zero_point is None else 2
        pairs = placements(x, scale, o.get("axis", 1), o.get("block_size", [0]), packed)
        return [([p], [p] + [q] * parameters) for p, q in pairs]

    def backward(g: Any, x: Any, scale: Any, zero_point: Any, axis: int, block_size: Sequence[int], *o: Any) -> Any:
        *_, before, need_x, need_scale, need_zero_point = o
        packed = before is not None and not isinstance(before, str)  # dequantize_linear's packed_size
        parameters = 1 if zero_point is None else 2
        results = []
        for p, q in placements(x, scale, axis, block_size, packed):
            summed = Partial() if isinstance(p, Shard) and isinstance(q, Replicate) else q
            floating = zero_point is not None and need_zero_point
            outputs = [
                p if need_x else Replicate(),
                summed if need_scale else Replicate(),
                summed if floating else Replicate(),
            ]
            results.append((outputs, [p, p] + [q] * parameters))
        return results

    for name, static in _STATIC.items():
        register(getattr(_ops, name).default, forward, 3, static)
        register(getattr(_ops, f"{name}_backward").default, backward, 4, None)
    register(_ops.quantize_linear.float_codes, forward, 3, ["axis", "block_size"])
