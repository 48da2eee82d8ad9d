"""The tool that trains the demo model makes what is shipped."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from tvr import LLM, SamplingParams, demo

TOOLS = Path(__file__).parents[2] / "tools"
SCENE = "ANNA:\nGood morrow to you all, good morrow.\n\nBOB:\nGood night, and well, my lady Anna."


@pytest.fixture
def train_demo(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    import train_demo

    return train_demo


def test_the_shipped_config_is_the_tools(train_demo):
    assert json.loads((demo.path() / "config.json").read_text()) == train_demo.CONFIG


def test_the_prompt_ends_in_the_token_that_stands_before_a_speech(train_demo):
    """A tokenizer that joins ":" and the line's end would never have seen a bare prompt."""
    tokenizer = train_demo.Tokenizer.from_file(str(demo.path() / "tokenizer.json"))
    prompt = tokenizer.encode("ROMEO:").ids
    text = train_demo.Text(["ROMEO:\nBut, soft!\n\nJULIET:\nAy me!"], tokenizer)
    assert text.stream[: len(prompt)].tolist() == prompt
    whole = tokenizer.encode("ROMEO:\nBut, soft!\n\nJULIET:\nAy me!").ids
    assert text.stream.tolist() == [*whole, tokenizer.token_to_id("<|end_of_text|>")]
    assert [tokenizer.decode([text.stream[i]])[0] for i in text.starts] == ["R", "J"]


def test_a_folder_that_cannot_be_is_refused_before_the_training(
    train_demo, monkeypatch, capsys, tmp_path
):
    monkeypatch.setattr(train_demo, "read_works", lambda _: pytest.fail("it went on"))
    (tmp_path / "file").write_text("")
    assert train_demo.main(["--out", str(tmp_path / "file" / "model")]) == 1
    assert re.fullmatch(r"train_demo: .*file/model'\n", capsys.readouterr().err)


def test_a_few_steps_on_a_small_text_write_a_model_that_loads(train_demo, monkeypatch, tmp_path):
    monkeypatch.setattr(train_demo, "CONTEXT", 32)
    small = {**train_demo.CONFIG, "num_hidden_layers": 1, "vocab_size": 280}
    monkeypatch.setattr(train_demo, "CONFIG", small)
    monkeypatch.setattr(train_demo, "read_works", lambda _: {"play": [SCENE] * 40})
    recipe = train_demo.Recipe(epochs=2, batch=4, warmup_steps=2)
    train_demo.make(recipe, None, torch.device("cpu"), tmp_path)
    with LLM(tmp_path) as llm:
        output = llm.generate("ANNA:", SamplingParams(temperature=0, max_tokens=8))[0]
    assert len(output.outputs[0].token_ids) == 8
