r"""What a request may ask of structured outputs: nothing without the flag --structured-outputs, and then within bounds.

    any route ──▶ StructuredOutputsParams ──▶ refusal(): here, before any library reads the text ──▶ 400 with the limit
                                          └──▶ compiled in a child that is killed when late (http/limited_work.py)
                                          └──▶ vLLM's own validation, in the API process ──▶ engine

Training cannot replay a constrained sample, so the flag is for other uses of the server. vLLM validates in its API
process by libraries in C++, which recurse as deep as a pattern nests and write repetitions out: a request of 60 kB
ended the process, one of 41 bytes took all memory. A grammar also runs in the engine's own loop, where it holds up
everyone.

What is bounded is counted in plain text and plain JSON, without knowing which words a library heeds: it is refused
wherever it stands, also in a description.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

FLAG = "--structured-outputs"
MOST_CHARACTERS = 32_768  # of one request's constraint, keys and texts together
MOST_VALUES = 4_096  # in its JSON
MOST_NESTING = 32  # of its JSON, from the outermost value
MOST_BRACKETS = 256  # in one text, so that no pattern nests deeper
MOST_ALTERNATIVES = 512  # in one list, such as enum, anyOf, choice or required; and "|" in one text
MOST_PROPERTIES = 128  # in one object
MOST_REPETITION = 1_000  # minItems, maxLength, {n,m}, ...; also of repetitions inside each other, multiplied
MOST_CHOSEN_PROPERTIES = 16  # minProperties and maxProperties: their grammar grows with the product of both numbers
LARGEST_NUMBER = 2**53  # minimum, maximum, multipleOf, ...: what JSON's readers agree on

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag", "whitespace_pattern")
# each reads its text once, also where it does not match: what cannot be given back is possessive, and a literal that
# does not end is not tried again from the quotes that are escaped in it
COUNTED = re.compile(r"(?i)^(?:min|max)(?!imum)|count|repeat|times")
QUANTIFIER = re.compile(r"\{\s*+(\d*+)\s*+,?\s*+(\d*+)\s*+\}|~\s*+(\d++)(?:\s*+\.\.\s*+(\d++))?")
LITERAL = re.compile(
    r""""(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|\[(?:\\.|[^\]\\])*\]|/(?:\\.|[^/\\\n])+/\w*|#[^\n]*|//[^\n]*|\\["'/[\\]""",
    re.DOTALL,
)
RULE = re.compile(r"(?:^|(?<=[\s)\]*+?|;]))[?!]?([A-Za-z_][\w.-]*+)\s*+(?:\([^()]*+\)\s*+)?(?:::=|:(?!:))")
WORD = re.compile(r"[A-Za-z_][\w-]*")


def off(asked: Mapping[str, object]) -> str:
    """The refusal of a server without the flag, for whatever is asked."""
    return (
        f"structured outputs are off: this request constrains sampling by a grammar ({_shown(asked)}). Fields that do"
        " are structured_outputs, response_format other than text, tool_choice other than auto or none, strict tools"
        f" and parallel_tool_calls=false. Leave them out, or start the server with {FLAG}"
    )


def refusal(asked: Mapping[str, object]) -> str | None:
    """Explain why a server with the flag refuses what is asked, by the fields of vLLM's StructuredOutputsParams;
    None if it does not. Takes time and memory in proportion to the bounds, whatever is asked.
    """
    budget = MOST_CHARACTERS
    for kind in KINDS:
        value = asked.get(kind)
        if value is None:
            continue
        if isinstance(value, str) and len(value) > budget:
            return _over(kind, f"{len(value)} characters", f"{budget} characters")
        if kind in ("json", "structural_tag") and isinstance(value, str):
            if (why := _depth_refused(value)) is not None:
                return f"{kind}: {why}"
            try:
                value = json.loads(value)
            except ValueError as error:
                return f"{kind} is not JSON: {str(error)[:200]}"
        why = _value_refused(value, is_grammar=kind == "grammar")
        if why is None and kind == "choice" and isinstance(value, list):
            why = _text_refused("|".join(map(str, value)))  # vLLM writes one grammar of them
        if why is not None:
            return f"{kind}: {why}"
    return None


