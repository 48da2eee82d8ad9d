"""Long answers are encoded in pieces, between which other threads have their turn."""

from __future__ import annotations

import json

import pytest

from support.servers import MODEL, events_of, serving
from tvr import demo
from tvr.serve import json_answer
from tvr.serve.json_answer import encode_long

_compact = json.JSONEncoder(separators=(",", ":")).encode


@pytest.fixture
def longest(monkeypatch):
    """Lengths of what single calls of the encoder have given."""
    lengths: list[int] = []
    encode = json_answer.json_text

    def watched(content: object) -> str:
        text = encode(content)
        lengths.append(len(text))
        return text

    monkeypatch.setattr(json_answer, "json_text", watched)
    return lengths


@pytest.mark.parametrize("num", [0, 1, 64, 65, 128, 1000])
def test_pieces_are_the_whole(num):
    top = [{"ä\n": -0.5, "b": None}] * num
    for content in (top, {"x": {"top": top}, "é": [{"y": top, "z": list(range(num))}]}, "x", None):
        assert encode_long(content) == _compact(content)


def test_no_call_of_the_encoder_takes_long(longest):
    """One took 0.75 s for an answer of 32,768 tokens, and nobody was answered meanwhile."""
    token = {"token": "abc", "logprob": -1.5, "bytes": [1, 2, 3]}
    content = [{**token, "top_logprobs": [token] * 20} for _ in range(3000)]
    choice = {"index": 0, "logprobs": {"content": content, "refusal": None}}
    assert encode_long(choice) == _compact(choice)
    assert max(longest) < 100_000 < sum(longest)


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
def test_log_probabilities_of_prompts_are_encoded_in_pieces(longest, streams):
    body = {"model": MODEL, "prompt": [[7] * 900], "max_tokens": 1, "logprobs": 20, "echo": True}
    with serving(demo.path()) as running:
        answer = running.post("/v1/completions", {**body, "stream": streams}).body
    said = events_of(answer)[0] if streams else json.loads(answer)
    assert len(said["choices"][0]["logprobs"]["tokens"]) == 901
    assert max(longest) < len(answer) / 8
