"""Chat templates: built-in templates, the --chat_template option, and rendering of conversations.

Each built-in template is our Jinja version of the published format that its comment names. No template uses a special
token that only some tokenizers have: other tokenizers would encode it as ordinary text, which the model would learn.

A template is a small program that comes with the model. If rendering fails, either the template refuses the
conversation, which is a fault of the data, or the template is broken.
"""

import difflib
import json
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mobius.data.messages import Conversation, Turn, function_of
from mobius.errors import DataError, excerpt, first_line, listed, reason_of
from mobius.files.regular_files import read_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# _TURNS and _ALTERNATING_TURNS set `system` to the text of a leading system message, and `turns` to the other messages.
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
    # Llama-2-chat: each exchange starts with the BOS token; the first question includes the system message.
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
    # Mistral-7B-Instruct-v0.3 and Mistral-Large-2407, with the system message in the first question. The models' own
    # template has it in the last question, so that earlier turns would change with every new turn.
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
    # Gemma 2 and 3; the system message precedes the first question, as in Gemma 3's template.
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
    # Vicuna v1.1 to v1.5, as in FastChat; a conversation without a system message gets Vicuna's system message.
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
"""Name -> Jinja text."""


def resolve_template(given: str | None) -> str | None:
    """Return the Jinja text that `given` names (built-in template, file) or is; None for None. Raises DataError."""
    if given is None or "{{" in given or "{%" in given:
        return given
    if given in BUILTIN_TEMPLATES:
        return BUILTIN_TEMPLATES[given]
    try:
        raw = read_bytes(Path(given).expanduser())
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: `~name` names no user
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


