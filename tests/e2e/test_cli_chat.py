"""`tvr chat`: a conversation with history, commands and interrupts."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys

import pytest

from support.cli import refused_here, run_here
from support.engines import save_shape, save_text_model
from tvr import LLM, SamplingParams
from tvr.cli.commands import COMMANDS, HELP
from tvr.cli.conversation import Conversation

#: Too much for Python's parser.
DEEP = f"/set top_k {'[' * 100_000}"

PARAMS = SamplingParams(temperature=0.0, max_tokens=8, seed=0)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_text_model(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def llm(model):
    with LLM(model) as engine:
        yield engine


def chat(model, *lines, more=()):
    """Type `lines` into a chat whose answers are greedy and end without line breaks."""
    args = ["--model", model, "--max-tokens", 8, "--stop", "\n", *more]
    return run_here("chat", *args, stdin="".join(f"{line}\n" for line in lines))


def answer_of(llm, messages, params):
    return llm.generate(llm.chat_prompt(messages), params)[0].outputs[0].text


def answers(done):
    """The answers of a chat; a random model's text may hold what else counts as a line's end."""
    return done.stdout.split("\n")[:-1]


def saved(path):
    return json.loads(path.read_text())


def test_the_model_sees_the_whole_conversation(model, llm, tmp_path):
    file = tmp_path / "chat.json"
    done = chat(model, "hello", "and now?", f"/save {file}", more=["--system", "be brief"])
    assert done.returncode == 0
    messages = saved(file)
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert [m["content"] for m in messages[::2][:1] + messages[1::2]] == [
        "be brief",
        "hello",
        "and now?",
    ]
    params = SamplingParams(temperature=0.0, max_tokens=8, stop="\n")
    for end in (2, 4):
        assert answer_of(llm, messages[:end], params) == messages[end]["content"]
    assert done.stdout == "".join(messages[i]["content"] + "\n" for i in (2, 4))


def test_reset_forgets_all_but_the_system_message(model, tmp_path):
    file = tmp_path / "chat.json"
    done = chat(model, "/system be kind", "one", "/reset", "one", f"/save {file}")
    first, second = answers(done)
    assert first == second
    assert [m["content"] for m in saved(file)] == ["be kind", "one", first]
    assert chat(model, "/system be kind", "/system", "one").stdout == chat(model, "one").stdout


def test_a_saved_conversation_goes_on_when_loaded(model, tmp_path):
    file = tmp_path / "chat.json"
    whole = chat(model, "one", f"/save {file}", "two", f"/save {file}")
    assert "4 messages are in" in whole.stderr
    chat(model, "one", f"/save {file}")
    later = chat(model, f"/load {file}", "two")
    assert "2 messages came from" in later.stderr
    assert answers(whole)[1:] == answers(later)


def test_only_a_conversation_is_loaded_or_written_over(model, tmp_path):
    letter, wrong = tmp_path / "letter.txt", tmp_path / "wrong.json"
    letter.write_text("dear friend")
    wrong.write_text('[{"role": "user"}]')
    done = chat(
        model,
        *(f"/{what} {file}" for file in (letter, wrong) for what in ("save", "load")),
        f"/load {tmp_path / 'nowhere'}",
        "/load",
        f"/save {tmp_path}",
        f"/save {tmp_path / ('x' * 300)}",
        *("/save a\0b", "/load a\0b", "/save ~no-such-user/a", "/load ~no-such-user/a"),
    )
    assert done.stdout == ""
    assert done.stderr.count("does not hold a conversation") == 5
    assert done.stderr.count("cannot be written") == 2
    assert done.stderr.count("no-such-user") == 2
    assert len(done.stderr.splitlines()) == 12
    assert letter.read_text() == "dear friend"


def test_retry_asks_again_with_another_seed_and_leaves_one_answer(model, tmp_path):
    file = tmp_path / "chat.json"
    done = chat(model, "one", "/retry", f"/save {file}", more=["--temperature", 1])
    first, second = answers(done)
    assert first != second
    assert [m["content"] for m in saved(file)] == ["one", second]
    greedy = chat(model, "/retry", "one", "/retry")
    assert "nothing to retry" in greedy.stderr
    assert "stays the same" in greedy.stderr
    assert len(set(answers(greedy))) == 1


def test_settings_change_the_next_answers(model):
    done = chat(model, "/set max_tokens 2", "/set stop END", '/set stop ["x", "y"]', "/set")
    assert done.stderr == ""
    assert "max_tokens 2" in done.stdout.splitlines()
    assert 'stop ["x", "y"]' in done.stdout.splitlines()
    assert 0 < len(chat(model, "/set max_tokens 2", "a").stdout) < len(chat(model, "a").stdout)
    refused = chat(
        model, "/set nonsense 1", "/set temperature hot", "/set top_p 7", "/set n 2", DEEP
    )
    assert refused.stdout == ""
    for word, line in zip(
        ("nonsense", "temperature", "top_p", "'n'", "top_k"),
        refused.stderr.splitlines(),
        strict=True,
    ):
        assert line.startswith("tvr: error: ")
        assert word in line


def test_every_command_is_in_the_help_and_a_wrong_one_says_so(model):
    done = chat(model, "/help", "/nonsense", "/stats", "/exit", "never read")
    assert done.stdout == HELP + "\n"
    assert re.findall(r"^/(\w+)", HELP, re.M) == list(COMMANDS)
    wrong, no_stats = done.stderr.splitlines()
    assert "/nonsense" in wrong
    assert "no answer yet" in no_stats


def test_stats_are_of_the_last_answer(model):
    done = chat(model, "one", "/stats")
    assert done.stderr.count("TTFT") == 1
    assert chat(model, "one", "two", more=["--stats"]).stderr.count("TTFT") == 2


def test_a_backslash_goes_on_with_the_next_line_and_two_slashes_are_text(model, tmp_path):
    file = tmp_path / "chat.json"
    chat(model, "one\\", "two\\", "three", "//save me", "last\\")
    chat(model, "one\\", "two\\", "three", "//save me", "  ", f"/save {file}")
    asked = [m["content"] for m in saved(file) if m["role"] == "user"]
    assert asked == ["one\ntwo\nthree", "/save me"]


def test_a_prompt_past_the_context_is_one_line_and_the_chat_goes_on(model, tmp_path):
    file = tmp_path / "chat.json"
    done = chat(model, "one", "word " * 400, "/set max_tokens 4", "two", f"/save {file}")
    assert done.returncode == 0
    error, _ = done.stderr.splitlines()
    assert error.startswith("tvr: error: the prompt has ")
    assert "256" in error
    assert [m["content"] for m in saved(file)][::2] == ["one", "two"]


def test_an_output_that_takes_nothing_ends_the_chat(model):
    """Else the chat would try, and fail, for ever."""
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "tvr", "chat", "--model", str(model)],
            input="one\ntwo\n",
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == "tvr: error: [Errno 28] No space left on device"


def test_bytes_that_are_no_text_are_one_line_too(model):
    args = ["chat", "--model", model, "--max-tokens", 4]
    done = run_here(*args, stdin=b"a\xff\n")
    assert done.returncode == 0
    (line,) = done.stderr.splitlines()
    assert "error" in line


def test_an_interrupted_answer_is_kept_as_far_as_it_came(llm):
    seen = []

    def write(text):
        seen.append(text)
        if len("".join(seen)) > 1 and len(seen) < 7:
            seen.extend([""] * 7)  # once
            raise KeyboardInterrupt

    conversation = Conversation(llm, PARAMS, chat=True, system=None)
    with pytest.raises(KeyboardInterrupt):
        conversation.answer("one", write)
    assert not llm.has_unfinished_requests()
    asked, answered = conversation.messages
    assert asked["content"] == "one"
    assert answered["content"] + "\n" == "".join(seen)
    conversation.answer("two", lambda text: None)
    assert [m["role"] for m in conversation.messages] == ["user", "assistant"] * 2


def test_an_answer_interrupted_before_any_text_leaves_no_turn(llm, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    conversation = Conversation(llm, PARAMS, chat=True, system="s")
    with monkeypatch.context() as patch:
        patch.setattr(llm, "_drive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            conversation.answer("one", lambda text: None)
    assert [m["role"] for m in conversation.messages] == ["system"]
    assert not llm.has_unfinished_requests()


def test_an_interrupt_of_a_retry_gives_the_old_answer_back(llm, monkeypatch):
    from tvr.cli import chat as module

    conversation = Conversation(llm, PARAMS, chat=True, system=None)
    conversation.answer("one", lambda text: None)
    before = list(conversation.messages)

    def answer(text, write):
        raise KeyboardInterrupt

    monkeypatch.setattr(conversation, "answer", answer)
    monkeypatch.setattr(sys, "stdin", io.StringIO("/retry\n"))
    module.converse(conversation, stats=False)
    assert conversation.messages == before


def test_ctrl_c_stops_the_answer_and_not_the_chat(model, tmp_path):
    file = tmp_path / "chat.json"
    args = ["chat", "--model", str(model), "--max-tokens", "200", "--temperature", "1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "tvr", *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdin.write(b"a long story\n")
    process.stdin.flush()
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(f"/set max_tokens 3\nshort\n/save {file}\n".encode(), 60)
    assert process.returncode == 0
    stopped, saved_line = stderr.decode().splitlines()
    assert stopped.startswith("tvr: stopped; ")
    assert "4 messages" in saved_line
    assert [m["content"] for m in saved(file)][::2] == ["a long story", "short"]


def test_without_a_template_each_text_is_continued_on_its_own():
    lines = "ROMEO:\nROMEO:\n/system x\n"
    done = run_here("chat", "--max-tokens", 6, "--stop", "\n\n", stdin=lines)
    assert done.returncode == 0
    note, error = done.stderr.splitlines()
    assert "no chat template" in note
    assert "/system" in error
    half = len(done.stdout) // 2
    assert done.stdout[:half] == done.stdout[half:] != ""


def test_what_a_chat_needs_is_said_in_one_line(tmp_path):
    assert "tokenizer.json" in refused_here("chat", "--model", save_shape(tmp_path / "m"))
    assert "--system" in refused_here("chat", "--system", "x", stdin="a\n")
