"""Writes `modelopt-*`: three small drafters as NVIDIA ModelOpt 0.47.0 exports them, and its logits.

python make_modelopt.py, in this folder, with `nvidia-modelopt==0.47.0`, which is too large to be
needed by the tests: what it wrote is kept here.
"""

from pathlib import Path

import modelopt.torch.speculative as mtsp
import modelopt.torch.speculative.plugins.modeling_dflash as modeling
import numpy as np
import torch
from modelopt.torch.export.plugins.hf_spec_export import DFlashExporter
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

VOCAB, HIDDEN, BLOCK = 64, 32, 8
ROPE = {"rope_type": "default", "rope_theta": 50000.0}
STARTS = [11, 12, 15, 24]

modeling._get_sink_attention_fn = lambda: modeling._sink_attention_impl  # not compiled


@torch.no_grad()
def write(name: str, attention: str, window: int | None, sinks: bool = False) -> None:
    torch.manual_seed(0)
    target = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            num_hidden_layers=5,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            intermediate_size=32,
            max_position_embeddings=512,
            rope_parameters=ROPE,
        )
    )
    layers = {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "intermediate_size": 32,
        # the target's, which is exported; with transformers 5 it trains with 10000 by itself
        "rope_parameters": ROPE,
    }
    config = {
        "dflash_block_size": BLOCK,
        "dflash_mask_token_id": VOCAB - 1,
        "dflash_architecture_config": layers,
        "dflash_draft_attention": attention,
        "dflash_swa_window_size": window,
        "dflash_attention_sink": sinks,
        "dflash_use_torch_compile": False,
    }
    mtsp.convert(target, [("dflash", config)])
    model = target.eval().dflash_module
    for tensor in target.parameters():
        noise = torch.randn(tensor.shape)
        drawn = 1 + 0.2 * noise if tensor.ndim == 1 else 2 * noise / tensor.shape[1] ** 0.5
        tensor.copy_(drawn.bfloat16().float())  # so that bfloat16 holds them exactly
    DFlashExporter(target).export(name, dtype=torch.bfloat16)
    # it passes an argument that newer transformers do not know
    model.rotary_emb = Qwen3RotaryEmbedding(model._rotary_config)
    text, features = torch.randint(VOCAB - 1, (40,)), torch.randn(1, 40, 2 * HIDDEN)
    logits = []
    for start in STARTS:
        block = torch.full((1, BLOCK), VOCAB - 1)
        block[0, 0] = text[start]
        states = model(
            target.model.embed_tokens(block),
            features[:, :start],
            torch.arange(start + BLOCK)[None],
            target._build_generate_swa_mask(start, 1, torch.float32, "cpu"),
        )
        logits.append(target.lm_head(states)[0].numpy())
    np.savez_compressed(
        Path(name) / "expected.npz",
        text=text.numpy(),
        features=features[0].numpy(),
        embedding=target.model.embed_tokens.weight.numpy(),
        head=target.lm_head.weight.numpy(),
        starts=np.array(STARTS),
        logits=np.stack(logits),
    )


write("modelopt-bidirectional", "bidirectional", window=9)
write("modelopt-causal", "causal", window=16)
write("modelopt-sinks", "bidirectional", window=None, sinks=True)
