"""Chat templates in the forms that published models have, written for tests, and conversations with every
answer between `[[` and `]]` in the text that they render to."""

CHATML = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if m.role == 'user' %}"
    "{{ '[INST] ' }}{% if loop.last and system is defined %}{{ system + '\n\n' }}{% endif %}"
    "{{ m.content + '[/INST]' }}"
    "{% else %}{{ ' ' + m.content | trim + eos_token }}{% endif %}{% endfor %}"
)
"""The system prompt is in the last message of the user, and only if that is the last of all: no beginning of
a conversation with a system prompt renders as a beginning of the text."""
TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\nTools:' }}{% for tool in tools %}{{ '\n' + tool | tojson }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{{ '<|im_start|>user\n<tool_response>' + m.content + '</tool_response><|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% for call in m.tool_calls or [] %}"
    "{{ '<tool_call>' + call.function | tojson + '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
REASONING = (
    "{% for m in messages %}{% set text = m.content %}"
    "{% if m.role == 'assistant' and not loop.last %}{% set text = text.split('</think>')[-1] | trim %}"
    "{% endif %}{{ '<|im_start|>' + m.role + '\n' + text + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""What was thought for earlier answers is dropped, as in Qwen 3."""
GENERATION = (
    "{% for m in messages %}{{ '<s>' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + eos_token }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}"
)

SPECIAL = {
    CHATML: {"eos_token": "<|im_end|>"},
    LLAMA_3: {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    MISTRAL: {"bos_token": "<s>", "eos_token": "</s>"},
    TOOLS: {"eos_token": "<|im_end|>"},
    REASONING: {"eos_token": "<|im_end|>"},
    GENERATION: {"eos_token": "</s>"},
}


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str, **others: object) -> dict[str, object]:
    return {"role": "assistant", "content": content, **others}


SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
ADD = {"type": "function", "function": {"name": "add"}}

CASES = {
    "chatml": (
        CHATML,
        [SYSTEM, user("2 + 2?"), assistant("4"), user("Yes?"), assistant("Yes, é 日本.\n")],
        None,
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2 + 2?<|im_end|>\n"
        "<|im_start|>assistant\n[[4<|im_end|>]]\n<|im_start|>user\nYes?<|im_end|>\n"
        "<|im_start|>assistant\n[[Yes, é 日本.\n<|im_end|>]]\n",
    ),
    "chatml that ends with a question": (
        CHATML,
        [user("Why?"), assistant("Because."), user("Because?")],
        None,
        "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n[[Because.<|im_end|>]]\n"
        "<|im_start|>user\nBecause?<|im_end|>\n",
    ),
    "an answer first": (
        CHATML,
        [assistant("Hello!"), user("Hello!"), assistant("Hello!")],
        None,
        "<|im_start|>assistant\n[[Hello!<|im_end|>]]\n<|im_start|>user\nHello!<|im_end|>\n"
        "<|im_start|>assistant\n[[Hello!<|im_end|>]]\n",
    ),
    "llama 3": (
        LLAMA_3,
        [SYSTEM, user(" Hi "), assistant(" Hello. "), user("Bye"), assistant("Bye")],
        None,
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n[[Hello.<|eot_id|>]]"
        "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n[[Bye<|eot_id|>]]",
    ),
    "mistral": (
        MISTRAL,
        [user("Hi"), assistant(" Hello "), user("Bye"), assistant("Bye")],
        None,
        "<s>[INST] Hi[/INST][[ Hello</s>]][INST] Bye[/INST][[ Bye</s>]]",
    ),
    "mistral whose system prompt is nowhere": (
        MISTRAL,
        [SYSTEM, user("Bye"), assistant("Bye"), user("Bye"), assistant("Bye, bye")],
        None,
        "<s>[INST] Bye[/INST] [[Bye</s>]][INST] Bye[/INST] [[Bye, bye</s>]]",
    ),
    "tools": (
        TOOLS,
        [
            user("1 + 1?"),
            assistant("", tool_calls=[CALL]),
            {"role": "tool", "content": "2"},
            assistant("It is 2."),
        ],
        [ADD],
        '<|im_start|>system\nTools:\n{"type": "function", "function": {"name": "add"}}<|im_end|>\n'
        "<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n"
        '[[<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>]]\n'
        "<|im_start|>user\n<tool_response>2</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n[[It is 2.<|im_end|>]]\n",
    ),
    "earlier reasoning that is dropped": (
        REASONING,
        [user("1?"), assistant("One."), user("2?"), assistant("<think>Hm</think>Two.")],
        None,
        "<|im_start|>user\n1?<|im_end|>\n<|im_start|>assistant\n[[One.<|im_end|>]]\n"
        "<|im_start|>user\n2?<|im_end|>\n<|im_start|>assistant\n[[<think>Hm</think>Two.<|im_end|>]]\n",
    ),
    "generation blocks": (
        GENERATION,
        [user("a"), assistant("b"), user("b"), assistant("c")],
        None,
        "<s>a<s>[[b</s>]]<s>b<s>[[c</s>]]",
    ),
}
"""Name -> template, messages, tools, and the text with its answers marked, written by hand."""


def read_marks(marked: str) -> tuple[str, tuple[tuple[int, int], ...]]:
    """Return the text without `[[` and `]]`, and the ranges that were between them."""
    text = ""
    spans = []
    for idx, part in enumerate(marked.split("[[")):
        inside, _, after = part.partition("]]") if idx else ("", "", part)
        if idx:
            spans.append((len(text), len(text) + len(inside)))
        text += inside + after
    return text, tuple(spans)
