"""Observers on several processes: each rank watches its own data, and `sync_observers` merges what the ranks saw.

observed = prepare(model)                            on every rank
calibrate(observed, this_ranks_batches)
quantized = convert(sync_observers(observed))        the same on every rank
"""

import copy
import itertools
import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .observers import Observer, _AveragingObserver


def keep_observers_local(model: nn.Module) -> None:
    """Mark the state of all observers in the model as none that `DistributedDataParallel` should broadcast.

    It would overwrite what every rank has seen with what rank 0 has seen, before each forward. Call this before
    wrapping, with the very module that is to be wrapped. `prepare` has done it for the model that it returns;
    `fully_shard` broadcasts no buffers and needs no mark.

    Raises:
        ValueError: if the model is wrapped already, or holds no observers.

    >>> from torch_linquant import FakeQuantize
    >>> model = nn.Sequential(FakeQuantize("int8"), nn.Linear(2, 2))
    >>> keep_observers_local(model)
    >>> model._ddp_params_and_buffers_to_ignore
    ['0.observer.r_min', '0.observer.r_max', '0.observer.nonfinite']
    """
    if isinstance(model, DistributedDataParallel):
        raise ValueError(
            "keep_observers_local: model must not be wrapped yet, but got a DistributedDataParallel. "
            "Call it on the module inside, before wrapping."
        )
    observers = [(path, m) for path, m in model.named_modules(remove_duplicate=False) if isinstance(m, Observer)]
    if not observers:
        raise ValueError("keep_observers_local: model must have observers in it, but got none.")
    names = [f"{path}.{key}".lstrip(".") for path, observer in observers for key, _ in observer.named_buffers()]
    ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", [])
    model._ddp_params_and_buffers_to_ignore = list(dict.fromkeys([*ignored, *names]))  # type: ignore[assignment]


@torch.inference_mode(False)  # or the copy's observers could not take in batches outside of it
def sync_observers(model: nn.Module, group: "dist.ProcessGroup | None" = None) -> nn.Module:
    """Return a copy of the model whose observers hold what all ranks of the group have seen.

    Every rank of the group must call it and gets the same bits. The model and its observers stay as they are and may
    see more batches; the next call merges everything anew and counts nothing twice.

    - `MinMaxObserver` and the kinds with a histogram end with the state of one process that saw all the data, bit for
      bit, however the data was split; a rank may have seen none.
    - `MeanMinMaxObserver` ends with the mean over the batches of all ranks, up to rounding.
    - `MovingAverageMinMaxObserver` ends with the ranks' averages, weighted by how many batches each saw: no process
      could have seen the batches in that order, so it approximates what one process would hold.
    - In a kind of your own int64 buffers add up, r_min is the least and r_max the largest of all ranks.

    The number of collectives is the same however many observers there are. They run on the CPU if the group can, else
    on its device. Without an initialized process group this process is the only rank.

    The copy shares its parameters, and all buffers but those of observers, with the model: train, move or cast the
    model and not the copy (`convert` makes its own). Of a `DistributedDataParallel` the module inside is copied. A copy
    of a `fully_shard` model has the same shards; its `state_dict()` fits the model and, gathered, a plain one.

    In training with `FakeQuantize` each rank has ranges of its own, until the merged ones are loaded, at the end or
    before an evaluation: `model.load_state_dict(sync_observers(model).state_dict())`. What is so loaded on every rank
    is counted once for each at the next call, which changes averages and histograms: to resume a calibration, load each
    rank's own state, or the merged one on a single rank.

    Args:
        model: any module with observers in it, or an observer. All ranks must have the same ones: paths, kinds, options
            and `enabled`.
        group: a process group that this rank belongs to. Default: all ranks.

    Raises:
        ValueError: if the model has no observers, or if this rank is not of the group.
        RuntimeError: on every rank, if the ranks have different observers, or if the ranges of one have different
            shapes; on every other rank, if one died, or did not call within the time-out of the group.

    >>> from torch_linquant import MinMaxObserver
    >>> observed = nn.Sequential(MinMaxObserver("int8"), nn.Linear(2, 2))
    >>> _ = observed(torch.tensor([[-1.0, 2.0]]))
    >>> synced = sync_observers(observed)
    >>> synced[0].range(), synced[0] is observed[0], synced[1].weight is observed[1].weight
    ((tensor(-1.), tensor(2.)), False, True)
    """
    distributed = dist.is_available() and dist.is_initialized()
    if distributed and dist.get_rank(group) < 0:
        raise ValueError(f"sync_observers: group must hold this rank, but got one without rank {dist.get_rank()}.")
    if isinstance(model, DistributedDataParallel):
        model = model.module
    modules = model.named_modules() if isinstance(model, nn.Module) else ()
    observers = {path: m for path, m in modules if isinstance(m, Observer)}
    shapes = _agree(observers, group) if distributed else {}  # first of all, lest other ranks wait for this one
    if not observers:
        raise ValueError("sync_observers: model must have observers in it, but got none. Call prepare() first.")
    merged = {id(observer): copy.deepcopy(observer) for observer in observers.values()}
    if distributed:
        for path, state in _merge(observers, shapes, group).items():
            merged[id(observers[path])].load_state_dict(state)
    return _copy(model, merged)


