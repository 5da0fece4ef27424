"""Owns the built-in chat templates, for base models without one, and resolves the --chat_template option.

Each template is our Jinja version of the published format named in its comment. None uses a special token that only
some tokenizers have: an unknown one becomes ordinary text, which the model would learn.
"""

import difflib
from pathlib import Path
from typing import Final

from mobius.errors import DataError, excerpt, reason_of
from mobius.regular_files import read_bytes

_MOST_BYTES: Final = 1 << 20
"""Largest accepted template file; those of models have some ten kilobytes."""

# Both set `system` to the text of a leading system message, and `turns` to the messages after it.
_TURNS: Final = """
{%- set system = messages[0]['content'] if messages and messages[0]['role'] == 'system' else '' -%}
{%- set turns = messages[1:] if messages and messages[0]['role'] == 'system' else messages -%}
"""
_ALTERNATING_TURNS: Final = (
    _TURNS
    + """
{%- for turn in turns -%}
    {%- if turn['role'] != ('user', 'assistant')[loop.index0 % 2] -%}
        {{- raise_exception('user and assistant must take turns, the user first, and no one else may speak') -}}
    {%- endif -%}
{%- endfor -%}
"""
)

BUILTIN_TEMPLATES: Final = {
    # Qwen, Yi, SmolLM and many fine-tuned models; tools as Qwen3 and Hermes 2 Pro write them.
    "chatml": _TURNS
    + r"""
{%- if system or tools -%}
    {{- '<|im_start|>system\n' + system -}}
    {%- if tools -%}
        {{- '\n\n' if system else '' -}}
        {{- '# Tools\n\nYou may call one or more functions to assist with the user query.\n\n' -}}
        {{- 'You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n' -}}
        {%- for tool in tools -%}{{- (tool | tojson) + '\n' -}}{%- endfor -%}
        {{- '</tools>\n\nFor each function call, return a json object with function name and arguments within ' -}}
        {{- '<tool_call></tool_call> XML tags:\n<tool_call>\n' -}}
        {{- '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>' -}}
    {%- endif -%}
    {{- '<|im_end|>\n' -}}
{%- endif -%}
{%- for turn in turns -%}
    {%- if turn['role'] == 'tool' -%}
        {%- if loop.first or loop.previtem['role'] != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
        {{- '\n<tool_response>\n' + turn['content'] + '\n</tool_response>' -}}
        {%- if loop.last or loop.nextitem['role'] != 'tool' -%}{{- '<|im_end|>\n' -}}{%- endif -%}
    {%- else -%}
        {{- '<|im_start|>' + turn['role'] + '\n' + turn['content'] -}}
        {%- for call in turn['tool_calls'] or () -%}
            {%- set call = call['function'] or call -%}
            {%- set arguments = call['arguments'] or {} -%}
            {{- '' if loop.first and not turn['content'] else '\n' -}}
            {{- '<tool_call>\n{"name": "' + call['name'] + '", "arguments": ' -}}
            {{- (arguments if arguments is string else arguments | tojson) + '}\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
""",
    # Llama-2-chat: each exchange starts with the BOS token, the system message is part of the first question.
    "llama2": _ALTERNATING_TURNS
    + r"""
{%- for turn in turns -%}
    {%- if turn['role'] == 'user' -%}
        {%- set asked = ('<<SYS>>\n' + system + '\n<</SYS>>\n\n' if loop.first and system else '') + turn['content'] -%}
        {{- bos_token -}}{{- '[INST] ' + asked.strip() + ' [/INST]' -}}
    {%- else -%}
        {{- ' ' + turn['content'].strip() + ' ' + eos_token -}}
    {%- endif -%}
{%- endfor -%}
""",
    # Llama-3-Instruct.
    "llama3": r"""
{{- bos_token -}}
{%- for turn in messages -%}
    {{- '<|start_header_id|>' + turn['role'] + '<|end_header_id|>\n\n' + turn['content'].strip() + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}{%- endif -%}
""",
    # Mistral-7B-Instruct-v0.3 and Mistral-Large-2407, with the system message in the first question. Their own template
    # puts it into the last one, so that earlier turns would change with every new turn.
    "mistral": _ALTERNATING_TURNS
    + r"""
{{- bos_token -}}
{%- for turn in turns -%}
    {%- if turn['role'] == 'user' -%}
        {{- '[INST] ' + (system + '\n\n' if loop.first and system else '') + turn['content'] + '[/INST]' -}}
    {%- else -%}
        {{- ' ' + turn['content'].strip() + eos_token -}}
    {%- endif -%}
{%- endfor -%}
""",
    # Gemma 2 and 3; the system message precedes the first question, as in Gemma 3's.
    "gemma": _ALTERNATING_TURNS
    + r"""
{{- bos_token -}}
{%- for turn in turns -%}
    {{- '<start_of_turn>' + ('model' if turn['role'] == 'assistant' else 'user') + '\n' -}}
    {{- (system + '\n\n' if loop.first and system else '') + turn['content'].strip() + '<end_of_turn>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\n' -}}{%- endif -%}
""",
    # Phi-3-mini and Phi-3.5.
    "phi3": r"""
{%- for turn in messages -%}
    {{- '<|' + turn['role'] + '|>\n' + turn['content'] + '<|end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\n' -}}{%- endif -%}
""",
    # Vicuna v1.1 to v1.5, as in FastChat; conversations without a system message get Vicuna's.
    "vicuna": _ALTERNATING_TURNS
    + r"""
{%- set vicuna = 'A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, '
    + "detailed, and polite answers to the user's questions." -%}
{{- bos_token -}}{{- (system or vicuna) + ' ' -}}
{%- for turn in turns -%}
    {{- 'USER: ' + turn['content'] + ' ' if turn['role'] == 'user' else 'ASSISTANT: ' + turn['content'] + eos_token -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'ASSISTANT:' -}}{%- endif -%}
""",
    # Stanford Alpaca's instruction prompt, with a line break before the answer, extended to several exchanges.
    "alpaca": _ALTERNATING_TURNS
    + r"""
{%- set alpaca = 'Below is an instruction that describes a task. '
    + 'Write a response that appropriately completes the request.' -%}
{{- bos_token -}}{{- (system or alpaca) + '\n\n' -}}
{%- for turn in turns -%}
    {{- '### ' + ('Instruction' if turn['role'] == 'user' else 'Response') + ':\n' + turn['content'] -}}
    {{- '\n\n' if turn['role'] == 'user' else eos_token + '\n\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '### Response:\n' -}}{%- endif -%}
""",
}
"""Jinja text by name."""


def resolve_template(given: str | None) -> str | None:
    """Jinja text of a built-in template, or of a file; None for None. Raises DataError."""
    if given is None or given in BUILTIN_TEMPLATES:
        return None if given is None else BUILTIN_TEMPLATES[given]
    path = Path(given).expanduser()
    try:
        raw = read_bytes(path, _MOST_BYTES)
    except (OSError, ValueError) as error:
        near = difflib.get_close_matches(given.lower()[:100], BUILTIN_TEMPLATES, n=2, cutoff=0.5)
        meant = f" (did you mean {' or '.join(near)}?)" if near else ""
        raise DataError(
            f"--chat_template {excerpt(given)}: neither a built-in template{meant} nor a file that can be read "
            f"({reason_of(error)}). Give a Jinja file, or one of {', '.join(sorted(BUILTIN_TEMPLATES))}"
        ) from error
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"--chat_template {excerpt(given)}: the file is not text in UTF-8 ({error.reason})") from error
    if not text.strip():
        raise DataError(f"--chat_template {excerpt(given)}: the file is empty; it must hold a Jinja template")
    return text