def _shown(asked: Mapping[str, object]) -> str:
    return ", ".join(kind for kind in KINDS if asked.get(kind) is not None) or "an empty constraint"


def _over(what: str, got: str, most: str) -> str:
    return f"{what} has {got}; structured outputs take at most {most}"


def _depth_refused(text: str) -> str | None:
    """JSON is not read before its nesting is known: readers recurse. Brackets in its texts count too."""
    depth = deepest = 0
    for bracket in re.finditer(r"[\[\]{}]", text):
        depth += 1 if bracket[0] in "[{" else -1
        deepest = max(deepest, depth)
    limit = MOST_NESTING + MOST_BRACKETS
    return _over("its JSON", f"{deepest} brackets inside each other", str(limit)) if deepest > limit else None


def _value_refused(value: object, is_grammar: bool = False) -> str | None:
    """Explain why a decoded value is refused, with all that is inside it."""
    characters = values = 0
    waiting: list[_Part] = [_Part("grammar" if is_grammar else "", value, 1, 1)]
    while waiting:
        part = waiting.pop()
        values += 1
        characters += len(part.value) if isinstance(part.value, str) else 0
        if values > MOST_VALUES:
            return _over("its JSON", f"more than {MOST_VALUES} values", f"{MOST_VALUES}")
        if part.depth > MOST_NESTING:
            return _over("its JSON", f"more than {MOST_NESTING} levels", f"{MOST_NESTING}")
        if characters > MOST_CHARACTERS:
            return _over("it", f"more than {MOST_CHARACTERS} characters", f"{MOST_CHARACTERS}")
        if (why := part.refused()) is not None:
            return why
        waiting += part.inside()
    return None


class _Part(NamedTuple):
    """A value at `depth` under `name`, as often as `repeated` by those that it is in."""

    name: str
    value: Any
    depth: int
    repeated: int

    def refused(self) -> str | None:
        match self.value:
            case str(text):
                why = _text_refused(text) or _inner_json_refused(self.name, text)
                return why or (_grammar_refused(text) if self.name == "grammar" else None)
            case Mapping():
                return _object_refused(self.value) or self._repetition_refused()
            case list() | tuple():
                return _many(f"the list {self.name[:40]!a}", len(self.value), MOST_ALTERNATIVES, "entries")
            case int() | float() if not -LARGEST_NUMBER <= self.value <= LARGEST_NUMBER:
                return _over(self.name[:40] or "it", "a number outside +-2**53", "numbers inside")
        return None

    def inside(self) -> list["_Part"]:
        below = self.depth + 1
        if isinstance(self.value, Mapping):
            repeated = self.repeated * self._own_repetition()
            keys = [_Part("", str(key), self.depth, 1) for key in self.value]
            return keys + [_Part(str(key), each, below, repeated) for key, each in self.value.items()]
        if isinstance(self.value, list | tuple):
            return [_Part(self.name, each, below, self.repeated) for each in self.value]
        return []

    def _own_repetition(self) -> int:
        return max([1, *(number for key, number in _counts(self.value) if not key.lower().endswith("length"))])

    def _repetition_refused(self) -> str | None:
        repeated = self.repeated * self._own_repetition()
        if repeated <= MOST_REPETITION:
            return None
        return _over("it", f"repetitions inside each other that make {repeated}", f"{MOST_REPETITION}")


def _counts(value: Mapping[object, object]) -> Iterator[tuple[str, int]]:
    """The numbers of an object that count something, such as minItems; one that is none counts as the largest."""
    for key, number in value.items():
        if COUNTED.search(str(key)) and isinstance(number, int | float) and not isinstance(number, bool):
            yield str(key), int(min(abs(number), LARGEST_NUMBER)) if number == number else LARGEST_NUMBER


