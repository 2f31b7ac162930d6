"""Writes `speculators-*`: three small drafters as speculators 0.9.0 saves them, and its own logits.

python make_speculators.py, in this folder, with `speculators==0.9.0`. Its upper bounds keep it from
being installed beside a newer transformers, so what it wrote is kept here.
"""

from pathlib import Path

import numpy as np
import speculators.models.dflash.core as core
import torch
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from speculators.models.dflash2 import DFlash2DraftModel, DFlash2SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import Qwen3Config

VOCAB, HIDDEN, BLOCK, TAPS = 64, 32, 8, [1, 3]
TOP_K = 4  # candidates of DFlash 2's selector
STARTS = [11, 12, 15, 24]
SLIDING = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 10,
    "use_sliding_window": True,
    "max_window_layers": 0,
}


@torch.no_grad()
def write(
    name: str, draft_vocab: int, from_anchor: bool, non_causal: bool, second: bool = False
) -> None:
    torch.manual_seed(0)
    layers = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
        **SLIDING,
    )
    layers._attn_implementation = "eager"
    own = {"conv_group_size": 8, "selector_rank": 6, "selector_top_k": TOP_K} if second else {}
    config = (DFlash2SpeculatorConfig if second else DFlashSpeculatorConfig)(
        transformer_layer_config=layers,
        draft_vocab_size=draft_vocab,
        block_size=BLOCK,
        aux_hidden_state_layer_ids=TAPS,
        mask_token_id=VOCAB - 1,
        sliding_window_non_causal=non_causal,
        sample_from_anchor=from_anchor,
        speculators_config=SpeculatorsConfig(
            algorithm="dflash2" if second else "dflash",
            proposal_methods=[
                GreedyTokenProposalConfig(speculative_tokens=BLOCK - 1 + from_anchor)
            ],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
        **own,
    )
    model = (DFlash2DraftModel if second else DFlashDraftModel)(config).eval()
    for tensor in model.parameters():
        noise = torch.randn(tensor.shape)
        drawn = 1 + 0.2 * noise if tensor.ndim == 1 else 2 * noise / tensor.shape[1] ** 0.5
        tensor.copy_(drawn.bfloat16().float())  # so that bfloat16 holds them exactly
    if draft_vocab != VOCAB:
        ids = torch.randperm(VOCAB)[:draft_vocab].sort().values
        known = torch.zeros(VOCAB, dtype=torch.bool)
        known[ids] = True
        model.load_vocab_mappings(known, ids - torch.arange(draft_vocab))
    text, features = torch.randint(VOCAB - 1, (1, 40)), torch.randn(1, 40, len(TAPS) * HIDDEN)
    anchors = torch.tensor(STARTS), torch.ones(len(STARTS), dtype=torch.bool)
    core.select_anchors = lambda *_: anchors
    hidden, logits, *_ = model._backbone_forward(
        features,
        text,
        torch.ones_like(text),
        torch.zeros(1, 40, HIDDEN),
        torch.zeros_like(text),
        max_anchors=len(STARTS),
    )
    pairs = {"pair_scores": pair_scores(model, text[0], hidden, logits)} if second else {}
    model.to(torch.bfloat16).save_pretrained(name)
    (Path(name) / "config.py").unlink()  # a copy of code, which nobody runs
    np.savez_compressed(
        Path(name) / "expected.npz",
        text=text[0].numpy(),
        features=features[0].numpy(),
        # which it shares with the target
        embedding=model.embed_tokens.weight.float().numpy(),
        head=model.lm_head.weight.float().numpy(),
        starts=np.array(STARTS),
        logits=logits.view(len(STARTS), BLOCK, -1).numpy(),
        **pairs,
    )


def pair_scores(
    model: DFlash2DraftModel, text: torch.Tensor, hidden: torch.Tensor, logits: torch.Tensor
) -> np.ndarray:
    """[starts, B-1, k, k]: each candidate's score by the one before, best first; as its `forward`
    gives them for one text.
    """
    scores = torch.empty(len(STARTS), BLOCK - 1, TOP_K, TOP_K)
    for i, start in enumerate(STARTS):
        for j in range(1, BLOCK):
            at = slice(i * BLOCK + j, i * BLOCK + j + 1)
            before = logits[0, at.start - 1].topk(TOP_K).indices
            before = text[start].expand(TOP_K) if j == 1 else before
            for p, token in enumerate(before):
                _, found = model.candidate_selector.select(
                    logits[:, at], hidden[:, at], token.reshape(1, 1)
                )
                scores[i, j - 1, p] = found[0, 0]
    return scores.numpy()


write("speculators-reduced", draft_vocab=24, from_anchor=True, non_causal=False)
write("speculators-full", draft_vocab=VOCAB, from_anchor=False, non_causal=True)
write("speculators-dflash2", draft_vocab=VOCAB, from_anchor=False, non_causal=True, second=True)
