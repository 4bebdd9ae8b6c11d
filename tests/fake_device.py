"""A device that is none: tells which tensors would lie on a GPU, and what would wait for it there.

Under `FakeDevice` the tensors of a model that was moved with `to_device` say that they lie on
`xpu:0`, and so does all that is computed from them or made there by name. All of it stays in the
host's memory. What the host reads of them (`.item()`, `.cpu()`, `bool()`, `nonzero()`) is noted as
a wait with its place in the package; what a GPU would refuse (operands on two devices, `.numpy()`)
raises.
"""

import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, final
from weakref import finalize

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

import thinwire

DEVICE = torch.device("xpu", 0)
_HOST = torch.device("cpu")
_ROOT = str(Path(thinwire.__file__).parent) + "/"

# Bytes of the storages that lie there: of all tests, because the package keeps constants by device.
_HELD: dict[int, int] = {}

# By what they are called from Python. The size of what they return depends on the numbers.
_READS = {
    *("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "__contains__"),
    *("equal", "allclose", "nonzero", "argwhere", "unique", "masked_select", "bincount"),
    *("is_nonzero", "_local_scalar_dense"),
}


@final
class FakeDevice(TorchFunctionMode):
    """Notes waits in `waits`, by place."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()

    def to_device(self, module: nn.Module) -> nn.Module:
        """Have the parameters of `module` lie there, with their gradients."""
        for parameter in module.parameters():
            self._hold(parameter)
            if parameter.grad is not None:
                self._hold(parameter.grad)
        return module

    def hold(self, *tensors: Tensor) -> None:
        """Have these lie there."""
        for tensor in tensors:
            self._hold(tensor)

    @staticmethod
    def held_nbytes() -> int:
        """Bytes that lie there now, of all tests."""
        gc.collect()
        return sum(_HELD.values())

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        of = getattr(func, "__self__", None)
        if name == "__get__" and isinstance(of, property | type(Tensor.device)):
            return self._attribute(of, func, args, kwargs)
        target = _device_in(args, kwargs)
        args, kwargs = tree_map(_on_host, args), tree_map(_on_host, kwargs)
        if name in ("cpu", "to", "pin_memory"):
            return self._moved(func, args, kwargs, _HOST if name == "cpu" else target)
        is_here = self._check_operands(name, args, kwargs)
        self._note_reading(name, args, is_here=is_here)
        # x[:n] = y copies as copy_() does.
        into = name in ("copy_", "__setitem__") and isinstance(args[-1], Tensor)
        if into and self._is_held(args[0]) != self._is_held(args[-1]):
            self._note_copy(to_host=not self._is_held(args[0]), **kwargs)
        result = func(*args, **kwargs)
        goes_here = is_here if target is None else target.type == DEVICE.type
        if goes_here:
            self._hold_all(result, args)
        return result

    def _is_held(self, tensor: Any) -> bool:
        return isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata in _HELD

    def _hold(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in _HELD:
            _HELD[storage._cdata] = storage.nbytes()
            finalize(storage, _HELD.pop, storage._cdata, None)

    def _hold_all(self, result: Any, args: Any) -> None:
        given = {id(leaf) for leaf in _tensors(args)}
        for leaf in _tensors(result):
            if id(leaf) not in given:
                self._hold(leaf)

    def _attribute(
        self, of: Any, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        (tensor, *_) = args
        attribute = of.__name__ if hasattr(of, "__name__") else ""
        if self._is_held(tensor):
            if attribute == "device":
                return DEVICE
            if attribute in ("is_cpu", "is_xpu"):
                return attribute == "is_xpu"
        return func(*args, **kwargs)

    def _moved(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: torch.device | None,
    ) -> Any:
        tensor, result = args[0], func(*args, **kwargs)
        other = next((t for t in args[1:] if isinstance(t, Tensor)), None)
        if other is not None:
            target = DEVICE if self._is_held(other) else _HOST
        was_here = self._is_held(tensor)
        is_here = was_here if target is None else target.type == DEVICE.type
        if is_here != was_here:
            self._note_copy(to_host=was_here, **kwargs)
            result = result.clone() if result is tensor else result
        if is_here:
            self._hold(result)
        return result

    def _note_copy(self, *, to_host: bool, non_blocking: bool = False, **_: Any) -> None:
        if to_host and not non_blocking:
            self.waits[_place()] += 1

    def _note_reading(self, name: str, args: tuple[Any, ...], *, is_here: bool) -> None:
        if not is_here:
            return
        if name in ("numpy", "__array__"):
            raise AssertionError(f"{name}() of a tensor on the device at {_place()}")
        by_mask = name in ("__getitem__", "__setitem__", "index", "index_put_") and any(
            leaf.dtype in (torch.bool, torch.uint8) and leaf.ndim for leaf in _tensors(args[1])
        )
        by_one = name == "where" and len(args) == 1
        counted = name == "repeat_interleave" and isinstance(args[1], Tensor)
        if name in _READS or by_mask or by_one or counted:
            self.waits[_place()] += 1

    def _check_operands(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        tensors = _tensors((args, kwargs))
        here = [tensor for tensor in tensors if self._is_held(tensor)]
        away = [t for t in tensors if not self._is_held(t) and t.ndim and t.numel()]
        if here and away and name not in ("copy_", "__setitem__", "__set__", "_foreach_copy_"):
            raise AssertionError(f"{name}() of tensors on two devices at {_place()}")
        return bool(here)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _is_device(value: Any) -> bool:
    return isinstance(value, torch.device) or (isinstance(value, str) and value in ("cpu", "xpu"))


def _device_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    named = kwargs.get("device")
    found: Iterable[Any] = [named] if named is not None else filter(_is_device, args)
    return next((torch.device(value) for value in found), None)


def _on_host(value: Any) -> Any:
    return _HOST if isinstance(value, torch.device) and value.type == DEVICE.type else value


def _place() -> str:
    """The innermost line of the package."""
    frame = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(_ROOT):
        frame = frame.f_back
    if frame is None:
        return "elsewhere"
    file = frame.f_code.co_filename.removeprefix(_ROOT)
    return f"{file}:{frame.f_code.co_qualname}"
