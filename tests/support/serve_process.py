"""`tvr serve` as a program that tests start."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading

from support.servers import Running, wait_until


class Process:
    """`tvr serve` as a process of its own."""

    def __init__(self, *options: str, code: str = "import tvr.cli; tvr.cli.main()") -> None:
        command = [sys.executable, "-c", code, "serve", "--port", "0", "--device", "cpu", *options]
        self.lines: list[str] = []
        self.popen = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self) -> None:
        assert self.popen.stderr is not None
        self.lines.extend(iter(self.popen.stderr.readline, ""))

    def running(self) -> Running:
        wait_until(lambda: self.lines or self.popen.poll() is not None, 60)
        (line,) = self.lines
        url = re.fullmatch(r"tvr: (\S+) is served at (http://127\.0\.0\.1:\d+)\n", line).group(2)
        return Running(llm=None, server=None, service=None, url=url, thread=self.reader)

    def end(self) -> int:
        code = self.popen.wait(30)
        self.reader.join(10)
        self.popen.stderr.close()
        return code

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.popen.kill()
        self.end()
