"""The command line, run as users run it: its streams and its exit code.

What hangs on the process itself (signals, closed streams, encodings, paths of import) has one of
its own; the rest runs in the test's.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import typer

from support.cli import refused_here, run_here
from support.engines import save_shape, save_text_model
from support.plugins import install, install_sample
from tvr import LLM
from tvr.cli.app import run_app

TIMEOUT = 120


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_text_model(tmp_path_factory.mktemp("text"))


def tvr(*args, stdin="", env=None, cwd=None):
    return subprocess.run(
        [sys.executable, "-m", "tvr", *map(str, args)],
        input=stdin,
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="surrogateescape",
        timeout=TIMEOUT,
        env={**os.environ, **(env or {})},
        cwd=cwd,
        check=False,
    )


def refused(*args, **more) -> str:
    """Run `tvr`, which must refuse; return its one line."""
    done = tvr(*args, **more)
    assert done.returncode == 2, (done.returncode, done.stdout, done.stderr)
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("tvr: error: ")
    return line


RUN = ["--max-tokens", 12, "--no-chat"]


def test_run_continues_a_prompt_from_the_argument_and_from_stdin(model):
    by_argument = tvr("run", "a dog", "--model", model, *RUN)
    assert (by_argument.returncode, by_argument.stderr) == (0, "")
    assert by_argument.stdout.endswith("\n")
    assert len(by_argument.stdout) > 1
    by_stdin = tvr("run", "-", "--model", model, *RUN, stdin="a dog")
    assert by_stdin.stdout == by_argument.stdout


def test_a_seed_fixes_the_sample_and_another_changes_it(model):
    def sample(seed):
        more = ["--temperature", 1, "--seed", seed]
        return run_here("run", "x", "--model", model, *RUN, *more).stdout

    assert sample(1) == sample(1) != sample(2)


def test_chat_and_its_system_message_reach_the_model(model):
    plain, chat, system = (
        run_here("run", "hello", "--model", model, "--max-tokens", 12, *more)
        for more in (["--no-chat"], ["--chat"], ["--system", "be brief"])
    )
    assert [p.returncode for p in (plain, chat, system)] == [0, 0, 0]
    assert len({plain.stdout, chat.stdout, system.stdout}) == 3


def test_a_dialogue_needs_a_terminal(model):
    assert "no PROMPT" in refused_here("run", "--model", model)


def test_stats_say_times_memory_and_who_served_each_op(model):
    done = run_here("run", "a dog", "--model", model, *RUN, "--stats")
    assert done.returncode == 0
    for word in ("TTFT", "tokens/s", "KV used", "KV pool", "op attention_decode", "torch"):
        assert word in done.stderr
    assert "TTFT" not in done.stdout


@pytest.mark.parametrize("asked", [True, False])
def test_the_engine_is_built_as_the_options_say(model, monkeypatch, asked):
    configs, init = [], LLM.__init__

    def watched(self, *args, **kwargs):
        init(self, *args, **kwargs)
        configs.append(self.config)

    monkeypatch.setattr(LLM, "__init__", watched)
    options = ("--enforce-eager", "--batch-invariant", "--strict") if asked else ()
    assert run_here("run", "a dog", "--model", model, *RUN, *options).returncode == 0
    (config,) = configs
    assert {config.enforce_eager, config.batch_invariant, config.strict} == {asked}


def test_output_comes_as_it_is_made(model):
    """The first text must be readable before the process has ended."""
    process = subprocess.Popen(
        [
            *[sys.executable, "-m", "tvr", "run", "a dog"],
            *["--model", str(model), "--no-chat", "--max-tokens", "200", "--temperature", "1"],
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout.read(1)
    running = process.poll() is None
    process.communicate(timeout=TIMEOUT)
    assert running
    assert process.returncode == 0


def test_an_interrupt_ends_cleanly(model):
    process = subprocess.Popen(
        [
            *[sys.executable, "-m", "tvr", "run", "a dog"],
            *["--model", str(model), "--no-chat", "--max-tokens", "240", "--temperature", "1"],
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.read(1)
    time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 130
    assert stderr == b""


def test_a_reader_that_leaves_ends_the_run_without_a_traceback(model):
    process = subprocess.Popen(
        [
            *[sys.executable, "-m", "tvr", "run", "a dog"],
            *["--model", str(model), "--no-chat", "--max-tokens", "240", "--temperature", "1"],
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.read(1)
    process.stdout.close()
    with process.stderr as stderr:
        assert stderr.read() == b""
    assert process.wait(TIMEOUT) == 2


def test_a_narrow_terminal_encoding_does_not_end_the_answer(model):
    env = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"}
    done = tvr("run", "x", "--model", model, *RUN, "--temperature", 3, "--seed", 1, env=env)
    assert done.returncode == 0, done.stderr


def test_what_cannot_be_read_is_refused_in_one_line(tmp_path, model):
    assert "config.json" in refused_here("run", "x", "--model", tmp_path)
    missing = tmp_path / "nowhere"
    assert str(missing) in refused_here("run", "x", "--model", missing)
    assert "config.json" in refused_here("run", "x", "--model", model / "config.json")
    (tmp_path / "config.json").write_text("{")
    assert "JSON" in refused_here("run", "x", "--model", tmp_path)


def test_a_directory_without_a_tokenizer_is_refused_for_text(tmp_path):
    path = save_shape(tmp_path)
    assert "tokenizer.json" in refused_here("run", "x", "--model", path)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--temperature", "-1"], "temperature"),
        (["--temperature", "nan"], "temperature"),
        (["--temperature", "hot"], "--temperature"),
        (["--top-p", "0"], "top_p"),
        (["--top-p", "1.5"], "top_p"),
        (["--top-k", "-2"], "top_k"),
        (["--max-tokens", "0"], "max_tokens"),
        (["--stop", ""], "stop"),
        (["--seed", "99999999999999999999999"], "seed"),
        (["--dtype", "int4"], "int4"),
        (["--device", "tpu"], "tpu"),
        (["--device", "cuda:"], "cuda:"),
        (["--backend", "nosuch"], "nosuch"),
        (["--plugins", "/nonexistent.toml"], "/nonexistent.toml"),
        (["--no-such-option"], "--no-such-option"),
        (["--system", "s", "--no-chat"], "--system"),
        (["--max-model-len", "100000"], "256"),
    ],
)
def test_bad_options_are_refused_in_one_line(model, args, message):
    assert message in refused_here("run", "x", "--model", model, *args)


def test_without_a_model_the_demo_speaks_and_is_sampled(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    by_default, by_name = (
        run_here("run", "ROMEO:", "--max-tokens", 60, *more) for more in ([], ["--model", "demo"])
    )
    assert (by_default.returncode, by_default.stderr) == (0, "")
    assert by_default == by_name
    assert re.search(r"^[A-Z]+:$", by_default.stdout, re.M)
    greedy = run_here("run", "ROMEO:", "--max-tokens", 60, "--temperature", 0)
    assert greedy.stdout != by_default.stdout
    (tmp_path / "demo").mkdir()  # a folder of one's own goes first
    assert "config.json" in refused_here("run", "ROMEO:", "--model", "demo")


def test_a_run_without_a_prompt_is_a_dialogue_at_a_terminal(model):
    """A pseudo-terminal is on stdin and stdout; each answer follows its question."""
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [
            *[sys.executable, "-m", "tvr", "run", "--model", str(model)],
            *["--max-tokens", "4", "--stats"],
        ],
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.PIPE,
    )
    os.close(theirs)
    os.write(ours, b"hello\n\n/set max_tokens 2\nagain\n/exit\n")
    stderr = process.communicate(timeout=TIMEOUT)[1].decode()
    seen = os.read(ours, 65536).decode(errors="replace")
    os.close(ours)
    assert process.returncode == 0
    assert seen.count("> ") >= 5
    assert stderr.startswith("tvr: /help lists the commands")
    assert re.findall(r"finish .* after (\d) tokens", stderr) == ["4", "2"]


def test_a_prompt_past_the_context_is_refused_with_the_numbers(model):
    line = refused_here("run", "-", "--model", model, "--no-chat", stdin="word " * 400)
    assert "256" in line


def test_a_prompt_that_is_no_text_is_refused_in_one_line(model):
    """Python turns bytes that are not UTF-8 into lone surrogates, or raises while it reads."""
    for how in ("strict", "surrogateescape"):
        env = {"PYTHONIOENCODING": f"utf-8:{how}"}
        line = refused("run", "-", "--model", model, stdin="a\udcff", env=env)
        assert "the prompt is not text" in line
    assert "the prompt is not text" in refused("run", "a\udcff", "--model", model)


def test_a_closed_stdin_or_stdout_is_refused_in_one_line(model):
    for args, closed, message in (
        (["-"], "<&-", "stdin, which is closed"),
        ([], "<&-", "no PROMPT"),
        (["x"], ">&-", "stdout is closed"),
    ):
        command = [sys.executable, "-m", "tvr", "run", *args, "--model", str(model)]
        done = subprocess.run(
            ["sh", "-c", f'"$@" {closed}', "sh", *command],
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert message in line


def test_an_error_nobody_foresaw_is_one_line_too(capsys):
    app = typer.Typer()

    @app.command()
    def fail(*, debug: bool = False) -> None:
        raise RuntimeError("two\nlines")

    assert run_app(app, ["--no-debug"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tvr: error: RuntimeError: two lines; ")
    assert "--debug" in line
    assert run_app(app, ["--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_without_a_command_there_is_help():
    done = tvr()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == tvr("--help").stdout
    assert "run" in done.stdout


def test_debug_shows_the_traceback(tmp_path):
    done = tvr("run", "x", "--model", tmp_path, "--debug")
    assert done.returncode == 2
    assert "Traceback" in done.stderr


def test_a_cuda_device_is_refused_where_there_is_none(model):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    assert "CUDA" in refused_here("run", "x", "--model", model, "--device", "cuda")


UNAVAILABLE = """
from tvr import hookimpl
from tvr.contract import BackendInfo, Box

