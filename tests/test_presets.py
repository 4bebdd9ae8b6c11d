import dataclasses
import json
import re

import pytest

import thinwire as tw


def test_the_table_of_noloco_is_the_papers() -> None:
    """frozen/methods.json has the others."""
    noloco = tw.presets.noloco()
    assert noloco.inner == tw.inner.AdamW(lr=6e-4, betas=(0.9, 0.999), weight_decay=0.0)
    assert noloco.sync_every == 50
    assert noloco.outer == tw.outer.Gossip(lr=0.7, momentum=0.5)
    assert (noloco.exchange, noloco.codec) == (tw.Pairs(seed=0), tw.codecs.CastBF16())
    assert (noloco.feedback, noloco.overlap) == (tw.NoFeedback(), tw.Delay())


def test_the_asynchronous_table_is_the_papers() -> None:
    method, outer = tw.presets.async_diloco(), tw.outer.DelayedNesterov(lr=0.7, momentum=0.9)
    assert method.sync_every == 50
    assert method.inner == tw.inner.AdamW(lr=4e-4, weight_decay=0.1)
    assert method.outer == dataclasses.replace(outer, every=4, c=0.0)
    other = tw.presets.async_diloco(every=8, c=0.1)
    assert other.outer == dataclasses.replace(outer, every=8, c=0.1)
    assert tw.Method.from_dict(tw.method.describe(method)) == method
    assert "async_diloco" not in tw.presets.names()  # it does not train in rounds
    assert tw.presets.from_text("async_diloco:every=8").outer.every == 8


@pytest.mark.parametrize(
    ("bits", "codec", "feedback"),
    [
        (None, tw.codecs.Identity(), tw.NoFeedback()),
        (32, tw.codecs.Identity(), tw.NoFeedback()),
        (16, tw.codecs.CastBF16(), tw.NoFeedback()),
        *((b, tw.codecs.Quantise(bits=b), tw.ErrorFeedback(decay=0.9)) for b in (8, 4, 2, 1)),
    ],
)
def test_bits_choose_codec_and_feedback(bits, codec, feedback) -> None:
    method = tw.presets.muloco(bits=bits)
    assert (method.codec, method.feedback) == (codec, feedback)
    # A feedback of one's own wins.
    mine = tw.ErrorFeedback(decay=0.5)
    assert tw.presets.muloco(bits=bits, feedback=mine).feedback == mine


@pytest.mark.parametrize(
    ("parameters", "workers", "batch", "lr", "weight_decay"),
    [
        (416e6, None, None, 0.0625, 1.25e-3),  # the published rows
        (3.1e9, None, None, 0.0156, 2.5e-4),
        (416e6, 1, 512, 0.0625, 1e-2),
        (3.1e9, 16, 512, 0.0156, 6.25e-5),
        (150e6, None, None, 0.0625, 1.25e-3),
        (1.13e9, 16, 2048, 0.0625, 2.5e-3),
        (1.14e9, 16, 2048, 0.0156, 2.5e-3),  # rates change at 1.136B
        (1.26e9, 16, 2048, 0.0156, 2.5e-3),
        (1.28e9, 16, 2048, 0.0156, 2.5e-4),  # bases at 1.268B
        (15e9, None, None, 0.0156, 2.5e-5),
    ],
)
def test_muon_follows_the_size_of_the_model(parameters, workers, batch, lr, weight_decay) -> None:
    method = tw.presets.muloco(parameters=parameters, workers=workers, global_batch=batch)
    inner, default = method.inner, tw.presets.muloco()
    assert (inner.lr, inner.weight_decay) == (lr, pytest.approx(weight_decay))
    rest = {"lr": default.inner.lr, "weight_decay": default.inner.weight_decay}
    assert dataclasses.replace(inner, **rest) == default.inner
    assert dataclasses.replace(method, inner=default.inner) == default


@pytest.mark.parametrize(
    ("text", "method"),
    [
        ("ddp", tw.presets.ddp()),
        (
            "muloco:bits=2:parameters=3.1e9:workers=8:global_batch=1024",
            tw.presets.muloco(bits=2, parameters=3.1e9, workers=8, global_batch=1024),
        ),
        ("diloco:sync_every=7", tw.presets.diloco(sync_every=7)),
        ("sparse_muloco:density=0.125", tw.presets.sparse_muloco(density=1 / 8)),
        (
            "sparseloco:drop_outliers=7:clip_norms=2:density=1/64",
            tw.presets.sparseloco(
                density=1 / 64,
                aggregate=tw.DropOutliers(
                    limit=7, aggregate=tw.ClipNorms(limit=2, aggregate=tw.MeanOverSenders())
                ),
            ),
        ),
        (
            "muloco:bits=2:clip_norms=3:trimmed_mean=2",
            tw.presets.muloco(
                bits=2, aggregate=tw.ClipNorms(limit=3, aggregate=tw.TrimmedMean(trim=2))
            ),
        ),
    ],
)
def test_a_method_is_read_from_text(text: str, method: tw.Method) -> None:
    read = tw.presets.from_text(text)
    assert read == dataclasses.replace(method, name=text)


