"""Quantities as people write them: 10 Gbit/s, 50ms, 7B.

Case and spaces do not matter, except that b is a bit and B is a byte: 100 Mbps is 12.5 MB/s.
Printed texts have three significant digits, and can be parsed again.
"""

import math
import re
import sys
from collections.abc import Mapping
from fractions import Fraction
from typing import Final

from thinwire.errors import ConfigurationError, check, unknown_name

_PREFIXES: Final = ("", "k", "M", "G", "T", "P")
# Kind -> scale -> spellings, of which the first is printed. Other spellings of a rate: see _RATE.
_UNITS: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "rate": {f"1e{3 * power}": (f"{_PREFIXES[power]}bit/s",) for power in range(5)},
    "size": {f"1e{3 * power}": (f"{_PREFIXES[power]}B",) for power in range(6)},
    "duration": {
        "1e-9": ("ns",),
        "1e-6": ("us", "µs", "μs"),
        "1e-3": ("ms",),
        "1": ("s", "sec", "second", "seconds"),
        "60": ("min", "minute", "minutes"),
        "3600": ("h", "hr", "hour", "hours"),
        "86400": ("d", "day", "days"),
    },
    "count": {"1": ("",), "1e3": ("k",), "1e6": ("M",), "1e9": ("B", "bn"), "1e12": ("T",)},
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
        text: a number above 0 and bit/s or B/s with or without a prefix, or bps, Mb/s, Mbps, MBps.
            A prefix with an i is a power of 1024.

    Raises:
        ConfigurationError: not a number, an unknown unit, or a rate that is not above 0.

    >>> parse_rate("10Gbit/s"), parse_rate("25 Mbps"), parse_rate("1GB/s")
    (10000000000.0, 25000000.0, 8000000000.0)
    """
    return float(_read("rate", text))


def parse_duration(text: str) -> float:
    """Seconds.

    Args:
        text: a number above 0 and ns, us, ms, s, min, h or d.

    Raises:
        ConfigurationError: not a number, an unknown unit, or a duration that is not above 0.

    >>> parse_duration("50ms"), parse_duration("1.2 h")
    (0.05, 4320.0)
    """
    return float(_read("duration", text))


def parse_latency(text: str) -> float:
    """Seconds from 0 up; 0 needs no unit.

    Args:
        text: a number that is not negative and ns, us, ms, s, min, h or d.

    Raises:
        ConfigurationError: not a number, an unknown unit, or a latency below 0.

    >>> parse_latency("0"), parse_latency("80 ms")
    (0.0, 0.08)
    """
    return 0.0 if text.strip() == "0" else float(_read("duration", text, may_be_zero=True))


def parse_count(text: str) -> int:
    """A number of parameters, layers, tokens, ...

    Args:
        text: a number above 0, alone or with k, M, B or T (a thousand, 1e6, 1e9, 1e12), in capitals
            or not.

    Raises:
        ConfigurationError: not a whole number above 0, or an unknown unit.

    >>> parse_count("7B"), parse_count("350m"), parse_count("1e9")
    (7000000000, 350000000, 1000000000)
    """
    number = _read("count", text)
    because, do = "it is not a whole number", "write a whole number, such as 350M or 1.2T"
    check(number.denominator == 1, f"read the count {text!r}", because=because, do=do)
    # From the fraction: a float has no room for all digits.
    return number.numerator


def parse_share(text: str) -> float:
    """A share of a whole.

    Args:
        text: a number above 0 and up to 1, or up to 100 with %.

    Raises:
        ConfigurationError: not such a share, or an unknown unit.

    >>> parse_share("90%"), parse_share("0.4")
    (0.9, 0.4)
    """
    share = float(_read("share", text))
    because, do = "a share is at most 100 %", "write it like 90% or 0.9"
    check(share <= 1, f"read the share {text!r}", because=because, do=do)
    return share


def parse_price(text: str) -> tuple[float, str | None]:
    """A price from 0 up, and its currency; None for 0, which needs none.

    Args:
        text: a number that is not negative, with a code of three letters before or after it, or
            after $, € or £.

    Raises:
        ConfigurationError: not a number, no currency or two, or a price below 0.

    >>> parse_price("$0.09"), parse_price("2.50 EUR"), parse_price("0")
    ((0.09, 'USD'), (2.5, 'EUR'), (0.0, None))
    """
    found = _PRICE.fullmatch(text.strip())
    what, do = f"read the price {text!r}", "write a number and a currency, such as 0.09USD or $0.09"
    if found is None:
        raise ConfigurationError(what, because="it is not a number with a currency", do=do)
    before, number, after = found.groups()
    price, code = float(_read("price", number, may_be_zero=True)), before or after
    if not code and price == 0:
        return price, None
    because = "it has two currencies" if before else "it has no currency"
    check(bool(before) != bool(after), what, because=because, do=do)
    return price, _SIGNS.get(code, code.upper())


def _read(kind: str, text: str, *, may_be_zero: bool = False) -> Fraction:
    """The number in `text`, in the unit whose scale is 1."""
    what, found = f"read the {kind} {text!r}", _NUMBER.fullmatch(text)
    digits, unit = found.groups() if found else ("", "")
    try:
        number = Fraction(digits)
    except ValueError as error:  # also underscores where no number has them
        because, do = "it does not begin with a finite number", _units_text(kind)
        raise ConfigurationError(what, because=because, do=do) from error
    number *= _scale(kind, "".join(unit.split()), what)
    because, do = "it is too large a number", "write a smaller number"
    check(number <= sys.float_info.max, what, because=because, do=do)
    because, do = "it is not above 0", "write a number above 0"
    if may_be_zero:
        because, do = "it is negative", "write a number from 0 up"
    is_in_range = float(number) > 0 or (may_be_zero and float(number) == 0)
    check(is_in_range, what, because=because, do=do)
    return number


def _scale(kind: str, unit: str, what: str) -> Fraction:
    if kind == "rate" and (rate := _RATE.fullmatch(unit)):
        prefix, of, per = rate.groups()
        because, do = "in capitals, bits and bytes look the same", "write Mbit/s for bits, or MB/s"
        check(of + per != "BPS", what, because=because, do=f"{do} for bytes")
        base = 1024 if prefix.lower().endswith("i") else 1000
        bits = 1 if of == "b" or of.lower().startswith("bit") else 8
        return Fraction(bits * base ** " kmgtp".index((prefix or " ")[0].lower()))
    for scale, names in _UNITS[kind].items():
        if kind != "rate" and unit.lower() in (name.lower() for name in names):
            return Fraction(scale)
    because = f"there is no unit {unit!r}" if unit else "it has no unit"
    known = (names[0] for names in _UNITS[kind].values())
    raise unknown_name(what, unit, known, because=because, do=_units_text(kind))


def _units_text(kind: str) -> str:
    shown = ", ".join(names[0] or "none" for names in _UNITS[kind].values())
    return f"write a number and its unit: {shown}"


# -- printing: all raise ConfigurationError for negative and non-finite values ---------------------


def rate_text(bits_per_s: float) -> str:
    """A rate in three digits.

    >>> rate_text(25e6), rate_text(999.6e6), rate_text(0)
    ('25 Mbit/s', '1 Gbit/s', '0 bit/s')
    """
    return _text("rate", bits_per_s)


def duration_text(seconds: float) -> str:
    """A duration in three digits.

    >>> duration_text(0.05), duration_text(90), duration_text(86_390)
    ('50 ms', '1.5 min', '1 d')
    """
    return _text("duration", seconds) if seconds else "0 s"


def count_text(count: float) -> str:
    """A whole number in three digits.

    >>> count_text(7_000_000_000), count_text(246_336), count_text(12)
    ('7B', '246k', '12')
    """
    return _text("count", round(count) if math.isfinite(count) else count).replace(" ", "")


def counted(number: int, what: str) -> str:
    """A number of things.

    >>> counted(1, "worker"), counted(0, "worker")
    ('1 worker', '0 workers')
    """
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def nbytes_text(nbytes: float) -> str:
    """Bytes in three digits.

    >>> nbytes_text(1234), nbytes_text(5.6e9)
    ('1.23 kB', '5.6 GB')
    """
    return _text("size", nbytes)


def times_text(fewer: float | None) -> str:
    """How many times fewer, in two digits below 10; "-" if there is nothing to compare.

    >>> times_text(1013.6), times_text(4.92), times_text(None)
    ('1,014', '4.9', '-')
    """
    if fewer is None:
        return "-"
    return f"{fewer:,.0f}" if fewer >= 9.95 else f"{fewer:.2g}"


def share_text(share: float) -> str:
    """A share in percent, never rounded up to 100 %.

    >>> share_text(0.98247), share_text(0.99999), share_text(1)
    ('98.2 %', '99.9 %', '100 %')
    """
    if share < 0.1:
        return f"{100 * share:.2g} %"
    return f"{math.floor(1000 * share + 1e-9) / 10:.3g} %"


def _text(kind: str, value: float) -> str:
    """`value` in three digits and the largest unit that it reaches."""
    because, do = "it is negative or not finite", "print a number from 0 up"
    check(0 <= value < math.inf, f"print {value} as a {kind}", because=because, do=do)
    units = {float(scale): names[0] for scale, names in _UNITS[kind].items()}
    digits = {scale: float(f"{value / scale:.3g}") for scale in sorted(units, reverse=True)}
    scale = next((scale for scale, number in digits.items() if number >= 1), min(units))
    shown = digits[scale] * scale
    # Rounding up may reach the next unit.
    if not math.isclose(shown, value, rel_tol=1e-12):
        return _text(kind, shown)
    return f"{digits[scale]:g} {units[scale]}"