def _object_refused(value: Mapping[object, object]) -> str | None:
    for key, number in _counts(value):
        most = MOST_CHOSEN_PROPERTIES if key.lower().endswith("properties") else MOST_REPETITION
        if number > most:
            return f"{key[:40]!a}: {value[key]!s:.30} is above {most}, the most that structured outputs take"
    return _many("an object", len(value), MOST_PROPERTIES, "properties")


def _many(what: str, count: int, most: int, of: str) -> str | None:
    return _over(what, f"{count} {of}", f"{most}") if count > most else None


def _text_refused(text: str) -> str | None:
    brackets = sum(map(text.count, "([{"))
    if brackets > MOST_BRACKETS:
        return _over(f"a text ({text[:20]!a}...)", f"{brackets} brackets", f"{MOST_BRACKETS}")
    if (alternatives := text.count("|")) > MOST_ALTERNATIVES:
        return _over(f"a text ({text[:20]!a}...)", f"{alternatives} alternatives", f"{MOST_ALTERNATIVES}")
    # one repetition of a group may hold any other: their product, and within groups the largest of the plain ones
    of_groups, largest, total = 1, 1, 0
    for quantifier in QUANTIFIER.finditer(text):
        count = max([int(digits[:9]) if len(digits) < 9 else 10**9 for digits in quantifier.groups() if digits] or [1])
        total += count
        if quantifier.start() and text[: quantifier.start()].rstrip()[-1:] == ")":
            of_groups = min(of_groups * max(1, count), 10**9)
        else:
            largest = max(largest, count)
    if (repeated := max(of_groups * largest, total)) > MOST_REPETITION:
        return _over(f"a text ({text[:20]!a}...)", f"repetitions that make {repeated}", f"{MOST_REPETITION}")
    return None


def _inner_json_refused(name: str, text: str) -> str | None:
    """A schema or a list may also be given as text within JSON."""
    if name not in ("schema", "json_schema", "json") or not text.lstrip().startswith(("{", "[")):
        return None
    if (why := _depth_refused(text)) is not None:
        return why
    try:
        inner = json.loads(text)
    except ValueError:
        return None  # vLLM reports it
    return _value_refused(inner)


def _grammar_refused(text: str) -> str | None:
    """Grammars whose rules do not come back to themselves match regular languages only, whose step is bounded. One
    that recurs may be ambiguous, and then each step takes longer than the previous one.
    """
    plain = LITERAL.sub(" ", text)
    rules = list(RULE.finditer(plain))
    if len(rules) > MOST_ALTERNATIVES:
        return _over("the grammar", f"{len(rules)} rules", f"{MOST_ALTERNATIVES}")
    bodies: dict[str, set[str]] = {}
    for rule, following in zip(rules, [*rules[1:], None], strict=False):
        body = plain[rule.end() : following.start() if following else len(plain)]
        bodies.setdefault(rule[1].partition(".")[0], set()).update(WORD.findall(body))
    left = {name: words & bodies.keys() for name, words in bodies.items()}
    while ended := [name for name, words in left.items() if not words]:
        for name in ended:
            del left[name]
        for words in left.values():
            words.difference_update(ended)
    if left:
        return (
            f"the grammar's rule {min(left)[:40]!a} comes back to itself: structured outputs take no recursive grammars"
        )
    # a rule used n times by one that is used n times is n * n: repetitions count through rules, too
    counts = [max([int(times[:9]) for times in each.groups() if times] or [1]) for each in QUANTIFIER.finditer(plain)]
    repeated = 1
    for count in counts:
        repeated = min(repeated * max(1, count), 10**9)
    if repeated > MOST_REPETITION * 10:
        return _over("the grammar", f"repetitions that make up to {repeated}", f"{MOST_REPETITION * 10}")
    return None
