"""The chat template of an environment: the tokenizer's own, or that of a file, and the arguments set for it."""

import copy
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atroposlib.envs.errors import EnvError, NoChatTemplate, WrongSetting
from atroposlib.errors import reading
from atroposlib.utils.tokenizers import NoTokenizer


def with_template(tokenizer: Any, file: str | None, arguments: Mapping[str, object]) -> Any:
    """A copy of `tokenizer` that renders conversations by the Jinja template in `file`, or by its own without one, and
    gives it `arguments`, such as enable_thinking. Raises EnvError for a file that is not a template; the copy raises
    NoChatTemplate where there is no template at all.
    """
    if isinstance(tokenizer, NoTokenizer):
        if file is None and not arguments:
            return tokenizer
        raise WrongSetting(
            "chat_template and chat_template_kwargs need a tokenizer: name one with --env.tokenizer_name"
        )
    copied = copy.copy(tokenizer)
    if file is not None:
        copied.chat_template = _template(Path(file))
    _render_by(copied, dict(arguments))
    return copied


def _template(file: Path) -> str:
    from jinja2 import Environment, TemplateError
    from jinja2.ext import loopcontrols

    with reading(f"cannot read the chat template {file}", EnvError, also=(TemplateError,)):
        text = file.read_text(encoding="utf-8")
        Environment(extensions=[loopcontrols]).parse(
            text.replace("{% generation %}", "").replace("{% endgeneration %}", "")
        )
    return text


def _render_by(tokenizer: Any, defaults: Mapping[str, object]) -> None:
    """Make `apply_chat_template` return text or a list, with `defaults` for the template, and a clear error without
    one.
    """
    render = functools.partial(type(tokenizer).apply_chat_template, tokenizer)

    def apply_chat_template(conversation: object, *args: object, **arguments: object) -> object:
        if not tokenizer.chat_template and not arguments.get("chat_template"):
            raise NoChatTemplate(
                f"the tokenizer {tokenizer.name_or_path} has no chat template, which a conversation needs: name a Jinja"
                " file with --env.chat_template (`atropos train`: --chat-template), or take an instruct model"
            )
        return render(conversation, *args, **{"return_dict": False, **defaults, **arguments})

    tokenizer.apply_chat_template = apply_chat_template