@hookimpl
def tvr_backend_info():
    return BackendInfo(name="nogpu", abi=(1, 0), ops={"rope": [Box(dtypes=["float32"])]})

@hookimpl
def tvr_probe(device):
    return ["no driver was found"]

@hookimpl
def tvr_bind_rope(spec, device):
    return None
"""


def test_a_backend_that_cannot_run_is_passed_over_and_refused_by_name(model, tmp_path):
    install(
        tmp_path,
        "nogpu",
        entry_points={"nogpu": "nogpu_module"},
        sources={"nogpu_module.py": UNAVAILABLE},
    )
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    assert tvr("run", "x", "--model", model, *RUN, env=env).returncode == 0
    line = refused("run", "x", "--model", model, "--backend", "nogpu", env=env)
    assert "no driver was found" in line


def test_backends_lists_and_explains():
    table = run_here("backends")
    assert table.returncode == 0
    assert "torch" in table.stdout
    assert "ok" in table.stdout
    explained = run_here("backends", "--explain")
    assert "attention_decode: torch" in explained.stdout
    data = json.loads(run_here("backends", "--explain", "--json").stdout)
    by_name = {b["name"]: b for b in data["backends"]}
    assert by_name["torch"]["status"] == "ok"
    assert {op["op"]: op["served_by"] for op in data["ops"]}["rope_kv_write"] == "torch"


def test_the_version_is_printed():
    from tvr import __version__

    assert run_here("--version").stdout == f"tvr {__version__}\n"


def test_with_stderr_closed_nothing_of_it_reaches_stdout(model):
    command = [sys.executable, "-m", "tvr", "run", "a dog", "--model", str(model), "--stats"]
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" 2>&-', "sh", *command, "--max-tokens", "3", "--no-chat"],
        stdout=subprocess.PIPE,
        timeout=TIMEOUT,
        check=False,
    )
    assert done.returncode == 0
    assert b"TTFT" not in done.stdout
    assert b"KV used" not in done.stdout


def test_an_interrupt_while_importing_leaves_no_traceback():
    code = (
        "import builtins, os, signal, tvr.cli\n"
        "real = builtins.__import__\n"
        "def interrupted(name, *args, **kwargs):\n"
        "    if name == 'tvr.cli.app': os.kill(os.getpid(), signal.SIGINT)\n"
        "    return real(name, *args, **kwargs)\n"
        "builtins.__import__ = interrupted\n"
        "tvr.cli.main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=TIMEOUT, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def test_backends_explains_a_composed_op_part_by_part(tmp_path):
    install_sample(tmp_path, "tvr_only_rope")
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    text = tvr("backends", "--explain", "--backend", "only_rope", env=env).stdout
    listed = next(line for line in text.splitlines() if line.startswith("only_rope "))
    assert listed.split()[1] == "ok"
    assert "rope_kv_write: only_rope + torch" in text
    parts = text.split("rope_kv_write: only_rope + torch")[1].split("\n\n")[0]
    assert "    rope: only_rope\n" in parts
    assert "    kv_write: torch\n" in parts
