"""A model's chats: messages and tools in, its prompt out, and what of the answer is markup."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from dflash_trt.chat.dialect import Dialect, dialect_of
from dflash_trt.chat.formats import HARMONY, chosen, grammar, parse_tools
from dflash_trt.chat.render import Render
from dflash_trt.chat.tool_messages import to_template
from dflash_trt.errors import RequestError


@dataclass(frozen=True)
class ChatPrompt:
    """The prompt of a chat."""

    text: str
    thinking: bool  # it ends within a thought, which the answer begins with
    grammar: str  # llguidance's, of the calls that have to come; "": none have
    hidden: frozenset[int]  # special tokens that are no text in the answer


class ChatModel:
    """What is known of a model by its tokenizer and its chat template, if it has one."""

    def __init__(self, tokenizer: Tokenizer, render: Render | None) -> None:
        """Renders the template a few times."""
        tokens = tokenizer.get_added_tokens_decoder()
        self._added = {token.content: at for at, token in tokens.items()}
        self._special = frozenset(at for at, token in tokens.items() if token.special)
        self._render = render
        self.dialect: Dialect = dialect_of(render, self._added)

    @property
    def hidden(self) -> frozenset[int]:
        """Special tokens that are no text in an answer to a plain prompt.

        A channel's name would stand in the text of another without its markers.
        """
        return frozenset() if self.dialect.format is HARMONY else self._special

    def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] = (),
        tool_choice: Any = "auto",
        *,
        parallel: bool = True,
        template_values: Mapping[str, Any],
    ) -> ChatPrompt:
        """RequestError for tools that are none, and what it refuses."""
        if self._render is None:
            raise RequestError(
                "This model's tokenizer has no chat template", "Send a plain prompt."
            )
        dialect = self.dialect
        known = parse_tools(tools)
        wanted = chosen(known, tool_choice)
        shown = [] if tool_choice == "none" else tools
        told, tools_told = to_template(dialect, messages, shown)
        text = self._render(**{**template_values, "messages": told, "tools": tools_told})
        tags, calls = dialect.reasoning_tags, ""
        opened = f"{tags.open}{tags.label}".rstrip() if tags else ""
        thinking = bool(opened) and text.rstrip().endswith(opened)
        if wanted:
            if dialect.format is None:
                raise RequestError(
                    "tool_choice cannot be enforced: this model's chat template writes calls in a "
                    "form that is not known here",
                    "Let it be auto.",
                )
            calls = grammar(
                dialect.format,
                wanted,
                tags,
                self._added,
                parallel=parallel and not dialect.one_call and tool_choice == "required",
                thinking=thinking,
            )
        markers = [tags.open, tags.close] if tags else []
        markers += dialect.format.markers if shown and dialect.format else []
        return ChatPrompt(
            text, thinking, calls, self.hidden - {self._added.get(each, -1) for each in markers}
        )
