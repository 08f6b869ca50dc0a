"""From a float model to a quantized one: `prepare`, `calibrate`, `convert`, and what the result is like.

    observed = prepare(model)            a copy that watches the input of every Linear and Conv2d
    calibrate(observed, batches)         ranges from data
    quantized = convert(observed)        int8 weights, quantized inputs

Observers stand at the inputs of the layers alone: the placement that keeps transformers accurate and needs no graph.
"""

import copy
import itertools
import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .granularity import PerAxis, PerTensor
from .modules import QuantizedConv2d, QuantizedLayer, QuantizedLinear
from .observers import MinMaxObserver, Observer
from .sync import keep_observers_local

# Exact types: a subclass may compute something else, or have its weight read by others (as nn.MultiheadAttention does).
_QUANTIZED: dict[type[nn.Module], type[QuantizedLayer]] = {nn.Linear: QuantizedLinear, nn.Conv2d: QuantizedConv2d}
_OBSERVER = "input_observer"


def prepare(model: nn.Module, observer: Observer | None = None, *, skip: Collection[str] = ()) -> nn.Module:
    """Return a copy of the model that observes the input of every `nn.Linear` and `nn.Conv2d`.

    The copy computes what the model computes and can be trained, compiled and saved; its state is the model's plus that
    of the observers, which are found at `<layer>.input_observer`. A layer that the model holds in several places has
    one observer. Subclasses of the two types are left alone, and so is everything else that computes: attention's own
    projections, recurrent layers, embeddings, convolutions of other ranks stay in float.

    Args:
        model: any module, in any nesting. It is left untouched.
        observer: each layer gets a fresh copy of it. Its dtype, granularity and options become those of the layer's
            quantized input. Default: `MinMaxObserver("uint8")`.
        skip: paths of modules to keep in float, with all that is inside them.

    Raises:
        ValueError: if observer is not one, if skip names no module of the model, if there is no layer to observe, or if
            the model is already prepared.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> prepare(model, skip=["0"])
    Sequential(
      (0): Linear(in_features=4, out_features=8, bias=True)
      (1): ReLU()
      (2): Linear(
        in_features=8, out_features=2, bias=True
        (input_observer): MinMaxObserver(uint8, PerTensor())
      )
    )
    """
    if observer is None:
        observer = MinMaxObserver("uint8")
    if not isinstance(observer, Observer):
        raise ValueError(f"prepare: observer must be an Observer, but got {observer!r}.")
    if not isinstance(observer.granularity, (PerTensor, PerAxis)):
        raise ValueError(
            f"prepare: observer must be PerTensor() or PerAxis(axis), but got {observer.granularity}. Scales of single "
            "tokens or blocks of an input fit the batches of the calibration alone."
        )
    if isinstance(skip, str):
        raise ValueError(f"prepare: skip must be a collection of paths, but got {skip!r}. Pass [{skip!r}].")
    if _observed(model):
        raise ValueError("prepare: model must be a float model, but got one with observers in it.")
    paths = {name for name, _ in model.named_modules(remove_duplicate=False)}
    for path in skip:
        if path not in paths:
            raise ValueError(f"prepare: skip must name modules of the model, but got {path!r}.")
    skipped = {id(module) for path in skip for module in model.get_submodule(path).modules()}
    names = [n for n, module in model.named_modules() if type(module) in _QUANTIZED and id(module) not in skipped]
    if not names:
        raise ValueError("prepare: model must hold an nn.Linear or nn.Conv2d to quantize, but got none.")
    prepared = copy.deepcopy(model)
    for name in names:
        layer = prepared.get_submodule(name)
        own = copy.deepcopy(observer)
        own.name = f"{name}.input" if name else "input"
        own.reset()
        layer.add_module(_OBSERVER, own.to(layer.weight.device))
        layer.register_forward_pre_hook(_observe_input, with_kwargs=True)
    for module in prepared.modules():
        if isinstance(module, nn.TransformerEncoder):
            # It would make nested tensors of what a padding mask leaves, and the ops take none.
            module.use_nested_tensor = False
    keep_observers_local(prepared)
    return prepared


