"""The model that comes with the package: small, real in shape, and it writes verse."""

from __future__ import annotations

import json
import re
import statistics

import pytest
import torch
import transformers
from safetensors import safe_open

from support.batch import PagedRun
from support.table import WrappedTable
from tvr import LLM, SamplingParams, demo
from tvr.core.config import ModelConfig
from tvr.core.llama import LlamaForCausalLM
from tvr.core.weights import load_weights

PATH = demo.path()
SPEAKER = re.compile(r"[A-Z][A-Z ,.'-]*:")
DIRECTION = re.compile(r"\[[^\[\]]+\]")
SONNET = """\
Shall I compare thee to a summer's day?
Thou art more lovely and more temperate:
Rough winds do shake the darling buds of May,
And summer's lease hath all too short a date:
"""


@pytest.fixture(scope="module")
def llm():
    with LLM(PATH) as engine:
        yield engine


def test_it_is_complete_and_weighs_less_than_8_megabytes():
    files = {file.name for file in PATH.iterdir() if file.suffix != ".py" and file.is_file()}
    assert files == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert (PATH / "model.safetensors").stat().st_size <= 8_000_000


def test_its_shape_has_what_larger_llamas_have():
    config = json.loads((PATH / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["head_dim"] == 64
    assert 1 < config["num_key_value_heads"] < config["num_attention_heads"]
    assert config["rope_scaling"]["rope_type"] == "llama3"
    assert config["tie_word_embeddings"]
    with safe_open(PATH / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert "lm_head.weight" not in tensors
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert 3_000_000 < sum(tensor.numel() for tensor in tensors.values()) < 4_000_000


def test_every_text_begins_with_the_begin_token_and_comes_back(llm):
    ids = llm.tokenizer.encode(SONNET)
    assert ids[0] == llm.tokenizer.special_token_id("<|begin_of_text|>") == 0
    assert llm.tokenizer.decode(ids) == SONNET
    assert ids == transformers.AutoTokenizer.from_pretrained(PATH)(SONNET).input_ids


def test_logits_over_its_whole_context_equal_transformers(llm):
    """Past position 256, the original context, the llama3 scaling tells."""
    ids = llm.tokenizer.encode(SONNET * 20)[:1024]
    assert len(ids) == 1024
    reference = transformers.AutoModelForCausalLM.from_pretrained(PATH, dtype=torch.float32)
    config = ModelConfig.from_dir(PATH)
    weights = load_weights(PATH, config, dtype="float32", device="cpu")
    model = LlamaForCausalLM(config, weights, WrappedTable(), block_size=16, max_position=1024)
    found = PagedRun(model).step(prefill={0: ids})[0]
    with torch.inference_mode():
        expected = reference(torch.tensor([ids])).logits[0]
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_it_knows_english_verse_from_shuffled_words(llm):
    """The held-out loss is 3.2 nats per token; 7.6 would be guessing."""
    reference = transformers.AutoModelForCausalLM.from_pretrained(PATH, dtype=torch.float32)

    def loss(text: str) -> float:
        ids = torch.tensor([llm.tokenizer.encode(text)])
        with torch.inference_mode():
            return float(reference(ids, labels=ids).loss)

    scene = (
        "HOST:\nGood morrow, sir. What news abroad to-day?\n\nGUEST:\nNone that is good, my lord."
    )
    words = scene.split()
    assert loss(scene) < 4 < loss(" ".join(sorted(words))) - 1


def test_samples_read_as_verse_with_speakers(llm):
    params = SamplingParams(n=8, temperature=0.8, top_p=0.95, seed=0, max_tokens=300)
    answers = llm.generate("ROMEO:", params)[0].outputs
    paragraphs, lines, speakers = [], [], set()
    for answer in answers:
        whole = ("ROMEO:" + answer.text).split("\n\n")[:-1]  # the last one may be cut off
        for paragraph in whole:
            first, *rest = paragraph.split("\n")
            speech = bool(SPEAKER.fullmatch(first) and rest)
            paragraphs.append(speech or DIRECTION.fullmatch(paragraph) is not None)
            if speech:
                lines += rest
                speakers.add(first)
    assert len(paragraphs) >= 30
    assert sum(paragraphs) / len(paragraphs) > 0.95
    assert len(speakers) >= 3
    assert 20 <= statistics.median(map(len, lines)) <= 60
    assert max(map(len, lines)) < 100
    assert sum(line[0].isupper() for line in lines if line) / len(lines) > 0.7


def test_equal_seeds_give_equal_verse(llm):
    params = SamplingParams(temperature=0.8, seed=7, max_tokens=40)
    first, second = (llm.generate("JULIET:", params)[0].outputs[0].text for _ in range(2))
    assert first == second
