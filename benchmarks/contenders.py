"""Who is measured: our ops and their peers, each as a class that turns a row into calls.

`prepare(row, shape, data, nbytes)` returns the forms it offers, by name: "alloc" makes its results anew in each call,
"out" writes into buffers made before. A form is a function without arguments that does the work once and returns the
results; `numpy(row, results)` gives their bits. A contender that has no such call returns {}, and the table shows "-".

Every peer runs as its users get it: its own thread pool with its own waiting policy, constants given as constants,
results into bound buffers where it has them, and what is not the work (conversions of parameters, building of models,
compilation) done before. See workers.py for how they are kept from disturbing each other.
"""

import ctypes
import importlib
import importlib.metadata
import warnings
from pathlib import Path

import numpy as np

from benchmarks.rows import OBSERVERS, TYPES, Row, pack

ROOT = Path(__file__).resolve().parent.parent
VARIANTS = ("general", "baseline", "avx2", "avx512")


class Torch:
    """What the contenders that compute with torch's tensors share."""

    exact = False  # whether the results must be the reference's bits

    def __init__(self, threads: int):
        import torch

        torch.set_num_threads(threads)
        self.torch = torch

    def about(self) -> dict[str, str]:
        """What the table's title and the JSON say of this contender."""
        return {"torch": self.torch.__version__, "torch variant": self.torch.backends.cpu.get_cpu_capability()}

    def prepare(self, row: Row, shape, data: dict[str, np.ndarray], nbytes: int) -> dict:
        """The calls, by form; here by the method named like the row's work."""
        work = getattr(self, row.work, None)
        return work(row, shape, **{name: self.tensor(value) for name, value in data.items()}) if work else {}

    def dtype(self, name: str):
        """The torch dtype of one of TYPES, unpacked."""
        return getattr(self.torch, TYPES[name].torch)

    def tensor(self, value: np.ndarray):
        """A copy of `value`; types that torch cannot take from NumPy go as integers of their width."""
        for name in TYPES:
            if TYPES[name].is_float and value.dtype == TYPES[name].numpy:
                bits = np.ascontiguousarray(value).view(f"i{value.itemsize}")
                return self.torch.tensor(bits).view(self.dtype(name)).reshape(value.shape)
        return self.torch.tensor(value)

    def numpy(self, row: Row, results) -> list[np.ndarray]:
        """The bits of the results, in arrays of integers."""
        results = results if isinstance(results, (tuple, list)) else [results]
        results = [t.int_repr() if t.is_quantized else t for t in results]
        integers = {1: self.torch.uint8, 2: self.torch.int16, 4: self.torch.int32}
        return [t.contiguous().view(integers.get(t.element_size(), t.dtype)).numpy() for t in results]

    def gradient(self, function, x, *parameters) -> dict:
        """A call that computes values and the gradients of their sum, and returns values and x's gradient."""
        inputs = [t.requires_grad_() for t in (x, *parameters)]
        ones = self.torch.ones_like(x)

        def call():
            y = function(*inputs)
            return y.detach(), self.torch.autograd.grad(y, inputs, ones)[0]

        return {"alloc": call}

    def with_out(self, make, write) -> dict:
        """Both forms of a call: `make()` returns its results, `write(buffers)` fills buffers like them."""
        results = make()
        buffers = [self.torch.zeros_like(t) for t in (results if isinstance(results, tuple) else (results,))]
        return {"alloc": make, "out": lambda: write(buffers)}


