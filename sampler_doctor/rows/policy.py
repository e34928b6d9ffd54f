"""Whether the server computes the model's policy: in prefill, in decode, in a batch, from its cache."""

from functools import partial
from itertools import islice

import numpy as np

from sampler_doctor.reference import log_softmax
from sampler_doctor.rows.session import ANSWER, LONG, PROMPT_TOKENS, Found, Gap, Session, gap
from sampler_doctor.servers.sampler import Answer, Ask, NotShown

CROWD = 64
DRAWS = 64
DRAWN_FROM = 2  # prompts: a server computes each of them once per draw
STANDARD_ERRORS = 5.0
MOST_CERTAIN = 0.95  # probability of a token beyond which draws of others are too rare to count


def distribution(session: Session) -> Found:
    """The first token's distribution, as much of it as the server gives."""
    top, vocabulary = session.sampler.top, session.reference.vocabulary
    share = "the whole vocabulary" if top >= vocabulary else f"the {top} most probable of {vocabulary}"
    return session.judge(session.first_difference(), f": {share}")


def decode(session: Session) -> Found:
    """Every token of sampled answers."""
    return session.judge(
        gap(value for prompt, answer in session.answers for value in session.against_reference(prompt, answer))
    )


def _of_prompts(session: Session) -> list[tuple[tuple[int, ...], Answer, list[float]]]:
    """Each prompt, its answer, and the server's log-probabilities of that answer as part of a prompt."""
    found = []
    for prompt, answer in session.answers:
        (again,) = session.sampler.sample(Ask([*prompt, *answer.tokens], 1, 0.0, 1, of_prompt=True))
        given = (again.prompt or [])[len(prompt) :]
        found.append((prompt, answer, [value for value in given if value is not None]))
    return found


def prompt_logprobs(session: Session) -> Found:
    """Log-probabilities of a prompt's tokens against the reference."""
    differences: list[float] = []
    for prompt, answer, given in _of_prompts(session):
        rows = log_softmax(session.reference.along(prompt, answer.tokens))
        differences += [value - float(row[token]) for value, row, token in zip(given, rows, answer.tokens, strict=True)]
    return session.judge(gap(differences))


def decode_prefill(session: Session) -> Found:
    """A sampled token's log-probability against the same token's in a prompt, both from the server."""
    return session.judge(
        gap(
            sampled - read
            for _, answer, given in _of_prompts(session)
            for sampled, read in zip(answer.logprobs, given, strict=True)
        )
    )


def compared(one: Answer, other: Answer) -> list[float]:
    """Differences of two answers to one prompt, up to the first token in which they differ."""
    differences: list[float] = []
    for place, (left, right) in enumerate(zip(one.tokens, other.tokens, strict=False)):
        both = one.top[place].keys() & other.top[place].keys()
        differences += [one.top[place][token] - other.top[place][token] for token in both]
        if left != right:
            break
    return differences


def batch(session: Session) -> Found:
    """Answers alone, and among 64 concurrent requests."""
    alone = [session.greedy(prompt, ANSWER) for prompt in session.prompts]
    places = range(0, CROWD, CROWD // len(session.prompts))
    of_crowd = {place: prompt for place, prompt in zip(places, session.prompts, strict=True)}
    lengths = PROMPT_TOKENS[:-1]  # the longest ones would take most of the row's time, and show nothing more
    others = [session.prompt(lengths[place % len(lengths)] + place % 7) for place in range(CROWD)]
    crowd = [of_crowd.get(place, other) for place, other in enumerate(others)]
    answers = session.at_once([Ask(prompt, ANSWER, 0.0, session.few) for prompt in crowd])
    found = gap(value for one, place in zip(alone, places, strict=True) for value in compared(one, answers[place]))
    return session.judge(found, ": the same bits" if found.worst == 0 else "")


def cache(session: Session) -> Found:
    """A prompt again, and its second half behind another beginning: from the cache or not, all the same."""
    length = min(LONG, 2 * ((session.longest - ANSWER - 2) // 2))
    first, other = session.prompt(length), session.prompt(length)
    half = length // 2
    cold, warm = session.greedy(first, 4), session.greedy(first, 4)
    differences = compared(cold, warm) + session.against_reference(first, warm)
    mixed = other[:half] + first[half:]
    differences += session.against_reference(mixed, session.greedy(mixed, 4))
    cached = "not said" if warm.cached is None else f"{warm.cached} of {length}"
    return session.judge(gap(differences), f"; tokens from the cache: {cached}")


def z_score(session: Session, prompt: tuple[int, ...], drawn: list[int], probabilities: np.ndarray) -> float:
    """Return by how many standard errors the mean log-probability of drawn tokens is off, where they are drawn from
    `probabilities`, [vocabulary]. The log-probabilities are those at temperature 1.
    """
    logprobs = log_softmax(session.reference.after(prompt))
    mean = float(np.sum(probabilities * logprobs))
    deviation = float(np.sqrt(np.sum(probabilities * (logprobs - mean) ** 2)))
    if deviation < 1e-6:
        raise NotShown("the model is certain of the next token")
    return (float(np.mean(logprobs[drawn])) - mean) / deviation * float(np.sqrt(len(drawn)))


def _is_open(session: Session, prompt: tuple[int, ...]) -> bool:
    """Return whether one rare token among the draws is no sign of a fault."""
    logprobs = log_softmax(session.reference.after(prompt))
    return float(np.exp(logprobs.max())) < MOST_CERTAIN


def draws(session: Session, prompt: tuple[int, ...], temperature: float = 1.0, **options: object) -> list[Answer]:
    """Sample the next token `DRAWS` times."""
    options = {"n": DRAWS, **options}
    found = session.ask(Ask(prompt, 1, temperature, session.few, options))
    if len(found) != DRAWS:
        raise NotShown(f"n={DRAWS} gave {len(found)} answers")
    return found


def sampling(session: Session) -> Found:
    """Whether tokens are drawn from the distribution whose log-probabilities are given."""
    scores = []
    for prompt in islice(filter(partial(_is_open, session), session.prompts), DRAWN_FROM):
        drawn = [answer.tokens[0] for answer in draws(session, prompt)]
        scores.append(z_score(session, prompt, drawn, session.probabilities(prompt)))
    if not scores:
        raise NotShown("the model is almost certain of each next token")
    worst = max(scores, key=abs)
    figure = f"{worst:+.1f} standard errors, of {DRAWS} draws behind each of {len(scores)} prompts"
    return Found("ok" if abs(worst) <= STANDARD_ERRORS else "fails", figure, f"±{STANDARD_ERRORS:g}")


def stale_cache(session: Session, warmed: tuple[int, ...], moved: Gap) -> Found:
    """A prompt that the server had cached before its weights changed by `moved`."""
    again = session.greedy(warmed, 4)
    found = gap(session.against_reference(warmed, again))
    if moved.rms <= session.limit():
        cached = "not said" if again.cached is None else str(again.cached)
        raise NotShown(f"the weights did not change beyond rounding; tokens from the old cache: {cached}")
    return session.judge(found)
