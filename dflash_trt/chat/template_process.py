"""The process of a chat template: see `templates.py`. It ends when its socket is closed."""

import json
import os
import resource
import signal
import socket
import sys
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dflash_trt.chat.templates import (
    DONE,
    MAX_BYTES,
    MEMORY,
    REFUSED,
    SECONDS,
    TOO_MUCH,
    receive,
    send,
)


class _Generation(Extension):
    """`{% generation %}` marks text for training; it renders as its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """That of `transformers` (`apply_chat_template`)."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment.filters["tojson"] = to_json  # jinja's own escapes HTML
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _answer(data: bytes, made: list[Template]) -> bytes:
    """The first message is the template's source, the others are values to render it with."""
    if not made:
        made.append(_environment().from_string(data.decode()))
        return b""
    text = made[0].render(json.loads(data)).encode()
    if len(text) > MAX_BYTES:
        raise MemoryError
    return text


def main() -> None:
    """`python -m dflash_trt.chat.template_process SOCKET`."""
    link = socket.socket(fileno=int(sys.argv[1]))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    made: list[Template] = []
    with suppress(BrokenPipeError, ConnectionResetError):  # its parent is gone
        while data := receive(link):
            signal.setitimer(signal.ITIMER_PROF, SECONDS)  # its signal ends the process
            try:
                answer = DONE + _answer(data, made)
            except MemoryError:
                answer = TOO_MUCH + f"it takes more than {MEMORY >> 20} MiB".encode()
            except Exception as error:  # a template may do anything with what it is given
                answer = REFUSED + str(error)[:500].encode(errors="replace")
            signal.setitimer(signal.ITIMER_PROF, 0)
            send(link, answer)
    os._exit(0)


if __name__ == "__main__":
    main()
