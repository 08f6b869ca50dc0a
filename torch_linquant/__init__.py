"""Linear quantization operators for PyTorch whose bits are those of the deployed runtime."""

from ._inductor import set_fusion
from .decompositions import decompositions
from .dtypes import QUANT_DTYPES, QuantDtype, resolve
from .fake_quantize import FakeQuantize, LearnedFakeQuantize
from .granularity import Granularity, PerAxis, PerBlock, PerDims, PerTensor, PerToken
from .histogram_observers import (
    ACIQObserver,
    DistributionObserver,
    EntropyObserver,
    HistogramObserver,
    MSEObserver,
    PercentileObserver,
    StdObserver,
)
from .modules import QuantizedConv2d, QuantizedLayer, QuantizedLinear
from .observers import MeanMinMaxObserver, MinMaxObserver, MovingAverageMinMaxObserver, Observer
from .ops import (
    dequantize_linear,
    dynamic_quantize,
    dynamic_quantize_linear,
    fake_quantize_linear,
    min_max,
    pack,
    quantize_linear,
    unpack,
)
from .qparams import choose_qparams
from .sync import keep_observers_local, sync_observers
from .weights import quantize_tensor, search_qparams
from .workflow import calibrate, convert, prepare, sqnr, weight_bytes

__all__ = [
    "QUANT_DTYPES",
    "ACIQObserver",
    "DistributionObserver",
    "EntropyObserver",
    "FakeQuantize",
    "Granularity",
    "HistogramObserver",
    "LearnedFakeQuantize",
    "MSEObserver",
    "MeanMinMaxObserver",
    "MinMaxObserver",
    "MovingAverageMinMaxObserver",
    "Observer",
    "PerAxis",
    "PerBlock",
    "PerDims",
    "PerTensor",
    "PerToken",
    "PercentileObserver",
    "QuantDtype",
    "QuantizedConv2d",
    "QuantizedLayer",
    "QuantizedLinear",
    "StdObserver",
    "calibrate",
    "choose_qparams",
    "convert",
    "decompositions",
    "dequantize_linear",
    "dynamic_quantize",
    "dynamic_quantize_linear",
    "fake_quantize_linear",
    "keep_observers_local",
    "min_max",
    "pack",
    "prepare",
    "quantize_linear",
    "quantize_tensor",
    "resolve",
    "search_qparams",
    "set_fusion",
    "sqnr",
    "sync_observers",
    "unpack",
    "weight_bytes",
]
