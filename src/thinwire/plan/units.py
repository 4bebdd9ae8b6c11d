"""Quantities as people write them: 10 Gbit/s, 50ms, 7B.

Capitals and spaces do not matter where they cannot mislead. They do for bits and bytes: b is a bit
and B is a byte, so that 100 Mbps are 12.5 MB/s. Printed are three significant digits, and what is
printed can be read again.
"""

import math
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Final

from thinwire.errors import ConfigurationError, check, unknown_name

# What is read -> scale -> spellings, of which the first is shown. Spellings of a rate: see _RATE.
_UNITS: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "rate": {
        f"{bits}e{3 * power}": (f"{prefix}{of}/s",)
        for bits, of in ((1, "bit"), (8, "B"))
        for power, prefix in enumerate(("", "k", "M", "G", "T"))
    },
    "duration": {
        "1e-9": ("ns",),
        "1e-6": ("us", "µs", "μs"),
        "1e-3": ("ms",),
        "1": ("s", "sec", "second", "seconds"),
        "60": ("min", "minute", "minutes"),
        "3600": ("h", "hr", "hour", "hours"),
        "86400": ("d", "day", "days"),
    },
    "count": {
        "1": ("",),
        "1e3": ("k", "thousand"),
        "1e6": ("M", "million"),
        "1e9": ("B", "bn", "billion"),
        "1e12": ("T", "trillion"),
    },
    "share": {"1e-2": ("%",), "1": ("",)},
    "price": {"1": ("",)},
}
_SIGNS: Final = {"$": "USD", "€": "EUR", "£": "GBP"}

_NUMBER = re.compile(r"\s*([+-]?(?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:e[+-]?\d{1,3})?)(.*)", re.I | re.S)
_PRICE = re.compile(r"([$€£]|[a-z]{3})?\s*([^a-z$€£\s]*\d[^a-z$€£\s]*)\s*([a-z]{3})?", re.I)
_RATE = re.compile(r"((?:[kmgtp]i?)?)(b|bits?|bytes?)(/s|ps|/sec|/second)", re.I)


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
    return _above_zero("rate", text, because="nothing would ever arrive")


def parse_duration(text: str) -> float:
    """Seconds.

    Args:
        text: a number above 0 and ns, us, ms, s, min, h or d.

    Raises:
        ConfigurationError: no number, no or another unit, or a duration that is not above 0.

    >>> parse_duration("50ms"), parse_duration("1.2 h")
    (0.05, 4320.0)
    """
    return _above_zero("duration", text, because="everything takes some time")


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
    seconds = 0.0 if text.strip() == "0" else _float(what, _read("duration", text, what))
    because, do = "a duration cannot be negative", "write a duration from 0 up"
    check(seconds >= 0, what, because=because, do=do)
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
    _above_zero("count", text, because="at least one is needed")
    what = f"read the count {text!r}"
    # Not the float, which has no room for all digits.
    number = _read("count", text, what)
    because, do = "it is not a whole number", "write a whole number, such as 350M or 1.2T"
    check(number.denominator == 1, what, because=because, do=do)
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
    share = _float(what, _read("share", text, what))
    because, do = "a share is above 0 % and at most 100 %", "write it like 90% or 0.9"
    check(0 < share <= 1, what, because=because, do=do)
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
    price, code = _float(what, _read("price", number, what)), before or after
    because = "a price cannot be negative"
    check(price >= 0, what, because=because, do="write a price from 0 up")
    if not code and price == 0:
        return price, None
    because = "it has two currencies" if before else "it has no currency"
    check(bool(before) != bool(after), what, because=because, do=do)
    return price, _SIGNS.get(code, code.upper())


def _above_zero(kind: str, text: str, *, because: str) -> float:
    what = f"read the {kind} {text!r}"
    value = _float(what, _read(kind, text, what))
    check(value > 0, what, because=because, do="write a number above 0")
    return value


def _read(kind: str, text: str, what: str) -> Fraction:
    """The number that `text` is, in the unit whose scale is 1."""
    found, units = _NUMBER.fullmatch(text), _UNITS[kind]
    shown = [names[0] for names in units.values()]
    do = f"write a number and its unit: {', '.join(unit or 'none' for unit in shown)}"
    try:
        number = None if found is None else Fraction(found[1])
    except ValueError:  # underscores where no number has them
        number = None
    if found is None or number is None:
        raise ConfigurationError(what, because="it does not begin with a finite number", do=do)
    unit = "".join(found[2].split())
    if kind == "rate" and (rate := _RATE.fullmatch(unit)):
        prefix, of, per = rate.groups()
        because, do = "in capitals, bits and bytes look the same", "write Mbit/s for bits, or MB/s"
        check(of + per != "BPS", what, because=because, do=f"{do} for bytes")
        base = 1024 if prefix.lower().endswith("i") else 1000
        bits = 1 if of == "b" or of.lower().startswith("bit") else 8
        return number * bits * base ** " kmgtp".index((prefix or " ")[0].lower())
    for scale, names in units.items():
        if kind != "rate" and unit.lower() in (name.lower() for name in names):
            return number * Fraction(scale)
    because = f"there is no unit {unit!r}" if unit else "it has no unit"
    raise unknown_name(what, unit, shown, because=because, do=do)


def _float(what: str, number: Fraction) -> float:
    try:
        return float(number)
    except OverflowError as error:
        because, do = "it is too large a number", "write a smaller number"
        raise ConfigurationError(what, because=because, do=do) from error


# -- printing: all raise ConfigurationError for what is negative or not finite ---------------------


def rate_text(bits_per_s: float) -> str:
    """A rate in three digits.

    >>> rate_text(25e6), rate_text(999.6e6), rate_text(0)
    ('25 Mbit/s', '1 Gbit/s', '0 bit/s')
    """
    return _text(
        "a rate", bits_per_s, _powers(" bit/s", " kbit/s", " Mbit/s", " Gbit/s", " Tbit/s")
    )


def duration_text(seconds: float) -> str:
    """A duration in three digits.

    >>> duration_text(0.05), duration_text(90), duration_text(86_390)
    ('50 ms', '1.5 min', '1 d')
    """
    units = {float(scale): f" {names[0]}" for scale, names in _UNITS["duration"].items()}
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


def share_text(share: float) -> str:
    """A share in percent, never rounded up to a whole that it is not.

    >>> share_text(0.98247), share_text(0.99999), share_text(1)
    ('98.2 %', '99.9 %', '100 %')
    """
    if share < 0.1:
        return f"{100 * share:.2g} %"
    return f"{math.floor(1000 * share + 1e-9) / 10:.3g} %"


def _powers(*units: str) -> dict[float, str]:
    return {1000.0**power: unit for power, unit in enumerate(units)}


def _text(what: str, value: float, units: Mapping[float, str]) -> str:
    """`value` in three digits and the largest of `units` of which there is one."""
    because, do = "it is negative or not finite", "say in words what it means"
    check(0 <= value < math.inf, f"print {value} as {what}", because=because, do=do)
    digits = {scale: float(f"{value / scale:.3g}") for scale in sorted(units, reverse=True)}
    scale = next((scale for scale, number in digits.items() if number >= 1), min(units))
    shown = digits[scale] * scale
    # Rounded up, it may be one of the next unit.
    if not math.isclose(shown, value, rel_tol=1e-12):
        return _text(what, shown, units)
    return f"{digits[scale]:g}{units[scale]}"
