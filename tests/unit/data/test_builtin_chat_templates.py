import json
from pathlib import Path

import pytest
from harness.samples import row_of
from transformers import PreTrainedTokenizerBase

from mobius.data.chat_templates import BUILTIN_TEMPLATES, resolve_template
from mobius.data.messages import Conversation, Role, Turn
from mobius.data.tokenization import EncodingNote, EncodingRules, SampleEncoder

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi there"},
    {"role": "user", "content": " Who are you? "},
    {"role": "assistant", "content": "   A model   "},
    {"role": "user", "content": "Really?"},
]
VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, "
    "and polite answers to the user's questions."
)
ALPACA = "Below is an instruction that describes a task. Write a response that appropriately completes the request."

# Written by hand from the formats that the models' makers publish, for `<s>` and `</s>` as first and last token.
RENDERED = {
    "chatml": (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nHi there"
        "<|im_end|>\n<|im_start|>user\n Who are you? <|im_end|>\n<|im_start|>assistant\n   A model   <|im_end|>\n"
        "<|im_start|>user\nReally?<|im_end|>\n<|im_start|>assistant\n"
    ),
    "llama2": (
        "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHello [/INST] Hi there </s><s>[INST] Who are you? [/INST] A model "
        "</s><s>[INST] Really? [/INST]"
    ),
    "llama3": (
        "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|><|start_header_id|>user<|end_header_id|>"
        "\n\nHello<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nHi there<|eot_id|><|start_header_id|>user"
        "<|end_header_id|>\n\nWho are you?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nA model<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nReally?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
    "mistral": (
        "<s>[INST] Be brief.\n\nHello[/INST] Hi there</s>[INST]  Who are you? [/INST] A model</s>[INST] Really?[/INST]"
    ),
    "gemma": (
        "<s><start_of_turn>user\nBe brief.\n\nHello<end_of_turn>\n<start_of_turn>model\nHi there<end_of_turn>\n"
        "<start_of_turn>user\nWho are you?<end_of_turn>\n<start_of_turn>model\nA model<end_of_turn>\n"
        "<start_of_turn>user\nReally?<end_of_turn>\n<start_of_turn>model\n"
    ),
    "phi3": (
        "<|system|>\nBe brief.<|end|>\n<|user|>\nHello<|end|>\n<|assistant|>\nHi there<|end|>\n<|user|>\n Who are you? "
        "<|end|>\n<|assistant|>\n   A model   <|end|>\n<|user|>\nReally?<|end|>\n<|assistant|>\n"
    ),
    "vicuna": (
        "<s>Be brief. USER: Hello ASSISTANT: Hi there</s>USER:  Who are you?  ASSISTANT:    A model   </s>USER: Really?"
        " ASSISTANT:"
    ),
    "alpaca": (
        "<s>Be brief.\n\n### Instruction:\nHello\n\n### Response:\nHi there</s>\n\n### Instruction:\n Who are you? \n\n"
        "### Response:\n   A model   </s>\n\n### Instruction:\nReally?\n\n### Response:\n"
    ),
}
WITHOUT_SYSTEM = {
    "chatml": "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n",
    "llama2": "<s>[INST] Hello [/INST]",
    "llama3": "<s><|start_header_id|>user<|end_header_id|>\n\nHello<|eot_id|><|start_header_id|>assistant"
    "<|end_header_id|>\n\n",
    "mistral": "<s>[INST] Hello[/INST]",
    "gemma": "<s><start_of_turn>user\nHello<end_of_turn>\n<start_of_turn>model\n",
    "phi3": "<|user|>\nHello<|end|>\n<|assistant|>\n",
    "vicuna": f"<s>{VICUNA} USER: Hello ASSISTANT:",
    "alpaca": f"<s>{ALPACA}\n\n### Instruction:\nHello\n\n### Response:\n",
}


def rendered(tokenizer: PreTrainedTokenizerBase, name: str, messages: list[dict[str, object]], **more: object) -> str:
    template, more = resolve_template(name), {"add_generation_prompt": True} | more
    return str(tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **more))


