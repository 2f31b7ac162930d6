"""The published pairs as stand-ins: real shapes, real names, no weights.

A stand-in is what `transformers` (targets) and z-lab's `dflash` (drafters) say of a model of the
published config: the library builds it on the meta device, its tensors' names are turned back into
those of a checkpoint, and the safetensors files get that header over a body that is one hole.
Targets of families that nobody here reads the tensors of (latent attention) have the index of their
shards only.

`published.yaml` has the configs. Fields of a drafter that were not seen (`max_position_embeddings`,
the RoPE) follow its target. z-lab lets few see the drafters of MiniMax-M2: theirs are its usual
taps, the block of their cards, and what else gives the size of their files. `published_files.yaml`
has what is public of the repositories' files. Left out: vision towers and next-token-prediction
layers but of hybrids, text beyond a small tokenizer. Hybrids' files are as public notes describe
them: experts of Qwen3.5's bf16 files in one stack a layer (github.com/radixark/miles/pull/1317),
`mtp.*` beside the layers (transformers ignores it).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from dflash.model import DFlash2DraftModel, DFlashDraftModel
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PretrainedConfig, Qwen3Config
from transformers.core_model_loading import revert_weight_conversion

from dflash_trt.checkpoints.target import FAMILIES
from dflash_trt.planning import published_models
from tests.support.kimi import write_kimi_tokenizer
from tests.support.sparse_files import Tensor, size_of, write_hole

COMMIT = "0" * 39 + "1"  # what `main` is in the stand-in cache
IMAGES = ("visual.", "vision_tower", "mm_projector", "embed_vision")
NEXT = "mtp."


@dataclass(frozen=True)
class Target:
    """`cls` and `config` are transformers'; `architecture` is the Hub's config.json's."""

    hub: str
    cls: str
    config: PretrainedConfig
    mask: tuple[str, int]  # token of the tokenizer that the drafter has as its mask
    architecture: str
    quantized: str | None  # its experts are "mxfp4" or "nvfp4", its matrices "fp8"


@dataclass(frozen=True)
class Pair:
    """A published pair; drafter: fields of its config.json that do not follow from the target."""

    target: Target
    drafter_hub: str
    drafter: Mapping[str, Any]
    second: bool  # DFlash 2
    files: Mapping[str, Any]  # of the target: `files`, `code` and `tokenizer`; empty: unknown
    head: Mapping[str, Any]  # `hub` and `fields` of its EAGLE-3 head; empty without one


FILES = yaml.safe_load(Path(__file__).with_name("published_files.yaml").read_text())


def _pair(
    name: str, target: dict[str, Any], drafter: dict[str, Any], head: dict[str, Any] | None = None
) -> Pair:
    return Pair(
        Target(
            hub=target["hub"],
            cls=target["class"],
            config=getattr(transformers, target["config"])(**target["fields"]),
            mask=tuple(target["mask"]),
            architecture=target.get("architecture", target["class"]),
            quantized=target.get("quantized"),
        ),
        drafter_hub=drafter["hub"],
        drafter={**_packaged(drafter["hub"]), **drafter.get("fields", {})},
        second=drafter.get("second", False),
        files=FILES["targets"].get(name, {}),
        head=head or {},
    )


def _packaged(hub: str) -> dict[str, Any]:
    values = published_models()["drafters"][hub]["config"]
    return {name: value for name, value in values.items() if name != "architectures"}


# by the name of the target in the folders of build_configs/
PAIRS = {
    name: _pair(name, **models)
    for name, models in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text()).items()
}


def write_pair(cache: Path, pair: Pair, revisions: Mapping[str, str]) -> None:
    """Put the models into a Hub cache (`HF_HUB_CACHE`), at the revisions given by Hub id."""
    models = {pair.target.hub: _write_target, pair.drafter_hub: _write_drafter}
    for hub, write in (models | ({pair.head["hub"]: _write_head} if pair.head else {})).items():
        revision = revisions[hub]
        place = cache / f"models--{hub.replace('/', '--')}"
        commit = revision if len(revision) == 40 else COMMIT
        snapshot = place / "snapshots" / commit
        if snapshot.is_dir():
            continue
        snapshot.mkdir(parents=True)
        (place / "refs").mkdir(exist_ok=True)
        (place / "refs" / "main").write_text(commit)
        write(snapshot, pair)


