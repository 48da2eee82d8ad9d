"""The server against requests drawn from its own OpenAPI document, by schemathesis."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from support.engines import save_text_model
from support.servers import serving, wait_until

pytest.importorskip("schemathesis")

KEY = "right-key"
#: A short one, so that a short context has room for answers.
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
#: A context cannot be told in a schema, nor which fields go together.
NOT_CHECKED = "positive_data_acceptance"


@pytest.mark.slow
def test_no_request_is_answered_other_than_the_servers_own_document_says(tmp_path):
    """Also none by 5xx, and none without the key, of some 1,500."""
    path = save_text_model(tmp_path / "model")
    (path / "chat_template.jinja").write_text(TEMPLATE)
    with serving(path, {"num_blocks": 256, "max_model_len": 32}, api_keys=(KEY,)) as running:
        command = [
            *(sys.executable, "-m", "schemathesis.cli", "run", f"{running.url}/openapi.json"),
            *("--header", f"Authorization: Bearer {KEY}", "--request-timeout", "30"),
            *("--seed", "1", "--generation-database", "none", "--max-examples", "20"),
            *("--exclude-checks", NOT_CHECKED, "--no-color"),
        ]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
        )
        wait_until(running.is_idle)
        metrics = running.service.metrics.render().decode()
    assert done.returncode == 0, done.stdout
    assert "10 selected / 10 total" in done.stdout
    (answered,) = re.findall(r"^tvr:e2e_request_latency_seconds_count\{.*\} (.*)$", metrics, re.M)
    assert float(answered) > 100, "requests that are served, too"
