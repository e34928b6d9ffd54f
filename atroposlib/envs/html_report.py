"""A page for people out of a JSONL file of groups: every sample's messages and score. All text is escaped."""

import html
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; }
details { border: 1px solid #ccc; border-radius: 6px; margin: .5rem 0; padding: .3rem .8rem; }
details details.good { border-left: 4px solid #2a7; } details details.bad { border-left: 4px solid #c44; }
summary { cursor: pointer; } .role { color: #666; font-size: 85%; margin: .6rem 0 0; } pre { white-space: pre-wrap; margin: .2rem 0; }
"""


def write_html(jsonl: Path, page: Path) -> None:
    """Render the groups of `jsonl`, one at a time, to `page`."""
    with page.open("w", encoding="utf-8") as out:
        out.write(f"<!doctype html><meta charset=utf-8><title>{html.escape(jsonl.name)}</title><style>{STYLE}</style>")
        out.write(f"<h1>{html.escape(jsonl.stem)}</h1>")
        with jsonl.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines):
                try:
                    out.write(group_html(json.loads(line), number))
                except (ValueError, KeyError, TypeError) as error:
                    raise ValueError(f"{jsonl}:{number + 1} is no group with messages and scores ({error!r})") from error


def group_html(group: Mapping[str, Any], number: int) -> str:
    """One collapsible section for `group`."""
    scores = group["scores"]
    mean = sum(scores) / len(scores) if scores else 0.0
    # A file may hold fewer messages than scores, or more: what has both is shown.
    samples = "".join(_sample_html(text, score) for text, score in zip(_conversations(group), scores, strict=False))
    return f"<details><summary>Group {number}: {len(scores)} samples, mean score {mean:.3f}</summary>{samples}</details>\n"


def _conversations(group: Mapping[str, Any]) -> Iterator[list[Mapping[str, Any]]]:
    for index in range(len(group.get("messages") or group["scores"])):
        messages = group["messages"][index] if group.get("messages") else [{"role": "tokens", "content": str(group["tokens"][index])}]
        yield messages if isinstance(messages, list) else [{"role": "text", "content": messages}]


def _sample_html(messages: list[Mapping[str, Any]], score: float) -> str:
    roles = [html.escape(str(message["role"]).capitalize()) for message in messages]
    texts = [html.escape(_text(message["content"])) for message in messages]
    parts = [f"<p class=role>{role}</p><pre>{text}</pre>" for role, text in zip(roles, texts, strict=True)]
    return f"<details class={'good' if score > 0 else 'bad'}><summary>score {score:g}</summary>{''.join(parts)}</details>"


def _text(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
