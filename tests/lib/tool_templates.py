"""Chat templates that show tools and write calls as published ones do, by the form they write.

They are short, and ours: what a template says beside calls is left out.
"""

from __future__ import annotations

from dflash_trt.chat.render import Render
from dflash_trt.chat.templates import Template

_CHATML = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + (m.content or '') }}CALLS"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}THINK{% endif %}"
)
_TOOLS = "{%- if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}"


def _chatml(calls: str, think: str = "", tools: str = _TOOLS) -> str:
    return tools + _CHATML.replace("CALLS", calls).replace("THINK", think)


_EACH = "{%- for c in m.tool_calls or [] %}{% set f = c.function %}"
_HERMES = (
    _EACH + '{{ \'\\n<tool_call>\\n{"name": "\' + f.name + \'", "arguments": \' }}'
    "{{ f.arguments | tojson }}{{ '}\\n</tool_call>' }}{% endfor %}"
)
_THINK = "{{ '<think>\\n' }}{% if enable_thinking is false %}{{ '\\n</think>\\n\\n' }}{% endif %}"
# Gemma 4: strings between `<|"|>`, keys bare and sorted
_GEMMA_VALUES = """
{%- macro value(v) -%}
{%- if v is string -%}<|"|>{{ v }}<|"|>
{%- elif v is boolean -%}{{ 'true' if v else 'false' }}
{%- elif v is mapping -%}{
{%- for k, w in v | dictsort -%}{{ k }}:{{ value(w) }}{{ ',' if not loop.last }}{%- endfor -%}}
{%- elif v is sequence -%}[
{%- for w in v -%}{{ value(w) }}{{ ',' if not loop.last }}{%- endfor -%}]
{%- else -%}{{ v }}{%- endif -%}
{%- endmacro -%}"""
_MISTRAL = (
    "{%- for m in messages %}{% if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}"
    "{% elif m.role == 'system' %}{{ '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}"
    "{% elif m.role == 'tool' %}{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}"
    "{% else %}{{ m.content }}CALLS{{ eos_token }}{% endif %}{% endfor %}"
)
_ID = (
    "{% if c.id is undefined or c.id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}"
    "{% endif %}"
)
_LLAMA = (
    "{%- for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}"
    "{%- if m.tool_calls %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    "{%- set f = m.tool_calls[0].function %}"
    '{{- \'{"name": "\' + f.name + \'", "parameters": \' }}{{ f.arguments | tojson }}{{ "}" }}'
    "{%- else %}{{ m.content | trim }}{% endif %}{{ '<|eot_id|>' }}{% endfor %}"
    "{%- if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
_HARMONY = (
    "{%- for m in messages %}{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}"
    "{{ '<|start|>assistant to=functions.' + f.name + '<|channel|>commentary json<|message|>' }}"
    "{{ f.arguments | tojson }}{{ '<|call|>' }}"
    "{% elif m.role == 'assistant' %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}"
    "{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
# by the sign of the format that it writes
WRITING = {
    "<tool_call>": _chatml(_HERMES, _THINK),
    "<tool_call>\n<function=": _chatml(
        _EACH + "{{ '\\n<tool_call>\\n<function=' + f.name + '>\\n' }}"
        "{%- for k, v in f.arguments | items %}{{ '<parameter=' + k + '>\\n' }}"
        "{{- v if v is string else (v | tojson if v is iterable else v | string) }}"
        "{{- '\\n</parameter>\\n' }}{% endfor %}{{ '</function>\\n</tool_call>' }}{% endfor %}"
    ),
    "<|tool_call>": _GEMMA_VALUES
    + _chatml(
        _EACH + "{{ '<|tool_call>call:' + f.name + value(f.arguments) + '<tool_call|>' }}"
        "{%- endfor %}"
    ),
    "[CALL_ID]": _TOOLS
    + _MISTRAL.replace(
        "CALLS",
        _EACH + _ID + "{{ '[TOOL_CALLS]' + f.name + '[CALL_ID]' + c.id + '[ARGS]' }}"
        "{{ f.arguments | tojson }}{% endfor %}",
    ),
    "[ARGS]": _TOOLS
    + _MISTRAL.replace(
        "CALLS",
        _EACH + "{{ '[TOOL_CALLS]' + f.name + '[ARGS]' }}{{ f.arguments | tojson }}{% endfor %}",
    ),
    "[TOOL_CALLS]": _TOOLS
    + _MISTRAL.replace(
        "CALLS",
        "{% if m.tool_calls %}{{ '[TOOL_CALLS] [' }}"
        + _EACH
        + _ID
        + "{{ (f | tojson)[:-1] + ', \"id\": \"' + c.id + '\"}' }}{{ ', ' if not loop.last }}"
        "{% endfor %}{{ ']' }}{% endif %}",
    ),
    "functions.": _TOOLS + _HARMONY,
    '"parameters": {': _TOOLS + _LLAMA,
}
CHATML = _chatml("", tools="")  # knows no tools, as SmolLM2's
NO_SYSTEM = (  # as Gemma 2's
    "{%- for m in messages %}{% if m.role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{{ '<start_of_turn>' + m.role + '\\n' + m.content + '<end_of_turn>\\n' }}{% endfor %}"
)
UNKNOWN = _chatml(_EACH + "{{ '<call:' + f.name + '>' }}{{ f.arguments | tojson }}{% endfor %}")
AS_TEXT = _chatml(  # wants the arguments as text
    _EACH + "{{ '<tool_call>{\"name\": \"' + f.name + '\", \"arguments\": ' + f.arguments + '}' }}"
    "{{ '</tool_call>' }}{% endfor %}"
)


def renderer(source: str) -> Render:
    """As `load_chat_template` gives one."""
    template = Template(source)
    return lambda **values: template(bos_token="<s>", eos_token="</s>", **values)
