r"""Reads a number as people write it, with its currency, magnitude word, percent sign and unit.

    €1,234.50      2 1/4 cups      15 \text{ million}      0.\overline{3}      18 \frac{\text{km}}{\text{h}}

`quantity` takes a text in normal form (`normal_form`) and returns its exact value, or None for anything else, such as
"18 or 19", "18x" and "3!". Most answers are compared here, exactly and without a child process.
"""

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction

from atroposlib.grading.units import MAGNITUDES, SHORT_MAGNITUDES, are_other_units, is_unit, known_unit

MAX_EXPONENT = 400  # of ten: what people write, and no number of a billion digits
DECIMALS_APART = Fraction(1, 2 * 10**6)  # half a unit of the sixth decimal, to which math-verify compares decimals
TINY_APART = Fraction(1, 1000)  # and, of values below a thousandth, at most this part of them

DIGITS = r"(?:[1-9]\d{0,2}(?:,\d{3})+(?![\d,])|\d+)"
DECIMAL = rf"(?:{DIGITS}(?:\.\d*)?|\.\d+)"
FRACTION = r"(?:\\frac\s*(?:\{\s*(\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))|(\d+)\s*/\s*(\d+))(?!\s*[\d/])"
SIGN = re.compile(r"[-+]?\s*")
MIXED = re.compile(rf"(\d+)(?:\s+and\s+|\s+(?=\d)|\s*(?=\\frac)){FRACTION}")
SIMPLE = re.compile(FRACTION)
QUOTIENT = re.compile(
    rf"({DECIMAL})\s*/\s*({DECIMAL})(?!\s*[\d/])|\\frac\s*\{{\s*({DECIMAL})\s*\}}\s*\{{\s*({DECIMAL})\s*\}}"
)
REPEATING = re.compile(r"(\d*)\.(\d*)(?:\\(?:overline|bar|dot)\s*(?:\{\s*(\d+)\s*\}|(\d))|\((\d+)\))")
ELLIPSIS = re.compile(r"(\d{0,20}\.\d{0,20}?)(\d{1,20}?)\2+(\d{0,20})\s*\\ldots")
POINTS = re.compile(r"([1-9]\d{0,2}(?:\.\d{3})+),(\d+)(?![\d,.])|([1-9]\d{0,2}(?:\.\d{3}){2,})(?![\d,.])")
DECIMAL_COMMA = re.compile(r"(?![1-9]\d{0,2},\d{3}(?!\d))(\d+),(\d+)(?![\d,.])")  # 1,234 is in thousands
PLAIN = re.compile(DECIMAL)
POWER_OF_TEN = re.compile(
    r"\s*(?:\\times|\\cdot)\s*10\s*\^\s*(?:\{\s*([-+]?\d+)\s*\}|([-+]?\d+))|[eE]([-+]?\d+)(?![\w.])"
)
WRAPPED = re.compile(
    r"\\(?:text[a-z]*|math[a-z]{2}|mbox|hbox|operatorname|underline|boldsymbol|bm)\s*\{((?:[^{}]|\{[^{}]*\})*)\}"
)
LEAD = re.compile(r"(?:(?:the\s+)?(?:final\s+)?answer(?:\s+is\b|\s*:|\s*=)|=|:)\s*", re.IGNORECASE)
ABOUT = re.compile(
    r"(?:\\approx|\\sim|~|≈|(?:about|approximately|approx\.?|around|roughly|circa|ca\.)(?=[\s\d]))\s*", re.I
)
CURRENCY_BEFORE = re.compile(r"(?:[A-Z]{0,3}\\?\$|(?:USD|EUR|GBP|JPY|CNY|INR|RMB|CHF|Rs\.?)(?=[\s\d]))\s*")
CURRENCY_BEHIND = re.compile(r"\s*(?:\\?\$|/-)")
PERCENT = re.compile(r"\s*(?:\\?%|(?:percent|per\s+cent|pct|percentage(?:\s+points?)?)(?![A-Za-z]))", re.IGNORECASE)
WORD = re.compile(r"\s*([万萬亿億](?=[^\W\d_])|[^\W\d_]+)")  # 18万元 is 180,000 yuan


