"""Random tiny target/drafter pairs, written by `transformers` and z-lab's `dflash` themselves.

The weights are random but not degenerate: greedy text wanders over a handful of favored tokens
that target and drafter share (they share the output head), so that drafts are accepted now and then
and a wrong rollback shows in the text.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import dflash.model as zlab
import torch
from dflash.model import (
    DFlash2DraftModel,
    DFlashDraftModel,
    _draft_value,
    _output_head,
    _raw_input_embeddings,
    extract_context_feature,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

# projections of smaller weights: sharper attention would blow rounding up beyond what can be
# compared in fp32, and so would states, which a norm follows however small they are
SOFT = ("q_proj", "k_proj", "linear_attn.out_proj")
FAVOURED = 6  # tokens that win nearly every argmax; fewer of them means more drafts accepted


@dataclass(frozen=True)
class Pair:
    """Directories of a target and its drafter, as on Hugging Face."""

    target_dir: Path
    drafter_dir: Path


def make_pair(
    directory: Path,
    *,
    family: Literal["qwen3", "llama"] = "qwen3",
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    layers: int = 4,
    hidden: int = 64,
    intermediate: int = 96,
    vocab: int = 320,
    tied: bool = True,
    block_size: int = 8,
    taps: tuple[int, ...] = (0, 2),
    draft_layers: int = 1,
    longest: int = 512,
    rope_theta: float = 50000.0,
    seed: int = 0,
    dtype: str = "float32",
) -> Pair:
    """Write `directory/target` and `directory/drafter`; the same arguments give the same bytes.

    taps are z-lab's `target_layer_ids`: 0 is after the first layer; the last cannot be tapped.
    rope_theta is the drafter's, the target's is 10000. The end-of-text id is vocab-2, the drafter's
    mask id vocab-1.
    """
    shape = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": intermediate,
        "max_position_embeddings": longest,
        "tie_word_embeddings": tied,
    }
    config = Qwen3Config(**shape) if family == "qwen3" else LlamaConfig(**shape, rms_norm_eps=1e-5)
    drafter = {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        # its own width and RoPE base, so that a value read from the wrong config shows
        "intermediate_size": intermediate + 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta},
        "num_hidden_layers": draft_layers,
        "block_size": block_size,
        "dflash_config": {"mask_token_id": vocab - 1, "target_layer_ids": list(taps)},
    }
    return write_pair(directory, config, drafter, seed=seed, dtype=dtype)


def write_pair(
    directory: Path,
    config: PretrainedConfig,
    drafter: dict[str, Any],
    *,
    drafter_class: type[DFlashDraftModel] = DFlashDraftModel,
    seed: int = 0,
    dtype: str = "float32",
) -> Pair:
    """Write a random target of any family and its drafter, `directory/target` and `.../drafter`.

    config: the target's; its end-of-text id becomes vocab-2. drafter: fields of the drafter's
    config beside those that follow from the target.
    """
    pair = Pair(directory / "target", directory / "drafter")
    generator = torch.Generator().manual_seed(seed)
    text = config.get_text_config()
    vocab = text.vocab_size
    text.bos_token_id = None
    text.pad_token_id = None if text is config else 0  # Gemma 4 with images needs one
    text.eos_token_id = vocab - 2
    with_images = config.model_type in ("qwen3_5", "qwen3_5_moe")  # whose causal class has none
    kind = AutoModelForImageTextToText if with_images else AutoModelForCausalLM
    target = kind.from_config(config)
    _redraw(target, generator)
    target.to(getattr(torch, dtype)).save_pretrained(pair.target_dir)
    tiny_tokenizer(vocab).save_pretrained(pair.target_dir)

    shared = {
        "vocab_size": vocab,
        "hidden_size": text.hidden_size,
        "max_position_embeddings": text.max_position_embeddings,
        "num_target_layers": text.num_hidden_layers,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": vocab - 2,
        "pad_token_id": None,
    }
    model = drafter_class(Qwen3Config(**(shared | drafter)))
    _redraw(model, generator)
    model.to(getattr(torch, dtype)).save_pretrained(pair.drafter_dir)
    return pair


def make_endless(pair: Pair) -> None:
    """Remove the end-of-text token, so that texts have the requested length."""
    nothing = {"eos_token_id": None, "eos_token": None}
    for file in ("config.json", "generation_config.json", "tokenizer_config.json"):
        path = pair.target_dir / file
        path.write_text(json.dumps(json.loads(path.read_text()) | nothing))


def zlab_drafter(drafter_dir: Path) -> DFlashDraftModel:
    """Return a drafter in float32, of the z-lab class that its config names."""
    (name,) = json.loads((drafter_dir / "config.json").read_text())["architectures"]
    return getattr(zlab, name).from_pretrained(drafter_dir, dtype=torch.float32)


def teach(pair: Pair, *, steps: int = 120, seed: int = 0, first: int = 1) -> list[list[int]]:
    """Train the pair's drafter on some greedy texts of the target, in place (1 to 3 s).

    Random drafts are hardly ever accepted; these are, at every length, which tests what follows an
    acceptance. Returns the texts: 12 random tokens and 68 generated ones, so that every prefix of
    12 tokens or more is a prompt whose continuation the drafter knows. first: the block row of the
    first draft.
    """
    generator = torch.Generator().manual_seed(seed)
    target = AutoModelForCausalLM.from_pretrained(pair.target_dir, dtype=torch.float32)
    drafter = zlab_drafter(pair.drafter_dir)
    width = drafter.block_size
    with torch.no_grad():
        prompts = torch.randint(
            target.config.get_text_config().vocab_size - 2, (8, 12), generator=generator
        )
        target.generation_config.eos_token_id = None
        texts = target.generate(prompts, do_sample=False, max_new_tokens=68, pad_token_id=0)
        hidden = target(texts, output_hidden_states=True).hidden_states
        features = extract_context_feature(hidden, drafter.target_layer_ids)

    scale = float(_draft_value(drafter.config, "input_embedding_scale", 1.0))
    optimizer = torch.optim.Adam(drafter.parameters(), lr=3e-3)
    for _ in range(steps):
        start = int(torch.randint(12, texts.shape[1] - width, (1,), generator=generator))
        block = torch.full((len(texts), width), drafter.mask_token_id)
        block[:, 0] = texts[:, start]
        with torch.no_grad():
            noise = _raw_input_embeddings(target, block, scale)
        states = drafter(
            target_hidden=features[:, :start],
            noise_embedding=noise,
            position_ids=torch.arange(start + width)[None],
        )
        logits = drafter.compute_logits(states[:, first:], _output_head(target))
        if isinstance(drafter, DFlash2DraftModel):  # as if every token were a candidate
            selector = drafter.candidate_selector
            before = selector.predecessor_codebook(texts[:, start : start + width - 1])
            before = before * selector.hidden_projection(states[:, 1:])
            logits = logits + before @ selector.successor_codebook.weight.T
        wanted = texts[:, start + 1 : start + 1 + width - first]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    stored = json.loads((pair.drafter_dir / "config.json").read_text())["dtype"]
    drafter.to(getattr(torch, stored)).save_pretrained(pair.drafter_dir)
    return texts.tolist()


@torch.no_grad()
def _redraw(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Draw matrices at std 1/sqrt(fan-in), norm weights near their neutral value.

    A few rows of the head are favored.
    """
    tensors = dict(model.named_parameters())
    tensors |= {name: x for name, x in model.named_buffers() if name.endswith("layer_scalar")}
    # Gemma: a scaled embedding, a final norm that makes up for it, and norms behind each half layer
    scales = [m.scalar_embed_scale for m in model.modules() if hasattr(m, "scalar_embed_scale")]
    scale = scales[0] if scales else 1.0
    centers = {n: tensor.mean().round() for n, tensor in tensors.items()}
    for name in tensors:
        if scales and name.endswith("model.norm.weight"):
            centers[name] += scale - 1
        if scales and "layers" in name and "post_" in name:
            centers[name] += 4
        if scales and name.endswith("q_norm.weight"):
            centers[name] *= 0.3  # 1 in Gemma 4, which does not scale attention
    biased_experts = any(name.endswith("experts.down_proj_bias") for name in tensors)
    for name, tensor in tensors.items():
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith("A_log"):
            tensor.copy_(0.5 * noise - 2)  # a state remembers some ten tokens
        elif name.endswith("dt_bias"):
            tensor.copy_(0.5 * noise)
        elif name.endswith("bias"):
            tensor.copy_(0.2 * noise)
        elif name.endswith("sinks"):
            tensor.copy_(3.0 + noise)  # about what a score has to be to matter
        elif tensor.ndim == 1:
            tensor.copy_(centers[name] + 0.2 * noise)
        elif "embed_tokens" in name or "lm_head" in name:
            rows = torch.full((tensor.shape[0], 1), 0.3)
            rows[torch.randperm(tensor.shape[0] - 2, generator=generator)[:FAVOURED]] = 0.9
            tensor.copy_(noise * rows / scale)
        else:
            # 2.0: the layers, not the embedding of the last token, should decide the next one
            gain = 1.0 if name.removesuffix(".weight").endswith(SOFT) else 2.0
            # experts are stacked: Qwen's [experts, out, in], gpt-oss' [experts, in, out]
            inputs = tensor.shape[1 if tensor.ndim == 2 or biased_experts else 2]
            tensor.copy_(gain * noise / inputs**0.5)


def tiny_tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer if 256 bytes fit the vocabulary, else one word per id."""
    special = {vocab - 2: "<|end|>", vocab - 1: "<|mask|>"}
    if vocab >= 258:
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        words = letters + [f"<|unused{i}|>" for i in range(len(letters), vocab - 2)]
        ids = {word: i for i, word in enumerate(words)}
        ids |= {word: i for i, word in special.items()}
        tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        ids = {special.get(i, f"w{i}"): i for i in range(vocab)}
        tokenizer = Tokenizer(models.WordLevel(vocab=ids, unk_token="w0"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(special.values()))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
