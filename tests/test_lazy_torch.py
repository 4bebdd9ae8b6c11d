"""thinwire.lazy_torch: before and after torch is loaded, in processes that have not loaded it."""

import subprocess
import sys

import torch

from thinwire.lazy_torch import FP32_MAX, no_grad

LAZY = "import sys\nfrom thinwire import lazy_torch\nfrom thinwire.fragments import layers\n"


def run(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_real_torch_takes_the_place_of_what_stood_for_it() -> None:
    run(
        f"{LAZY}assert 'torch' not in sys.modules and type(layers.nn).__name__ == '_Lazy'\n"
        "stood = lazy_torch.torch\n"
        "assert stood.ones(2).sum() == 2\n"
        "import torch\n"
        "assert lazy_torch.torch is torch and layers.nn is torch.nn and layers.Part\n"
        "assert lazy_torch.F is torch.nn.functional and lazy_torch.dist is torch.distributed\n"
        "assert stood.float32 is torch.float32\n"
    )


def test_an_object_is_known_before_torch_was_used_here() -> None:
    stood = f"{LAZY}Tensor = lazy_torch.Tensor\n"
    run(f"{stood}assert not isinstance(3, Tensor)\nassert 'torch' in sys.modules")
    run(f"{stood}import torch\nassert isinstance(torch.ones(1), Tensor)")


def test_what_typing_asks_of_a_name_loads_nothing() -> None:
    run(
        f"{LAZY}from collections.abc import Callable, Sequence\n"
        "Callable[[Sequence[lazy_torch.Tensor]], lazy_torch.Tensor]\n"
        "assert not hasattr(lazy_torch.nn, '__typing_subst__')\n"
        "assert 'torch' not in sys.modules"
    )


def test_with_torch_loaded_nothing_stands_for_it() -> None:
    run("import torch, thinwire.codecs.base as b\nassert b.torch is torch")
    assert torch.finfo(torch.float32).max == FP32_MAX


def test_no_grad_is_that_of_torch() -> None:
    @no_grad
    def twice(x: torch.Tensor, *, plus: float = 0.0) -> torch.Tensor:
        """Doc."""
        assert not torch.is_grad_enabled()
        return 2 * x + plus

    x = torch.ones(3, requires_grad=True)
    assert not twice(x, plus=1.0).requires_grad
    assert torch.is_grad_enabled()
    assert twice.__doc__ == "Doc."
