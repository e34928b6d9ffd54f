r"""Rewrites an answer in the one spelling that numbers and mathematics have here, before anything compares it.

`normal_form` takes away what carries no value (invisible characters, emphasis, quotes, a full stop behind the answer)
and spells what does in ASCII and LaTeX: "**１８．**" is "18", "3²" is "3^{2}", "√2" is "\sqrt{2}", "x ≤ 3" is
"x \le 3". Texts are a model's: nothing here raises, and each function takes time linear in the length.
"""

import re
import unicodedata

from atroposlib.grading.extraction import is_balanced

SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿ", "0123456789+-()n")
SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉₊₋₍₎", "0123456789+-()")
SYMBOLS = str.maketrans(
    {
        **dict.fromkeys("\u2212\uff0d\ufe63", "-"),
        **dict.fromkeys("×✕✖", r"\times "),
        **dict.fromkeys("·⋅∙", r"\cdot "),
        **dict.fromkeys("÷", r"\div "),
        **dict.fromkeys("\u2044\u2215", "/"),
        **dict.fromkeys("≤⩽≦", r"\le "),
        **dict.fromkeys("≥⩾≧", r"\ge "),
        **dict.fromkeys("∶\ufe55", ":"),
        **dict.fromkeys("\u066c", ","),
        **dict.fromkeys("\u066b", "."),
        **dict.fromkeys("“”„«»", '"'),
        **dict.fromkeys("‘’‚`´", "'"),
        "≠": r"\ne ",
        "≈": r"\approx ",
        "≃": r"\approx ",
        "∞": r"\infty ",
        "∈": r"\in ",
        "∪": r"\cup ",
        "∩": r"\cap ",
        "∖": r"\setminus ",
        "∅": r"\emptyset ",
        "±": r"\pm ",
        "°": r"^\circ ",
        "º": r"^\circ ",
        "˚": r"^\circ ",
        "∨": " or ",
        "∧": " and ",
        "ℝ": r"\mathbb{R}",
        "ℤ": r"\mathbb{Z}",
        "…": r"\ldots ",
        "、": ", ",
        "。": ".",
        "π": r"\pi ",
        "θ": r"\theta ",
        "α": r"\alpha ",
        "β": r"\beta ",
        "φ": r"\phi ",
        "λ": r"\lambda ",
    }
)
SUPERSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿ]+")
SUBSCRIPT = re.compile("[₀₁₂₃₄₅₆₇₈₉₊₋₍₎]+")
ROOTS = {"√": r"\sqrt", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]"}
ROOT = re.compile(r"([√∛∜])\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+(?:\.\d+)?|[A-Za-z]|\\pi))?")
OVERLINED = re.compile("((?:\\d\u0305)+)")
# 2**3, x ** -1 and 2**(1/2), but neither the marks around the bold 8 in "2 **8**" nor a tower of powers.
POWER = re.compile(
    r"(?<=[\w)}\]])\s*\\?\*\\?\*\s*(?:\{([^{}]*)\}|([-+]?(?:\d+(?:\.\d+)?|[A-Za-z](?![A-Za-z])|\([^()]*\))))"
    r"(?!\.?\d|\s*\\?\*\\?\*)"
)
LATEX_SPELLINGS = (
    (re.compile(r"\\(?:left|right|[bB]ig+[lr]?)(?![A-Za-z])\s*\.?(?=[()\[\]{}|\\.])"), ""),
    (re.compile(r"\\(?:d|t|c)frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\(?:displaystyle|textstyle|[lL]arge|LARGE|[hH]uge|normalsize|small|bf|rm|it)(?![A-Za-z])"), ""),
    (re.compile(r"\\(?:leqslant|leqq|leq|le)(?![A-Za-z])|<=|=<"), r"\\le "),
    (re.compile(r"\\(?:geqslant|geqq|geq|ge)(?![A-Za-z])|>=|=>"), r"\\ge "),
    (re.compile(r"\\(?:neq|ne|not\s*=)(?![A-Za-z])|!=|<>"), r"\\ne "),
    (re.compile(r"\\lt(?![A-Za-z])"), "<"),
    (re.compile(r"\\gt(?![A-Za-z])"), ">"),
    (re.compile(r"\\(?:thickapprox|approxeq|approx|simeq|doteq)(?![A-Za-z])"), r"\\approx "),
    (re.compile(r"\\(?:varnothing|O(?=\s*\Z))(?![A-Za-z])|\\\{\s*\\\}"), r"\\emptyset "),
    (re.compile(r"\\(?:lor|vee)(?![A-Za-z])"), " or "),
    (re.compile(r"\\(?:land|wedge)(?![A-Za-z])"), " and "),
    (
        re.compile(r"\\(?:text|mathrm|mbox|operatorname|mathit|mathsf)\s*(?:\{\s*([ei])\s*\}|([ei])(?![A-Za-z]))"),
        r"\1\2 ",
    ),
    (re.compile(r"\\(?:Bbb|mathbf)\s*\{?\s*([RZ])\s*\}?"), r"\\mathbb{\1}"),
    (re.compile(r"\\(?:dots|cdots|dotsc|ldots)(?![A-Za-z])|\.{3,}"), r"\\ldots "),
    (re.compile(r"\\(?:deg|degree|textdegree)(?![A-Za-z])|\^\s*\{?\s*\\circ\s*\}?"), r"^\\circ "),
    (re.compile(r"\\(?:euro|EUR)(?![A-Za-z])(?:\{\})?"), "€"),
    (re.compile(r"\\pounds(?![A-Za-z])|\\textsterling(?![A-Za-z])"), "£"),
    (
        re.compile(r"\\(?:mathbf|boldsymbol|bm|underline|textbf|mathit|emph|textit|mathrm)\s*\{\s*([-+\d.,\s]+)\}"),
        r"\1",
    ),
    (re.compile(r"(?<![A-Za-z\\])sqrt\s*\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"\\sqrt\s*\(([^()]*)\)"), r"\\sqrt{\1}"),
    (POWER, r"^{\1\2}"),
    (re.compile(r"(?<=\d)\s*[xX\*]\s*(?=10\s*\^)"), r" \\times "),
    (re.compile(r"(?<=\d)\s*\\?\*\s*(?=[\d(\\])(?!\\?\*)"), r" \\times "),
    (re.compile(r"\\tbinom|\\dbinom"), r"\\binom"),
)
DELIMITED = re.compile(r"\\\((.*)\\\)|\\\[(.*)\\\]|\$\$(.*)\$\$|\$([^$]*[^$\\])\$", re.DOTALL)
INLINE = re.compile(r"(?<!\\)\$([^$]*[^$\\])\$")
EMPHASIS = re.compile(r"(\*\*\*|\*\*|\*|___|__|_|'{1,3}|\"|~~)(?![*_\s])(.*\S)\s*\1", re.DOTALL)
GROUPED = re.compile(r"(?<![\d.,])([1-9]\d{0,2})((?:(?:\\[,;: ]|~|\{,\}|['_ ])\s*\d{3})+)(?![\d'_]|\s*/|\s*\\frac)")
GROUP_MARK = re.compile(r"\\[,;: ]|\{,\}|[\s~'_]")
AROUND = re.compile(r"\\(?:text[a-z]*|math[a-z]{2}|mbox|underline|boldsymbol|bm)\s*\{(.*\d.*)\}", re.DOTALL)
SPACES = re.compile(r"(?<!\\)\\(?:[,;: ]|quad(?![A-Za-z])|qquad(?![A-Za-z]))|~|\{,\}|[\t\n\r\f\v]+")
BEHIND = ".,;:"


def normal_form(text: str) -> str:
    """Return `text` without decoration, in ASCII and LaTeX. What it does not know stays as it is."""
    text = _undecorated(_in_ascii(text).replace(r"\!", ""))
    text = INLINE.sub(r" \1 ", text)
    for pattern, replacement in LATEX_SPELLINGS:
        text = pattern.sub(replacement, text)
    text = GROUPED.sub(lambda match: match[1] + GROUP_MARK.sub("", match[2]), text)
    text = SPACES.sub(lambda match: "," if match[0] == "{,}" else " ", text)
    return " ".join(_undecorated(text).split())


def _in_ascii(text: str) -> str:
    text = "".join(char for char in text if unicodedata.category(char) != "Cf" and not 0xFE00 <= ord(char) <= 0xFE0F)
    text = OVERLINED.sub(lambda match: rf"\overline{{{match[1].replace(chr(0x305), '')}}}", text)
    text = SUPERSCRIPT.sub(lambda match: f"^{{{match[0].translate(SUPERSCRIPTS)}}}", text)
    text = SUBSCRIPT.sub(lambda match: f"_{{{match[0].translate(SUBSCRIPTS)}}}", text)
    text = ROOT.sub(_root, text)
    text = text.translate(SYMBOLS)
    return "".join(_ascii_char(char) for char in text)


def _root(match: re.Match[str]) -> str:
    under = match[2] or match[3] or match[4]
    return f"{ROOTS[match[1]]}{{{under}}}" if under else ROOTS[match[1]] + " "


def _ascii_char(char: str) -> str:
    """A digit of any script as its digit, a fraction as \frac, a blank of any width as a blank, full-width forms."""
    if char.isascii():
        return char
    if (digit := unicodedata.decimal(char, None)) is not None:
        return str(digit)
    plain = unicodedata.normalize("NFKC", char)
    above, slash, below = plain.partition("\u2044")
    if slash and above.isdecimal() and below.isdecimal():
        return rf" \frac{{{above}}}{{{below}}}"
    if plain.isspace():
        return " "
    return plain if plain.isascii() and len(plain) == 1 else char


def _undecorated(text: str) -> str:
    """Without what stands around the whole of it: math delimiters, emphasis, quotes, and marks behind it."""
    for _ in range(4):  # such as **$18$.**
        before = text
        text = text.strip()
        if match := DELIMITED.fullmatch(text):
            text = next(part for part in match.groups() if part is not None)
        if match := EMPHASIS.fullmatch(text):
            text = match[2]
        if (match := AROUND.fullmatch(text)) and is_balanced(match[1]):
            text = match[1]
        if not text.endswith((r"\,", r"\;", r"\:", "...")):
            text = text.rstrip(BEHIND)
        text = text.removesuffix("\\").strip()
        if text == before:
            break
    if len(text) > 1 and text[0] == "–" and (text[1].isdigit() or text[1] in "$€£¥\\."):
        text = "-" + text[1:]
    return text
