"""Records what oneDNN Graph's DynamicQuantize answers, into tests/data/onednn_answers.json.

The library is too big to be installed for every test run (its wheel pulls in a compiler's run time); its answers are
not. Run this where the wheel `onednn` is installed, beside numpy and this folder's parent on PYTHONPATH:

    python tests/oracles/record_onednn.py
"""

import ctypes
import json
import sys
from pathlib import Path

import numpy as np

F32, S32, S8, U8 = 3, 4, 5, 6  # dnnl_data_type_t
TYPES = {"float32": F32, "int32": S32, "int8": S8, "uint8": U8}
CPU, IN_ORDER, FUSION, DYNAMIC_QUANTIZE, ATTR_AXIS, ATTR_QTYPE, VARIABLE, STRIDED = 1, 1, 1, 22, 0x30, 0x85, 1, 2
ANSWERS = Path(__file__).parents[1] / "data" / "onednn_answers.json"


class LogicalTensor(ctypes.Structure):
    _fields_ = (
        ("id", ctypes.c_size_t),
        ("ndims", ctypes.c_int),
        ("dims", ctypes.c_int64 * 12),
        ("data_type", ctypes.c_int),
        ("property", ctypes.c_int),
        ("layout_type", ctypes.c_int),
        ("strides", ctypes.c_int64 * 12),
    )


