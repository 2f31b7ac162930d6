"""Requests as clients send them, and what steers the pair to answers worth asking for."""

import json
import re
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from dflash_trt.chat.formats import FORMATS, REASONING_TAGS, ReasoningTags
from dflash_trt.chat.formats.lark import Lark
from tests.support.chats import ANSWER, CALL, SYSTEM, TOOL, USER, call, result, says
from tests.support.tool_templates import WRITING, renderer

Json = dict[str, Any]
# what templates write around an answer
HEAD = re.compile(
    r"(<.start.>|<.im_start.>|<.im_assistant.>|<.start_header_id.>)assistant"
    r"(<.end_header_id.>|<.im_middle.><think></think>)?\n*|\]~b\]ai\n\n*"
)
ENDS = ("<|im_end|>\n", "<|im_end|>", "</s>", "<|eot_id|>", "[e~[\n")
NAMED = "<|tool_call_argument_begin|>"  # its ids name the function
LETTERS = "abc é"
SCHEMA: Json = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 4}, "b": {"enum": [1, None, "x"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
CHANNELS = "<|message|>"  # a mark of harmony
HARMONY_THOUGHT = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant"
SAMPLING: list[Json] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.0, "top_k": 5, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 0.8, "presence_penalty": 0.6, "frequency_penalty": 0.4},
]


@dataclass(frozen=True)
class Case:
    """A request, in the names of Triton's inputs; `messages` or a `prompt`, text or ids."""

    prompt: str | list[int] = ""
    messages: list[Json] = field(default_factory=list)
    tools: list[Json] = field(default_factory=list)
    options: Json = field(default_factory=dict)

    @property
    def input(self) -> Any:
        return self.messages or self.prompt


class Subject(NamedTuple):
    """What a request is about."""

    kind: str  # chat, text, ids
    steering: str  # see `_steer`


# dealt in turns, so that a hundred requests have all of them
SUBJECTS = [
    *[Subject("chat", "calls")] * 6,
    *[Subject("chat", "required")] * 2,
    *[Subject("chat", "continued")] * 2,
    *[Subject("chat", steering) for steering in ("schema", "letters", "marks", "free")],
    *[Subject("text", steering) for steering in ("letters", "calls", "schema", "free")],
    *[Subject("ids", steering) for steering in ("letters", "marks")],
]


@dataclass(frozen=True)
class Dialect:
    """What a format's answers are made of."""

    sign: str
    call: str  # as the template writes it
    marks: tuple[str, ...]
    tags: ReasoningTags

    @property
    def template(self) -> str:
        return WRITING[self.sign]


def dialect_of(sign: str) -> Dialect:
    render = renderer(WRITING[sign])
    function = call(1)["function"]
    function["arguments"] = json.loads(function["arguments"])
    sent = f"functions.{function['name']}:0" if sign == NAMED else "abcdefghi"
    called = [{**call(1), "id": sent, "function": function}]
    message = {**CALL, "content": "", "tool_calls": called}
    before = render(messages=[USER])
    written = HEAD.sub("", render(messages=[USER, message]).removeprefix(before))
    for end in ENDS:
        written = written.removesuffix(end)
    [form] = [each for each in FORMATS if each.sign in written][:1]
    thinks, capitals, channel = REASONING_TAGS
    tags = capitals if "[INST]" in before else thinks
    if form.name == "gemma4":
        tags = channel
    return Dialect(
        sign, written, tuple(dict.fromkeys([*form.markers, tags.open, tags.close])), tags
    )


def answer_of(dialect: Dialect, dice: Random) -> str:
    """Return an answer as the format has it: at times a thought, a text, and a call or two."""
    tags = dialect.tags
    thought = f"{tags.open}{tags.label}{{}}{tags.close}"
    if CHANNELS in dialect.marks:
        thought = HARMONY_THOUGHT
    if dice.random() < 0.3:  # the template opened it
        thought = f"{{}}{tags.close}"
    before = dice.choice(["", thought, thought + "\n"]).format(dice.choice(["so", "", "a\nb "]))
    return f"{before}{dice.choice(['', '', 'c'])}{dialect.call * dice.choice([0, 1, 1, 1, 2])}"


def broken(dialect: Dialect, dice: Random) -> list[str]:
    """Return the parts of an answer with marks lost, doubled and misplaced; at times as it is."""
    parts = [answer_of(dialect, dice) or "so"]
    for mark in dialect.marks:
        split = [part.split(mark) for part in parts]
        parts = []
        for pieces in split:
            for piece in pieces[:-1]:
                parts += [piece, mark]
            parts.append(pieces[-1])
    parts = [part for part in parts if part]
    for _ in range(dice.choice([0, 0, 0, 1, 2, 3])):
        at = dice.randrange(len(parts))
        change = dice.choice(["lose", "double", "insert", "cut"])
        if change == "lose" and len(parts) > 1:
            del parts[at]
        elif change == "double":
            parts.insert(at, parts[at])
        elif change == "insert":
            parts.insert(at, dice.choice([*dialect.marks, " ", "\n", "so", '{"a": "']))
        else:
            parts[at] = parts[at][: dice.randrange(len(parts[at])) + 1]
    return parts