class Copy(Torch):
    """The baseline: a copy that moves as many bytes as the row reads and writes, by torch, with the same threads."""

    def prepare(self, row, shape, data, nbytes):
        source = self.torch.ones(max(nbytes // 2, 1), dtype=self.torch.uint8)  # a copy reads and writes each byte
        return self.with_out(source.clone, lambda buffers: buffers[0].copy_(source))

    def numpy(self, row, results):
        return []


class Linquant(Torch):
    """This package: the ops as they are registered, and for some rows the public functions above them."""

    exact = True

    def __init__(self, threads):
        super().__init__(threads)
        import torch_linquant

        self.package, self.ops = torch_linquant, self.torch.ops.linquant

    def about(self):
        version = importlib.metadata.version("torch_linquant")
        return super().about() | {"torch_linquant": version, "variant": VARIANTS[self.ops._cpu_variant()]}

    def both(self, row, name: str, outs: tuple[str, ...], *args, **options):
        """The call with and without buffers, of the op `name` or of the function of that name."""
        if row.function:
            function = getattr(self.package, name)
            if options.pop("output_dtype", None):
                options["dtype"] = self.dtype(row.y)
            return self.with_out(
                lambda: function(*args, **options), lambda buffers: function(*args, **options, out=buffers[0])
            )
        make, write = getattr(self.ops, name).default, getattr(self.ops, name).out
        return self.with_out(
            lambda: make(*args, **options),
            lambda buffers: write(*args, **options, **dict(zip(outs, buffers, strict=True))),
        )

    def grain(self, row) -> dict:
        """The arguments that say the granularity; none per tensor, as a user would write it."""
        options = {} if row.grain.axis is None else {"axis": row.grain.axis}
        return options | ({"block_size": [row.grain.block]} if row.grain.block else {})

    def codes(self, row, zero_point) -> dict:
        """The argument that says the type of the codes, where zero_point does not."""
        said = zero_point is not None and not row.packed and zero_point.dtype == self.dtype(row.y)
        return {} if said else {"output_dtype": TYPES[row.y].onnx}

    def quantize(self, row, shape, x, scale, zero_point):
        options = self.grain(row) | self.codes(row, zero_point) | ({"packed": True} if row.packed else {})
        return self.both(row, "quantize_linear", ("out",), x, scale, zero_point, **options)

    def fake_quantize(self, row, shape, x, scale, zero_point):
        options = self.grain(row) | self.codes(row, zero_point)
        return self.both(row, "fake_quantize_linear", ("out",), x, scale, zero_point, **options)

    def chain(self, row, shape, x, scale, zero_point):
        self.torch._dynamo.reset()
        fake_quantize, relu = self.package.fake_quantize_linear, self.torch.relu
        call = self.torch.compile(lambda x: fake_quantize(relu(x), scale, zero_point), fullgraph=True, dynamic=False)
        return {"alloc": lambda: call(x)}

    def recorded(self, row, shape, x, scale, zero_point):
        x.requires_grad_()
        function = self.package.fake_quantize_linear
        return {"alloc": lambda: function(x, scale, zero_point).detach()}

    def train(self, row, shape, x, scale, zero_point):
        options = self.grain(row)
        return self.gradient(lambda x: self.package.fake_quantize_linear(x, scale, zero_point, **options), x)

    def train_scale(self, row, shape, x, scale, zero_point):
        function = self.package.fake_quantize_linear
        return self.gradient(lambda x, scale: function(x, scale, zero_point), x, scale)

    def dequantize(self, row, shape, x, scale, zero_point):
        packed = {"x_dtype": TYPES[row.x].onnx, "packed_size": shape[-1]} if row.packed else {}
        return self.both(row, "dequantize_linear", ("out",), x, scale, zero_point, **self.grain(row), **packed)

    def dynamic_quantize(self, row, shape, x):
        options = self.grain(row) | {"output_dtype": TYPES[row.y].onnx}
        return self.both(row, "dynamic_quantize_linear", ("y", "scale", "zero_point"), x, **options)

    def min_max(self, row, shape, x):
        return self.both(row, "min_max", ("r_min", "r_max"), x, **self.grain(row))

    def observe_min_max(self, row, shape, x):
        return self.observer(row, self.package.MinMaxObserver, x)

    def observe_moving_average(self, row, shape, x):
        return self.observer(row, self.package.MovingAverageMinMaxObserver, x)

    def observe_histogram(self, row, shape, x):
        return self.observer(row, self.package.PercentileObserver, x)

    def observer(self, row, kind, x):
        axis = row.grain.axis
        observer = kind("int8", self.package.PerTensor() if axis is None else self.package.PerAxis(axis))
        return {"alloc": lambda: (observer(x), observer.r_min, observer.r_max)[1:]}

    def pack(self, row, shape, x):
        return self.both(row, "pack", ("out",), x, x_dtype=TYPES[row.x].onnx)

    def unpack(self, row, shape, x):
        return self.both(row, "unpack", ("out",), x, x_dtype=TYPES[row.x].onnx, packed_size=shape[-1])


class Opaque(Linquant):
    """Our compiled chain with the op left as a call of its own, to compare with the one that is fused."""

    def prepare(self, row, shape, data, nbytes):
        self.package.set_fusion(False)
        return super().prepare(row, shape, data, nbytes) if row.work == "chain" else {}


class Eager(Torch):
    """The operators torch has for the work. None of those that quantize writes into a buffer."""

    def __init__(self, threads):
        super().__init__(threads)
        warnings.filterwarnings("ignore", message=".*deprecated")

    def quantize(self, row, shape, x, scale, zero_point):
        kinds = {"int8": self.torch.qint8, "uint8": self.torch.quint8}
        if row.x != "f32" or row.y not in kinds or row.grain.block:
            return {}
        kind, axis = kinds[row.y], row.grain.axis
        if axis is None:
            s, z = scale.item(), zero_point.item()
            return {"alloc": lambda: self.torch.quantize_per_tensor(x, s, z, kind)}
        z = zero_point.long()
        return {"alloc": lambda: self.torch.quantize_per_channel(x, scale, z, axis, kind)}

    def dequantize(self, row, shape, x, scale, zero_point):
        if row.packed or row.grain.block or row.y != "f32":
            return {}
        if row.grain.axis is None:
            q = self.torch._make_per_tensor_quantized_tensor(x, scale.item(), zero_point.item())
        else:
            q = self.torch._make_per_channel_quantized_tensor(x, scale.double(), zero_point.long(), row.grain.axis)
        return {"alloc": q.dequantize}

    def fake_quantize(self, row, shape, x, scale, zero_point):
        if row.grain.block:
            return {}
        lo, hi, axis = TYPES[row.y].lo, TYPES[row.y].hi, row.grain.axis
        if axis is None:
            s, z = scale.item(), zero_point.item()
            return {"alloc": lambda: self.torch.fake_quantize_per_tensor_affine(x, s, z, lo, hi)}
        z = zero_point.int()
        return {"alloc": lambda: self.torch.fake_quantize_per_channel_affine(x, scale, z, axis, lo, hi)}

    def train(self, row, shape, x, scale, zero_point):
        lo, hi, axis = TYPES[row.y].lo, TYPES[row.y].hi, row.grain.axis
        if axis is None:
            s, z = scale.item(), zero_point.item()
            return self.gradient(lambda x: self.torch.fake_quantize_per_tensor_affine(x, s, z, lo, hi), x)
        z = zero_point.int()
        return self.gradient(lambda x: self.torch.fake_quantize_per_channel_affine(x, scale, z, axis, lo, hi), x)

    def train_scale(self, row, shape, x, scale, zero_point):
        function, z = self.torch._fake_quantize_learnable_per_tensor_affine, zero_point.float().reshape(1)
        lo, hi = TYPES[row.y].lo, TYPES[row.y].hi
        return self.gradient(lambda x, s: function(x, s, z, lo, hi, 1.0), x, scale.reshape(1))

    def recorded(self, row, shape, x, scale, zero_point):
        lo, hi, s, z = TYPES[row.y].lo, TYPES[row.y].hi, scale.item(), zero_point.item()
        x.requires_grad_()
        return {"alloc": lambda: self.torch.fake_quantize_per_tensor_affine(x, s, z, lo, hi).detach()}

    def dynamic_quantize(self, row, shape, x):
        torch = self.torch

        def call():
            low, high = torch.aminmax(x) if row.grain.axis is None else torch.aminmax(x, dim=1)
            low, high = low.clamp_max(0), high.clamp_min(0)
            scale = (high - low) / 255
            zero_point = torch.round(-low / scale).clamp(0, 255).int()
            if row.grain.axis is None:
                return torch.quantize_per_tensor(x, scale, zero_point, torch.quint8), scale, zero_point.byte()
            return torch.quantize_per_channel(x, scale, zero_point, 0, torch.quint8), scale, zero_point.byte()

        return {"alloc": call}

    def min_max(self, row, shape, x):
        dims = row.grain.reduced(x.ndim)
        dim = None if dims is None else dims[0]
        return self.with_out(
            lambda: tuple(self.torch.aminmax(x, dim=dim)),
            lambda buffers: self.torch.aminmax(x, dim=dim, out=tuple(buffers)),
        )

    def observe_min_max(self, row, shape, x):
        return self.observer(row, "MinMaxObserver", "PerChannelMinMaxObserver", x)

    def observe_moving_average(self, row, shape, x):
        return self.observer(row, "MovingAverageMinMaxObserver", "MovingAveragePerChannelMinMaxObserver", x)

    def observe_histogram(self, row, shape, x):
        return self.observer(row, "HistogramObserver", None, x)

    observers = "torch.ao.quantization"  # the module that has them

    def observer(self, row, per_tensor: str, per_channel: str | None, x):
        axis = row.grain.axis
        name = per_tensor if axis is None else per_channel
        if name is None:
            return {}
        kind = getattr(importlib.import_module(self.observers), name)
        observer = kind(dtype=self.torch.qint8) if axis is None else kind(dtype=self.torch.qint8, ch_axis=axis)
        return {"alloc": lambda: (observer(x), observer.min_val.float(), observer.max_val.float())[1:]}


class Torchao(Eager):
    """torchao's observers, those of its export path."""

    observers = "torchao.quantization.pt2e"

    def about(self):
        return {"torchao": importlib.metadata.version("torchao")}

    def prepare(self, row, shape, data, nbytes):
        return super().prepare(row, shape, data, nbytes) if row.work in OBSERVERS else {}


class Formula(Torch):
    """The formula in torch's elementary operators, run one by one: what is written where torch has no operator."""

    def prepare(self, row, shape, data, nbytes):
        if row.grain.block and shape[row.grain.axis] % row.grain.block:
            return {}  # the formula views blocks as a dimension
        if not hasattr(self, row.work):
            return {}
        function = getattr(self, row.work)(row, shape)
        args = [self.tensor(value) for value in data.values()]
        if "scale" in data:  # the parameters as x's rank has them, zero points in x's floating type (f32 for codes)
            full = [value.unsqueeze(row.grain.axis + 1) if row.grain.block else value for value in args[1:]]
            if row.grain.axis is not None and not row.grain.block:
                full = [value.reshape(row.grain.shape(shape)) for value in full]
            args[1:] = [full[0], full[1].to(full[0].dtype)]
        return self.forms(function, args)

    def forms(self, function, args) -> dict:
        """The calls of `function` on `args`; without a compiler there is nothing to write into a buffer."""
        return {"alloc": lambda: function(*args)}

    def encode(self, row, x, scale, zero_point):
        """Codes, in the shape that scale broadcasts to."""
        code, dtype, grain = TYPES[row.y], self.dtype(row.y), row.grain
        if grain.block:
            x = x.unflatten(grain.axis, (-1, grain.block))
        if code.is_float:
            return (x / scale).to(dtype)
        return self.torch.clamp(self.torch.round(x / scale) + zero_point, code.lo, code.hi).to(dtype)

    def decode(self, row, codes, scale, zero_point, dtype):
        """Values, from codes in the shape that scale broadcasts to."""
        return ((codes.float() - zero_point) * scale).to(dtype)

    def flat(self, row, y):
        """The shape of x again, where blocks were a dimension."""
        return y.flatten(row.grain.axis, row.grain.axis + 1) if row.grain.block else y

    def pack4(self, codes):
        """Two 4-bit codes in a byte, the first in the low bits."""
        return ((codes[..., ::2] & 15) | (codes[..., 1::2] << 4)).view(self.torch.uint8)

    def unpack4(self, stored):
        """The inverse of pack4 for int4."""
        stored = stored.view(self.torch.int8)
        return self.torch.stack(((stored << 4) >> 4, stored >> 4), -1).flatten(-2)

    def quantize(self, row, shape):
        def function(x, scale, zero_point):
            y = self.flat(row, self.encode(row, x, scale, zero_point))
            return self.pack4(y) if row.packed else y

        return function

    def dequantize(self, row, shape):
        dtype, grain = self.dtype(row.y), row.grain

        def function(x, scale, zero_point):
            x = self.unpack4(x) if row.packed else x
            x = x.unflatten(grain.axis, (-1, grain.block)) if grain.block else x
            return self.flat(row, self.decode(row, x, scale, zero_point, dtype))

        return function

    def fake_quantize(self, row, shape):
        def function(x, scale, zero_point):
            codes = self.encode(row, x, scale, zero_point)
            return self.flat(row, self.decode(row, codes, scale, zero_point, x.dtype))

        return function

    def chain(self, row, shape):
        function = self.fake_quantize(row, shape)
        return lambda x, scale, zero_point: function(self.torch.relu(x), scale, zero_point)

    def dynamic_quantize(self, row, shape):
        torch, code, dtype, dims = self.torch, TYPES[row.y], self.dtype(row.y), row.grain.reduced(len(shape)) or ()

        def function(x):
            low, high = torch.amin(x, dims, keepdim=True).clamp_max(0), torch.amax(x, dims, keepdim=True).clamp_min(0)
            scale = (high - low) / (code.hi - code.lo)
            zero_point = torch.round(torch.clamp(code.lo - low / scale, code.lo, code.hi))
            y = torch.clamp(torch.round(x / scale) + zero_point, code.lo, code.hi).to(dtype)
            return y, scale.squeeze(), zero_point.to(dtype).squeeze()

        return function

    def min_max(self, row, shape):
        dims = row.grain.reduced(len(shape)) or ()
        return lambda x: (self.torch.amin(x, dims), self.torch.amax(x, dims))

    def pack(self, row, shape):
        return self.pack4

    def unpack(self, row, shape):
        return self.unpack4


class Compile(Formula):
    """The formula under torch.compile, once as a function of its inputs and once writing into given buffers."""

    def forms(self, function, args):
        torch = self.torch
        torch._dynamo.reset()  # each row is a program of its own

        def fill(buffers, *args):
            results = function(*args)
            for buffer, result in zip(buffers, results if isinstance(results, tuple) else (results,), strict=True):
                buffer.copy_(result)
            return buffers

        make = torch.compile(function, fullgraph=True, dynamic=False)
        write = torch.compile(fill, fullgraph=True, dynamic=False)
        return self.with_out(lambda: make(*args), lambda buffers: write(buffers, *args))


class OnnxRuntime:
    """ONNX Runtime: one small model per row, its input bound; "out" binds the outputs too."""

    exact = True

    def __init__(self, threads: int):
        import onnx
        import onnxruntime

        self.onnx, self.ort, self.threads = onnx, onnxruntime, threads

    def about(self):
        return {"onnxruntime": self.ort.__version__, "onnx": self.onnx.__version__}

    def prepare(self, row, shape, data, nbytes):
        if "bf16" in (row.x, row.y) or not hasattr(self, row.work):  # its kernels know no bfloat16
            return {}
        model = getattr(self, row.work)(row, shape, data)
        if model is None:
            return {}
        session, outputs = self.session(row, shape, *model), model[-1]
        x = self.value(shape, TYPES[row.x].onnx)
        ctypes.memmove(x.data_ptr(), np.ascontiguousarray(data["x"]).ctypes.data, data["x"].nbytes)
        fresh, bound = session.io_binding(), session.io_binding()
        for binding in (fresh, bound):
            binding.bind_ortvalue_input("x", x)
        for name, number, size in outputs:
            bound.bind_ortvalue_output(name, self.value(size, number))
        names = [name for name, _, _ in outputs]

        def make():  # faster than run_with_ort_values and run
            for name in names:
                fresh.bind_output(name, "cpu")
            session.run_with_iobinding(fresh)
            return fresh

        def write():
            session.run_with_iobinding(bound)
            return bound

        return {"alloc": make, "out": write}

    def numpy(self, row, results):
        """The bytes of the bound results: NumPy has no name for some of their types."""
        return [
            np.frombuffer(ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes()), np.uint8)
            for value in results.get_outputs()
        ]

    def value(self, shape, number: int):
        """An uninitialised tensor of ONNX Runtime's."""
        return self.ort.OrtValue.ortvalue_from_shape_and_type(list(shape), number, "cpu", 0)

    def session(self, row, shape, nodes, constants, outputs):
        """A session for a model of `nodes` from x to `outputs`, with default optimisations and waiting policy."""
        helper = self.onnx.helper
        graph = helper.make_graph(
            nodes,
            "row",
            [helper.make_tensor_value_info("x", TYPES[row.x].onnx, shape)],
            [helper.make_tensor_value_info(name, number, s) for name, number, s in outputs],
            constants,
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)], ir_version=11)
        options = self.ort.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = self.threads, 1
        return self.ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])

    def node(self, kind: str, inputs, outputs, row, **attributes):
        """A node with the row's axis and block size."""
        if row.grain.axis is not None:
            attributes |= {"axis": row.grain.axis} | ({"block_size": row.grain.block} if row.grain.block else {})
        return self.onnx.helper.make_node(kind, inputs, outputs, **attributes)

    def parameters(self, data, scale_type: str, code_type: str):
        """The constants of the model: scale and zero_point."""
        return [
            self.onnx.helper.make_tensor(
                name, TYPES[kind].onnx, data[name].shape, pack(data[name].reshape(-1), TYPES[kind]).tobytes(), raw=True
            )
            for name, kind in (("scale", scale_type), ("zero_point", code_type))
        ]

    # Each work returns its nodes, constants and outputs (name, type, shape), or None where ONNX has no such operator.

    def quantize(self, row, shape, data):
        nodes = [self.node("QuantizeLinear", ["x", "scale", "zero_point"], ["y"], row)]
        return nodes, self.parameters(data, row.x, row.y), [("y", TYPES[row.y].onnx, shape)]

    def dequantize(self, row, shape, data):
        nodes = [self.node("DequantizeLinear", ["x", "scale", "zero_point"], ["y"], row)]
        return nodes, self.parameters(data, row.y, row.x), [("y", TYPES[row.y].onnx, shape)]

    def fake_quantize(self, row, shape, data):
        nodes = [
            self.node("QuantizeLinear", ["x", "scale", "zero_point"], ["q"], row),
            self.node("DequantizeLinear", ["q", "scale", "zero_point"], ["y"], row),
        ]
        return nodes, self.parameters(data, row.x, row.y), [("y", TYPES[row.x].onnx, shape)]

    def dynamic_quantize(self, row, shape, data):
        if row.grain.axis is not None:
            return None
        code = TYPES["uint8"].onnx
        outputs = [("y", code, shape), ("scale", TYPES["f32"].onnx, ()), ("zero_point", code, ())]
        return [self.node("DynamicQuantizeLinear", ["x"], [name for name, _, _ in outputs], row)], [], outputs

    def min_max(self, row, shape, data):
        dims = row.grain.reduced(len(shape))
        axes = [] if dims is None else [self.onnx.helper.make_tensor("axes", 7, (len(dims),), dims)]  # 7: int64
        inputs, kept = ["x", "axes"][: 1 + len(axes)], () if dims is None else (shape[row.grain.axis],)
        nodes = [
            self.onnx.helper.make_node(kind, inputs, [name], keepdims=0)
            for kind, name in (("ReduceMin", "r_min"), ("ReduceMax", "r_max"))
        ]
        return nodes, axes, [(name, TYPES[row.x].onnx, kept) for name in ("r_min", "r_max")]


CONTENDERS = {
    "linquant": Linquant,
    "copy": Copy,
    "eager": Eager,
    "formula": Formula,
    "compile": Compile,
    "opaque": Opaque,
    "onnxruntime": OnnxRuntime,
    "torchao": Torchao,
}
OURS, BASELINE = "linquant", "copy"
PEERS = [name for name in CONTENDERS if name not in (OURS, BASELINE)]
