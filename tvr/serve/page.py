"""The chat page: one file, which asks nobody but the server it came from."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

#: A script or a style sheet that the page holds.
_INLINE = re.compile(rb"<(script|style)>(.*?)</\1>", re.DOTALL)


def load_page() -> tuple[bytes, dict[str, str]]:
    """Return the page, and headers by which a browser runs nothing but the page's own script."""
    page = files("tvr.serve").joinpath("page.html").read_bytes()
    sources = {
        kind.decode(): base64.b64encode(hashlib.sha256(text).digest()).decode()
        for kind, text in _INLINE.findall(page)
    }
    policy = (
        f"default-src 'none'; script-src 'sha256-{sources['script']}'; "
        f"style-src 'sha256-{sources['style']}'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": policy,
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    return page, headers
