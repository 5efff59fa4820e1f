"""Published chat templates, retyped, and small tokenizers of the shapes that come with them.

Each template names the repository on Hugging Face whose tokenizer_config.json has it. Long instructions about tools are
shortened. Three are those of TRL (trl/chat_templates), which mark answers by `{% generation %}`. `tagged` puts these
tags into others, as TRL does, so that transformers tells the masks of their answers.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

ALTERNATE = (
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
)
# meta-llama/Llama-2-7b-chat-hf
LLAMA_2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    + ALTERNATE
    + "{% if loop.index0 == 0"
    " and system_message != false %}{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + "
    "message['content'] %}{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
# mistralai/Mistral-7B-Instruct-v0.1
MISTRAL_1 = (
    "{{ bos_token }}{% for message in messages %}" + ALTERNATE + "{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ message['content'] + eos_token + ' ' }}{% else %}"
    "{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
# mistralai/Mistral-7B-Instruct-v0.3
MISTRAL_3 = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] " + tools | tojson + "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}
            {{- out[:-1] + ', "id": "' + tool_call.id + '"}' }}
            {{- ", " if not loop.last else "]" + eos_token }}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content|string + ", " }}
        {{- '"call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""
# HuggingFaceH4/zephyr-7b-beta, TinyLlama/TinyLlama-1.1B-Chat-v1.0
ZEPHYR = """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""
# meta-llama/Meta-Llama-3-8B-Instruct
LLAMA_3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + "
    "message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
# meta-llama/Llama-3.2-3B-Instruct
LLAMA_3_2 = """{{- bos_token }}
{%- set date_string = strftime_now("%d %b %Y") %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Cutting Knowledge Date: December 2023\\nToday Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- if not tools is none %}
    {%- set first_user_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\nGiven the following functions, answer.\\n\\n' -}}
    {%- for t in tools %}
        {{- t | tojson(indent=4) + "\\n\\n" }}
    {%- endfor %}
    {{- first_user_message + "<|eot_id|>"}}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' + tool_call.arguments | tojson + "}<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" + message.content | tojson + "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
_QWEN_TOOLS = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
"""
_QWEN_CALLS = """{%- for tool_call in message.tool_calls or () %}
            {{- '\\n<tool_call>\\n{"name": "' + tool_call.function.name + '", "arguments": ' }}
            {{- tool_call.function.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}"""
