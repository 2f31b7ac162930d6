"""Tokenizers of pieces with U+2581 for spaces: SentencePiece's, and Gemma 4's."""

from itertools import pairwise

from tokenizers import Tokenizer, decoders, models, normalizers
from tokenizers.pre_tokenizers import Metaspace

from dflash_trt.weights.gguf.vocabulary import NORMAL, USER_DEFINED, Vocabulary

SPACE = "\u2581"


def with_spaces_as_pieces(vocabulary: Vocabulary) -> Vocabulary:
    """Spell tokens of spaces as they stand in a text: llama.cpp's converter has changed them."""
    known = {*vocabulary.tokens}
    tokens = [
        SPACE * len(text) if text and not text.strip(" ") else text for text in vocabulary.tokens
    ]
    tokens = [
        new if new == old or new not in known else old
        for new, old in zip(tokens, vocabulary.tokens, strict=True)
    ]
    return vocabulary._replace(tokens=tokens)


def merges_of_scores(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Return every pair of pieces that is a piece, the best first.

    Those of one piece are in transformers' order: the longer left one first.
    """
    pieces = {
        text: i
        for i, text in enumerate(vocabulary.tokens)
        if vocabulary.types[i] in (NORMAL, USER_DEFINED)
    }
    merges = []
    for text in _best_first(vocabulary, pieces):
        for place in range(len(text) - 1, 0, -1):
            left = text[:place]
            if left in pieces and text[place:] in pieces:
                merges.append((left, text[place:]))
    return merges


def _best_first(vocabulary: Vocabulary, pieces: dict[str, int]) -> list[str]:
    """Sort by ids, or by scores where these do not fall with the ids.

    Added tokens have any score, and a file made of tokenizer.json one for all.
    """
    ids = [*pieces.values()]
    scores = vocabulary.scores
    assert scores is not None
    trained = [scores[i] for i in ids if vocabulary.types[i] == NORMAL]
    if any(after > before for before, after in pairwise(trained)):
        ids.sort(key=lambda i: -scores[i])
    return [vocabulary.tokens[i] for i in ids]


def piece_tokenizer(
    vocabulary: Vocabulary,
    merges: list[tuple[str, str]],
    unknown: str | None,
    *,
    space_prefix: bool,
) -> Tokenizer:
    """Assemble the tokenizer without its added tokens.

    space_prefix: a text begins with a space that decoding leaves out.
    """
    model = models.BPE(
        vocab=vocabulary.ids(),
        merges=merges,
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    steps: list[decoders.Decoder] = [
        decoders.Replace(SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if space_prefix:
        tokenizer.pre_tokenizer = Metaspace(SPACE, prepend_scheme="first", split=False)
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer
