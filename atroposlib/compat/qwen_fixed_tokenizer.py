"""`QwenFixedTokenizer`: the tokenizer of a Qwen model whose chat template works in transformers' sandbox.

Templates run in Jinja's immutable sandbox, where a list cannot be changed. Templates that append to a list fail there
when they are rendered. Such a template, or a missing one, is replaced by `TEMPLATE`: Qwen's format of turns, tools and
tool calls. Any other template stays, since the model was trained with it.
"""

import copy
import functools
import re
from typing import Any

from atroposlib.utils.tokenizers import load_tokenizer

CHANGES_A_LIST = re.compile(r"\.(?:append|extend|insert|pop|remove|clear|sort|reverse)\(")

TEMPLATE = """\
{%- set first = messages[0] %}
{%- set system = first.content if first.role == 'system' else none %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if system %}{{- system + '\\n\\n' }}{%- endif %}
    {{- 'These functions are available, one JSON signature per line:\\n<tools>\\n' }}
    {%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
    {{- '</tools>\\nTo call one, write a JSON object with its name and arguments:\\n' }}
    {{- '<tool_call>\\n{"name": NAME, "arguments": {...}}\\n</tool_call><|im_end|>\\n' }}
{%- elif system is not none %}
    {{- '<|im_start|>system\\n' + system + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in (messages if system is none else messages[1:]) %}
    {%- if message.role == 'tool' %}
        {%- set body = '<tool_response>\\n' + message.content + '\\n</tool_response>' %}
        {{- '<|im_start|>user\\n' + body + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {%- set function = call.function if call.function is defined else call %}
            {%- set given = function.arguments %}
            {%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": ' + function.name | tojson + ', "arguments": ' }}
            {{- (given if given is string else given | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


class QwenFixedTokenizer:
    """The tokenizer of `model_name_or_path` (a hub name or a directory) as `tokenizer`, whose methods this has, too.

    Keyword arguments are those of `AutoTokenizer.from_pretrained`. Raises OSError without such a tokenizer.
    """

    def __init__(self, model_name_or_path: str, **kwargs: object) -> None:
        if kwargs:
            from transformers import AutoTokenizer  # which imports torch if it is installed

            self.tokenizer: Any = AutoTokenizer.from_pretrained(model_name_or_path, **kwargs)
        else:  # a copy: what is loaded is shared by all who name it
            self.tokenizer = copy.copy(load_tokenizer(model_name_or_path))
        if not self.tokenizer.chat_template or CHANGES_A_LIST.search(str(self.tokenizer.chat_template)):
            self.tokenizer.chat_template = TEMPLATE
        render = functools.partial(type(self.tokenizer).apply_chat_template, self.tokenizer, return_dict=False)
        self.apply_chat_template = self.tokenizer.apply_chat_template = render

    def __getattr__(self, name: str) -> Any:
        if name == "tokenizer":  # not loaded
            raise AttributeError(name)
        return getattr(self.tokenizer, name)