_QWEN_END = """
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
# Qwen/Qwen2.5-7B-Instruct; with tags: TRL's qwen2_5_training.jinja
QWEN_2_5_TAGGED = (
    _QWEN_TOOLS
    + """{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>assistant' }}
        {%- generation %}
        {%- if message.content or not message.tool_calls %}
            {{- '\\n' + message.content }}
        {%- endif %}
        """
    + _QWEN_CALLS
    + """
        {%- endgeneration %}"""
    + _QWEN_END
)
QWEN_2_5 = QWEN_2_5_TAGGED.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")
_QWEN_3_REASONING = """{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        """
_QWEN_3_WRITTEN = (
    "{{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + "
    "content.lstrip('\\n') }}"
)
# Qwen/Qwen3-8B; with tags: TRL's qwen3_training.jinja, which keeps the reasoning of all answers
QWEN_3 = (
    _QWEN_TOOLS
    + """{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
"""
    + _QWEN_3_REASONING
    + "{%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}\n"
    + _QWEN_3_WRITTEN
    + """
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        """
    + _QWEN_CALLS
    + _QWEN_END
)
QWEN_3_TAGGED = (
    _QWEN_TOOLS
    + _QWEN_3_REASONING
    + "{% generation %}\n"
    + _QWEN_3_WRITTEN
    + _QWEN_CALLS
    + "{%- endgeneration %}"
    + _QWEN_END
)
# deepseek-ai/DeepSeek-R1-Distill-Qwen-7B
R1_DISTILL = (
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}"
    "{% set ns = namespace(is_first=false, is_tool=false, is_output_first=true, system_prompt='') %}"
    "{%- for message in messages %}{%- if message['role'] == 'system' %}"
    "{% set ns.system_prompt = message['content'] %}{%- endif %}{%- endfor %}{{bos_token}}{{ns.system_prompt}}"
    "{%- for message in messages %}{%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}"
    "{{'<｜User｜>' + message['content']}}{%- endif %}"
    "{%- if message['role'] == 'assistant' and message['content'] is none %}{%- set ns.is_tool = false -%}"
    "{%- for tool in message['tool_calls']%}{{'<｜Assistant｜><｜tool▁calls▁begin｜>' + tool['function']['name']"
    " + '\\n' + tool['function']['arguments'] + '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>'}}{%- endfor %}{%- endif %}"
    "{%- if message['role'] == 'assistant' and message['content'] is not none %}{%- if ns.is_tool %}"
    "{{'<｜tool▁outputs▁end｜>' + message['content'] + '<｜end▁of▁sentence｜>'}}{%- set ns.is_tool = false -%}"
    "{%- else %}{% set content = message['content'] %}{% if '</think>' in content %}"
    "{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{'<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>'}}{%- endif %}{%- endif %}"
    "{%- if message['role'] == 'tool' %}{%- set ns.is_tool = true -%}"
    "{{'<｜tool▁outputs▁begin｜>' + message['content']}}{%- endif %}{%- endfor -%}"
    "{% if ns.is_tool %}{{'<｜tool▁outputs▁end｜>'}}{% endif %}"
    "{% if add_generation_prompt and not ns.is_tool %}{{'<｜Assistant｜><think>\\n'}}{% endif %}"
)
# google/gemma-2-2b-it
GEMMA_2 = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}"
    "{% for message in messages %}" + ALTERNATE + "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}"
    "{% else %}{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\\n' + message['content']"
    " | trim + '<end_of_turn>\\n' }}{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}"
)
# microsoft/Phi-3-mini-4k-instruct; with tags: TRL's phi3_training.jinja
PHI_3 = (
    "{% for message in messages %}{% if message['role'] == 'system' %}{{'<|system|>\\n' + message['content'] + "
    "'<|end|>\\n'}}{% elif message['role'] == 'user' %}{{'<|user|>\\n' + message['content'] + '<|end|>\\n'}}"
    "{% elif message['role'] == 'assistant' %}{{'<|assistant|>\\n' + message['content'] + '<|end|>\\n'}}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"
)
# CohereForAI/aya-expanse-8b (that of c4ai-command-r-v01 differs in its default system message)
COHERE = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{{ '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>' + messages[0]['content'] + '<|END_OF_TURN_TOKEN|>' }}"
    "{% else %}{% set loop_messages = messages %}{% endif %}{% for message in loop_messages %}" + ALTERNATE + ""
    "{% set content = message['content'] %}{% if message['role'] == 'user' %}"
    "{{ '<|START_OF_TURN_TOKEN|><|USER_TOKEN|>' + content.strip() + '<|END_OF_TURN_TOKEN|>' }}"
    "{% elif message['role'] == 'assistant' %}"
    "{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>'  + content.strip() + '<|END_OF_TURN_TOKEN|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"
)
# allenai/OLMo-2-1124-7B-Instruct
OLMO_2 = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{ '<|system|>\\n' + message['content'] + '\\n' }}{% elif message['role'] == 'user' %}"
    "{{ '<|user|>\\n' + message['content'] + '\\n' }}{% elif message['role'] == 'assistant' %}{% if not loop.last %}"
    "{{ '<|assistant|>\\n'  + message['content'] + eos_token + '\\n' }}{% else %}"
    "{{ '<|assistant|>\\n'  + message['content'] + eos_token }}{% endif %}{% endif %}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}{% endfor %}"
)
# meta-llama/Meta-Llama-3-8B-Instruct with tags: TRL's llama3_training.jinja
LLAMA_3_TAGGED = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] | trim + '<|eot_id|>' }}"
    "{% endgeneration %}{% else %}{{ message['content'] | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)


def tagged(template: str, answer: str, header: str = "", when: str = "", blank: str = "") -> str:
    """Returns a template with tags around the expression that writes an answer. `header` and `blank` are what the same
    expression writes before and after it. `when` says that the message is an answer, if one expression writes them all.
    """
    begin, end = re.escape(header) + r" *\+ *" if header else "", r" *\+ *" + re.escape(blank) if blank else ""
    pattern = re.compile(r"\{\{(-?) *" + begin + re.escape(answer) + end + r" *\}\}(?=(\n?))")

    def with_tags(found: re.Match[str]) -> str:
        keeps_line = "+" if found[2] else ""
        before = f"{{{{{found[1]} {header} }}}}" if header else ""
        marked = f"{before}{{%{found[1]} generation %}}{{{{ {answer} }}}}{{% endgeneration {keeps_line}%}}"
        marked += f"{{{{ {blank} }}}}" if blank else ""
        return f"{{%{found[1]} if {when} %}}{marked}{{% else %}}{found[0]}{{% endif {keeps_line}%}}" if when else marked

    made, count = pattern.subn(with_tags, template)
    assert count == 1, (answer, count)
    return made


CORPUS = (
    "The answer is 4 and 42, not 12345.\n\nYou are terse. What is 2+2? [INST] x [/INST] user assistant system\n"
    "<|user|>\n<|assistant|>\n<think>\nLet me see: 2+2 is 4.\n</think>\n\n  Éa voilà, 数学\n"
)


@dataclass(frozen=True)
class Published:
    """A template, the shape of its tokenizer, and its tokens; those in `strips` take the blanks after them."""

    template: str
    shape: str
    bos: str
    eos: str
    added: tuple[str, ...] = ()
    strips: tuple[str, ...] = ()
    roles: frozenset[str] = field(default=frozenset(("system", "tool")))  # beside user and assistant

    def write(self, folder: Path) -> Path:
        """Write a tokenizer with its template, as a model's folder has them."""
        folder.mkdir(parents=True, exist_ok=True)
        SHAPES[self.shape](self).save(str(folder / "tokenizer.json"))
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": self.bos,
            "eos_token": self.eos,
            "chat_template": self.template,
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        return folder

    def _with_added(self, tokenizer: Tokenizer) -> Tokenizer:
        tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in (self.bos, self.eos, *self.added)])
        tokenizer.add_special_tokens([AddedToken(text, normalized=False, rstrip=True) for text in self.strips])
        return tokenizer


def byte_level(published: Published) -> Tokenizer:
    """Bytes as letters, cut by Llama 3's expression, with a BOS by a post-processor that cuts blanks off spans."""
    tokenizer = Tokenizer(models.BPE())
    expression = (
        r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
        [
            pre_tokenizers.Split(Regex(expression), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )  # type: ignore[call-arg]
    tokenizer.train_from_iterator([CORPUS] * 3, trainer)
    published._with_added(tokenizer)
    begin = processors.TemplateProcessing(
        single=f"{published.bos} $A", special_tokens=[(published.bos, tokenizer.token_to_id(published.bos))]
    )
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), begin])  # type: ignore[assignment]
    return tokenizer


