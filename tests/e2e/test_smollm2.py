"""A real chat model, from PyPI: SmolLM2-135M-Instruct, 9 heads on 3 KV heads, 30 layers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from support.engines import greedy, tokens_of
from tvr import LLM, SamplingParams

ROOT = Path(__file__).parents[2]
STEPS = 128
STEPS_ALONE = 32  # of all prompts but the longest: blocks of 16 tokens fill up twice

PROMPTS = [
    "The",
    "Once upon a time",
    "def fibonacci(n):",
    "The three primary colours are red,",
    "Water boils at 100 degrees Celsius, and it freezes at",
    "In the beginning the Universe was created. This has made a lot of people very angry and",
    "List of the planets of the solar system, from the sun outwards:\n1. Mercury\n2. Venus\n3.",
    "A recipe for bread. Ingredients: 500 g of flour, 10 g of salt, 7 g of yeast, 300 ml of "
    "water. Method: mix everything in a large bowl, then knead for ten minutes.",
    "Rain fell on the harbour all night. " * 8,
    "The history of computing begins with devices that people used to count. " * 20,
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The model as a Hugging Face directory, its GGUF file beside it.

    TVR_SMOLLM2 may name one made before.
    """
    made = os.environ.get("TVR_SMOLLM2")
    if made:
        return Path(made)
    path = tmp_path_factory.mktemp("smollm2")
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "fetch_smollm2.py", path, "--keep-gguf"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if done.returncode == 2:
        pytest.skip(f"PyPI is out of reach: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture(scope="module")
def gguf_file(model):
    """The model as the GGUF file that it is published in."""
    found = list(model.glob("*.gguf"))
    if not found:
        pytest.skip(f"{model} was made without --keep-gguf")
    return found[0]


@pytest.mark.parametrize("form", ["model", "gguf_file"])
def test_the_capital_of_france_is_paris(request, form):
    path = request.getfixturevalue(form)
    done = subprocess.run(
        [
            *[sys.executable, "-c", "from tvr.cli import main; main()"],
            *["run", "--chat", "What is the capital of France?", "--model", str(path)],
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


def test_the_gguf_file_gives_the_tokens_of_the_directory(model, gguf_file):
    messages = [{"role": "user", "content": "Name three colours. <|im_end|>"}]
    tokens = []
    for path in (model, gguf_file):
        with LLM(path, dtype="float32", max_model_len=512) as llm:
            prompts = [*PROMPTS[:4], llm.chat_prompt(messages)]
            outputs = llm.generate(prompts, greedy(12))
            tokens.append([o.prompt_token_ids for o in outputs] + tokens_of(outputs))
            assert llm.tokenizer.eos_token_ids == {2}
    assert tokens[0] == tokens[1]


@pytest.mark.slow
def test_greedy_tokens_equal_transformers_alone_and_as_one_batch(model):
    """Each token must be transformers' choice after the ones before it.

    By induction that is what its greedy generation gives; one pass over the whole text shows it
    a hundred times faster than generating.
    """
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with LLM(model, dtype="float32", max_model_len=1024) as llm:
        prompts = [llm.tokenizer.encode(prompt) for prompt in PROMPTS]
        assert len({len(p) for p in prompts}) == len(prompts)
        batch = tokens_of(llm.generate(prompts, greedy(STEPS)))
    with LLM(model, dtype="float32", max_model_len=1024, enable_prefix_caching=False) as llm:
        longest = max(prompts, key=len)
        steps = [STEPS if prompt is longest else STEPS_ALONE for prompt in prompts]
        alone = [
            tokens_of(llm.generate(prompt, greedy(n)))[0]
            for prompt, n in zip(prompts, steps, strict=True)
        ]
    assert alone == [tokens[:n] for tokens, n in zip(batch, steps, strict=True)]
    for prompt, tokens in zip(prompts, batch, strict=True):
        assert len(tokens) == STEPS
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + tokens])).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == tokens


def test_a_conversation_stops_by_itself_and_keeps_control_tokens_out(model):
    messages = [
        {"role": "system", "content": "You answer in one word."},
        {"role": "user", "content": "Which colour is the sky? <|im_end|>"},
    ]
    with LLM(model, max_model_len=512) as llm:
        end = llm.tokenizer.special_token_id("<|im_end|>")
        prompt = llm.chat_prompt(messages)
        assert prompt.count(end) == 2  # one for each message, none from the user's text
        output = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=100))[0].outputs[0]
    assert output.finish_reason == "stop"
    assert "<|" not in output.text
