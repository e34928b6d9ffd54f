"""Sanskrit metre: light and heavy syllables where a metre wants them."""

import re
import unicodedata
from typing import Any

from atroposlib.compat.reward_fns.base_reward import BaseReward, register_reward

# Of one quarter verse: L a light syllable, G a heavy one, . either.
METRES = {
    "anustubh": "....LG..",
    "tristubh": "...........",
    "indravajra": "GGLGGLLGLGG",
    "upendravajra": "LGLGGLLGLGG",
    "vamsastha": "LGLGGLLGLGLG",
    "vasantatilaka": "GGLGLLLGLLGLGG",
    "malini": "LLLLLLGGGLGGLGG",
    "mandakranta": "GGGGLLLLLGGLGGLGG",
    "sardulavikridita": "GGGLLGLGLLLGGGLGGLG",
}
# A letter of IAST bears two marks at most; the order of thousands would cost quadratic time to normalise.
MANY_MARKS = re.compile(r"([\u0300-\u036f]{4})[\u0300-\u036f]+")
VOWEL = re.compile(r"ai|au|[aāiīuūṛṝḷeo]")
LONG = {"ā", "ī", "ū", "ṝ", "e", "o", "ai", "au"}
# Written with two letters, said as one sound.
ASPIRATES = re.compile(r"([kgcjṭḍtdpb])h")


@register_reward
class ChandasMeterReward(BaseReward):
    """0 to 1: the mean share of a line's syllables, in IAST, that are as `meter` wants them.

    The share is of the longer of the two, line and metre.
    """

    def __init__(self, meter: str = "tristubh", weight: float = 1.0, **kwargs: Any) -> None:
        super().__init__(weight, **kwargs)
        if meter not in METRES:
            raise ValueError(f"meter {meter!r} is not known; choose one of: {', '.join(METRES)}")
        self.meter = meter

    def score(self, completion: str, **kwargs: object) -> float:
        quarters = [quarter for quarter in map(syllables, re.split(r"[\n|।॥]+", completion)) if quarter]
        wanted = METRES[self.meter]
        shares = [
            sum(want in (".", got) for want, got in zip(wanted, quarter, strict=False)) / max(len(wanted), len(quarter))
            for quarter in quarters
        ]
        return sum(shares) / len(shares) if shares else 0.0


def syllables(line: str) -> str:
    """L or G a syllable: heavy with a long vowel, before ṃ or ḥ, or before two consonants."""
    known = (letter for letter in line.lower() if "\u0300" <= letter <= "\u036f" or not unicodedata.combining(letter))
    composed = unicodedata.normalize("NFC", MANY_MARKS.sub(r"\1", "".join(known)))  # a letter of IAST is one character
    text = ASPIRATES.sub(r"\1", "".join(letter for letter in composed if letter.isalpha()))
    vowels = list(VOWEL.finditer(text))
    ends = [vowel.start() for vowel in vowels[1:]] + [len(text)] * bool(vowels)
    weights = []
    for vowel, end in zip(vowels, ends, strict=True):
        consonants = text[vowel.end() : end]
        heavy = vowel[0] in LONG or consonants[:1] in ("ṃ", "ḥ", "ṁ") or len(consonants) > 1
        weights.append("G" if heavy else "L")
    return "".join(weights)
