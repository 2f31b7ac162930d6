"""A GGUF file's vocabulary and merges as tokenizer.json and tokenizer_config.json."""

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

from dflash_trt.checkpoints.gguf.header import AGAIN, Header
from dflash_trt.errors import CheckpointError
from dflash_trt.panics import panics_as_errors

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # types of tokens
# names of pre-tokenizers, by what they do
GPT2 = ("default", "gpt-2")
DIGITS = ("smollm", "starcoder", "refact", "codeshell")  # GPT-2's behind one that parts digits
LLAMA3 = ("llama-bpe", "llama3", "llama-v3")
QWEN2 = ("qwen2", "deepseek-r1-qwen")
KNOWN = (*GPT2, *DIGITS, *LLAMA3, *QWEN2)
WORDS = (  # with how many digits stay together
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,%d}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def tokenizer(header: Header) -> Tokenizer:
    """As the model's own tokenizer.json has it; CheckpointError unless it is byte-level BPE."""
    model, pre = _said(header, "model"), _said(header, "pre", GPT2[0])
    if model != "gpt2" or pre not in KNOWN:
        raise CheckpointError(
            f"{header.file} has a tokenizer of model {model!r} and pre-tokenizer {pre!r}"[:300]
            + f"; of GGUF those of gpt2 with {', '.join(KNOWN)} are read",
            "Use the model's safetensors with their tokenizer.json",
        )
    tokens, merges = _texts(header, "tokens"), _texts(header, "merges")
    types = _said(header, "token_type", [NORMAL] * len(tokens))
    if not isinstance(types, list) or len(types) != len(tokens):
        raise CheckpointError(f"{header.file}: token_type does not fit its tokens", AGAIN)
    if _said(header, "add_eos_token"):
        raise CheckpointError(f"{header.file} ends prompts (add_eos_token)", "Use another model")
    bos = _token(header, tokens, "bos") if _said(header, "add_bos_token", pre in LLAMA3) else None
    try:
        with panics_as_errors():
            return _assembled(pre, tokens, types, merges, bos)
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(
            f"{header.file}: its tokens and merges make no tokenizer ({error})"[:300], AGAIN
        ) from error


def _assembled(
    pre: str, tokens: list[str], types: list[int], merges: list[str], bos: str | None
) -> Tokenizer:
    vocab = {text: i for i, text in enumerate(tokens) if types[i] != UNUSED}
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    found = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre in LLAMA3))
    if pre in QWEN2:
        found.normalizer = normalizers.NFC()
    found.pre_tokenizer, found.decoder = Sequence(_splits(pre)), decoders.ByteLevel()
    for kind, special in ((CONTROL, True), (USER_DEFINED, False)):
        added = [text for i, text in enumerate(tokens) if types[i] == kind]
        found.add_tokens([AddedToken(text, special=special, normalized=False) for text in added])
    if bos is not None:
        found.post_processor = processors.TemplateProcessing(
            single="bos $A", special_tokens=[{"id": "bos", "ids": [vocab[bos]], "tokens": [bos]}]
        )
    return found


def _splits(pre: str) -> list[PreTokenizer]:
    if pre in (*LLAMA3, *QWEN2):
        words = Regex(WORDS % (3 if pre in LLAMA3 else 1))
        return [Split(words, "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
    gpt2 = ByteLevel(add_prefix_space=False)
    return [Digits(individual_digits=True), gpt2] if pre in DIGITS else [gpt2]


def tokenizer_config(header: Header) -> dict[str, Any]:
    """With the chat template."""
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    tokens = _texts(header, "tokens")
    found = {f"{name}_token": _token(header, tokens, key) for key, name in names.items()}
    found["chat_template"] = header.values.get("tokenizer.chat_template")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{name: value for name, value in found.items() if value is not None},
    }


def _said(header: Header, name: str, default: Any = None) -> Any:
    return header.values.get(f"tokenizer.ggml.{name}", default)


def _texts(header: Header, name: str) -> list[str]:
    found = _said(header, name)
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise CheckpointError(f"{header.file} has no list tokenizer.ggml.{name}", AGAIN)
    return found


def _token(header: Header, tokens: list[str], name: str) -> str | None:
    number = _said(header, f"{name}_token_id")
    if number is not None and (type(number) is not int or not 0 <= number < len(tokens)):
        raise CheckpointError(
            f"{header.file}: {name}_token_id is {number!r}"[:300] + ", which is no token", AGAIN
        )
    return None if number is None else tokens[number]
