"""Whether the tokens are those that were meant: chat templates, BOS, the end of an answer, lengths, n, seeds."""

import math
from typing import Any

from sampler_doctor.reference import log_softmax
from sampler_doctor.rows.session import ANSWER, Found, Session, gap
from sampler_doctor.servers.completions import ID_NAME
from sampler_doctor.servers.sampler import Answer, Ask, NotOffered, NotShown

MESSAGES = ({"role": "user", "content": "What is 12 plus 30?"},)
SHORT = 12  # tokens
ALIKE = 1e-6  # probability of an event that is taken as a fault
BIAS = 100.0  # of OpenAI's logit_bias: the token is sampled


def _tokenizer(session: Session) -> Any:
    if session.words.tokenizer is None:
        raise NotShown("--model has no tokenizer")
    return session.words.tokenizer


def _templated(session: Session) -> str:
    tokenizer = _tokenizer(session)
    if not getattr(tokenizer, "chat_template", None):
        raise NotShown("--model has no chat template")
    return str(tokenizer.apply_chat_template(list(MESSAGES), tokenize=False, add_generation_prompt=True))


def chat(session: Session) -> Found:
    """A chat against the token ids of the model's own template."""
    ids = tuple(session.words.ids(_templated(session)))
    count, names = session.sampler.chat(MESSAGES, session.few)
    by_text = {} if all(name.startswith(ID_NAME) for name in names) else session.words.names()
    known = {int(name.removeprefix(ID_NAME)) if name.startswith(ID_NAME) else by_text.get(name): name for name in names}
    reference = log_softmax(session.reference.after(ids))
    found = gap(names[name] - float(reference[token]) for token, name in known.items() if token is not None)
    if count is not None and count != len(ids):
        return Found("fails", f"{count} prompt tokens, the template has {len(ids)}; {found}", "the same tokens")
    return session.judge(found, f"; {len(ids)} prompt tokens")


def text(session: Session) -> Found:
    """A prompt as text against the tokenizer's ids of it."""
    tokenizer = _tokenizer(session)
    words = "The keeper of the lighthouse"
    ids = tokenizer.encode(words)
    (answer,) = session.sampler.sample(Ask(words, 1, 0.0, session.few))
    found = gap(session.against_reference(ids, answer))
    if answer.prompt_tokens not in (None, len(ids)):
        return Found("fails", f"{answer.prompt_tokens} prompt tokens, the tokenizer has {len(ids)}; {found}")
    return session.judge(found, f"; {len(ids)} prompt tokens")


def double_bos(session: Session) -> Found:
    """A rendered chat as text: does the server put a second BOS before it?"""
    tokenizer, rendered = _tokenizer(session), _templated(session)
    if tokenizer.bos_token is None or not rendered.startswith(tokenizer.bos_token):
        raise NotShown("the model's chat template does not begin with a BOS")
    ids = session.words.ids(rendered)
    (answer,) = session.sampler.sample(Ask(rendered, 1, 0.0, session.few))
    if answer.prompt_tokens is None:
        return session.judge(gap(session.against_reference(ids, answer)))
    words = f"{answer.prompt_tokens} prompt tokens of {len(ids)}"
    return Found("ok" if answer.prompt_tokens == len(ids) else "fails", words, "one BOS")


def stop(session: Session) -> Found:
    """Whether the token that ends an answer is in it, with its log-probability."""
    found: list[tuple[str, Answer, list[int]]] = []
    refused = ""
    for name, probe in (("stop_token_ids", _stopped), ("EOS", _ended)):
        try:
            found.append((name, *probe(session)))
        except (NotOffered, NotShown) as error:
            refused = refused or str(error)
    if not found:
        raise NotOffered(refused)
    faults = []
    for name, answer, expected in found:
        if answer.tokens == expected[:-1]:
            faults.append(f"{name}: the stop token is left out")
        elif answer.tokens != expected:
            faults.append(f"{name}: {len(answer.tokens)} tokens instead of {len(expected)}")
        elif answer.finish != "stop":
            faults.append(f"{name}: finish reason {answer.finish!r}")
    names = " and ".join(name for name, *_ in found)
    return Found("fails" if faults else "ok", "; ".join(faults) or f"in, by {names}", "in the answer")


def _stopped(session: Session) -> tuple[Answer, list[int]]:
    for prompt in session.prompts:
        whole = session.greedy(prompt, SHORT).tokens
        places = [place for place in range(1, len(whole)) if whole[place] not in whole[:place]]
        if places:
            expected = whole[: places[-1] + 1]
            answer = session.greedy(prompt, SHORT, stop_token_ids=expected[-1:])
            if answer.tokens == whole and len(expected) < len(whole):
                raise NotOffered("stop_token_ids is taken and not applied")
            return answer, expected
    raise NotShown("greedy answers repeat one token")


def _ended(session: Session) -> tuple[Answer, list[int]]:
    end = _tokenizer(session).eos_token_id
    if end is None:
        raise NotShown("the tokenizer has no EOS")
    answer = session.greedy(session.prompts[0], 4, logit_bias={str(end): BIAS})
    if answer.tokens[:1] not in ([end], []):
        raise NotOffered("logit_bias is taken and not applied")
    return answer, [end]


def length(session: Session) -> Found:
    """A prompt that is longer than the model."""
    prompt = [int(token) for token in session.prompts[-1]] * (session.longest // len(session.prompts[-1]) + 1)
    asked = prompt[: session.longest + 1]
    try:
        (answer,) = session.sampler.sample(Ask(asked, 1))
    except NotOffered as error:
        return Found("ok", f"refused: {error}", "an error")
    return Found(
        "fails", f"a prompt of {len(asked)} tokens is answered, as one of {answer.prompt_tokens or 'unknown length'}"
    )


def _by_chance(answer: Answer) -> bool:
    """Return whether this very answer may well come again."""
    return sum(answer.logprobs) > math.log(ALIKE)


def _drawn(session: Session, prompt: tuple[int, ...], n: int, seed: int | None) -> list[Answer]:
    options: dict[str, int] = {"n": n} | ({} if seed is None else {"seed": seed})
    return session.ask(Ask(prompt, ANSWER, 1.0, 1, options))


def _telling(session: Session, n: int, seed: int | None) -> tuple[tuple[int, ...], list[Answer]]:
    """Return the first prompt, with its answers, that shows something: an answer of a token or two may come again by
    chance.
    """
    for prompt in session.prompts[::-1]:
        answers = _drawn(session, prompt, n, seed)
        if not all(map(_by_chance, answers)):
            return prompt, answers
    raise NotShown("the model is so certain that equal answers may come by chance")


def several(session: Session) -> Found:
    """`n` answers to one prompt."""
    _, answers = _telling(session, 4, None)
    if len(answers) == 1:
        raise NotOffered("n=4 gives one answer")
    different = len({tuple(answer.tokens) for answer in answers})
    repeated = [answer for answer in answers if sum(answer.tokens == other.tokens for other in answers) > 1]
    fails = any(not _by_chance(answer) for answer in repeated)
    return Found("fails" if fails else "ok", f"{different} different answers of n=4", "equal only by chance")


def seed(session: Session) -> Found:
    """The same seed twice, and another."""
    prompt, (one,) = _telling(session, 1, 11)
    (again,), (other,) = (_drawn(session, prompt, 1, number) for number in (11, 12))
    if one.tokens != again.tokens:
        return Found("fails", "the same seed gives other tokens", "the same tokens")
    if one.tokens == other.tokens:
        return Found("fails", "other seeds give the same tokens", "other tokens")
    return Found("ok", "the same tokens by the same seed, others by another", "the same tokens")
