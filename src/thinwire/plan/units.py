"""Quantities as people write them: 10 Gbit/s, 50ms, 7B.

Capitals and spaces do not matter where they cannot mislead. They do for bits and bytes: b is a bit
and B is a byte, so that 100 Mbps are 12.5 MB/s. Printed are three significant digits, and what is
printed can be read again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from thinwire.errors import ConfigurationError, ThinwireError, unknown_name

if TYPE_CHECKING:  # slow to import (decimal comes with it), and needed on a command line only
    from fractions import Fraction

# Scale -> spellings, of which the first is shown.
_Units = Mapping[str, tuple[str, ...]]
_DURATIONS: Final[_Units] = {
    "1e-9": ("ns",),
    "1e-6": ("us", "µs", "μs"),
    "1e-3": ("ms",),
    "1": ("s", "sec", "second", "seconds"),
    "60": ("min", "minute", "minutes"),
    "3600": ("h", "hr", "hour", "hours"),
    "86400": ("d", "day", "days"),
}
_COUNTS: Final[_Units] = {
    "1": ("",),
    "1e3": ("k", "thousand"),
    "1e6": ("M", "million"),
    "1e9": ("B", "bn", "billion"),
    "1e12": ("T", "trillion"),
}
_SHARES: Final[_Units] = {"1e-2": ("%",), "1": ("",)}
_SIGNS: Final = {"$": "USD", "€": "EUR", "£": "GBP"}

_NUMBER = re.compile(r"\s*([+-]?(?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:e[+-]?\d{1,3})?)(.*)", re.I | re.S)
_PRICE = re.compile(r"([$€£]|[a-z]{3})?\s*([^a-z$€£\s]*\d[^a-z$€£\s]*)\s*([a-z]{3})?", re.I)
_RATE = re.compile(r"((?:[kmgtp]i?)?)(b|bits?|bytes?)(/s|ps|/sec|/second)", re.I)
_RATE_UNITS = tuple(f"{p}{of}/s" for of in ("bit", "B") for p in ("", "k", "M", "G", "T"))


# -- reading ---------------------------------------------------------------------------------------


def parse_rate(text: str) -> float:
    """Bits per second.

    Args:
        text: a number above 0 and bit/s or B/s with or without a prefix; bps, Mb/s, Mbps and MBps
            will do. A prefix with an i is a power of 1024.

    Raises:
        ConfigurationError: no number, no or another unit, or a rate that is not above 0.

    >>> parse_rate("10Gbit/s"), parse_rate("25 Mbps"), parse_rate("1GB/s")
    (10000000000.0, 25000000.0, 8000000000.0)
    """
    what = f"read the rate {text!r}"
    number, unit = _split(what, text, _RATE_UNITS)
    found = _RATE.fullmatch(unit)
    if found is None:
        raise _unknown_unit(what, unit, _RATE_UNITS)
    prefix, of, per = found.groups()
    if of + per == "BPS":
        raise ConfigurationError(
            what,
            because="in capitals, bits and bytes look the same",
            do="write Mbit/s for bits, or MB/s for bytes",
        )
    bits = 1 if of == "b" or of.lower().startswith("bit") else 8
    base = 1024 if prefix.lower().endswith("i") else 1000
    scale = bits * base ** " kmgtp".index((prefix or " ")[0].lower())
    return _above_zero(what, number * scale, "nothing would ever arrive")


def parse_duration(text: str) -> float:
    """Seconds.

    Args:
        text: a number above 0 and ns, us, ms, s, min, h or d.

    Raises:
        ConfigurationError: no number, no or another unit, or a duration that is not above 0.

    >>> parse_duration("50ms"), parse_duration("1.2 h")
    (0.05, 4320.0)
    """
    what = f"read the duration {text!r}"
    return _above_zero(what, _read(what, text, _DURATIONS), "everything takes some time")


def parse_latency(text: str) -> float:
    """Seconds from 0 up; 0 needs no unit.

    Args:
        text: a number that is not negative and ns, us, ms, s, min, h or d.

    Raises:
        ConfigurationError: no number, no or another unit, or a latency below 0.

    >>> parse_latency("0"), parse_latency("80 ms")
    (0.0, 0.08)
    """
    what = f"read the latency {text!r}"
    if text.strip() == "0":
        return 0.0
    seconds = _float(what, _read(what, text, _DURATIONS))
    if seconds < 0:
        raise ConfigurationError(
            what, because="a duration cannot be negative", do="write a duration from 0 up"
        )
    return seconds


def parse_count(text: str) -> int:
    """A number of parameters, layers, tokens, ...

    Args:
        text: a number above 0, alone or with k, M, B or T (a thousand, 1e6, 1e9, 1e12), in capitals
            or not.

    Raises:
        ConfigurationError: no number, another unit, or no whole number above 0.

    >>> parse_count("7B"), parse_count("350m"), parse_count("1e9")
    (7000000000, 350000000, 1000000000)
    """
    what = f"read the count {text!r}"
    number = _read(what, text, _COUNTS)
    _above_zero(what, number, "at least one is needed")
    if number.denominator != 1:
        raise ConfigurationError(
            what,
            because="it is not a whole number",
            do="write a whole number, such as 350M or 1.2T",
        )
    return number.numerator


def parse_share(text: str) -> float:
    """A share of a whole.

    Args:
        text: a number above 0 and up to 1, or up to 100 with %.

    Raises:
        ConfigurationError: no number, another unit, or no such share.

    >>> parse_share("90%"), parse_share("0.4")
    (0.9, 0.4)
    """
    what = f"read the share {text!r}"
    share = _float(what, _read(what, text, _SHARES))
    if not 0 < share <= 1:
        raise ConfigurationError(
            what,
            because="a share is above 0 % and at most 100 %",
            do="write it like 90% or 0.9",
        )
    return share


def parse_price(text: str) -> tuple[float, str | None]:
    """A price from 0 up, and its currency; None for 0, which is the same in every one.

    Args:
        text: a number that is not negative, with a code of three letters before or after it, or
            after $, € or £.

    Raises:
        ConfigurationError: no number, no currency, or a price below 0.

    >>> parse_price("$0.09"), parse_price("2.50 EUR"), parse_price("0")
    ((0.09, 'USD'), (2.5, 'EUR'), (0.0, None))
    """
    what, do = f"read the price {text!r}", "write a number and a currency, such as 0.09USD or $0.09"
    found = _PRICE.fullmatch(text.strip())
    if found is None:
        raise ConfigurationError(what, because="it is not a number with a currency", do=do)
    before, number, after = found.groups()
    price = _float(what, _read(what, number, {"1": ("",)}))
    if price < 0:
        raise ConfigurationError(
            what, because="a price cannot be negative", do="write a price from 0 up"
        )
    if bool(before) == bool(after):
        if not before and price == 0:
            return price, None
        because = "it has two currencies" if before else "it has no currency"
        raise ConfigurationError(what, because=because, do=do)
    code = before or after
    return price, _SIGNS.get(code, code.upper())


def _read(what: str, text: str, units: _Units) -> Fraction:
    """The number that `text` is, in the unit whose scale is 1."""
    from fractions import Fraction

    shown = tuple(names[0] for names in units.values())
    number, unit = _split(what, text, shown)
    for scale, names in units.items():
        if unit.lower() in (name.lower() for name in names):
            return number * Fraction(scale)
    raise _unknown_unit(what, unit, shown)


def _split(what: str, text: str, shown: Sequence[str]) -> tuple[Fraction, str]:
    """The number at the start of `text`, and the unit after it without any spaces."""
    from fractions import Fraction

    found = _NUMBER.fullmatch(text)
    try:
        if found is not None:
            return Fraction(found[1]), "".join(found[2].split())
    except ValueError:
        pass  # underscores where no number has them
    because = "it does not begin with a finite number"
    raise ConfigurationError(what, because=because, do=_write_like(shown))


def _unknown_unit(what: str, unit: str, shown: Sequence[str]) -> ThinwireError:
    because = f"there is no unit {unit!r}" if unit else "it has no unit"
    return unknown_name(what, unit, shown, because=because, do=_write_like(shown))


def _write_like(shown: Sequence[str]) -> str:
    return f"write a number and its unit: {', '.join(unit or 'none' for unit in shown)}"


def _above_zero(what: str, number: Fraction, because: str) -> float:
    value = _float(what, number)
    if value <= 0:
        raise ConfigurationError(what, because=because, do="write a number above 0")
    return value


def _float(what: str, number: Fraction) -> float:
    try:
        return float(number)
    except OverflowError as error:
        raise ConfigurationError(
            what, because="it is too large a number", do="write a smaller number"
        ) from error


# -- printing: all raise ConfigurationError for what is negative or not finite ---------------------


def rate_text(bits_per_s: float) -> str:
    """A rate in three digits.

    >>> rate_text(25e6), rate_text(999.6e6), rate_text(0)
    ('25 Mbit/s', '1 Gbit/s', '0 bit/s')
    """
    units = _powers(" bit/s", " kbit/s", " Mbit/s", " Gbit/s", " Tbit/s")
    return _text("a rate", bits_per_s, units)


def duration_text(seconds: float) -> str:
    """A duration in three digits.

    >>> duration_text(0.05), duration_text(90), duration_text(86_390)
    ('50 ms', '1.5 min', '1 d')
    """
    units = {float(scale): f" {names[0]}" for scale, names in _DURATIONS.items()}
    return _text("a duration", seconds, units) if seconds else "0 s"


def count_text(count: float) -> str:
    """A whole number in three digits.

    >>> count_text(7_000_000_000), count_text(246_336), count_text(12)
    ('7B', '246k', '12')
    """
    whole = round(count) if math.isfinite(count) else count
    return _text("a count", whole, _powers("", "k", "M", "B", "T"))


def nbytes_text(nbytes: float) -> str:
    """Bytes in three digits.

    >>> nbytes_text(1234), nbytes_text(5.6e9)
    ('1.23 kB', '5.6 GB')
    """
    return _text("bytes", nbytes, _powers(" B", " kB", " MB", " GB", " TB", " PB"))


def _powers(*units: str) -> dict[float, str]:
    return {1000.0**power: unit for power, unit in enumerate(units)}


def _text(what: str, value: float, units: Mapping[float, str]) -> str:
    """`value` in three digits and the largest of `units` of which there is one."""
    if not 0 <= value < math.inf:
        raise ConfigurationError(
            f"print {value} as {what}",
            because="it is negative or not finite",
            do="say in words what it means",
        )
    digits, scale = _rounded(value, units)
    # Rounded up, it may be one of the next unit.
    while (again := _rounded(digits * scale, units))[1] != scale:
        digits, scale = again
    return f"{digits:g}{units[scale]}"


def _rounded(value: float, units: Mapping[float, str]) -> tuple[float, float]:
    """Three digits of `value`, and the unit that they are in."""
    for scale in sorted(units, reverse=True):
        digits = float(f"{value / scale:.3g}")
        if digits >= 1 or scale == min(units):
            return digits, scale
    raise AssertionError("there is a smallest unit")
