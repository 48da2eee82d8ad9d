"""Packages with one op each serve it in a real model, from their installed metadata alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from support.engines import engine, greedy, prompts_of, save_shape, tokens_of
from support.plugins import install_sample

STEPS = 5
NUM_LAYERS = 2
PROMPT = prompts_of([20])[0]

SCRIPT = """
import json, sys
from tvr import LLM, SamplingParams
model, backend, prompt, steps = json.loads(sys.argv[1])
params = SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True)
with LLM(model, backend=backend, num_blocks=64) as llm:
    tokens = llm.generate(prompt, params)[0].outputs[0].token_ids
    served = llm.parts.ops.served()
calls = {name: sys.modules[name].calls for name in ("tvr_only_rope", "tvr_only_rms_norm")
         if name in sys.modules}
print(json.dumps({"tokens": tokens, "served": served, "calls": calls}))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_shape(tmp_path_factory.mktemp("model"))


def run_with(site, checkpoint, backend, **env):
    arguments = json.dumps([str(checkpoint), backend, PROMPT, STEPS])
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, arguments],
        env={**os.environ, "PYTHONPATH": path, **env},
        cwd=site,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def expected_tokens(checkpoint):
    with engine(checkpoint) as llm:
        return tokens_of(llm.generate(PROMPT, greedy(STEPS)))[0]


def test_a_rope_only_package_serves_rope_in_every_layer_of_every_step(checkpoint, tmp_path):
    install_sample(tmp_path, "tvr_only_rope")
    result = run_with(tmp_path, checkpoint, "only_rope")
    assert result["calls"] == {"tvr_only_rope": STEPS * NUM_LAYERS}
    assert result["served"]["rope"] == ["only_rope"]
    # The reference's fused op ranks lower than the package's part, so it must step aside.
    assert result["served"]["rope_kv_write"] == ["only_rope + torch"]
    assert result["served"]["rms_norm"] == ["torch"]
    assert result["tokens"] == expected_tokens(checkpoint)


def test_an_rms_norm_only_package_serves_every_norm(checkpoint, tmp_path):
    install_sample(tmp_path, "tvr_only_rms_norm")
    result = run_with(tmp_path, checkpoint, "only_rms_norm")
    # Two norms a layer and the last one.
    assert result["calls"] == {"tvr_only_rms_norm": STEPS * (2 * NUM_LAYERS + 1)}
    assert result["served"]["add_rms_norm"] == ["only_rms_norm"]
    assert result["served"]["rope_kv_write"] == ["torch"]
    assert result["tokens"] == expected_tokens(checkpoint)


def test_both_packages_work_side_by_side_by_configuration(checkpoint, tmp_path):
    install_sample(tmp_path, "tvr_only_rope")
    install_sample(tmp_path, "tvr_only_rms_norm")
    (tmp_path / "plugins.toml").write_text('order = ["only_rope", "only_rms_norm", "torch"]\n')
    result = run_with(tmp_path, checkpoint, "auto")
    assert result["calls"] == {
        "tvr_only_rope": STEPS * NUM_LAYERS,
        "tvr_only_rms_norm": STEPS * (2 * NUM_LAYERS + 1),
    }
    assert result["tokens"] == expected_tokens(checkpoint)


def test_an_installed_package_that_is_not_listed_serves_nothing(checkpoint, tmp_path):
    install_sample(tmp_path, "tvr_only_rope")
    result = run_with(tmp_path, checkpoint, "auto")
    assert result["calls"] == {"tvr_only_rope": 0}
    assert result["tokens"] == expected_tokens(checkpoint)
