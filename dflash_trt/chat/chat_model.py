"""A model's chats: messages and tools to its prompt, and the markup of its answers."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from dflash_trt.chat import typescript
from dflash_trt.chat.arrange import PROBES, Arrangement, Needs, arrange, has_calls, learn_needs
from dflash_trt.chat.dialect import (
    EXTRAS,
    TOOL,
    Dialect,
    call_numbers,
    convert_for_template,
    dialect_of,
    with_effort,
)
from dflash_trt.chat.formats import (
    HARMONY,
    HERMES,
    AnswerParser,
    Tool,
    grammar,
    parse_tools,
    required_tools,
)
from dflash_trt.chat.formats.kimi import next_number
from dflash_trt.chat.messages import THOUGHT, Message, read_messages, with_defaults, without_nulls
from dflash_trt.chat.render import EXPORT_TOKENIZER, Render, as_chat, load_chat_template
from dflash_trt.chat.rewrites import (
    REWRITES,
    Rewrite,
    calls_in_words,
    one_call_a_message,
    rewritten,
    with_tools,
)
from dflash_trt.chat.specimen import specimen_of
from dflash_trt.chat.templates import LimitError
from dflash_trt.checkpoints import NO_DRAFTER, Model, NotKnown, Pair, eos_token_ids, load_tokenizer
from dflash_trt.checks import Found, check
from dflash_trt.errors import CheckpointError, DflashError, RequestError

MAX_CACHED = 2**14  # characters of a specimen
BEGUN_MESSAGE = "<|channel|>{}<|message|>"  # of harmony
BEGUN_ANALYSIS = BEGUN_MESSAGE.format("analysis")
OPEN_END = "CONTINUE_FINAL_MESSAGE"  # follows a text to be continued; the prompt is cut there
QUESTION = as_chat("probe asked")
ANSWER = {"role": "assistant", "content": "probe said"}


@dataclass(frozen=True)
class ChatPrompt:
    text: str
    thinking: bool  # ends within reasoning, which the answer continues
    grammar: str  # llguidance's, of required calls; "": none
    hidden: frozenset[int]  # special tokens to leave out of the answer
    tools: tuple[Tool, ...] = ()  # available tools
    parallel: bool = False  # several calls at once
    begun: str = ""  # the answer's text before, which the answer continues
    first_call: int = 0  # the number of its first call, where ids count the conversation's


class ChatModel:
    """A model's chat behavior, learned from its tokenizer and chat template, if any."""

    def __init__(self, tokenizer: Tokenizer, render: Render | None) -> None:
        tokens = tokenizer.get_added_tokens_decoder()
        self._added = {token.content: number for number, token in tokens.items()}
        self._special = frozenset(number for number, token in tokens.items() if token.special)
        self._render = render
        self.dialect: Dialect = dialect_of(render, self._added)
        self._rewrites = REWRITES
        if self.dialect.format is not HERMES:
            self._rewrites = tuple(rewrite for rewrite in REWRITES if rewrite is not calls_in_words)
        self._needs = self._learn()
        self._cached = lru_cache(256)(self._find_arrangement)

    @cached_property
    def chats(self) -> dict[str, str]:
        """By kind of chat: the rewrites used, or the template's refusal."""
        if self._render is None:
            return {}
        return {kind: self._try_chat(chat) for kind, chat in PROBES.items()}

    @property
    def hidden(self) -> frozenset[int]:
        """Special tokens to leave out of an answer to a plain prompt."""
        # without markers a channel's name would appear in the text
        return frozenset() if self.dialect.format is HARMONY else self._special

    def hidden_in_chats(self, *, with_tools: bool) -> frozenset[int]:
        """Special tokens to leave out of a chat's answer; its parts are told by the others."""
        markers: list[str] = []
        tags = self.dialect.reasoning_tags
        if tags:
            markers += (tags.open, tags.close)
        if with_tools and self.dialect.format:
            markers += self.dialect.format.markers
        return self.hidden - {self._added.get(marker, -1) for marker in markers}

    def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] = (),
        tool_choice: Any = "auto",
        *,
        parallel: bool = True,
        continue_final_message: bool = False,
        template_values: Mapping[str, Any],
    ) -> ChatPrompt:
        """Return a chat's prompt; RequestError for invalid tools and refused chats.

        continue_final_message: the answer continues the last message's text.
        """
        dialect = self.dialect
        known = parse_tools(tools)
        required = required_tools(known, tool_choice)
        shown = [] if tool_choice == "none" else without_nulls(tools)
        values = with_effort(dialect, template_values)
        tags = dialect.reasoning_tags
        opened = f"{tags.open}{tags.label}".rstrip() if tags else ""
        begun = ""
        if continue_final_message:
            text = self._continued(messages, shown, values)
            begun = begun_answer(dialect, messages)
            thinking = tags is not None and begun.startswith(tags.open) and tags.close not in begun
            thinking = thinking or begun.startswith(BEGUN_ANALYSIS)
            if required and dialect.format is HARMONY and messages[-1].get("tool_calls"):
                raise RequestError(
                    "tool_choice asks for a call behind those of the last message, with which "
                    "this model's turn ends",
                    "Send the calls' results, or tool_choice auto.",
                )
        else:
            _, text = self._arrange(messages, shown, values)
            thinking = bool(opened) and text.rstrip().endswith(opened)
        prompt = ChatPrompt(
            text,
            thinking=thinking,
            grammar="",
            hidden=self.hidden_in_chats(with_tools=bool(shown)),
            tools=tuple(required or known) if shown else (),
            parallel=parallel and not self._splits_calls and tool_choice in ("auto", "required"),
            begun=begun,
            first_call=next_number(call_numbers(dialect, messages)),
        )
        if not required:
            return prompt
        return replace(prompt, grammar=self.grammar(prompt))

    def grammar(self, prompt: ChatPrompt, answer: Any = None) -> str:
        """Return llguidance's grammar of calls, after reasoning.

        answer: JSON schema of a text allowed instead of calls.
        """
        dialect = self.dialect
        if prompt.tools and dialect.format is None:
            what = "tool_choice" if answer is None else "the form of an answer beside tools"
            raise RequestError(
                f"{what} cannot be enforced: this model's chat template writes calls in a form "
                "that is not known here",
                "Leave it out.",
            )
        tags = dialect.reasoning_tags
        begun = AnswerParser(dialect.format, prompt.tools, tags, begun=prompt.begun)
        if prompt.tools and begun.is_within_call:
            what = "tool_choice" if answer is None else "the form of an answer beside tools"
            raise RequestError(
                f"{what} cannot be enforced where continue_final_message begins: the last message "
                "ends within a call",
                "Send tool_choice auto without a response_format, or the message without the call.",
            )
        return grammar(
            dialect.format,
            prompt.tools,
            tags,
            self._added,
            parallel=prompt.parallel,
            thinking=prompt.thinking,
            is_begun=bool(prompt.begun),
            answer=answer,
            first_call=prompt.first_call,
        )

    def _continued(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any],
        values: Mapping[str, Any],
    ) -> str:
        """Return a prompt that ends where the last message does."""
        last = _check_continued(messages, values)
        ends = dict(last)
        calls = ends.pop("tool_calls", ())
        name = "content" if last["content"] or calls else THOUGHT
        _, shown = self._arrange(
            [*messages[:-1], {**ends, name: f"{last[name]}{OPEN_END}"}], tools, values
        )
        text, mark, after = shown.rpartition(OPEN_END)
        is_shown = mark != ""
        if calls and is_shown:
            _, text = self._arrange(messages, tools, values)
            is_shown = text.endswith(after)
            text = text.removesuffix(after)
        if not is_shown:
            raise RequestError(
                "continue_final_message: this model's chat template does not show where the last "
                "message ends",
                "Send the beginning of an answer's text as the last message.",
            )
        return text

    def _learn(self) -> Needs:
        values = {"add_generation_prompt": True}

        def show(messages: list[Message]) -> str:
            tools = [TOOL] if has_calls(messages) and self.dialect.shows_tools else []
            return self._render_chat(messages, tools, values)

        return learn_needs(show, self._rewrites)

    @property
    def _splits_calls(self) -> bool:
        return one_call_a_message in self._needs["two calls"]

    def _try_chat(self, messages: list[Message]) -> str:
        tools = [TOOL] if has_calls(messages) else []
        try:
            rewrites, _ = self._arrange(messages, tools, {"add_generation_prompt": True})
        except RequestError as error:
            return error.problem
        return ", ".join(rewrite.__name__ for rewrite in rewrites) or "as it is"

    def _arrange(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any],
        values: Mapping[str, Any],
    ) -> tuple[tuple[Rewrite, ...], str]:
        """Return the rewrites that make the template show all messages, and its text."""
        read = read_messages(messages)
        if tools and not self.dialect.shows_tools:
            read = with_tools(read, tools)
            tools = ()
        key = json.dumps([specimen_of(read), bool(tools), dict(values)])
        find = self._cached if len(key) <= MAX_CACHED else self._find_arrangement
        arrangement = find(key)
        arranged = rewritten(read, arrangement.rewrites)
        try:
            text = self._render_chat(arranged, tools, values)
        except RequestError:
            if not tools:
                raise
            text = self._render_chat(arranged, with_defaults(tools), values)
        if arrangement.refused:
            number = arrangement.refused[0]
            index = number - (len(read) - len(messages))  # tools may come first
            what = "tools"
            if index >= 0:
                what = f"messages[{index}] of role {read[number]['role'][:40]!r}"
            raise RequestError(
                f"{what} would be lost: this model's chat template leaves such a message out",
                "Send it in another role, such as user.",
            )
        return arrangement.rewrites, text

    def _find_arrangement(self, key: str) -> Arrangement:
        specimen, has_tools, values = json.loads(key)
        tools = [TOOL] if has_tools else []
        return arrange(
            specimen,
            lambda messages: self._render_chat(messages, tools, values),
            self._needs,
            self._rewrites,
        )

    def _render_chat(
        self, messages: list[Message], tools: Sequence[Any], values: Mapping[str, Any]
    ) -> str:
        if self._render is None:
            raise RequestError(
                "This model's tokenizer has no chat template", "Send a plain prompt."
            )
        types = None
        if self.dialect.typescript:
            tools = typescript.sorted_deeply(tools)
            types = typescript.declarations(tools)
        extra = EXTRAS[self.dialect.extra](tools)
        if types is not None:
            extra[typescript.ARGUMENT] = types
        shown = convert_for_template(self.dialect, messages)
        return self._render(**{**values, **extra, "messages": shown})


