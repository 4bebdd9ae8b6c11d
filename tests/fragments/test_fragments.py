"""Where layers are found in real and toy models, and what every rule makes of their parameters."""

import copy
from collections import Counter
from collections.abc import Iterable

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import thinwire as tw
from language_models import LAYERS, gemma3, gpt2, gpt_oss, llama, mixtral, qwen2, qwen3
from thinwire.errors import ConfigurationError
from thinwire.fragments import Fragment, Fragments, Part
from thinwire.fragments.layers import find_layers, parts_of


class Block(nn.Module):
    """Holds smaller stacks: an MLP in an nn.Sequential and a list of experts."""

    def __init__(self, width: int = 4, experts: int = 3) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 7), nn.GELU(), nn.Linear(7, width))
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))


class OtherBlock(Block):
    pass


class NanoGPT(nn.Module):
    """A ModuleDict with everything in it, and a tied head beside it."""

    def __init__(self, layers: int = LAYERS, width: int = 4) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(11, width),
                "wpe": nn.Embedding(5, width),
                "drop": nn.Dropout(0.0),
                "h": nn.ModuleList(Block(width) for _ in range(layers)),
                "ln_f": nn.LayerNorm(width),
            }
        )
        self.lm_head = nn.Linear(width, 11, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight


class Titan(nn.Module):
    """Layers in a ModuleDict, named by numbers, as in torchtitan."""

    def __init__(self, layers: int = LAYERS, width: int = 4) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(11, width)
        self.layers = nn.ModuleDict({str(i): Block(width) for i in range(layers)})
        self.norm = nn.RMSNorm(width)
        self.output = nn.Linear(width, 11, bias=False)


class Wrapper(nn.Module):
    """As DistributedDataParallel: the model is its child `module`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model


# The first torch.compile of a process imports what torch itself has deprecated.
compiles = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")


def stack(layers: int = LAYERS) -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(layers)))


def beside_tables() -> nn.Module:
    """Embedding tables are no layers, however large."""
    tables = nn.ModuleDict({"wte": nn.Embedding(999, 4), "wpe": nn.Embedding(9, 4)})
    codebooks = nn.ModuleList(nn.Embedding(999, 4) for _ in range(3))
    return nn.ModuleDict({"codebooks": codebooks, "tables": tables, "h": stack()})


def bare_linears(layers: int) -> nn.Module:
    return nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(layers))


def experts_alone() -> nn.Module:
    return nn.ModuleList([nn.ModuleList(nn.Linear(3, 3) for _ in range(4))])


def parts(model: nn.Module) -> list[Part]:
    return list(parts_of(model).values())


def part(name: str, numel: int = 1, *, aliases: tuple[str, ...] = (), layer: int | None = None):
    return Part(name=name, aliases=(name, *aliases), numel=numel, layer=layer)


def expected(model: nn.Module, prefix: str) -> dict[str, int]:
    """Layers by name, which is what find_layers must not use."""
    return {
        name: int(name.removeprefix(prefix).split(".")[0])
        for name, _ in model.named_parameters()
        if name.startswith(prefix)
    }


def due(fragment: Fragment, until: int, sync_every: int) -> list[int]:
    return [t for t in range(until) if fragment.is_due(step=t, sync_every=sync_every)]


def layers_of(fragment: Fragment, model: nn.Module) -> set[int | None]:
    found = parts_of(model)
    return {found[name].layer for name in fragment.names}


@pytest.mark.parametrize(
    ("build", "prefix"),
    [
        (llama, "model.layers."),
        (gpt2, "transformer.h."),
        *((build, "model.layers.") for build in (qwen2, qwen3, mixtral, gpt_oss, gemma3)),
        (NanoGPT, "transformer.h."),
        (Titan, "layers."),
        (stack, ""),
        (beside_tables, "h."),
        # A sequential of one is no stack, for it could hold anything.
        (
            lambda: nn.Sequential(nn.ModuleDict({"embed": nn.Embedding(9, 4), "h": stack()})),
            "0.h.",
        ),
    ],
)
def test_every_parameter_of_the_stack_has_its_layer(build, prefix):
    model = build()
    found = find_layers(model)
    assert found == expected(model, prefix)
    assert set(found.values()) == set(range(LAYERS))
    assert find_layers(model.requires_grad_(False)) == found


@pytest.mark.parametrize(
    ("model", "layers"),
    [
        (lambda: llama(num_hidden_layers=1), {0}),
        (lambda: NanoGPT(1), {0}),
        # Layers that are nothing but experts win over their experts.
        (lambda: nn.ModuleDict({"embed": nn.Embedding(3, 3), "h": experts_alone()}), {0}),
        # A list of layers may be mixed, and a sequential may not.
        (lambda: nn.ModuleList([nn.Linear(2, 2), nn.Conv1d(2, 2, 1), Block()]), {0, 1, 2}),
        (lambda: nn.Sequential(nn.Embedding(5, 2), nn.Linear(2, 2), nn.Linear(2, 3)), set()),
        # As FSDP2 leaves a model of which only some layers are sharded.
        (lambda: nn.Sequential(Block(), OtherBlock(), Block()), {0, 1, 2}),
        (lambda: nn.ModuleList([block := Block(), Block(), block]), {0, 1}),
        # Children without parameters do not count.
        (lambda: nn.Sequential(nn.Tanh(), nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)), {0, 1}),
        (lambda: nn.Linear(2, 2), set()),
        (nn.ModuleList, set()),
        (lambda: nn.ModuleList([nn.Tanh()]), set()),
    ],
)
def test_which_layers_there_are(model, layers):
    assert set(find_layers(model()).values()) == layers


@compiles
def test_layers_of_a_wrapped_model_are_found():
    model = NanoGPT()
    found = find_layers(model)
    assert find_layers(Wrapper(model)) == {f"module.{n}": i for n, i in found.items()}
    compiled = torch.compile(Wrapper(model))
    assert find_layers(compiled) == {f"_orig_mod.module.{n}": i for n, i in found.items()}


@compiles
def test_layers_of_which_some_are_compiled_or_checkpointed():
    model = Titan()
    for name, wrap in (("1", torch.compile), ("2", checkpoint_wrapper)):
        model.layers[name] = wrap(model.layers[name])
    model.layers["3"] = torch.compile(checkpoint_wrapper(model.layers["3"]))
    assert find_layers(model) == expected(model, "layers.")


@compiles
def test_compiled_children_of_different_classes_are_no_stack():
    children = [nn.Embedding(3, 3), nn.Linear(3, 3), nn.Conv1d(3, 3, 1)]
    assert find_layers(nn.Sequential(*map(torch.compile, children))) == {}


def test_layers_that_were_named_before_they_were_listed():
    model = nn.ModuleDict({"first": (first := Block()), "layers": nn.ModuleList([first, Block()])})
    found = {(name.partition(".")[0], layer) for name, layer in find_layers(model).items()}
    assert found == {("first", 0), ("layers", 1)}


def test_what_layers_share_is_in_the_first():
    model = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
    model[2].weight = model[1].weight
    found = find_layers(model)
    assert (found["1.weight"], found["2.bias"]) == (1, 2)
    assert "2.weight" not in found


@pytest.fixture
def two_fake_ranks():
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("build", [NanoGPT, Titan])
def test_shards_are_planned_like_the_whole(build, two_fake_ranks):
    """Also where some layers stay of the plain class."""
    model = build()
    whole = parts_of(copy.deepcopy(model))
    blocks = list(model.transformer["h"] if build is NanoGPT else model.layers.values())
    for block in blocks[:-1]:
        fully_shard(block)
    assert [type(block) is Block for block in blocks] == [False] * (LAYERS - 1) + [True]
    assert parts_of(model) == whole
    fully_shard(model)
    weight = blocks[0].mlp[0].weight
    assert weight.to_local().numel() < weight.numel()
    assert parts_of(model) == whole


@pytest.mark.parametrize(
    ("offsets", "steps"),
    [
        # Offsets 0, 3, 6; nothing before step 10.
        (tw.Spread(), [[10, 20, 30], [13, 23, 33], [16, 26, 36]]),
        # A fragment is due at its first offset already, unless that is step 0.
        (tw.At(steps=(0, 9, 4)), [[10, 20, 30], [9, 19, 29, 39], [4, 14, 24, 34]]),
    ],
)
def test_offsets_by_hand(offsets, steps):
    rule = tw.Strided(layers=1, offsets=offsets)
    plan = rule.plan(parts(bare_linears(3)), sync_every=10)
    assert [due(f, 40, 10) for f in plan] == steps


@pytest.mark.parametrize("sync_every", [1, 2, 3, 7, 13, 30])
def test_spread_never_makes_two_due_at_once_and_skips_none(sync_every):
    for count in range(1, sync_every + 1):
        plan = tw.Strided(layers=1).plan(parts(bare_linears(count)), sync_every=sync_every)
        steps = [t for f in plan for t in due(f, 4 * sync_every, sync_every)]
        assert len(steps) == len(set(steps)) == 3 * count
        assert min(steps) == sync_every


@pytest.mark.parametrize(
    ("layers", "strided", "sequential"),
    [
        (1, [{0}, {1}, {2}, {3}, {4}], [{0}, {1}, {2}, {3}, {4}]),
        (2, [{0, 3}, {1, 4}, {2}], [{0, 1}, {2, 3}, {4}]),
        (3, [{0, 2, 4}, {1, 3}], [{0, 1, 2}, {3, 4}]),
        (5, [{0, 1, 2, 3, 4}], [{0, 1, 2, 3, 4}]),
        (99, [{0, 1, 2, 3, 4}], [{0, 1, 2, 3, 4}]),
    ],
)
def test_which_layers_travel_together(layers, strided, sequential):
    model = llama()
    for rule, wanted in ((tw.Strided, strided), (tw.Sequential, sequential)):
        plan = rule(layers=layers).plan(parts(model), sync_every=30)
        assert [layers_of(fragment, model) for fragment in plan] == [*wanted, {None}]


def test_frozen_layers_are_not_counted():
    model = llama()
    for frozen in (0, 2, 3):
        model.model.layers[frozen].requires_grad_(False)
    for rule in (tw.Strided(layers=1), tw.Sequential(layers=1)):
        plan = rule.plan(parts(model), sync_every=30)
        assert [layers_of(fragment, model) for fragment in plan] == [{1}, {4}, {None}]


@pytest.mark.parametrize(
    ("sizes", "fragments"),
    [
        # c | d; e to d's (4 < 5); b to c's (5 < 8); a to c's (7 < 8).
        ({"a": 1, "b": 2, "c": 5, "d": 4, "e": 4}, ["abc", "de"]),
        (dict.fromkeys("abcdefg", 2), ["adg", "be", "cf"]),  # equal ones in order
        ({"a": 5, "b": 0, "c": 0, "d": 0}, ["a", "b", "c", "d"]),  # none is empty
    ],
)
def test_the_largest_tensor_first_by_hand(sizes, fragments):
    found = [part(n, s) for n, s in sizes.items()]
    plan = tw.Balanced(count=len(fragments)).plan(found, sync_every=30)
    assert [fragment.names for fragment in plan] == [tuple(names) for names in fragments]


LISTED = (
    tuple(f"transformer.h.{layer}" for layer in range(LAYERS)),
    ("transformer.wte", "transformer.wpe.weight", "transformer.ln_f"),
)


def test_modules_and_parameters_by_name():
    body, rest = tw.ByModule(modules=LISTED).plan(parts(gpt2()), sync_every=30)
    assert all(name.startswith("transformer.h.") for name in body.names)
    assert rest.names == (
        "transformer.wte.weight",
        "transformer.wpe.weight",
        "transformer.ln_f.weight",
        "transformer.ln_f.bias",
    )


@pytest.mark.parametrize(
    ("names", "modules", "fragments"),
    [
        # No name is the beginning of another, and a module with a sister is no wrapper.
        (["h.1.w", "h.11.w"], ["h.1", "h.11"], ["h.1.w", "h.11.w"]),
        (["module.w", "w"], ["w", "module"], ["w", "module.w"]),
    ],
)
def test_names_by_hand(names, modules, fragments):
    rule = tw.ByModule(modules=tuple((module,) for module in modules))
    plan = rule.plan([part(name) for name in names], sync_every=9)
    assert [fragment.names for fragment in plan] == [(name,) for name in fragments]


def test_a_tied_head_can_be_listed_by_either_name():
    by_head = (LISTED[0], ("lm_head", *LISTED[1][1:]))
    both = (LISTED[0], ("lm_head", *LISTED[1]))
    plans = [
        tw.ByModule(modules=m).plan(parts(gpt2()), sync_every=9) for m in (LISTED, by_head, both)
    ]
    assert plans[0] == plans[1] == plans[2]


@compiles
@pytest.mark.parametrize(
    "wrap", [Wrapper, torch.compile, lambda m: torch.compile(Wrapper(torch.compile(m)))]
)
def test_names_of_the_model_before_it_was_wrapped(wrap):
    plain = tw.ByModule(modules=LISTED).plan(parts(gpt2()), sync_every=9)
    wrapped = tw.ByModule(modules=LISTED).plan(parts(wrap(gpt2())), sync_every=9)
    for a, b in zip(plain, wrapped, strict=True):
        assert len(a.names) == len(b.names)
        assert all(y.endswith(x) for x, y in zip(a.names, b.names, strict=True))
        assert a.names != b.names
    full = wrapped[0].names, wrapped[1].names
    assert tw.ByModule(modules=full).plan(parts(wrap(gpt2())), sync_every=9) == wrapped


def planned(*modules: tuple[str, ...], model: nn.Module | None = None) -> object:
    return tw.ByModule(modules=modules).plan(parts(model or gpt2()), sync_every=30)


def without_wpe() -> nn.Module:
    model = gpt2()
    model.transformer.wpe.requires_grad_(False)
    return model


STACKLESS = r" does.*nn.ModuleList.*Balanced\(\).*ByModule\(\)"
LN_1 = "'transformer.h.0.ln_1.weight' in fragment 0 and '.*ln_1.weight' in fragment 2"
TIED = "'transformer.wte.weight' in fragment 1 and 'lm_head.weight' in fragment 2.*tied"


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: tw.Spread().of(4, sync_every=3), r"spread 4 fragments over 3 .*sync_every >= 4"),
        (lambda: tw.At(steps=()).of(2, sync_every=10), "use 0 offsets .*2 fragments"),
        (lambda: tw.At(steps=(0, 1, 2)).of(2, sync_every=10), "use 3 offsets .*2 fragments"),
        (lambda: tw.At(steps=(10, 0)).of(2, sync_every=10), "fragment 0 to 10.* from 0 to 9"),
        (lambda: tw.At(steps=(0, -1)), "whole number from 0"),
        (lambda: tw.Strided(layers=0), "layers of Strided to 0"),
        (lambda: tw.Sequential(layers=-3), "layers of Sequential to -3"),
        (lambda: tw.Strided().plan(parts(nn.Linear(2, 2)), sync_every=30), "Strided" + STACKLESS),
        (
            lambda: tw.Sequential().plan(parts(nn.Linear(2, 2)), sync_every=30),
            "Sequential" + STACKLESS,
        ),
        (lambda: tw.Balanced(count=0), "count of Balanced to 0"),
        (
            lambda: tw.Balanced(count=3).plan(parts(nn.Linear(3, 3)), sync_every=30),
            r"into 3 fragments.*2 trainable.*count <= 2",
        ),
        (
            lambda: planned(*LISTED, ("transformer.h.00",)),
            r"'transformer\.h\.00' into fragment 2.*did you mean 'transformer\.h\.0'",
        ),
        (lambda: planned(("xyz",)), r"'xyz' into .*model\.named_modules\(\)"),
        (lambda: planned(*LISTED, model=without_wpe()), r"'transformer.wpe.weight'.*no trainable"),
        (lambda: planned(LISTED[0]), r"'transformer.wte.weight' and 3 more out"),
        (lambda: planned(), "out of every"),
        (lambda: planned(*LISTED, ("transformer.h.0.ln_1",)), LN_1),
        (lambda: planned(*LISTED, ("lm_head",)), TIED),
        *(
            (lambda w=wrong: tw.ByModule(modules=(("a",), w)), "fragment 1 of .*at least one name")
            for wrong in ((), "lm_head")
        ),
    ],
)
def test_what_cannot_be_is_refused(call, word):
    with pytest.raises(ConfigurationError, match=word):
        call()


@st.composite
def drawn_parts(draw: st.DrawFn) -> list[Part]:
    """At least one part has a layer; sizes of 0 and equal ones are likely."""
    sizes = draw(st.lists(st.integers(0, 50), min_size=1, max_size=30))
    layers = draw(
        st.lists(st.none() | st.integers(0, 12), min_size=len(sizes), max_size=len(sizes))
    )
    layers[draw(st.integers(0, len(sizes) - 1))] = draw(st.integers(0, 12))
    return [
        part(f"m{i % 3}.p{i}", size, aliases=(f"alias.{i}",), layer=layer)
        for i, (size, layer) in enumerate(zip(sizes, layers, strict=True))
    ]


def rules_for(found: list[Part], bound: int) -> Iterable[Fragments]:
    modules = dict.fromkeys(p.name.split(".")[0] for p in found)
    yield tw.Whole()
    yield tw.Strided(layers=bound)
    yield tw.Sequential(layers=bound)
    yield tw.Balanced(count=min(bound, len(found)))
    yield tw.ByModule(modules=tuple((module,) for module in modules))


@given(found=drawn_parts(), bound=st.integers(1, 9))
def test_every_plan_puts_each_parameter_into_exactly_one_fragment(found, bound):
    for rule in rules_for(found, bound):
        plan = rule.plan(found, sync_every=40)
        assert Counter(name for f in plan for name in f.names) == Counter(p.name for p in found)
        assert all(fragment.names for fragment in plan)
        assert [fragment.index for fragment in plan] == list(range(len(plan)))
        order = {p.name: i for i, p in enumerate(found)}
        for fragment in plan:
            assert list(fragment.names) == sorted(fragment.names, key=order.__getitem__)
