"""Turns a JSONL file of groups, or of an evaluation's samples, into a page: every sample's messages, images and score.
All text is escaped, and nothing is fetched. The page is one file for people who have no run directory and no server:
`atroposlib/view/` shows a run.

    groups.jsonl   {"messages": [...], "scores": [...]}                    a section for each line
    samples.jsonl  {"question": 3, "messages": [...], "score": 1.0, ...}   a section for each question
"""

import html
import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from atroposlib.files import expect_readable, open_regular
from atroposlib.row_files.images import image_of_part, image_url

STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; }
details { border: 1px solid #ccc; border-radius: 6px; margin: .5rem 0; padding: .3rem .8rem; }
details details.good { border-left: 4px solid #2a7; } details details.bad { border-left: 4px solid #c44; }
summary { cursor: pointer; } .question { display: block; font-weight: 600; margin: .2rem 0 0 1rem; }
.role { color: GrayText; font-size: 85%; margin: .6rem 0 0; }
pre { white-space: pre-wrap; margin: .2rem 0; }
img { max-width: 100%; max-height: 24rem; display: block; }
"""

QUESTION = 160  # characters in a title


def page_beside(rows: Path) -> Path:
    """Where the page of a file of rows goes: never into its place."""
    return rows.with_suffix(".html" if rows.suffix != ".html" else ".page.html")


def write_html(jsonl: Path, page: Path, head: str = "") -> None:
    """Render the groups of `jsonl`, one at a time, or its samples by question, to `page`, below `head`. Raises
    ValueError for a line that is neither, and for a page in the place of the rows.
    """
    if page.exists() and page.samefile(jsonl):
        raise ValueError(f"{page} has the rows themselves: choose another file for the page")
    with expect_readable(jsonl).open(encoding="utf-8") as lines:
        of_samples = _is_sample(lines.readline())
        lines.seek(0)
        sections = _questions(_rows(jsonl, lines)) if of_samples else _rows(jsonl, lines)
        with open_regular(page, "w", encoding="utf-8") as out:
            _write_page(out, jsonl.name, head, jsonl, sections)


def write_samples_html(samples: Iterable[Mapping[str, object]], page: Path, title: str, head: str = "") -> None:
    """Render an evaluation's samples, a section for each question. Raises OSError."""
    with open_regular(page, "w", encoding="utf-8") as out:
        _write_page(out, title, head, page, _questions(enumerate(samples)))


Numbered = Iterable[tuple[int, Mapping[str, object]]]  # lines from 0 on, and what they hold


def _write_page(out: IO[str], title: str, head: str, source: Path, groups: Numbered) -> None:
    out.write(f"<!doctype html><meta charset=utf-8><title>{html.escape(title)}</title><style>{STYLE}</style>")
    out.write(f"<h1>{html.escape(title)}</h1>")
    if head:
        out.write(f"<pre>{html.escape(head)}</pre>")
    for place, (number, group) in enumerate(groups):
        try:
            out.write(group_html(group, number, is_open=place == 0))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{source}:{number + 1} is not a group with messages and scores ({error!r})") from error


def _rows(jsonl: Path, lines: Iterable[str]) -> Numbered:
    for number, line in enumerate(lines):
        try:
            yield number, json.loads(line)
        except ValueError as error:
            raise ValueError(f"{jsonl}:{number + 1} is not a group with messages and scores ({error!r})") from error


def _is_sample(line: str) -> bool:
    """Return whether a file with this first line holds samples: `evaluate --samples` writes what was asked first."""
    try:
        row = json.loads(line)
    except ValueError:
        return False
    return isinstance(row, dict) and "scores" not in row and bool({"evaluation", "score"} & row.keys())


def _questions(rows: Numbered) -> Numbered:
    """A group for each question. Of a sample that was taken again, the last line counts. Samples without a question are
    one each, and those that their author did not number are all shown.
    """
    questions: dict[object, dict[object, tuple[int, Mapping[str, object]]]] = {}
    for number, row in rows:
        if "evaluation" in row and "score" not in row:
            continue
        question, sample = row.get("question", row.get("index")), row.get("sample")
        question = question if isinstance(question, (int, str)) else number
        sample = sample if isinstance(sample, int) else (number,)
        questions.setdefault(question, {})[sample] = (number, row)
    for question, samples in sorted(questions.items(), key=lambda each: each[0] if isinstance(each[0], int) else -1):
        found = [row for _, row in samples.values()]
        yield (
            next(iter(samples.values()))[0],
            {
                "name": f"Question {question}",
                "reference": found[0].get("reference"),
                "messages": [row.get("messages") or [] for row in found],
                "scores": [row.get("score") for row in found],
                "rewards": [row.get("rewards") for row in found],
                "errors": [row.get("error") for row in found],
            },
        )


def group_html(group: Mapping[str, Any], number: int, is_open: bool = False) -> str:
    """One collapsible section for `group`. What all conversations begin with stands once, above them."""
    group = _with_failures(_rollouts_once(group))
    scores = group["scores"] or []  # null: the group was dropped before it had any
    known = [score for score in scores if score is not None]
    dropped = f", dropped: {html.escape(str(group['dropped']))}" if group.get("dropped") else ""
    mean = sum(known) / len(known) if known else 0.0
    # A file may hold fewer messages than scores, or more: what has both is shown.
    images = group.get("images")  # an entry of a list as long as there are samples is one's own, all else everyone's
    if not isinstance(images, list) or len(images) != len(scores):
        images = [images] * len(scores)
    rewards = group.get("rewards") or [None] * len(scores)
    errors = group.get("errors") or [None] * len(scores)
    conversations = list(_conversations(group))
    shared = _shared(conversations)
    answers = [messages[shared:] for messages in conversations]
    samples = "".join(_sample_html(*sample) for sample in zip(answers, scores, images, rewards, errors, strict=False))
    prompt = "".join(_message_html(message) for message in conversations[0][:shared]) if shared else ""
    question = f"<span class=question>{html.escape(_question(conversations[0][shared - 1]))}</span>" if shared else ""
    name = html.escape(str(group.get("name") or f"Group {number}"))
    lost = f" and {len(scores) - len(known)} without a score" if len(known) < len(scores) else ""
    title = f"{name}: {len(known)} samples{lost}, mean score {mean:.3f}{dropped}"
    opened = " open" if is_open else ""
    return f"<details{opened}><summary>{title}{question}</summary>{_reference_html(group)}{prompt}{samples}</details>\n"


def _shared(conversations: Sequence[Sequence[object]]) -> int:
    """Count the messages with which all conversations begin, up to the first answer."""
    found = 0
    for together in zip(*(messages[:-1] for messages in conversations), strict=False):
        first = together[0]
        if not isinstance(first, Mapping) or first.get("role") == "assistant" or any(one != first for one in together):
            break
        found += 1
    return found


def _question(message: Mapping[str, object]) -> str:
    """The beginning of a message's text, in one line."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    words = " ".join(str(part.get("text") or "") for part in parts if isinstance(part, Mapping)).split()
    return textwrap.shorten(" ".join(words), QUESTION, placeholder=" …")


def _reference_html(group: Mapping[str, object]) -> str:
    reference = group.get("reference")
    return "" if reference is None else f"<p class=role>Reference</p>{_content_html(reference)}"


def _rollouts_once(group: Mapping[str, object]) -> Mapping[str, Any]:
    """The group with one entry of each list for each rollout: those of its last sequence, whose messages are all. A
    group without messages stays as it is.
    """
    rollouts = group.get("rollouts")
    if not isinstance(rollouts, list) or not group.get("messages"):
        return group
    last = list({str(rollout): place for place, rollout in enumerate(rollouts)}.values())
    return {
        name: [values[place] for place in last] if isinstance(values, list) and len(values) == len(rollouts) else values
        for name, values in group.items()
    }


def _with_failures(group: Mapping[str, Any]) -> Mapping[str, Any]:
    """The group with the answers that have no score behind the others, as far as they were sampled."""
    failures = [failure for failure in group.get("failures") or [] if failure.get("messages")]
    scores = group["scores"]
    if not failures or not scores or not group.get("messages"):
        return group
    more: dict[str, list[Any]] = {
        "messages": [failure["messages"] for failure in failures],
        "scores": [None] * len(failures),
        "errors": [f"{failure['cause']}: {failure['error']}" for failure in failures],
    }
    given: dict[str, Any] = {"errors": [None] * len(scores), **group}
    of_each = [name for name in ("images", "rewards") if len(group.get(name) or ()) == len(scores)]
    own = {name: [None] * len(failures) for name in of_each}
    return given | {name: [*given[name], *added] for name, added in (more | own).items()}


def _conversations(group: Mapping[str, Any]) -> Iterator[list[Mapping[str, object]]]:
    for index in range(len(group.get("messages") or group["scores"] or [])):
        messages = (
            group["messages"][index]
            if group.get("messages")
            else [{"role": "tokens", "content": str(group["tokens"][index])}]
        )
        yield messages if isinstance(messages, list) else [{"role": "text", "content": messages}]


def _sample_html(
    messages: Sequence[Mapping[str, object]],
    score: float | None,
    images: object,
    rewards: Mapping[str, float] | None,
    error: str | None,
) -> str:
    parts = [_message_html(message) for message in messages]
    urls = map(image_url, images if isinstance(images, list) else [images])
    shown = "".join(f"<img src='{url}'>" for url in urls if url)
    named = ", ".join(f"{name} {value:g}" for name, value in (rewards or {}).items())
    sign = "?" if score is None else "✓" if score >= 1 else "✗" if score <= 0 else "◐"
    told = f"score {score:g}{f' ({html.escape(named)})' if named else ''}" if score is not None else "no score"
    told += f": {html.escape(error or 'not scored')}" if score is None else ""
    kind = "good" if score is not None and score > 0 else "bad"
    return f"<details class={kind}><summary>{sign} {told}</summary>{shown}{''.join(parts)}</details>"


def _message_html(message: Mapping[str, object]) -> str:
    """One with tool calls may be without content."""
    calls = message.get("tool_calls")
    content = message.get("content") if calls else message["content"]
    parts = [_content_html(part) for part in (content, calls) if part is not None]
    return f"<p class=role>{html.escape(str(message['role']).capitalize())}</p>{''.join(parts)}"


def _content_html(content: object) -> str:
    """A message's text, or its parts in the OpenAI chat format: texts and images."""
    if isinstance(content, list) and all(isinstance(part, Mapping) for part in content):
        return "".join(_part_html(part) for part in content)
    return f"<pre>{html.escape(content if isinstance(content, str) else json.dumps(content, ensure_ascii=False))}</pre>"


def _part_html(part: Mapping[str, object]) -> str:
    if part.get("type") == "text":
        return f"<pre>{html.escape(str(part.get('text')))}</pre>"
    url = image_of_part(part)
    return f"<img src='{url}'>" if url else f"<pre>{html.escape(json.dumps(part, ensure_ascii=False))}</pre>"
