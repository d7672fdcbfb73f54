"""The upload of a run folder to object storage while the run writes it (remote.py has the layout and the way back).

A thread looks at the folder about once a second and uploads what is new: records first, then the newest checkpoint, its manifest last, and only then
are older ones removed there. So whatever moment a kill comes, the newest whole checkpoint at the address has its records. A checkpoint is uploaded from
links to its files, so that the run may delete it meanwhile; where several were written during an upload, the newest counts. What fails is tried again
with growing delays. A second thread moves `owner.json`: a run that was taken over by another process ends at its next write.
"""

import json
import logging
import math
import secrets
import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tether.core.config import load_yaml
from tether.core.errors import CheckpointError, StorageError
from tether.runs.checkpoints import BEST, BEST_FACTS, MANIFEST, best_checkpoint, link_folder, list_checkpoints, step_of, written_sums
from tether.runs.images import IMAGES
from tether.runs.index import INDEX
from tether.runs.lock import LOCK, own_record
from tether.runs.remote import (
    ABOUT,
    APPENDED,
    CHECKPOINTS,
    OWNER,
    PART,
    Remote,
    appended_bytes,
    part_name,
    place_of,
    remote_name,
    write_state,
)

POLL_SECONDS = 1.0
BEAT_SECONDS = 10.0
FIRST_DELAY, LONGEST_DELAY = 1.0, 60.0
END_SECONDS = 600.0
"""How long uploads that fail are tried again after the run has ended."""
QUIET_SECONDS = 0.5
_LOG = logging.getLogger(__name__)


