"""The drafter: its configuration, its start from the target's last layers, and its loss."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from data import Batch
from dflash.model import DFlash2DraftModel, DFlashDraftModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config

sys.path.append(str(Path(__file__).resolve().parents[1] / "pycode"))
from drafter import block_mask, position_weights

BLOCK = 8
HARD = 0.5  # share of the text's own token in the loss; the rest follows the target's likeliest
MASK = 16  # <empty_output>, which no chat has
CANDIDATES = 16  # of each place, among which the selector chooses
SELECTOR = "candidate_selector."


def draft_config(target: LlamaConfig, layers: int, taps: list[int]) -> Qwen3Config:
    return Qwen3Config(
        architectures=["DFlashDraftModel"],
        block_size=BLOCK,
        dflash_config={"block_size": BLOCK, "mask_token_id": MASK, "target_layer_ids": taps},
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
        bos_token_id=target.bos_token_id,
        eos_token_id=target.eos_token_id,
        pad_token_id=target.eos_token_id,
    )


@torch.no_grad()
def start_from_target(
    drafter: DFlashDraftModel, target: LlamaForCausalLM, features: Tensor
) -> None:
    """Copy the target's last layers. `fc` begins with features of equal size in every channel and
    the deepest tap passed on: some channels of the target are thousands of times larger."""
    copied = list(target.model.layers)[-len(drafter.layers) :]
    for layer, source in zip(drafter.layers, copied, strict=True):
        layer.load_state_dict(source.state_dict(), strict=False)
        nn.init.constant_(layer.self_attn.q_norm.weight, 1.5)
        nn.init.constant_(layer.self_attn.k_norm.weight, 1.5)
    drafter.norm.load_state_dict(target.model.norm.state_dict())
    hidden = drafter.config.hidden_size
    size = features.float().square().mean(0).sqrt().clamp_min(1e-3)
    nn.init.normal_(drafter.fc.weight, std=0.02)
    drafter.fc.weight[:, -hidden:] += torch.eye(hidden)
    drafter.fc.weight /= size
    nn.init.ones_(drafter.hidden_norm.weight)


class Vocabulary:
    """The tokens that the drafter may propose: row r of its head is the target's `ids[r]`."""

    def __init__(self, ids: Tensor, target: LlamaForCausalLM) -> None:
        self.ids = ids
        self.row = torch.full((target.config.vocab_size,), -1)
        self.row[ids] = torch.arange(len(ids))
        self.head = target.lm_head.weight[ids].detach().T.contiguous()


