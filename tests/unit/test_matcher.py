"""Grammars and their matchers, by themselves: masks, looking ahead, limits, tokenizers."""

import json
import re
import threading
import time
import traceback

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from dflash_trt.decoding import Grammar, Grammars
from dflash_trt.decoding.grammar import Matcher
from dflash_trt.errors import RequestError

END = "<|end|>"
MERGES = [("t", "h"), ("th", "e"), ("r", "e"), ("the", "re"), ('"', ":"), ("{", '"')]


def byte_level() -> Tokenizer:
    """Return a tokenizer like those of GPT-2, Llama 3, Qwen, gpt-oss and SmolLM2."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*letters, *("".join(pair) for pair in MERGES)]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END, "<|call|>"])
    return tokenizer


def sentencepiece() -> Tokenizer:
    """Return one like those of Llama 2, Mistral and Gemma: spaces are ▁, unknown bytes <0x..>."""
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    tokens += [chr(code) for code in range(33, 127)] + ["".join(pair) for pair in MERGES]
    vocab = {token: i for i, token in enumerate(tokens)}
    model = models.BPE(vocab=vocab, merges=MERGES, unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([END, "<|call|>"])
    return tokenizer


KINDS = {"byte level": byte_level, "sentencepiece": sentencepiece}


BYTES_OF_LETTERS = {letter: byte for byte, letter in bytes_to_unicode().items()}


def of_byte_level(word: str) -> bytes:
    if word.startswith("<|"):
        return b""
    return bytes(BYTES_OF_LETTERS[letter] for letter in word)


def of_sentencepiece(word: str) -> bytes:
    if word.startswith(("<|", "<unk>")):
        return b""
    if word.startswith("<0x"):
        return bytes([int(word[3:5], 16)])
    return word.replace("▁", " ").encode()


BYTES = {"byte level": of_byte_level, "sentencepiece": of_sentencepiece}


def grammars(tokenizer: Tokenizer, padding: int = 0, ends: bool = True) -> Grammars:
    size = tokenizer.get_vocab_size() + padding
    return Grammars(tokenizer, size, [tokenizer.token_to_id(END)] if ends else [])


def after(matcher: Matcher, tokens: list[int] | None = None) -> set[int] | None:
    """Return what may follow a chain of drafts; None: it does not matter."""
    mask = matcher.masks(tokens or [])[-1]
    if mask is None:
        return None
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


HEAD = 'the {"é there": '.encode()


def may_go_on(text: bytes) -> bool:
    """Return whether these bytes may begin a text of the grammar below."""
    if not text.startswith(HEAD):
        return HEAD.startswith(text)
    return re.fullmatch(rb"[0-9]*|[0-9]+}", text[len(HEAD) :]) is not None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("padding", [0, 1, 77])
@pytest.mark.parametrize("ends", [True, False])
def test_masks_allow_what_the_text_may_go_on_with(kind: str, padding: int, ends: bool) -> None:
    """Against a search over the whole vocabulary. Padded ids are never allowed."""
    tokenizer = KINDS[kind]()
    grammar = Grammar("regex", 'the \\{"é there": [0-9]+\\}')
    matcher = grammars(tokenizer, padding, ends).matcher(grammar)
    pieces = {token: BYTES[kind](word) for word, token in tokenizer.get_vocab().items()}
    whole = ids_of(tokenizer, HEAD.decode() + "12")
    for end in range(len(whole) + 1):
        before = b"".join(pieces[token] for token in whole[:end])
        right = {token for token, piece in pieces.items() if piece and may_go_on(before + piece)}
        # where bytes are forced, their usual tokens are; elsewhere any that fits may come
        forced = matcher.forced_tokens(whole[:end])[:1]
        assert after(matcher, whole[:end]) == (set(forced) or right)
        assert right.issuperset(forced)
        assert bool(forced) == (len(before) < len(HEAD))
    assert after(matcher, ids_of(tokenizer, HEAD.decode() + "12}")) is None


@pytest.mark.parametrize("kind", KINDS)
def test_forced_tokens_are_the_usual_ones(kind: str) -> None:
    tokenizer = KINDS[kind]()
    matcher = grammars(tokenizer).matcher(Grammar("regex", "the there is [0-9]"))
    forced = matcher.forced_tokens([])
    assert forced == ids_of(tokenizer, "the there is ")[: len(forced)]
    assert tokenizer.decode(forced).startswith("the there is")
    assert matcher.count_allowed([], forced) == len(forced)


@pytest.mark.parametrize("kind", KINDS)
def test_the_end_comes_where_a_grammar_may_end(kind: str) -> None:
    tokenizer = KINDS[kind]()
    end, (x,), (y,) = tokenizer.token_to_id(END), ids_of(tokenizer, "x"), ids_of(tokenizer, "y")
    matcher = grammars(tokenizer).matcher(Grammar("regex", "xx?y?"))
    assert after(matcher) == {x}
    assert x in (after(matcher, [x]) or ())
    assert end in (after(matcher, [x]) or ())
    assert after(matcher, [x, end]) is None
    assert matcher.count_allowed([x], [end, x]) == 1
    for token, ended in ((x, False), (x, False), (y, True)):
        matcher.push(token)
        assert matcher.is_stopped == ended
    without = grammars(tokenizer, ends=False).matcher(Grammar("regex", "xx?y?"))
    assert x in (after(without, [x]) or ())
    assert max(after(without, [x]) or ()) < end
    assert after(without, [x, y]) is None
    with pytest.raises(RequestError, match="no token may come"):
        grammars(tokenizer, ends=False).matcher(Grammar("regex", ""))


def test_special_tokens_come_by_name_alone() -> None:
    tokenizer = byte_level()
    call = tokenizer.token_to_id("<|call|>")
    made = grammars(tokenizer)
    anything = after(made.matcher(Grammar("lark", "start: /(.|\\n)*/")))
    assert anything is not None
    assert call not in anything
    assert after(made.matcher(Grammar("lark", 'start: <|call|> "x"'))) == {call}


def test_a_tokenizer_without_bytes_is_refused() -> None:
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(9)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    with pytest.raises(RequestError, match="this model's tokenizer"):
        Grammars(words, 9, [1]).matcher(Grammar("regex", "a"))


def test_looking_ahead_leaves_no_trace() -> None:
    """Random chains, allowed and not, against a matcher that never looks ahead."""
    tokenizer, rng = byte_level(), np.random.default_rng(0)
    made = grammars(tokenizer)
    schema = {"type": "array", "items": {"enum": ["the", "there", True, 12]}, "maxItems": 9}
    grammar = Grammar("json_schema", json.dumps(schema))
    looking, plain = made.matcher(grammar), made.matcher(grammar)
    text: list[int] = []
    for _ in range(40):
        tokens: list[int] = []
        for _ in range(12):
            options = sorted(after(looking, tokens) or {0})
            tokens.append(int(rng.choice([*options, rng.integers(250)])))
        masks = looking.masks(tokens)
        for node in range(1, len(tokens) + 1):
            path = tokens[:node]
            alone = made.matcher(grammar)
            for each in text:
                alone.push(each)
            legal = alone.count_allowed([], path) == len(path)
            assert looking.count_allowed([], path) == alone.count_allowed([], path)
            if legal:
                for each in path:
                    alone.push(each)
                assert alone.look_ahead() == ""
            expected = None if not legal or alone.is_stopped else alone.masks([])[0]
            assert (masks[node] is None) == (expected is None)
            assert expected is None or (masks[node] == expected).all()
        if rng.integers(2):
            looking.forced_tokens(tokens)
        allowed = after(looking)
        assert allowed is not None
        assert allowed == after(plain)
        text.append(int(rng.choice(sorted(allowed))))
        for matcher in (looking, plain):
            matcher.push(text[-1])
            assert matcher.look_ahead() == ""
        if looking.is_stopped:
            assert plain.is_stopped
            break
    else:
        assert len(text) == 40


def test_a_limit_met_ahead_of_the_text_ends_nothing() -> None:
    """The draft's mask allows nothing, so the text goes on without that draft."""
    tokenizer = byte_level()
    made = grammars(tokenizer)
    rules = [f"a{i}" for i in range(3000)]
    lark = f'start: "x" ("y" | "z" b)\nb: {" | ".join(rules)}\n'
    lark += "\n".join(f'{rule}: "{rule}"' for rule in rules)
    matcher = made.matcher(Grammar("lark", lark))
    x, y, z = (ids_of(tokenizer, letter)[0] for letter in "xyz")
    matcher.push(x)
    assert matcher.look_ahead() == ""
    assert after(matcher, [z]) == set()
    assert after(matcher) == {y, z}
    assert after(matcher, [y]) is None
    matcher.push(z)
    assert "2000" in matcher.look_ahead()