class Mirror:
    """Uploads one run folder to an address, from now until `close`."""

    def __init__(self, folder: Path, address: str) -> None:
        """Nobody else may write the run: see `Remote.wait_for_owner`."""
        self.address, self._folder, self._remote = address, folder, Remote(address)
        self._staged = folder.parent / "uploading"
        self._token = secrets.token_hex(8)
        self._beat()
        write_state(folder, self._token, writes=True)
        sizes = self._remote.sizes()
        self._sent: dict[str, int] = {name: appended_bytes(name, sizes) for name in APPENDED}
        self._stamps: dict[str, tuple[int, int]] = {}
        """Sizes and times of files that were uploaded whole."""
        self._images = {name for name in sizes if name.startswith(f"{IMAGES}/")}
        self._manifests = self._remote.whole(sizes)
        self._is_lost = self._is_done = False
        self._problem = ""
        self._ending, self._given_up, self._passes = threading.Event(), threading.Event(), threading.Lock()
        self._ends_at = math.inf
        self._uploader = threading.Thread(target=self._upload, name="upload", daemon=True)
        self._uploader.start()
        threading.Thread(target=self._keep_owning, name="owner", daemon=True).start()
        _LOG.warning("the run is written to '%s' and uploaded to '%s'", folder, address)

    def check(self) -> None:
        """Raise where another process has taken the run over."""
        if self._is_lost:
            raise StorageError(
                f"the run at '{self.address}' was taken over by another process, which continues it; this one ends, and uploads nothing more"
            )

    def close(self) -> None:
        """Wait until everything is uploaded, and say how long that took; StorageError where it cannot be."""
        begun = time.monotonic()
        self._ends_at = begun + END_SECONDS
        self._ending.set()
        here = f"the run is whole in '{self._folder}', and --resume on this machine continues from there and uploads the rest"
        try:
            while self._uploader.is_alive():
                self._uploader.join(0.1)
        except KeyboardInterrupt:
            _LOG.warning("the upload to '%s' was broken off after %.0f s; %s", self.address, time.monotonic() - begun, here)
            raise
        finally:
            self._given_up.set()
        self.check()
        if not self._is_done:
            raise StorageError(f"{self._problem or 'the upload failed'}; {here}")
        self._beat(ended=True)
        if time.monotonic() - begun > QUIET_SECONDS:
            _LOG.warning("uploaded to '%s', %.1f s after the run had ended", self.address, time.monotonic() - begun)

    def discard(self) -> None:
        """Take back what was uploaded, for a run that could not start."""
        self._given_up.set()
        self._ending.set()
        self._uploader.join()
        self._remote.remove(list(self._remote.sizes()))

    # ------------------------------------------------------------------------------------------------------------- threads

    def _upload(self) -> None:
        delay, failing_since = 0.0, 0.0
        while not self._given_up.is_set():
            self._given_up.wait(delay) if delay else self._ending.wait(POLL_SECONDS)
            is_last = self._ending.is_set()
            try:
                self.upload()
            except OSError as error:
                self._problem = f"{error}"
                failing_since = failing_since or time.monotonic()
                if time.monotonic() > self._ends_at or self._given_up.is_set():
                    return
                delay = min(LONGEST_DELAY, 2 * delay or FIRST_DELAY)
                _LOG.warning("%s; tried again in %.0f s", error, delay)
                continue
            if failing_since:
                _LOG.warning("uploads to '%s' work again, after %.0f s", self.address, time.monotonic() - failing_since)
            delay = failing_since = 0.0
            if is_last:
                self._is_done = True
                return

    def _keep_owning(self) -> None:
        while not self._given_up.wait(BEAT_SECONDS):
            try:
                if self._remote.read_object(OWNER).get("token") != self._token:
                    self._is_lost = True
                    self._given_up.set()
                    return
                self._beat()
            except StorageError:  # the uploads say so
                continue

    def _beat(self, *, ended: bool = False) -> None:
        owner = {**own_record(), "token": self._token, "beat": time.time(), "ended": ended}
        self._remote.write(OWNER, json.dumps(owner).encode())

    # -------------------------------------------------------------------------------------------------------------- uploads

    def upload(self) -> None:
        """Upload everything that is new."""
        with self._passes:
            checkpoints = self._stage()
            self._upload_images()  # before the episodes that name them
            for name in APPENDED:
                self._upload_appended(name)
            self._upload_plain()
            for name, staged in checkpoints.items():
                self._upload_checkpoint(name, staged)
            shutil.rmtree(self._staged, ignore_errors=True)

    def _stage(self) -> dict[str, Path]:
        """Links to the newest checkpoint and the best weights that are not uploaded, by their names at the address."""
        shutil.rmtree(self._staged, ignore_errors=True)
        folder, found = self._folder / CHECKPOINTS, dict[str, Path]()
        steps = list_checkpoints(folder)
        try:
            best = best_checkpoint(folder)
        except CheckpointError:  # it is being replaced
            best = None
        wanted = {remote_name(step_of(steps[-1])): steps[-1]} if steps else {}
        if best is not None:
            wanted[remote_name(best.step, best=True)] = folder / BEST
        for name, source in wanted.items():
            staged = self._staged / name
            try:
                if self._files().get(name) == (sums := written_sums(source)) or not sums:
                    continue
                self._staged.mkdir(exist_ok=True)
                link_folder(source, staged)
            except (FileNotFoundError, StorageError):  # the run has just deleted or replaced it: the next pass sees what is there
                shutil.rmtree(staged, ignore_errors=True)
                continue
            found[name] = staged
        return found

    def _upload_images(self) -> None:
        """Pictures, which never change."""
        folder = self._folder / IMAGES
        for path in folder.iterdir() if folder.is_dir() else ():
            name = f"{IMAGES}/{path.name}"
            if name not in self._images and not path.name.startswith("."):
                self._write(name, path.read_bytes())
                self._images.add(name)

    def _upload_plain(self) -> None:
        """Files that are written whole, run.json last: it makes the address a run."""
        paths = [path for path in self._folder.iterdir() if path.is_file() and not path.name.startswith((".", INDEX))]
        for path in sorted(paths, key=lambda path: path.name == ABOUT):
            if path.name in (*APPENDED, LOCK):
                continue
            stamp = path.stat().st_size, path.stat().st_mtime_ns  # before it is read: it may be replaced at any time
            if self._stamps.get(path.name) != stamp:
                self._write(path.name, path.read_bytes())
                self._stamps[path.name] = stamp

    def _upload_appended(self, name: str) -> None:
        path = self._folder / name
        size = path.stat().st_size if path.exists() else 0
        if size == self._sent[name]:
            return
        with path.open("rb") as file:
            for number in range(self._sent[name] // PART, -(-size // PART)):
                file.seek(number * PART)
                content = file.read(min(PART, size - number * PART))
                self._write(part_name(name, number), content)
                self._sent[name] = number * PART + len(content)

    def _upload_checkpoint(self, name: str, staged: Path) -> None:
        base, sums = f"{CHECKPOINTS}/{name}", written_sums(staged)
        there = self._remote.sizes()
        self._remote.remove([path for path in there if path == f"{base}/{MANIFEST}"])  # of another attempt
        known = {
            entry["sha256"]: f"{CHECKPOINTS}/{other}/{file}" for other, files in self._files().items() for file, entry in files.items()
        }
        for file, entry in sums.items():
            self._check_going()
            with self._remote.reached("write to"):
                if entry["sha256"] in known and known[entry["sha256"]] in there and name.startswith(BEST):
                    self._remote.fs.cp_file(self._remote.path(known[entry["sha256"]]), self._remote.path(f"{base}/{file}"))
                else:
                    self._remote.fs.put_file(str(staged / file), self._remote.path(f"{base}/{file}"))
        if (staged / BEST_FACTS).exists():
            self._write(f"{base}/{BEST_FACTS}", (staged / BEST_FACTS).read_bytes())
        self._write(f"{base}/{MANIFEST}", (staged / MANIFEST).read_bytes())
        self._manifests[name] = {"files": sums}
        self._remove_older(name)

    def _files(self) -> dict[str, Mapping[str, Any]]:
        return {name: manifest.get("files") or {} for name, manifest in self._manifests.items()}

    def _remove_older(self, name: str) -> None:
        """Remove what the checkpoint just uploaded makes superfluous, and what an upload that was cut off left."""
        kind = name.partition("_")[0]
        keep = 1 if kind == BEST else self._keep()
        whole = sorted(other for other in self._manifests if other.partition("_")[0] == kind)
        stay = {name, *whole[-keep:]}
        gone = [
            path for path in self._remote.sizes() if (place := place_of(path)) and place[0].startswith(f"{kind}_") and place[0] not in stay
        ]
        self._remote.remove(gone)
        for other in set(whole) - stay:
            del self._manifests[other]

    def _keep(self) -> int:
        """`checkpoint.keep` of the run."""
        settings = load_yaml((self._folder / "config.yaml").read_text(encoding="utf-8")) or {}
        return int((settings.get("checkpoint") or {}).get("keep") or 1)

    def _write(self, name: str, content: bytes) -> None:
        self._check_going()
        self._remote.write(name, content)

    def _check_going(self) -> None:
        if self._given_up.is_set() and not self._is_done:
            raise StorageError(f"the upload to '{self._remote.address}' was given up")
