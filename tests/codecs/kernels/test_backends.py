"""Which backend is taken, and for which formats there are kernels."""

import sys
from collections.abc import Iterator

import pytest
import torch

from thinwire.codecs import (
    BF16,
    E3M0,
    Linear,
    MidRise,
    Quantise,
    Statistical,
    Stochastic,
    TopK,
    kernels,
)
from thinwire.codecs.kernels import VARIABLE, find_kernel, kernel_backend
from thinwire.errors import ConfigurationError
from thinwire.fragments.layout import Layout

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TWO_BITS = Quantise(bits=2)


class OwnMidRise(MidRise):
    """A user's grid may place its levels anywhere."""


@pytest.fixture(autouse=True)
def chosen_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(VARIABLE, raising=False)
    kernels._backend.cache_clear()
    yield
    kernels._backend.cache_clear()


@pytest.fixture
def without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    for name in [n for n in sys.modules if n.startswith("thinwire.codecs.kernels.numba")]:
        monkeypatch.delitem(sys.modules, name)
        monkeypatch.delattr(kernels, name.rpartition(".")[2], raising=False)


def test_numba_is_taken_on_cpus() -> None:
    numba = pytest.importorskip("numba")
    assert kernel_backend(CPU) == f"numba {numba.__version__}"
    assert find_kernel(TWO_BITS, CPU) is find_kernel(TWO_BITS, CPU) is not None


def test_other_formats_and_rows_of_other_lengths_have_no_kernel() -> None:
    assert find_kernel(TopK(values=BF16()), CPU) is None
    assert kernels._backend.cache_info().currsize == 0  # numba is not imported for it
    for bits in (2, 8):
        assert find_kernel(Quantise(bits=bits, rounding=Stochastic()), CPU) is None
        for grid in (Linear(), Statistical(), OwnMidRise()):
            assert find_kernel(Quantise(bits=bits, grid=grid), CPU) is None
    for codec in (E3M0(rounding=Stochastic()), TopK(k=2049)):
        assert find_kernel(codec, CPU) is None
    kernel_of = [piece.codec._kernel(CPU) for piece in TWO_BITS.bind(Layout.vector(4097)).pieces]
    assert kernel_of == [find_kernel(TWO_BITS, CPU), None]


def test_torch_can_be_forced(monkeypatch) -> None:
    monkeypatch.setenv(VARIABLE, "torch")
    assert find_kernel(TWO_BITS, CPU) is None
    assert kernel_backend(CPU) == kernel_backend(CUDA) == "torch"


@pytest.mark.usefixtures("without_numba")
def test_without_numba_torch_is_taken_unless_numba_is_forced(monkeypatch) -> None:
    assert find_kernel(TWO_BITS, CPU) is None
    assert kernel_backend(CPU) == "torch"
    monkeypatch.setenv(VARIABLE, "numba")
    kernels._backend.cache_clear()
    with pytest.raises(ConfigurationError, match=r"pip install 'thinwire\[fast\]'"):
        find_kernel(TWO_BITS, CPU)


@pytest.mark.parametrize(
    ("name", "device", "words"),
    [("nunba", CPU, "did you mean 'numba'"), ("numba", CUDA, "THINWIRE_KERNELS=numba on cuda")],
)
def test_a_backend_that_is_unknown_or_of_another_device_is_refused(
    name: str, device: torch.device, words: str, monkeypatch
) -> None:
    pytest.importorskip("numba")
    monkeypatch.setenv(VARIABLE, name)
    with pytest.raises(ConfigurationError, match=words):
        kernel_backend(device)


def test_a_cache_that_cannot_be_written_is_done_without(monkeypatch) -> None:
    rows = pytest.importorskip("thinwire.codecs.kernels.numba_rows")

    def no_folder(**options):
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return lambda function: (function, options)

    monkeypatch.setattr(rows, "njit", no_folder)
    function, options = rows.compiled(len)
    assert function is len
    assert options["nogil"]
    assert "fastmath" not in options