@dataclass(frozen=True, slots=True)
class Quantity:
    """An exact value; whether it was written as a decimal, or in percent; and its unit, if that is a known one."""

    value: Fraction
    decimal: bool = False
    percent: bool = False
    unit: str = ""

    @property
    def latex(self) -> str:
        """The value as math-verify reads it."""
        sign = r"\%" if self.percent else ""
        if self.value.denominator == 1 and abs(self.value) < 10**40:
            return f"{self.value.numerator}{sign}"
        if not self.decimal:
            return rf"\frac{{{self.value.numerator}}}{{{self.value.denominator}}}{sign}"
        digits, _, exponent = f"{Decimal(self.value.numerator) / Decimal(self.value.denominator):e}".partition("e")
        if -10 < int(exponent) < 20:
            return f"{Decimal(self.value.numerator) / Decimal(self.value.denominator):f}{sign}"
        return rf"{digits} \times 10^{{{int(exponent)}}}{sign}"


def quantity(text: str, as_answer: bool = False) -> Quantity | None:
    """Read `text` as one number with its decoration; None if it is anything else.

    With `as_answer` also in what only an answer may be read: "0,5", which known answers mean as two, and "1.5k" and
    "18m", where known answers mean a variable.
    """
    wrapped = WRAPPED.search(text) is not None
    text = unwrapped(text)
    text = _cut(_cut(text, LEAD), ABOUT)
    sign = SIGN.match(text)
    assert sign is not None
    negative, text = sign[0].startswith("-"), text[sign.end() :]
    currency, text = _currency(text)
    if currency and text[:1] in ("-", "+"):
        negative, text = negative != (text[0] == "-"), text[1:].lstrip()
    number = _number(text, as_answer)
    if number is None:
        return None
    amount, text = number
    amount, text = _magnitude(amount, text, as_answer)
    rest = _unit(text, as_answer, wrapped)
    if rest is None:
        return None
    percent, unit = rest
    value = -amount.value if negative else amount.value
    return Quantity(value, amount.decimal, percent, "" if currency and unit else currency or unit)


def same_quantity(gold: Quantity, answer: Quantity) -> bool:
    """Return whether two quantities are equal: exactly, or to six decimals where one is a decimal.

    28% equals 28 and 0.28. Two known units must be the same.
    """
    if are_other_units(gold.unit, answer.unit):
        return False
    decimal = gold.decimal or answer.decimal
    if gold.percent == answer.percent:
        return _equal(gold.value, answer.value, decimal)
    percent, plain = (gold, answer) if gold.percent else (answer, gold)
    return any(_equal(value, plain.value, decimal) for value in (percent.value, percent.value / 100))


def unwrapped(text: str) -> str:
    r"""Return `text` without \text{...} and its relatives around words and numbers."""
    for _ in range(3):
        text, count = WRAPPED.subn(r" \1 ", text)
        if not count:
            break
    return " ".join(text.split())


def _equal(first: Fraction, second: Fraction, decimal: bool) -> bool:
    if first == second:
        return True
    if not decimal or not first or not second:
        return False
    apart, larger = abs(first - second), max(abs(first), abs(second))
    return apart <= DECIMALS_APART and apart <= TINY_APART * larger


def _cut(text: str, pattern: re.Pattern[str]) -> str:
    match = pattern.match(text)
    return text[match.end() :] if match else text


def _currency(text: str) -> tuple[str, str]:
    """The currency before a number, and the text behind it."""
    if text and unicodedata.category(text[0]) == "Sc" and text[0] != "$":
        return text[0], text[1:].lstrip()
    if match := CURRENCY_BEFORE.match(text):
        word = match[0].strip(" .")
        return known_unit(word) or ("dollar" if word.endswith("$") else word), text[match.end() :]
    return "", text


def _number(text: str, as_answer: bool) -> tuple[Quantity, str] | None:
    """The number at the start of `text`, and what follows; None if there is none."""
    if not text or (text[0] not in "\\." and not text[0].isdecimal()):
        return None
    for pattern, value in READERS:
        if (pattern is DECIMAL_COMMA and not as_answer) or (match := pattern.match(text)) is None:
            continue
        if (number := value(match)) is not None:
            return _times_power_of_ten(number, text[match.end() :])
    return None


