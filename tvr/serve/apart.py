"""A process for work that would keep this one's threads waiting.

Python's lock is kept for all of a call into C: parsing megabytes of JSON, or throwing away what
the tokenizer library found in a long text, takes up to a second in which nobody is answered.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from http import HTTPStatus
from typing import IO, Any

from tvr.errors import TvrError
from tvr.serve.errors import ApiError

#: What the process runs. A supervisor's or a terminal's signal to all processes is for the server,
#: at whose end stdin ends. As here, imports look first where they look in this process.
_CODE = """
import signal, sys
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
sys.path[:] = {path!r}
from tvr.serve.apart import main
main()
"""

#: How far the process stands back where processors are few: those who get answers go first.
_NICE = 10


class Apart:
    """An object in a process of its own, whose methods are called there, one at a time.

    The process is started by the first call, and again if it has ended.

    Args:
        target: pickled; that may take long, and those with one target share it.
        name: of the thread that waits for it.
    """

    def __init__(self, target: bytes, name: str) -> None:
        self._target = target
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._lock = threading.Lock()
        self._closed = False
        self._process: subprocess.Popen[bytes] | None = None

    def submit(self, method: str, argument: bytes) -> Future[Any]:
        """Return what `target.method(argument)` will return, or the TvrError it will raise.

        The result has an ApiError, 503, if the process ends before that.
        """
        held = [argument]
        call = self._thread.submit(self._call, method, held)
        call.add_done_callback(lambda call: held.clear())  # a cancelled one stays in the queue
        return call

    def close(self) -> None:
        """End the process, in the middle of a call if there is one."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.kill()
        self._thread.shutdown(cancel_futures=True)
        self._end()

    def _call(self, method: str, held: list[bytes]) -> object:
        try:
            calls, answers = self._pipes()
            pickle.dump((method, held[0]), calls)
            calls.flush()
            result: object = pickle.load(answers)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            self._end()
            raise ApiError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"the process that reads long requests has ended ({type(error).__name__}); "
                "try again",
                code="reader_ended",
            ) from error
        if isinstance(result, Exception):
            raise result
        return result

    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        """Return the process's stdin and stdout; start it if there is none."""
        with self._lock:
            if self._closed:
                raise EOFError
            if self._process is not None and self._process.poll() is not None:
                self._process.communicate()  # it ended between calls; closes the pipes
                self._process = None
            if self._process is None:
                # A session of its own: Ctrl-C is for the server, which lets requests end.
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _CODE.format(path=sys.path)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    start_new_session=True,
                )
                begins = True
            else:
                begins = False
            calls, answers = self._process.stdin, self._process.stdout
        assert calls is not None, "piped"
        assert answers is not None, "piped"
        if begins:
            calls.write(self._target)
        return calls, answers

    def _end(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()  # closes the pipes


def main() -> None:
    """Make the calls that come by stdin, in this process, until there are no more."""
    if sys.platform != "win32":
        os.nice(_NICE)
    calls, answers = sys.stdin.buffer, sys.stdout.buffer
    try:
        target = pickle.load(calls)
        while True:
            method, argument = pickle.load(calls)
            pickle.dump(_result(target, method, argument), answers)
            answers.flush()
    except (EOFError, pickle.UnpicklingError):
        return  # the server has ended, perhaps in the middle of a call
    except BrokenPipeError:
        os._exit(0)  # so has it here; an ordinary end would try to write the rest


def _result(target: object, method: str, argument: bytes) -> object:
    try:
        result: object = getattr(target, method)(argument)
    except TvrError as error:
        return error
    except Exception:
        return RuntimeError(f"in the process for long requests:\n{traceback.format_exc()}")
    return result