def _write_target(directory: Path, pair: Pair) -> None:
    target = pair.target
    cls = getattr(transformers, target.cls)
    tensors = _tensors(cls, target.config, images=is_hybrid(target))
    if is_hybrid(target):
        tensors = _stacked(tensors) if "Qwen3_5Moe" in target.cls else tensors
        tensors |= _next_token_layer(tensors, target.config.get_text_config().hidden_size)
    if target.quantized is not None:
        tensors = dict(each for item in tensors.items() for each in _quantized(target, *item))
    _write_config(directory, target)
    _write_shards(directory, tensors, headers=target.cls in FAMILIES)
    if pair.files.get("tokenizer") == "kimi":
        write_kimi_tokenizer(directory, chat_template=CHAT)
    else:
        _write_tokenizer(directory, pair.target)
    for name in pair.files.get("files", ()):
        if (directory / name).exists():
            continue
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text("as published, but for what it says\n")
    for name, code in pair.files.get("code", {}).items():
        values = json.loads((directory / name).read_text())
        _write_json(directory / name, values | {"auto_map": code})


def _write_config(directory: Path, target: Target) -> None:
    config = json.loads(target.config.to_json_string(use_diff=False))
    config |= {"architectures": [target.architecture], "dtype": "bfloat16"}
    if target.quantized == "mxfp4":
        config["quantization_config"] = {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
        }
    if target.quantized == "nvfp4":
        config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
        algorithm = {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": "FP8",
            "group_size": 16,
            "exclude_modules": ["*lm_head", "*self_attn*", "*shared_experts*", "*.layers.0.*"],
        }
        _write_json(directory / "hf_quant_config.json", {"quantization": algorithm})
    if target.quantized == "fp8":
        config["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "float8_e4m3fn",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
        }
    _write_json(directory / "config.json", config)
    ends = target.config.get_text_config().eos_token_id
    _write_json(directory / "generation_config.json", {"eos_token_id": ends})


def _write_drafter(directory: Path, pair: Pair) -> None:
    text = pair.target.config.get_text_config()
    shared = {
        "vocab_size": text.vocab_size,
        "hidden_size": text.hidden_size,
        "max_position_embeddings": text.max_position_embeddings,
        "num_target_layers": text.num_hidden_layers,
        "tie_word_embeddings": False,
        "rope_parameters": _drafter_rope(text.rope_parameters),
    }
    config = Qwen3Config(**shared | dict(pair.drafter))
    cls = DFlash2DraftModel if pair.second else DFlashDraftModel
    tensors, (_, files) = _tensors(cls, config), FILES["drafters"][pair.drafter_hub]
    if files == 1:
        write_hole(directory / "model.safetensors", tensors)
    else:
        _write_shards(directory, tensors, headers=True)
    values = json.loads(config.to_json_string(use_diff=False))
    _write_json(directory / "config.json", values | {"architectures": [cls.__name__]})


def _write_head(directory: Path, pair: Pair) -> None:
    """Write an EAGLE-3 head as its authors do: `midlayer`, fc, norm, its head and map."""
    text, fields = pair.target.config.get_text_config(), dict(pair.head["fields"])
    hidden, wide = text.hidden_size, fields["intermediate_size"]
    dim = fields.get("head_dim", hidden // text.num_attention_heads)
    query, kv = text.num_attention_heads * dim, text.num_key_value_heads * dim
    shapes = {
        "fc.weight": (hidden, 3 * hidden),
        "norm.weight": (hidden,),
        **{
            f"midlayer.{name}.weight": (hidden,)
            for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")
        },
        "midlayer.self_attn.q_proj.weight": (query, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, query),
        "midlayer.mlp.gate_proj.weight": (wide, hidden),
        "midlayer.mlp.up_proj.weight": (wide, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, wide),
    }
    tensors: dict[str, Tensor] = {name: ("BF16", shape) for name, shape in shapes.items()}
    if (own := fields["draft_vocab_size"]) < text.vocab_size:
        tensors["lm_head.weight"] = ("BF16", (own, hidden))
        tensors |= {"d2t": ("I64", (own,)), "t2d": ("BOOL", (text.vocab_size,))}
    write_hole(directory / "model.safetensors", tensors)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": hidden,
        "num_attention_heads": text.num_attention_heads,
        "num_key_value_heads": text.num_key_value_heads,
        "head_dim": dim,
        "vocab_size": text.vocab_size,
    }
    _write_json(directory / "config.json", config | fields)


def _drafter_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the RoPE of the full layers; a drafter rotates the whole head."""
    rope = rope.get("full_attention", rope)
    kind = rope["rope_type"] if rope["rope_type"] in ("yarn", "llama3") else "default"
    return {k: v for k, v in rope.items() if k != "partial_rotary_factor"} | {"rope_type": kind}


def is_hybrid(target: Target) -> bool:
    kinds = getattr(target.config.get_text_config(), "layer_types", ())
    return "linear_attention" in (kinds or ())


def _stacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Put the experts of each layer into two tensors."""
    stacked = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    first = [name for name in tensors if ".experts.0." in name]
    for name in first:
        prefix = name.rpartition(".experts.0.")[0] + ".experts."
        count = sum(other.startswith(prefix) for other in tensors) // 3
        dtype, (out, wide) = tensors[name]
        if name.endswith("up_proj.weight"):
            stacked[f"{prefix}gate_up_proj"] = (dtype, (count, 2 * out, wide))
        if name.endswith("down_proj.weight"):
            stacked[f"{prefix}down_proj"] = (dtype, (count, out, wide))
    return stacked


