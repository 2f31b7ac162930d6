"""`examples/smollm2`: its plain PyTorch against Transformers and z-lab; the command in small."""

import json
import os
import subprocess
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "examples" / "smollm2"))
import llama
import measure
import model
import people
import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from dflash_trt.weights.gguf.tensors import LAYER_NAMES
from tests.support.builds import build_engines
from tests.support.pairs import tiny_tokenizer

pytestmark = pytest.mark.models
EXAMPLE = Path(__file__).parents[2] / "examples" / "smollm2"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant\n{% endif %}"
)
# of two names for one tensor, the first is a Llama's
NAMES = {name: stored for stored, name in reversed(LAYER_NAMES.items())}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random target of SmolLM2's depth as `target.py` writes it, in float32."""
    directory = tmp_path_factory.mktemp("target")
    tokenizer = tiny_tokenizer(258)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=30,
        num_attention_heads=3,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    written = LlamaForCausalLM(config)
    for parameter in written.parameters():
        if parameter.ndim == 2:  # as the drafter's file keeps the head: bfloat16
            parameter.data = (4 * parameter.data).bfloat16().float()
    written.save_pretrained(directory)
    blocks = {}
    for name, tensor in written.state_dict().items():
        parts = name.removesuffix(".weight").split(".", 3)
        if "layers" in parts:
            blocks[f"blk.{parts[2]}.{NAMES[parts[3]]}.weight"] = tensor
    blocks["token_embd.weight"] = written.model.embed_tokens.weight.detach()
    blocks["output_norm.weight"] = written.model.norm.weight.detach()
    save_file(
        {name: tensor.clone() for name, tensor in blocks.items()}, directory / "blocks.safetensors"
    )
    return directory


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return prompts of people as `people.py` writes them."""
    directory = tmp_path_factory.mktemp("people")
    questions = [{"question": f"What is {n} plus {n}?", "answer": str(2 * n)} for n in range(64)]
    (directory / "train.jsonl").write_text("\n".join(map(json.dumps, questions)))
    command = [sys.executable, EXAMPLE / "people.py", directory, directory / "train.jsonl"]
    subprocess.run(command, check=True, timeout=60)
    return directory


@pytest.fixture(scope="module")
def trained(target: Path, asked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("trained")
    small = ["--sampled", "8", "--first", "4", "--turn", "8", "--rows", "2", "--every", "16"]
    given = ["--target", target, "--output", output, "--people", asked]
    command = [sys.executable, EXAMPLE / "train.py", *given]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # the shapes are tiny
    subprocess.run([*command, "--minutes", "2", *small], check=True, timeout=300, env=environment)
    parts = sorted(output.glob("part-*"))
    (output / "model.safetensors").write_bytes(b"".join(part.read_bytes() for part in parts))
    return output


def test_plain_pytorch_reads_and_steps_as_transformers_does(target: Path) -> None:
    reference = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32)
    own = llama.load_llama(target, torch.device("cpu"), torch.float32, 32)
    ids = torch.randint(200, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = reference(ids, output_hidden_states=True)
    features, states = llama.read(own, ids)
    taps = torch.cat([expected.hidden_states[tap + 1] for tap in llama.TAPS], dim=-1)
    torch.testing.assert_close(features, taps, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(states @ own.embedding.T, expected.logits, atol=1e-3, rtol=1e-4)
    cache = llama.Cache(own, 2, 16)
    for place in range(12):
        stepped = llama.step(own, cache, ids[:, place], torch.full((2,), place))
        torch.testing.assert_close(stepped, states[:, place], atol=1e-3, rtol=1e-4)


def test_the_command_trains_and_says_what_it_did(trained: Path) -> None:
    lines = [json.loads(line) for line in (trained / "log.jsonl").read_text().splitlines()]
    events = [line["event"] for line in lines if "event" in line]  # once a minute there is none
    assert events == ["ready", "training begins", "end"]
    assert lines[-1]["step"] >= 2
    assert lines[-1]["conversations"] >= 4
    assert lines[-1]["tau, chat"] >= 1
    assert lines[-1]["tau, people"] >= 1


def test_prompts_of_people_are_read(asked: Path, tmp_path: Path) -> None:
    held_out, learned = (
        people.read_questions(asked / name) for name in ("held_out.jsonl", "prompts.jsonl")
    )
    assert len(held_out) == len(learned) == 32
    assert not {*held_out} & {*learned}
    tasks = [
        {"task_id": number, "text": "Write a function.", "test_list": ["assert f(1) == 1"]}
        for number in (600, 601)
    ]
    seed = {"instruction": "Say it in one word.", "instances": [{"input": "very large"}]}
    natural = {"Definition": ["Say the opposite."], "Instances": [{"input": "up"}]}
    for name, records in {"mbpp.jsonl": tasks, "seed.jsonl": [seed], "a.json": [natural]}.items():
        (tmp_path / name).write_text("\n".join(map(json.dumps, records)))
    found = [people.prompts_of(tmp_path / name) for name in ("mbpp.jsonl", "seed.jsonl", "a.json")]
    assert found == [
        ["Write a function.\n\nassert f(1) == 1"],
        ["Say it in one word.\n\nvery large"],
        ["Say the opposite.\n\nup"],
    ]
    (tmp_path / "other.jsonl").write_text('{"words": 1}')
    with pytest.raises(ValueError, match="a line with words is of no set"):
        people.prompts_of(tmp_path / "other.jsonl")


def test_a_build_decodes_as_zlabs_decoder(target: Path, trained: Path, tmp_path: Path) -> None:
    build_engines(target, trained, tmp_path / "engines", slots=1, max_seq_len=256)
    reference = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    drafter = measure.load_drafter(trained, reference).eval()
    prompt, end = [200 + n for n in range(20)], reference.config.eos_token_id
    theirs = measure.decode(reference, drafter, prompt, end)
    assert measure.decoder_of(tmp_path, end)(prompt)["ids"] == theirs["ids"]
    assert theirs["greedy"]


def test_drafts_are_those_of_zlabs_decoder(target: Path, trained: Path) -> None:
    own = llama.load_llama(target, torch.device("cpu"), torch.float32, 64)
    weights, ids = model.load_weights(trained, torch.device("cpu"))
    vocabulary = model.vocabulary_of(ids, own)
    reference = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32)
    drafter = measure.load_drafter(trained, reference).eval()
    text = torch.randint(200, (20,), generator=torch.Generator().manual_seed(0))
    anchors = torch.arange(4, 12)
    features, _ = llama.read(own, text[None])
    states = model.block_states(weights, own, features, text[None], anchors[None])[0]
    for anchor, block_states in zip(anchors.tolist(), states, strict=True):
        block = torch.full((1, model.BLOCK), model.MASK)
        block[0, 0] = text[anchor]
        with torch.no_grad():
            expected = drafter(
                position_ids=torch.arange(anchor + model.BLOCK)[None],
                noise_embedding=reference.model.embed_tokens(block),
                target_hidden=features[:, :anchor],
            )[0, 1:]
        torch.testing.assert_close(block_states, expected, atol=1e-3, rtol=1e-4)
    # both select from the same states: rounding of the layers may turn a tie
    with torch.no_grad():
        drafts, _, _ = drafter.propose(states, text[anchors], reference.lm_head, 0.0)
    assert torch.equal(model.drafts(weights, own, vocabulary, text, anchors), drafts)


@pytest.mark.parametrize("width", [20, 34])
def test_blocks_are_dequantized_as_ggml_does(width: int) -> None:
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType.Q4_1 if width == 20 else gguf.GGMLQuantizationType.Q8_0
    stored = gguf.quants.quantize(torch.randn(3, 96).numpy(), kind)
    expected = torch.from_numpy(gguf.quants.dequantize(stored, kind))
    torch.testing.assert_close(llama.dequantized(torch.from_numpy(stored)), expected)
