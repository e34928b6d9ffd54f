"""Compares two answers in normal form where that needs no algebra, and prepares the others for math-verify."""

import re

from atroposlib.grading.extraction import last_number
from atroposlib.grading.normal_form import normal_form
from atroposlib.grading.numerals import base_of, digits_of, not_numerals, with_values
from atroposlib.grading.quantity import ABOUT, CURRENCY_BEFORE, LEAD, WRAPPED, quantity, same_quantity, unwrapped
from atroposlib.grading.units import is_unit

WORDS = re.compile(r"[^\W\d_]+(?:[\s'-]+[^\W\d_]+)*")
WORD = re.compile(r"[^\W\d_]+")
CHOICE = re.compile(r"\(?\s*([A-Z])\s*[).]?")
REPLIES = frozenset({"yes", "no", "odd", "all"})
CLOCK = re.compile(r"(\d{1,2}):(\d{2})(?::(\d{2}))?(?:\s*([ap])\.?\s?m\.?)?", re.IGNORECASE)
RATIO = re.compile(r"[^:,;<>|=]+(?::[^:,;<>|=]+){2,}")
UNIT_BEHIND = re.compile(
    r"(?:(?<=[\d)}\]!])|(?<=\\pi(?![A-Za-z])))((?=[\sA-Za-z\\])(?:[A-Za-z\s/^{}.\\-]|(?<=\^)\d|(?<=\^\{)\d)+)\Z"
)
DOMAIN = re.compile(r"[A-Za-z]\s*\\in\s*(?:\\mathbb\{R\}|R)\s*[,:;]\s*(?=\S)")
SET_BUILDER = re.compile(r"\\\{\s*([A-Za-z])\s*(?:\\in\s*\\mathbb\{R\}\s*)?(?:\\mid|\\vert|\||:)\s*(.+?)\s*\\\}")
FUNCTION = re.compile(r"\\(?!text|math|mbox|frac)[A-Za-z]")


def at_once(gold: str, answer: str) -> bool | None:
    """Return whether `answer` equals `gold`, both in normal form, or None if only algebra can tell.

    Two quantities, two numerals with their bases, clock times, and words are compared here. A ratio of more than two
    parts, which algebra would take for a quotient, equals nothing but another one.
    """
    if (bases := _by_base(gold, answer)) is not None:
        return bases
    known = quantity(gold)
    if known is not None:
        read = quantity(_without_brackets(answer), as_answer=True)
        return None if read is None else same_quantity(known, read)
    if CLOCK.fullmatch(gold) and CLOCK.fullmatch(answer):
        return _clock(gold) == _clock(answer)
    if bool(_ratio(gold)) != bool(_ratio(answer)):
        return False
    return _by_words(unwrapped(gold), unwrapped(answer), said=WRAPPED.search(gold) is not None)


def last_number_is(text: str, known: str) -> bool:
    """Return whether the last number in `text` is the known one, however each is written: 12.50 is 12.5."""
    number = last_number(text)
    return number is not None and at_once(normal_form(known), number) is True


def mathematics(text: str) -> str:
    """Return `text`, which is in normal form, as math-verify reads it: a quantity as its value, numerals in base ten,
    a ratio of more than two parts as their tuple, and without currency and unit.
    """
    if (known := quantity(text)) is not None:
        return known.latex
    text = DOMAIN.sub("", with_values(text), count=1)
    if match := SET_BUILDER.fullmatch(text):
        text = match[2]
    for lead in (LEAD, ABOUT, CURRENCY_BEFORE):
        text = lead.sub("", text, count=1) if lead.match(text) else text
    text = text.removesuffix(r"\$").removesuffix("$").strip()
    number, pi, _ = text.rpartition(r"\pi")
    behind = UNIT_BEHIND.search(text, len(number + pi))
    if behind is not None and not FUNCTION.search(behind[1]):
        unit = unwrapped(behind[1])
        if unit and is_unit(unit, any_letter=WRAPPED.search(behind[1]) is not None):
            text = text[: behind.start()]
    parts = _ratio(text)
    return f"({','.join(parts)})" if parts else text


def _by_base(gold: str, answer: str) -> bool | None:
    """Compare numerals. Digits alone are read in the base that was asked for. Another base than that is wrong."""
    if not_numerals(answer):
        return False
    asked, given = base_of(gold), base_of(answer)
    if asked is None:
        return False if given not in (None, 10) and quantity(gold) is not None else None
    if given is not None:
        return with_values(gold) == with_values(answer)
    return digits_of(gold) == (answer.lstrip("0") or "0") if answer.isalnum() else None


def _without_brackets(text: str) -> str:
    r"""Without a pair around the whole: (18), [18], {18}."""
    pairs = (("(", ")"), ("[", "]"), ("{", "}"))
    return text[1:-1].strip() if len(text) > 2 and (text[0], text[-1]) in pairs else text


def _clock(text: str) -> tuple[int, ...]:
    match = CLOCK.fullmatch(text)
    assert match is not None
    seconds, half = int(match[3] or 0), match[4]
    return (int(match[1]), int(match[2]), seconds, *(() if not half else (half.lower() == "p",)))


def _ratio(text: str) -> list[str]:
    """The parts of a ratio of more than two, as in 3:4:5 and a:b:c = 3:4:5; none if `text` is no such ratio."""
    text = LEAD.sub("", text, count=1) if LEAD.match(text) else text
    text = _without_brackets(text.rpartition("=")[2].strip())
    return text.split(":") if RATIO.fullmatch(text) else []


def _by_words(gold: str, answer: str, said: bool) -> bool | None:
    r"""Compare words, whatever their case. A few letters may be a product of variables, where "xy" is "yx", unless they
    are in \text or an answer to a question.
    """
    if (known := CHOICE.fullmatch(gold)) and (read := CHOICE.fullmatch(answer)) and "(" in gold + answer:
        return known[1] == read[1]
    if not WORDS.fullmatch(gold):
        return None
    words = WORD.findall(gold.casefold())
    longest = max(len(word) for word in words)
    if longest > 3 or (said and longest > 1) or gold.casefold() in REPLIES:
        return words == WORD.findall(answer.casefold()) and not re.search(r"\d", answer)
    return None
