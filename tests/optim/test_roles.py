"""Roles come from the module tree: real architectures at toy size, and traps for name matching."""

from collections import Counter

import pytest
import torch
from torch import nn

from language_models import gpt2, gpt_oss, llama, mixtral, qwen3
from thinwire.errors import ConfigurationError
from thinwire.optim import Role, parameter_roles
from thinwire.optim.roles import LAYOUTS, parameter_layouts


def of_role(model: nn.Module, role: Role) -> set[str]:
    return {name for name, found in parameter_roles(model).items() if found is role}


class TestTransformers:
    @pytest.mark.parametrize(
        ("build", "numbers"),
        [
            (lambda: llama(tie_word_embeddings=False), (1, 35, 11, 1)),
            (lambda: llama(tie_word_embeddings=True), (1, 35, 11, 0)),  # no head of its own
            (qwen3, (1, 35, 21, 0)),  # q_norm and k_norm come on top of Llama's norms
            (gpt2, (2, 20, 42, 0)),
            # Per layer: q, k, v, o, the router, and two stacks of experts.
            (mixtral, (1, 35, 11, 1)),
        ],
    )
    def test_counts(self, build, numbers):
        model = build()
        found, roles = Counter(parameter_roles(model).values()), "EMBEDDING MATRIX VECTOR HEAD"
        assert tuple(found[Role[name]] for name in roles.split()) == numbers
        assert of_role(model, Role.HEAD) == ({"lm_head.weight"} if numbers[3] else set())
        assert list(parameter_roles(model)) == [name for name, _ in model.named_parameters()]

    def test_layouts(self):
        model = gpt2()
        layouts = parameter_layouts(model)
        assert {layouts[n] for n in of_role(model, Role.MATRIX)} == {"in_out"}
        name = "transformer.h.0.attn.c_attn.weight"
        assert LAYOUTS[layouts[name]].unfold(model.get_parameter(name)).shape == (24, 8)
        stacks = [(n, p) for n, p in mixtral().named_parameters() if p.ndim == 3]
        assert len(stacks) == 10
        assert {parameter_layouts(mixtral())[n] for n, _ in stacks} == {"out_in"}

    def test_experts_stored_in_out_have_biases_that_are_vectors(self):
        model = gpt_oss()
        layouts, roles = parameter_layouts(model), parameter_roles(model)
        of_layer = "model.layers.0.{}".format
        name = of_layer("mlp.experts.gate_up_proj")
        assert layouts[name] == "in_out"
        assert layouts[of_layer("self_attn.q_proj.weight")] == "out_in"
        assert LAYOUTS[layouts[name]].unfold(model.get_parameter(name)).shape == (3, 24, 8)
        assert roles[of_layer("mlp.experts.down_proj_bias")] is Role.VECTOR
        assert roles[of_layer("mlp.experts.down_proj")] is Role.MATRIX
        assert roles[of_layer("mlp.router.weight")] is Role.MATRIX

    def test_a_wrapper_does_not_hide_the_head(self):
        wrapped = nn.ModuleDict(
            {"model": llama(tie_word_embeddings=False), "probe": nn.Linear(8, 3)}
        )
        assert of_role(wrapped, Role.HEAD) == {"model.lm_head.weight"}


def tied_list() -> nn.Module:
    table, head = nn.Embedding(32, 8), nn.Linear(8, 32, bias=False)
    head.weight = table.weight
    return nn.ModuleList([head, table])


def misnamed() -> nn.Module:
    hidden = {name: nn.Linear(4, 4) for name in ("overhead", "embed_output", "lm_head")}
    return nn.ModuleDict({"w": nn.Embedding(9, 4), **hidden, "embedding": nn.Linear(4, 9)})


class TestPlain:
    @pytest.mark.parametrize(
        ("model", "roles"),
        [
            # Tied, and registered first.
            (tied_list, "E"),
            # An embedding after the head does not hide it.
            (
                lambda: nn.ModuleList([nn.Embedding(9, 4), nn.Linear(4, 9), nn.Embedding(7, 4)]),
                "EHVE",
            ),
            # The last layer has another shape.
            (lambda: nn.ModuleList([nn.Embedding(9, 4), nn.Linear(4, 3)]), "EMV"),
            (lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), "MVMV"),
            (lambda: nn.EmbeddingBag(9, 4), "E"),
            # Gains over two dimensions.
            (lambda: nn.ModuleList([nn.LayerNorm((3, 4)), nn.RMSNorm((3, 4))]), "VVV"),
            (lambda: nn.ParameterList(torch.zeros(s) for s in ((), (1, 5), (2, 3, 4))), "VMM"),
            # Names are not looked at, by which MuLoCo's released code chooses.
            (misnamed, "EMVMVMVHV"),
            (nn.ReLU, ""),
        ],
    )
    def test_small_models(self, model, roles):
        assert "".join(role.name[0] for role in parameter_roles(model()).values()) == roles
        assert roles or parameter_layouts(model()) == {}


class TestLayouts:
    @pytest.mark.parametrize(
        ("module", "layout", "fans"),
        [
            (nn.Linear(5, 3), "out_in", (3, 5)),
            (nn.Bilinear(5, 2, 3), "out_in", (3, 5, 2)),
            (nn.Conv1d(4, 6, 3, groups=2), "kernel", (6, 6)),
            (nn.Conv2d(2, 7, (3, 5)), "kernel", (7, 30)),
            (nn.ConvTranspose2d(2, 7, (3, 5)), "transposed_kernel", (7, 30)),
        ],
    )
    def test_unfolds_to_fan_out_by_fan_in_and_back(self, module, layout, fans):
        assert parameter_layouts(module)["weight"] == layout
        found = LAYOUTS[layout]
        unfolded = found.unfold(module.weight)
        assert unfolded.shape == fans
        assert torch.equal(found.fold(unfolded, module.weight.shape), module.weight)

    def test_attributes_of_the_same_name_need_the_same_shape(self):
        module = nn.Linear(5, 3)
        module.nx, module.nf = 5, 3
        assert parameter_layouts(module)["weight"] == "out_in"


@pytest.mark.parametrize(
    ("name", "word"), [("wieght", "did you mean 'weight'"), ("bias", "its shape is")]
)
def test_overrides_that_cannot_be_are_refused(name: str, word: str) -> None:
    with pytest.raises(ConfigurationError, match=word):
        parameter_roles(nn.Linear(2, 2), {name: Role.MATRIX})