def _check_continued(messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any]) -> Message:
    """Return the message that is to be continued, in one form."""
    last = read_messages(messages)[-1]
    goes_on = last["role"] == "assistant" and (
        last["content"] or THOUGHT in last or "tool_calls" in last
    )
    if values.get("add_generation_prompt") or not goes_on:
        raise RequestError(
            "continue_final_message needs a last message of role assistant with text, a thought or "
            "a call in it, and add_generation_prompt false",
            "Send the beginning of the answer as the last message.",
        )
    for index, call in enumerate(last.get("tool_calls", ())):
        if not isinstance(call["function"]["arguments"], dict):
            raise RequestError(
                f"continue_final_message: the arguments of tool_calls[{index}] of the last message "
                "are no JSON object, and an answer does not begin within them",
                "Send the call's beginning as the message's text, as the model writes it.",
            )
    return last


def begun_answer(dialect: Dialect, messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text that a continued message would have been read from, without calls."""
    last = read_messages(messages)[-1]
    thought = last.get(THOUGHT, "")
    text = last["content"]
    is_over = bool(text) or "tool_calls" in last
    if dialect.format is HARMONY:
        channel = "final" if is_over else "analysis"
        return f"{BEGUN_MESSAGE.format(channel)}{text if is_over else thought}"
    tags = dialect.reasoning_tags
    if tags is None or not thought:
        return str(text)
    begun = f"{tags.open}{tags.label}{thought}"
    return f"{begun}{tags.close}{text}" if is_over else begun


@check("error")
def chat_template(pair: Pair) -> Found:
    """Check that the template renders a plain message within the limits, as serving requires."""
    try:
        _chat_model(pair).prompt(QUESTION, template_values={"add_generation_prompt": True})
    except LimitError as error:
        raise CheckpointError(
            f"{error.problem} ({pair.target.directory})", EXPORT_TOKENIZER
        ) from None
    except RequestError as error:
        return Found(False, error.problem, "Send what it takes", "warning")
    return Found(True, "the chat template writes a plain message")


@check("note")
def end_of_turn(pair: Pair) -> Found:
    """Tell what the chat template writes after an answer: that token ends a text, too."""
    target = pair.target
    model = _chat_model(pair)
    try:
        token = turn_end(model, target.tokenizer)
    except RequestError as error:
        raise NotKnown(error.problem) from None
    if token is None:
        return Found(True, "the chat template writes no token after an answer")
    stated = target.read[0].eos_token_ids if target.read else None
    ends = stated or eos_token_ids(target.directory, target.number("vocab_size"))
    number = target.tokens[token]
    what = f"the chat template writes {token!r} after an answer, which ends a text"
    if number in ends:
        return Found(True, what)
    fix = f"Other servers need {number} in eos_token_id of generation_config.json"
    return Found(False, f"{what} beside those that the checkpoint names, {list(ends)}", fix)


def turn_end(model: ChatModel, tokenizer: Tokenizer) -> str | None:
    """Return the token that a template writes after an answer; None if it writes none.

    Without it a model whose config names another end goes on with turns that it makes up. Raises
    RequestError if the template refuses a plain chat.
    """
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    chat = [*as_chat("Hello"), ANSWER]
    for messages in (chat, [*chat, *QUESTION]):  # after the last answer, or between two turns
        text = model.prompt(messages, template_values={}).text
        _, _, after = text.partition(ANSWER["content"])
        before_next, _, _ = after.partition(QUESTION[0]["content"])
        written = [token for token in added if token in before_next]
        if written:
            return min(written, key=lambda token: (before_next.find(token), -len(token)))
    return None


def turn_end_ids(directory: Path, vocab_size: int) -> tuple[int, ...]:
    """Return the id of a tokenizer directory's `turn_end`, if it has one within the vocabulary."""
    template = load_chat_template(directory)
    if template is None:
        return ()
    tokenizer = load_tokenizer(directory)
    try:
        token = turn_end(ChatModel(tokenizer, template), tokenizer)
    except RequestError:
        return ()
    if token is None:
        return ()
    number = tokenizer.token_to_id(token)
    return () if number is None or number >= vocab_size else (number,)


def about_chats(target: Path) -> dict[str, Any] | None:
    """Return what probing a directory's template showed; None without a template."""
    try:
        model = _chat_model(Pair(Model("target", target, {}), NO_DRAFTER))
    except (DflashError, NotKnown):
        return None
    dialect = model.dialect
    shown = "shown" if dialect.shows_tools else "described in text"
    if dialect.typescript:
        shown = "shown as TypeScript, or as JSON where a schema has no such form"
    return {
        "calls": dialect.format.name if dialect.format else "in a form that is not known here",
        "tools": shown,
        "thoughts": dialect.thoughts or "left out",
        **model.chats,
    }


def _chat_model(pair: Pair) -> ChatModel:
    template = load_chat_template(pair.target.directory)
    if template is None:
        raise NotKnown("the target has no chat template")
    return ChatModel(pair.target.tokenizer, template)


CHAT_CHECKS = (chat_template, end_of_turn)
