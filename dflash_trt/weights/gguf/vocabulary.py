"""The vocabulary that a GGUF file's metadata state."""

from typing import NamedTuple

from dflash_trt.weights.gguf.header import Header

STATED = "tokenizer.ggml"
# types of tokens
NORMAL = 1
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5
BYTE = 6
SPECIAL = (UNKNOWN, CONTROL)
OF_TOKENS = ("scores", "token_type")  # have a value for each token
ROLES = (  # of tokens: `bos_token_id`, ...
    "bos", "eos", "eot", "eom", "unknown", "padding", "seperator", "separator", "mask", "cls",
    "fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep", "prefix", "suffix", "middle",
)  # fmt: skip
NAMED = ("bos", "eos", "unknown", "padding")  # are special in a file without types
READ = {
    *(f"{role}_token_id" for role in ROLES), *OF_TOKENS,
    "model", "pre", "tokens", "merges", "add_bos_token", "add_space_prefix",
}  # fmt: skip
TOKENIZER_JSON = "Use the model's safetensors with their tokenizer.json"


class Vocabulary(NamedTuple):
    tokens: list[str]
    types: list[int]
    scores: list[float] | None

    def of_type(self, *types: int) -> list[str]:
        return [text for text, kind in zip(self.tokens, self.types, strict=True) if kind in types]

    def ids(self) -> dict[str, int]:
        """Return ids by text, but for rows of the embedding without a token."""
        return {text: i for i, text in enumerate(self.tokens) if self.types[i] != UNUSED}


def read_vocabulary(header: Header) -> Vocabulary:
    """Read the tokens; CheckpointError if lists differ in length or something is not handled."""
    prefix = f"{STATED}."
    for key, value in header.values.items():
        name = key.removeprefix(prefix)
        # what is not read is off or empty, or it would change the tokens
        if key.startswith(prefix) and name not in READ and value not in (False, "", []):
            what = f"{key} is {value!r}"[:200]
            raise header.wrong(f"{what}, which dflash-trt does not handle yet", TOKENIZER_JSON)
    tokens = header.values.get(f"{STATED}.tokens")
    if not (isinstance(tokens, list) and tokens and all(isinstance(text, str) for text in tokens)):
        raise header.wrong(f"{STATED}.tokens is no list of texts")
    for name in OF_TOKENS:
        values = header.values.get(f"{STATED}.{name}", tokens)
        if not isinstance(values, list) or len(values) != len(tokens):
            count = len(values) if isinstance(values, list) else repr(values)[:40]
            raise header.wrong(f"{STATED}.{name} has {count} values for {len(tokens)} tokens")
    types = header.values.get(f"{STATED}.token_type")
    if types is None:
        types = [NORMAL] * len(tokens)
        for role in NAMED:
            named = role_id(header, role)
            if named is not None:
                types[named] = CONTROL
    vocabulary = Vocabulary(tokens, types, header.values.get(f"{STATED}.scores"))
    used = len(tokens) - types.count(UNUSED)
    if len(vocabulary.ids()) != used:
        raise header.wrong(f"{used - len(vocabulary.ids())} of its tokens are there twice")
    return vocabulary


def role_id(header: Header, role: str) -> int | None:
    """Return the token of a role (`bos`); None without one, CheckpointError if it is none."""
    key = f"{STATED}.{role}_token_id"
    token = header.values.get(key)
    tokens = header.values[f"{STATED}.tokens"]
    if token is None or (type(token) is int and 0 <= token < len(tokens)):
        return token
    raise header.wrong(f"{key} is {token!r}, but there are {len(tokens)} tokens")


def stated_flag(header: Header, name: str, default: bool) -> bool:
    value = header.values.get(f"{STATED}.{name}", default)
    if not isinstance(value, bool):
        raise header.wrong(f"{STATED}.{name} is {value!r}, not true or false")
    return value
