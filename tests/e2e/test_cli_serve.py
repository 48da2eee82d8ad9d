"""`tvr serve` as a command, and `tvr bench serve` against it."""

from __future__ import annotations

import gc
import importlib.util
import json
import socket

import pytest

from support.cli import refused_here, run_here
from support.servers import MODEL, serving
from tvr import LLM, demo
from tvr.cli.serve import _name_of
from tvr.errors import ConfigError
from tvr.serve.server import Server, bind
from tvr.serve.service import Service
from tvr.serve.settings import ServeSettings


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--port", "70000"], ["70000"]),
        (["--host", "no.such.host.invalid"], ["no.such.host.invalid"]),
        (["--api-key", ""], ["--api-key"]),
        (["--api-key", "two words"], ["--api-key"]),
        (["--served-model-name", ""], ["--served-model-name"]),
        (["--max-waiting", "-1"], ["max_waiting", "-1"]),
        (["--max-body-mb", "0"], ["--max-body-mb"]),
        (["--max-body-mb", "0.0001"], ["max_body_bytes"]),
        (["--max-body-mb", "nan"], ["--max-body-mb"]),
        (["--drain-s", "-1"], ["drain_s"]),
        (["--drain-s", "inf"], ["drain_s"]),
        (["--model", "no-such-model/"], ["no-such-model"]),
        (["--max-num-seqs", "0"], ["max_num_seqs", "0"]),
        (["--max-num-seqs", "9", "--max-num-batched-tokens", "8"], ["max_num_seqs is 9", "8"]),
    ],
)
def test_a_bad_option_is_one_line(options, parts):
    line = refused_here("serve", *options)
    assert all(part in line for part in parts)


@pytest.mark.parametrize("value", ["", " "])
def test_an_empty_key_in_the_environment_does_not_open_the_server(monkeypatch, value):
    monkeypatch.setenv("TVR_API_KEY", value)
    assert "TVR_API_KEY" in refused_here("serve", "--model", "no-such-model/", "--port", "0")


def test_a_port_in_use_is_refused_before_the_model_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        line = refused_here("serve", "--model", "no-such-model/", "--port", port)
    assert port in line
    assert "no-such-model" not in line


def test_a_port_that_is_taken_while_the_model_is_loaded_is_refused():
    """Two sockets that do not listen yet may share it."""
    with LLM(demo.path(), device="cpu") as llm, bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with bind("127.0.0.1", port) as second:
            first.listen()
            service = Service(llm, ServeSettings(model_names=("small",)))
            with pytest.raises(ConfigError, match=f"{port}.*--port"):
                Server(service, second).run()


def test_what_is_not_installed_is_named(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "uvicorn" else find_spec(name)
    )
    line = refused_here("serve")
    assert "uvicorn" in line
    assert "tvr[serve]" in line


def test_a_model_is_served_by_its_own_name(tmp_path):
    for name in ("my-model", "my.model"):
        (tmp_path / name).mkdir()
        assert _name_of(f"{tmp_path}/{name}/") == name
    (tmp_path / "tiny.Q8.gguf").touch()
    assert _name_of(str(tmp_path / "tiny.Q8.gguf")) == "tiny.Q8"
    assert _name_of("owner/model") == "owner/model"
    assert _name_of("demo") == "demo"


def test_steps_are_as_large_as_asked_for(monkeypatch):
    limits = []
    monkeypatch.setattr(
        Server, "run", lambda self, on_ready: limits.append(self.service.engine.llm.limits)
    )
    few = ["--max-num-seqs", "3", "--max-num-batched-tokens", "64"]
    assert run_here("serve", "--port", "0", "--device", "cpu", *few).returncode == 0
    assert (limits[0].max_num_seqs, limits[0].max_num_batched_tokens) == (3, 64)


def test_what_is_loaded_is_left_out_of_garbage_collections_while_it_serves(monkeypatch):
    """One looked through all of it, and nobody was answered for 0.3 s."""
    frozen = []
    monkeypatch.setattr(Server, "run", lambda self, on_ready: frozen.append(gc.get_freeze_count()))
    gc.collect()  # it freezes immortal objects, from Python 3.12 on
    before = gc.get_freeze_count()
    assert run_here("serve", "--port", "0", "--device", "cpu").returncode == 0
    assert frozen[0] > 100_000
    gc.collect()
    assert gc.get_freeze_count() == before


@pytest.mark.parametrize("endpoint", ["/v1/completions"])
def test_bench_serve_measures_it(endpoint, tmp_path):
    pytest.importorskip("httpx2")
    report = tmp_path / "serve.json"
    sizes = ("--num-prompts", 12, "--input-len", 20, "--output-len", 8, "--ignore-eos")
    with serving(demo.path(), api_keys=("key",)) as running:
        done = run_here(
            "bench",
            "serve",
            *("--base-url", running.url, "--api-key", "key", "--endpoint", endpoint, *sizes),
            *("--vocab-size", 2000, "--max-concurrency", 4, "--json", report),
        )
        assert done.returncode == 0, done
        assert "prompts are text" not in done.stderr  # token ids and counts in each chunk
        (row,) = json.loads(report.read_text())["rows"]
        assert (row["completed"], row["failed"]) == (12, 0)
        assert row["model"] == MODEL
        assert row["total_input_tokens"] == 12 * 20
        assert row["total_output_tokens"] == 12 * 8