def test_a_schema_may_say_how_its_json_is_written() -> None:
    tokenizer = byte_level()
    (space,) = ids_of(tokenizer, " ")
    schema = {"type": "array", "items": {"type": "null"}}
    for options, spaced in (({}, False), ({"x-guidance": {"whitespace_flexible": True}}, True)):
        text = json.dumps({**schema, **options})
        matcher = grammars(tokenizer).matcher(Grammar("json_schema", text))
        allowed = after(matcher, ids_of(tokenizer, "["))
        assert allowed is not None
        assert (space in allowed) == spaced
    one_of = {"oneOf": [{"type": "integer"}, {"enum": [1]}], "x-guidance": {"coerce_one_of": True}}
    assert grammars(tokenizer).matcher(Grammar("json_schema", json.dumps(one_of)))


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("regex", "[ab", "unclosed character class"),
        ("regex", "(?=a)b", "look-around"),
        ("regex", "(" * 9000, "the grammar cannot be used"),
        ("lark", "start: A\nA: B\nB: A", "circular"),
        ("lark", "start: start", "NoExtension"),
        ("lark", "start: " + "(" * 9000, "nested"),
        ("lark", "start: x", "unknown name"),
        ("json_schema", "{", "EOF"),
        ("json_schema", "[" * 9000, "recursion"),
        ("json_schema", '{"type": "objec"}', "objec"),
        ("json_schema", '{"type": "integer", "minimum": 3, "maximum": 1}', "nsatisfiable"),
        ("json_schema", '{"$ref": "#/$defs/nowhere"}', "nowhere"),
        ("json_schema", " " * 270_000, "270000 bytes"),
    ],
)
def test_a_grammar_that_cannot_be_had_is_refused(kind: str, text: str, says: str) -> None:
    with pytest.raises(RequestError, match=says) as error:
        grammars(byte_level()).matcher(Grammar(kind, text))
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 600