class ChatRenderer:
    """Renders one conversation with `template`; None: with the tokenizer's template.

    Raises DataError that names `where` if the template refuses the conversation or is broken.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", template: str | None, conversation: Conversation, where: str
    ) -> None:
        self._tokenizer, self._template, self._where = tokenizer, template, where
        self._tools = [dict(tool) for tool in conversation.tools] or None
        self._messages = list(map(_message, conversation.turns))
        self._has_parts = False

    def render_all(self) -> str:
        """Render all turns, and find the form of messages that the template expects; `render` then uses this form.

        If the result has no turn's text, content becomes a list of parts. If the result has a call's arguments as a
        quoted string, their JSON text becomes an object. If rendering fails, arguments are tried in the other form
        (text or object).
        """
        calls = [call for message in self._messages for call in message.get("tool_calls", ())]
        texts = list(filter(None, map(_arguments_text, calls)))
        try:
            whole = self.render(len(self._messages))
        except DataError as error:
            if not calls:
                raise
            self._messages = [_with_arguments(message, as_text=not texts) for message in self._messages]
            try:
                return self.render(len(self._messages))
            except DataError:
                raise error from None
        if any(json.dumps(text, ensure_ascii=False) in whole for text in texts):
            self._messages = [_with_arguments(message, as_text=False) for message in self._messages]
            return self.render(len(self._messages))
        contents = [content for message in self._messages if (content := message["content"].strip())]
        if contents and not any(content in whole for content in contents):
            self._has_parts = True
            parted = self.render(len(self._messages))
            self._has_parts = any(content in parted for content in contents)
            return parted if self._has_parts else whole
        return whole

    def render(self, stop: int, *, answer: str | None = None, add_generation_prompt: bool = False) -> str:
        """Return the text of the turns before `stop`, followed by an assistant's turn `answer`, if given."""
        messages = self._messages[:stop]
        if answer is not None:
            messages = [*messages, {"role": "assistant", "content": answer}]
        if self._has_parts:
            messages = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in messages]
        try:
            return self._apply(messages, add_generation_prompt)
        except Exception as error:  # a template is third-party code and may raise anything
            raise DataError(f"{self._where}: {self._complaint(error, messages, add_generation_prompt)}") from error

    def find_written(self, places: Sequence[tuple[int, str]], stops: Sequence[int]) -> frozenset[tuple[int, str]]:
        """Return the places (turn, key) whose texts the template writes if it renders the turns before a stop.

        A unique word replaces each text, so the texts do not matter; turns -1, -2, ... are tools. If the template
        refuses these words, all texts count as written.
        """
        words = {place: f"zq{number}zq" for number, place in enumerate(places)}
        messages = []
        for index, message in enumerate(self._messages):
            message = {**message, **{key: words[index, key] for key in message if (index, key) in words}}
            if calls := message.get("tool_calls"):
                names = (words.get((index, f"tool_calls[{number}]"), "") for number in range(len(calls)))
                message["tool_calls"] = list(map(_with_name, calls, names))
            messages.append(message)
        tools = [_with_name(tool, words.get((~index, "name"), "")) for index, tool in enumerate(self._tools or ())]
        given = self._messages, self._tools
        self._messages, self._tools = messages, tools or None
        try:
            texts = [self.render(stop) for stop in stops]
        except DataError:
            return frozenset(places)
        finally:
            self._messages, self._tools = given
        return frozenset(place for place, word in words.items() if any(word in text for text in texts))

    def _apply(self, messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
        text = self._tokenizer.apply_chat_template(
            messages,
            tools=self._tools,
            chat_template=self._template,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )
        return str(text)

    def _complaint(self, error: Exception, messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
        """Return a message on why rendering failed and which turn is the first that makes it fail."""
        from jinja2 import TemplateError

        is_own = self._template is None
        template = "the tokenizer's chat template" if is_own else "the template of --chat_template"
        roles = listed(message["role"] for message in messages)
        number = self._failing_turn(error, messages, add_generation_prompt)
        if type(error) is TemplateError:  # `raise_exception` raises this class; template errors are subclasses
            place = f" from turn {number} on, {messages[number - 1]['role']}" if number is not None else ""
            problem = f"refuses the conversation ({roles}): {excerpt(str(error), 400)}"
            return f"{template} {problem}. Change the order or the roles of the turns{place}"
        if number is not None and number > 1:
            place = f"turn {number}, {messages[number - 1]['role']}, of the conversation ({roles})"
            return (
                f"{template} fails on {place}: {_reason(error)}. It renders the turns before: change that turn, or "
                "correct the template"
            )
        place = "chat_template.jinja in the model's folder, or `chat_template` in its tokenizer_config.json"
        return (
            f"{template} is broken: {_reason(error)}. The conversation is not the cause: correct the template"
            f"{f' ({place})' if is_own else ''}, or use another one with --chat_template"
        )

    def _failing_turn(
        self, error: Exception, messages: list[dict[str, Any]], add_generation_prompt: bool
    ) -> int | None:
        """Return the number (from 1) of the first turn that makes rendering fail; None if unknown."""
        from jinja2 import TemplateSyntaxError

        if isinstance(error, TemplateSyntaxError):
            return None
        rendered, failed = 0, len(messages)
        while failed - rendered > 1:
            middle = (rendered + failed) // 2
            try:
                self._apply(messages[:middle], add_generation_prompt)
                rendered = middle
            except Exception:  # a template may raise anything, as in `render`
                failed = middle
        return failed


def _message(turn: Turn) -> dict[str, Any]:
    return {"role": turn.role.value, "content": turn.content, **turn.fields}


def _with_name(tool: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a copy of the tool or call with another function name."""
    function = {**function_of(tool), "name": name}
    return {**tool, "function": function} if "function" in tool else function


def _arguments_text(call: Mapping[str, Any]) -> str | None:
    """Return the arguments of a call if they are the text of a JSON object, else None."""
    arguments = function_of(call).get("arguments")
    if not isinstance(arguments, str):
        return None
    try:
        return arguments if isinstance(json.loads(arguments), dict) else None
    except ValueError:
        return None


def _with_arguments(message: Mapping[str, Any], *, as_text: bool) -> dict[str, Any]:
    """Return the message with arguments of tool calls as JSON text, or as objects."""
    calls = []
    for call in message.get("tool_calls", ()):
        function = dict(function_of(call))
        arguments, text = function.get("arguments"), _arguments_text(call)
        if as_text and isinstance(arguments, dict):
            function["arguments"] = json.dumps(arguments, ensure_ascii=False)
        elif not as_text and text is not None:
            function["arguments"] = json.loads(text)
        calls.append({**call, "function": function} if "function" in call else function)
    return {**message, "tool_calls": calls} if calls else dict(message)


def _reason(error: Exception) -> str:
    """Describe a template's failure, with the line of the template if known."""
    from jinja2 import TemplateSyntaxError

    if isinstance(error, TemplateSyntaxError):
        line: int | None = error.lineno
    else:
        frames = traceback.extract_tb(error.__traceback__)
        line = next((frame.lineno for frame in reversed(frames) if frame.filename == "<template>"), None)
    place = f" (line {line} of the template)" if line is not None else ""
    return f"{type(error).__name__}: {excerpt(first_line(error), 200)}{place}"
