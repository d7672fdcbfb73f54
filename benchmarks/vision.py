"""Models that see: how fast, beside the same conversations in words; and whether an agent looks.

    python benchmarks/vision.py speed --model shape:qwen2.5-vl-3b          # GPU: 8 prompts x 16, three turns, a picture of 252 x 252 pixels a turn
    python benchmarks/vision.py speed --vllm-python PATH                    # vLLM of another environment beside it
    python benchmarks/vision.py speed --model tiny-vl --side 64 --groups 2 --group 4          # CPU
    python benchmarks/vision.py looks tiny-vl runs/seeing                   # FrozenLake with its own pictures, another map's, and blank ones

`speed`: pictures a second through image processor and vision tower, and sampled tokens a second of the engine that trains, over conversations in
which every turn shows a picture and words; beside it the same lengths in words alone, on the same model. Every picture is new, as for a first rollout; the members of a
group share the first one. The best of `--repeats` counts.

Its peer is vLLM's offline engine in a process of its own (benchmarks/vllm_peer.py), as in rollout.py: the same lengths, other random words and
pictures, weights that vLLM makes up. It reads the model's config, tokenizer and image processor, runs after our model is gone, and plays the
conversations with pictures and then in words. What it makes of a picture must have as many tokens as here, else its columns say that it failed.

`looks`: validation success on the same maps with three kinds of pictures. One that has learned to look falls to what it does blind.
"""

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
import vllm_peer
from shapes import SHAPE, Row, add_json_option, best_of, forget_peak, precision, publish, say
from workloads import Conversations, EndlessPolicy, FixedConversation, endless

import tether
from tether.core.images import Image, with_placeholders
from tether.core.protocols import Sampling
from tether.core.seeding import generator
from tether.envs.frozen_lake.env import FrozenLake
from tether.models.load import DTYPES, load_model
from tether.models.vision import save_processor
from tether.rollout.engines.native import NativeEngine

WORDS = 24
"""Of an observation beside its picture."""
VOCABULARY = 500
"""Words that are shown; all of them are plain ones in the tokenizer of tiny-vl."""


