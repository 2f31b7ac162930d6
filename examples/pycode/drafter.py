"""The drafter: its configuration, its start from the target's last layers, and its loss."""

from __future__ import annotations

import copy
from pathlib import Path

import corpus
import torch
from blocks import block_mask, position_weights
from dflash.model import DFlashDraftModel
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Qwen3Config, Qwen3ForCausalLM

HARD = 0.5  # share of the rollout's own token in the loss; the rest follows the target's logits


def draft_config(target: Qwen3Config, layers: int, taps: list[int], block: int) -> Qwen3Config:
    return Qwen3Config(
        architectures=["DFlashDraftModel"],
        block_size=block,
        dflash_config={
            "block_size": block,
            "mask_token_id": corpus.MASK_ID,
            "target_layer_ids": taps,
        },
        num_target_layers=target.num_hidden_layers,
        num_hidden_layers=layers,
        layer_types=["full_attention"] * layers,
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        num_attention_heads=target.num_attention_heads,
        num_key_value_heads=target.num_key_value_heads,
        head_dim=target.head_dim,
        intermediate_size=target.intermediate_size,
        max_position_embeddings=target.max_position_embeddings,
        rope_parameters=dict(target.rope_parameters),
        rms_norm_eps=target.rms_norm_eps,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=corpus.END_ID,
        pad_token_id=corpus.END_ID,
    )


@torch.no_grad()
def start_from_target(drafter: DFlashDraftModel, target: Qwen3ForCausalLM) -> None:
    """Copy the target's last layers; feed them the deepest tap to begin with."""
    copied = list(target.model.layers)[-len(drafter.layers) :]
    for layer, source in zip(drafter.layers, copied, strict=True):
        layer.load_state_dict(source.state_dict())
    drafter.norm.load_state_dict(target.model.norm.state_dict())
    hidden = drafter.config.hidden_size
    nn.init.normal_(drafter.fc.weight, std=0.02)
    drafter.fc.weight[:, -hidden:] += torch.eye(hidden, device=drafter.fc.weight.device)
    # Context skips the layers' own input norm, so hidden_norm takes over its weight.
    drafter.hidden_norm.load_state_dict(copied[-1].input_layernorm.state_dict())


@torch.no_grad()
def grow(drafter: DFlashDraftModel, layers: int) -> DFlashDraftModel:
    """Add layers without changing the function: copies of the last with outputs zeroed."""
    config = copy.deepcopy(drafter.config)
    config.num_hidden_layers = layers
    config.layer_types = ["full_attention"] * layers
    grown = DFlashDraftModel(config)
    grown.load_state_dict(drafter.state_dict(), strict=False)
    for layer in grown.layers[len(drafter.layers) :]:
        layer.load_state_dict(drafter.layers[-1].state_dict())
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    return grown


def draft_loss(
    drafter: DFlashDraftModel,
    embedding: Tensor,
    ids: Tensor,
    features: Tensor,
    teacher: Tensor,
    anchors: Tensor,
    aware: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return the loss at `anchors [rows, count]`, and the hit rate of each draft position."""
    block = drafter.block_size
    rows, count = anchors.shape
    offsets = torch.arange(block, device=ids.device)
    positions = (anchors[:, :, None] + offsets).flatten(1)
    tokens = ids.gather(1, positions)
    noise = torch.where(offsets.repeat(count) == 0, tokens, drafter.mask_token_id)
    context = torch.arange(features.shape[1], device=ids.device).expand(rows, -1)
    hidden = drafter(
        position_ids=torch.cat([context, positions], dim=1),
        attention_mask=block_mask(anchors, features.shape[1], block),
        noise_embedding=F.embedding(noise, embedding),
        target_hidden=features,
    )
    logits = hidden.view(-1, block, hidden.shape[-1])[:, 1:] @ embedding.T
    labels = tokens.view(-1, block)[:, 1:]
    # Logits at a position predict the next one.
    row = torch.arange(rows, device=ids.device)[:, None]
    wanted = teacher[row, positions - 1].view(-1, block, teacher.shape[-1])[:, 1:].softmax(-1)
    log_probs = logits.log_softmax(-1)
    soft = -(wanted * log_probs).sum(-1)
    hard = -log_probs.gather(-1, labels[..., None])[..., 0]
    weights = position_weights((-hard.detach()).exp(), aware)
    loss = ((HARD * hard + (1 - HARD) * soft) * weights).sum(-1).mean()
    hits = (logits.detach().argmax(-1) == labels).float().mean(0)
    return loss, hits


def save_drafter(drafter: DFlashDraftModel, folder: Path) -> None:
    """Save in the published layout, without embedding and head, which are the target's."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: value.detach().to("cpu", torch.bfloat16).contiguous()
        for name, value in drafter.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = drafter.config.to_dict() | {
        "dtype": "bfloat16",
        "rope_theta": drafter.config.rope_parameters["rope_theta"],
    }
    for key in ("_name_or_path", "id2label", "label2id"):
        config.pop(key, None)
    corpus.write_json(folder / "config.json", config)
