"""Roles come from the module tree: real architectures at toy size, and traps for name matching."""

from collections import Counter

import pytest
import torch
from torch import nn

from language_models import gpt2, gpt_oss, llama, mixtral, qwen3
from thinwire.errors import ConfigurationError
from thinwire.optim import Role, parameter_layouts, parameter_roles


def counts(model: nn.Module) -> dict[str, int]:
    return {role.name: count for role, count in Counter(parameter_roles(model).values()).items()}


def of_role(model: nn.Module, role: Role) -> set[str]:
    return {name for name, found in parameter_roles(model).items() if found is role}


class Block(nn.Module):
    """Its hidden layers carry the names that a substring rule would stumble over."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.overhead = nn.Linear(width, width)
        self.embed_output = nn.Linear(width, 4 * width, bias=False)
        self.lm_head = nn.Linear(4 * width, width, bias=False)


class Plain(nn.Module):
    """Like nanoGPT: a ModuleDict, then a head."""

    def __init__(self, *, tied: bool, width: int = 8, vocabulary: int = 32) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocabulary, width),
                "wpe": nn.Embedding(16, width),
                "h": nn.ModuleList(Block(width) for _ in range(2)),
                "ln_f": nn.RMSNorm(width),
            }
        )
        self.classifier = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.transformer["wte"].weight = self.classifier.weight


class TestTransformers:
    def test_llama(self):
        model = llama(tie_word_embeddings=False)
        assert counts(model) == {"EMBEDDING": 1, "MATRIX": 35, "VECTOR": 11, "HEAD": 1}
        assert of_role(model, Role.EMBEDDING) == {"model.embed_tokens.weight"}
        assert of_role(model, Role.HEAD) == {"lm_head.weight"}

    def test_tied_llama_has_no_head_of_its_own(self):
        model = llama(tie_word_embeddings=True)
        assert counts(model) == {"EMBEDDING": 1, "MATRIX": 35, "VECTOR": 11}

    def test_qwen3(self):
        # q_norm and k_norm come on top of Llama's norms.
        assert counts(qwen3()) == {"EMBEDDING": 1, "MATRIX": 35, "VECTOR": 21}

    def test_gpt2(self):
        model = gpt2()
        assert counts(model) == {"EMBEDDING": 2, "MATRIX": 20, "VECTOR": 42}
        assert {parameter_layouts(model)[n].id for n in of_role(model, Role.MATRIX)} == {"in_out"}

    def test_gpt2_matrices_unfold_to_out_in(self):
        model = gpt2()
        name = "transformer.h.0.attn.c_attn.weight"
        layout = parameter_layouts(model)[name]
        assert layout.unfold(model.get_parameter(name)).shape == (24, 8)

    def test_mixtral(self):
        model = mixtral()
        # Per layer: q, k, v, o, the router, and two stacks of experts.
        assert counts(model) == {"EMBEDDING": 1, "MATRIX": 35, "VECTOR": 11, "HEAD": 1}
        stacks = [n for n in of_role(model, Role.MATRIX) if model.get_parameter(n).ndim == 3]
        assert len(stacks) == 10
        for name in stacks:
            assert parameter_layouts(model)[name].id == "out_in"

    def test_experts_stored_in_out(self):
        model = gpt_oss()
        layouts = parameter_layouts(model)
        experts = "model.layers.0.mlp.experts."
        assert layouts[experts + "gate_up_proj"].id == "in_out"
        assert layouts["model.layers.0.self_attn.q_proj.weight"].id == "out_in"
        unfolded = layouts[experts + "gate_up_proj"].unfold(
            model.get_parameter(experts + "gate_up_proj")
        )
        assert unfolded.shape == (3, 24, 8)

    def test_stacked_biases_of_experts_are_vectors(self):
        roles = parameter_roles(gpt_oss())
        assert roles["model.layers.0.mlp.experts.down_proj_bias"] is Role.VECTOR
        assert roles["model.layers.0.mlp.experts.down_proj"] is Role.MATRIX
        assert roles["model.layers.0.mlp.router.weight"] is Role.MATRIX

    def test_a_wrapper_does_not_hide_the_head(self):
        wrapped = nn.ModuleDict(
            {"model": llama(tie_word_embeddings=False), "probe": nn.Linear(8, 3)}
        )
        assert of_role(wrapped, Role.HEAD) == {"model.lm_head.weight"}

    @pytest.mark.parametrize("build", [qwen3, mixtral, gpt2])
    def test_one_role_for_every_parameter_in_order(self, build):
        model = build()
        assert list(parameter_roles(model)) == [name for name, _ in model.named_parameters()]


class TestPlain:
    def test_head_is_found_by_place_and_shape(self):
        model = Plain(tied=False)
        assert of_role(model, Role.HEAD) == {"classifier.weight"}
        assert len(of_role(model, Role.EMBEDDING)) == 2

    def test_tied_head_is_an_embedding(self):
        model = Plain(tied=True)
        assert of_role(model, Role.HEAD) == set()
        assert len(of_role(model, Role.EMBEDDING)) == 2
        assert not any("classifier" in name for name in parameter_roles(model))

    def test_tied_head_that_is_registered_first_is_an_embedding(self):
        table = nn.Embedding(32, 8)
        head = nn.Linear(8, 32, bias=False)
        head.weight = table.weight
        assert parameter_roles(nn.ModuleList([head, table])) == {"0.weight": Role.EMBEDDING}

    @pytest.mark.parametrize("name", ["overhead", "embed_output", "lm_head"])
    def test_hidden_layers_stay_matrices_whatever_their_name(self, name):
        roles = parameter_roles(Plain(tied=False))
        assert roles[f"transformer.h.1.{name}.weight"] is Role.MATRIX

    def test_names_are_not_looked_at(self):
        class Anonymous(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.matrix = nn.Embedding(9, 4)
                self.embedding = nn.Linear(4, 4, bias=False)
                self.vector = nn.Linear(4, 9, bias=False)

        assert list(parameter_roles(Anonymous()).values()) == [
            Role.EMBEDDING,
            Role.MATRIX,
            Role.HEAD,
        ]

    def test_an_embedding_registered_after_the_head_does_not_hide_it(self):
        model = nn.ModuleList([nn.Embedding(9, 4), nn.Linear(4, 9), nn.Embedding(16, 4)])
        assert of_role(model, Role.HEAD) == {"1.weight"}

    def test_last_layer_of_another_shape_is_no_head(self):
        model = nn.ModuleList([nn.Embedding(9, 4), nn.Linear(4, 3)])
        assert of_role(model, Role.HEAD) == set()
        assert of_role(model, Role.MATRIX) == {"1.weight"}

    def test_no_head_without_an_embedding(self):
        assert counts(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))) == {"MATRIX": 2, "VECTOR": 2}

    def test_embedding_bag(self):
        model = nn.EmbeddingBag(9, 4)
        assert parameter_roles(model) == {"weight": Role.EMBEDDING}

    def test_gain_over_two_dimensions_is_a_vector(self):
        assert counts(nn.ModuleList([nn.LayerNorm((3, 4)), nn.RMSNorm((3, 4))])) == {"VECTOR": 3}

    def test_scalars_and_bare_parameters(self):
        model = nn.ParameterDict(
            {
                name: torch.zeros(shape)
                for name, shape in [("a", ()), ("b", (1, 5)), ("c", (2, 3, 4))]
            }
        )
        assert list(parameter_roles(model).values()) == [Role.VECTOR, Role.MATRIX, Role.MATRIX]

    def test_a_model_without_parameters(self):
        assert parameter_roles(nn.ReLU()) == {}
        assert parameter_layouts(nn.ReLU()) == {}


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
        found = parameter_layouts(module)["weight"]
        assert found.id == layout
        unfolded = found.unfold(module.weight)
        assert unfolded.shape == fans
        assert torch.equal(found.fold(unfolded, module.weight.shape), module.weight)

    def test_transposed_convolution_has_a_row_for_every_output_channel(self):
        module = nn.ConvTranspose1d(2, 3, 5)
        row = parameter_layouts(module)["weight"].unfold(module.weight)[1]
        assert torch.equal(row, module.weight[:, 1].flatten())

    def test_attributes_of_the_same_name_need_the_same_shape(self):
        module = nn.Linear(5, 3)
        module.nx, module.nf = 5, 3
        assert parameter_layouts(module)["weight"].id == "out_in"


class TestOverrides:
    def test_wins(self):
        model = Plain(tied=False)
        roles = parameter_roles(model, {"classifier.weight": Role.MATRIX})
        assert roles["classifier.weight"] is Role.MATRIX
        assert list(roles) == list(parameter_roles(model))

    def test_unknown_name(self):
        with pytest.raises(ConfigurationError, match="no parameter of that name"):
            parameter_roles(nn.Linear(2, 2), {"wieght": Role.MATRIX})

    def test_a_vector_is_no_matrix(self):
        with pytest.raises(ConfigurationError, match="its shape is"):
            parameter_roles(nn.Linear(2, 2), {"bias": Role.MATRIX})