def sighted_shape(device: str, dtype: str) -> tuple[Any, Any]:
    """Qwen2.5-VL-3B with random weights; the words are those of tiny-vl."""
    tokenizer = load_model("tiny-vl", device="cpu").tokenizer
    names = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
    kind: Any = transformers.Qwen2_5_VLConfig
    config = kind(
        text_config={
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32768,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        },
        vision_config={"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 2048},
        tie_word_embeddings=True,
        **{name: tokenizer.convert_tokens_to_ids(token) for name, token in names.items()},
    )
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = transformers.Qwen2_5_VLForConditionalGeneration._from_config(config, dtype=DTYPES[dtype]).eval()
    model.image_processor = transformers.Qwen2VLImageProcessorPil(patch_size=14, merge_size=2)
    return model, tokenizer


def random_images(count: int, side: int, *path: str | int) -> list[Image]:
    rng = generator("benchmark", "images", *path)
    return [Image.of(rng.integers(0, 255, (side, side, 3), dtype=np.uint8)) for _ in range(count)]


def conversations(work: Conversations, run: int, shown: Iterator[tuple[int, ...]]) -> list[FixedConversation]:
    """Not begun; every prompt and observation ends with what is shown, and words."""
    rng, made = generator("benchmark", "vision", run), []

    def observed() -> tuple[int, ...]:
        return (*next(shown), *rng.integers(0, VOCABULARY, WORDS).tolist())

    for group in range(work.groups):
        prompt = (*rng.integers(0, VOCABULARY, work.prompt).tolist(), *observed())
        for member in range(work.group_size):
            draws = generator("benchmark", "draws", run, group, member)
            made.append(FixedConversation(group, member, prompt, [observed() for _ in range(work.turns - 1)], draws))
    return made


def speed(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        row, asked = ours(options, Path(folder))
        forget_peak(torch.device(row["device"]))  # vLLM takes its place
        answer = vllm_peer.ask(options.vllm_python, folder, asked)
    publish([row | vllm_columns(row, answer)], options.json)


def vllm_columns(row: dict[str, Any], answer: dict[str, Any] | str) -> dict[str, Any]:
    """What vLLM did with the same work, beside our rates."""
    if isinstance(answer, str):
        return {"vLLM": answer}
    rates = {name: answer[name]["sampled"] / answer[name]["seconds"] for name in ("pictures", "words")}
    return {
        "vLLM": answer["version"],
        "vLLM tokens/s with pictures": rates["pictures"],
        "vLLM tokens/s in words": rates["words"],
        "faster than vLLM with pictures by": row["tokens/s with pictures"] / rates["pictures"],
        "faster than vLLM in words by": row["tokens/s in words"] / rates["words"],
        "vLLM start, s": answer["start"],
    }


def ours(options: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Our rates, and what vLLM is asked for; the model's files but its weights are in the folder then, and the model is gone."""
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = options.dtype or ("bfloat16" if device == "cuda" else "float32")
    loaded = sighted_shape(device, dtype) if options.model.startswith(SHAPE) else load_model(options.model, device=device, dtype=dtype)
    model, tokenizer = loaded
    policy = EndlessPolicy(model.requires_grad_(False), endless(tokenizer))
    if policy.vision is None:
        raise SystemExit(f"'{options.model}' reads text only; name a model that reads images")
    work = Conversations(options.groups, options.group, options.prompt, options.response, options.turns, WORDS)
    row: dict[str, Any] = {
        "model": options.model,
        "device": device,
        "precision": precision(model),
        "conversations": str(work),
        "picture": options.side,
    }
    vision = policy.vision
    images = random_images(options.images, options.side)
    patches = len(vision.expand(images[0]))
    count = work.groups * (1 + work.group_size * (work.turns - 1))
    for pictures in (True, False):
        engine = NativeEngine(policy, max_rows=work.rows, max_context=options.context)
        # Pictures are drawn beforehand; reading them is a part of what is timed.
        runs = enumerate([random_images(count, options.side, run) if pictures else [] for run in range(1 + options.repeats)])

        def play(pictures: bool = pictures, engine: NativeEngine = engine, runs: Any = runs) -> int:
            run, held = next(runs)
            words = generator("benchmark", "words", run)
            shown = (
                (vision.expand(image) for image in held)
                if pictures
                else iter(lambda: tuple(words.integers(0, VOCABULARY, patches).tolist()), ())
            )
            made = conversations(work, run, shown)
            engine.run(made, Sampling(max_tokens=work.response))
            return sum(conversation.trajectory.num_sampled for conversation in made)

        play()
        seconds, sampled = best_of(options.repeats, model.device, play)
        row["tokens/s with pictures" if pictures else "tokens/s in words"] = sampled / seconds
        row["decoder"] = engine.backend
        engine.free()

    def through_tower() -> None:
        vision.forget_features()
        vision.features(image.digest for image in images)

    through_tower()
    seconds, _ = best_of(options.repeats, model.device, through_tower)
    row |= {"tokens a picture": patches, "pictures/s": len(images) / seconds}
    save_files(model, tokenizer, folder)
    fed = patches + WORDS
    asked = {
        "vocabulary": VOCABULARY,
        "dtype": precision(model),
        "rows": work.rows,
        "group": work.group_size,
        "prompt": work.prompt + WORDS,
        "response": work.response,
        "turns": work.turns,
        "observed": WORDS,
        "longest": work.prompt + work.turns * (fed + work.response) + 1,
        "repeats": options.repeats,
        "picture": {
            "side": options.side,
            "tokens": patches,
            "patches": with_placeholders(vision.expand(images[0]), vision.placeholder_id).count(vision.placeholder_id),
            "placeholder": vision.placeholder_id,
            "never": list(vision.never_sampled),
        },
    }
    return row, asked


def save_files(model: Any, tokenizer: Any, folder: Path) -> None:
    """What vLLM reads of a model beside its weights."""
    model.config.architectures = [type(model).__name__]
    for part in (model.config, tokenizer):
        part.save_pretrained(folder)
    save_processor(model, folder)


OWN_PICTURE = FrozenLake.state_image


def other_picture(env: FrozenLake) -> Any:
    """That of another map."""
    other = FrozenLake(env.options)
    other.generate(int(generator("another map", env.lake.fingerprint).integers(2**31)))
    return OWN_PICTURE(other)


def blank_picture(env: FrozenLake) -> Any:
    """Nothing to see."""
    return Image.of(OWN_PICTURE(env)).blank().pixels


def looks(options: argparse.Namespace) -> None:
    rows: list[Row] = []
    for agent in options.agents:
        row: Row = {"agent": agent}
        for picture, words in ((OWN_PICTURE, "own pictures"), (other_picture, "another map's"), (blank_picture, "blank")):
            shown = {"observation": "image", "few_shot": 0, "instructions": "plain"}
            with mock.patch.object(FrozenLake, "state_image", picture):
                found = tether.evaluate(agent, "frozen_lake", options.prompts, options=shown, rollout={"max_tokens": 80})
            low, high = found.intervals["success"] or (0.0, 1.0)
            row[words] = f"{found.metrics['success']:.1%} ({low:.1%} to {high:.1%})"
            say(f"{agent}, {words}: {row[words]}")
        rows.append(row)
    publish(rows, options.json)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(required=True)
    fast = parts.add_parser("speed")
    fast.add_argument("--model", default="shape:qwen2.5-vl-3b")
    fast.add_argument("--device", default=None)
    fast.add_argument("--dtype", default=None, choices=list(DTYPES))
    for name, default in (("groups", 8), ("group", 16), ("prompt", 200), ("response", 100), ("turns", 3), ("side", 252), ("images", 64)):
        fast.add_argument(f"--{name}", type=int, default=default)
    fast.add_argument("--context", type=int, default=4096)
    fast.add_argument("--repeats", type=int, default=3)
    fast.add_argument("--vllm-python", default=None, help="Python of an environment that has vLLM; 'none' leaves it out")
    fast.set_defaults(run=speed)
    seeing = parts.add_parser("looks")
    seeing.add_argument("agents", nargs="+", type=str)
    seeing.add_argument("--prompts", type=int, default=256)
    seeing.set_defaults(run=looks)
    for part in (fast, seeing):
        add_json_option(part)
    options = parser.parse_args(arguments)
    options.run(options)


if __name__ == "__main__":
    main()
