"""Which form log-probabilities have under each sampling parameter, and whether the parameter is applied.

    raw         of the model's own distribution, whatever the parameter does to it
    processed   of the distribution from which the token was drawn, renormalised

A trainer must know which. Anything else is a fault, and so is a parameter that is taken and not applied.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from sampler_doctor.reference import Array, log_softmax
from sampler_doctor.rows.policy import DRAWS, STANDARD_ERRORS, draws, z_score
from sampler_doctor.rows.session import ANSWER, PROMPT_TOKENS, Found, Session, gap
from sampler_doctor.servers.sampler import Answer, Ask, NotShown

TEMPERATURE = 0.5
PENALTY = 1.5
MOST_KEPT = 8  # tokens that a filter keeps
MOST_ANSWERS = 8  # in which a token is looked for that came before
AMPLIFIED = 3.0  # rounding under a temperature of 0.5, or after a penalty


def temperature(session: Session) -> Found:
    prompt = session.flattest
    answers = draws(session, prompt, TEMPERATURE)
    logits = session.reference.after(prompt) / TEMPERATURE
    score = z_score(session, prompt, [answer.tokens[0] for answer in answers], np.exp(log_softmax(logits)))
    rows = [(answer, session.reference.after(prompt)[None], logits[None]) for answer in answers]
    return _form(session, rows, f"{score:+.1f} standard errors", applied=abs(score) <= STANDARD_ERRORS)


def filtered(option: Callable[[Array, int], tuple[str, float]]) -> Callable[[Session], Found]:
    """Return the row of a parameter that keeps the most probable tokens; `option` names it and the value that keeps
    the first `kept` of sorted probabilities.
    """

    def row(session: Session) -> Found:
        prompt = session.flattest
        logits = session.reference.after(prompt)
        order = np.argsort(-logits)
        kept = _widest_step(logits[order])
        name, value = option(session.probabilities(prompt)[order], kept)
        allowed = np.full_like(logits, -np.inf)
        allowed[order[:kept]] = logits[order[:kept]]
        answers = draws(session, prompt, **{name: value})
        outside = sum(answer.tokens[0] not in order[:kept] for answer in answers)
        rows = [(answer, logits[None], allowed[None]) for answer in answers]
        score = 0.0
        if kept > 1 and not outside:
            drawn = [answer.tokens[0] for answer in answers]
            score = z_score(session, prompt, drawn, np.exp(log_softmax(allowed)))
        words = f"{outside} of {DRAWS} draws outside of the {kept} tokens that {name}={value:.4g} keeps"
        if not outside:
            words += f", {score:+.1f} standard errors"
        return _form(session, rows, words, applied=not outside and abs(score) <= STANDARD_ERRORS)

    return row


def _widest_step(ordered: Array) -> int:
    """How many tokens to keep so that rounding cannot change which: at the widest step of the first logits."""
    return 2 + int(np.argmax(ordered[1:MOST_KEPT] - ordered[2 : MOST_KEPT + 1]))


def frequency_penalty(session: Session) -> Found:
    return _penalised(session, "frequency_penalty", _less_often)


def repetition_penalty(session: Session) -> Found:
    return _penalised(session, "repetition_penalty", _less_seen)


def _less_often(logits: Array, prompt: Sequence[int], before: Sequence[int]) -> Array:
    """As OpenAI defines it: less by the penalty for each time that a token has been sampled."""
    counts = np.bincount(np.array(before, dtype=np.int64), minlength=len(logits))
    return logits - PENALTY * counts


def _less_seen(logits: Array, prompt: Sequence[int], before: Sequence[int]) -> Array:
    """As CTRL defines it (Keskar et al., 2019), over prompt and answer, with the sign of the logit."""
    seen = sorted({*prompt, *before})
    changed = logits.copy()
    changed[seen] = np.where(logits[seen] > 0, logits[seen] / PENALTY, logits[seen] * PENALTY)
    return changed


def _penalised(session: Session, name: str, process: Callable[[Array, Sequence[int], Sequence[int]], Array]) -> Found:
    """Two answers, and two more as long as none names the log-probability of a token that has come before. Raises
    NotShown where eight do not.
    """
    rows: list[tuple[Answer, Array, Array]] = []
    wrong = 0
    while not any(map(_names_a_changed, rows)):
        if len(rows) == MOST_ANSWERS:
            raise NotShown("the server names the log-probability of no token that has come before")
        prompts = session.prompts[:2] if not rows else [session.prompt(PROMPT_TOKENS[0]) for _ in range(2)]
        answers = session.at_once([Ask(prompt, ANSWER, 0.0, session.few, {name: PENALTY}) for prompt in prompts])
        for prompt, answer in zip(prompts, answers, strict=True):
            raw = session.reference.along(prompt, answer.tokens)
            processed = np.stack([process(row, prompt, answer.tokens[:place]) for place, row in enumerate(raw)])
            near = processed.max(-1) - processed[np.arange(len(raw)), answer.tokens]
            wrong += int(np.sum(near > AMPLIFIED * 10 * session.limit()))
            rows.append((answer, raw, processed))
    count = sum(len(answer.tokens) for answer, _, _ in rows)
    words = f"{wrong} of {count} greedy tokens are not the most probable after the penalty"
    return _form(session, rows, words, applied=not wrong)


def _names_a_changed(row: tuple[Answer, Array, Array]) -> bool:
    """Return whether an answer names the log-probability of a token whose logit the penalty changes."""
    answer, raw, processed = row
    named = ([own, *top] for own, top in zip(answer.tokens, answer.top, strict=True))
    return any(np.any(before[ids] != after[ids]) for before, after, ids in zip(raw, processed, named, strict=True))


def _form(session: Session, rows: Sequence[tuple[Answer, Array, Array]], words: str, *, applied: bool) -> Found:
    """Decide by log-probabilities; `rows` has each answer's raw and processed logits, [tokens, vocabulary]."""
    limit = AMPLIFIED * session.limit()
    distance = {
        "raw": gap(value for answer, raw, _ in rows for value in _differences(answer, raw)).rms,
        "processed": gap(value for answer, _, processed in rows for value in _differences(answer, processed)).rms,
    }
    forms = [form for form, rms in distance.items() if rms <= limit]
    told = (
        " or ".join(forms)
        if forms
        else "neither raw nor processed: " + ", ".join(f"{rms:.2g} nats from {form}" for form, rms in distance.items())
    )
    ok = applied and bool(forms)
    return Found("ok" if ok else "fails", f"{told}; {words}", f"{limit:.2g} ({session.dtype})")


def _differences(answer: Answer, logits: Array) -> Iterator[float]:
    """Served less expected log-probabilities of all tokens that the answer names and that can be sampled."""
    for row, token, own, top in zip(log_softmax(logits), answer.tokens, answer.logprobs, answer.top, strict=True):
        for each, value in {**top, token: own}.items():
            if np.isfinite(row[each]):
                yield value - float(row[each])


top_p = filtered(lambda ordered, kept: ("top_p", float(ordered[:kept].sum() - ordered[kept - 1] / 2)))
top_k = filtered(lambda ordered, kept: ("top_k", kept))
min_p = filtered(lambda ordered, kept: ("min_p", float(np.sqrt(ordered[kept - 1] * ordered[kept]) / ordered[0])))
