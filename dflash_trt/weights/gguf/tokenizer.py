"""The tokenizer that a GGUF file's metadata stand for."""

from typing import Any

from tokenizers import AddedToken, Tokenizer, processors

from dflash_trt.errors import panics_as_errors
from dflash_trt.weights.gguf.byte_level import FAMILY_OF, Family, byte_level_tokenizer
from dflash_trt.weights.gguf.header import Header
from dflash_trt.weights.gguf.sentencepiece import (
    SPACE,
    merges_of_scores,
    piece_tokenizer,
    with_spaces_as_pieces,
)
from dflash_trt.weights.gguf.vocabulary import (
    SPECIAL,
    STATED,
    TOKENIZER_JSON,
    USER_DEFINED,
    Vocabulary,
    read_vocabulary,
    role_id,
    stated_flag,
)

TEMPLATE = "tokenizer.chat_template"
SPECIAL_TOKENS = {
    "bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token",
}  # fmt: skip
# values of `model`
BYTE_LEVEL = "gpt2"
SENTENCEPIECE = "llama"
GEMMA4 = "gemma4"  # pieces with merges; also a name of `pre`


def read_tokenizer(header: Header) -> Tokenizer:
    """Assemble the tokenizer; CheckpointError if it is of a kind that is not read."""
    model = header.values.get(f"{STATED}.model")
    pre = header.values.get(f"{STATED}.pre")
    of_pieces = model in (SENTENCEPIECE, GEMMA4) or (model == BYTE_LEVEL and pre == GEMMA4)
    if not of_pieces and (model != BYTE_LEVEL or pre not in FAMILY_OF):
        names = ", ".join((*FAMILY_OF, GEMMA4))
        what = f"its tokenizer is {model!r} with pre-tokenizer {pre!r}; read are {SENTENCEPIECE}, "
        what += f"{GEMMA4}, and {BYTE_LEVEL} with {names}"
        raise header.wrong(what, TOKENIZER_JSON)
    vocabulary = read_vocabulary(header)
    with panics_as_errors():
        if not of_pieces:
            return _byte_level(header, vocabulary, FAMILY_OF[str(pre)])
        if model == SENTENCEPIECE:
            return _scored_pieces(header, vocabulary)
        return _merged_pieces(header, vocabulary)


def _byte_level(header: Header, vocabulary: Vocabulary, family: Family) -> Tokenizer:
    tokenizer = byte_level_tokenizer(family, vocabulary, _stated_merges(header))
    _add_tokens(tokenizer, vocabulary)
    if stated_flag(header, "add_bos_token", family.adds_bos):
        _begin_with_bos(header, tokenizer)
    return tokenizer


def _scored_pieces(header: Header, vocabulary: Vocabulary) -> Tokenizer:
    """Assemble SentencePiece's BPE, whose merges its scores imply."""
    if vocabulary.scores is None:
        raise header.wrong(f"its tokenizer is {SENTENCEPIECE!r}, without {STATED}.scores")
    vocabulary = with_spaces_as_pieces(vocabulary)
    prefix = stated_flag(header, "add_space_prefix", True)
    tokenizer = piece_tokenizer(
        vocabulary, merges_of_scores(vocabulary), _unknown(header), space_prefix=prefix
    )
    _add_tokens(tokenizer, vocabulary)
    if stated_flag(header, "add_bos_token", True):
        _begin_with_bos(header, tokenizer)
    return tokenizer


def _merged_pieces(header: Header, vocabulary: Vocabulary) -> Tokenizer:
    """Assemble Gemma 4's, which begins no text with a token: its chat template does."""
    tokenizer = piece_tokenizer(
        vocabulary, _stated_merges(header), _unknown(header), space_prefix=False
    )
    _add_tokens(tokenizer, vocabulary)
    return tokenizer


def _stated_merges(header: Header) -> list[tuple[str, str]]:
    merges = []
    for merge in header.values[f"{STATED}.merges"]:
        left, right = merge.split(" ")
        merges.append((left, right))
    return merges


def _unknown(header: Header) -> str | None:
    token = role_id(header, "unknown")
    return None if token is None else str(header.values[f"{STATED}.tokens"][token])


def _add_tokens(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    """Add what is a token wherever it stands in a text; spaces are one by merges."""
    special = vocabulary.of_type(*SPECIAL)
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    others = [text for text in vocabulary.of_type(USER_DEFINED) if text.strip(SPACE)]
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in others])


def _begin_with_bos(header: Header, tokenizer: Tokenizer) -> None:
    number = role_id(header, "bos")
    if number is None:
        raise header.wrong(f"texts begin with a token, but there is no {STATED}.bos_token_id")
    text = header.values[f"{STATED}.tokens"][number]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="bos $A", special_tokens=[{"id": "bos", "ids": [number], "tokens": [text]}]
    )


def tokenizer_config(header: Header) -> dict[str, Any]:
    values = header.values
    tokens = values[f"{STATED}.tokens"]
    special = {}
    for key, name in SPECIAL_TOKENS.items():
        token = role_id(header, key)
        if token is not None:
            special[name] = tokens[token]
    prefix = f"{TEMPLATE}."
    more = [
        {"name": key.removeprefix(prefix), "template": value}
        for key, value in values.items()
        if key.startswith(prefix)
    ]
    template: Any = values.get(TEMPLATE)
    if more:
        template = [{"name": "default", "template": template}, *more]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
        **special,
    }
