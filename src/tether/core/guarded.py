"""A child process that ends with this one, also when this one is killed.

Between the two stands a guard, a small process that ends the child and all of its children when the pipe from this process closes. It passes a
line `INT` on as Ctrl-C, and exits as the child did: with its exit code, or with 128 and the number of the signal that killed it. Signals that this
process blocks, as Ray's workers do with Ctrl-C, reach the child.

Beside the guard stands a second process, which kills what is left of the child and its children once the guard is gone: where the guard itself was
killed (Ray kills the children of a worker that ends), and where the child ended without its own children. vLLM's workers, for one, outlive a
server that is killed, and keep their memory.
"""

GUARD = """
import os, signal, subprocess, sys, threading
signal.pthread_sigmask(signal.SIG_SETMASK, set())
child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)
guard_lives, write_end = os.pipe()
if os.fork() == 0:
    os.setsid()
    os.closerange(0, 3)
    os.close(write_end)
    os.read(guard_lives, 1)
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    os._exit(0)
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
