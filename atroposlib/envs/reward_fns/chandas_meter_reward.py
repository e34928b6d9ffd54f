"""Sanskrit metre: light and heavy syllables where a metre wants them."""

import re
import unicodedata
from typing import Any

from atroposlib.envs.reward_fns.registry import registry
from atroposlib.envs.reward_fns.reward_function import RewardFunction

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
VOWEL = re.compile(r"ai|au|[aāiīuūṛṝḷeo]")
LONG = {"ā", "ī", "ū", "ṝ", "e", "o", "ai", "au"}
# Written with two letters, said as one sound.
ASPIRATES = re.compile(r"([kgcjṭḍtdpb])h")


@registry.register
class ChandasMeterReward(RewardFunction):
    """The mean share of a line's syllables, in IAST, that are as `meter` wants them, counted against the longer of the two."""

    def __init__(self, meter: str = "tristubh", weight: float = 1.0, **kwargs: Any) -> None:
        super().__init__(weight, **kwargs)
        if meter not in METRES:
            raise ValueError(f"meter {meter!r} is not known; choose one of: {', '.join(METRES)}")
        self.meter = meter

    def compute(self, completions: list[Any], **kwargs: Any) -> list[float]:
        return [self._score(self.get_content(completion)) for completion in completions]

    def _score(self, text: str) -> float:
        quarters = [syllables(line) for line in re.split(r"[\n|।॥]+", text) if VOWEL.search(line.lower())]
        wanted = METRES[self.meter]
        shares = [
            sum(want in (".", got) for want, got in zip(wanted, quarter, strict=False)) / max(len(wanted), len(quarter))
            for quarter in quarters
        ]
        return sum(shares) / len(shares) if shares else 0.0


def syllables(line: str) -> str:
    """L or G a syllable: heavy with a long vowel, before ṃ or ḥ, or before two consonants."""
    text = "".join(letter for letter in unicodedata.normalize("NFC", line.lower()) if letter.isalpha())
    text = ASPIRATES.sub(r"\1", text)
    vowels = list(VOWEL.finditer(text))
    ends = [vowel.start() for vowel in vowels[1:]] + [len(text)]
    weights = []
    for vowel, end in zip(vowels, ends, strict=True):
        consonants = text[vowel.end() : end]
        heavy = vowel[0] in LONG or consonants[:1] in ("ṃ", "ḥ", "ṁ") or len(consonants) > 1
        weights.append("G" if heavy else "L")
    return "".join(weights)
