"""Run folders on object storage: what lies at an address such as s3://bucket/run, and how a folder of this machine is made of it, through fsspec.

    run.json, config.yaml, report.html, images/...      as in a run folder
    metrics.jsonl/000000, 000001, ...                   files that are appended to, in parts of PART bytes: the last is written again until it is full
    checkpoints/step_000020/..., best_000020/...        files first, manifest.json last: without it, or with other sizes than it says, nothing is there
    owner.json                                          who writes the run, moved every few seconds

A run is written to a folder below TETHER_CACHE (`local_folder`), which mirror.py uploads. `fetched` gives whoever reads or resumes a run that folder,
brought up to date. `state.json` beside it holds the token of the owner whose files it has: with another token at the address it is another attempt's,
and is fetched anew.
"""

import hashlib
import json
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tether.core.child import this_attempt
from tether.core.config import cache_folder
from tether.core.errors import BadInput, MissingDependency, StorageError
from tether.core.text import shortened
from tether.runs.checkpoints import BEST, BEST_FACTS, MANIFEST, best_checkpoint, checkpoint_name, list_checkpoints, step_of
from tether.runs.lock import STALE_SECONDS, RunLocked, is_alive, lock_holder

EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az", "abfs": "az", "abfss": "az", "memory": "", "file": ""}
"""The schemes of addresses, and the extra that installs what they need."""
PART = 8 * 2**20
APPENDED = ("metrics.jsonl", "timings.jsonl", "trajectories.jsonl")
ABOUT, CHECKPOINTS, OWNER, STATE = "run.json", "checkpoints", "owner.json", "state.json"
_ADDRESS = re.compile(rf"({'|'.join(EXTRAS)}):/+(\S.*?)/*")
_PLACE = re.compile(rf"{CHECKPOINTS}/((?:step|{BEST})_(\d+))/(.+)")


def address_of(place: Path | str | None) -> str | None:
    """The address that a run is said to lie at; None for a folder. A Path has made one slash of the two.

    >>> address_of(Path("s3://bucket/run/"))
    's3://bucket/run'
    """
    found = _ADDRESS.fullmatch(str(place))
    return f"{found[1]}://{'/' * (found[1] == 'file')}{found[2]}" if found else None


def local_folder(place: Path | str) -> Path:
    """The folder of this machine where the run at an address is written, and where copies of it lie; a folder is itself."""
    address = address_of(place)
    if address is None:
        return Path(place)
    name = re.sub(r"\W+", "-", address.rpartition("/")[2])
    return cache_folder("runs") / f"{name}-{hashlib.sha256(address.encode()).hexdigest()[:12]}" / "run"


def fetched(place: Path | str, *, weights: bool = True, to_write: bool = False) -> Path:
    """The folder of a run. One at an address is brought up to date first, with its newest and its best checkpoint where `weights` are needed.

    `to_write`: another process that writes the run is waited for, and RunLocked where it does not end.
    """
    address, local = address_of(place), local_folder(place)
    if address is None or lock_holder(local):  # what is being written here is ahead of the address
        return local
    try:
        remote = Remote(address)
        if to_write:
            remote.wait_for_owner()
        remote.pull(local, weights)
    except StorageError as error:
        if this_attempt().number > 1:
            raise
        raise BadInput(f"{error}; check the address, the credentials and the network") from error
    if not to_write and not (local / ABOUT).is_file():
        raise BadInput(f"there is no run at '{address}'; check the address")
    return local


