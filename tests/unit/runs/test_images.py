"""Pictures of a record: PNG files beside it, each once; the very ids and pixels come back, and a missing or foreign file is said."""

import base64
import gc
import json
import os
from pathlib import Path

import numpy as np
import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from tether.cli.main import app
from tether.core.enums import FinishReason, StopReason
from tether.core.errors import BadInput
from tether.core.images import Image, find_runs, patch_ids
from tether.core.types import Trajectory, Turn
from tether.runs.dashboard.app import make_app
from tether.runs.dashboard.catalogue import Catalogue
from tether.runs.images import EmbeddedPictures, image_path, image_size, named, read_image, write_images
from tether.runs.reasoning_view import turn_views
from tether.runs.report import write_report
from tether.runs.schema import (
    StepRecord,
    conversation_record,
    images_of,
    read_conversation,
    recorded_context,
    recorded_digests,
    trajectory_record,
)
from tether.runs.store import RunStore


def picture(shade: int) -> Image:
    pixels = np.full((8, 12, 3), shade, dtype=np.uint8)
    pixels[2:4, 3:5] = 255 - shade
    return Image.of(pixels)


def seen(*images: Image) -> Trajectory:
    """An episode whose one turn is shown these: two patches, a row break among the tokens, two more patches."""
    ids: list[int] = [1]
    for image in images:
        patches = patch_ids(image.digest, 4)
        ids += [7, *patches[:2], 9, *patches[2:], 8]
    shown = "".join(f"{image.marker}\n" for image in images) + "Go."
    turn = Turn(tuple(ids), (5, 6), (-0.5, -0.25), FinishReason.STOP_TEXT, " a </think>", (0, 1), observation=shown, images=images)
    return Trajectory(0, 0, 3, [turn], StopReason.SUCCESS, True, env="frozen_lake")


def test_ids_and_pixels_come_back_and_each_picture_is_written_once(tmp_path: Path) -> None:
    red, blue = picture(10), picture(200)
    first, second = seen(red, blue), seen(blue)
    store = RunStore.create(tmp_path / "run", "", {})
    records = [trajectory_record(each, 1, "train", True, placeholder=77) for each in (first, second)]
    store.append_trajectories(records, images=images_of([first, second]))
    stamp = image_path(store.folder, blue.digest).stat().st_mtime_ns
    store.append_trajectories([{**records[1], "step": 2}], images=images_of([second]))
    assert image_path(store.folder, blue.digest).stat().st_mtime_ns == stamp
    assert sorted(path.name for path in (store.folder / "images").iterdir()) == sorted([red.file_name, blue.file_name])
    store.sync()
    wanted = [each.turns[0].context_ids for each in (first, second)]
    pixels = {image.digest: image.pixels.copy() for image in (red, blue)}
    del red, blue, first, second
    gc.collect()
    read = [record["turns"][0] for record in RunStore.open(store.folder).trajectories(1)]
    assert read[0]["context_ids"] == [1, *[7, 77, 77, 9, 77, 77, 8] * 2]
    assert [recorded_context(turn) for turn in read] == wanted
    for digest in recorded_digests(read[0]):
        assert np.array_equal(read_image(store.folder, digest).pixels, pixels[digest])
    assert image_size(store.folder, digest) == (12, 8)
    assert image_size(store.folder, "0" * 12) is None


def test_a_record_without_pictures_is_what_it_was() -> None:
    (turn,) = trajectory_record(seen(), 1, "train", True)["turns"]
    assert "images" not in turn and turn["context_ids"] == [1] and recorded_context(turn) == (1,)
    assert "images" not in conversation_record(seen())["turns"][0]


def test_a_missing_and_a_foreign_picture_are_said(tmp_path: Path) -> None:
    red, blue = picture(10), picture(200)
    with pytest.raises(BadInput, match=rf"the picture '.*images/{red.digest}\.png' of the record is missing; copy the folder images"):
        read_image(tmp_path, red.digest)
    write_images(tmp_path, [red])
    image_path(tmp_path, red.digest).write_bytes(blue.png)
    with pytest.raises(BadInput, match="is another picture than the one that was recorded"):
        read_image(tmp_path, red.digest)
    image_path(tmp_path, red.digest).write_bytes(b"\x89PNG broken")
    with pytest.raises(BadInput, match="cannot be read as an image"):
        read_image(tmp_path, red.digest)
    with pytest.raises(BadInput, match="is not the digest of an image"):
        image_path(tmp_path, "../../secret")


def test_no_link_is_followed(tmp_path: Path) -> None:
    red = picture(10)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "record").mkdir()
    (tmp_path / "record" / "images").symlink_to(elsewhere)
    with pytest.raises(BadInput, match="symbolic link"):
        write_images(tmp_path / "record", [red])
    assert not list(elsewhere.iterdir())
    (elsewhere / red.file_name).write_bytes(red.png)
    with pytest.raises(BadInput, match="symbolic link"):
        read_image(tmp_path / "record", red.digest)


def test_an_empty_file_that_a_power_cut_left_is_written_again(tmp_path: Path) -> None:
    red = picture(10)
    write_images(tmp_path, [red])
    os.truncate(image_path(tmp_path, red.digest), 0)
    assert write_images(tmp_path, [red]) and read_image(tmp_path, red.digest) is red