def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    steps: int | None = None,
    progress: Callable[[int, int | None], None] | None = None,
) -> int:
    """Run batches through a prepared model for its observers to see, and return how many there were.

    The model runs in eval mode and without gradients; afterwards each module is in the mode it was in.

    Args:
        model: what `prepare` returned.
        batches: an iterable of the model's inputs. A tensor is the one argument, a tuple or list the positional
            arguments, a mapping the keyword arguments. From a loader of inputs and labels: `(x for x, _ in loader)`.
        steps: stop after this many batches. Default: all of them.
        progress: called after each batch as `progress(done, total)`; total is None where it is not known.

    Raises:
        ValueError: if the model has no observers, or if steps is not positive.

    >>> observed = prepare(nn.Linear(2, 2))
    >>> calibrate(observed, (torch.full((1, 2), float(i)) for i in range(100)), steps=4)
    4
    >>> observed.input_observer.range()
    (tensor(0.), tensor(3.))
    """
    if not _observed(model):
        raise ValueError("calibrate: model must have observers in it, but got none. Call prepare() first.")
    if isinstance(batches, Tensor):
        raise ValueError(
            f"calibrate: batches must be an iterable of batches, but got a tensor of shape {list(batches.shape)}. "
            "Pass [x] for one batch."
        )
    if steps is not None and steps < 1:
        raise ValueError(f"calibrate: steps must be None or at least 1, but got {steps}.")
    hint = operator.length_hint(batches, -1)  # as len(), but content with iterables that have none
    total = hint if hint >= 0 else None
    if steps is not None:
        total = steps if total is None else min(steps, total)
    done = 0
    with _evaluating(model):
        for batch in itertools.islice(batches, steps):
            _call(model, batch)
            done += 1
            if progress is not None:
                progress(done, total)
    return done


def convert(
    model: nn.Module,
    *,
    weight_dtype: torch.dtype | str = "int8",
    weight_granularity: Any = PerAxis(0),
    weight_symmetric: bool = True,
    weight_method: str = "minmax",
) -> nn.Module:
    """Return a copy of a calibrated model with quantized layers in the place of those that were observed.

    What is not quantized is copied, and the hooks of a layer go with it. The model is left as it is and may see more
    batches. The layers keep codes and multiply in float: the result shows what a runtime will compute and is what is
    exported to it, and is not faster in PyTorch.

    Args:
        model: what `prepare` returned, after calibration.
        weight_dtype, weight_granularity, weight_symmetric, weight_method: how the weights become codes, as in
            `QuantizedLayer.from_float`.

    Raises:
        ValueError: if the model has no observers.
        RuntimeError: if an observer has seen no data; the message names it.

    >>> observed = prepare(nn.Sequential(nn.Linear(4, 2)))
    >>> convert(observed)
    Traceback (most recent call last):
    RuntimeError: convert: observer '0.input' has seen no data. Run calibration batches between prepare() and convert().
    >>> _ = observed(torch.ones(1, 4))
    >>> convert(observed)[0].weight.dtype
    torch.int8
    """
    layers = _observed(model)
    if not layers:
        raise ValueError("convert: model must have observers in it, but got none. Call prepare() first.")
    for layer in layers:
        observer = getattr(layer, _OBSERVER)
        if not observer.seen:
            raise RuntimeError(
                f"convert: observer {observer.name!r} {observer._unseen()}. "
                "Run calibration batches between prepare() and convert()."
            )
    # deepcopy takes what is in its memo for the copy: so a layer is replaced wherever the model refers to it, and its
    # float weight is not copied first.
    replacements = {}
    for layer in layers:
        quantized = _QUANTIZED[type(layer)].from_float(
            layer,
            getattr(layer, _OBSERVER),
            weight_dtype=weight_dtype,
            weight_granularity=weight_granularity,
            weight_symmetric=weight_symmetric,
            weight_method=weight_method,
        )
        _carry_hooks(layer, quantized)
        replacements[id(layer)] = quantized
    return copy.deepcopy(model, replacements)


