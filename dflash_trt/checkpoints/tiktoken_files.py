"""A tokenizer in tiktoken's form, as Kimi's repositories have it, turned into a tokenizer.json.

`tiktoken.model` has a token and its rank in each line. The pattern that splits a text is in the
repository's Python file, which is read as text and never run. The ids after the ranks are special
tokens: those of `added_tokens_decoder`, and `<|reserved_token_ID|>` where it names none.
"""

import ast
import base64
import binascii
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models
from tokenizers import pre_tokenizers as splitters

from dflash_trt import files
from dflash_trt.errors import CheckpointError, panics_as_errors
from dflash_trt.weights.json_file import read_bytes

RANKS = "tiktoken.model"
CODE = "tokenization_*.py"  # what `locate` fetches to be read
SETTINGS = "tokenizer_config.json"
MAX_RANKS = 1 << 25  # bytes; Kimi's has 3 MB
MAX_CODE = 1 << 20  # bytes
PATTERN = "pat_str"
RESERVED = "num_reserved_special_tokens"
SPECIAL_TOKENS = 256  # unless the code says otherwise, as in Llama 3's and Kimi's
STATED = ("bos_token", "eos_token", "unk_token", "pad_token")
FIX = "Download the repository again, all of its files at one commit"
TO_EXPORT = (
    "Serve the pair by an engine that runs it, with engine.args: {trust_remote_code: true}: "
    "`dflash-trt export vllm CONFIG` or `dflash-trt export sglang CONFIG`"
)
# https://github.com/ggml-org/llama.cpp/blob/master/src/unicode.cpp has it in a comment
KIMI_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
# what tiktoken's regular expressions and those of `tokenizers` read alike; not possessive
# quantifiers such as `{1,3}+`, back references, anchors and look-behind
ALIKE = re.compile(
    r"""(?x:
    \\[pP]\{\^?\w+\} | \\[sSrnt] | \\[^\w]          # classes, escapes
    | \[\^? | \] | &&                               # sets
    | \(\?(?:i:|:|!|=) | \( | \)                    # groups
    | (?:[*+?] | \{\d+(?:,\d*)?\}) (?![*+?{])       # greedy quantifiers
    | [^\\\[\]()*+?{}^$.]                           # the character itself
    )*"""
)
EVERY_KIND = "a B 1 é 中 に 한 ع क ̀ ǅ ʰ ² ½ . € \U0001f642 \u200d \t \r \n \x00 \u3000 \u2028"


class Split(NamedTuple):
    """What a repository's Python file says of its tokenizer."""

    pattern: str
    reserved: int  # how many ids after the ranks are special


def has_ranks(directory: Path) -> bool:
    return (directory / RANKS).is_file()


def convert(directory: Path) -> bytes:
    """Return the tokenizer.json that stands for a directory's tiktoken.model.

    Raises CheckpointError for a file that is cut, damaged or of another tokenizer.
    """
    split = read_split(directory)
    settings = read_settings(directory)
    added = json.dumps(settings.get("added_tokens_decoder"))
    stated = tuple((name, _text_of(settings.get(name))) for name in STATED if settings.get(name))
    data = read_bytes(directory / RANKS, MAX_RANKS)
    return _convert(directory, data, split, added, stated)


