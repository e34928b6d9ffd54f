"""Answers that a broken or scheming policy might give, for property tests of whatever reads them."""

import time
from collections.abc import Callable

from hypothesis import strategies as st

# Each is written once, and again and again.
FRAGMENTS = [
    *(
        "\\boxed{",
        "\\boxed{3}",
        "}",
        "{",
        "\\",
        "\\}",
        "<answer>",
        "</answer>",
        "<answer>3</answer>",
        "<think>",
        "</think>",
        "####",
    ),
    *(
        "<tool_call>",
        "</tool_call>",
        '{"name": "calculator", "arguments": {"expression": "',
        '"}}',
        "[",
        "(",
        ")",
        "[[",
        '{"a":',
    ),
    *(
        "1",
        "0",
        "000000003999",
        "9" * 400,
        "1e999",
        "-0",
        "1,",
        "1,234",
        "1/",
        "1/0",
        "/",
        "NaN",
        "inf",
        "-",
        "--",
        "=",
        "^",
        "!",
        "9^{9^{9}}",
    ),
    *(
        "٣",
        "³",
        "１８",
        "½",
        "−5",
        "\u200b",
        "\x00",
        "\x1b[2J",
        "\ud800",
        "\u0315\u0300",
        "\u0304\u0323",
        "\r",
        "\u2028",
        "à",
        "ﬁ",
        "ß",
    ),
    *(
        " ",
        "\n",
        "\n ",
        "\n\n ",
        "\t",
        ". ",
        "!",
        "?! ",
        "- ",
        "- \n",
        "step ",
        "1. A\n",
        "1 across ",
        "a|",
        "ā",
        "the ",
        "first ",
        "|",
        "$",
    ),
    *(
        " or ",
        "3 or 4",
        "3, 4",
        "3 = 4",
        "x=3 \\lor x=4",
        "\\frac{1}{2}",
        "\\text{3}",
        "3%",
        "\\pm 3",
        "[TOOL_CALLS]",
        "<|python_tag|>",
    ),
]
LONG_CHARS = 100_000
REPEATED = [
    *(
        "\\boxed{",
        "\\boxed{3}",
        "}",
        "\\",
        "<answer>",
        "<answer>3</answer>",
        "<think>",
        "<think>a</think>",
        "####",
        "<tool_call>",
        "[",
        "(",
    ),
    *(
        "1",
        "1,",
        "1,234",
        "1/",
        "-",
        "=",
        "!",
        "\u200b",
        "\x00",
        "\ud800",
        "\u0315\u0300",
        " ",
        "\n",
        "\n ",
        "?! ",
        "- \n",
        "1. A\n",
    ),
    *("1 across ", "a|", "ā", "the ", "$"),
]

hostile_answers = st.one_of(
    st.text(max_size=200),
    st.text(alphabet="0123456789+-*/().,=<>\\{}boxed answer/^e٣³ \n", max_size=200),
    st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join),
    st.lists(st.sampled_from(FRAGMENTS), max_size=6).map(lambda parts: f"<answer>{''.join(parts)}</answer>"),
    st.lists(st.sampled_from(FRAGMENTS), max_size=6).map(lambda parts: f"\\boxed{{{''.join(parts)}}}"),
    st.tuples(st.sampled_from(FRAGMENTS), st.integers(1, 3000)).map(lambda pair: pair[0] * pair[1]),
)


def long_answers() -> list[str]:
    """Fragments repeated to 100 kB, and a few answers of that length."""
    repeated = [fragment * (LONG_CHARS // len(fragment)) for fragment in REPEATED]
    digits = "1" * LONG_CHARS
    return [
        *repeated,
        f"<answer>{digits}</answer>",
        f"\\boxed{{{digits}}}",
        f"\\boxed{{{'(' * LONG_CHARS}}}",
        f"1 across{' ' * LONG_CHARS}",
    ]


def assert_linear(read: Callable[[str], object], text: str, rounds: int = 5) -> None:
    """The whole text takes at most 40 times what its first tenth takes, or less than 0.2 s of this process's time.

    Quadratic reading takes 100 times as long, in every round. One round that is fast enough will do, since others have
    the cores too: what is left to a busy core counts as this process's time.
    """
    if _seconds(read, text) < 0.2:
        return
    tenth = text[: len(text) // 10]
    ratios = []
    for _ in range(rounds):
        short, whole = _seconds(read, tenth), _seconds(read, text)
        if whole < max(0.2, 40 * short):
            return
        ratios.append(round(whole / short))
    raise AssertionError(f"{text[:40]!r}... is not read in linear time: {ratios} times its first tenth")


def _seconds(read: Callable[[str], object], text: str) -> float:
    start = time.process_time()
    read(text)
    return time.process_time() - start
