"""Models that see: what Tether samples, recomputes and scores is what transformers computes from pixels, for every family."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.models.sighted import FAMILIES, Talk, logprobs_by_transformers, play, some_pictures, write_model
from transformers import AutoProcessor

from tether.core.errors import BadInput, ModelUnavailable
from tether.core.images import Image, find_runs, image_digests, with_placeholders
from tether.core.protocols import Sampling
from tether.core.seeding import generator
from tether.models.chat import ChatFormat
from tether.models.fast.decoding.sampling import sample
from tether.models.load import load_model
from tether.models.logprobs import cut_batch, forward, logprobs_and_entropy, token_logprobs
from tether.models.lora import add_lora
from tether.models.policy import Policy
from tether.models.scoring.local import scorer_for
from tether.models.vision import PACKED
from tether.training.checkpoint import write_model as write_folder

TOLERANCE = 5e-6


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sighted")


@pytest.fixture(params=FAMILIES)
def policy(request: pytest.FixtureRequest, folders: Path) -> Policy:
    return Policy(*load_model(str(write_model(request.param, folders / request.param)), device="cpu"))


@pytest.fixture(scope="module")
def pictures() -> list[Image]:
    return some_pictures()


def batch_of(talks: list[Talk]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    ids_BT = torch.zeros(len(talks), max(len(talk.ids) for talk in talks), dtype=torch.long)
    mask_BT = torch.zeros_like(ids_BT, dtype=torch.bool)
    for b, talk in enumerate(talks):
        ids_BT[b, : len(talk.ids)] = torch.tensor(talk.ids)
        mask_BT[b, [place for place, _ in talk.sampled]] = True
    return ids_BT, mask_BT, torch.tensor([len(talk.ids) for talk in talks]), torch.tensor([v for talk in talks for _, v in talk.sampled])


@pytest.mark.parametrize("by", ["family's pass", "module's own code"])
def test_sampled_log_probs_are_those_of_transformers_and_of_the_learner(policy: Policy, pictures: list[Image], by: str) -> None:
    if by == "module's own code":
        policy._known["backbone"] = (None, "not wanted")
    else:
        assert policy.backbone is not None, policy.backbone_reason
    talks = play(policy, pictures)
    assert policy.vision is not None
    for talk in talks:
        ours = torch.tensor([value for _, value in talk.sampled])
        places = [place for place, _ in talk.sampled]
        theirs_TV = logprobs_by_transformers(policy, talk.ids, talk.images, 0.7)
        assert torch.allclose(theirs_TV[[place - 1 for place in places], [talk.ids[place] for place in places]], ours, atol=TOLERANCE)
        assert not {talk.ids[place] for place in places} & set(policy.vision.never_sampled)
        assert image_digests(talk.ids) == [image.digest for image in talk.images]
    ids_BT, mask_BT, lengths_B, sampled_N = batch_of(talks)
    assert torch.allclose(token_logprobs(policy, ids_BT, mask_BT, lengths_B, 0.7, max_tokens=600), sampled_N, atol=TOLERANCE)


def test_gradients_are_those_of_transformers(policy: Policy, pictures: list[Image]) -> None:
    """Through packed rows with shared beginnings; the tower gets gradients only where it is trained."""
    (talk, other, *_) = play(policy, pictures)
    ids_BT, mask_BT, lengths_B, _ = batch_of([talk, other])

    def gradient() -> dict[str, torch.Tensor]:
        policy.module.zero_grad()
        for micro in cut_batch(policy, ids_BT, lengths_B, 10_000):
            logprobs_and_entropy(policy, *forward(policy, ids_BT, mask_BT, micro), 1.0)[0].sum().backward()
        return {name: p.grad.clone() for name, p in policy.module.named_parameters() if p.grad is not None}

    packed = gradient()
    policy._known["backbone"] = (None, "not wanted")
    plain = gradient()
    assert packed.keys() == plain.keys()
    for name, found in packed.items():
        assert torch.allclose(found, plain[name], atol=2e-4, rtol=1e-3), name
    assert policy.vision is not None
    in_tower = {
        name for name, p in policy.module.named_parameters() if any(p is q for part in policy.vision.tower for q in part.parameters())
    }
    assert in_tower & packed.keys()
    for part in policy.vision.tower:
        part.requires_grad_(False)
    assert not in_tower & gradient().keys()


def test_cross_scores_swap_the_images(policy: Policy, pictures: list[Image]) -> None:
    talks = play(policy, pictures, temperature=1.0)[::2]
    firsts = [talk.sampled[0][0] for talk in talks]
    prompts = [tuple(talk.ids[:first]) for talk, first in zip(talks, firsts, strict=True)]
    reasonings = [tuple(talk.ids[first : first + 4]) for talk, first in zip(talks, firsts, strict=True)]
    assert policy.vision is not None
    policy.vision.forget_features()  # the tower computes inside the scorer's pass
    scores = scorer_for(policy).score_all(prompts, reasonings)
    for n, reasoning in enumerate(reasonings):
        for j, prompt in enumerate(prompts):
            theirs_TV = logprobs_by_transformers(policy, (*prompt, *reasoning), talks[j].images[:1])
            expected = sum(float(theirs_TV[len(prompt) + k - 1, token]) for k, token in enumerate(reasoning))
            assert scores[n, j] == pytest.approx(expected, abs=2e-5)


def test_tokens_are_those_of_the_familys_processor(folders: Path, pictures: list[Image]) -> None:
    """Idefics3's own processor runs without torchvision; Qwen's rule is one placeholder for four patches (here: of 8 x 8 pixels)."""
    from transformers import Idefics3Processor

    for family, splits in (("idefics3", False), ("smolvlm", True)):
        model, tokenizer = load_model(str(write_model(family, folders / family)), device="cpu")
        chat = ChatFormat(tokenizer, vision=Policy(model, tokenizer).vision)
        image_processor: Any = model.image_processor
        theirs: Any = Idefics3Processor(image_processor=image_processor, tokenizer=tokenizer, image_seq_len=16)
        messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "\nGo on."}]}]
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        expected = theirs(text=[rendered + "<think>"], images=[[pictures[0].pixels]], add_special_tokens=False)["input_ids"][0]
        ours = chat.first_prompt(None, f"{pictures[0].marker}\nGo on.")
        assert chat.vision is not None
        assert with_placeholders(ours, chat.vision.placeholder_id) == list(expected)
        assert len(find_runs(ours)) == (1 if not splits else len(find_runs(ours))) and sum(run.length for run in find_runs(ours)) % 16 == 0
    model, tokenizer = load_model(str(write_model("qwen2_5_vl", folders / "qwen2_5_vl")), device="cpu")
    vision = Policy(model, tokenizer).vision
    assert vision is not None
    image = Image.of(np.zeros((24, 40, 3), dtype=np.uint8))
    assert find_runs(vision.expand(image)) == [(0, 15, image.digest, 0)]  # 3 x 5


def test_places_of_patches_by_hand(folders: Path) -> None:
    """Two words, an image of 2 x 3 patches, a word: [0 1 | 2 2 2 2 2 2 | 5] in time, rows and columns counted from 2; three after the image, its
    larger side."""
    policy = Policy(*load_model(str(write_model("qwen2_5_vl", folders / "qwen2_5_vl")), device="cpu"))
    assert policy.vision is not None
    image = Image.of(np.full((16, 24, 3), 9, dtype=np.uint8))
    ids = (5, 6, *policy.vision.expand(image), 7)
    places, after = policy.vision.places(ids)
    assert places.tolist() == [[0, 1, 2, 2, 2, 2, 2, 2, 5], [0, 1, 2, 2, 2, 3, 3, 3, 5], [0, 1, 2, 3, 4, 2, 3, 4, 5]]
    assert after.tolist() == [1, 2, 2, 2, 2, 2, 2, 5, 6]
    rest, after_rest = policy.vision.places(ids[5:], int(after[4]))  # cut inside the image
    assert rest.tolist() == places[:, 5:].tolist() and after_rest.tolist() == after[5:].tolist()


def test_features_are_computed_once_and_again_where_the_tower_changed(policy: Policy, pictures: list[Image]) -> None:
    vision = policy.vision
    assert vision is not None
    calls: list[int] = []
    through, image = vision._through_tower, pictures[0]
    vision._through_tower = lambda images: (calls.append(len(images)), through(images))[1]  # type: ignore[method-assign]
    for part in vision.tower:
        part.requires_grad_(False)
    ids = torch.tensor(vision.expand(image))
    first = vision.embed(ids).states_SD
    assert torch.equal(vision.embed(ids).states_SD, first) and calls == [1]
    with torch.no_grad():
        next(iter(vision.tower[0].parameters())).add_(0.5)
    assert not torch.equal(vision.embed(ids).states_SD, first) and calls == [1, 1]


def test_tokens_of_images_are_not_sampled_however_likely() -> None:
    """Of four words with logits log(7), log(1), log(1), log(1) the first may not be drawn; the log-prob stays that of all: log(1/10)."""
    logits_BV = torch.log(torch.tensor([[7.0, 1.0, 1.0, 1.0]])).repeat(3, 1)
    ids_B, logprobs_B = sample(logits_BV, Sampling(), torch.tensor([0.0, 0.5, 0.99]), never=(0,))
    assert ids_B.tolist() == [1, 2, 3] and logprobs_B.tolist() == pytest.approx([np.log(0.1)] * 3)
    assert sample(logits_BV, Sampling(temperature=0), torch.zeros(3), never=(0,))[0].tolist() == [1, 1, 1]
    assert sample(logits_BV, Sampling(top_p=0.5), torch.zeros(3), never=(0,))[0].tolist() == [1, 1, 1]


def test_adapters_leave_the_tower_alone(folders: Path) -> None:
    pytest.importorskip("peft")
    for vision in (False, True):
        policy = Policy(*load_model(str(write_model("qwen2_5_vl", folders / "qwen2_5_vl")), device="cpu"))
        add_lora(policy.module, 2, 4, vision=vision)
        adapted = {name for name, _ in policy.module.named_parameters() if ".lora_" in name}
        assert any("visual" in name for name in adapted) == vision and any("language_model" in name for name in adapted)


def test_what_is_refused(folders: Path, tmp_path: Path) -> None:
    folder = write_model("idefics3", tmp_path / "model")
    chat = ChatFormat(load_model(str(folder), device="cpu").tokenizer, vision=Policy(*load_model(str(folder), device="cpu")).vision)
    with pytest.raises(BadInput, match="'<image>', which stands for an image"):
        chat.first_prompt(None, "an <image> written out")
    with pytest.raises(BadInput, match="prompts hold images, and the scorer reads text only"):
        scorer_for(Policy(*load_model("tiny", device="cpu"))).score((1, 2**62), (3,))
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(ModelUnavailable, match="reads images, and its files do not say how they are prepared"):
        load_model(str(folder), device="cpu")


def test_a_written_model_expands_images_alike_elsewhere(folders: Path, pictures: list[Image], tmp_path: Path) -> None:
    """transformers' own processor of the folder, which vLLM uses too, writes as many patches as are fed here."""
    loaded = load_model(str(write_model("idefics3", folders / "idefics3")), device="cpu")
    write_folder(tmp_path, loaded.model, loaded.tokenizer)
    vision = Policy(*loaded).vision
    assert vision is not None
    processor: Any = AutoProcessor.from_pretrained(tmp_path)
    made = processor(text=vision.placeholder, images=[pictures[0].pixels])["input_ids"]
    assert list(made[0]) == with_placeholders(vision.expand(pictures[0]), vision.placeholder_id)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_attention_of_all_windows_at_once_is_that_of_each(family: str, tmp_path: Path) -> None:
    policy = Policy(*load_model(str(write_model(family, tmp_path / family)), device="cpu"))
    vision = policy.vision
    assert vision is not None
    images = [Image.of(generator("windows", n).integers(0, 255, (side, 40, 3), dtype=np.uint8)) for n, side in enumerate((24, 24, 56))]
    usual = vision.features(image.digest for image in images)
    vision.forget_features()
    tower: Any = vision.tower[0]
    tower.config._attn_implementation = PACKED
    at_once = vision.features(image.digest for image in images)
    for digest, parts in usual.items():
        for part, other in zip(parts, at_once[digest], strict=True):
            assert part.abs().max() > 0.01
            torch.testing.assert_close(part, other, atol=2e-6, rtol=1e-5)
