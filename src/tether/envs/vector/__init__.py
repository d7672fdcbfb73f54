"""Many environments of one kind, played at the same time; a slow, hung or crashed one neither stalls nor harms the others.

Where the environments live follows from their property `work`: in the caller's thread (inline), each in a process of its own
(process), or beside each other in threads under one asyncio loop (wait). `members.VectorEnv` is the vector, `pool.make_envs` what the
trainer uses.
"""

from tether.envs.vector.members import Member, VectorEnv
from tether.envs.vector.pool import WorkerPool, make_envs

__all__ = ["WorkerPool", "Member", "VectorEnv", "make_envs"]