class OneDnn:
    def __init__(self) -> None:
        self.lib = ctypes.CDLL(str(Path(sys.prefix) / "lib" / "libdnnl.so.3"))
        self.engine, self.stream = ctypes.c_void_p(), ctypes.c_void_p()
        self("engine_create", ctypes.byref(self.engine), CPU, ctypes.c_size_t(0))
        self("stream_create", ctypes.byref(self.stream), self.engine, IN_ORDER)

    def __call__(self, name: str, *args) -> None:
        status = getattr(self.lib, f"dnnl_{name}")(*args)
        if status != 0:
            raise RuntimeError(f"dnnl_{name} failed with status {status}")

    def new(self, name: str, *args) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self(name, ctypes.byref(handle), *args)
        return handle

    def dynamic_quantize(self, x, scales, zps, qtype: str, axis: int, dtype: str) -> np.ndarray:
        y = np.zeros(x.shape, dtype=dtype)
        arrays = [x, scales, *([] if zps is None else [zps]), y]
        logical = []
        for i, a in enumerate(arrays):
            a_strides = [s // a.itemsize for s in a.strides]
            pad = [0] * (12 - a.ndim)
            dims, strides = (ctypes.c_int64 * 12)(*a.shape, *pad), (ctypes.c_int64 * 12)(*a_strides, *pad)
            logical.append(LogicalTensor(i, a.ndim, dims, TYPES[a.dtype.name], VARIABLE, STRIDED, strides))
        op = self.new("graph_op_create", ctypes.c_size_t(0), DYNAMIC_QUANTIZE, b"quantize")
        self("graph_op_set_attr_str", op, ATTR_QTYPE, qtype.encode(), ctypes.c_size_t(len(qtype)))
        self("graph_op_set_attr_s64", op, ATTR_AXIS, ctypes.byref(ctypes.c_int64(axis)), ctypes.c_size_t(0))
        for t in logical[:-1]:
            self("graph_op_add_input", op, ctypes.byref(t))
        self("graph_op_add_output", op, ctypes.byref(logical[-1]))
        graph = self.new("graph_graph_create", CPU)
        self("graph_add_op", graph, op)
        self("graph_graph_finalize", graph)
        self("graph_graph_filter", graph, FUSION)
        partitions = (ctypes.c_void_p * 1)()
        self("graph_graph_get_partitions", graph, ctypes.c_size_t(1), partitions)
        compiled = self.new("graph_compiled_partition_create", ctypes.c_void_p(partitions[0]))
        inputs = (ctypes.c_void_p * (len(arrays) - 1))(*(ctypes.addressof(t) for t in logical[:-1]))
        outputs = (ctypes.c_void_p * 1)(ctypes.addressof(logical[-1]))
        self(
            "graph_partition_compile",
            ctypes.c_void_p(partitions[0]),
            compiled,
            ctypes.c_size_t(len(inputs)),
            inputs,
            ctypes.c_size_t(1),
            outputs,
            self.engine,
        )
        tensors = [
            self.new("graph_tensor_create", ctypes.byref(t), self.engine, ctypes.c_void_p(a.ctypes.data))
            for t, a in zip(logical, arrays, strict=True)
        ]
        given = (ctypes.c_void_p * len(inputs))(*(t.value for t in tensors[:-1]))
        result = (ctypes.c_void_p * 1)(tensors[-1].value)
        counts = ctypes.c_size_t(len(inputs)), ctypes.c_size_t(1)
        self("graph_compiled_partition_execute", compiled, self.stream, counts[0], given, counts[1], result)
        self("stream_wait", self.stream)
        return y


def inputs(rng: np.random.Generator, shape, scale: np.ndarray, low: int, high: int) -> np.ndarray:
    """Ties of the reciprocal's product and of the quotient, their neighbours, values far outside."""
    half = (rng.integers(2 * low - 8, 2 * high + 8, shape) / 2).astype(np.float32) * scale
    moved = (half.astype(np.float32).view(np.int32) + rng.integers(-2, 3, shape).astype(np.int32)).view(np.float32)
    far = np.float32(rng.standard_normal(shape) * 1e4)
    return np.where(rng.random(shape) < 0.9, moved, far).astype(np.float32)


def record(dnn: OneDnn) -> list[dict]:
    rng = np.random.default_rng(0)
    answers = []
    for dtype, zp_type, (qtype, shape, axis) in (
        (d, z, layout)
        for d in ("int8", "uint8")
        for z in (None, "int8", "uint8", "int32", "far")
        for layout in (
            ("per_tensor", (131,), 0),
            ("per_tensor", (3, 5, 7), 1),
            ("per_channel", (6, 23), 1),
            ("per_channel", (5, 4, 7), 0),
            ("per_channel", (2, 3, 4, 5), 3),
        )
    ):
        count = 1 if qtype == "per_tensor" else shape[axis]
        scales = (rng.random(count) + 0.05).astype(np.float32)
        zps = None
        if zp_type == "far":
            zps = rng.choice(np.array([300, -300, 1000, -129, 256], dtype=np.int32), count)
        elif zp_type is not None:
            info = np.iinfo("int8" if zp_type == "int32" else zp_type)
            zps = rng.integers(info.min, info.max + 1, count).astype(zp_type)
        aligned = [1] * len(shape)
        if qtype == "per_channel":
            aligned[axis] = count
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
        x = inputs(rng, shape, scales.reshape(aligned), low - 130, high + 130)
        try:
            y = dnn.dynamic_quantize(x, scales, zps, qtype, axis, dtype)
        except RuntimeError as error:
            # oneDNN refuses some: nothing to hold an answer against.
            print(f"{dtype}, {zp_type} zero points, {qtype}, {shape}: {error}")
            continue
        answers.append(
            {
                "qtype": qtype,
                "axis": axis,
                "shape": list(shape),
                "dtype": dtype,
                "zp_type": None if zps is None else zps.dtype.name,
                "x": x.tobytes().hex(),
                "scales": scales.tobytes().hex(),
                "zps": None if zps is None else zps.tobytes().hex(),
                "y": y.tobytes().hex(),
            }
        )
    return answers


if __name__ == "__main__":
    answers = record(OneDnn())
    text = "[\n" + ",\n".join(json.dumps(a) for a in answers) + "\n]\n"
    ANSWERS.write_text(text)
    print(f"{len(answers)} answers in {ANSWERS}")
