"""Grammars by llguidance: which tokens may come next in a text.

llguidance is imported when the first grammar is compiled.
"""

import logging
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from tokenizers import Tokenizer

from dflash_trt.decoding.arrays import Int32
from dflash_trt.errors import RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

log = logging.getLogger(__name__)

MAX_BYTES = 2**18  # of a grammar
MAX_COMPILED = 64  # grammars in memory
SECONDS = 3.0  # limit for compiling one
# as json.dumps writes it and models have seen it most; "x-guidance" in a schema overrides it
JSON_STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# limits for one mask; exceeding them ends the text. A fifth of llguidance's defaults: at most 15 ms
LIMITS: Any = {"step_max_items": 10_000, "step_lexer_fuel": 50_000, "max_lexer_states": 20_000}
NO_END = "<no text ends with this>"


@dataclass(frozen=True)
class Grammar:
    # llguidance's Lark may contain both others (`%json {..}`, `/../`), special tokens (`<|name|>`)
    kind: Literal["json_schema", "regex", "lark"]
    text: str
    name: str = field(default="the grammar", compare=False)  # used in error messages


class Grammars:
    """Compile grammars for one model's tokenizer. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        """Set up for logits of `vocab_size`; eos_token_ids are allowed where a grammar may end."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._lock = threading.Lock()
        # most recently used last. A refusal is kept as a value: an exception that is raised again
        # keeps the frames of all who met it
        self._compiled: dict[Grammar, Future[Matcher | RequestError]] = {}
        self._pool = ThreadPoolExecutor(2, "grammars")

    def matcher(self, grammar: Grammar) -> "Matcher":
        """Return a new matcher at the start of a text.

        Raises RequestError, in llguidance's words, for a grammar that does not compile or takes
        longer than SECONDS; a compilation that has begun goes on in its thread.
        """
        compiled = self._start(grammar)
        try:
            result = compiled.result(SECONDS)
        except TimeoutError as error:
            with self._lock:
                if compiled.cancel():  # not started yet
                    self._compiled.pop(grammar, None)
            raise RequestError(
                f"{grammar.name} takes more than {SECONDS} s to compile", "Send a simpler one."
            ) from error
        if isinstance(result, RequestError):
            raise RequestError(result.problem, result.fix)
        return result.copy()

    def is_ready(self, grammar: Grammar) -> bool:
        """Return whether `matcher` would return at once; otherwise start compiling."""
        return self._start(grammar).done()

    def _start(self, grammar: Grammar) -> "Future[Matcher | RequestError]":
        """Return a grammar's compilation, the most recent one now."""
        with self._lock:
            compiled = self._compiled.pop(grammar, None)
            if compiled is None:
                compiled = self._pool.submit(self._try_to_compile, grammar)
            self._compiled[grammar] = compiled
            if len(self._compiled) > MAX_COMPILED:
                del self._compiled[next(iter(self._compiled))]
            return compiled

    def _try_to_compile(self, grammar: Grammar) -> "Matcher | RequestError":
        try:
            return self._compile(grammar)
        except RequestError as error:
            return RequestError(error.problem, error.fix)
        except Exception:
            log.exception("a grammar could not be compiled")
            return _refusal(grammar, "the server's log says why")

    def _compile(self, grammar: Grammar) -> "Matcher":
        from llguidance import LLMatcher, LLParserLimits  # noqa: PLC0415

        size = len(grammar.text.encode())
        if size > MAX_BYTES:
            raise RequestError(f"{grammar.name} is {size} bytes", f"Send at most {MAX_BYTES}.")
        try:
            if grammar.kind == "json_schema":
                text = LLMatcher.grammar_from_json_schema(grammar.text, JSON_STYLE)
            elif grammar.kind == "regex":
                text = LLMatcher.grammar_from_regex(grammar.text)
            else:
                text = LLMatcher.grammar_from_lark(grammar.text)
        except ValueError as error:
            raise _refusal(grammar, str(error)) from error
        limits = LLParserLimits(verbose_errors=False, **LIMITS)
        inner = LLMatcher(self._vocabulary, text, log_level=0, limits=limits)
        matcher = Matcher(inner, -(-self._vocab_size // 32), self._added_end)
        problem = matcher.look_ahead()
        if problem:
            raise _refusal(grammar, problem)
        return matcher

    @cached_property
    def _vocabulary(self) -> "LLTokenizer":
        """The tokenizer's vocabulary for llguidance: 0.5 s for 150,000 tokens."""
        from llguidance import LLTokenizer  # noqa: PLC0415

        tokenizer = self._tokenizer
        ends = self._eos_token_ids
        if self._added_end is not None:
            tokenizer = Tokenizer.from_str(tokenizer.to_str())
            tokenizer.add_special_tokens([NO_END])
            ends = [self._added_end]
        size = max(self._vocab_size, *(end + 1 for end in ends))
        try:
            return LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=ends)
        except ValueError as error:
            raise RequestError(
                f"this model's tokenizer knows no grammars ({error})", "Send the request without."
            ) from error

    @cached_property
    def _added_end(self) -> int | None:
        """The id of an added end token, for llguidance, if the model has none."""
        if self._eos_token_ids:
            return None
        return 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())


