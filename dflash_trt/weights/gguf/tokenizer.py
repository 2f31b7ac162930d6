"""The tokenizer that a GGUF file's metadata stand for."""

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

from dflash_trt.errors import panics_as_errors
from dflash_trt.weights.gguf.header import Header

TEMPLATE = "tokenizer.chat_template"
STATED = "tokenizer.ggml"
SPECIAL_TOKENS = {
    "bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token",
}  # fmt: skip
# types of tokens
NORMAL = 1
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5
# names of pre-tokenizers, by behavior
GPT2 = ("default", "gpt-2")
DIGITS = ("smollm", "starcoder", "refact", "codeshell")  # GPT-2's after one that separates digits
LLAMA3 = ("llama-bpe", "llama3", "llama-v3")
QWEN2 = ("qwen2", "deepseek-r1-qwen")
PRE_TOKENIZERS = (*GPT2, *DIGITS, *LLAMA3, *QWEN2)
WORDS = (  # with the number of digits in one piece
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,%d}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def read_tokenizer(header: Header) -> Tokenizer:
    model = header.values.get(f"{STATED}.model")
    pre = header.values.get(f"{STATED}.pre")
    if model != "gpt2" or pre not in PRE_TOKENIZERS or header.values.get(f"{STATED}.add_eos_token"):
        what = f"its tokenizer is {model!r} with pre-tokenizer {pre!r}; read are those of gpt2 "
        what += f"that end no prompts (add_eos_token), with {', '.join(PRE_TOKENIZERS)}"
        raise header.wrong(what, "Use the model's safetensors with their tokenizer.json")
    tokens = header.values[f"{STATED}.tokens"]
    types = header.values.get(f"{STATED}.token_type", [NORMAL] * len(tokens))
    adds_bos = header.values.get(f"{STATED}.add_bos_token", pre in LLAMA3)
    bos = tokens[header.values[f"{STATED}.bos_token_id"]] if adds_bos else None
    with panics_as_errors():
        return _assemble_tokenizer(pre, tokens, types, header.values[f"{STATED}.merges"], bos)


def _assemble_tokenizer(
    pre: str, tokens: list[str], types: list[int], merges: list[str], bos: str | None
) -> Tokenizer:
    vocab = {text: i for i, text in enumerate(tokens) if types[i] != UNUSED}
    pairs = []
    for merge in merges:
        left, right = merge.split(" ")
        pairs.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre in LLAMA3))
    if pre in QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = Sequence(_pre_tokenizers(pre))
    tokenizer.decoder = decoders.ByteLevel()
    for kind, special in ((CONTROL, True), (USER_DEFINED, False)):
        texts = [text for i, text in enumerate(tokens) if types[i] == kind]
        tokenizer.add_tokens([AddedToken(t, special=special, normalized=False) for t in texts])
    if bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="bos $A", special_tokens=[{"id": "bos", "ids": [vocab[bos]], "tokens": [bos]}]
        )
    return tokenizer


def _pre_tokenizers(pre: str) -> list[PreTokenizer]:
    if pre in (*LLAMA3, *QWEN2):
        digits = 3 if pre in LLAMA3 else 1
        words = Split(Regex(WORDS % digits), "isolated")
        return [words, ByteLevel(add_prefix_space=False, use_regex=False)]
    gpt2 = ByteLevel(add_prefix_space=False)
    return [Digits(individual_digits=True), gpt2] if pre in DIGITS else [gpt2]


def tokenizer_config(header: Header) -> dict[str, Any]:
    values = header.values
    tokens = values[f"{STATED}.tokens"]
    special = {}
    for key, name in SPECIAL_TOKENS.items():
        token = values.get(f"{STATED}.{key}_token_id")
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
