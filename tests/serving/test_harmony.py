"""Models that write in channels (gpt-oss): markers stay in the text, chats tell them apart."""

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

from dflash_trt.chat import HARMONY, Answer, has_channels
from dflash_trt.chat.formats.harmony import MARKERS
from dflash_trt.decoding import Request, SequenceState
from dflash_trt.serving.front.output_processor import OutputProcessor

PYCODE = Path(__file__).parents[2] / "examples" / "pycode" / "target" / "tokenizer.json"
ANSWER = (
    "<|channel|>analysis<|message|>A < b, so 1.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>It is <|1|> é."
)
CALL = "<|start|>assistant to=f<|channel|>commentary <|constrain|>json<|message|>{}"
FIRST_CALL = " to=f<|channel|>commentary json<|message|>{}"


@pytest.fixture
def tokenizer() -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(PYCODE))
    assert not has_channels(tokenizer)
    tokenizer.add_special_tokens(
        [AddedToken(marker, special=True) for marker in (*MARKERS, "<|return|>")]
    )
    return tokenizer


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_thoughts_are_told_from_what_is_said(size: int) -> None:
    for text, expected in (
        (ANSWER, ("A < b, so 1.", "It is <|1|> é.")),
        ("no markers at all, a < b", ("", "no markers at all, a < b")),
        ("<|channel|>final<|message|>Hi", ("", "Hi")),
        ("<|channel|>analysis<|message|>Hm<|end|>" + CALL, ("Hm", CALL)),
        ("<|channel|>commentary<|message|>First this.", ("", "First this.")),
        ("<|channel|>analysis<|message|>cut off <|en", ("cut off <|en", "")),
        (FIRST_CALL, ("", FIRST_CALL)),
        ("", ("", "")),
    ):
        answer = Answer(HARMONY, [], None)
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        news = [answer.push(piece, last=False) for piece in pieces]
        news.append(answer.push("", last=True))
        told = "".join(each.reasoning for each in news), "".join(each.content for each in news)
        assert told == expected
        assert not any(each.calls for each in news)


def test_markers_are_in_the_text_but_not_the_end(tokenizer: Tokenizer) -> None:
    end = tokenizer.token_to_id("<|return|>")
    for stop_words in ((), ("never",)):
        request = Request([1], max_tokens=999, stop_ids=frozenset({end}))
        sequence = SequenceState(request)
        choice, text = OutputProcessor(0, sequence, 0.0, tokenizer, stop_words, ""), ""
        for token in tokenizer.encode(ANSWER + "<|return|>", add_special_tokens=False).ids:
            sequence.commit([token])
            news = choice.output(final_only=False)
            text += news.text_output[0] if news else ""
        assert sequence.finish_reason == "stop"
        assert text == ANSWER
