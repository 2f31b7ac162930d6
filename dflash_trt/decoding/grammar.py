"""What a text has to be, whatever the model would rather say: which tokens may come, by llguidance.

llguidance is imported when the first grammar is compiled.
"""

import threading
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from tokenizers import Tokenizer

from dflash_trt.decoding.messages import Int32
from dflash_trt.errors import RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

LONGEST = 2**18  # bytes of a grammar
KEPT = 64  # compiled grammars
SECONDS = 3.0  # for one
# as json.dumps writes it, and as models have seen most of it; "x-guidance" in a schema says else
JSON_STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# of one mask: what takes longer ends the text. A fifth of llguidance's own: 15 ms at most here
LIMITS: Any = {"step_max_items": 10_000, "step_lexer_fuel": 50_000, "max_lexer_states": 20_000}
NO_END = "<no text ends with this>"


@dataclass(frozen=True)
class Grammar:
    """A grammar that a text follows, as a request asks for it.

    kind, text: a JSON schema, a regular expression, or a grammar in llguidance's Lark (which
    may hold both: `%json {..}`, `/../`, and special tokens: `<|name|>`).
    """

    kind: Literal["json_schema", "regex", "lark"]
    text: str
    name: str = field(default="the grammar", compare=False)  # in errors


class Grammars:
    """Compiles grammars for the tokens of one model; used by any thread."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        """vocab_size: of the logits; eos_token_ids: they come where a grammar may end."""
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._lock = threading.Lock()
        self._compiled: dict[Grammar, Future[Matcher]] = {}  # the one asked for last at the end
        self._pool = ThreadPoolExecutor(2, "grammars")

    def matcher(self, grammar: Grammar) -> "Matcher":
        """A new one, at the start of a text.

        RequestError, in llguidance's words, for a grammar that cannot be had. llguidance bounds the
        memory of most, the time of few: one that takes too long is left to a thread.
        """
        with self._lock:
            compiled = self._compiled.pop(grammar, None)
            compiled = compiled or self._pool.submit(self._compile, grammar)
            self._compiled[grammar] = compiled
            if len(self._compiled) > KEPT:
                del self._compiled[next(iter(self._compiled))]
        try:
            return compiled.result(SECONDS).copy()
        except TimeoutError as error:
            with self._lock:
                if compiled.cancel():  # it had not begun
                    self._compiled.pop(grammar, None)
            raise RequestError(
                f"{grammar.name} takes more than {SECONDS} s to compile", "Send a simpler one."
            ) from error

    def _compile(self, grammar: Grammar) -> "Matcher":
        from llguidance import LLMatcher, LLParserLimits  # noqa: PLC0415

        if (size := len(grammar.text.encode())) > LONGEST:
            raise RequestError(f"{grammar.name} is {size} bytes", f"Send at most {LONGEST}.")
        try:
            if grammar.kind == "json_schema":
                text = LLMatcher.grammar_from_json_schema(grammar.text, JSON_STYLE)
            elif grammar.kind == "regex":
                text = LLMatcher.grammar_from_regex(grammar.text)
            else:
                text = LLMatcher.grammar_from_lark(grammar.text)
        except ValueError as error:
            raise _refused(grammar, str(error)) from error
        limits = LLParserLimits(verbose_errors=False, **LIMITS)
        inner = LLMatcher(self._vocabulary, text, log_level=0, limits=limits)
        matcher = Matcher(inner, -(-self._vocab_size // 32), self._mark)
        if problem := matcher.look_ahead():
            raise _refused(grammar, problem)
        return matcher

    @cached_property
    def _vocabulary(self) -> "LLTokenizer":
        """Of each token its bytes: 0.5 s for 150,000 of them."""
        from llguidance import LLTokenizer  # noqa: PLC0415

        tokenizer, ends = self._tokenizer, self._eos_token_ids
        if self._mark is not None:
            tokenizer = Tokenizer.from_str(tokenizer.to_str())
            tokenizer.add_special_tokens([NO_END])
            ends = [self._mark]
        size = max(self._vocab_size, *(end + 1 for end in ends))
        try:
            return LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=ends)
        except ValueError as error:
            raise RequestError(
                f"this model's tokenizer knows no grammars ({error})", "Send the request without."
            ) from error

    @cached_property
    def _mark(self) -> int | None:
        """The id of a token that llguidance takes for the end where a model has none."""
        if self._eos_token_ids:
            return None
        return 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())


def _refused(grammar: Grammar, error: str) -> RequestError:
    words = " ".join(error.replace("<non-verbose/>", "").split())
    return RequestError(f"{grammar.name} cannot be used: {words[:400]}", "Send another one.")


class Matcher:
    """How far a text has come in its grammar, and which tokens may come after drafts.

    What is said of `path`s is said of drafts after the text; it stays where it is.
    """

    def __init__(self, inner: "LLMatcher", words: int, mark: int | None) -> None:
        """words: of 32 bits, of a mask; mark: see `Grammars`."""
        self._start, self._inner, self._words, self._mark = inner, inner, words, mark
        self._text: list[int] = []
        self._ahead: list[int] = []  # drafts that `_inner` has taken, too
        self._next: Int32 | None = None  # the mask after the text

    def copy(self) -> "Matcher":
        """Another at the same place; this one stands at the start of a text."""
        copy = Matcher(self._start.deep_copy(), self._words, self._mark)
        copy._start, copy._next = self._start, self._next
        return copy

    @property
    def ended(self) -> bool:
        """Whether nothing can follow the text, or its end-of-text token has come."""
        self._go(())
        return bool(self._inner.is_stopped())

    def push(self, token: int) -> None:
        """The text goes on with a token that was allowed."""
        self._go(())
        self._inner.consume_token(token)
        self._text.append(token)
        self._next = None

    def look_ahead(self) -> str:
        """Find out what may come next, and why that cannot be said, if so."""
        if self._next is None:
            self._go(())
            self._next = self._mask()
        problem = str(self._inner.get_error())
        return problem or ("" if self._next.any() else "no token may come next")

    def forced(self, path: Seq[int]) -> list[int]:
        """The tokens that come next, whatever the model: the usual ones for the bytes that do."""
        found = self._inner.compute_ff_tokens() if self._go(path) else []
        return [] if self._recover() else found

    def allowed(self, path: Seq[int], tokens: Seq[int]) -> int:
        """How many of these tokens may follow, one after the other."""
        count = self._inner.validate_tokens([*tokens]) if self._go(path) else 0
        return 0 if self._recover() else count

    def masks(self, tokens: Seq[int], parents: Seq[int]) -> list[Int32 | None]:
        """Which tokens may follow the text and each draft of a chain or tree, bits of 32.

        parents: as in `speculation.tree`. None: all of them, since it does not matter: nothing
        comes after this draft, or the grammar forbids it.
        """
        paths: list[list[int]] = [[]]
        found = [self._next]
        for token, parent in zip(tokens, parents, strict=True):
            path = [*paths[parent], token]
            paths.append(path)
            mask = self._mask() if self._go(path) and not self._inner.is_stopped() else None
            # a limit was met: should the target come here, too, its text ends
            found.append(np.zeros(self._words, np.int32) if self._recover() else mask)
        return found

    def _mask(self) -> Int32:
        mask = np.frombuffer(self._inner.compute_bitmask(), np.int32).copy()
        if self._mark is not None:
            mask[self._mark // 32] &= ~(1 << self._mark % 32)
        return mask[: self._words]

    def _go(self, path: Seq[int]) -> bool:
        """Stand after these drafts; False where the grammar forbids one of them."""
        same = 0
        while same < min(len(path), len(self._ahead)) and path[same] == self._ahead[same]:
            same += 1
        if same < len(self._ahead):
            self._inner.rollback(len(self._ahead) - same)
            del self._ahead[same:]
        for token in path[same:]:
            if not self._inner.try_consume_tokens([token]):
                return False
            self._ahead.append(token)
        return True

    def _recover(self) -> bool:
        """Whether looking ahead met a limit: llguidance goes on from no error, a copy does."""
        if not self._inner.is_error():
            return False
        self._inner, self._ahead = self._start.deep_copy(), []
        self._inner.consume_tokens(self._text)
        return True
