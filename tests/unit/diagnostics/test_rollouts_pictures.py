"""Rollouts with pictures: the shapes of OpenAI, Anthropic, verl, TRL and Tether's own records; what is broken is a bad record with its place."""

import base64
import dataclasses
import json
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pillow
from tests.unit.models.sighted import write_model

import tether
from tether.core.enums import FinishReason, StopReason
from tether.core.errors import BadInput
from tether.core.images import Image, image_digests, patch_ids
from tether.core.types import Trajectory, Turn
from tether.diagnostics.audit import AuditScorer
from tether.diagnostics.audit.scorer import loaded_scorer
from tether.diagnostics.rollouts import Rollout, open_rollouts
from tether.models.chat import ChatFormat
from tether.models.policy import Policy
from tether.runs.schema import images_of, trajectory_record
from tether.runs.store import RunStore


def picture(shade: int, size: int = 8) -> Image:
    pixels = np.full((size, size, 3), shade, dtype=np.uint8)
    pixels[0] = 255 - shade
    return Image.of(pixels)


RED, BLUE = picture(20), picture(160)
URL = f"data:image/png;base64,{base64.b64encode(RED.png).decode()}"
ANSWER = "<think>left of it</think> Left"


def read(*rows: dict[str, Any], **options: Any) -> list[Rollout]:
    return list(open_rollouts(list(rows), **options))


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "image_url", "image_url": {"url": URL}}, {"type": "text", "text": "Go."}],
        [{"type": "input_image", "image_url": URL}, {"type": "input_text", "text": "Go."}],
        [
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": URL.partition(",")[2]}},
            {"type": "text", "text": "Go."},
        ],
        [{"type": "image", "image": {"bytes": RED.png, "path": None}}, {"type": "text", "text": "Go."}],
    ],
)
def test_parts_of_messages(content: list[dict[str, Any]]) -> None:
    for row in (
        {"messages": [{"role": "user", "content": content}], "response": ANSWER},
        {"request": {"messages": [{"role": "user", "content": content}]}, "response": {"choices": [{"message": {"content": ANSWER}}]}},
        {
            "request": json.dumps(
                {"messages": [{"role": "user", "content": content}]}, default=lambda data: base64.b64encode(data).decode()
            ),
            "response": ANSWER,
        },
    ):
        (found,) = read(row)
        assert (
            found.messages == [{"role": "user", "content": f"{RED.marker}Go."}]
            and found.images == (RED,)
            and found.reasoning == "left of it"
        )


def test_trl_with_a_column_of_images(tmp_path: Path) -> None:
    (tmp_path / "blue.png").write_bytes(BLUE.png)
    parts = [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "image"}]
    rows = [
        {"prompt": [{"role": "user", "content": parts}], "images": ["blue.png", URL.partition(",")[2]]},
        {"prompt": [{"role": "user", "content": parts}], "images": [{"bytes": None, "path": "blue.png"}, URL]},
        {"prompt": [{"role": "user", "content": "and"}], "images": ["blue.png"]},
    ]
    lines = [
        {"step": 1, **row, "completion": [{"role": "assistant", "content": ANSWER}], "accuracy": 1.0, "advantage": 0.0} for row in rows
    ]
    (tmp_path / "completions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    reader = open_rollouts(tmp_path / "completions.jsonl")
    found = list(reader)
    assert reader.format.name == "trl" and [rollout.reward for rollout in found] == [1.0] * 3
    assert [rollout.messages[0]["content"] for rollout in found if rollout.messages] == [
        f"{BLUE.marker}and{RED.marker}",
        f"{BLUE.marker}and{RED.marker}",
        f"{BLUE.marker}and",
    ]
    assert found[0].group == found[1].group != found[2].group, "equal pictures are equal prompts, however they are written"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("<image>Go.", f"{RED.marker}Go."),
        ("user\n<|vision_start|><|image_pad|><|image_pad|><|vision_end|>Go.", f"user\n<|vision_start|>{RED.marker}<|vision_end|>Go."),
        ("user\nGo.", f"{RED.marker}user\nGo."),
    ],
)
def test_verl(text: str, shown: str) -> None:
    (found,) = read({"input": text, "output": ANSWER, "score": 1.0, "step": 3, "multi_modal_data": {"image": [{"bytes": RED.png}]}})
    assert found.prompt == shown and found.images == (RED,)
    (chat,) = read({"prompt": [{"role": "user", "content": text}], "response": ANSWER, "images": [RED.pixels]})
    assert chat.messages == [{"role": "user", "content": shown}]
    assert read({"input": text, "output": ANSWER, "score": 1.0, "images": [Pillow.fromarray(RED.pixels)]})[0].images == (RED,)


