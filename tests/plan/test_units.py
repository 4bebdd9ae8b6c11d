"""Quantities are read as people write them, and what is printed is read as what it says."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.errors import ConfigurationError
from thinwire.plan import units

RATES = {
    "25 Mbit/s| 25 Mbit/s |25 mbit / s|25Mbps|25 mbps|25 Mb/s|25 mb/s": 25e6,
    "100 MBps|100 MB/s|100 mB/s": 800e6,
    "10Gbit/s|10 GBIT/S": 10e9,
    "1 Gbyte/s": 8e9,
    "2 kbits/sec": 2e3,
    "3 bytes/second": 24,
    "1 MiB/s": 8 * 2**20,
    "1 Gibit/s": 2**30,
    "1 Kib/s": 1024,
    "1e3 bit/s|1_000 bps": 1e3,
    ".5 Tb/s": 0.5e12,
    "+2. Gb/s": 2e9,
}
DURATIONS = {
    "50ms|50 MS": 0.05,
    "0.8s": 0.8,
    "1.2h|1.2 Hours": 4320,
    "3 MIN": 180,
    "2 d": 172_800,
    "7 us|7 µs": 7e-6,
    "5 ns": 5e-9,
}
COUNTS = {
    "7B|7 b": 7_000_000_000,
    "350M|350m": 350_000_000,
    "1.2T": 1_200_000_000_000,
    "1.1k": 1_100,
    "64": 64,
    "1e9": 1_000_000_000,
    "12_000": 12_000,
    "15 billion": 15_000_000_000,
    # A float has no room for all of its digits.
    "1234567890123456789": 1_234_567_890_123_456_789,
}


@pytest.mark.parametrize(
    ("parse", "table"),
    [
        (units.parse_rate, RATES),
        (units.parse_duration, DURATIONS),
        (units.parse_latency, DURATIONS),
        (units.parse_count, COUNTS),
    ],
)
def test_quantities_are_read_as_people_write_them(parse, table) -> None:
    for texts, value in table.items():
        for text in texts.split("|"):
            assert parse(text) == value, text
            assert isinstance(parse(text), int if parse is units.parse_count else float)


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (units.parse_rate, "10", "has no unit; do: write a number and its unit: bit/s, kbit/s, "),
        (units.parse_rate, "10 Gbit", "no unit 'Gbit'.*did you mean 'Gbit/s'"),
        (units.parse_rate, "10 Gbits/h", "no unit 'Gbits/h'.*did you mean 'Gbit/s'.*B/s"),
        (units.parse_rate, "10 Xbit/s", "no unit 'Xbit/s'.*did you mean 'bit/s'"),
        (units.parse_rate, "10 i/s", "no unit 'i/s'"),
        (units.parse_rate, "10 ibit/s", "no unit 'ibit/s'"),
        (units.parse_rate, "100 MBPS", "in capitals.*Mbit/s for bits, or MB/s for bytes"),
        (units.parse_rate, "0 Gbit/s", "above 0"),
        (units.parse_rate, "-1 Gbit/s", "above 0"),
        (units.parse_rate, "1e-999 bit/s", "above 0"),
        (units.parse_rate, "nan Gbit/s", "does not begin with a finite number"),
        (units.parse_rate, "inf Gbit/s", "does not begin with a finite number"),
        (units.parse_rate, "1e400 Gbit/s", "too large a number"),
        (units.parse_rate, "", "does not begin with a finite number"),
        (units.parse_rate, "fast", "does not begin with a finite number"),
        (units.parse_rate, "1__0 Gbit/s", "does not begin with a finite number"),
        (units.parse_rate, "1/2 Gbit/s", "no unit '/2Gbit/s'"),
        (units.parse_rate, "1,5 Gbit/s", "no unit ',5Gbit/s'"),
        (units.parse_rate, "50 ms", "no unit 'ms'"),
        (units.parse_duration, "5", "has no unit; do: write a number and its unit: ns, us, ms, s"),
        (units.parse_duration, "5 m", "no unit 'm'.*did you mean 'm(s|in)'"),
        (units.parse_duration, "5 secs", "no unit 'secs'"),
        (units.parse_duration, "0s", "above 0"),
        (units.parse_duration, "-1s", "above 0"),
        (units.parse_duration, "1h30min", "no unit 'h30min'"),
        (units.parse_latency, "-1ms", "a duration cannot be negative"),
        (units.parse_latency, "5", "has no unit"),
        (
            units.parse_count,
            "7 X",
            "no unit 'X'; do: write a number and its unit: none, k, M, B, T",
        ),
        (units.parse_count, "7 Bi", "no unit 'Bi'.*did you mean 'B'"),
        (units.parse_count, "0", "above 0"),
        (units.parse_count, "-7B", "above 0"),
        (units.parse_count, "1.5", "not a whole number"),
        (units.parse_count, "0.0001k", "not a whole number"),
        (units.parse_count, "1e999", "too large a number"),
        (units.parse_count, "nan", "does not begin with a finite number"),
        (units.parse_count, "True", "does not begin with a finite number"),
    ],
)
def test_what_cannot_be_read_says_so_in_one_line(parse, text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        parse(text)
    said = str(caught.value)
    assert re.fullmatch(r"cannot read the \w+ '.*'; because .*; do: .*", said)
    assert repr(text) in said


def test_no_latency_is_one() -> None:
    assert units.parse_latency("0") == units.parse_latency(" 0 ms") == 0


@pytest.mark.parametrize(
    ("show", "value", "text"),
    [
        (units.rate_text, 10e9, "10 Gbit/s"),
        (units.rate_text, 1.2345e6, "1.23 Mbit/s"),
        (units.rate_text, 999_499, "999 kbit/s"),
        (units.rate_text, 999_500, "1 Mbit/s"),
        (units.rate_text, 0.25, "0.25 bit/s"),
        (units.rate_text, 123_456e12, "123000 Tbit/s"),
        (units.duration_text, 0, "0 s"),
        (units.duration_text, 59.96, "1 min"),
        (units.duration_text, 0.9999, "1 s"),
        (units.duration_text, 86_300, "1 d"),  # 24.0 hours
        (units.duration_text, 1.2 * 3600, "1.2 h"),
        (units.duration_text, 2e-12, "0.002 ns"),
        (units.count_text, 0, "0"),
        (units.count_text, 999, "999"),
        (units.count_text, 999.6, "1k"),
        (units.count_text, 1.2e12, "1.2T"),
        (units.nbytes_text, 0, "0 B"),
        (units.nbytes_text, 60_914_903_552, "60.9 GB"),
    ],
)
def test_printed_are_three_digits(show, value: float, text: str) -> None:
    assert show(value) == text


@pytest.mark.parametrize("value", [-1, math.nan, math.inf])
@pytest.mark.parametrize(
    "show", [units.rate_text, units.duration_text, units.count_text, units.nbytes_text]
)
def test_what_is_no_quantity_is_not_printed(show, value: float) -> None:
    with pytest.raises(ConfigurationError, match="negative or not finite"):
        show(value)


PAIRS = [
    (units.rate_text, units.parse_rate),
    (units.duration_text, units.parse_duration),
    (units.count_text, units.parse_count),
]


@pytest.mark.parametrize(("show", "parse"), PAIRS)
@given(power=st.floats(0, 18), digits=st.integers(1, 9999))
def test_what_is_printed_is_read_as_what_it_says(show, parse, power: float, digits: int) -> None:
    for value in (10**power, digits * 10 ** round(power / 2), 10.0 ** round(power)):
        text = show(value)
        assert parse(text) == pytest.approx(value, rel=0.5e-2 + 1e-9, abs=0.5 + 1e-9)
        assert show(parse(text)) == text


@given(st.floats(1e-12, 1e7))
def test_short_and_long_durations_come_back(seconds: float) -> None:
    text = units.duration_text(seconds)
    assert units.parse_duration(text) == pytest.approx(seconds, rel=0.51e-2)
    assert units.duration_text(units.parse_duration(text)) == text