def answers_grammar(dialect: Dialect, tokenizer: Tokenizer, dice: Random) -> str:
    """Return a grammar of some broken calls, their marks as tokens or at times spelled."""
    lark = Lark({mark: tokenizer.token_to_id(mark) for mark in dialect.marks})
    spelled = dice.random() < 0.3
    answers = []
    for _ in range(dice.randint(1, 3)):
        parts = broken(dialect, dice)
        is_mark = [part in dialect.marks and not spelled for part in parts]
        written = zip(is_mark, parts, strict=True)
        answers.append(
            " ".join((lark.marker if mark else lark.text)(part) for mark, part in written)
        )
    return lark.grammar(" | ".join(answers))


def make_cases(dialect: Dialect, tokenizer: Tokenizer, count: int, dice: Random) -> list[Case]:
    subjects: list[Subject] = []
    while len(subjects) < count:
        subjects += dice.sample(SUBJECTS, len(SUBJECTS))
    return [
        make_case(subjects[place], SAMPLING[place % len(SAMPLING)], dialect, tokenizer, dice)
        for place in range(count)
    ]


def make_case(
    subject: Subject, sampling: Json, dialect: Dialect, tokenizer: Tokenizer, dice: Random
) -> Case:
    options: Json = {**sampling, "max_tokens": dice.randint(1, 40)}
    if options["temperature"]:
        options["seed"] = dice.randrange(2**31)
    if dice.random() < 0.15:
        options["n"] = dice.randint(2, 3)
    if dice.random() < 0.25:
        options["logprobs"] = dice.randint(1, 3)
    steering = subject.steering
    if steering == "continued":
        steering = dice.choice(["calls", "calls", "letters", "marks"])
    _steer(options, steering, dialect, tokenizer, dice)
    if subject.kind != "chat":
        return _text_case(subject, options, tokenizer, dice)
    question = says("user", "".join(dice.choices(LETTERS, k=dice.randint(1, 30))))
    chat = dice.choice([[], [], [SYSTEM], [USER, ANSWER], [USER, CALL, result(1), ANSWER]])
    chat = [*chat, question]
    if "<think>" in dialect.template and dice.random() < 0.5:
        options["chat_template_kwargs"] = {"enable_thinking": False}
    if subject.steering == "continued":
        chat.append(_begun_message(dialect, dice))
        options |= {"continue_final_message": True, "add_generation_prompt": False}
    if subject.steering == "required":
        name = {"type": "function", "function": {"name": TOOL["function"]["name"]}}
        options["tool_choice"] = dice.choice(["required", name])
    has_calls = any("tool_calls" in message for message in chat)
    wants_tools = subject.steering in ("calls", "required") or dice.random() < 0.6
    tools = [TOOL] if wants_tools or has_calls else []
    if tools and dice.random() < 0.3:
        options["parallel_tool_calls"] = False
    return Case(messages=chat, tools=tools, options=options)


def _text_case(subject: Subject, options: Json, tokenizer: Tokenizer, dice: Random) -> Case:
    text = "".join(dice.choices(LETTERS + "xyz\n", k=dice.randint(1, 60)))
    if dice.random() < 0.3:
        options["exclude_input_in_output"] = False
    prompt = tokenizer.encode(text).ids if subject.kind == "ids" else text
    return Case(prompt=prompt, options=options)


def _begun_message(dialect: Dialect, dice: Random) -> Json:
    """Return an answer that is to go on: in a thought, in a text, or behind a call."""
    if CHANNELS in dialect.marks or dice.random() < 0.4:
        return says("assistant", "answer-1" + dice.choice(["", " ", "\n", "é"]))
    if dice.random() < 0.6:
        return says("assistant", f"{dialect.tags.open}{dialect.tags.label}thought-1")
    return dict(CALL)


def _steer(options: Json, kind: str, dialect: Dialect, tokenizer: Tokenizer, dice: Random) -> None:
    """Add what makes the pair write letters, marks, an answer with calls, JSON or an end."""
    ids = [str(tokenizer.encode(letter).ids[0]) for letter in LETTERS]
    marks = [str(tokenizer.token_to_id(mark)) for mark in dialect.marks]
    marks = [mark for mark in marks if mark != "None"]
    biases: dict[str, float] = {}
    words: list[str] = []
    if kind in ("letters", "marks"):
        biases = dict.fromkeys(ids, dice.choice([3.0, 6.0]))
        if dice.random() < 0.6:
            words += ["".join(dice.choices(LETTERS, k=dice.randint(1, 3))) for _ in range(2)]
    if kind == "marks":
        biases |= dict.fromkeys(marks, 6.0)
    if kind == "calls":
        options["guided_grammar"] = answers_grammar(dialect, tokenizer, dice)
    if kind in ("calls", "required"):
        options["max_tokens"] = dice.choice([200, 200, 200, dice.randint(1, 60)])
    if kind == "marks" or (kind == "calls" and dice.random() < 0.2):
        mark = dice.choice(dialect.marks)
        words.append(mark[dice.randrange(len(mark)) :])
    if kind == "schema":
        options["max_tokens"] = dice.choice([80, dice.randint(1, 30)])
    if kind == "schema" and CHANNELS in dialect.marks:  # channels have grammars alone
        options["guided_grammar"] = f"start: %json {json.dumps(SCHEMA)}"
    elif kind == "schema":
        form = {"name": "it", "schema": SCHEMA}
        options["response_format"] = {"type": "json_schema", "json_schema": form}
    if biases and dice.random() < 0.5:
        biases[str(tokenizer.token_to_id("<|end|>"))] = 4.0
    if biases:
        options["logit_bias"] = biases
    if words:
        options["stop_words"] = [*dict.fromkeys(words)]