def block_states(
    drafter: DFlashDraftModel, embedding: Tensor, batch: Batch
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states `[blocks, BLOCK - 1, hidden]` of the places after each anchor; positions and
    the text's tokens of whole blocks, `[rows, anchors * BLOCK]`."""
    rows, count = batch.anchors.shape
    length = batch.ids.shape[1]
    offsets = torch.arange(BLOCK)
    positions = (batch.anchors[:, :, None] + offsets).flatten(1)
    tokens = batch.ids.gather(1, positions.clamp_max(length - 1))
    noise = torch.where(offsets.repeat(count) == 0, tokens, MASK)
    context = torch.arange(length).expand(rows, -1)
    hidden = drafter(
        position_ids=torch.cat([context, positions], dim=1),
        attention_mask=block_mask(batch.anchors, length, BLOCK),
        noise_embedding=F.embedding(noise, embedding),
        target_hidden=batch.features.float(),
    )
    return hidden.view(-1, BLOCK, hidden.shape[-1])[:, 1:], positions, tokens


def draft_loss(
    drafter: DFlashDraftModel, embedding: Tensor, vocabulary: Vocabulary, batch: Batch, aware: float
) -> tuple[Tensor, Tensor]:
    """Loss over the batch's blocks; which drafts of whole ones are right, `[blocks, BLOCK - 1]`."""
    hidden, positions, tokens = block_states(drafter, embedding, batch)
    inside = (positions < batch.lengths[:, None]).view(-1, BLOCK)[:, 1:]
    held = positions.clamp_max(batch.ids.shape[1] - 1)
    logits = hidden @ vocabulary.head
    labels = vocabulary.row[tokens].view(-1, BLOCK)[:, 1:]
    known = inside & (labels >= 0)
    row = torch.arange(len(batch.ids))[:, None]
    wanted_ids = batch.top_ids[row, held - 1].view(-1, BLOCK, batch.top_ids.shape[-1])[:, 1:]
    wanted = batch.top_probs[row, held - 1].view(-1, BLOCK, batch.top_probs.shape[-1])[:, 1:]
    wanted_rows = vocabulary.row[wanted_ids]
    wanted = wanted * (wanted_rows >= 0)
    wanted = wanted / wanted.sum(-1, keepdim=True).clamp_min(1e-6)
    log_probs = logits.log_softmax(-1)
    soft = -(wanted * log_probs.gather(-1, wanted_rows.clamp_min(0))).sum(-1)
    hard = -log_probs.gather(-1, labels.clamp_min(0)[..., None])[..., 0]
    right = torch.where(known, (-hard.detach()).exp(), 0.0)
    weights = position_weights(right, aware) * known
    loss = ((HARD * hard + (1 - HARD) * soft) * weights).sum() / known.any(-1).sum()
    hit = (logits.detach().argmax(-1) == labels) & known
    return loss, hit[inside.all(-1)].float()


def save_drafter(drafter: DFlashDraftModel, vocabulary: Vocabulary, folder: Path) -> None:
    """The layout of `speculators`, which has reduced vocabularies: the head's rows with it."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.detach() for name, value in drafter.state_dict().items()}
    tensors["lm_head.weight"] = vocabulary.head.T
    tensors = {name: value.to(torch.bfloat16).contiguous() for name, value in tensors.items()}
    ids = vocabulary.ids
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = vocabulary.row >= 0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    layer = drafter.config.to_dict()
    own = layer.pop("dflash_config")
    config = {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "transformer_layer_config": layer,
        "block_size": layer.pop("block_size"),
        "draft_vocab_size": len(ids),
        "aux_hidden_state_layer_ids": [tap + 1 for tap in own["target_layer_ids"]],
        "mask_token_id": own["mask_token_id"],
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def save_selector(
    projection: Tensor, predecessors: Tensor, successors: Tensor, folder: Path
) -> None:
    """Make what `save_drafter` wrote a DFlash 2 drafter; its convolutions leave all as it is."""
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    hidden = config["transformer_layer_config"]["hidden_size"]
    added = {
        f"{SELECTOR}hidden_projection.weight": projection,
        f"{SELECTOR}predecessor_codebook": predecessors,
        f"{SELECTOR}successor_codebook": successors,
    }
    for layer in range(config["transformer_layer_config"]["num_hidden_layers"]):
        for half in ("attention", "mlp"):
            name = f"layers.{layer}.{half}_conv."
            added[f"{name}base_kernel"] = torch.ones(2, 1, hidden)
            added[f"{name}kernel_projection.weight"] = torch.zeros(2, hidden)
    tensors |= {name: value.to(torch.bfloat16).contiguous() for name, value in added.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config["transformer_layer_config"]["architectures"] = ["DFlash2DraftModel"]
    config |= {
        "architectures": ["DFlash2DraftModel"],
        "speculators_model_type": "dflash2",
        "selector_rank": projection.shape[0],
        "selector_top_k": CANDIDATES,
        "conv_kernel_size": 1,
        "conv_group_size": hidden,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_weights(drafter: DFlashDraftModel, folder: Path) -> tuple[Tensor, Tensor]:
    """What `save_drafter` and `save_selector` wrote, as far as `drafter` has it; returns which
    tokens it proposes, and its head."""
    tensors = load_file(folder / "model.safetensors")
    ids, head = tensors["d2t"], tensors["lm_head.weight"].float()
    stored = {name: name.replace("_codebook.weight", "_codebook") for name in drafter.state_dict()}
    drafter.load_state_dict({name: tensors[key] for name, key in stored.items()})
    return ids + torch.arange(len(ids)), head


def load_drafter(folder: Path, target: LlamaForCausalLM) -> DFlash2DraftModel:
    """As z-lab's decoder takes it: tokens that the drafter cannot propose have no chance."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    taps = [layer - 1 for layer in config["aux_hidden_state_layer_ids"]]
    layers = config["transformer_layer_config"]["num_hidden_layers"]
    wanted = draft_config(target.config, layers, taps)
    for name in ("selector_rank", "selector_top_k", "conv_kernel_size", "conv_group_size"):
        wanted.dflash_config[name] = config[name]
    drafter = DFlash2DraftModel(wanted)
    ids, head = load_weights(drafter, folder)

    def logits(hidden: Tensor, _: nn.Module) -> Tensor:
        whole = torch.full((*hidden.shape[:-1], target.config.vocab_size), -torch.inf)
        whole[..., ids] = hidden @ head.T
        return whole

    drafter.compute_logits = logits
    return drafter
