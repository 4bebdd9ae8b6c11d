"""What a method refuses, what it warns of, and what is read of its descriptions, old ones too."""

import json
import warnings
from typing import Any

import pytest

import thinwire as tw
from thinwire import codecs, presets
from thinwire.handshake import flatten_description
from thinwire.method import RENAMED_SLOTS, Method, describe, migrate_names
from thinwire.train import recipes

FEEDBACK = tw.ErrorFeedback(decay=0.95)
OWNER = tw.ReduceScatter(owner_feedback=FEEDBACK)
LOSES = [
    codecs.TopK(k=64),
    codecs.TopK(k=4095),
    codecs.Quantise(bits=2, groups=codecs.Tensors()),
    codecs.Quantise(bits=1),
    codecs.E3M0(groups=codecs.Tensors()),
    codecs.RandomK(groups=codecs.Tensors()),
    codecs.PerRole(default=codecs.CastBF16(), vector=codecs.TopK()),
]
KEEPS = [
    codecs.Identity(),
    codecs.CastBF16(),
    codecs.TopK(k=4096),
    codecs.Quantise(bits=2),
    codecs.E3M0(groups=codecs.Rows()),
    codecs.RandomK(),
    codecs.PerRole(default=codecs.CastBF16(), vector=codecs.Identity()),
]


@pytest.mark.parametrize("codec", [*LOSES, *KEEPS], ids=lambda codec: codec.id)
def test_a_reduce_scatter_that_loses_much_is_warned_of_and_nothing_else(codec) -> None:
    if codec in LOSES:
        told = rf"{type(codec).__name__}.* because .*; do: .*owner_f"
        with pytest.warns(tw.LossyReduceScatterWarning, match=told):
            presets.diloco(codec=codec, exchange=tw.ReduceScatter())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for exchange in (tw.Gather(), tw.Automatic(), OWNER):
            presets.diloco(codec=codec, exchange=exchange)
        if codec in KEEPS:
            presets.diloco(codec=codec, exchange=tw.ReduceScatter())


@pytest.mark.parametrize("exchange", [tw.ReduceScatter(), OWNER])
def test_an_aggregate_that_is_not_elementwise_is_not_combined_in_shards(exchange) -> None:
    inner = tw.DropOutliers(aggregate=tw.MedianNormClip())
    for aggregate in (tw.MedianNormClip(), inner, tw.ClipNorms(aggregate=tw.MedianNormClip())):
        with pytest.raises(tw.ConfigurationError, match=r"MedianNormClip.*exchange=Gather"):
            presets.diloco(aggregate=aggregate, exchange=exchange)
        for gathers in (tw.Gather(), tw.Automatic()):
            presets.diloco(aggregate=aggregate, exchange=gathers)
    presets.diloco(aggregate=tw.DropOutliers(), exchange=exchange)


# -- descriptions ----------------------------------------------------------------------------------


def as_json(made: Method) -> dict[str, Any]:
    return json.loads(json.dumps(describe(made)))


def test_every_method_is_found_again_in_its_description() -> None:
    texts = ("muloco:bits=2", "streaming_muloco", "sparse_muloco", "streaming_diloco:tau=2")
    clip = tw.MedianNormClip(aggregate=tw.MeanOverSenders())
    rules = (clip, tw.DropOutliers(limit=3.0, aggregate=clip))
    for made in (
        *map(presets.from_text, presets.names()),
        *(recipes.laptop(text).method for text in texts),
        *(presets.diloco(aggregate=rule) for rule in rules),
    ):
        assert Method.from_dict(as_json(made)) == made


def test_a_field_that_came_later_is_described_only_where_it_is_set() -> None:
    assert "transform" not in describe(presets.sparseloco())["codec"]
    made = presets.sparseloco(codec=codecs.TopK(transform=codecs.DCT()))
    assert describe(made)["codec"]["transform"] == {"kind": "DCT"}
    assert Method.from_dict(as_json(made)) == made
    assert made.describe() != presets.sparseloco(codec=codecs.TopK()).describe()


@pytest.mark.parametrize(
    ("slot", "value", "reason"),
    [
        ("codec", {"kind": "Mine"}, "Mine is no part of this package"),
        ("codec", {"kind": "k_for_density", "density": 1}, "k_for_density is no part"),
        ("inner", {"kind": "ByWorkerCount", "table": []}, "ByWorkerCount is no part"),
        ("codec", {"kind": "CastBF16", "more": 1}, "another version"),
        ("codec", {"kind": "Codec"}, "Codec is no part"),
        ("codec", 3, "another version"),
        ("sync_every", 0, "another version"),
        ("merge", 1, "another version"),
        ("overlap", {"kind": "Delay", "tau": 0}, "overlap.mixing differs"),
    ],
)
def test_descriptions_that_are_not_ours_are_refused(slot: str, value: Any, reason: str) -> None:
    with pytest.raises(tw.ConfigurationError, match=reason):
        Method.from_dict(describe(presets.diloco(codec=codecs.CastBF16())) | {slot: value})


@pytest.mark.parametrize(
    "rule", [tw.MedianNormClip(), tw.DropOutliers(aggregate=tw.MedianNormClip())]
)
def test_a_clip_of_before_had_no_choice_of_what_combines(rule) -> None:
    made = presets.diloco(aggregate=rule)
    now, old = as_json(made), as_json(made)
    clip = old["aggregate"] if rule == tw.MedianNormClip() else old["aggregate"]["aggregate"]
    del clip["aggregate"]
    assert Method.from_dict(old) == made
    flat = flatten_description({"method": old})
    assert flat != flatten_description({"method": now})
    assert migrate_names(flat) == flatten_description({"method": now})
    # The control: one that has the choice keeps it.
    clip["aggregate"] = {"kind": "MeanOverSenders"}
    assert Method.from_dict(old) != made
    assert migrate_names(flatten_description(old)) == flatten_description(old)


def test_descriptions_written_before_say_today_s_names() -> None:
    """Only what fills a slot is renamed."""
    made = {name: as_json(presets.from_text(name)) for name in presets.names()}
    today = {**made, "name": "Direct", "text": ["Direct", {"a": "Direct"}]}
    said = json.dumps(today)
    for old, new in RENAMED_SLOTS.items():
        said = said.replace(f'"kind": "{new}"', f'"kind": "{old}"')
    before = json.loads(said)
    assert before["ddp"]["outer"]["kind"] == "Direct"
    assert migrate_names(before) == migrate_names(today) == today
    assert migrate_names(flatten_description(before)) == flatten_description(today)
