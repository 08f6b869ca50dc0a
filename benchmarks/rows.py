"""What is measured: one table of rows, the data each row works on, and its result by NumPy.

To add a measurement, add a line to ROWS. Its data, its reference, our call, the peers' calls (contenders.py) and the
bytes it moves follow from the line. To add a kind of work, add it to REFERENCES here and, under the same name, to each
contender that can do it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np


@dataclass(frozen=True)
class DataType:
    """A type of elements: its ONNX number, how NumPy and torch store one unpacked element, the range of its codes."""

    onnx: int
    numpy: type
    torch: str
    lo: int = 0
    hi: int = 0
    per_byte: int = 1  # codes in a byte once packed; 1 is never packed

    @property
    def is_float(self) -> bool:
        return not np.issubdtype(self.numpy, np.integer)


TYPES = {
    "f32": DataType(1, np.float32, "float32"),
    "f16": DataType(10, np.float16, "float16"),
    "bf16": DataType(16, ml_dtypes.bfloat16, "bfloat16"),
    "uint8": DataType(2, np.uint8, "uint8", 0, 255),
    "int8": DataType(3, np.int8, "int8", -128, 127),
    "uint16": DataType(4, np.uint16, "uint16", 0, 65535),
    "int4": DataType(22, np.int8, "int8", -8, 7, per_byte=2),
    "e4m3fn": DataType(17, ml_dtypes.float8_e4m3fn, "float8_e4m3fn", -448, 448),
}


@dataclass(frozen=True)
class Grain:
    """Which elements share a scale (or a range): all, those of one index on `axis`, or blocks of `block` along it."""

    axis: int | None = None
    block: int = 0

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the scales for x of `shape`, with x's rank: 1 where a dimension shares one scale."""
        if self.axis is None:
            return (1,) * len(shape)
        if self.block:
            return tuple(math.ceil(n / self.block) if d == self.axis else n for d, n in enumerate(shape))
        return tuple(n if d == self.axis else 1 for d, n in enumerate(shape))

    def natural(self, values: np.ndarray) -> np.ndarray:
        """The scales in the shape the ops take: 0-d per tensor, 1-D per axis, x's rank in blocks."""
        return values if self.block else values.reshape(() if self.axis is None else (-1,))

    def spread(self, values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """The scale of each element, in a shape that broadcasts to x."""
        values = values.reshape(self.shape(shape))
        if self.block:
            values = np.repeat(values, self.block, axis=self.axis).take(range(shape[self.axis]), axis=self.axis)
        return values

    def reduced(self, rank: int) -> tuple[int, ...] | None:
        """The dimensions a range is taken over; None for all of them."""
        return None if self.axis is None else tuple(d for d in range(rank) if d != self.axis)


TENSOR, FIRST, LAST, BLOCK_FIRST, BLOCK_LAST = Grain(), Grain(0), Grain(1), Grain(0, 32), Grain(1, 32)


@dataclass(frozen=True)
class Row:
    """One line of the table.

    `targets` says how many times a peer's speed is to be reached, for the peers that the target was set against; any
    other peer is to be equalled ("others", 1 unless said). `sizes` pins the numbers of elements. `function` measures
    the public Python function in place of the op below it.
    """

    name: str
    work: str
    x: str
    y: str
    grain: Grain = TENSOR
    targets: dict[str, float] = field(default_factory=dict)
    sizes: tuple[int | tuple[int, ...], ...] | None = None
    function: bool = False

    def target(self, peer: str) -> float:
        return self.targets.get(peer, self.targets.get("others", 1.0))

    @property
    def packed(self) -> bool:
        """Whether the codes travel packed: sub-byte codes do."""
        return TYPES[self.x].per_byte > 1 or TYPES[self.y].per_byte > 1


BATCHES = ((2048, 2048), (32, 64, 112, 112))  # of activations
CALL = {"eager": 1 / 1.2, "others": 0.0}  # 16 elements: within 1.2 times torch's own call

ROWS = [
    Row("quantize f32 -> int8, per tensor", "quantize", "f32", "int8", TENSOR,
        {"eager": 1.2, "compile": 1.2, "onnxruntime": 1.2}),
    Row("quantize f32 -> int8, per axis, first", "quantize", "f32", "int8", FIRST, {"eager": 2, "onnxruntime": 2}),
    Row("quantize f32 -> int8, per axis, last", "quantize", "f32", "int8", LAST, {"eager": 20, "onnxruntime": 20}),
    Row("quantize f32 -> int8, blocked 32, last axis", "quantize", "f32", "int8", BLOCK_LAST, {"onnxruntime": 1.5}),
    Row("quantize f32 -> int8, blocked 32, first axis", "quantize", "f32", "int8", BLOCK_FIRST, {"onnxruntime": 10}),
    Row("quantize f16 -> int8, per tensor", "quantize", "f16", "int8", TENSOR, {"onnxruntime": 15}),
    Row("quantize bf16 -> int8, per tensor", "quantize", "bf16", "int8"),
    Row("quantize f32 -> uint16, per tensor", "quantize", "f32", "uint16", TENSOR, {"onnxruntime": 2}),
    Row("quantize f32 -> int4 packed, per tensor", "quantize", "f32", "int4"),
    Row("quantize f32 -> e4m3fn, per tensor", "quantize", "f32", "e4m3fn", TENSOR, {"formula": 4}),
    Row("dequantize int8 -> f32, per tensor", "dequantize", "int8", "f32", TENSOR, {"eager": 1.1, "onnxruntime": 1.1}),
    Row("dequantize int8 -> f32, per axis, last", "dequantize", "int8", "f32", LAST, {"onnxruntime": 10}),
    Row("dequantize int8 -> f32, blocked 32, last axis", "dequantize", "int8", "f32", BLOCK_LAST, {"onnxruntime": 8}),
    Row("dequantize int4 packed -> f32, per tensor", "dequantize", "int4", "f32"),
    Row("fake quantize f32, int8, per tensor", "fake_quantize", "f32", "int8", TENSOR, {"compile": 1.2, "eager": 12}),
    Row("fake quantize f32, int8, per axis, first", "fake_quantize", "f32", "int8", FIRST, {"eager": 12}),
    Row("dynamic quantize f32 -> uint8, per tensor", "dynamic_quantize", "f32", "uint8"),
    Row("dynamic quantize f32 -> uint8, per token", "dynamic_quantize", "f32", "uint8", FIRST),
    Row("min and max f32, per tensor", "min_max", "f32", "f32"),
    Row("min and max f32, over dim 0", "min_max", "f32", "f32", LAST, {"eager": 12}),
    Row("min and max f32, over dim 1", "min_max", "f32", "f32", FIRST, {"eager": 12}),
    Row("min-max observer f32, per tensor", "observe_min_max", "f32", "f32", TENSOR, {}, BATCHES),
    Row("min-max observer f32, per axis 1", "observe_min_max", "f32", "f32", LAST, {}, BATCHES),
    Row("moving average observer f32, per tensor", "observe_moving_average", "f32", "f32", TENSOR, {}, BATCHES),
    Row("histogram observer f32, per tensor", "observe_histogram", "f32", "f32", TENSOR,
        {"eager": 10, "torchao": 10}, BATCHES),
    Row("histogram observer f32, per axis 1", "observe_histogram", "f32", "f32", LAST, {}, BATCHES),
    Row("histogram observer bf16, per tensor", "observe_histogram", "bf16", "f32", TENSOR,
        {"eager": 10, "torchao": 10}, BATCHES),
    Row("pack int4", "pack", "int4", "int4"),
    Row("unpack int4", "unpack", "int4", "int4"),
    Row("relu, fake quantize f32, int8, compiled", "chain", "f32", "int8"),
    Row("fake quantize f32, int8, with gradient to x", "train", "f32", "int8", TENSOR, {"eager": 1.2}),
    Row("fake quantize f32, int8, with gradients to x, scale", "train_scale", "f32", "int8", TENSOR, {"eager": 1.2}),
    Row("fake quantize f32, int8, per axis, with gradient", "train", "f32", "int8", FIRST, {"eager": 1.2}),
    Row("one call, quantize f32 -> int8, op", "quantize", "f32", "int8", TENSOR, CALL, (16,)),
    Row("one call, quantize f32 -> int8, function", "quantize", "f32", "int8", TENSOR, CALL, (16,), function=True),
    Row("one call, fake quantize f32, op", "fake_quantize", "f32", "int8", TENSOR, CALL, (16,)),
    Row("one call, fake quantize f32, function", "fake_quantize", "f32", "int8", TENSOR, CALL, (16,), function=True),
    Row("one call, fake quantize f32, recorded", "recorded", "f32", "int8", TENSOR, {"others": 0.0}, (16,)),
    Row("one call, fake quantize f32, with gradient", "train", "f32", "int8", TENSOR, {"others": 0.0}, (16,)),
]  # fmt: skip


def shape_of(elements: int | tuple[int, ...]) -> tuple[int, ...]:
    """A matrix of that many elements, as square as powers of two allow: 4 Mi is 2048 x 2048. A shape is one already."""
    if isinstance(elements, tuple):
        return elements
    rows = 1
    while 4 * rows * rows <= elements and elements % (2 * rows) == 0:
        rows *= 2
    return rows, elements // rows


def make_data(row: Row, shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    """The inputs of a row, the same in every process: x, and scale and zero_point where the work takes them."""
    rng = np.random.default_rng(7)
    x_type, y_type = TYPES[row.x], TYPES[row.y]
    if row.work in ("dequantize", "pack", "unpack"):
        codes = rng.integers(x_type.lo, x_type.hi, shape, x_type.numpy, endpoint=True)
        data = {"x": codes if row.work == "pack" else pack(codes, x_type)}
    else:
        data = {"x": rng.standard_normal(shape, np.float32).astype(x_type.numpy)}
    if row.work not in ("dynamic_quantize", "min_max", "pack", "unpack", *OBSERVERS):
        code = x_type if row.work == "dequantize" else y_type
        count = row.grain.shape(shape)
        # Six standard deviations over the range of the codes, so that a few elements saturate.
        scale = rng.uniform(5, 7, count) / (code.hi - code.lo)
        data["scale"] = row.grain.natural(scale.astype(np.float32 if row.work == "dequantize" else x_type.numpy))
        middle = (code.hi + code.lo + 1) // 2
        zero_point = np.zeros(count) if code.is_float else middle + rng.integers(-2, 2, count, endpoint=True)
        data["zero_point"] = row.grain.natural(zero_point.astype(code.numpy))
    return data


def pack(codes: np.ndarray, data_type: DataType) -> np.ndarray:
    """Sub-byte codes packed along the last dimension, the first in the low bits; other codes as they are."""
    if data_type.per_byte == 1:
        return codes
    bits, rest = 8 // data_type.per_byte, -codes.shape[-1] % data_type.per_byte
    fields = np.pad(codes.astype(np.uint8) & ((1 << bits) - 1), [(0, 0)] * (codes.ndim - 1) + [(0, rest)])
    fields = fields.reshape(*codes.shape[:-1], -1, data_type.per_byte)
    return np.bitwise_or.reduce(fields << (bits * np.arange(data_type.per_byte, dtype=np.uint8)), -1)


def unpack(stored: np.ndarray, data_type: DataType, size: int) -> np.ndarray:
    """The inverse of pack; `size` is the last dimension's number of codes."""
    if data_type.per_byte == 1:
        return stored
    bits = 8 // data_type.per_byte
    fields = stored[..., None] << np.arange(8 - bits, -1, -bits, dtype=np.uint8)  # each code to the top of its byte
    signed = fields.view(np.int8 if data_type.lo < 0 else np.uint8) >> (8 - bits)
    return signed.reshape(*stored.shape[:-1], -1)[..., :size].astype(data_type.numpy)


def _encode(row: Row, shape, x, scale, zero_point) -> np.ndarray:
    """Unpacked codes: clamp(rne(x / scale) + zero_point), the quotient rounded to the scale's type."""
    code = TYPES[row.y]
    q = (x / row.grain.spread(scale, shape)).astype(np.float32)
    if code.is_float:
        return np.clip(q, code.lo, code.hi).astype(code.numpy)
    zero_point = row.grain.spread(zero_point, shape).astype(np.float32)
    return np.clip(np.rint(q) + zero_point, code.lo, code.hi).astype(code.numpy)


def _decode(row: Row, shape, codes, scale, zero_point) -> np.ndarray:
    """(code - zero_point) * scale in float32."""
    difference = codes.astype(np.float32) - row.grain.spread(zero_point, shape).astype(np.float32)
    return difference * row.grain.spread(scale, shape)


def _quantize(row, shape, x, scale, zero_point):
    return (pack(_encode(row, shape, x, scale, zero_point), TYPES[row.y]),)


def _dequantize(row, shape, x, scale, zero_point):
    return (_decode(row, shape, unpack(x, TYPES[row.x], shape[-1]), scale, zero_point),)


def _fake_quantize(row, shape, x, scale, zero_point):
    return (_decode(row, shape, _encode(row, shape, x, scale, zero_point), scale, zero_point),)


def _chain(row, shape, x, scale, zero_point):
    return _fake_quantize(row, shape, np.maximum(x, 0), scale, zero_point)


def _train(row, shape, x, scale, zero_point):
    """The values, and the gradient to x of their sum: 1 where the code is in its range."""
    code = TYPES[row.y]
    rounded = np.rint(x / row.grain.spread(scale, shape)) + row.grain.spread(zero_point, shape).astype(np.float32)
    inside = (rounded >= code.lo) & (rounded <= code.hi)
    return *_fake_quantize(row, shape, x, scale, zero_point), inside.astype(np.float32)


def _min_max(row, shape, x):
    return x.min(row.grain.reduced(x.ndim)), x.max(row.grain.reduced(x.ndim))


def _dynamic_quantize(row, shape, x):
    """ONNX's DynamicQuantizeLinear, in float32, for each part of x that shares a scale."""
    code = TYPES[row.y]
    low, high = (np.asarray(value) for value in _min_max(row, shape, x))
    low, high = np.minimum(low, 0), np.maximum(high, 0)
    scale = (high - low) / np.float32(code.hi - code.lo)
    zero_point = np.rint(np.clip(code.lo - low / scale, code.lo, code.hi)).astype(code.numpy)
    return _encode(row, shape, x, scale, zero_point), scale, zero_point


def _observe(row, shape, x):
    """What an observer holds after a batch, and after the same batch again."""
    return tuple(end.astype(np.float32) for end in map(np.asarray, _min_max(row, shape, x)))


OBSERVERS = ("observe_min_max", "observe_moving_average", "observe_histogram")
REFERENCES: dict[str, Callable[..., tuple[np.ndarray, ...]]] = {
    "quantize": _quantize,
    "dequantize": _dequantize,
    "fake_quantize": _fake_quantize,
    "chain": _chain,
    "recorded": _fake_quantize,
    "train": _train,
    "train_scale": _train,  # the scale's gradient is computed, not compared: its sum has an order of its own
    "dynamic_quantize": _dynamic_quantize,
    "min_max": _min_max,
    "pack": lambda row, shape, x: (pack(x, TYPES[row.x]),),
    **dict.fromkeys(OBSERVERS, _observe),
    "unpack": lambda row, shape, x: (unpack(x, TYPES[row.x], shape[-1]),),
}


def reference(row: Row, shape: tuple[int, ...], data: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The results that our op must give, bit for bit."""
    return [np.asarray(result) for result in REFERENCES[row.work](row, shape, **data)]