def test_text_alone() -> None:
    broken = {"type": "image_url", "image_url": {"url": "https://elsewhere/a.png"}}
    row = {"messages": [{"role": "user", "content": [broken, {"type": "text", "text": "Go."}]}], "response": ANSWER}
    (found,) = read(row, text_only=True)
    assert found.messages == [{"role": "user", "content": "Go."}] and found.images == ()
    untouched = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Go."}]}],
        "response": ANSWER,
        "image": "ubuntu:22.04",
        "images": 2,
    }
    assert read(untouched)[0].messages == untouched["messages"], "the image of a container is no picture"


def bomb() -> bytes:
    """A PNG of a few bytes that claims 40,000 x 40,000 pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", 40000, 40000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (base64.b64encode(RED.png[:40]).decode(), "cannot be read as an image"),
        ({"bytes": bomb()}, "40000 x 40000 pixels|decompression bomb"),
        ("missing.png", "cannot be read .no such file or directory.; paths begin at the folder of the file"),
        ("https://elsewhere/a.png", "nothing is fetched"),
        ("~nobody-at-all/a.png", "no such file or directory"),
        ("data:image/png,raw", "not base64"),
        (7, "expected a path, a data URL, base64 or bytes"),
        ({"format": "png"}, "expected bytes, path or url"),
    ],
)
def test_what_cannot_be_seen_is_a_bad_record(source: Any, words: str) -> None:
    rows = [{"prompt": f"{n}<image>", "response": ANSWER, "images": [RED.png if n else source]} for n in range(3)]
    with pytest.raises(BadInput, match=rf"row 1: .*({words})"):
        read(*rows)
    reader = open_rollouts(rows, bad_lines="skip")
    assert len(list(reader)) == 2 and reader.tally.num_bad == 1


def test_places_and_images_must_agree() -> None:
    row = {"step": 1, "prompt": [{"role": "user", "content": [{"type": "image"}]}], "completion": ANSWER}
    with pytest.raises(
        BadInput, match=r"prompt\[0\].content\[0\] is the place of an image, and the record has none; add them as a column images"
    ):
        read(row)
    with pytest.raises(BadInput, match="has 1 more images than places"):
        read({"prompt": "<image> Go.", "response": ANSWER, "images": [RED.png, BLUE.png]})
    with pytest.raises(BadInput, match=r"is the place of an image, and the record has no more of them"):
        read({"prompt": "<image> or <image>", "response": ANSWER, "images": [RED.png]})


# ------------------------------------------------------------------------------------------------------------------ the audit


@pytest.fixture(scope="module")
def sighted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tether.load_model(str(write_model("qwen2_5_vl", tmp_path_factory.mktemp("qwen2_5_vl"))), device="cpu")


def seeing(loaded: Any, looks: bool) -> AuditScorer:
    """The model's own tokens, scored by a table: the reasoning "shade N" is likely where the picture is the Nth; or, where it does not look, everywhere."""
    own = loaded_scorer(loaded, name="eyes")
    names = {picture(10 + 20 * n).digest: n for n in range(6)}
    words = {tuple(own.tokenizer.encode(f"shade {n}", add_special_tokens=False)): n for n in range(6)}

    def score(prompt: Sequence[int], reasoning: Sequence[int]) -> float:
        (digest,) = image_digests(prompt)
        return -0.5 if not looks or names.get(digest) == words[tuple(reasoning)] else -9.0

    return dataclasses.replace(own, scorer=score)


def rows() -> list[dict[str, Any]]:
    parts = [{"type": "image"}, {"type": "text", "text": "What is the shade?"}]
    return [
        {
            "prompt": [{"role": "user", "content": parts}],
            "images": [picture(10 + 20 * n).png],
            "response": f"<think>shade {n}</think>",
            "reward": 1.0,
        }
        for n in range(6)
        for _ in range(4)
    ]


