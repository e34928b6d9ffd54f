"""Answers that are right and wrong for a known one: a table of pairs, and ten thousand made ones whose truth is known
from how they were made.
"""

import asyncio
import json
import random
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest

from atroposlib.grading import Grader, Outcome
from atroposlib.grading.at_once import at_once
from atroposlib.grading.normal_form import normal_form

TABLE = Path(__file__).with_name("grading_pairs.jsonl")
MADE = 10_000
UNITS = ("km", "dollars", "apples", "years old", r"\text{ cm}^2", "m/s", "people", r"\text{ miles per hour}", "元", "°")
CURRENCIES = ("$", r"\$", "€", "£", "¥", "US$", "Rs. ")
WRAPPERS = (
    "{}.",
    "**{}**",
    "`{}`",
    "${}$",
    r"\({}\)",
    r"\text{{{}}}",
    r"\approx {}",
    "= {}",
    '"{}"',
    "\u200b{}",
    " {} ",
)


@pytest.mark.services
def test_table_of_answers() -> None:
    async def verdicts() -> list[str]:
        grader = Grader()
        found = []
        for line in TABLE.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            for right in (True, False):
                for answer in row["right" if right else "wrong"]:
                    outcome = await grader.grade(answer, row["known"])
                    if (outcome is Outcome.RIGHT) != right or outcome is Outcome.GRADER_FAILED:
                        found.append(f"{row['known']!r}: {answer!r} is {outcome}")
        await grader.close()
        return found

    assert asyncio.run(verdicts()) == []


def test_made_answers_are_right_however_they_are_written() -> None:
    chance = random.Random(31)
    for _ in range(MADE):
        value = made_value(chance)
        written = spelling(value, chance)
        assert at_once(normal_form(str(value)), normal_form(written)) is True, (str(value), written)


def test_made_answers_of_another_value_are_wrong() -> None:
    chance = random.Random(32)
    for _ in range(MADE):
        value = made_value(chance)
        other = chance.choice(
            [value + 1, value - 1, -value, value * 10, value / 10, value * 1000, value + Fraction(1, 8)]
        )
        if other == value:
            continue
        written = spelling(other, chance)
        assert at_once(normal_form(str(value)), normal_form(written)) is False, (str(value), written)


def test_answer_that_adds_another_number_is_wrong_or_no_quantity() -> None:
    chance = random.Random(33)
    for _ in range(MADE // 10):
        value = chance.randint(2, 2000)
        joint = chance.choice(
            [" or ", " and ", ", ", " vs ", "/", "-", " to ", "^", " + ", " times ", r" \text{ or } "]
        )
        written = spelling(Fraction(value), chance) + joint + str(value + chance.randint(1, 500))
        assert at_once(str(value), normal_form(written)) is not True, (value, written)


def made_value(chance: random.Random) -> Fraction:
    """An integer, a decimal or a fraction, of the sizes that word problems have."""
    kind = chance.randrange(3)
    if kind == 0:
        return Fraction(chance.randint(1, 10 ** chance.randint(1, 8)))
    if kind == 1:
        return Fraction(chance.randint(1, 10**6), 10 ** chance.randint(1, 3))
    return Fraction(chance.randint(1, 99), chance.randint(2, 40))


def spelling(value: Fraction, chance: random.Random) -> str:
    """One of the ways in which people write `value`."""
    sign, size = ("-" if value < 0 else ""), abs(value)
    ways = (
        whole_ways(size) if size.denominator == 1 else decimal_ways(size) if is_decimal(size) else fraction_ways(size)
    )
    text = chance.choice(ways)(chance)
    decoration = chance.randrange(4)
    if decoration == 0 and not text.endswith(("%", "million")):
        text = f"{sign}{text} {chance.choice(UNITS)}"
    elif decoration == 1 and text[0].isdecimal() and "/" not in text:
        text = sign + chance.choice(CURRENCIES) + text
    else:
        text = sign + text
    if chance.random() < 0.5:
        wrapper = chance.choice(WRAPPERS)
        if "$" not in text + wrapper or (wrapper == "${}$" and "$" not in text):
            text = wrapper.format(text)
    return text


def is_decimal(value: Fraction) -> bool:
    return value.denominator in {2**two * 5**five for two in range(10) for five in range(10)}


def grouped(digits: str, mark: str) -> str:
    head = len(digits) % 3 or 3
    return mark.join([digits[:head], *(digits[at : at + 3] for at in range(head, len(digits), 3))])


Way = Callable[[random.Random], str]


def whole_ways(value: Fraction) -> list[Way]:
    digits = str(value)
    ways: list[Way] = [
        lambda _: digits,
        lambda chance: grouped(digits, chance.choice([",", " ", r"\,", "{,}", "'", "\u202f", "\u00a0", "_"])),
        lambda _: digits + ".0",
        lambda _: digits.translate({ord(str(digit)): 0xFF10 + digit for digit in range(10)}),
        lambda chance: rf"\frac{{{value * 7}}}{{7}}",
        lambda _: f"{Decimal(digits):e}" if len(digits) > 1 else digits,
    ]
    if value % 10_000 == 0:
        ways.append(lambda _: f"{Decimal(digits) / 10**6} million")
    return ways


def decimal_ways(value: Fraction) -> list[Way]:
    text = str(Decimal(value.numerator) / Decimal(value.denominator))
    whole, _, decimals = text.partition(".")
    ways: list[Way] = [
        lambda _: text,
        lambda _: text + "0",
        lambda _: f"{grouped(whole, ',')}.{decimals}",
        lambda _: f"{value.numerator}/{value.denominator}",
        lambda _: rf"\dfrac{{{value.numerator}}}{{{value.denominator}}}",
    ]
    if len(decimals) != 3:
        ways.append(lambda _: f"{whole},{decimals}")
    return ways


def fraction_ways(value: Fraction) -> list[Way]:
    whole, rest = divmod(value.numerator, value.denominator)
    ways: list[Way] = [
        lambda _: f"{value.numerator}/{value.denominator}",
        lambda _: rf"\frac{{{value.numerator}}}{{{value.denominator}}}",
        lambda _: rf"\tfrac{{{value.numerator}}}{{{value.denominator}}}",
    ]
    if whole:
        ways += [
            lambda _: f"{whole} {rest}/{value.denominator}",
            lambda _: rf"{whole}\frac{{{rest}}}{{{value.denominator}}}",
        ]
    return ways
