"""ITL as a picture, and the limit beside it."""

from __future__ import annotations

import json

import pytest

from support.bench_models import open_model, save_config
from support.cli import refused_here, run_here
from tvr.bench.engine_limit import memory_limit
from tvr.bench.plot_itl import limit_ms, plot_itl

#: Llama-3.2-1B in bf16 at 4.3 TB/s.
HEADER = {
    "device_name": "NVIDIA H200",
    "ceiling": {"copy_tb_s": 4.3, "read_tb_s": 4.1},
    "step_bytes": {"weights": 2_471_628_800, "kv_per_token": 32_768},
}


def row(backend, itl_ms, batch, input_len, **changed):
    spread = {"p10_itl_ms": itl_ms and itl_ms * 0.9, "p90_itl_ms": itl_ms and itl_ms * 1.2}
    sizes = {"batch": batch, "input_len": input_len, "output_len": 64}
    named = {"backend": backend, "model": "m", "dtype": "bfloat16"}
    return {**named, **sizes, "itl_ms": itl_ms, **spread, **changed}


@pytest.mark.parametrize(
    ("batch", "ctx", "ms"),
    [(1, 128, 0.576), (8, 1024, 0.637), (32, 4096, 1.574), (1, 131_072, 1.574)],
)
def test_the_limit_is_the_time_to_read_weights_and_kv(batch, ctx, ms):
    assert limit_ms(HEADER, batch, ctx) == pytest.approx(ms, abs=1e-3)


@pytest.mark.parametrize("tied", [True, False])
def test_the_bytes_of_a_step_are_those_of_the_model(tmp_path, tied):
    model = open_model(save_config(tmp_path / "small", tie_word_embeddings=tied))
    found = memory_limit(model)
    layer = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 96 + 2 * 64
    # The LM head counts; an embedding of its own does not.
    weights = 2 * layer + 64 + 320 * 64
    assert found["step_bytes"] == {"weights": 4 * weights, "kv_per_token": 2 * 2 * 32 * 4}
    assert found["ceiling"]["copy_tb_s"] > 0


def draw(file, rows):
    matplotlib = pytest.importorskip("matplotlib")
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text stays text
        plot_itl(file, HEADER, rows)
    return file.read_text()


def test_the_picture_has_a_panel_for_batch_and_one_for_context(tmp_path):
    sizes = [(batch, input_len) for batch in (1, 8) for input_len in (128, 4096)]
    rows = [row(name, 2.0, *size) for name in ("a", "b") for size in sizes]
    rows += [row("a", None, 32, 128, error="is off"), row("a", -0.1, 64, 128)]
    text = draw(tmp_path / "x.svg", rows)
    for words in (
        *(">batch<", ">mean context, tokens<", ">prompt 4096<", ">batch 8<", ">a<", ">b<"),
        "m, bfloat16, NVIDIA H200; dashed: weights and KV at 4.3 TB/s (a copy by torch)",
    ):
        assert words in text, words
    assert ">batch 32<" not in text


def test_one_batch_has_no_panel_of_batches_and_nothing_measured_is_still_a_picture(tmp_path):
    text = draw(tmp_path / "x.svg", [row("a", 2.0, 8, n) for n in (128, 1024)])
    assert ">mean context, tokens<" in text
    assert ">batch<" not in text
    assert ">batch<" in draw(tmp_path / "y.svg", [row("a", None, 8, 128, error="is off")])


def test_the_command_draws_what_it_measures(tmp_path):
    pytest.importorskip("matplotlib")
    model = ("--model", save_config(tmp_path / "small"), "--load-format", "dummy")
    sizes = ("--batch", "1,2", "--output-len", "3", "--num-iters", "5", "--num-iters-warmup", "0")
    files = ("--json", tmp_path / "l.json", "--plot", tmp_path / "l.png")
    where = ("--device", "cpu", "--backend", "torch")
    done = run_here("bench", "latency", *model, *sizes, *where, *files)
    assert (done.returncode, done.stderr) == (0, "")
    assert "memory: copy " in done.stdout
    assert (tmp_path / "l.png").read_bytes().startswith(b"\x89PNG")
    header = json.loads((tmp_path / "l.json").read_text())["header"]
    assert header["step_bytes"]["kv_per_token"] == 512
    line = refused_here("bench", "latency", *model, "--plot", tmp_path / "l.txt")
    assert "the name must end in one of .png" in line
