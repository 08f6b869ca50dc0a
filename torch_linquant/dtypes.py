"""The types of quantized values, by the names and numbers under which users, ONNX and PyTorch know them."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class QuantDtype:
    """A type of quantized values.

    Attributes:
        name: what users write: "int8", "uint4", "float8_e4m3fn", ...
        number: ONNX's TensorProto.DataType, which the ops take.
        bits: of a code.
        storage: the torch dtype of a tensor that holds one code an element. Types of fewer than 8 bits live in int8 or
            uint8: PyTorch's own int4 and its like cannot be copied, printed, saved or compiled.
        qmin, qmax: the range of integer codes; of float codes, the finite range of their values.
        is_float: whether codes are small floats.
    """

    name: str
    number: int
    bits: int
    storage: torch.dtype
    qmin: float
    qmax: float
    is_float: bool = False

    @property
    def signed(self) -> bool:
        """Whether there are codes below zero."""
        return self.qmin < 0

    @property
    def per_byte(self) -> int:
        """How many codes a packed byte holds; 1 for types that are not packed."""
        return max(1, 8 // self.bits)


def _integer(name: str, number: int, storage: torch.dtype) -> QuantDtype:
    signed = name.startswith("int")
    bits = int(name.removeprefix("u").removeprefix("int"))
    low = -(2 ** (bits - 1)) if signed else 0
    return QuantDtype(name, number, bits, storage, low, low + 2**bits - 1)


QUANT_DTYPES: tuple[QuantDtype, ...] = (
    _integer("uint8", 2, torch.uint8),
    _integer("int8", 3, torch.int8),
    _integer("uint16", 4, torch.uint16),
    _integer("int16", 5, torch.int16),
    _integer("int32", 6, torch.int32),
    QuantDtype("float8_e4m3fn", 17, 8, torch.float8_e4m3fn, -448.0, 448.0, True),
    QuantDtype("float8_e4m3fnuz", 18, 8, torch.float8_e4m3fnuz, -240.0, 240.0, True),
    QuantDtype("float8_e5m2", 19, 8, torch.float8_e5m2, -57344.0, 57344.0, True),
    QuantDtype("float8_e5m2fnuz", 20, 8, torch.float8_e5m2fnuz, -57344.0, 57344.0, True),
    _integer("uint4", 21, torch.uint8),
    _integer("int4", 22, torch.int8),
    QuantDtype("float4_e2m1", 23, 4, torch.uint8, -6.0, 6.0, True),
    _integer("uint2", 25, torch.uint8),
    _integer("int2", 26, torch.int8),
)

# ONNX numbers of the float types that scales, precisions and dequantized values may have.
FLOAT_NUMBERS: dict[torch.dtype, int] = {
    torch.float32: 1,
    torch.float16: 10,
    torch.float64: 11,
    torch.bfloat16: 16,
}

BY_NUMBER: dict[int, QuantDtype] = {t.number: t for t in QUANT_DTYPES}
_BY_NAME: dict[str, QuantDtype] = {t.name: t for t in QUANT_DTYPES}
_OTHER_NAMES = {"float4_e2m1fn_x2": "float4_e2m1", "float4_e2m1fn": "float4_e2m1"}


def type_name(dtype: torch.dtype) -> str:
    """The name of a torch dtype without the module.

    >>> type_name(torch.float8_e4m3fn)
    'float8_e4m3fn'
    """
    return str(dtype).removeprefix("torch.")


def resolve(dtype: "QuantDtype | torch.dtype | str | int") -> QuantDtype:
    """Find a type of quantized values.

    Args:
        dtype: a torch dtype (torch.int4, torch.float4_e2m1fn_x2 and their like included), a name, an ONNX number, or a
            QuantDtype itself.

    Raises:
        ValueError: if it is none of the types of `QUANT_DTYPES`.

    >>> resolve("int4").qmin, resolve(torch.uint8).number, resolve(22).name
    (-8, 2, 'int4')
    """
    if isinstance(dtype, QuantDtype):
        return dtype
    if isinstance(dtype, int) and not isinstance(dtype, bool) and dtype in BY_NUMBER:
        return BY_NUMBER[dtype]
    name = type_name(dtype) if isinstance(dtype, torch.dtype) else dtype
    if isinstance(name, str) and _OTHER_NAMES.get(name, name) in _BY_NAME:
        return _BY_NAME[_OTHER_NAMES.get(name, name)]
    raise ValueError(f"dtype must be one of {', '.join(_BY_NAME)}, but got {name!r}.")


def float_number(argument: str, dtype: torch.dtype | None) -> int:
    """The ONNX number of a float type; 0 for None, which leaves the choice to the op.

    Raises:
        ValueError: if it is another type; `argument` is the name that the message gives it.
    """
    if dtype is None:
        return 0
    if dtype not in FLOAT_NUMBERS:
        got = type_name(dtype) if isinstance(dtype, torch.dtype) else repr(dtype)
        raise ValueError(f"{argument} must be torch.float32, float16, float64 or bfloat16, but got {got}.")
    return FLOAT_NUMBERS[dtype]