def sqnr(float_model: nn.Module, quantized_model: nn.Module, batch: Any) -> dict[str, float]:
    """Return the signal to quantization noise ratio of each quantized layer's output, in decibels.

    `10 log10(sum(y^2) / sum((y - y_q)^2))`, y from the float model and y_q from the quantized one, both run on the same
    batch: what a layer shows includes the noise of those before it. A layer that is called several times counts all its
    calls. inf means equal outputs.

    Args:
        float_model: the model given to `prepare`, or what that returned.
        quantized_model: what `convert` returned.
        batch: one input of the models, as in `calibrate`.

    Returns:
        A dict from the path of a layer to decibels, in the order of the model's layers. A layer that the batch does not
        reach is left out.

    >>> model = nn.Sequential(nn.Linear(16, 16))
    >>> x = torch.randn(64, 16)
    >>> observed = prepare(model)
    >>> _ = calibrate(observed, [x])
    >>> 30 < sqnr(model, convert(observed), x)["0"] < 60
    True
    """
    names = [name for name, module in quantized_model.named_modules() if isinstance(module, QuantizedLayer)]
    if not names:
        raise ValueError(
            "sqnr: quantized_model must hold quantized layers, but got none. Pass what convert() returned."
        )
    exact = _outputs(float_model, names, batch)
    noisy = _outputs(quantized_model, names, batch)
    ratios = {}
    for name in names:
        pairs = [(a.double(), b.double()) for a, b in zip(exact[name], noisy[name], strict=True)]
        if pairs:
            signal = sum(float(a.square().sum()) for a, _ in pairs)
            noise = sum(float((a - b).square().sum()) for a, b in pairs)
            ratios[name] = 10 * math.log10(signal / noise) if signal and noise else math.inf if not noise else -math.inf
    return ratios


def weight_bytes(model: nn.Module) -> int:
    """Return how many bytes the model's parameters and buffers take, shared ones once, observers left out.

    >>> weight_bytes(nn.Linear(10, 10))
    440
    """
    observers = {id(t) for m in model.modules() if isinstance(m, Observer) for t in m.buffers()}
    tensors = itertools.chain(model.parameters(), model.buffers())
    return sum(t.numel() * t.element_size() for t in tensors if id(t) not in observers)


def _observe_input(layer: nn.Module, args: tuple, kwargs: dict) -> None:
    """The hook that shows a layer's input to its observer. The layer's own arguments go on unchanged."""
    getattr(layer, _OBSERVER)(args[0] if args else kwargs["input"])


def _carry_hooks(layer: nn.Module, quantized: nn.Module) -> None:
    """Give the quantized layer the user's hooks of the float one."""
    ours = {key for key, hook in layer._forward_pre_hooks.items() if hook is _observe_input}
    for name in ("_forward_pre_hooks", "_forward_hooks"):
        for kind in ("", "_with_kwargs", "_always_called"):
            hooks = getattr(layer, name + kind, {})
            own = {key: hook for key, hook in hooks.items() if key not in ours}
            if own:
                getattr(quantized, name + kind).update(own)


def _observed(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(getattr(module, _OBSERVER, None), Observer)]


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def _outputs(model: nn.Module, names: list[str], batch: Any) -> dict[str, list[Tensor]]:
    """What the named layers return, call by call."""
    outputs: dict[str, list[Tensor]] = {name: [] for name in names}
    handles = []
    try:
        for name in names:
            keep = outputs[name]
            hook = lambda module, args, output, keep=keep: keep.append(output.detach())  # noqa: E731
            handles.append(model.get_submodule(name).register_forward_hook(hook))
        with _evaluating(model):
            _call(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return outputs


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode and no gradients; afterwards every module is as it was."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
