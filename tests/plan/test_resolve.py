import pytest
import torch

from thinwire.plan.llama_sizes import LLAMA_SIZES
from thinwire.plan.resolve import resolve
from thinwire.plan.shape import Shape


@pytest.mark.parametrize("name", LLAMA_SIZES)
@pytest.mark.parametrize("vocabulary", [None, 97])
def test_a_built_in_size_has_the_parameters_of_its_model(name: str, vocabulary: int | None) -> None:
    """Written down, and as transformers makes them: names, shapes, layers, roles and order."""
    from transformers import AutoModelForCausalLM

    size = LLAMA_SIZES[name]
    config = size.configuration(vocabulary or size.counted_with, 1)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert resolve(name, vocabulary=vocabulary) == Shape.of_model(model, name=name)
