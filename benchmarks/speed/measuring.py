"""Times and memory on a machine that others use too."""

import os
import time
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

T = TypeVar("T")


class Table(NamedTuple):
    """Text in rows and columns."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


class Report(NamedTuple):
    """The result of a benchmark as JSON-able data, with all repetitions, and as tables."""

    data: dict[str, Any]
    tables: list[Table]


class Spent(NamedTuple):
    """CPU seconds of all threads, which other load hardly affects, and wall-clock seconds."""

    cpu_s: float
    wall_s: float


def spent(work: Callable[[], object]) -> Spent:
    """The time that one call takes.

    >>> spent(lambda: None).wall_s >= 0
    True
    """
    started_s, cpu_s = time.perf_counter(), time.process_time()
    work()
    return Spent(time.process_time() - cpu_s, time.perf_counter() - started_s)


def seconds(work: Callable[[], object]) -> float:
    """Wall-clock seconds of one call."""
    return spent(work).wall_s


@contextmanager
def threads(count: int) -> Generator[None]:
    """Have torch compute on `count` threads.

    >>> with threads(1):
    ...     torch.get_num_threads()
    1
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def one_core() -> Generator[None]:
    """Compute on one core, with one thread; if a process cannot choose, on any core.

    Threads that start inside stay on that core.
    """
    chooses = hasattr(os, "sched_setaffinity")
    before = os.sched_getaffinity(0) if chooses else set[int]()
    with threads(1):
        try:
            if chooses:
                os.sched_setaffinity(0, {min(before)})
            yield
        finally:
            if chooses:
                os.sched_setaffinity(0, before)


def peak_temporary_nbytes(work: Callable[[], T]) -> tuple[T, int]:
    """The result of `work`, and the most bytes of tensors that lived at once while it ran.

    Counts every tensor that torch makes meanwhile, except the result, but no memory inside of
    kernels. The same on any machine.

    >>> x = torch.zeros(10)
    >>> peak_temporary_nbytes(lambda: (x + 1) * 2)[1]
    40
    """
    with _Living() as living:
        result = work()
    returned = {id(tensor.untyped_storage()) for tensor in _tensors(result)}
    return result, living.peak_nbytes - sum(living.made[key] for key in returned)


class _Living(TorchDispatchMode):
    """Adds up the storages made by every operation, until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_nbytes = self._nbytes = 0
        self.made: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        for tensor in _tensors((args, kwargs)):
            self._register(tensor, counted=0)
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self._register(tensor, counted=1)
        self.peak_nbytes = max(self.peak_nbytes, self._nbytes)
        return result

    def _register(self, tensor: Tensor, *, counted: int) -> None:
        storage = tensor.untyped_storage()
        key, nbytes = id(storage), counted * storage.nbytes()
        if key not in self.made:
            self.made[key] = nbytes
            self._nbytes += nbytes
            weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self._nbytes -= self.made.pop(key)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
