"""Environments that run somewhere else: in threads and processes of this machine, or on a server.

`VectorEnv` (vector.py) is a pool of environments of one kind that play at the same time; `make_envs` is what training uses. Where they
run follows from their property `work` (hosts.py). `http_client.connect` plays an environment on a server, and `http_server` serves one.
Both bridges execute the same calls with the same threads, deadlines and failures (calls.py).
"""

from tether.envs.remote.vector import Member, VectorEnv, WorkerPool, make_envs

__all__ = ["Member", "VectorEnv", "WorkerPool", "make_envs"]
