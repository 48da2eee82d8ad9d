"""A GGUF file serves like the directory it was written from: logits, tokens, text, command line."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from support.batch import PagedRun
from support.checkpoints import PROMPT_LEN, SHAPES, build_model, random_prompt, save_checkpoint
from support.engines import engine, greedy, prompts_of, save_shape, save_text_model, tokens_of
from support.gguf_files import byte_level_metadata, decoded, write_gguf
from support.small_tokenizers import LLAMA3_SPECIAL, LLAMA3_TEMPLATE, byte_level
from support.table import WrappedTable
from tvr import LLM
from tvr.core.checkpoint_source import HuggingFaceCheckpoint, open_checkpoint
from tvr.core.gguf.checkpoint import GGUFCheckpoint
from tvr.core.llama import LlamaForCausalLM
from tvr.errors import CheckpointError, ConfigError

#: Largest difference of fp32 logits, in units of the largest logit.
LIMIT = 1e-5

PROMPT = "The cat sat on"


def logits_of(path: Path, ids: list[int], **edits: object) -> torch.Tensor:
    """Return the logits [len(ids), vocab] that the file at `path` gives, half in decodes."""
    checkpoint = open_checkpoint(path)
    model = LlamaForCausalLM(
        replace(checkpoint.config, **edits),
        checkpoint.load_weights(dtype="float32", device="cpu"),
        WrappedTable(),
        block_size=16,
        max_position=256,
    )
    run, half = PagedRun(model), len(ids) // 2
    parts = [run.step(prefill={0: ids[:half]})[0]]
    return torch.cat(parts + [run.step(decode={0: token})[0] for token in ids[half:]])


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference in units of the largest expected logit."""
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_equal_transformers_of_the_directory(tmp_path, shape):
    reference = build_model(SHAPES[shape])
    source = save_checkpoint(reference, SHAPES[shape], tmp_path / "hf")
    path = write_gguf(tmp_path / "x.gguf", source)
    ids = random_prompt(PROMPT_LEN, seed=1)
    with torch.inference_mode():
        expected = reference(torch.tensor([ids])).logits[0]
    assert distance(logits_of(path, ids), expected) <= LIMIT
    if "llama3" in shape:  # a file's divisors that are not applied show
        assert distance(logits_of(path, ids, rope_scaling=None), expected) > 100 * LIMIT