def test_the_audit_swaps_images(sighted: Any) -> None:
    found = tether.audit(rows(), model=seeing(sighted, looks=True), bootstrap=100)
    assert found.information.retrieval_acc == 1.0 and found.verdict.reasons[-1].endswith("it depends on the image.")
    measured = found.document()["windows"][0]["measured"]
    assert measured["images"]["image_prompts"] == 6 and measured["images"]["image_swapped"] > 1
    assert found.windows[0].pairs.prompt_texts[0].count("<image:") == 1
    policy = Policy(sighted.model, sighted.tokenizer)
    chat, shown = ChatFormat(sighted.tokenizer, (), policy.vision), picture(10)
    wanted = chat.encode(chat.rendered([{"role": "user", "content": f"{shown.marker}What is the shade?"}]) + "<think>")
    assert wanted in found.windows[0].pairs.prompts, "as a rollout of the same model would have been shown it"
    blind = tether.audit(rows(), model=seeing(sighted, looks=False), bootstrap=100)
    assert blind.verdict.image_ignored and blind.verdict.headline.endswith("The image is ignored.")


def test_a_model_that_sees_scores_the_pictures(sighted: Any, tmp_path: Path) -> None:
    scorer = loaded_scorer(sighted)
    found = tether.audit(rows(), model=scorer, bootstrap=100, samples=2)
    measured = found.document()["windows"][0]["measured"]["images"]
    assert measured["image_prompts"] == 6 and 0 < abs(measured["image_swapped"]) < 1 and measured["image_blank"] != 0
    kept = [part for parts in scorer.vision._features.values() for part in parts]
    assert kept and not any(part.requires_grad for part in kept), "features that are kept hold no graph"
    page = found.report(tmp_path / "page.html").read_text()
    assert page.count('<img class="seen" src="data:image/png;base64,') == 4 and "&lt;image:" not in page


def test_a_judge_without_eyes(tiny: Any) -> None:
    with pytest.raises(BadInput, match=r"row \d+: the prompt holds images, and .* reads text only; give a --model that sees.*--text-only"):
        tether.audit(rows(), model=tiny, bootstrap=100)
    with pytest.raises(BadInput, match="answer one prompt"):
        tether.audit(rows(), model=tiny, bootstrap=100, text_only=True)


def test_a_run_of_tether(tiny: Any, sighted: Any, tmp_path: Path) -> None:
    store = RunStore.create(tmp_path / "run", "model: {name: tiny}", {})
    opening = tuple(tiny.tokenizer.encode("What is the shade? <think>", add_special_tokens=False))
    episodes = []
    for n in range(6):
        words = tuple(tiny.tokenizer.encode(f"shade {n}", add_special_tokens=False))
        for member in range(4):
            image = picture(10 + 20 * n)
            context = (5, *patch_ids(image.digest, 4), 6, *opening)
            text = f"shade {n}</think>"
            turn = Turn(
                context,
                words,
                (-0.1,) * len(words),
                FinishReason.END_OF_TURN,
                text,
                (0, len(words)),
                observation=image.marker,
                images=(image,),
            )
            episodes.append(Trajectory(n, member, n, [turn], StopReason.SUCCESS, True))
    store.append_trajectories([trajectory_record(t, 1, "train", True, placeholder=9) for t in episodes], images=images_of(episodes))
    store.close()
    wanted = {t.turns[0].context_ids for t in episodes}
    del episodes, turn, image
    found = tether.audit(tmp_path / "run", model=seeing(sighted, looks=True), bootstrap=100)
    assert set(found.windows[0].pairs.prompts) == wanted and found.information.retrieval_acc == 1.0
    digest = next(iter(found.windows[0].pairs.images))
    (tmp_path / "run" / "images" / f"{digest}.png").unlink()
    with pytest.raises(BadInput, match=rf"images/{digest}.png' of the record is missing"):
        tether.audit(tmp_path / "run", model=seeing(sighted, looks=True), bootstrap=100)
    with pytest.raises(BadInput, match="answer one prompt"):
        tether.audit(tmp_path / "run", model=tiny, bootstrap=100, text_only=True)
