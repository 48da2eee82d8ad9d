"""`tvr run --input`: a file of prompts in, a file of results out, in order and resumable."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from support.cli import refused_here, run_here
from support.engines import save_shape, save_text_model
from tvr import LLM, SamplingParams
from tvr.cli import batch
from tvr.cli.batch_output import Results

WORDS = ["the", "a", "dog", "cat", "sea", "sky", "runs", "falls", "and", "slow", "red", "old"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_text_model(tmp_path_factory.mktemp("text"))


def jsonl(path, *lines):
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
    return path


def records(text):
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def many(tmp_path):
    """Forty prompts; each may be longer than those before it, so results trickle in."""
    return jsonl(
        tmp_path / "many.jsonl",
        *({"prompt": f"{WORDS[i % 12]} {i}", "max_tokens": 1 + 4 * i, "id": i} for i in range(40)),
    )


def test_results_are_those_of_each_line_alone_and_in_order(model, tmp_path):
    lines = [
        {"prompt": "a dog", "max_tokens": 9},
        {"prompt_token_ids": [5, 6, 7], "max_tokens": 3, "temperature": 1.0, "seed": 3},
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "id": "greeting"},
        {"prompt": "two", "n": 2, "temperature": 0.9, "max_tokens": 2, "id": 7},
    ]
    done = run_here(
        *["run", "--input", jsonl(tmp_path / "in.jsonl", *lines)],
        *["--model", model, "--json", "--no-chat", "--max-tokens", 30],
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = records(done.stdout)
    assert [r["line"] for r in found] == [1, 2, 3, 4]
    assert [r.get("id") for r in found] == [None, None, "greeting", 7]
    with LLM(model) as llm:
        prompts = ["a dog", [5, 6, 7], llm.chat_prompt(lines[2]["messages"]), "two"]
        for line, prompt, record in zip(lines, prompts, found, strict=True):
            keys = {k: line[k] for k in ("n", "max_tokens", "temperature", "seed") if k in line}
            params = SamplingParams(**{"temperature": 0.0, "seed": 0, **keys})
            expected = llm.generate(prompt, params)[0]
            assert [o["text"] for o in record["outputs"]] == [o.text for o in expected.outputs]
            assert [o["token_ids"] for o in record["outputs"]] == [
                o.token_ids for o in expected.outputs
            ]
            assert record["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)


BAD = {
    "{bad": "not JSON",
    "[1]": "JSON list",
    "{}": "none of them",
    '{"prompt": "a", "messages": []}': "prompt and messages",
    '{"prompt": 5}': "int",
    '{"messages": "hi"}': "messages must be",
    '{"prompt_token_ids": [999999]}': "999999",
    '{"prompt_token_ids": []}': "no token ids",
    '{"prompt": "a", "max_tokens": 0}': "max_tokens",
    '{"prompt": "a", "temprature": 1}': "temprature",
    '{"prompt": "a", "temperature": NaN}': "temperature",
    '{"prompt": "a", "temperature": 1' + "0" * 400 + "}": "temperature",
    '{"prompt": "a", "id": [1]}': "id is",
    '{"prompt": "\\ud800"}': "not JSON",
    '{"prompt": "' + "word " * 400 + '"}': "256",
}


def test_a_bad_line_gets_an_error_in_its_place_and_the_others_go_on(model, tmp_path):
    lines = [line for bad in BAD for line in (bad, '{"prompt": "a", "max_tokens": 2}')]
    file = jsonl(tmp_path / "in.jsonl", *lines)
    with file.open("ab") as f:
        f.write(b'{"prompt": "\xff"}\n')
    done = run_here("run", "--input", file, "--json", "--model", model, "--no-chat")
    assert done.returncode == 1
    assert (
        done.stderr == f'tvr: {len(BAD) + 1} of {len(lines) + 1} lines failed; see their "error"\n'
    )
    found = records(done.stdout)
    for message, bad, good in zip(BAD.values(), found[:-1:2], found[1::2], strict=True):
        assert message in bad["error"]
        assert "outputs" not in bad
        assert len(good["outputs"][0]["token_ids"]) == 2
    assert "UTF-8" in found[-1]["error"]


def test_a_failed_line_keeps_its_id(model, tmp_path):
    lines = ({"id": 7, "prompt": "a", "top_p": 5}, {"prompt": "word " * 400, "id": "long"})
    done = run_here(
        *["run", "--input", jsonl(tmp_path / "in.jsonl", *lines), "--json", "--no-chat"],
        *["--model", model],
    )
    assert [(r["id"], "error" in r) for r in records(done.stdout)] == [(7, True), ("long", True)]


def test_every_kind_of_parameter_can_be_said_in_json(model, tmp_path):
    fields = {"logit_bias": {"40": 100}, "allowed_token_ids": [40, 41], "bad_words": ["x"]}
    line = {"prompt": "a", "max_tokens": 3, **fields}
    done = run_here(
        "run", "--input", jsonl(tmp_path / "in.jsonl", line), "--json", "--model", model
    )
    assert records(done.stdout)[0]["outputs"][0]["token_ids"] == [40, 40, 40]


def test_a_system_message_without_a_chat_is_refused(model, tmp_path):
    file = jsonl(tmp_path / "in.jsonl", {"prompt": "a"})
    args = ["run", "--input", file, "--json", "--model", model, "--no-chat", "--system", "Hi"]
    assert "--system needs a chat" in refused_here(*args)


def test_prompts_a_line_give_texts_a_line(model, tmp_path):
    file = tmp_path / "in.txt"
    file.write_bytes(b"\xef\xbb\xbfa dog\r\n\n  \nthe sea\nthe end")
    args = ["--model", model, "--max-tokens", 12, "--temperature", 1]
    done = run_here("run", "--input", file, *args)
    assert (done.returncode, done.stderr) == (0, "")
    by_stdin = run_here("run", "--input", "-", *args, stdin=file.read_bytes())
    assert by_stdin.stdout == done.stdout
    unescaped = [json.loads(f'"{escape(line)}"') for line in done.stdout.splitlines()]
    as_json = records(run_here("run", "--input", file, "--json", *args).stdout)
    assert [r["line"] for r in as_json] == [1, 4, 5]
    assert [r["outputs"][0]["text"] for r in as_json] == unescaped
    for prompt, text in zip(("a dog", "the sea", "the end"), unescaped, strict=True):
        assert run_here("run", prompt, *args).stdout == text + "\n"


def escape(line: str) -> str:
    """Make a JSON string's inside of a text line, whose own escapes are JSON's too."""
    return json.dumps(line)[1:-1].replace("\\\\", "\\")


def test_a_prompt_with_json_gives_one_object(model):
    done = run_here("run", "a\ndog", "--json", "--model", model, "--max-tokens", 4)
    (record,) = records(done.stdout)
    assert len(record["outputs"][0]["token_ids"]) == 4


def answers(data):
    """The results without what depends on how they were computed: prefix hits."""
    found = records(data.decode())
    for record in found:
        del record["usage"]["cached_tokens"]
    return found


def test_wherever_a_run_ends_the_next_completes_the_same_file(model, many, tmp_path, monkeypatch):
    args = ["run", "--input", many, "--model", model, "--json", "--output"]
    whole, part = tmp_path / "whole.jsonl", tmp_path / "part.jsonl"
    assert run_here(*args, whole).returncode == 0
    data = whole.read_bytes()
    starts = [0, *(i + 1 for i, byte in enumerate(data) if byte == ord("\n"))]
    for size in (0, 3, starts[1] - 1, starts[1], starts[20] + 30, starts[40] - 1):
        part.write_bytes(data[:size])
        done = run_here(*args, part)
        assert done.returncode == 0, done
        assert answers(part.read_bytes()) == answers(data)
    monkeypatch.setattr(batch, "_in_order", None)  # nothing is run, or loaded, for a whole file
    done = run_here(*args, part)
    assert done.returncode == 0
    assert "40 of 40 results" in done.stderr


def test_an_interrupt_keeps_what_is_done_and_says_how_to_go_on(model, many, tmp_path, monkeypatch):
    output = tmp_path / "out.jsonl"
    args = ["run", "--input", many, "--model", model, "--json", "--output", output]
    write = Results.write

    def interrupted(self, record):
        if record["line"] == 8:
            raise KeyboardInterrupt
        write(self, record)

    with monkeypatch.context() as patch:
        patch.setattr(Results, "write", interrupted)
        done = run_here(*args)
    assert done.returncode == 130
    assert done.stderr == f"tvr: stopped; the same command goes on with what is in {output}\n"
    assert len(records(output.read_text())) == 7
    done = run_here(*args)
    assert done.returncode == 0
    assert "7 of 40 results" in done.stderr
    assert [r["line"] for r in records(output.read_text())] == list(range(1, 41))


def test_ctrl_c_stops_a_batch_cleanly(model, many, tmp_path):
    output = tmp_path / "out.jsonl"
    args = ["run", "--input", many, "--model", model, "--json", "--output", output]
    process = subprocess.Popen(
        [sys.executable, "-m", "tvr", *map(str, args)], stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not (output.exists() and output.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    (line,) = stderr.splitlines()
    assert line.startswith("tvr: stopped; ")
    assert 0 < len(output.read_bytes().splitlines()) < 40
    assert run_here(*args).returncode == 0
    assert [r["id"] for r in records(output.read_text())] == list(range(40))


def test_failed_lines_fail_a_resumed_run_too(model, tmp_path):
    file = jsonl(tmp_path / "in.jsonl", "{bad", {"prompt": "a", "max_tokens": 1})
    output = tmp_path / "out.jsonl"
    for _ in range(2):
        assert run_here("run", "--input", file, "--json", "--output", output).returncode == 1


@pytest.mark.parametrize("change", ["line", "order", "options", "fewer", "half"])
def test_an_output_of_another_input_is_refused_and_left_alone(model, tmp_path, change):
    lines = [{"prompt": "a", "max_tokens": 1}, {"prompt": "b", "max_tokens": 1}]
    file = jsonl(tmp_path / "in.jsonl", *lines)
    output = tmp_path / "out.jsonl"
    args = ["run", "--input", file, "--json", "--output", output, "--model", model]
    assert run_here(*args).returncode == 0
    before = output.read_bytes()
    if change == "line":
        jsonl(file, lines[0], {"prompt": "c", "max_tokens": 1})
    elif change == "order":
        jsonl(file, *reversed(lines))
    elif change == "fewer":
        jsonl(file, lines[0])
    elif change == "half":
        jsonl(file)
        output.write_bytes(before[:20])
        before = before[:20]
    else:
        args += ["--temperature", 0.5]
    assert "another input or of other options" in refused_here(*args)
    assert output.read_bytes() == before


def test_lines_added_to_the_input_are_added_to_the_output(model, tmp_path):
    file = jsonl(tmp_path / "in.jsonl", {"prompt": "a", "max_tokens": 1})
    args = ["run", "--input", file, "--json", "--output", tmp_path / "out.jsonl", "--model", model]
    assert run_here(*args).returncode == 0
    jsonl(file, {"prompt": "a", "max_tokens": 1}, {"prompt": "b", "max_tokens": 1})
    assert run_here(*args).returncode == 0
    assert [r["line"] for r in records((tmp_path / "out.jsonl").read_text())] == [1, 2]


NOT_OURS = [
    "a letter to a friend",
    "a letter\nto a friend\n",
    '{"prompt": "a"}\n',
    '{"line": 1, "hash": "x", "outputs": [1]}\n',
    "{",  # half of a result begins like that
]


def test_a_file_that_is_not_ours_is_never_written_over(model, tmp_path):
    file = jsonl(tmp_path / "in.jsonl", {"prompt": "a"})
    for content in NOT_OURS:
        other = tmp_path / "other.jsonl"
        other.write_text(content)
        args = ["run", "--input", file, "--model", model, "--output", other]
        if content != "{":
            assert "other.jsonl" in refused_here(*args, "--json")
        assert "is there already" in refused_here(*args)
        assert other.read_text() == content
    assert "are both" in refused_here("run", "--input", file, "--json", "--output", file)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--input", "nowhere.txt"], "nowhere.txt cannot be read"),
        (["a", "--input", "-"], "PROMPT and --input"),
        (["a", "--output", "/nowhere/at/all"], "/nowhere/at/all"),
        (["--json"], "no PROMPT"),
        (["a", "--json", "--stats"], "--stats is of one answer"),
        (["a", "--output", "."], "cannot be written"),
    ],
)
def test_files_that_cannot_be_used_are_refused_in_one_line(model, args, message):
    assert message in refused_here("run", *args, "--model", model)


def test_token_ids_need_no_tokenizer(tmp_path):
    path = save_shape(tmp_path / "model")
    lines = ({"prompt_token_ids": [3, 4], "max_tokens": 2}, {"prompt": "a"})
    done = run_here(
        "run", "--input", jsonl(tmp_path / "i.jsonl", *lines), "--json", "--model", path
    )
    good, bad = records(done.stdout)
    assert len(good["outputs"][0]["token_ids"]) == 2
    assert "tokenizer" in bad["error"]


def test_an_empty_input_is_no_error(model, tmp_path):
    file = tmp_path / "in.txt"
    file.write_text("\n\n")
    assert run_here("run", "--input", file, "--model", model) == (0, "", "")


def test_numbers_that_json_lacks_become_null(model):
    """-inf is the log-probability of a token that was masked out."""
    from tvr.cli.batch_output import result_record
    from tvr.core.outputs import CompletionOutput, RequestMetrics, RequestOutput

    completion = CompletionOutput(0, "a", [1], logprobs=[{1: float("-inf")}], finish_reason="stop")
    output = RequestOutput("x", None, [1], [completion], RequestMetrics(0.0), True)
    record = json.loads(json.dumps(result_record(output), allow_nan=False))
    assert record["outputs"][0]["logprobs"] == [{"1": None}]
    assert os.linesep not in json.dumps(record)