def read_state(local: Path) -> dict[str, Any]:
    """What `state.json` says about a folder."""
    try:
        found = json.loads((local.parent / STATE).read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_state(local: Path, token: str | None, *, writes: bool) -> None:
    local.parent.mkdir(parents=True, exist_ok=True)
    (local.parent / STATE).write_text(json.dumps({"token": token, "writes": writes}), encoding="utf-8")


class Remote:
    """The files at an address."""

    def __init__(self, address: str) -> None:
        self.address = address
        scheme = address.partition("://")[0]
        try:
            import fsspec
        except ImportError as error:
            raise MissingDependency(f"'{address}' needs fsspec; install it with: pip install 'tether-agents[{EXTRAS[scheme]}]'") from error
        try:
            self.fs, self._root = fsspec.core.url_to_fs(address, **({"auto_mkdir": True} if scheme == "file" else {}))
        except ImportError as error:
            raise MissingDependency(
                f"'{address}' needs a package for {scheme}://; install it with: pip install 'tether-agents[{EXTRAS[scheme]}]'"
            ) from error

    def path(self, name: str) -> str:
        return f"{self._root}/{name}"

    @contextmanager
    def reached(self, doing: str) -> Iterator[None]:
        """A block that asks the storage; what fails there, whatever the libraries of the storages raise, is a StorageError."""
        try:
            yield
        except Exception as error:
            said = shortened(" ".join(f"{type(error).__name__}: {error}".split()), 200)
            raise StorageError(f"cannot {doing} '{self.address}' ({said})") from error

    def sizes(self) -> dict[str, int]:
        """The names of all files, and their sizes; names that lead out of a folder, which a storage may hold, are none of a run."""
        with self.reached("list"):
            self.fs.invalidate_cache()
            try:
                found: Mapping[str, Any] = self.fs.find(self._root, detail=True)
            except FileNotFoundError:
                return {}
        sizes = {name.removeprefix(self._root).lstrip("/"): int(entry["size"]) for name, entry in found.items()}
        return {name: size for name, size in sizes.items() if ".." not in name.split("/")}

    def read(self, name: str) -> bytes | None:
        """The content of a file; None where there is none."""
        with self.reached("read"):
            try:
                return bytes(self.fs.cat_file(self.path(name)))
            except FileNotFoundError:
                return None

    def read_object(self, name: str) -> dict[str, Any]:
        """The object in a JSON file; empty where there is none, or something else."""
        try:
            found = json.loads(self.read(name) or b"{}")
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def write(self, name: str, content: bytes) -> None:
        with self.reached("write to"):
            self.fs.pipe_file(self.path(name), content)

    def remove(self, names: list[str]) -> None:
        """Remove files; a manifest before what it vouches for."""
        with self.reached("remove from"):
            for name in sorted(names, key=lambda name: not name.endswith(MANIFEST)):
                self.fs.rm_file(self.path(name))

    # -------------------------------------------------------------------------------------------------------- checkpoints

    def whole(self, sizes: Mapping[str, int]) -> dict[str, dict[str, Any]]:
        """The checkpoints that count, such as step_000020 and best_000020, by age, each with its manifest."""
        found: dict[str, dict[str, Any]] = {}
        for name in sorted({match[1] for path in sizes if (match := _PLACE.fullmatch(path)) and match[3] == MANIFEST}):
            manifest = self.read_object(f"{CHECKPOINTS}/{name}/{MANIFEST}")
            files = manifest.get("files") or {}
            if files and all(sizes.get(f"{CHECKPOINTS}/{name}/{file}") == entry.get("bytes") for file, entry in files.items()):
                found[name] = manifest
        return found

    # ----------------------------------------------------------------------------------------------------------- a copy here

    def wait_for_owner(self) -> None:
        """Until nobody writes the run; a record that does not move was left behind."""
        owner = self.read_object(OWNER)
        if owner.get("host") == socket.gethostname() and not is_alive(owner):
            return
        end = time.monotonic() + STALE_SECONDS
        while owner and not owner.get("ended") and time.monotonic() < end:
            time.sleep(1.0)
            now = self.read_object(OWNER)
            if now != owner and not now.get("ended"):
                raise RunLocked(
                    f"the run at '{self.address}' is being written by process {now.get('pid')} on {str(now.get('host'))[:64]}; wait for it or stop "
                    "it, or choose another --out"
                )
            owner = now

    def pull(self, local: Path, weights: bool) -> None:
        """Bring a folder of this machine up to date. What is here and not there stays: an upload may have been cut off."""
        sizes = self.sizes()
        if ABOUT not in sizes:
            return
        token, state = self.read_object(OWNER).get("token"), read_state(local)
        if state.get("token") != token:
            shutil.rmtree(local, ignore_errors=True)
        written_here = state.get("token") == token and bool(state.get("writes"))
        (local / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
        for name in APPENDED:
            self._append(local / name, [sizes[part] for part in _parts(name, sizes)])
        plain = [name for name in sizes if name.partition("/")[0] not in (*APPENDED, CHECKPOINTS, OWNER)]
        for name in sorted(plain, key=lambda name: name == ABOUT):  # what makes it a run comes last
            if not (local / name).exists() or not (written_here or name.startswith("images/")):
                self._get(name, local / name)
        if weights:
            self._pull_checkpoints(local / CHECKPOINTS, sizes)
        write_state(local, token, writes=written_here)

    def _append(self, path: Path, sizes: list[int]) -> None:
        """Add what a file that is appended to lacks."""
        size = path.stat().st_size if path.exists() else 0
        if size >= sum(sizes):
            return
        with path.open("r+b" if path.exists() else "wb") as file:
            file.truncate(size // PART * PART)
            file.seek(0, 2)
            for number in range(size // PART, len(sizes)):
                file.write(self.read(part_name(path.name, number)) or b"")

    def _get(self, name: str, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with self.reached("read"), tempfile.TemporaryDirectory(dir=path.parent, prefix=".fetched-") as folder:
            draft = Path(folder) / "file"
            self.fs.get_file(self.path(name), str(draft))
            draft.replace(path)

    def _pull_checkpoints(self, folder: Path, sizes: Mapping[str, int]) -> None:
        """The newest checkpoint and the best weights, where they are not here."""
        whole = self.whole(sizes)
        steps, bests = ([name for name in whole if name.startswith(kind)] for kind in ("step_", f"{BEST}_"))
        here = max((step_of(path) for path in list_checkpoints(folder)), default=-1)
        if steps and int(steps[-1][5:]) > here:
            self._pull_folder(steps[-1], whole[steps[-1]], folder / steps[-1])
        best = best_checkpoint(folder)
        if bests and (best is None or f"{BEST}_{best.step:06d}" not in bests):
            shutil.rmtree(folder / BEST, ignore_errors=True)
            self._pull_folder(bests[-1], whole[bests[-1]], folder / BEST, BEST_FACTS)

    def _pull_folder(self, name: str, manifest: Mapping[str, Any], target: Path, *more: str) -> None:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".unfinished-") as folder:
            draft = Path(folder) / target.name
            for file in (*manifest["files"], *more, MANIFEST):
                self._get(f"{CHECKPOINTS}/{name}/{file}", draft / file)
            draft.rename(target)


def part_name(name: str, number: int) -> str:
    return f"{name}/{number:06d}"


def _parts(name: str, sizes: Mapping[str, int]) -> list[str]:
    """The parts of a file up to the first that is missing or not full, which is the last."""
    found: list[str] = []
    while (part := part_name(name, len(found))) in sizes and (not found or sizes[found[-1]] == PART):
        found.append(part)
    return found


def appended_bytes(name: str, sizes: Mapping[str, int]) -> int:
    """How much of a file that is appended to lies there."""
    return sum(sizes[part] for part in _parts(name, sizes))


def place_of(path: str) -> tuple[str, int] | None:
    """Folder and step of a checkpoint's file. Example: ("step_000020", 20) of "checkpoints/step_000020/state.pt"."""
    match = _PLACE.fullmatch(path)
    return (match[1], int(match[2])) if match else None


def remote_name(step: int, *, best: bool = False) -> str:
    """The folder of a checkpoint at an address."""
    return f"{BEST}_{step:06d}" if best else checkpoint_name(step)