def _agree(observers: dict[str, Observer], group: Any) -> dict[str, tuple[int, ...]]:
    """The shape of each observer's range, if all ranks have the same observers; else the same error on all of them."""
    ranks = dist.get_process_group_ranks(group)
    told: list[Any] = [None] * len(ranks)
    mine = {
        path: (repr(observer), None if observer.r_min.shape == observer._unsized else list(observer.r_min.shape))
        for path, observer in observers.items()
    }
    dist.all_gather_object(told, mine, group)

    def same(what: str, values: Iterable[Any]) -> Any:
        pairs = [(value, rank) for value, rank in zip(values, ranks, strict=True) if value is not None]
        for value, rank in pairs:
            if value != pairs[0][0]:
                raise RuntimeError(
                    f"sync_observers: {what} must be the same on all ranks, "
                    f"but got {pairs[0][0]} on rank {pairs[0][1]} and {value} on rank {rank}."
                )
        return pairs[0][0] if pairs else None

    shapes = {}
    for path in dict.fromkeys(itertools.chain.from_iterable(told)):
        texts, sizes = zip(*(rank.get(path, ("no observer", None)) for rank in told), strict=True)
        same(f"observer {path!r}", texts)
        shape = same(f"the shape of observer {path!r}", sizes)
        shapes[path] = observers[path]._unsized if shape is None else tuple(shape)
    return shapes


def _merge(
    observers: dict[str, Observer], shapes: dict[str, tuple[int, ...]], group: Any
) -> dict[str, dict[str, Tensor]]:
    """The merged state of each observer, on a device of the group."""
    # Known without asking; the devices of the observers may differ from rank to rank.
    devices = [part.partition(":")[0] for part in dist.get_backend_config(group).split(",")]
    device = torch.device("cpu" if "cpu" in devices else devices[0])
    states = {}
    for path, shape in shapes.items():  # in this order, which all ranks share
        observer = observers[path]
        state = dict(observer.named_buffers()) if observer.r_min.shape == shape else observer._fresh(shape, device)
        states[path] = {key: value.to(device, copy=True) for key, value in state.items()}
    averages = [state for path, state in states.items() if isinstance(observers[path], _AveragingObserver)]
    extremes = [state for path, state in states.items() if not isinstance(observers[path], _AveragingObserver)]
    if averages:
        _average(averages, group)
    if extremes:
        _all_reduce([state["r_min"] for state in extremes], dist.ReduceOp.MIN, group)
        _all_reduce([state["r_max"] for state in extremes], dist.ReduceOp.MAX, group)
    integers = [tensor for state in states.values() for tensor in state.values() if tensor.dtype == torch.int64]
    _all_reduce(integers, dist.ReduceOp.SUM, group)
    for path, state in states.items():
        if observers[path].on_nonfinite == "propagate":  # MIN and MAX may have lost a NaN
            for key in ("r_min", "r_max"):
                state[key].masked_fill_(state["nonfinite"] > 0, math.nan)
    return states


def _average(states: list[dict[str, Tensor]], group: Any) -> None:
    """Set r_min and r_max to the means over the ranks, weighted by `batches`: added up in the order of the ranks."""
    mine = torch.stack([_flat([s[key] for s in states]).double() for key in ("r_min", "r_max", "batches")])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group)
    total, count = torch.zeros_like(mine[:2]), torch.zeros_like(mine[2])
    for theirs in everyone:
        ends, batches = theirs[:2], theirs[2]
        total += torch.where(batches > 0, ends * batches, 0.0)
        count += batches
    r_min, r_max = torch.where(count > 0, total / count, mine[:2])
    _fill([s["r_min"] for s in states], r_min)
    _fill([s["r_max"] for s in states], r_max)


def _all_reduce(tensors: list[Tensor], op: Any, group: Any) -> None:
    """Reduce all tensors in place with one collective."""
    flat = _flat(tensors)
    dist.all_reduce(flat, op, group)
    _fill(tensors, flat)


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([t.flatten() for t in tensors])


def _fill(tensors: list[Tensor], flat: Tensor) -> None:
    """Undo `_flat`."""
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def _copy(model: nn.Module, replacements: dict[int, Any]) -> nn.Module:
    """A copy of the model with the same parameters and buffers, and replacements for modules, by id."""
    # deepcopy takes what is in its memo for the copy.
    memo = {id(t): t for t in itertools.chain(model.parameters(), model.buffers())} | replacements
    # The classes of fully_shard forbid deepcopy. Their hooks, which the copy keeps, set the parameters of the model
    # from shards to whole tensors and back: the copy must see that, and so has the same dictionaries.
    sharded: list[Any] = [m for m in model.modules() if hasattr(m, "_get_fsdp_state")]
    for module in sharded:
        memo[id(module)] = object.__new__(type(module))
        memo[id(module._get_fsdp_state())] = module._get_fsdp_state()
        memo |= {id(m._parameters): m._parameters for m in module.modules()}
    for module in sharded:
        memo[id(module)].__dict__.update(copy.deepcopy(module.__dict__, memo))
    return copy.deepcopy(model, memo)