def test_a_grammar_that_is_refused_again_keeps_nothing_of_who_sent_it() -> None:
    """An exception that is raised again collects the frames of all callers, with their bodies."""
    made = grammars(byte_level())
    refusals = []
    for _ in range(3):
        with pytest.raises(RequestError, match="cannot be used") as caught:
            made.matcher(Grammar("regex", "("))
        refusals.append(caught.value)
    assert len({id(refusal) for refusal in refusals}) == 3
    depths = [len(traceback.extract_tb(refusal.__traceback__)) for refusal in refusals]
    assert depths == depths[:1] * 3


def test_a_compiler_that_breaks_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    made = grammars(byte_level())

    def breaks(grammar: Grammar) -> Matcher:
        raise OSError("no memory")

    monkeypatch.setattr(made, "_compile", breaks)
    with pytest.raises(RequestError, match="the server's log says why"):
        made.matcher(Grammar("regex", "a"))


def test_a_grammar_that_takes_long_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused; others compile meanwhile, and it is available once done."""
    made, begun, go_on = grammars(byte_level()), threading.Event(), threading.Event()
    compile_ = made._compile

    def slowly(grammar: Grammar) -> Matcher:
        if grammar.text == "slow":
            begun.set()
            assert go_on.wait(30)
        return compile_(grammar)

    monkeypatch.setattr(made, "_compile", slowly)
    made.matcher(Grammar("regex", "warm"))
    with monkeypatch.context() as patch:
        patch.setattr("dflash_trt.decoding.grammar.SECONDS", 1.0)
        with pytest.raises(RequestError, match="takes more than"):
            made.matcher(Grammar("regex", "slow"))
    assert begun.wait(30)
    assert made.matcher(Grammar("regex", "quick")).forced_tokens([])
    go_on.set()
    assert made.matcher(Grammar("regex", "slow")).forced_tokens([])


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "((a{1,1000}){1,1000}){1,1000}"),
        ("regex", "(a|b)*a(a|b){30}"),
        ("lark", 'start: s\ns: s s | "a" | '),
        (
            "lark",
            "start: A0\n" + "\n".join(f"A{i}: A{i + 1} A{i + 1}" for i in range(40)) + '\nA40: "a"',
        ),
        ("json_schema", json.dumps({"type": "string", "minLength": 99_999, "maxLength": 10**6})),
    ],
)
def test_a_hostile_grammar_ends_in_time(kind: str, text: str) -> None:
    """It is refused, or its masks come: each loop is bounded."""
    tokenizer = byte_level()
    start = time.process_time()
    try:
        matcher = grammars(tokenizer).matcher(Grammar(kind, text))
    except RequestError:
        matcher = None
    for _ in range(40 if matcher else 0):
        allowed = after(matcher)
        if not allowed:
            break
        matcher.push(max(allowed - {tokenizer.token_to_id(END)} or allowed))
        if matcher.look_ahead() or matcher.is_stopped:
            break
    assert time.process_time() - start < 30  # a hang, not a measurement
