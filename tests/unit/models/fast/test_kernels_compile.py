"""Every kernel compiles for CUDA devices, seen where there is none: the interpreter of the other tests takes code that the compiler refuses."""

import subprocess
import sys

import pytest

pytest.importorskip("triton")

FLOAT8_KERNELS = ["_float8_product", "_swiglu_float8"]
KERNELS = [
    "_accept",
    "_attend_new_tokens",
    "_attend_new_tokens SHIFTED",
    "_attend_pages",
    "_attend_texts",
    "_differentiate_rows",
    "_guess",
    "_learn",
    "_merge_attention",
    "_norm_backward",
    "_norm_forward",
    "_pick",
    "_pick NUM_NEVER",
    "_product",
    "_reduce_rows",
    "_rotate",
    "_rotate_and_store",
    "_rotate_and_store PLACED",
    "_share_out",
    "_sum_blocks",
    "_sum_blocks NUM_NEVER",
    "_swiglu_backward",
    "_swiglu_forward",
]

PROGRAM = """
import sys
from types import SimpleNamespace

import torch
import transformers as hf
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tether.models.fast.backbone import LlamaBackbone
from tether.models.fast.kernels import attention, float8, pointwise, products
from tether.models.fast.kernels.attention import attend_new_tokens, text_attention
from tether.models.fast.kernels.drafts import TextTable
from tether.models.fast.float8 import Float8Mlps
from tether.models.fast.kernels.warm_up import FLOAT8_SIZES, _attend_new, _draft_jobs, _feed_forward, _gradient_jobs, _jobs
from tether.models.fast.layers import find_layers

compiled = set()


class OnlyCompiles:
    def get_current_target(self):
        return GPUTarget("cuda", int(sys.argv[1]), 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def compile_only(self, *arguments, grid, warmup, **options):
    run(self, *arguments, grid=grid, warmup=True, **options)
    compiled.add(self.fn.__name__ + "".join(f" {name}" for name in ("SHIFTED", "PLACED", "NUM_NEVER") if options.get(name)))


if int(sys.argv[1]) >= 90:
    for kernels in (attention, float8, pointwise, products):
        kernels.launch_options = lambda device: {"CHAINED": True, "launch_pdl": True}
driver.set_active(OnlyCompiles())
run, JITFunction.run = JITFunction.run, compile_only
config = hf.Qwen2Config(
    vocab_size=300, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=6, num_key_value_heads=2, head_dim=64
)
model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
backbone = LlamaBackbone(model, find_layers(model), 128)
sizes = (1, 8, 8), (64, 256, 8), (128, 256, 4)
for vision in (None, SimpleNamespace(sections=(8, 12, 12), never_sampled=(7, 9))):  # of a model that sees: other places, tokens never sampled
    backbone.vision = vision
    LlamaBackbone.axes = None if vision is None else torch.zeros(32, dtype=torch.int32)
    for job in _jobs(backbone):  # one new token a text, no gradient
        job()
    for size in sizes:
        _attend_new(backbone, *size)
for job in (*_draft_jobs(TextTable(4, 64, model.device), sizes), *_gradient_jobs(backbone)):
    job()
x, number = torch.zeros(16, 6, 64, dtype=torch.bfloat16), torch.zeros(16, dtype=torch.int32)
few = x[:, :2].contiguous()
caches, angles = (torch.zeros(1, 2, 64, 64, dtype=torch.bfloat16),) * 2, (torch.zeros(64, 32, dtype=torch.bfloat16),) * 2
for num_texts in (1, 4):
    attend_new_tokens((x, few, few), caches, number[:num_texts, None], number[:num_texts], angles, 1.0, torch.zeros(64, dtype=torch.int32))
text_attention(x, few, few, number[:3], 8, 1.0)
if int(sys.argv[1]) >= 89:  # older ones have no float8
    for num_tokens in FLOAT8_SIZES[:-1]:  # the last is torch's
        _feed_forward(backbone, Float8Mlps(backbone.layers).layers[0], num_tokens)
for name in sorted(compiled):
    print(name)
"""


@pytest.mark.long
@pytest.mark.parametrize("capability", [80, 89, 90, 100])
def test_the_kernels_of_a_model_compile(capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(capability)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == (sorted([*FLOAT8_KERNELS, *KERNELS]) if capability >= 89 else KERNELS)