def _refusal(grammar: Grammar, error: str) -> RequestError:
    words = " ".join(error.replace("<non-verbose/>", "").split())
    return RequestError(f"{grammar.name} cannot be used: {words[:400]}", "Send another one.")


class Matcher:
    """The state of one text in its grammar.

    Methods that take a `path` look at drafts after the text and do not change its state.
    """

    def __init__(self, inner: "LLMatcher", words: int, added_end: int | None) -> None:
        """Start a text; words: 32-bit words in a mask; added_end: see `Grammars._added_end`."""
        self._start = inner
        self._inner = inner
        self._words = words
        self._added_end = added_end
        self._text: list[int] = []
        self._ahead: list[int] = []  # drafts that `_inner` has consumed too
        self._next: Int32 | None = None  # mask after the text

    def copy(self) -> "Matcher":
        """Return a matcher in the same state; the original must be at the start of a text."""
        copy = Matcher(self._start.deep_copy(), self._words, self._added_end)
        copy._start = self._start
        copy._next = self._next
        return copy

    @property
    def is_stopped(self) -> bool:
        self._move_to(())
        return bool(self._inner.is_stopped())

    def push(self, token: int) -> None:
        self._move_to(())
        self._inner.consume_token(token)
        self._text.append(token)
        self._next = None

    def look_ahead(self) -> str:
        """Compute the next mask; return the reason if that fails, otherwise ""."""
        if self._next is None:
            self._move_to(())
            self._next = self._mask()
        problem = str(self._inner.get_error())
        if not problem and not self._next.any():
            return "no token may come next"
        return problem

    def forced_tokens(self, path: Sequence[int]) -> list[int]:
        """Return the tokens that must come next after a path; none if the grammar forbids it."""
        tokens = self._inner.compute_ff_tokens() if self._move_to(path) else []
        return [] if self._recover() else tokens

    def count_allowed(self, path: Sequence[int], tokens: Sequence[int]) -> int:
        """Return how many of the tokens, from the first on, may come after a path."""
        count = self._inner.validate_tokens([*tokens]) if self._move_to(path) else 0
        return 0 if self._recover() else count

    def masks(self, tokens: Sequence[int]) -> list[Int32 | None]:
        """Return the bit masks of allowed tokens after the text and after each draft.

        None: no mask is needed, because the grammar forbids this draft or ends with it.
        """
        masks = [self._next]
        for end in range(1, len(tokens) + 1):
            mask = None
            if self._move_to(tokens[:end]) and not self._inner.is_stopped():
                mask = self._mask()
            if self._recover():
                # a limit was exceeded: an empty mask ends the text if the target gets here
                mask = np.zeros(self._words, np.int32)
            masks.append(mask)
        return masks

    def _mask(self) -> Int32:
        mask = np.frombuffer(self._inner.compute_bitmask(), np.int32).copy()
        if self._added_end is not None:
            mask[self._added_end // 32] &= ~(1 << self._added_end % 32)
        return mask[: self._words]

    def _move_to(self, path: Sequence[int]) -> bool:
        """Move to the end of these drafts; return False if the grammar forbids one."""
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
        """Replace the inner matcher after an error, which is final; return whether one occurred."""
        if not self._inner.is_error():
            return False
        self._inner = self._start.deep_copy()
        self._ahead = []
        self._inner.consume_tokens(self._text)
        return True
