"""A child process that ends with this one, also when this one is killed.

Between the two stands a guard, a small process that ends the child and all of its children when the pipe from this process closes. It passes a
line `INT` on as Ctrl-C, and exits as the child did: with its exit code, or with 128 and the number of the signal that killed it. Where the guard
itself is killed (Ray kills the children of a worker that ends), the child is killed with it, on Linux. Signals that this process blocks, as Ray's
workers do with Ctrl-C, reach the child.
"""

GUARD = """
import ctypes, os, signal, subprocess, sys, threading
signal.pthread_sigmask(signal.SIG_SETMASK, set())
prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else lambda *_: 0
child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=lambda: prctl(1, signal.SIGKILL))
def wait():
    code = child.wait()
    os._exit(code if code >= 0 else 128 - code)
threading.Thread(target=wait, daemon=True).start()
signal.signal(signal.SIGINT, signal.SIG_IGN)
for line in sys.stdin:
    if line.strip() == "INT":
        os.killpg(child.pid, signal.SIGINT)
for sign, seconds in ((signal.SIGTERM, 20), (signal.SIGKILL, 20)):
    try:
        os.killpg(child.pid, sign)
        child.wait(seconds)
    except (ProcessLookupError, subprocess.TimeoutExpired):
        pass
"""
"""The program of the guard: `python -c GUARD COMMAND ...`, with a pipe as its standard input."""
