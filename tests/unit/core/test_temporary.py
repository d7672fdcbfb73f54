"""Folders for a while: nothing stays, and what a kill left behind is removed by the next."""

import subprocess
import sys
from pathlib import Path

import pytest

from tether.core.temporary import temporary_folder

HOLD = """
import sys, time
from pathlib import Path
from tether.core.temporary import temporary_folder
with temporary_folder("work-", Path(sys.argv[1])) as folder:
    (folder / "weights").write_bytes(bytes(1000))
    print(folder, flush=True)
    time.sleep(120)
"""


def test_what_a_kill_left_is_removed_and_what_lives_is_not(tmp_path: Path) -> None:
    other = tmp_path / "work-of-mine"  # a file is nobody's folder
    other.write_text("x")
    processes = [subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    killed, living = (Path(process.stdout.readline().strip()) for process in processes if process.stdout)
    try:
        processes[0].kill()
        processes[0].communicate()
        assert (killed / "weights").is_file()
        with temporary_folder("work-", tmp_path) as folder:
            assert folder.is_dir() and not killed.exists() and (living / "weights").is_file() and other.is_file()
        assert not folder.exists()
    finally:
        processes[1].kill()
        processes[1].communicate()


def test_it_is_removed_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="stop"), temporary_folder("work-", tmp_path):
        raise ValueError("stop")
    assert not list(tmp_path.iterdir())
