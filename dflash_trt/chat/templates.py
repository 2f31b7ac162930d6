"""Chat templates in jinja2's sandbox, as in `transformers`, with limits.

Templates are programs from a checkpoint, run on clients' input. Limits cover the text, steps of
loops over `range`, and sizes of products, powers and printf formats; jinja2 itself does not limit
time or memory.
"""

import json
import re
from datetime import datetime
from typing import Any

from jinja2 import Template as JinjaTemplate
from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range

from dflash_trt.errors import CheckpointError, RequestError

MAX_SIZE = 64 << 20  # characters of a text; items of a product
MAX_STEPS = 1 << 20  # in all loops over `range` of one rendering
MAX_POWER = 1 << 16  # bits of a power
WIDE = re.compile(r"%[-+ #0]*(\*|\d{5,}|\d*\.(\*|\d{5,}))")  # a printf field of 10,000 or more


class LimitError(RequestError):
    """The template exceeds a limit."""


class _Generation(Extension):
    """Extension for `{% generation %}`, which marks training text; renders its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )

        def raise_exception(message: str) -> None:
            raise TemplateError(message)

        def to_json(value: Any, ensure_ascii: bool = False, *styles: Any, **named: Any) -> str:
            named |= zip(("indent", "separators", "sort_keys"), styles, strict=False)
            return json.dumps(value, ensure_ascii=ensure_ascii, **named)

        self.filters["tojson"] = to_json  # jinja's own escapes HTML
        self.globals["raise_exception"] = raise_exception
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for items, times in ((left, right), (right, left)):
                if hasattr(items, "__len__") and isinstance(times, int):
                    _check_limit(len(items) * times, MAX_SIZE, "items")
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_limit(left.bit_length() * right, MAX_POWER, "bits")
        elif operator == "%" and isinstance(left, str) and WIDE.search(left):
            _check_limit(MAX_SIZE + 1, MAX_SIZE, "characters")
        return super().call_binop(context, operator, left, right)


class Template:
    """A compiled template: CheckpointError if invalid, RequestError if it refuses messages."""

    def __init__(self, source: str) -> None:
        try:
            source.encode()  # no lone surrogates
            self._template: JinjaTemplate = _Environment().from_string(source)
        except Exception as error:  # RecursionError and MemoryError too
            problem = f"the chat template is not valid ({error})"
            raise CheckpointError(problem, "Download or export the tokenizer again") from None

    def __call__(self, **values: Any) -> str:
        steps = 0
        size = 0
        parts = []

        def counted_range(*limits: int) -> range:
            nonlocal steps
            result = safe_range(*limits)
            steps += len(result)
            _check_limit(steps, MAX_STEPS, "steps")
            return result

        try:
            for part in self._template.generate({**values, "range": counted_range}):
                size += len(part)
                _check_limit(size, MAX_SIZE, "characters")
                parts.append(part)
            text = "".join(parts)
            text.encode()
            return text
        except LimitError:
            raise
        except Exception as error:  # a template may raise anything
            why = f"{error}"[:500].encode(errors="replace").decode()
            raise _refused(RequestError, why) from None


def _refused(kind: type[RequestError], why: str) -> RequestError:
    return kind(
        f"the chat template refuses the messages: {why}",
        "Send roles and fields that the model's chat template knows",
    )


def _check_limit(size: int, limit: int, unit: str) -> None:
    if size > limit:
        raise _refused(LimitError, f"it makes more than {limit} {unit}")