@lru_cache(maxsize=2)
def _convert(
    directory: Path, data: bytes, split: Split, added: str, stated: tuple[tuple[str, str], ...]
) -> bytes:
    tokens = _read_ranks(directory / RANKS, data)
    special = _special_tokens(directory, json.loads(added), len(tokens), split.reserved)
    for name, text in stated:
        if text not in special:
            raise _wrong(directory / SETTINGS, f"{name} {text!r} is none of its special tokens")
    vocab = {_spelled(token): rank for rank, token in enumerate(tokens)}
    merges = [(_spelled(left), _spelled(right)) for left, right in merges_of(tokens)]
    try:
        with panics_as_errors():
            tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
            tokenizer.pre_tokenizer = splitters.Sequence(
                [
                    splitters.Split(Regex(split.pattern), "isolated"),
                    splitters.ByteLevel(add_prefix_space=False, use_regex=False),
                ]
            )
            tokenizer.decoder = decoders.ByteLevel()
            tokenizer.add_tokens(
                [AddedToken(text, special=True, normalized=False) for text in special]
            )
            result: str = tokenizer.to_str()
    except Exception as error:  # the library raises bare Exception
        raise _wrong(directory / RANKS, f"no tokenizer can be made of it ({error})") from error
    for number, text in enumerate(special, len(tokens)):
        if tokenizer.token_to_id(text) != number:
            raise _wrong(directory / SETTINGS, f"the special token {text!r} is also a ranked one")
    return result.encode()


def settings_of_converted(directory: Path) -> str:
    """Return tokenizer_config.json without the code, for those who read the tokenizer.json."""
    settings = {**read_settings(directory), "tokenizer_class": "PreTrainedTokenizerFast"}
    settings.pop("auto_map", None)
    return json.dumps(settings, ensure_ascii=False, indent=2) + "\n"


