"""How Tether and a sandbox talk: frames of eight bytes of length and that many bytes, over one socket per task.

To the sandbox: its settings (JSON), the job (JSON), the standard input (bytes). Back: the facts of the run (JSON), what was printed
(bytes), what the program's process said about its own end (bytes, and not to be trusted). Imports the standard library only.
"""

import socket
import struct
from collections.abc import Iterable

LENGTH = struct.Struct(">Q")
FOLDER_PREFIX = "tether-sandbox-"
"""How the folder is called that a fork server without a jail makes and, should it be killed, Tether removes."""


def pack(frames: Iterable[bytes]) -> bytes:
    """Frames as one run of bytes."""
    return b"".join(part for frame in frames for part in (LENGTH.pack(len(frame)), frame))


def unpack(data: bytes | bytearray, count: int) -> list[bytes] | None:
    """The first `count` frames in the data, or None while there are fewer."""
    frames, at = [], 0
    for _ in range(count):
        if len(data) < at + LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(data, at)
        at += LENGTH.size + length
        if len(data) < at:
            return None
        frames.append(bytes(data[at - length : at]))
    return frames


def receive(connection: socket.socket) -> bytes:
    """The next frame, waiting for it; not a byte more is read. `EOFError` if the other side is gone."""
    (length,) = LENGTH.unpack(_exactly(connection, LENGTH.size))
    return bytes(_exactly(connection, length))


def _exactly(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view, filled = memoryview(data), 0
    while filled < size:
        count = connection.recv_into(view[filled:])
        if count == 0:
            raise EOFError("the other side is gone")
        filled += count
    view.release()
    return data
