"""Extracts the answer from a text by three conventions; None if there is none.

The texts are a model's: nothing here raises, and each function takes time linear in the length, whatever is written.
"""

import re
from collections import deque

BOXED = "\\boxed{"
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # or an escaped character, which is none
# 12, -3, -$3, 1,234, 0.5 and .5. A hyphen after a digit or letter is a dash, not a sign: "3-4" ends with 4. A dot after
# a word or what closes one ends a sentence: "at the end.5 apples" ends with 5.
NUMBER = re.compile(
    r"(?P<sign>(?<![\w.)])[-\u2212\u2013\uff0d][$€£]?)?"
    r"(?P<digits>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w.%)\]}\u2019\u201d])\.\d+)"
)
# What stands before digits that only end a longer number: 1e5, 1/5, 2^5, 2**5, 2^{-5}, 3.4.5, 1_000, 1'000.
LONGER = re.compile(r"\d(?:[eE][-+]?|[/._'\u2019\u2044\u2215\u066b\u2009\u202f][-+]?|(?:\^|\*\*)\{?[-+]?)\Z")


def last_number(text: str) -> str | None:
    """The last number in `text`, without thousands separators: "6 + 1,234 = 1,240." gives "1240".

    None when that is written in another way: 1e5, 1/5, 2^5, 2³, or in other digits than those of ASCII.
    """
    match = next(iter(deque(NUMBER.finditer(text), maxlen=1)), None)
    if match is None or not match["digits"].isascii() or text[match.end() : match.end() + 1].isnumeric():
        return None
    if LONGER.search(text, max(0, match.start() - 5), match.start()):
        return None
    digits = match["digits"].replace(",", "")
    return ("-" if match["sign"] else "") + ("0" if digits.startswith(".") else "") + digits


def extract_boxed(text: str) -> str | None:
    r"""Return what stands in the last closed \boxed{...} of `text`, braces balanced, blanks stripped; None when that is
    nothing.
    """
    end = len(text)
    while (start := text.rfind(BOXED, 0, end)) >= 0:
        # A box that is open where a later one begins stays open: that one's brace is never closed.
        content = _up_to_closing_brace(text, start + len(BOXED), end)
        if content is not None:
            return content.strip() or None
        end = start
    return None


def extract_tagged(text: str, tag: str = "answer") -> str | None:
    """Return what stands in the last closed <tag>...</tag> of `text`, blanks stripped; None when that is nothing."""
    before, closed, _ = text.rpartition(f"</{tag}>")
    _, opened, rest = before.rpartition(f"<{tag}>")
    content, _, _ = rest.partition(f"</{tag}>")
    return content.strip() or None if closed and opened else None


def with_thoughts_opened(text: str) -> str:
    """Return `text` with the <think> that the chat template of a reasoning model wrote at the end of the prompt: where
    </think> stands before any <think>.
    """
    opened, closed = text.find("<think>"), text.find("</think>")
    return f"<think>{text}" if closed >= 0 and not 0 <= opened < closed else text


def all_tagged(text: str, tag: str) -> list[str]:
    """Return what each closed <tag>...</tag> of `text` holds, from the left; opening tags inside are its content."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    contents: list[str] = []
    end = 0
    while (start := text.find(opening, end)) >= 0 and (end := text.find(closing, start + len(opening))) >= 0:
        contents.append(text[start + len(opening) : end])
    return contents


def is_balanced(text: str) -> bool:
    """Return whether each brace in `text` is closed in it, and none that was opened outside."""
    return _up_to_closing_brace(text + "}", 0, len(text) + 1) == text


def _up_to_closing_brace(text: str, start: int, end: int) -> str | None:
    depth = 1
    for brace in BRACE.finditer(text, start, end):
        depth += (brace[0] == "{") - (brace[0] == "}")
        if depth == 0:
            return text[start : brace.start()]
    return None


def after_thoughts(text: str) -> str | None:
    """Return what follows the thoughts in <think>, all of a text without any; None where the last ones have no end."""
    said = text.rpartition("</think>")[2]
    return None if "<think>" in said else said
