"""Other processes for the tests: children that answer, and scripts."""

import multiprocessing
import subprocess
import sys
import textwrap
from pathlib import Path

TESTS = Path(__file__).parent


def run_in_child(function, *arguments, method="fork"):
    """What ``function(send, *arguments)`` sends from a child process."""
    context = multiprocessing.get_context(method)
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=function, args=(send, *arguments))
    child.start()
    send.close()
    assert receive.poll(60), "the child hangs"
    answer = receive.recv()
    child.join(60)
    assert child.exitcode == 0
    receive.close()
    return answer


def script(body, *arguments):
    """Starts a Python process over `body`, which finds the tests' helpers."""
    head = f"import sys; sys.path.insert(0, {str(TESTS)!r})\n"
    return subprocess.Popen(
        [sys.executable, "-c", head + textwrap.dedent(body), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=TESTS.parent,
    )
