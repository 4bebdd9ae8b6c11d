"""Methods from their descriptions."""

import json
from typing import Any

import pytest

import thinwire as tw
from thinwire import codecs, method, presets
from thinwire.handshake import flatten_description
from thinwire.method import Method, describe, migrate_names
from thinwire.train import recipes


def test_every_preset_is_found_again_in_its_description() -> None:
    for name in presets.names():
        made = presets.from_text(name)
        assert Method.from_dict(json.loads(json.dumps(describe(made)))) == made, name
    for text in ("muloco:bits=2", "streaming_muloco", "sparse_muloco", "streaming_diloco:tau=2"):
        made = recipes.laptop(text).method
        assert Method.from_dict(json.loads(json.dumps(describe(made)))) == made, text
    clip = tw.MedianNormClip(aggregate=tw.MeanOverSenders())
    for rule in (clip, tw.DropOutliers(limit=3.0, aggregate=clip)):
        made = presets.diloco(aggregate=rule)
        assert Method.from_dict(json.loads(json.dumps(describe(made)))) == made


def test_a_field_that_came_later_is_described_only_where_it_is_set() -> None:
    plain = presets.sparseloco()
    assert "transform" not in describe(plain)["codec"]
    made = presets.sparseloco(codec=codecs.TopK(transform=codecs.DCT()))
    assert describe(made)["codec"]["transform"] == {"kind": "DCT"}
    assert Method.from_dict(json.loads(json.dumps(describe(made)))) == made
    assert made.fingerprint() != presets.sparseloco(codec=codecs.TopK()).fingerprint()


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
    now = json.loads(json.dumps(describe(made)))
    old = json.loads(json.dumps(now))
    clip = old["aggregate"]
    if "limit" in clip:
        clip = clip["aggregate"]
    del clip["aggregate"]
    assert Method.from_dict(old) == made
    flat = flatten_description({"method": old})
    assert flat != flatten_description({"method": now})
    assert migrate_names(flat) == flatten_description({"method": now})
    # The control: one that has the choice keeps it.
    clip["aggregate"] = {"kind": "MeanOverSenders"}
    assert Method.from_dict(old) != made
    assert migrate_names(flatten_description(old)) == flatten_description(old)


def test_descriptions_with_names_of_before_are_read(monkeypatch) -> None:
    made = presets.muloco(bits=2)
    old = json.loads(json.dumps(describe(made)))
    old["codec"]["kind"], old["codec"]["groups"]["kind"] = "Quantize", "Cells"
    with pytest.raises(tw.ConfigurationError, match="Cells is no part of this package"):
        Method.from_dict(old)
    now = {"Quantize": "Quantise", "Cells": describe(made)["codec"]["groups"]["kind"]}
    monkeypatch.setattr(method, "RENAMED_SLOTS", now)
    assert Method.from_dict(old) == made