@pytest.fixture
def llama_like(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    tokenizer.bos_token, tokenizer.eos_token = "<s>", "</s>"
    return tokenizer


@pytest.mark.parametrize("name", BUILTIN_TEMPLATES)
def test_a_built_in_template_writes_the_published_format(llama_like: PreTrainedTokenizerBase, name: str) -> None:
    assert rendered(llama_like, name, MESSAGES) == RENDERED[name]
    assert rendered(llama_like, name, MESSAGES[1:2]) == WITHOUT_SYSTEM[name]


@pytest.mark.parametrize("name", BUILTIN_TEMPLATES)
def test_a_tokenizer_without_a_beginning_token_gets_none(llama_like: PreTrainedTokenizerBase, name: str) -> None:
    llama_like.bos_token = None
    assert rendered(llama_like, name, MESSAGES) == RENDERED[name].replace("<s>", "")


@pytest.mark.parametrize("name", BUILTIN_TEMPLATES)
def test_a_conversation_by_a_built_in_template_is_one_row_if_answers_end_with_eos(
    tokenizer: PreTrainedTokenizerBase, name: str
) -> None:
    """The tokenizer's end-of-sequence token is chatml's; models of other marks have theirs."""
    marks = {"llama3": "<|eot_id|>", "gemma": "<end_of_turn>", "phi3": "<|end|>"}
    if name in marks:
        tokenizer.add_special_tokens({"eos_token": marks[name]})
    turns = tuple(Turn(Role(message["role"]), message["content"].strip()) for message in MESSAGES)
    encoder = SampleEncoder(tokenizer, seq_length=512, rules=EncodingRules(chat_template=BUILTIN_TEMPLATES[name]))
    encoded = encoder.encode(Conversation(turns), "here")
    ids, is_target = row_of(*encoded.rows)
    ends = [
        tokenizer.decode([token])
        for token, end in zip(ids, [*(is_target[:-1] & ~is_target[1:]), True], strict=True)
        if end
    ]
    assert ends == [tokenizer.eos_token] * 2
    targets = tokenizer.decode(ids[is_target].tolist()).replace(tokenizer.eos_token, "|").split("|")
    assert [target.strip() for target in targets] == ["Hi there", "A model", ""]
    assert encoded.notes == {EncodingNote.UNUSED_END}, "the conversation ends with a question"


def test_a_tokenizer_that_ends_otherwise_gets_its_own_end_behind_the_templates(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    encoder = SampleEncoder(tokenizer, seq_length=512, rules=EncodingRules(chat_template=BUILTIN_TEMPLATES["gemma"]))
    encoded = encoder.encode(Conversation((Turn(Role.USER, "Hello"), Turn(Role.ASSISTANT, "Hi"))), "here")
    ids, is_target = row_of(*encoded.rows)
    assert tokenizer.decode(ids[is_target].tolist()) == "Hi<end_of_turn>\n<|im_end|>"
    assert encoded.notes == {EncodingNote.OTHER_END}


def test_chatml_writes_tools_calls_and_their_answers_as_hermes_and_qwen_do(tokenizer: PreTrainedTokenizerBase) -> None:
    schemas = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("sum", "now")]
    calls: list[dict[str, object]] = [
        {"type": "function", "function": {"name": "sum", "arguments": {"of": [1, 2]}}},
        {"name": "now", "arguments": '{"zone": "Øst"}'},
    ]
    messages: list[dict[str, object]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Sum and time?"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": calls},
        {"role": "tool", "content": "3"},
        {"role": "tool", "content": "12:00"},
        {"role": "assistant", "content": "3, at noon."},
    ]
    expected = (
        "<|im_start|>system\nBe brief.\n\n# Tools\n\nYou may call one or more functions to assist with the user query."
        "\n\nYou are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
        f"{json.dumps(schemas[0])}\n{json.dumps(schemas[1])}\n</tools>\n\n"
        "For each function call, return a json object with function name and arguments within <tool_call></tool_call> "
        'XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\nSum and time?<|im_end|>\n<|im_start|>assistant\nLet me see.\n"
        '<tool_call>\n{"name": "sum", "arguments": {"of": [1, 2]}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {"zone": "Øst"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n12:00\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n3, at noon.<|im_end|>\n"
    )
    assert rendered(tokenizer, "chatml", messages, tools=schemas, add_generation_prompt=False) == expected


def test_a_template_is_found_by_name_or_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "my.jinja").write_text("{{ messages[0]['content'] }} é\n", encoding="utf-8")
    assert resolve_template(str(tmp_path / "my.jinja")) == "{{ messages[0]['content'] }} é\n"
    assert resolve_template("llama3") == BUILTIN_TEMPLATES["llama3"]
    assert resolve_template(None) is None
    text = "{% for turn in messages %}{{ turn.content }}{% endfor %}"
    assert resolve_template(text) == text