def test_what_is_in_the_text_wins() -> None:
    read = tw.presets.from_text("diloco:sync_every=7", sync_every=9, codec=tw.codecs.CastBF16())
    assert (read.sync_every, read.codec) == (7, tw.codecs.CastBF16())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "cannot use method ''"),
        ("dilocco", "did you mean 'diloco'"),
        ("async_dilocco", "did you mean 'async_diloco'"),
        ("diloco:sync_evry=3", "did you mean 'sync_every'"),
        ("ddp:bits=2", "cannot give ddp the number 'bits'"),
        ("muloco:bit=2", "did you mean 'bits'"),
        ("muloco:bits=2:bits=1", "gives bits twice"),
        *((f"muloco:bits{x}", "not FIELD=NUMBER") for x in ("", "=", "=two", "=2=3", "=416M")),
        ("muloco:parameters=1e6", "150M to 15B"),
        ("muloco:", "the number ''"),
        ("muloco:bits=2.5", "cannot send 2.5 bits"),
        *((f"sparseloco:density={x}", "not FIELD=NUMBER") for x in ("1/0", "nan")),
        ("diloco:sync_every=1/2", "set sync_every to 0.5"),
        ("diloco:codec=2", "cannot give diloco the number 'codec'"),
        ("diloco:clip_norms=1/2", "limit of ClipNorms to 0.5"),
        ("diloco:drop_outlier=3", "did you mean 'drop_outliers'"),
        ("sparseloco:trimmed_mean=1", "keep the zeros"),
        ("diloco:trimmed_mean=1.5", "trim of TrimmedMean to 1.5"),
    ],
)
def test_text_that_names_no_method_is_refused(text: str, reason: str) -> None:
    with pytest.raises(tw.ConfigurationError, match=re.escape(reason)):
        tw.presets.from_text(text)


@pytest.mark.parametrize(("workers", "lr"), [(1, 0.7), (7, 0.7), (8, 0.9), (15, 0.9), (64, 1.0)])
def test_outer_settings_follow_the_number_of_workers(workers: int, lr: float) -> None:
    assert tw.presets.diloco().outer.at(workers).lr == lr


@pytest.mark.parametrize("name", tw.presets.names())
def test_every_field_is_a_keyword(name: str) -> None:
    preset = tw.presets.by_name(name)
    method = preset()
    fields = {f.name: getattr(method, f.name) for f in dataclasses.fields(method)}
    assert preset(**fields) == method
    assert preset(codec=tw.codecs.CastBF16()).codec == tw.codecs.CastBF16()
    json.dumps(method.describe())


NAN = float("nan")


@pytest.mark.parametrize(
    ("preset", "fields", "word"),
    [
        ("diloco", {"sync_every": 0}, "set sync_every to 0"),
        ("diloco", {"sync_every": -1}, "set sync_every to -1"),
        ("diloco", {"sync_evry": 3}, "did you mean 'sync_every'"),
        ("diloco", {"outer": tw.outer.GradientAveraging(), "sync_every": 2}, "because .*; do: "),
        *(("muloco", {"bits": bits}, f"cannot send {bits} bits") for bits in (3, 0, -16)),
        ("muloco", {"bits": 16, "codec": tw.codecs.Identity()}, "and a codec too"),
        *(("sparseloco", {"density": d}, "density") for d in (0, -0.5, 1.5, 1e-5, NAN)),
        ("sparse_muloco", {"density": 1.5}, "density"),
        *(("muloco", {"parameters": p}, "150M to 15B") for p in (149e6, 16e9, NAN, 0, -416e6)),
        ("muloco", {"workers": 8}, "150M to 15B"),
        ("muloco", {"global_batch": 512}, "150M to 15B"),
        ("muloco", {"parameters": 416e6, "workers": 0}, "set workers to 0"),
        ("muloco", {"parameters": 416e6, "global_batch": 0}, "set global_batch to 0"),
        ("muloco", {"parameters": 416e6, "inner": tw.inner.Muon(lr=0.1)}, "inner is given"),
        ("async_diloco", {"c": 0.3}, "set c with every=4 to 0.3"),
    ],
)
def test_what_does_not_fit_is_refused(preset: str, fields, word: str) -> None:
    with pytest.raises(tw.ConfigurationError, match=word):
        getattr(tw.presets, preset)(**fields)
