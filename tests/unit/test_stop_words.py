"""Text up to the first stop word, however it comes in pieces."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_trt.serving.front.text import StopWords


def gated(pieces: list[str], words: list[str]) -> tuple[list[str], bool]:
    """What was given out piece by piece, and whether a stop word ended it."""
    stop, given = StopWords(words), []
    for piece in pieces:
        text, found = stop.push(piece)
        given.append(text)
        if found:
            return given, True
    return [*given, stop.rest()], False


@pytest.mark.parametrize("seed", range(200))
def test_any_text_in_any_pieces(seed: int) -> None:
    rng = np.random.default_rng(seed)
    text = "".join(rng.choice(list("aab"), 30))
    words = ["".join(rng.choice(list("ab"), rng.integers(1, 6))) for _ in range(rng.integers(1, 4))]
    cuts = sorted(rng.integers(0, 31, 8).tolist())
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, 30], strict=True)]
    given, found = gated(pieces, words)
    # the text that was there when the first stop word was complete
    first = next((n for n in range(31) if any(word in text[:n] for word in words)), None)
    assert found == (first is not None)
    if first is None:
        assert "".join(given) == text
    else:
        assert text.startswith("".join(given))
        assert not any(word in "".join(given) for word in words)
    if len(words) == 1:
        assert "".join(given) == text.split(words[0])[0]


def test_nothing_is_held_back_without_need() -> None:
    given, found = gated(["ab", "c", "xEN", "q", "E", "ND", "z"], ["END"])
    assert given == ["ab", "c", "x", "ENq", "", ""]
    assert found
