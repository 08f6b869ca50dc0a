"""Granularity: which elements of a tensor share a scale.

| granularity            | shape of scale for x of shape [O, I]           |
|------------------------|------------------------------------------------|
| PerTensor()            | []                                             |
| PerAxis(0)             | [O]                                            |
| PerToken()             | [O, 1]: one for each row of the last dimension |
| PerBlock(32)           | [O, ceil(I / 32)]; the last block may be short |
| PerBlock((128, 128))   | [ceil(O / 128), ceil(I / 128)]                 |
| PerDims((0,))          | [O, 1]                                         |

Each object turns into the arguments `axis` and `block_size` of the ops, given the rank of the tensor.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


class Granularity:
    """What the classes of this module have in common."""

    def reduce_args(self, ndim: int) -> dict[str, Any]:
        """`axis` and `block_size` for ops that find a range or a scale (min_max, dynamic_quantize_linear)."""
        raise NotImplementedError

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of scale for a tensor of this shape.

        Raises:
            ValueError: if the tensor does not have the dimensions that this granularity names.

        >>> PerBlock(32).scale_shape((4, 100))
        (4, 4)
        """
        ndim = len(shape)
        args = self.reduce_args(ndim)
        axis, block_size = args["axis"], args["block_size"]
        if axis is not None and not -ndim <= axis < ndim:
            raise ValueError(f"{self}: axis must be a dimension of the tensor, but got one of shape {list(shape)}.")
        blocks = block_lengths(ndim, axis, block_size)
        if blocks is None:
            return () if axis is None else (shape[axis],)
        return tuple(
            size if block == 1 else 1 if block == 0 else -(-size // block)
            for block, size in zip(blocks, shape, strict=True)
        )

    def qparam_args(self, ndim: int) -> dict[str, Any]:
        """`axis` and `block_size` for ops that are given a scale, for a tensor of `ndim` dimensions."""
        args = self.reduce_args(ndim)
        return {**args, "axis": 1 if args["axis"] is None else args["axis"]}


def check_granularity(where: str, granularity: Any, argument: str = "granularity") -> None:
    """Refuse what is no granularity object, a class among them.

    Raises:
        ValueError: naming the argument and what came.
    """
    if not isinstance(granularity, Granularity):
        raise ValueError(
            f"{where}: {argument} must be PerTensor(), PerAxis(axis), PerToken(), PerBlock(block_size) or "
            f"PerDims(dims), but got {granularity!r}."
        )


@dataclass(frozen=True)
class PerTensor(Granularity):
    """One scale for the whole tensor; scale is 0-d.

    >>> PerTensor().reduce_args(2)
    {'axis': None, 'block_size': [0]}
    """

    def reduce_args(self, ndim: int) -> dict[str, Any]:
        return {"axis": None, "block_size": [0]}


@dataclass(frozen=True)
class PerAxis(Granularity):
    """One scale for each index of a dimension; scale has shape [x.size(axis)].

    >>> PerAxis(0).qparam_args(4)
    {'axis': 0, 'block_size': [0]}
    """

    axis: int

    def reduce_args(self, ndim: int) -> dict[str, Any]:
        return {"axis": self.axis, "block_size": [0]}


@dataclass(frozen=True)
class PerDims(Granularity):
    """One scale for each index of the listed dimensions (oneDNN's mask); scale has size 1 in the others.

    >>> PerDims((0, 2)).qparam_args(4)
    {'axis': 1, 'block_size': [1, 0, 1, 0]}
    """

    dims: tuple[int, ...]

    def reduce_args(self, ndim: int) -> dict[str, Any]:
        for dim in self.dims:
            if not -ndim <= dim < ndim:
                raise ValueError(f"PerDims: dims must be in [{-ndim}, {ndim - 1}], but got {dim}.")
        listed = {dim % ndim for dim in self.dims}
        if ndim < 2:
            # The ops take one length for a vector as the form along an axis, where 0 means no blocks.
            return (PerAxis(0) if listed else PerTensor()).reduce_args(ndim)
        return {"axis": None, "block_size": [int(dim in listed) for dim in range(ndim)]}


@dataclass(frozen=True)
class PerToken(Granularity):
    """One scale for each row of the last dimension; scale has x's shape with 1 in the last place.

    >>> PerToken().qparam_args(3)
    {'axis': 1, 'block_size': [1, 1, 0]}
    """

    def reduce_args(self, ndim: int) -> dict[str, Any]:
        return PerDims(tuple(range(ndim - 1))).reduce_args(ndim)


@dataclass(frozen=True)
class PerBlock(Granularity):
    """One scale for each block; scale has the rank of x, and ceil(size / block) in each dimension.

    Attributes:
        block_size: the length of a block along `axis`, where the other dimensions have a scale for each index; or one
            length for each dimension of x, 0 for the whole dimension.
        axis: the dimension that is cut into blocks; not looked at where block_size has one length a dimension.

    >>> PerBlock(32).qparam_args(2)
    {'axis': -1, 'block_size': [32]}
    """

    block_size: int | tuple[int, ...]
    axis: int = -1

    def __post_init__(self) -> None:
        size = self.block_size
        if size < 1 if isinstance(size, int) else min(size, default=-1) < 0:
            raise ValueError(f"PerBlock: block_size must be positive, but got {self.block_size}.")

    def reduce_args(self, ndim: int) -> dict[str, Any]:
        if isinstance(self.block_size, int):
            return {"axis": self.axis, "block_size": [self.block_size]}
        if len(self.block_size) != ndim:
            raise ValueError(f"PerBlock: block_size must have {ndim} entries, but got {len(self.block_size)}.")
        if ndim == 1:
            # One length for a vector is the form along an axis, where 0 means no blocks.
            return (PerBlock(self.block_size[0], 0) if self.block_size[0] else PerTensor()).reduce_args(ndim)
        return {"axis": None, "block_size": list(self.block_size)}


# What `axis` and `block_size` of the ops mean, for code that is not a kernel.


def block_lengths(ndim: int, axis: int, block_size: Sequence[int]) -> list[int] | None:
    """The block length in each dimension, 0 for all of it; None without blocks."""
    if ndim > 1 and len(block_size) > 1:
        return list(block_size)
    if block_size[0] == 0:
        return None
    blocks = [1] * ndim
    blocks[axis] = block_size[0]
    return blocks


def aligned_shape(p: Tensor, ndim: int, axis: int) -> list[int]:
    """The shape with which a parameter that is not blocked broadcasts against x."""
    if p.numel() == 1:
        return [1] * ndim
    if p.dim() == 1:
        shape = [1] * ndim
        shape[axis] = p.size(0)
        return shape
    return list(p.shape)


def spread_parameter(p: Tensor, sizes: Sequence[int], axis: int, block_size: Sequence[int]) -> Tensor:
    """scale or zero_point, so that it broadcasts against x of these sizes."""
    blocks = block_lengths(len(sizes), axis, block_size)
    if blocks is None:
        return p.reshape(aligned_shape(p, len(sizes), axis))
    for dim, (block, size) in enumerate(zip(blocks, sizes, strict=True)):
        if block != 1:
            p = p.repeat_interleave(block or size, dim).narrow(dim, 0, size)
    return p
