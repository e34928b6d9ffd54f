"""The answer that a text gives, by three conventions; None where it gives none."""

import re

BOXED = "\\boxed{"
# 12, -3, 1,234 and 0.5. A hyphen after a digit or letter is a dash, not a sign: "3-4" ends with 4.
NUMBER = re.compile(r"(?:(?<![\w.)])-)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")


def last_number(text: str) -> str | None:
    """The last number in `text`, without thousands separators: "6 + 1,234 = 1,240." gives "1240"."""
    found = NUMBER.findall(text)
    return found[-1].replace(",", "") if found else None


def extract_boxed(text: str) -> str | None:
    r"""What stands in the last closed \boxed{...} of `text`, braces balanced, blanks stripped; None when that is nothing."""
    start = text.rfind(BOXED)
    while start >= 0:
        content = _up_to_closing_brace(text, start + len(BOXED))
        if content is not None:
            return content.strip() or None
        start = text.rfind(BOXED, 0, start)
    return None


def extract_tagged(text: str, tag: str = "answer") -> str | None:
    """What stands in the last closed <tag>...</tag> of `text`, blanks stripped; None when that is nothing."""
    before, closed, _ = text.rpartition(f"</{tag}>")
    _, opened, content = before.rpartition(f"<{tag}>")
    return content.strip() or None if closed and opened else None


def _up_to_closing_brace(text: str, start: int) -> str | None:
    depth = 1
    position = start
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 2
            continue
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[start:position]
        position += 1
    return None
