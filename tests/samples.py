"""One table of sample calls, for the tests that hold every op to a rule: opcheck, compile, variants."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

FLOATS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "f64": torch.float64}
CODES = {
    "uint8": 2,
    "int8": 3,
    "uint16": 4,
    "int16": 5,
    "int32": 6,
    "e4m3fn": 17,
    "e4m3fnuz": 18,
    "e5m2": 19,
    "e5m2fnuz": 20,
    "uint4": 21,
    "int4": 22,
    "fp4": 23,
    "uint2": 25,
    "int2": 26,
}
SUB_BYTE = ("uint4", "int4", "fp4", "uint2", "int2")


@dataclass
class Sample:
    """A call of torch.ops.linquant.<op>.<overload>."""

    op: str
    id: str
    args: tuple
    kwargs: dict[str, Any] = field(default_factory=dict)
    overload: str = "default"

    @property
    def function(self) -> Any:
        return getattr(getattr(torch.ops.linquant, self.op), self.overload)

    def __call__(self) -> Any:
        # By way of the packet, as users write it, where that finds the overload.
        packet = getattr(torch.ops.linquant, self.op)
        return (packet if self.overload == "default" else self.function)(*self.args, **self.kwargs)


def cpu_variants() -> list[int]:
    """The variants of the CPU kernels that this machine runs: 0 (exact), 1 (baseline), and 2 and 3 where it can."""
    before, found = torch.ops.linquant._cpu_variant(), []
    for variant in range(4):
        try:
            torch.ops.linquant._cpu_variant(variant)
        except RuntimeError as error:
            assert "one that this CPU has" in str(error)
        else:
            found.append(variant)
    torch.ops.linquant._cpu_variant(before)
    return found


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * 20
    return x.to(dtype)


def scales(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, generator=generator) + 0.1).to(dtype)


def zero_points(*shape: int, dtype: torch.dtype = torch.int8, seed: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 4, shape, generator=generator).to(dtype)


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: values(2, 3, 4, 5),
    "channels_last": lambda: values(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "transposed": lambda: values(5, 4, 3, 2).permute(3, 2, 1, 0),
    "sliced": lambda: values(2, 3, 4, 9)[..., 2:7],
    "stepped": lambda: values(2, 3, 4, 10)[..., ::2],
    "expanded": lambda: values(1, 3, 1, 5).expand(2, 3, 4, 5),
    "empty": lambda: values(2, 3, 0, 5),
}

# id -> (shape of x, shape of scale, axis, block_size)
GRANULARITIES: dict[str, tuple[tuple[int, ...], tuple[int, ...], int, list[int]]] = {
    "0d": ((), (), 1, [0]),
    "tensor": ((5, 70), (), 1, [0]),
    "tensor1": ((5, 70), (1,), 1, [0]),
    "axis0": ((5, 70), (5,), 0, [0]),
    "axis-1": ((5, 70), (70,), -1, [0]),
    "axis1of3": ((3, 5, 9), (5,), 1, [0]),
    "vector": ((70,), (70,), 0, [0]),
    "block32": ((5, 70), (5, 3), -1, [32]),
    "block16": ((5, 64), (5, 4), 1, [16]),
    "block3": ((7, 6), (3, 6), 0, [3]),
    "block_over": ((5, 7), (5, 1), 1, [9]),
    "blocks2d": ((6, 70), (3, 2), 1, [2, 64]),
    "token": ((3, 4, 9), (3, 4, 1), 1, [1, 1, 0]),
    "dims": ((3, 4, 9), (3, 1, 9), 1, [0]),
}


def quantize_samples(op: str) -> Iterator[Sample]:
    for name, make in LAYOUTS.items():
        x = make()
        yield Sample(op, f"{name}-tensor", (x, scales(), zero_points()))
        yield Sample(op, f"{name}-axis1", (x, scales(3), zero_points(3)), {"axis": 1})
        yield Sample(op, f"{name}-block2", (x, scales(2, 3, x.size(2), 3)), {"axis": 3, "block_size": 2})
    for name, (x_shape, s_shape, axis, block_size) in GRANULARITIES.items():
        kwargs = {"axis": axis, "block_size": block_size}
        yield Sample(op, name, (values(*x_shape), scales(*s_shape), zero_points(*s_shape)), kwargs)
    for code, number in CODES.items():
        yield Sample(op, f"to-{code}", (values(5, 70), scales()), {"output_dtype": number})
    for name, dtype in {**FLOATS, "i32": torch.int32}.items():
        yield Sample(op, f"x-{name}", (values(5, 70, dtype=dtype), scales(), zero_points()))
    for name, dtype in {**FLOATS, "e8m0": torch.float8_e8m0fnu}.items():
        yield Sample(op, f"scale-{name}", (values(5, 70), scales(5, dtype=dtype)), {"axis": 0})
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64):
        name = f"zero_point-{dtype}".replace("torch.", "")
        yield Sample(op, name, (values(5, 7), scales(), zero_points(dtype=dtype)), {"output_dtype": 3})
    for arithmetic in ("onednn", "executorch"):
        yield Sample(op, arithmetic, (values(5, 70), scales(), zero_points()), {"arithmetic": arithmetic})
    yield Sample(op, "narrow", (values(5, 70), scales()), {"output_dtype": 3, "quant_min": -127, "quant_max": 100})
    yield Sample(op, "precision", (values(5, 70), scales()), {"precision": 10})
    zero_point = zero_points(5, dtype=torch.float32) + 0.3
    yield Sample(op, "zero_point-f32", (values(5, 70), scales(5), zero_point), {"output_dtype": 22, "axis": 0})
    yield Sample(op, "not_saturate", (values(5, 70) * 100, scales()), {"output_dtype": 19, "saturate": False})


def packed_samples() -> Iterator[Sample]:
    for code in SUB_BYTE:
        for n in (70, 7, 1, 0):
            kwargs = {"output_dtype": CODES[code], "packed": True, "block_size": [16], "axis": 1}
            yield Sample("quantize_linear", f"packed-{code}-{n}", (values(3, n), scales(3, -(-n // 16))), kwargs)


def float_code_samples() -> Iterator[Sample]:
    for code, number in CODES.items():
        kwargs = {"output_dtype": number, "axis": 0}
        for name in ("f32", "f16"):
            x = values(5, 70, dtype=FLOATS[name])
            yield Sample("quantize_linear", f"float-{code}-{name}", (x, scales(5)), kwargs, "float_codes")


def backward_samples() -> Iterator[Sample]:
    rest = (CODES["int8"], 0, None, None, "onnx")
    needs = (True, True, True)
    for name, (x_shape, s_shape, axis, block_size) in GRANULARITIES.items():
        zero_point = zero_points(*s_shape, dtype=torch.float32)
        args = (values(*x_shape, seed=7), values(*x_shape), scales(*s_shape), zero_point, axis, block_size)
        yield Sample("fake_quantize_linear_backward", name, (*args, *rest, "clipped", *needs))
        yield Sample("quantize_linear_backward", name, (*args, *rest, *needs))
        yield Sample("dequantize_linear_backward", name, (*args, CODES["int8"], None, *needs))
    for name, make in LAYOUTS.items():
        args = (make() * 0.1, make(), scales(3), None, 1, [0])
        yield Sample("fake_quantize_linear_backward", name, (*args, *rest, "identity", *needs))
    codes = torch.arange(24, dtype=torch.int8).reshape(2, 12)
    for need in ((True, False, False), (False, True, False), (False, False, False)):
        name = "".join(str(int(n)) for n in need)
        args = (values(2, 12), values(2, 12), scales(2), None, 0, [0])
        yield Sample("fake_quantize_linear_backward", name, (*args, *rest, "clipped", *need))
        yield Sample("dequantize_linear_backward", name, (args[0], codes, *args[2:], CODES["int8"], None, *need))
    packed = torch.ops.linquant.pack(codes, x_dtype=CODES["int4"])
    args = (values(2, 12), packed, scales(2), None, 0, [0], CODES["int4"], 12)
    yield Sample("dequantize_linear_backward", "packed", (*args, *needs))


def dequantize_samples() -> Iterator[Sample]:
    op = "dequantize_linear"
    for sample in [*quantize_samples("quantize_linear")]:
        x = sample()
        kwargs = {key: sample.kwargs[key] for key in ("axis", "block_size") if key in sample.kwargs}
        if sample.kwargs.get("output_dtype", 0) > 20:
            kwargs["x_dtype"] = sample.kwargs["output_dtype"]
        yield Sample(op, sample.id, (x, *sample.args[1:]), kwargs)
    for sample in float_code_samples():
        kwargs = {"x_dtype": sample.kwargs["output_dtype"], "axis": 0}
        yield Sample(op, sample.id, (sample(), *sample.args[1:]), kwargs)
    for sample in packed_samples():
        kwargs = {"x_dtype": sample.kwargs["output_dtype"], "packed_size": sample.args[0].size(1)}
        kwargs |= {key: sample.kwargs[key] for key in ("axis", "block_size")}
        yield Sample(op, sample.id, (sample(), *sample.args[1:]), kwargs)
    for name, number in {"f32": 1, "f16": 10, "f64": 11, "bf16": 16}.items():
        x = torch.arange(-70, 70, dtype=torch.int8)
        yield Sample(op, f"to-{name}", (x, scales(), zero_points()), {"output_dtype": number})


def reduction_samples(op: str) -> Iterator[Sample]:
    for name, make in LAYOUTS.items():
        yield Sample(op, name, (make(),))
        yield Sample(op, f"{name}-axis1", (make(),), {"axis": 1})
    for name, (x_shape, s_shape, axis, block_size) in GRANULARITIES.items():
        if name == "dims" or len(s_shape) == 1 and s_shape == (1,):
            continue
        one = not s_shape or len(block_size) > 1
        yield Sample(op, name, (values(*x_shape),), {"axis": None if one else axis, "block_size": block_size})
    for name, dtype in {**FLOATS, "i32": torch.int32}.items():
        yield Sample(op, f"x-{name}", (values(5, 70, dtype=dtype),))


def all_samples() -> list[Sample]:
    samples = [*quantize_samples("quantize_linear"), *packed_samples(), *quantize_samples("fake_quantize_linear")]
    samples += [*float_code_samples(), *backward_samples(), *dequantize_samples()]
    samples += [*reduction_samples("min_max"), *reduction_samples("dynamic_quantize_linear")]
    for code in ("uint8", "int8", "uint16", "int16", "uint4", "int2"):
        for symmetric in (False, True):
            kwargs = {"output_dtype": CODES[code], "symmetric": symmetric, "axis": 0}
            name = f"to-{code}{'-symmetric' * symmetric}"
            samples.append(Sample("dynamic_quantize_linear", name, (values(5, 70),), kwargs))
    for code in SUB_BYTE:
        codes = torch.arange(-60, 60, dtype=torch.int8).reshape(8, 15)
        samples.append(Sample("pack", code, (codes,), {"x_dtype": CODES[code]}))
        samples.append(Sample("pack", f"{code}-transposed", (codes.t(),), {"x_dtype": CODES[code]}))
        packed = torch.ops.linquant.pack(codes, x_dtype=CODES[code])
        samples.append(Sample("unpack", code, (packed,), {"x_dtype": CODES[code]}))
        samples.append(Sample("unpack", f"{code}-odd", (packed,), {"x_dtype": CODES[code], "packed_size": 15}))
    return samples
