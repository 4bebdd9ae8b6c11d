import dataclasses
import json

import pytest

import thinwire as tw


def test_tables_are_the_papers() -> None:
    diloco, muloco, ddp = tw.presets.diloco(), tw.presets.muloco(), tw.presets.ddp()
    assert (diloco.sync_every, muloco.sync_every, ddp.sync_every) == (30, 30, 1)
    assert diloco.inner == tw.inner.AdamW(lr=4e-4, weight_decay=0.1)
    assert muloco.inner == tw.inner.Muon(lr=0.0156)
    assert ddp.outer == tw.outer.Direct()


@pytest.mark.parametrize(
    ("preset", "workers", "lr", "momentum"),
    [
        ("diloco", 1, 0.7, 0.8),
        ("diloco", 2, 0.7, 0.9),
        ("diloco", 8, 0.9, 0.9),
        ("diloco", 16, 1.0, 0.9),
        ("diloco", 64, 1.0, 0.9),
        ("muloco", 1, 0.7, 0.6),
        ("muloco", 8, 0.9, 0.8),
        ("muloco", 16, 1.0, 0.9),
    ],
)
def test_outer_settings_follow_the_number_of_workers(
    preset: str, workers: int, lr: float, momentum: float
) -> None:
    outer = tw.presets.by_name(preset)().outer
    assert outer.at(workers) == tw.outer.SGD(lr=lr, momentum=momentum, nesterov=True)


@pytest.mark.parametrize("name", tw.presets.names())
def test_every_field_is_a_keyword(name: str) -> None:
    preset = tw.presets.by_name(name)
    method = preset()
    fields = {f.name: getattr(method, f.name) for f in dataclasses.fields(method)}
    assert preset(**fields) == method
    assert preset(codec=tw.codecs.CastBF16()).codec == tw.codecs.CastBF16()
    json.dumps(method.describe())


def test_a_method_is_frozen_and_compares_by_value() -> None:
    method = tw.presets.diloco()
    with pytest.raises(dataclasses.FrozenInstanceError):
        method.sync_every = 3
    assert method.fingerprint() == tw.presets.diloco(name="mine").fingerprint()
    assert method.fingerprint() != tw.presets.diloco(sync_every=31).fingerprint()


def test_unknown_names_suggest_the_closest() -> None:
    with pytest.raises(tw.ConfigurationError, match="did you mean 'diloco'"):
        tw.presets.by_name("dilocco")
    with pytest.raises(tw.ConfigurationError, match="did you mean 'sync_every'"):
        tw.presets.diloco(sync_evry=3)


@pytest.mark.parametrize("bits", [3, 0, -16])
def test_bits_without_a_codec_are_refused(bits: int) -> None:
    with pytest.raises(tw.ConfigurationError, match=f"cannot send {bits} bits"):
        tw.presets.muloco(bits=bits)


def test_bits_and_codec_together_are_refused() -> None:
    with pytest.raises(tw.ConfigurationError, match="and a codec too"):
        tw.presets.muloco(bits=16, codec=tw.codecs.Identity())


@pytest.mark.parametrize(
    "fields",
    [
        {"sync_every": 0},
        {"sync_every": -1},
        {"sync_every": 2.5},
        {"sync_every": True},
        {"codec": "bf16"},
        {"outer": None},
        {"outer": tw.outer.Direct(), "sync_every": 2},
        {"name": 3},
    ],
)
def test_slots_refuse_what_does_not_fit(fields) -> None:
    with pytest.raises(tw.ConfigurationError, match=r"cannot .*; because .*; do: "):
        tw.presets.diloco(**fields)