@pytest.mark.parametrize(
    "images",
    [
        [[5, 2, "0123456789ab", 0]],
        [[-1, 1, "0123456789ab", 0]],
        [[0, 1, "no", 0]],
        [[0, 1, "0123456789ab", 2**14]],
        [3],
        [[0, 0, "0" * 12, 0]],
    ],
)
def test_places_that_do_not_fit_are_refused(images: list[object]) -> None:
    with pytest.raises(BadInput, match="expected \\[start, length, digest, patch\\] within 3 context ids"):
        recorded_context({"context_ids": [1, 2, 3], "images": images})


def test_a_conversation_keeps_its_pictures(tmp_path: Path) -> None:
    episode = seen(picture(10))
    write_images(tmp_path, images_of([episode]))
    record = json.loads(json.dumps(conversation_record(episode)))
    again = read_conversation(record, lambda digest: read_image(tmp_path, digest))
    assert again.turns[0].images == episode.turns[0].images and again.turns[0].observation == episode.turns[0].observation
    assert not find_runs(again.turns[0].context_ids)


# ----------------------------------------------------------------------------------------------------------------- for people


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two groups that see different pictures, of which the second's file is missing."""
    episodes = [seen(picture(10)), seen(picture(200))]
    episodes[1].group, episodes[1].seed = 1, 4
    store = RunStore.create(tmp_path / "runs" / "a", "{}", {})
    store.append_trajectories([trajectory_record(each, 1, "train", True) for each in episodes], images=images_of(episodes))
    store.append(StepRecord(1, {"rollout/success": 1.0}))
    store.close()
    image_path(store.folder, picture(200).digest).unlink()
    return store.folder


def test_the_report_shows_what_the_agent_saw(run: Path, tmp_path: Path) -> None:
    page = write_report([RunStore.open(run)], tmp_path / "report.html").read_text()
    red, blue = picture(10), picture(200)
    assert f'src="data:image/png;base64,{base64.b64encode(red.png).decode()}" alt="what the agent saw: picture {red.digest}"' in page
    assert f"[image {blue.digest} missing]" in page and "image:" not in page.split("<body", 1)[1].replace("data:image", "")


def test_pictures_of_a_page_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = Image.of(np.random.default_rng(0).integers(0, 255, (600, 300, 3), dtype=np.uint8))
    write_images(tmp_path, [large, picture(10)])
    monkeypatch.setattr("tether.runs.images.MOST_EMBEDDED", 1000)
    pictures = EmbeddedPictures(tmp_path)
    shown = pictures(large.digest)
    assert shown.size == (300, 600) and Image.read(base64.b64decode(shown.source.partition(",")[2])).pixels.shape == (256, 128, 3)
    assert pictures(large.digest) is shown and pictures(picture(10).digest).source == "", "there is no more room"


def test_the_dashboard_serves_pictures_of_a_run_and_nothing_else(run: Path) -> None:
    red, blue = picture(10), picture(200)
    client = TestClient(make_app(Catalogue(run.parent), lambda *_: None), base_url="http://127.0.0.1", client=("127.0.0.1", 50000))
    found = client.get("/image", params={"run": "a", "digest": red.digest})
    assert found.status_code == 200 and found.headers["content-type"] == "image/png" and found.content == red.png
    assert client.get("/image", params={"run": "a", "digest": blue.digest}).status_code == 404
    for name in ("../../run.json", "..", f"{red.digest}.png", ""):
        answer = client.get("/image", params={"run": "a", "digest": name})
        assert answer.status_code == 400 and "is not the digest of an image" in answer.text
    image_path(run, blue.digest).write_text("<script>alert(1)</script>")
    assert client.get("/image", params={"run": "a", "digest": blue.digest}).status_code == 404, "no PNG"
    image_path(run, blue.digest).unlink()
    image_path(run, blue.digest).symlink_to(image_path(run, red.digest))
    assert client.get("/image", params={"run": "a", "digest": blue.digest}).status_code == 404, "no link is followed"
    for address in ("/trajectory?run=a&key=1/train/0/0", "/groups?run=a&step=1"):
        page = client.get(address).text
        assert (
            f'src="/image?run=a&amp;digest={red.digest}" alt="what the agent saw: picture {red.digest}"' in page and red.marker not in page
        )
    listed = client.get("/trajectories", params={"run": "a", "q": "Go."}).text
    assert f"[image {red.digest}]" in listed and "&lt;image:" not in listed


def test_show_names_the_pictures(run: Path) -> None:
    result = CliRunner().invoke(app, ["show", str(run), "--turns"])
    assert result.exit_code == 0, result.output
    words = " ".join(result.output.split())
    assert f"[image {picture(10).digest} 12 x 8]" in words and f"images/{picture(10).digest}.png" in words.replace(" ", "")
    assert f"[image {picture(200).digest} missing]" in words and "<image:" not in words


def test_the_context_names_pictures_in_the_place_of_their_patches() -> None:
    class Words:
        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            return " ".join(map(str, ids))

    record = trajectory_record(seen(picture(10)), 1, "train", True, placeholder=77)
    del record["turns"][0]["response_ids"]
    (turn,) = turn_views(record, named(), Words())
    assert turn.context == f"1 7[image {picture(10).digest}]98" and turn.observation == f"[image {picture(10).digest} missing]\nGo."