@pytest.mark.parametrize("format", ["Q8_0", "Q4_0"])
def test_logits_of_quantised_files_equal_transformers_with_the_dequantised_weights(
    tmp_path, format
):
    shape = SHAPES["llama3_old_form"]
    reference = build_model(shape)
    source = save_checkpoint(reference, shape, tmp_path / "hf")
    path = write_gguf(tmp_path / "x.gguf", source, format=format)
    ids = random_prompt(PROMPT_LEN, seed=2)
    with torch.inference_mode():
        whole = reference(torch.tensor([ids])).logits[0]
        for parameter in reference.parameters():
            if parameter.dim() == 2:
                parameter.copy_(decoded(parameter, format))
        expected = reference(torch.tensor([ids])).logits[0]
    assert distance(logits_of(path, ids), expected) <= LIMIT
    assert distance(whole, expected) > 100 * LIMIT


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Return a directory and a GGUF file of one model with a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("pair")
    directory = save_text_model(folder / "hf")
    backend = byte_level(LLAMA3_SPECIAL)
    names = {"bos": "<|begin_of_text|>", "eos": "<|eot_id|>"}
    ids = {f"{name}_token_id": backend.token_to_id(text) for name, text in names.items()}
    metadata = byte_level_metadata(backend, "gpt-2", add_bos_token=True, **ids)
    # The model has more ids than the tokenizer; a converter fills up with unused tokens.
    fill = 512 - len(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.tokens"] += [f"[PAD{i}]" for i in range(fill)]
    metadata["tokenizer.ggml.token_type"] += [5] * fill
    metadata["tokenizer.chat_template"] = LLAMA3_TEMPLATE
    return directory, write_gguf(folder / "model.gguf", directory, metadata=metadata)


def test_an_engine_gives_the_texts_and_tokens_of_the_directory(pair):
    outputs = []
    for path in pair:
        with engine(path, dtype="float32") as llm:
            prompts = [PROMPT, "", *prompts_of([1, 17, 40])]
            (chat,) = llm.chat([{"role": "user", "content": "hello"}], greedy(8))
            outputs.append([*llm.generate(prompts, greedy(12)), chat])
            assert llm.tokenizer.has_chat_template
    theirs, ours = outputs
    assert tokens_of(ours) == tokens_of(theirs)
    assert [o.outputs[0].text for o in ours] == [o.outputs[0].text for o in theirs]
    assert [o.prompt_token_ids for o in ours] == [o.prompt_token_ids for o in theirs]


def test_a_file_without_a_tokenizer_serves_token_ids(tmp_path):
    source = save_shape(tmp_path / "hf")
    prompts = prompts_of([3, 20])
    tokens = []
    for path in (source, write_gguf(tmp_path / "x.gguf", source)):
        with engine(path) as llm:
            tokens.append(tokens_of(llm.generate(prompts, greedy(8))))
    assert tokens[0] == tokens[1]


def test_dummy_weights_need_only_the_header(pair):
    with engine(pair[1], load_format="dummy") as llm:
        assert len(tokens_of(llm.generate([PROMPT], greedy(4)))[0]) == 4


def test_path_and_load_format_choose_what_is_read(tmp_path, pair):
    directory, file = pair
    assert isinstance(open_checkpoint(directory), HuggingFaceCheckpoint)
    assert isinstance(open_checkpoint(str(file)), GGUFCheckpoint)
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "only.gguf").symlink_to(file)
    assert isinstance(open_checkpoint(alone), GGUFCheckpoint)
    assert isinstance(open_checkpoint(alone, "gguf"), GGUFCheckpoint)
    # Beside a config.json the format decides; a file without the suffix must be named one.
    both = tmp_path / "both"
    both.mkdir()
    for found in (*directory.iterdir(), file):
        (both / found.name).symlink_to(found)
    assert isinstance(open_checkpoint(both), HuggingFaceCheckpoint)
    assert isinstance(open_checkpoint(both, "safetensors"), HuggingFaceCheckpoint)
    assert isinstance(open_checkpoint(both, "gguf"), GGUFCheckpoint)
    (tmp_path / "blob").symlink_to(file)
    assert isinstance(open_checkpoint(tmp_path / "blob", "gguf"), GGUFCheckpoint)


def test_what_cannot_be_chosen_is_refused_with_what_is_there(tmp_path, pair):
    directory, file = pair
    several = tmp_path / "several"
    several.mkdir()
    for name in ("a.gguf", "b.gguf"):
        (several / name).symlink_to(file)
    with pytest.raises(CheckpointError, match=r"2 GGUF files \(a.gguf, b.gguf\); name one"):
        open_checkpoint(several)
    with pytest.raises(CheckpointError, match=r"has no \.gguf file"):
        open_checkpoint(directory, "gguf")
    with pytest.raises(ConfigError, match="is a GGUF file; load_format 'safetensors'"):
        open_checkpoint(file, "safetensors")
    with pytest.raises(CheckpointError, match=r"or a \.gguf file"):
        open_checkpoint(tmp_path / "missing")
    with pytest.raises(CheckpointError, match=r"missing\.gguf"):
        LLM(tmp_path / "missing.gguf")
    (several / "config.json").write_text((directory / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"to load a.gguf, b.gguf, give that file's path"):
        open_checkpoint(several).load_weights(dtype="float32", device="cpu")


def tvr(*args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tvr", *map(str, args)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_tvr_run_answers_from_a_file_as_from_the_directory(pair):
    answers = [tvr("run", "hello", "--model", path, "--max-tokens", 12) for path in pair]
    assert [a.returncode for a in answers] == [0, 0], answers
    assert answers[0].stdout == answers[1].stdout


def test_tvr_run_refuses_a_damaged_file_in_one_line(tmp_path, pair):
    damaged = tmp_path / "model.gguf"
    damaged.write_bytes(pair[1].read_bytes()[:-20_000])
    done = tvr("run", "hello", "--model", damaged)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"tvr: error: {damaged} is truncated: tensor ")


def test_tvr_run_refuses_a_file_without_a_tokenizer(tmp_path):
    path = write_gguf(tmp_path / "x.gguf", save_shape(tmp_path / "hf"))
    done = tvr("run", "hello", "--model", path)
    assert done.returncode == 2
    assert "x.gguf has no tokenizer" in done.stderr