def read_settings(directory: Path) -> dict[str, Any]:
    """Read tokenizer_config.json; CheckpointError if it names one id twice."""
    file = directory / SETTINGS
    if not file.is_file():
        raise _wrong(directory / RANKS, f"there is no {SETTINGS} beside it")
    try:
        value = files.parse_json(read_bytes(file), object_pairs_hook=_without_twins)
    except ValueError as error:
        raise _wrong(file, f"it is no valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise _wrong(file, "it does not hold a JSON object")
    return value


def _without_twins(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result and name.isdecimal():
            raise ValueError(f"the id {name} is there twice")
        result[name] = value
    return result


def _text_of(token: Any) -> str:
    return str(token.get("content") if isinstance(token, dict) else token)


def _wrong(file: Path, what: str, fix: str = FIX) -> CheckpointError:
    return CheckpointError(f"{file}: {what}"[:400], fix)


# --- ranks ----------------------------------------------------------------------------------------


def _read_ranks(file: Path, data: bytes) -> list[bytes]:
    """Return the tokens by rank."""
    ranks: dict[int, bytes] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line:
            continue
        token, rank = _read_line(file, number, line)
        if rank in ranks:
            raise _wrong(file, f"line {number} has rank {rank}, which an earlier line has")
        ranks[rank] = token
    for rank in range(len(ranks)):
        if rank not in ranks:
            raise _wrong(file, f"it has {len(ranks)} tokens, and none of rank {rank}")
    tokens = [ranks[rank] for rank in range(len(ranks))]
    known = set(tokens)
    if len(known) < len(tokens):
        twin = next(token for token in tokens if tokens.count(token) > 1)
        raise _wrong(file, f"the token {twin!r} has two ranks")
    for byte in range(256):
        if bytes([byte]) not in known:
            raise _wrong(file, f"no token is the byte {byte}")
    return tokens


def _read_line(file: Path, number: int, line: bytes) -> tuple[bytes, int]:
    parts = line.split()
    try:
        encoded, rank = parts
        token = base64.b64decode(encoded, validate=True)
        if token and rank.isdigit():
            return token, int(rank)
    except (ValueError, binascii.Error):
        pass
    raise _wrong(file, f"line {number} is no token in base64 and its rank: {line[:40]!r}")


def merges_of(tokens: Sequence[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Yield the two parts that each token is merged of, in the order of their ranks."""
    ranks = {token: rank for rank, token in enumerate(tokens)}
    for rank, token in enumerate(tokens):
        parts = _parts_below(token, rank, ranks)
        if len(parts) == 2:  # others come of no merge, only as a whole piece of a text
            yield parts[0], parts[1]


def _parts_below(token: bytes, limit: int, ranks: Mapping[bytes, int]) -> list[bytes]:
    """Merge a token's bytes by ranks lower than its rank."""
    parts = [token[place : place + 1] for place in range(len(token))]
    while len(parts) > 2:
        joined = [ranks.get(left + right, limit) for left, right in pairwise(parts)]
        lowest = min(joined)
        if lowest >= limit:
            break
        place = joined.index(lowest)
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return parts


def byte_level_alphabet() -> dict[str, int]:
    """Return GPT-2's alphabet: printable Latin-1 is itself, other bytes are U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {
        **{chr(byte): byte for byte in printable},
        **{chr(256 + n): byte for n, byte in enumerate(others)},
    }


SPELLED = {byte: character for character, byte in byte_level_alphabet().items()}


def _spelled(token: bytes) -> str:
    return "".join(SPELLED[byte] for byte in token)


# --- special tokens -------------------------------------------------------------------------------


def _special_tokens(directory: Path, added: Any, first: int, count: int) -> list[str]:
    """Return the texts of the ids from `first` on."""
    file = directory / SETTINGS
    if not isinstance(added, dict) or not added:
        raise _wrong(file, "it names no special tokens (added_tokens_decoder)")
    named: dict[int, str] = {}
    for key, token in added.items():
        text = token.get("content") if isinstance(token, dict) else token
        if not key.isdecimal() or not isinstance(text, str) or not text:
            raise _wrong(file, f"added_tokens_decoder has {key!r}, which is no id of a text")
        if int(key) in named:
            raise _wrong(file, f"the id {int(key)} is there twice")
        named[int(key)] = text
    if min(named) != first:
        raise _wrong(
            file,
            f"its special tokens begin at id {min(named)}, and {directory / RANKS} has {first} "
            "tokens",
        )
    if max(named) >= first + count:
        raise _wrong(
            file,
            f"it names the special token {named[max(named)]!r} with id {max(named)}, and the ids "
            f"of {RANKS} and of {count} special tokens end at {first + count - 1}",
        )
    texts = [named.get(i, f"<|reserved_token_{i}|>") for i in range(first, first + count)]
    if len({*texts}) < count:
        twin = next(text for text in texts if texts.count(text) > 1)
        raise _wrong(file, f"two ids are {twin!r}")
    return texts


# --- the Python file ------------------------------------------------------------------------------


def code_file(directory: Path) -> Path:
    """Return the Python file of the tokenizer's class; CheckpointError if it is not there."""
    named = read_settings(directory).get("auto_map")
    entry = named.get("AutoTokenizer") if isinstance(named, dict) else None
    names = entry if isinstance(entry, list) else [entry]
    name = next((name for name in names if isinstance(name, str)), "")
    module, _, _ = name.partition(".")
    if not re.fullmatch(r"\w+", module):
        raise _wrong(
            directory / SETTINGS,
            f"auto_map names no Python file here for AutoTokenizer ({entry!r}), which has the "
            f"pattern of {RANKS}",
        )
    file = directory / f"{module}.py"
    if not file.is_file():
        raise _wrong(directory / RANKS, f"{file.name}, which has its pattern, is not there")
    return file


def read_split(directory: Path) -> Split:
    """Return what the Python file says, without running it; CheckpointError if it is computed."""
    file = code_file(directory)
    try:
        tree = ast.parse(read_bytes(file, MAX_CODE).decode())
        nodes = [*ast.walk(tree)]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _wrong(file, f"it is not Python ({error})") from error
    values = _assigned(nodes)
    pattern = _Literal(file, values).text(PATTERN)
    for node in nodes:
        if isinstance(node, ast.keyword) and node.arg == PATTERN and not _is_pattern(node.value):
            raise _computed(file, f"{PATTERN} in line {node.value.lineno}")
    if pattern != KIMI_PATTERN:
        _check_pattern(file, pattern)
    reserved = _Literal(file, values).number(RESERVED, SPECIAL_TOKENS)
    return Split(pattern, reserved)


def _assigned(nodes: Sequence[ast.AST]) -> dict[str, list[ast.expr | None]]:
    """Return the values of all names and attributes; None: of another kind than `name = value`."""
    values: dict[str, list[ast.expr | None]] = {}
    plain: set[ast.AST] = set()
    for node in nodes:
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = node.targets[0]
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            target = node.target
        else:
            continue
        if isinstance(target, ast.Name):
            plain.add(target)
            values.setdefault(target.id, []).append(node.value)
    for node in nodes:
        if isinstance(node, ast.Name | ast.Attribute) and not isinstance(node.ctx, ast.Load):
            name = node.id if isinstance(node, ast.Name) else node.attr
            if node not in plain:
                values.setdefault(name, []).append(None)
    return values


def _is_pattern(node: ast.expr) -> bool:
    """Return whether an argument is the class's own pattern."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and len(node.args) == 1:
        node = node.args[0]  # "|".join(self.pat_str)
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return name == PATTERN


class _Literal:
    """Values that a file has as plain strings, lists of them and numbers."""

    def __init__(self, file: Path, values: Mapping[str, Sequence[ast.expr | None]]) -> None:
        self._file = file
        self._values = values

    def text(self, name: str) -> str:
        text = self._text(self._value(name), name)
        if text is None:
            raise _computed(self._file, name)
        return text

    def number(self, name: str, default: int) -> int:
        if name not in self._values:
            return default
        value = self._value(name)
        number = value.value if isinstance(value, ast.Constant) else None
        if type(number) is not int or not 0 < number < 1 << 16:
            raise _computed(self._file, name)
        return number

    def _value(self, name: str) -> ast.expr:
        values = self._values.get(name, ())
        if not values:
            raise _wrong(self._file, f"it has no {name}, which {RANKS} is read with", TO_EXPORT)
        value = values[0]
        if len(values) > 1 or value is None:
            raise _computed(self._file, name)
        return value

    def _text(self, node: ast.expr, name: str) -> str | None:
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, str) else None
        if isinstance(node, ast.List | ast.Tuple):
            return self._joined("|", node)
        if isinstance(node, ast.Name) and node.id != name and node.id in self._values:
            return self._text(self._value(node.id), node.id)
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "join"
            and isinstance(node.func.value, ast.Constant)
            and node.func.value.value == "|"
            and len(node.args) == 1
            and not node.keywords
        ):
            return self._joined("|", node.args[0])
        return None

    def _joined(self, separator: str, node: ast.expr) -> str | None:
        if isinstance(node, ast.Name) and node.id in self._values:
            node = self._value(node.id)
        if not isinstance(node, ast.List | ast.Tuple):
            return None
        texts = [item.value for item in node.elts if isinstance(item, ast.Constant)]
        if len(texts) < len(node.elts) or not all(isinstance(text, str) for text in texts):
            return None
        return separator.join(map(str, texts))


def _computed(file: Path, what: str) -> CheckpointError:
    return _wrong(
        file,
        f"{what} is no plain string or list of strings; dflash-trt runs no code of a checkpoint",
        TO_EXPORT,
    )


def _check_pattern(file: Path, pattern: str) -> None:
    """Raise CheckpointError for a pattern that `tokenizers` may read otherwise than tiktoken."""
    if not ALIKE.fullmatch(pattern):
        raise _wrong(
            file,
            f"{PATTERN} is another pattern than Kimi's, with parts that tiktoken and tokenizers "
            f"may read differently: {pattern!r}",
            TO_EXPORT,
        )
    try:
        with panics_as_errors():
            rest = splitters.Split(Regex(pattern), "removed").pre_tokenize_str(EVERY_KIND)
    except Exception as error:  # the library raises bare Exception
        raise _wrong(file, f"{PATTERN} is no regular expression ({error})", TO_EXPORT) from error
    if rest:
        left = "".join(text for text, _ in rest)
        raise _wrong(
            file, f"{PATTERN} leaves out some characters of a text: {left[:40]!r}", TO_EXPORT
        )
