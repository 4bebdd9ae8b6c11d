"""A fake GPU that tells which tensors would be on a GPU, what would wait for it, and finds races.

Under `FakeDevice` the tensors of a model moved by `to_device` report the device `cuda:0`, and so do
tensors computed from them or made there by name. All stay in the host's memory. Reads by the host
(`.item()`, `.cpu()`, `bool()`, `nonzero()`) are noted as waits with their place in the package;
operations that a GPU would refuse (operands on two devices, `.numpy()`) raise. So does any use of a
tensor, by a stream or the host, before the stream that writes it is done, by vector clocks: streams
and events of `torch.cuda` are those of this file. Threads that a transport starts are not seen,
except for the events that they wait for.
"""

import gc
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, final
from unittest.mock import patch
from weakref import finalize

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

import thinwire
from thinwire import storage
from thinwire.codecs import kernels

DEVICE = torch.device("cuda", 0)
_HOST = torch.device("cpu")
_ROOT = str(Path(thinwire.__file__).parent) + "/"

# Bytes of storages on the device, for all tests, because the package keeps constants by device.
_HELD: dict[int, int] = {}

# Names of functions from Python whose result or its size depends on the numbers.
_READS = {
    *("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "__contains__"),
    *("equal", "allclose", "nonzero", "argwhere", "unique", "masked_select", "bincount"),
    *("is_nonzero", "_local_scalar_dense"),
}
# Functions that accept tensors on two devices, and functions that read no numbers.
_OF_TWO = {
    *("copy_", "__setitem__", "__set__", "view_as"),
    "_has_compatible_shallow_copy_type",
}
_ASKS = {
    *("dim", "size", "stride", "numel", "data_ptr", "untyped_storage", "storage_offset", "__len__"),
    *("is_contiguous", "element_size", "requires_grad_", "detach", "view", "view_as", "reshape"),
    *("is_floating_point", "split", "unbind", "chunk", "narrow", "__get__"),
    *("__set__", "__hash__", "expand", "as_strided", "flatten", "T", "unsqueeze", "squeeze"),
}


class Stream:
    """Work in order; `clock` says how much of each stream's work precedes the next of this one.

    Args:
        device: as for streams of `torch.cuda`.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        del device
        self.clock = Counter[Stream]()

    def wait_stream(self, other: "Stream") -> None:
        """Order later work after that of `other` so far."""
        self.clock |= other.clock

    def wait_event(self, event: "Event") -> None:
        """Order later work after `event`."""
        self.clock |= event.clock

    def record_event(self) -> "Event":
        """The end of the work so far."""
        return Event(self.clock)

    def synchronize(self) -> None:
        """Make the host wait for the work so far."""
        self.record_event().synchronize()


class Event:
    """A moment of a stream; a wait counts only for work since the mode was last entered."""

    def __init__(self, clock: Counter[Stream]) -> None:
        self.clock, self._mode = Counter(clock), _MODES.get(threading.get_ident())
        self._entered = self._mode and self._mode.entered

    def synchronize(self) -> None:
        """Make the host wait for it."""
        _HOST_STREAM.clock |= self.clock
        mode = _MODES.get(threading.get_ident())
        if mode is not None and (mode, mode.entered) == (self._mode, self._entered):
            mode.waits[_place()] += 1


_HOST_STREAM, _DEFAULT = Stream(), Stream()
_MODES: dict[int, "FakeDevice"] = {}
_current = threading.local()


def _current_stream(device: torch.device | None = None) -> Stream:
    assert device is None or device.type == DEVICE.type, f"no stream of {device}"
    return getattr(_current, "stream", _DEFAULT)


@contextmanager
def _on_stream(stream: Stream) -> Iterator[None]:
    before, _current.stream = _current_stream(), stream
    try:
        yield
    finally:
        _current.stream = before


class _Memory:
    """The uses of a storage's numbers, and their times by the clock of each stream."""

    def __init__(self, made_by: Stream) -> None:
        self.made_by, self.recorded = made_by, set[Stream]()
        self.is_pinned = False
        self.written = Counter[Stream]()
        self.read = Counter[Stream]()


_MEMORY: dict[int, _Memory] = {}
_FREED_EARLY: list[str] = []


def _memory(tensor: Tensor) -> _Memory:
    stored = tensor.untyped_storage()
    if stored._cdata not in _MEMORY:
        _MEMORY[stored._cdata] = _Memory(_current_stream())
        finalize(stored, _forget, stored._cdata)
    return _MEMORY[stored._cdata]


def _forget(key: int) -> None:
    memory, is_held = _MEMORY.pop(key), key in _HELD
    _HELD.pop(key, None)
    # torch reuses memory in the order of the stream that made it, or of those that it was told of.
    known = memory.made_by.clock | _HOST_STREAM.clock
    for stream, tick in (memory.read | memory.written).items():
        if is_held and stream not in memory.recorded | {memory.made_by} and known[stream] < tick:
            _FREED_EARLY.append(_place())


def _use(stream: Stream, tensor: Tensor, *, writes: bool) -> None:
    """Note that the next work of `stream` uses `tensor`.

    Raises:
        AssertionError: work that the stream does not wait for may still use the tensor.
    """
    memory = _memory(tensor)
    others = memory.written | memory.read if writes else memory.written
    late = [other for other, tick in others.items() if stream.clock[other] < tick]
    if late:
        who = "the host" if stream is _HOST_STREAM else "a stream"
        raise AssertionError(f"{who} uses what another stream is at work on, at {_place()}")
    used = memory.written if writes else memory.read
    used[stream] = stream.clock[stream]


@final
class FakeDevice(TorchFunctionMode):
    """Notes waits in `waits`, by place."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.entered = 0
        self._patches = list[ExitStack]()

    def __enter__(self) -> "FakeDevice":
        """Stand in for `torch.cuda` too, where there is none."""
        stack = ExitStack()
        for name, value in (
            ("Stream", Stream),
            ("stream", _on_stream),
            ("current_stream", _current_stream),
        ):
            stack.enter_context(patch.object(torch.cuda, name, value))
        # torch would refuse a fake stream.
        record = lambda tensor, stream: _memory(tensor).recorded.add(stream)  # noqa: E731
        stack.enter_context(patch.object(Tensor, "record_stream", record))
        # No compiled kernel can run on this device.
        stack.enter_context(patch.object(kernels, "_BY_DEVICE", {"cpu": "numba"}))
        for cached in (storage._copying_stream, kernels._backend):
            cached.cache_clear()
            stack.callback(cached.cache_clear)
        before = _MODES.get(threading.get_ident())
        _MODES[threading.get_ident()] = self
        stack.callback(_MODES.__setitem__, threading.get_ident(), before)
        self._patches.append(stack)
        self.entered += 1
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        """Check that no memory was reused before its streams were done with it."""
        super().__exit__(*error)
        self._patches.pop().close()
        early = list(_FREED_EARLY)
        _FREED_EARLY.clear()
        if error[0] is None:
            assert not early, f"given away while another stream is at work on it: {early}"

    def to_device(self, module: nn.Module) -> nn.Module:
        """Put the parameters and buffers of `module` on the device, and later gradients."""
        self.hold(*module.parameters(), *module.buffers())
        self.hold(*(p.grad for p in module.parameters() if p.grad is not None))
        return self.hold_gradients(module)

    def hold_gradients(self, module: nn.Module) -> nn.Module:
        """Put later gradients on the devices of their parameters, as autograd does."""

        def hold(parameter: Tensor) -> None:
            if self._is_held(parameter):
                self._hold(parameter.grad)

        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(hold)
        return module

    def hold(self, *tensors: Tensor) -> None:
        """Put these tensors on the device."""
        for tensor in tensors:
            self._hold(tensor)

    @staticmethod
    def held_nbytes() -> int:
        """Bytes on the device now, of all tests."""
        gc.collect()
        return sum(_HELD.values())

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        of = getattr(func, "__self__", None)
        if name == "__get__" and isinstance(of, property | type(Tensor.device)):
            return self._attribute(of, func, args, kwargs)
        if name == "_parse_to":  # of nn.Module.to(), which then calls the tensors'
            return func(*args, **kwargs)
        target, is_pinned = _device_in(args, kwargs), kwargs.pop("pin_memory", False)
        args, kwargs = tree_map(_on_host, args), tree_map(_on_host, kwargs)
        if name in ("cpu", "to"):
            return self._moved(func, args, kwargs, _HOST if name == "cpu" else target)
        if name == "_foreach_copy_" and len({self._is_held(t) for t in _tensors(args)}) > 1:
            for pair in zip(*args[:2], strict=True):  # as torch does, if they are on two devices
                self.__torch_function__(Tensor.copy_, types, pair)
            return None
        is_here = self._check_operands(name, args, kwargs)
        self._note_reading(name, args, is_here=is_here)
        # x[:n] = y copies as copy_() does.
        into = name in ("copy_", "__setitem__") and isinstance(args[-1], Tensor)
        if into and self._is_held(args[0]) != self._is_held(args[-1]):
            result = func(*args, **kwargs)
            self._copied(args[-1], args[0], **kwargs)
            return result
        goes_here = is_here if target is None else target.type == DEVICE.type
        stream = self._working(goes_here)
        if name not in _ASKS:
            is_changed = name.endswith("_") and not name.endswith("__")
            is_changed |= name == "__setitem__" or name.startswith("__i")
            changed = [*_tensors(args[:1] * is_changed), *_tensors(kwargs.get("out"))]
            for tensor in _tensors((args, kwargs)):
                _use(stream, tensor, writes=any(tensor is each for each in changed))
        result = func(*args, **kwargs)
        if goes_here:
            self._hold_all(result, args)
        for leaf in _tensors(result):
            _memory(leaf).is_pinned |= is_pinned
            if name not in _ASKS:
                _use(stream, leaf, writes=False)
                _memory(leaf).written[stream] = stream.clock[stream]
        return result

    def _working(self, is_here: bool) -> Stream:
        """The stream of the next work, which the host has just requested or does itself."""
        _HOST_STREAM.clock[_HOST_STREAM] += 1
        if not is_here:
            return _HOST_STREAM
        stream = _current_stream()
        stream.clock |= _HOST_STREAM.clock
        stream.clock[stream] += 1
        return stream

    def _is_held(self, tensor: Any) -> bool:
        return isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata in _HELD

    def _hold(self, tensor: Tensor) -> None:
        _memory(tensor)
        stored = tensor.untyped_storage()
        _HELD.setdefault(stored._cdata, stored.nbytes())

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
            if attribute in ("is_cpu", "is_cuda"):
                return attribute == "is_cuda"
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
        if result is tensor and is_here == was_here:
            return result
        result = result.clone() if result is tensor else result
        if is_here:
            self._hold(result)
        if is_here != was_here:
            self._copied(tensor, result, **kwargs)
        else:
            stream = self._working(is_here)
            _use(stream, tensor, writes=False)
            _use(stream, result, writes=True)
        return result

    def _copied(self, source: Tensor, to: Tensor, *, non_blocking: bool = False, **_: Any) -> None:
        """Note a copy from or to the host, which is asynchronous only with pinned memory."""
        stream, to_host = self._working(is_here=True), self._is_held(source)
        if non_blocking and _memory(to if to_host else source).is_pinned:
            _use(stream, source, writes=False)
            _use(stream, to, writes=True)
            return
        _use(stream if to_host else _HOST_STREAM, source, writes=False)
        if to_host:
            self.waits[_place()] += 1
            _HOST_STREAM.clock |= stream.clock
        _use(_HOST_STREAM if to_host else stream, to, writes=True)

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
            _HOST_STREAM.clock |= _current_stream().clock

    def _check_operands(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        tensors = _tensors((args, kwargs))
        here = [tensor for tensor in tensors if self._is_held(tensor)]
        away = [t for t in tensors if not self._is_held(t) and t.ndim and t.numel()]
        if here and away and name not in _OF_TWO:
            raise AssertionError(f"{name}() of tensors on two devices at {_place()}")
        return bool(here)


class RealDevice(AbstractContextManager["RealDevice"]):
    """The GPU of this machine, for the same tests."""

    name = "cuda"

    def __exit__(self, *error: object) -> None:
        """Leave everything there."""

    def to_device(self, module: nn.Module) -> nn.Module:
        """Move `module` there."""
        return module.to(self.name)

    def hold(self, *tensors: Tensor) -> None:
        """Move these tensors there."""
        for tensor in tensors:
            tensor.data = tensor.data.to(self.name)

    def hold_gradients(self, module: nn.Module) -> nn.Module:
        """Do nothing: autograd puts gradients there."""
        return module


ON_DEVICES = pytest.mark.parametrize(
    "device",
    [
        pytest.param(FakeDevice, id="fake"),
        pytest.param(
            RealDevice,
            id="gpu",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
            ],
        ),
    ],
)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _is_device(value: Any) -> bool:
    return isinstance(value, torch.device) or (isinstance(value, str) and value in ("cpu", "cuda"))


def _device_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    named = kwargs.get("device")
    found: Iterable[Any] = [named] if named is not None else filter(_is_device, args)
    return next((torch.device(value) for value in found), None)


def _on_host(value: Any) -> Any:
    return _HOST if isinstance(value, torch.device) and value.type == DEVICE.type else value


def _place() -> str:
    """The innermost line of the package on the stack."""
    frame = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(_ROOT):
        frame = frame.f_back
    if frame is None:
        return "elsewhere"
    file = frame.f_code.co_filename.removeprefix(_ROOT)
    return f"{file}:{frame.f_code.co_qualname}"