def _with_byte_fallback(published: Published, normalizer: normalizers.Normalizer) -> Tokenizer:
    learned = Tokenizer(models.BPE())
    learned.normalizer = normalizer  # type: ignore[assignment]
    words = pre_tokenizers.Split(Regex("▁?[^▁\n]+|▁|\n"), "isolated")
    learned.pre_tokenizer = words  # type: ignore[assignment]
    learned.train_from_iterator([CORPUS] * 3, trainers.BpeTrainer(vocab_size=200, show_progress=False))  # type: ignore[call-arg]
    model = json.loads(learned.to_str())["model"]
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *(word for word in model["vocab"] if word != "\n")]
    vocab = {name: number for number, name in enumerate(names)}
    merges = [tuple(pair) for pair in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(  # type: ignore[assignment]
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return published._with_added(tokenizer)


def prepended(published: Published) -> Tokenizer:
    """Llama 2's: a ▁ before the text and after each special token."""
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer = _with_byte_fallback(published, normalizer)
    tokenizer.normalizer = normalizer  # type: ignore[assignment]
    return tokenizer


def metaspace(published: Published) -> Tokenizer:
    """That of newer conversions of Llama 2's: a ▁ before the text."""
    tokenizer = _with_byte_fallback(published, normalizers.Replace(" ", "▁"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)  # type: ignore[assignment]
    return tokenizer


def byte_fallback(published: Published) -> Tokenizer:
    """Gemma's: blanks are ▁, nothing is put before."""
    tokenizer = _with_byte_fallback(published, normalizers.Replace(" ", "▁"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")  # type: ignore[assignment]
    return tokenizer


SHAPES = {
    "bytes": byte_level,
    "prepended": prepended,
    "metaspace": metaspace,
    "fallback": byte_fallback,
}
_HEADERS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_IM = ("<|im_start|>", "<|im_end|>")
_THINK = ("<think>", "</think>")
_INST = (
    "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
)  # fmt: skip
_COHERE = tuple(f"<|{name}_TOKEN|>" for name in ("START_OF_TURN", "END_OF_TURN", "SYSTEM", "USER", "CHATBOT"))
_R1 = (
    "<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁outputs▁begin｜>",
    "<｜tool▁outputs▁end｜>",
)  # fmt: skip
_PHI = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
SYSTEM, NONE = frozenset(("system",)), frozenset[str]()
PUBLISHED = {
    "llama-2": Published(LLAMA_2, "prepended", "<s>", "</s>", roles=SYSTEM),
    "mistral-0.1": Published(MISTRAL_1, "prepended", "<s>", "</s>", roles=NONE),
    "mistral-0.1 metaspace": Published(MISTRAL_1, "metaspace", "<s>", "</s>", roles=NONE),
    "mistral-0.3": Published(MISTRAL_3, "prepended", "<s>", "</s>", _INST),
    "zephyr": Published(ZEPHYR, "prepended", "<s>", "</s>", roles=SYSTEM),
    "tinyllama": Published(ZEPHYR, "metaspace", "<s>", "</s>", roles=SYSTEM),
    "llama-3": Published(LLAMA_3, "bytes", "<|begin_of_text|>", "<|end_of_text|>", _HEADERS, roles=SYSTEM),
    "llama-3 tagged": Published(
        LLAMA_3_TAGGED, "bytes", "<|begin_of_text|>", "<|end_of_text|>", _HEADERS, roles=SYSTEM
    ),
    "llama-3.2": Published(LLAMA_3_2, "bytes", "<|begin_of_text|>", "<|eot_id|>", _HEADERS),
    "qwen2.5": Published(QWEN_2_5, "bytes", "<|endoftext|>", "<|im_end|>", _IM),
    "qwen2.5 tagged": Published(QWEN_2_5_TAGGED, "bytes", "<|endoftext|>", "<|im_end|>", _IM),
    "qwen3": Published(QWEN_3, "bytes", "<|endoftext|>", "<|im_end|>", (*_IM, *_THINK)),
    "qwen3 tagged": Published(QWEN_3_TAGGED, "bytes", "<|endoftext|>", "<|im_end|>", (*_IM, *_THINK)),
    "r1-distill": Published(R1_DISTILL, "bytes", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", (*_R1, *_THINK)),
    "gemma-2": Published(GEMMA_2, "fallback", "<bos>", "<eos>", ("<start_of_turn>", "<end_of_turn>"), roles=NONE),
    "phi-3": Published(PHI_3, "prepended", "<s>", "<|endoftext|>", strips=_PHI, roles=SYSTEM),
    "cohere": Published(COHERE, "bytes", "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>", _COHERE, roles=SYSTEM),
    "olmo-2": Published(OLMO_2, "bytes", "<|endoftext|>", "<|endoftext|>", roles=SYSTEM),
}
_WITH_EOS, _ASSISTANT = "message['content'] + eos_token", "'<|assistant|>\\n'"
_GEMMA = ("message['content'] | trim + '<end_of_turn>\\n'", "'<start_of_turn>' + role + '\\n'", "role == 'model'")
_COHERE_TURN = ("content.strip() + '<|END_OF_TURN_TOKEN|>'", "'<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>'")
_WITH_TAGS = {
    "llama-2": tagged(LLAMA_2, "' ' + content.strip() + ' ' + eos_token"),
    "mistral-0.1": tagged(MISTRAL_1, _WITH_EOS, blank="' '"),
    "mistral-0.3": tagged(MISTRAL_3, '" " + message["content"]|trim + eos_token'),
    "zephyr": tagged(ZEPHYR, _WITH_EOS, _ASSISTANT),
    "tinyllama": tagged(ZEPHYR, _WITH_EOS, _ASSISTANT),
    "llama-3.2": tagged(LLAMA_3_2, "message['content'] | trim + '<|eot_id|>'", when="message.role == 'assistant'"),
    "gemma-2": tagged(GEMMA_2, *_GEMMA),
    "phi-3": tagged(PHI_3, "message['content'] + '<|end|>\\n'", _ASSISTANT),
    "cohere": tagged(COHERE, *_COHERE_TURN),
    "olmo-2": tagged(tagged(OLMO_2, _WITH_EOS, _ASSISTANT, blank="'\\n'"), _WITH_EOS, _ASSISTANT),
}
PUBLISHED |= {f"{name} tagged": replace(PUBLISHED[name], template=template) for name, template in _WITH_TAGS.items()}