def _times_power_of_ten(number: Quantity, text: str) -> tuple[Quantity, str] | None:
    power = POWER_OF_TEN.match(text)
    if power is None:
        return number, text
    exponent = int((power[1] or power[2] or power[3])[:6])
    if abs(exponent) > MAX_EXPONENT:
        return None
    scale = Fraction(10**exponent) if exponent >= 0 else Fraction(1, 10**-exponent)
    return replace(number, value=number.value * scale), text[power.end() :]


def _mixed(match: re.Match[str]) -> Quantity | None:
    """2 1/4: a fraction below one behind a whole number."""
    whole, *parts = (int(part) for part in match.groups() if part is not None)
    above, below = parts
    return Quantity(whole + Fraction(above, below)) if above < below else None


def _fraction(match: re.Match[str]) -> Quantity | None:
    above, below = (int(part) for part in match.groups() if part is not None)
    return Quantity(Fraction(above, below)) if below else None


def _quotient(match: re.Match[str]) -> Quantity | None:
    above, below = (_decimal(part) for part in match.groups() if part is not None)
    return Quantity(above / below, decimal="." in match[0]) if below else None


def _repeating(match: re.Match[str]) -> Quantity:
    return Quantity(_with_period(match[1], match[2], match[3] or match[4] or match[5]))


def _ellipsis(match: re.Match[str]) -> Quantity | None:
    """0.1666...: the shortest period that stands twice, and the beginning of a third."""
    whole, _, before = match[1].partition(".")
    return Quantity(_with_period(whole, before, match[2])) if match[2].startswith(match[3]) else None


def _points(match: re.Match[str]) -> Quantity:
    """1.234,5 and 1.234.567: points between groups of three digits."""
    whole = (match[1] or match[3]).replace(".", "")
    return Quantity(Fraction(f"{whole}.{match[2] or 0}"), decimal=bool(match[2]))


def _decimal_comma(match: re.Match[str]) -> Quantity:
    return Quantity(Fraction(f"{match[1]}.{match[2]}"), decimal=True)


def _plain(match: re.Match[str]) -> Quantity:
    return Quantity(_decimal(match[0]), decimal="." in match[0])


READERS: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], Quantity | None]], ...] = (
    (MIXED, _mixed),
    (SIMPLE, _fraction),
    (QUOTIENT, _quotient),
    (REPEATING, _repeating),
    (ELLIPSIS, _ellipsis),
    (POINTS, _points),
    (DECIMAL_COMMA, _decimal_comma),
    (PLAIN, _plain),
)


def _decimal(text: str) -> Fraction:
    whole, _, decimals = text.replace(",", "").partition(".")
    return Fraction(f"{whole or 0}.{decimals or 0}")


def _with_period(whole: str, before: str, period: str) -> Fraction:
    """The value of 0.1666... from its digits "0", "1" and "6"."""
    scale: int = 10 ** len(before)
    return Fraction(int(whole or 0)) + (int(before or 0) + Fraction(int(period), 10 ** len(period) - 1)) / scale


def _magnitude(number: Quantity, text: str, as_answer: bool) -> tuple[Quantity, str]:
    """The number times the magnitude words behind it, such as "million", and what follows them."""
    while match := WORD.match(text):
        factor = MAGNITUDES.get(match[1].casefold())
        if factor is None and as_answer and match.start(1) == 0:
            factor = SHORT_MAGNITUDES.get(match[1])
        if factor is None:
            break
        number, text = replace(number, value=number.value * factor), text[match.end() :]
    return number, text


def _unit(text: str, as_answer: bool, wrapped: bool) -> tuple[bool, str] | None:
    """Return whether the unit is percent, and its name if it is a known one; None if `text` is not a unit."""
    percent = PERCENT.match(text)
    if percent:
        text = text[percent.end() :]
    text = _cut(text, CURRENCY_BEHIND)
    symbol = text.strip()
    if symbol and unicodedata.category(symbol[0]) == "Sc":
        return percent is not None, known_unit(symbol) or symbol
    if not symbol:
        return percent is not None, ""
    if not is_unit(text, any_letter=wrapped, attached_letter=as_answer):
        return None
    return percent is not None, known_unit(symbol)
