"""Quantities are read as people write them, and what is printed is read as what it says."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.errors import ConfigurationError
from thinwire.plan import units

DURATIONS = {"50ms|50 MS": 0.05, "0.8s": 0.8, "1.2h|1.2 Hours": 4320, "3 MIN": 180, "2 d": 172_800}
DURATIONS |= {"7 us|7 µs": 7e-6, "5 ns": 5e-9}
READ = {
    units.parse_rate: {
        "25 Mbit/s| 25 Mbit/s |25 mbit / s|25Mbps|25 mbps|25 Mb/s|25 mb/s": 25e6,
        "100 MBps|100 MB/s|100 mB/s|100_000 kbyte/second": 800e6,
        "10Gbit/s|1e10 bps|.01 Tb/s": 10e9,
        "1 MiB/s|8192 Kib/s": 8 * 2**20,
    },
    units.parse_duration: DURATIONS,
    units.parse_latency: DURATIONS | {"0| 0 ms": 0},
    units.parse_count: {
        "7B|7 b|7e9|7_000_000_000": 7_000_000_000,
        "1.2T|1_200_000M": 1_200_000_000_000,
        "1.1k|1100|0.0011M": 1_100,
        # A float has no room for all of its digits.
        "1234567890123456789": 1_234_567_890_123_456_789,
    },
}


@pytest.mark.parametrize("parse", READ)
def test_quantities_are_read_as_people_write_them(parse) -> None:
    for texts, value in READ[parse].items():
        for text in texts.split("|"):
            assert parse(text) == value, text
            assert isinstance(parse(text), int if parse is units.parse_count else float)


NO_NUMBER = "does not begin with a finite number"
UNREADABLE = {
    units.parse_rate: {
        "10": "has no unit; do: write a number and its unit: bit/s, kbit/s, ",
        "10 Gbit": "no unit 'Gbit'.*did you mean 'Gbit/s'",
        "10 Xbit/s": "no unit 'Xbit/s'.*did you mean 'bit/s'",
        "100 MBPS": "in capitals.*Mbit/s for bits, or MB/s for bytes",
        "0 Gbit/s|-1 Gbit/s|1e-999 bit/s": "above 0",
        "nan Gbit/s|inf Gbit/s||fast|1__0 Gbit/s": NO_NUMBER,
        "1,5 Gbit/s": "no unit ',5Gbit/s'",
        "1e400 Gbit/s": "too large a number",
    },
    units.parse_duration: {
        "5": "has no unit; do: write a number and its unit: ns, us, ms, s",
        "5 m": "no unit 'm'.*did you mean 'm(s|in)'",
    },
    units.parse_latency: {"-1ms": "it is negative", "5": "has no unit"},
    units.parse_share: {
        "0|0%|-1%": "above 0",
        "1.01|101%": "at most 100 %",
        "|half": NO_NUMBER,
    },
    units.parse_count: {
        "7 X": "no unit 'X'; do: write a number and its unit: none, k, M, B, T",
        "7 Bi": "no unit 'Bi'.*did you mean 'B'",
        "0|-7B": "above 0",
        "1.5|0.0001k": "not a whole number",
        "nan|True": NO_NUMBER,
    },
}


@pytest.mark.parametrize("parse", UNREADABLE)
def test_what_cannot_be_read_says_so_in_one_line(parse) -> None:
    for texts, message in UNREADABLE[parse].items():
        for text in texts.split("|"):
            with pytest.raises(ConfigurationError, match=message) as caught:
                parse(text)
            said = str(caught.value)
            assert re.fullmatch(r"cannot read the \w+ '.*'; because .*; do: .*", said)
            assert repr(text) in said


PRINTED = {
    units.rate_text: {
        10e9: "10 Gbit/s",
        1.2345e6: "1.23 Mbit/s",
        999_499: "999 kbit/s",
        999_500: "1 Mbit/s",
        0.25: "0.25 bit/s",
        123_456e12: "123000 Tbit/s",
    },
    # Of 86,300 s, 24.0 hours are one day.
    units.duration_text: {0: "0 s", 59.96: "1 min", 0.9999: "1 s", 86_300: "1 d"}
    | {1.2 * 3600: "1.2 h", 2e-12: "0.002 ns"},
    units.count_text: {0: "0", 999: "999", 999.6: "1k", 1.2e12: "1.2T"},
    units.nbytes_text: {0: "0 B", 60_914_903_552: "60.9 GB"},
    # Not rounded up to a whole.
    units.share_text: {0: "0 %", 1: "100 %", 0.9999: "99.9 %", 0.0999: "10 %", 1e-4: "0.01 %"},
}


@pytest.mark.parametrize("show", PRINTED)
def test_printed_are_three_digits_of_what_is_a_quantity(show) -> None:
    for value, text in PRINTED[show].items():
        assert show(value) == text
    for value in () if show is units.share_text else (-1, math.nan, math.inf):
        with pytest.raises(ConfigurationError, match="negative or not finite"):
            show(value)


@pytest.mark.parametrize(
    ("show", "parse"),
    [
        (units.rate_text, units.parse_rate),
        (units.duration_text, units.parse_duration),
        (units.count_text, units.parse_count),
    ],
)
@given(power=st.floats(0, 18), digits=st.integers(1, 9999), seconds=st.floats(1e-12, 1e7))
def test_what_is_printed_is_read_as_what_it_says(show, parse, power, digits, seconds) -> None:
    for value in (10**power, digits * 10 ** round(power / 2), 10.0 ** round(power)):
        text = show(value)
        assert parse(text) == pytest.approx(value, rel=0.5e-2 + 1e-9, abs=0.5 + 1e-9)
        assert show(parse(text)) == text
    text = units.duration_text(seconds)
    assert units.parse_duration(text) == pytest.approx(seconds, rel=0.51e-2)
    assert units.duration_text(units.parse_duration(text)) == text