def _next_token_layer(tensors: Mapping[str, Tensor], hidden: int) -> dict[str, Tensor]:
    """Return one more layer with attention, which predicts the token after the next."""
    attention = next(name for name in tensors if name.endswith("self_attn.q_proj.weight"))
    layer = attention.removesuffix("self_attn.q_proj.weight")
    copied = {n.replace(layer, f"{NEXT}layers.0."): t for n, t in tensors.items() if layer in n}
    norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    more: dict[str, Tensor] = {f"{NEXT}{name}.weight": ("BF16", (hidden,)) for name in norms}
    return copied | more | {f"{NEXT}fc.weight": ("BF16", (hidden, 2 * hidden))}


def _tensors(cls: Any, config: PretrainedConfig, *, images: bool = False) -> dict[str, Tensor]:
    with torch.device("meta"):
        model = cls(config)
    state = revert_weight_conversion(model, model.state_dict())
    tied = getattr(config, "tie_word_embeddings", False)
    return {
        _stored_name(name): ("BF16", tuple(tensor.shape))
        for name, tensor in state.items()
        if not (tied and name == "lm_head.weight")
        and (images or not any(part in name for part in IMAGES))
    }


def _stored_name(name: str) -> str:
    """Return the stored name where the library's own conversion leaves it unchanged."""
    name = name.replace("language_model.model.blocks.", "language_model.model.layers.")
    return name.removesuffix(".weight") if "_codebook" in name else name


def _quantized(target: Target, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    if target.quantized == "fp8":
        plain = name.endswith(("gate.weight", "embed_tokens.weight", "lm_head.weight"))
        if plain or len(tensor[1]) != 2:
            return [(name, tensor)]
        blocks = tuple(-(-size // 128) for size in tensor[1])
        return [(name, ("F8_E4M3", tensor[1])), (f"{name}_scale_inv", ("F32", blocks))]
    if ".experts." not in name or name.endswith("_bias"):
        return [(name, tensor)]
    if target.quantized == "mxfp4":  # experts, in, out -> experts, out, blocks of 32
        experts, wide, out = tensor[1]
        blocks = (experts, out, wide // 32)
        return [(f"{name}_blocks", ("U8", (*blocks, 16))), (f"{name}_scales", ("U8", blocks))]
    out, wide = tensor[1]
    return [
        (name, ("U8", (out, wide // 2))),
        (f"{name}_scale", ("F8_E4M3", (out, wide // 16))),
        (f"{name}_scale_2", ("F32", ())),
        (name.replace("weight", "input_scale"), ("F32", ())),
    ]


def _write_shards(directory: Path, tensors: Mapping[str, Tensor], *, headers: bool) -> None:
    """Write two shards and their index; headers: False leaves the shards out."""
    names = list(tensors)
    half = len(names) // 2 + 1
    parts = {"model-00001-of-00002": names[:half], "model-00002-of-00002": names[half:]}
    places = {name: f"{file}.safetensors" for file, part in parts.items() for name in part}
    for file, part in parts.items() if headers else ():
        write_hole(directory / f"{file}.safetensors", {name: tensors[name] for name in part})
    text = [name for name in names if not any(part in name for part in (*IMAGES, NEXT))]
    sizes = {
        "total_size": sum(map(size_of, tensors.values())),
        "text_size": sum(size_of(tensors[name]) for name in text),
    }
    index = {"metadata": sizes, "weight_map": places}
    _write_json(directory / "model.safetensors.index.json", index)


def _write_tokenizer(directory: Path, target: Target) -> None:
    """Write words of one letter, the end of text and the mask, at their true ids."""
    _write_json(directory / "tokenizer_config.json", {"chat_template": CHAT})
    text = target.config.get_text_config()
    ends = text.eos_token_id if isinstance(text.eos_token_id, list) else [text.eos_token_id]
    token, mask = target.mask
    special = {f"<|end_{end}|>": end for end in ends} | {token: mask}
    words = {chr(97 + i): 100 + i for i in range(26)}
    tokenizer = Tokenizer(models.WordLevel(words | special, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in special])
    tokenizer.save(str(directory / "tokenizer.json"))


CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def _write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value))
