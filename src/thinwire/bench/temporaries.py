"""How much memory a computation takes beside what it is given and what it returns."""

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

T = TypeVar("T")


def peak_temporary_nbytes(work: Callable[[], T]) -> tuple[T, int]:
    """What `work` returns, and the most bytes of tensors that lived at once while it ran.

    Counted is every tensor that torch makes meanwhile, less what is returned; not what a kernel
    uses inside. The same on any machine.

    >>> import torch
    >>> x = torch.zeros(10)
    >>> peak_temporary_nbytes(lambda: (x + 1) * 2)[1]
    40
    """
    with _Living() as living:
        result = work()
    return result, living.peak_nbytes - living.nbytes_of(_tensors(result))


class _Living(TorchDispatchMode):
    """Adds up the storages made by every operation, until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_nbytes = self._nbytes = 0
        self._made: dict[int, int] = {}

    def nbytes_of(self, tensors: list[Tensor]) -> int:
        """Bytes of `tensors`, as far as they were made here."""
        return sum(self._made[key] for key in {id(tensor.untyped_storage()) for tensor in tensors})

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
        if key not in self._made:
            self._made[key] = nbytes
            self._nbytes += nbytes
            weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self._nbytes -= self._made.pop(key)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
