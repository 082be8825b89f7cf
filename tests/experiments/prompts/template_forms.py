"""Small templates in the forms in which published ones write calls; with each, a call as it writes it.

JSON between marks, behind one mark, in a list, or with the name as its key; a name, or the id of the call, and then JSON;
a name and then each argument between marks, with scalars as JSON or as Python has them, with or without line ends around
a value, or with a word for what is text; arguments in brackets, as in a program; and the name in the head of the message.
"""

# ruff: noqa: E501 - lines of templates

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How one kind of template writes an answer with calls."""

    calls: str
    """The part of the template that writes `message.tool_calls`."""
    written: str
    """What it makes of look(city="Rome", deep=True)."""
    end: str = "<|im_end|>"
    head: str = "<|im_start|>assistant\\n"
    """What an answer with calls begins with, where it begins otherwise than others."""
    ids: str = ""
    """What the ids of calls look like, where the template writes these in place of names."""


_MACROS = """\
{%- macro as_json(value) %}{{ value | tojson if value is not string else value }}{% endmacro %}
{%- macro as_python(value) %}
    {{- value | tojson if value is mapping or (value is sequence and value is not string) else value | string }}
{%- endmacro %}
{%- macro nested(value) %}
    {%- if value is string %}{{ '<|q|>' + value + '<|q|>' }}
    {%- elif value is boolean %}{{ 'true' if value else 'false' }}
    {%- elif value is mapping %}
        {{- '{' }}{% for key, one in value | items %}{{ key + ':' }}{{ nested(one) }}{{ ',' if not loop.last }}{% endfor %}{{ '}' }}
    {%- elif value is sequence %}
        {{- '[' }}{% for one in value %}{{ nested(one) }}{{ ',' if not loop.last }}{% endfor %}{{ ']' }}
    {%- else %}{{ value | string }}{% endif %}
{%- endmacro %}
"""


def template_of(form: Form) -> str:
    """A whole template around the form."""
    return (
        _MACROS
        + """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}{% for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {{- 'HEAD' + message.content }}CALLS{{ 'END\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant' + ('' if 'HEAD' == '<|im_start|>assistant' else '\\n') }}{% endif %}
""".replace("HEAD", form.head)
        .replace("CALLS", form.calls)
        .replace("END", form.end)
    )


def _each(text: str) -> str:
    return "{% for call in message.tool_calls %}" + text + "{% endfor %}"


def _marked(begin: str, middle: str, end: str, macro: str) -> str:
    value = "{{ " + macro + "(value) }}"
    return (
        "{% for key, value in call.function.arguments | items %}"
        f"{{{{ '{begin}' + key + '{middle}' }}}}{value}{{{{ '{end}' }}}}{{% endfor %}}"
    )


_JSON = (
    "{{ '{\"name\": \"' + call.function.name + '\", \"arguments\": ' }}{{ call.function.arguments | tojson }}{{ '}' }}"
)
_NAME, _ARGUMENTS = "{{ call.function.name }}", "{{ call.function.arguments | tojson }}"
_SAID = '{"city": "Rome", "deep": true}'

FORMS = {
    "json between marks": Form(
        calls=_each("{{ '<tool_call>\\n' }}" + _JSON + "{{ '\\n</tool_call>' }}"),
        written='<tool_call>\n{"name": "look", "arguments": ' + _SAID + "}\n</tool_call>",
    ),
    "list behind a mark": Form(
        calls="{{ '[CALLS] [' }}" + _each(_JSON + "{{ ', ' if not loop.last }}") + "{{ ']' }}",
        written='[CALLS] [{"name": "look", "arguments": ' + _SAID + "}]",
    ),
    "name as the key": Form(
        calls="{{ '<|calls|>[' }}"
        + _each(
            "{{ '{\"' + call.function.name + '\": ' }}" + _ARGUMENTS + "{{ '}' + (', ' if not loop.last else '') }}"
        )
        + "{{ ']<|/calls|>' }}",
        written='<|calls|>[{"look": ' + _SAID + "}]<|/calls|>",
    ),
    "name before the json": Form(
        calls=_each("{{ call.function.name + '<|invoke|>' }}" + _JSON + "{{ '<|done|>' }}"),
        written='look<|invoke|>{"name": "look", "arguments": ' + _SAID + "}<|done|>",
    ),
    "name, then json": Form(
        calls=_each("{{ '[CALLS]' }}" + _NAME + "{{ '[ARGS]' }}" + _ARGUMENTS), written="[CALLS]look[ARGS]" + _SAID
    ),
    "name and place, then json": Form(
        calls="{{ '<|calls|>' }}"
        + _each(
            "{{ '<|call|>functions.' }}"
            + _NAME
            + "{{ ':' + loop.index0 | string + '<|args|>' }}"
            + _ARGUMENTS
            + "{{ '<|/call|>' }}"
        )
        + "{{ '<|/calls|>' }}",
        written="<|calls|><|call|>functions.look:0<|args|>" + _SAID + "<|/call|><|/calls|>",
    ),
    "id, then json": Form(
        calls="{{ '<|calls|>' }}"
        + _each("{{ '<|call|>' + call.id + '<|args|>' }}" + _ARGUMENTS + "{{ '<|/call|>' }}")
        + "{{ '<|/calls|>' }}",
        written="<|calls|><|call|>functions.look:0<|args|>" + _SAID + "<|/call|><|/calls|>",
        ids="functions.{name}:{place}",
    ),
    "fenced json": Form(
        calls="{{ '<|calls|>' }}"
        + _each(
            "{{ '<|call|>function<|sep|>' }}" + _NAME + "{{ '\\n```json\\n' }}" + _ARGUMENTS + "{{ '\\n```<|/call|>' }}"
        )
        + "{{ '<|/calls|>' }}",
        written="<|calls|><|call|>function<|sep|>look\n```json\n" + _SAID + "\n```<|/call|><|/calls|>",
    ),
    "name in the head": Form(
        calls="{% for call in message.tool_calls[:1] %}{{ ' to=functions.' }}"
        + _NAME
        + "{{ '<|channel|>commentary json<|message|>' }}"
        + _ARGUMENTS
        + "{% endfor %}",
        written=" to=functions.look<|channel|>commentary json<|message|>" + _SAID,
        head="<|im_start|>assistant",
        end="<|call|>",
    ),
    "each argument on lines, as Python": Form(
        calls=_each(
            "{{ '<tool_call>\\n<function=' }}"
            + _NAME
            + "{{ '>\\n' }}"
            + _marked("<parameter=", ">\\n", "\\n</parameter>\\n", "as_python")
            + "{{ '</function>\\n</tool_call>' }}"
        ),
        written="<tool_call>\n<function=look>\n<parameter=city>\nRome\n</parameter>\n<parameter=deep>\nTrue\n"
        "</parameter>\n</function>\n</tool_call>",
    ),
    "each argument, as JSON": Form(
        calls="{{ '<calls>\\n' }}"
        + _each(
            "{{ '<invoke name=\"' }}"
            + _NAME
            + "{{ '\">\\n' }}"
            + _marked('<parameter name="', '">', "</parameter>\\n", "as_json")
            + "{{ '</invoke>\\n' }}"
        )
        + "{{ '</calls>' }}",
        written='<calls>\n<invoke name="look">\n<parameter name="city">Rome</parameter>\n<parameter name="deep">true'
        "</parameter>\n</invoke>\n</calls>",
    ),
    "keys and values": Form(
        calls=_each(
            "{{ '<tool_call>' }}"
            + _NAME
            + "{{ '\\n' }}"
            + _marked("<arg_key>", "</arg_key>\\n<arg_value>", "</arg_value>\\n", "as_json")
            + "{{ '</tool_call>' }}"
        ),
        written="<tool_call>look\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n<arg_key>deep</arg_key>\n"
        "<arg_value>true</arg_value>\n</tool_call>",
    ),
    "a word for what is text": Form(
        calls="{{ '<calls>\\n' }}"
        + _each(
            "{{ '<invoke name=\"' }}" + _NAME + "{{ '\">\\n' }}{% for key, value in call.function.arguments | items %}"
            "{{ '<parameter name=\"' + key + '\" string=\"' + ('true' if value is string else 'false') + '\">' }}"
            "{{ as_json(value) }}{{ '</parameter>\\n' }}{% endfor %}{{ '</invoke>\\n' }}"
        )
        + "{{ '</calls>' }}",
        written='<calls>\n<invoke name="look">\n<parameter name="city" string="true">Rome</parameter>\n'
        '<parameter name="deep" string="false">true</parameter>\n</invoke>\n</calls>',
    ),
    "a program's arguments": Form(
        calls="{{ '<|calls|>[' }}"
        + _each(
            _NAME + "{{ '(' }}{% for key, value in call.function.arguments | items %}{{ key + '=' }}"
            '{{ "\'" + value + "\'" if value is string else (value | tojson if value is mapping else value | string) }}'
            "{{ ', ' if not loop.last }}{% endfor %}{{ ')' + (', ' if not loop.last else '') }}"
        )
        + "{{ ']<|/calls|>' }}",
        written="<|calls|>[look(city='Rome', deep=True)]<|/calls|>",
    ),
    "quoted with a token": Form(
        calls=_each(
            "{{ '<|call>call:' }}" + _NAME + "{{ '{' }}{% for key, value in call.function.arguments | items %}"
            "{{ key + ':' }}{{ nested(value) }}{{ ',' if not loop.last }}{% endfor %}{{ '}<call|>' }}"
        ),
        written="<|call>call:look{city:<|q|>Rome<|q|>,deep:true}<call|>",
    ),
}
