"""A pretended GPU: finds tensors of two devices that meet, on a machine that has only a CPU.

    with Pretended().watch():
        x = torch.ones(3, device="cuda")  # lies in the CPU's memory, but counts as the GPU's
        x + torch.ones(3)                 # raises MixedDevices, as on a GPU

All values are real, so that code may read them and branch on them. Which tensors lie on the
pretended GPU is noted by their storage, so a view lies where its base does.

    Functions   what the code asks of torch: on which device to make a tensor, where one lies
    Operations  what torch computes, the backward pass included: here tensors must not mix

The rules are CUDA's: a number (0 dimensions) on the CPU may enter an elementwise operation, indices
may be on the CPU, and `copy_` copies between devices. A tensor of the GPU cannot become a numpy
array, and a generator of the CPU draws no numbers on the GPU.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GPU = torch.device("cuda", 0)
aten = torch.ops.aten

# Operations that read from another device, or move to one: the first tensor's device stays.
COPIES = {aten.copy_.default, aten._foreach_copy_.default}
# Of these, only the first tensor and the values need one device; the indices may be on the CPU.
INDEXED = {aten.index.Tensor: 1, aten.index_put_.default: 2, aten.index_put.default: 2}
INDEXED |= {aten._index_put_impl_.default: 2}


class MixedDevices(RuntimeError):
    """What CUDA would refuse, or what would copy to the CPU without being asked to."""


class Pretended:
    """Notes which tensors lie on the pretended GPU; one object for all threads of a test.

    Attributes:
        faults: all that was found, also where the code caught the error.
        operations: how many operations ran there.
    """

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.operations = 0
        self._storages: dict[int, StorageWeakRef] = {}

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Watch what this thread computes."""
        with Functions(self), Operations(self):
            yield

    def has(self, x: Any) -> bool:
        return isinstance(x, Tensor) and x.untyped_storage()._cdata in self._storages

    def put(self, x: Tensor, here: bool = True) -> Tensor:
        """Note on which device a new tensor lies."""
        storage = x.untyped_storage()
        if here:  # the reference keeps the storage's address from being used again
            self._storages[storage._cdata] = StorageWeakRef(storage)
        else:
            self._storages.pop(storage._cdata, None)
        return x

    def refuse(self, what: str) -> None:
        self.faults.append(what)
        raise MixedDevices(what)


class Functions(TorchFunctionMode):
    """Answers what code asks of torch as a machine with a GPU would."""

    def __init__(self, device: Pretended) -> None:
        super().__init__()
        self.gpu = device

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, gpu = dict(kwargs or {}), self.gpu
        mine = bool(args) and gpu.has(args[0])
        asked = getattr(getattr(func, "__self__", None), "__name__", "")  # of a property
        if asked in ("device", "is_cuda", "is_cpu"):
            return {"device": GPU, "is_cuda": True, "is_cpu": False}[asked] if mine else func(*args)
        if func in (Tensor.numpy, Tensor.__array__) and mine:
            gpu.refuse("a tensor of the GPU is read as a numpy array; call .cpu() first")
        if func is Tensor.pin_memory:
            return args[0]
        if func in (Tensor.to, Tensor.cpu, Tensor.cuda):
            return self._moved(func, *args, **kwargs)
        return self._made(func, mine, args, kwargs)

    def _moved(self, func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """`x.to(...)`, `x.cpu()` or `x.cuda()`."""
        here: bool | None = {Tensor.cpu: False, Tensor.cuda: True}.get(func)
        others: list[Any] = []
        copied = kwargs.pop("copy", False)
        kwargs.pop("non_blocking", None)
        layout = {k: kwargs.pop(k) for k in ("memory_format",) if k in kwargs}
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor):
                here = self.gpu.has(value)
                others.append(value.dtype)
            elif isinstance(value, torch.dtype):
                others.append(value)
            elif isinstance(value, (torch.device, str)) or type(value) is int:
                here = torch.device(value).type == "cuda"
        out = Tensor.to(x, *others, **layout) if others or layout else x
        if copied or (here is not None and here != self.gpu.has(x)):
            out = self.gpu.put(out.clone(), self.gpu.has(x) if here is None else here)
        return out

    def _made(self, func: Callable[..., Any], mine: bool, args: Any, kwargs: Any) -> Any:
        """Any other function; some make tensors on a device that is named."""
        device = kwargs.get("device")
        here = mine if device is None else torch.device(device).type == "cuda"
        draws = kwargs.get("generator")
        if here and isinstance(draws, torch.Generator) and draws.device.type == "cpu":
            self.gpu.refuse(f"{name_of(func)} draws on the GPU with a generator of the CPU")
        if device is None or torch.device(device).type not in ("cpu", "cuda"):
            return func(*args, **kwargs)
        out = func(*args, **kwargs | {"device": "cpu"})
        return self.gpu.put(out, here) if isinstance(out, Tensor) else out


class Operations(TorchDispatchMode):
    """Checks every operation, and notes where its results lie."""

    def __init__(self, device: Pretended) -> None:
        super().__init__()
        self.gpu = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, gpu = kwargs or {}, self.gpu
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        here = bool(given) and gpu.has(given[0]) if func in COPIES else any(map(gpu.has, given))
        if here and func not in COPIES:
            for x in self._bound(func, args, given):
                if not gpu.has(x):
                    gpu.refuse(f"{name_of(func)} gets tensors of the GPU and of the CPU")
        gpu.operations += here
        before = {x.untyped_storage()._cdata for x in given}
        out = func(*args, **kwargs)
        for x in tree_leaves(out) if here else ():
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in before:
                gpu.put(x)
        return out

    def _bound(self, func: Any, args: tuple[Any, ...], given: list[Tensor]) -> list[Tensor]:
        """The tensors of an operation that must all lie on one device."""
        if func in INDEXED:
            some = [args[0], *args[2 : INDEXED[func] + 1]]
            if not self.gpu.has(args[0]):  # then no index may be on the GPU
                return [args[0]]
            return [x for x in some if x is args[0] or x.dim()]
        if torch.Tag.pointwise in func.tags:
            result = given[0] if func._schema.is_mutable else None
            return [x for x in given if x.dim() or x is result]
        return given


def name_of(func: Any) -> str:
    return str(getattr(func, "__name__", func))
