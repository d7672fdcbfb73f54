"""Which files a process may touch, by Landlock: what the weaker level of isolation has instead of a root folder of its own.

Needs no privileges. Kernels from 5.13 have it where it is switched on; `version` says which one, 0 for none. Imports the standard
library only: it runs in the sandboxes.
"""

import ctypes
import os
import struct
from collections.abc import Iterable

from tether.envs.deepcoder.sandbox import linux

_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446  # the same numbers on every architecture
_ASK_VERSION, _PATH_RULE = 1, 1
_WRITE_FILE, _READ_FILE, _READ_FOLDER, _REMOVE_FILE, _MAKE_FILE, _TRUNCATE = 1 << 1, 1 << 2, 1 << 3, 1 << 5, 1 << 8, 1 << 14

READ = _READ_FILE | _READ_FOLDER
READ_AND_WRITE_DEVICE = _READ_FILE | _WRITE_FILE
OWN_FOLDER = READ | _WRITE_FILE | _REMOVE_FILE | _MAKE_FILE | _TRUNCATE


def version() -> int:
    """The kernel's Landlock version, 0 if it has none."""
    try:
        return linux.system_call("asking for Landlock", _CREATE, 0, 0, _ASK_VERSION)
    except OSError:
        return 0


def restrict(rules: Iterable[tuple[str, int]]) -> None:
    """Forbid this process every file but those below the paths given, each with its rights; with them, every connection it knows of."""
    known = version()
    files = (1 << (13 + (known >= 2) + (known >= 3) + (known >= 5))) - 1  # 13 rights in version 1; one more each in 2, 3 and 5
    network, scopes = (3 if known >= 4 else 0), (3 if known >= 6 else 0)
    wanted = struct.pack("QQQ", files, network, scopes)[: 24 if known >= 6 else 16 if known >= 4 else 8]
    attributes = ctypes.create_string_buffer(wanted, len(wanted))
    ruleset = linux.system_call("creating file rules", _CREATE, ctypes.addressof(attributes), len(wanted), 0)
    for path, rights in rules:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = ctypes.create_string_buffer(struct.pack("=Qi", rights & files, descriptor), 12)
        linux.system_call("adding a file rule", _ADD_RULE, ruleset, _PATH_RULE, ctypes.addressof(rule), 0)
        os.close(descriptor)
    linux.system_call("restricting files", _RESTRICT, ruleset, 0)
    os.close(ruleset)
