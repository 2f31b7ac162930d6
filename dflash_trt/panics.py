"""Tokenizers are written in Rust: a panic there is no `Exception`, and would end a thread."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raise RuntimeError where the block panics."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # pyo3's, which no module exports
            raise
        raise RuntimeError(f"the tokenizer panicked: {error}") from error
