r"""Reads numbers of another base: 1011_2, 1011_{\text{two}}, FF_{16}."""

import re

BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10}
BASES |= {"eleven": 11, "twelve": 12, "sixteen": 16}
NUMERAL = re.compile(
    r"(?<![\w\\.}])(?:(?P<digits>[0-9A-F]+)|\(\s*(?P<inside>[0-9A-F]+)\s*\))\s*_\s*"
    r"(?:\{\s*(?:\\[a-z]+\s*\{\s*)?(?P<base>\d{1,2}|[a-z]+)\s*\}?\s*\}|(?P<short>\d{1,2}|[a-z]{3,}))(?![\w.])"
)

INDEXED = re.compile(r"(?<![\w\\])\d+\s*_")


def base_of(text: str) -> int | None:
    """The base of `text` if it is one numeral with its base, else None."""
    match = NUMERAL.fullmatch(text)
    return _base(match) if match and _value(match) is not None else None


def digits_of(text: str) -> str:
    """The digits of a numeral, without its base and leading zeros."""
    match = NUMERAL.fullmatch(text)
    return (match["digits"] or match["inside"]).lstrip("0") if match else text


def with_values(text: str) -> str:
    """Write each numeral in `text` in base ten, so that no reader drops its base."""
    return NUMERAL.sub(lambda match: match[0] if (value := _value(match)) is None else str(value), text)


def not_numerals(text: str) -> bool:
    """Return whether a number in `text` has an index that is not its base, as 18_8 and 18_a: a reader would drop it."""
    return INDEXED.search(with_values(text)) is not None


def _base(match: re.Match[str]) -> int | None:
    name = match["base"] or match["short"]
    base = int(name) if name.isdecimal() else BASES.get(name, 0)
    return base if 2 <= base <= 36 else None


def _value(match: re.Match[str]) -> int | None:
    base = _base(match)
    try:
        return None if base is None else int(match["digits"] or match["inside"], base)
    except ValueError:  # a digit that this base has not
        return None
