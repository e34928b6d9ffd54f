"""Tells whether the words behind a number are its unit, so that "18 miles per hour" is 18 and "18 or 19" is not."""

import re

MAGNITUDES = {
    **{"dozen": 12, "hundred": 100, "thousand": 10**3, "lakh": 10**5, "million": 10**6, "crore": 10**7},
    **{"dozens": 12, "hundreds": 100, "thousands": 10**3, "lakhs": 10**5, "millions": 10**6, "crores": 10**7},
    **{"billion": 10**9, "billions": 10**9, "trillion": 10**12, "trillions": 10**12, "bn": 10**9},
    **{"百": 100, "千": 10**3, "万": 10**4, "萬": 10**4, "亿": 10**8, "億": 10**8},
}
SHORT_MAGNITUDES = {"k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9}
UNITS = {
    name: names.split()[0]
    for names in (
        "m meter metre",
        "km kilometer kilometre",
        "cm centimeter centimetre",
        "mm millimeter millimetre",
        "inch in",
        "foot ft feet",
        "yard yd",
        "mile mi",
        "g gram gm",
        "kg kilogram kilo",
        "mg milligram",
        "lb",
        "ounce oz",
        "ton tonne",
        "liter litre l L",
        "ml milliliter millilitre mL",
        "gallon gal",
        "second sec s",
        "minute min",
        "hour hr h",
        "day",
        "week wk",
        "month",
        "year yr",
        "dollar USD usd $ buck",
        "cent ¢",
        "€ euro EUR eur",
        "¥ yen yuan JPY CNY RMB 元 円",
        "₹ rupee Rs INR",
        "degree deg",
        "radian rad",
        "mph",
        "kmh kph",
        "hectare ha",
        "acre",
    )
    for name in names.split()
}
SHORT_UNITS = frozenset("dl cl kB MB GB TB Hz kW kJ Pa mA kV ms us ns pm am sq cu pt qt pc pcs st nd rd th".split())
SMALL_WORDS = frozenset("of in a an at by on for to the per each and as is it we he up".split())
LETTERS = frozenset("mgshlL")
TEMPERATURES = frozenset("CFK")
VARIABLES = frozenset("xyz")  # no units in \text either
NOT_UNITS = frozenset(
    """or nor not plus minus over divided multiplied squared cubed factorial half halves third thirds quarter
    quarters score pi tau phi theta alpha beta gamma lambda root sqrt sin cos tan cot csc log ln exp mod gcd lcm
    infinity inf nan than if except but unless either neither maybe possibly perhaps wrong incorrect false no none
    undefined unknown remainder choose power raised base zero one two three four five six seven eight nine ten eleven
    twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen twenty thirty forty fifty sixty seventy
    eighty ninety""".split()
)
# Of other numbers: 3 fifths, 1 fifth of a mile, but not 3 fifth graders.
PART = re.compile(
    r"\b(?:four|fif|six|seven|eigh|nin|ten|eleven|twelf|thirteen|fourteen|fifteen|sixteen|seventeen|eighteen|nineteen"
    r"|(?:twen|thir|for|fif|six|seven|eigh|nine)tie|hundred|thousand|\w{1,6}illion)th(?:s\b|\s+of\b|\W*\Z)",
    re.IGNORECASE,
)
# And 3 quadrillion, 3 millones, 3 тысячи, 3 twofold, 3 basis points.
NUMBER_WORD = re.compile(
    r"(?:m|b|tr|quadr|quint|sext|sept|oct|non|dec)illi(?:on(?:s|en|es|i)?|ards|arden)|milliard|millones"
    r"|mil|mille|mio|lacs?|permille|tausend|hundert|myriads?|basis"
    r"|(?:doubl|tripl|quadrupl)ed|twice|thrice|(?:two|three|four|five|ten|hundred|thousand)fold"
    r"|.*(?:тысяч|миллион|миллиард|триллион|десят|сот[аы]|兆|分之|割|折).*"
)
QUOTIENT = re.compile(r"\\frac\s*\{([^{}\d]*)\}\s*\{([^{}]*)\}")
PIECE = re.compile(
    r"(?P<between>(?:\s|[/().\-']|\\cdot|\\,|\^\\circ)*)(?P<word>[^\W\d_]+)"
    r"(?P<power>\s*\^\s*(?:\{\s*-?\d\s*\}|-?\d)|(?<=[a-z])[23](?!\d))?"
)
REST = re.compile(r"(?:\s|[).']|\^\\circ)*")
POWER = re.compile(r"\^\s*(?:\{\s*(-?\d)\s*\}|(-?\d))|(?<=[a-z])([23])(?!\d)")
DEGREES = re.compile(r"\s*\^\s*\\circ")


def is_unit(text: str, any_letter: bool = False, attached_letter: bool = True) -> bool:
    """Return whether `text`, which follows a number, names what is counted or measured and says nothing of the number.

    A single letter is a unit if it is one of `LETTERS`, and with `any_letter` any. Without `attached_letter` one that
    touches the number is a variable. Two letters are a unit that is known: "18 xy" is a product.
    """
    degrees = DEGREES.match(text) is not None
    if PART.search(text):
        return False
    text = QUOTIENT.sub(r" \1/\2", text)
    position = 0
    words: list[tuple[str, bool, bool]] = []
    while piece := PIECE.match(text, position):
        compound = "/" in piece["between"] or piece["power"] is not None
        words.append((piece["word"], compound or bool(words), piece["between"] == "" and position == 0))
        position = piece.end()
    rest = REST.match(text, position)
    if rest is None or rest.end() != len(text) or text.count("(") != text.count(")"):
        return False
    several = len(words) > 1
    return all(
        _is_word_of_unit(word, several or compound, attached, any_letter, attached_letter)
        or (degrees and word in TEMPERATURES)
        for word, compound, attached in words
    )


def known_unit(text: str) -> str:
    """The one name of the unit that `text` names, with its power, as in cm^2; an empty text for one that is not in the
    table, or for several.
    """
    words = re.findall(r"[^\W\d_]+|[$€£¥₹¢]", text)
    if len(words) != 1:
        return ""
    power = POWER.search(text)
    for name in (words[0], words[0].lower(), words[0].lower().removesuffix("s"), words[0].lower().removesuffix("es")):
        if name in UNITS:
            return f"{UNITS[name]}^{next(filter(None, power.groups()))}" if power else UNITS[name]
    return ""


def are_other_units(known: str, given: str) -> bool:
    """Return whether an answer in the unit `given` is in another one than the known answer: 5 cm^2 is not 5 cm. Nothing
    is told by a unit that is not known, or a power that is left out.
    """
    (known, _, known_power), (given, _, power) = known.partition("^"), given.partition("^")
    return bool(known and given) and (known != given or power not in ("", known_power))


def _is_word_of_unit(word: str, compound: bool, attached: bool, any_letter: bool, attached_letter: bool) -> bool:
    small = word.casefold()
    if small in NOT_UNITS or small in MAGNITUDES or NUMBER_WORD.fullmatch(small):
        return False
    if not word.isascii():
        return True
    if len(word) == 1:
        if (any_letter and word not in VARIABLES) or (compound and word in "mgshlLNJWVAKCFd"):
            return True
        return (word in LETTERS and (attached_letter or not attached)) or (compound and small == "a")
    if known_unit(word) or word in SHORT_UNITS or small in SHORT_UNITS:
        return True
    if len(word) == 2:
        return compound and small in SMALL_WORDS
    return bool(set("aeiouy") & set(small)) and (len(word) > 3 or not attached)
