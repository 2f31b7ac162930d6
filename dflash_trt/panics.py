"""Panics of tokenizers, which are written in Rust: not an `Exception`, they would end a thread."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raise RuntimeError if the block panics."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # pyo3's, which no module exports
            raise
        raise RuntimeError(f"the tokenizer panicked: {error}") from error
