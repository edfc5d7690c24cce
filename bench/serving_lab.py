"""Shared by the parts of bench/serving.py: a model that is served in this process, and callers in another one."""

from __future__ import annotations

import argparse
import platform
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
import uvicorn

import slipstream
from callers import Callers
from slipstream.server.local import Local
from slipstream.server.run import Front, listening
from soak_lab import real, said, tiny


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="default: the embedded one; tiny: a random one whose own time is small")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--device", default=None)


def load_model(given: argparse.Namespace) -> slipstream.LLM:
    if given.model == "tiny":
        return slipstream.LLM(*tiny(), given.drafter)
    return slipstream.load(given.model, drafter=given.drafter, dtype=given.dtype, device=given.device)


def asked(given: argparse.Namespace, rng: random.Random, count: int) -> list[str]:
    """So many prompts for this model."""
    return said(rng, count) if given.model == "tiny" else real(given.prompts, rng, count)


@contextmanager
def served(llm: slipstream.LLM) -> Iterator[Callers]:
    """A server on this model as `slipstream serve` runs it, the model in this process, and those who ask it. So
    whoever asks the model without the server has the same one, with the same captures and the same measured costs."""
    sock = listening("127.0.0.1", 0)
    port = sock.getsockname()[1]
    with Front(sock) as front:
        local = Local(llm, "model")
        front.start(local)
        callers = Callers(port)
        try:
            yield callers
        finally:
            callers.close()
            front.stop()
            front.wait()
            local.shut()


def provenance(llm: slipstream.LLM) -> dict[str, Any]:
    gpu = llm.target.device.type == "cuda"
    return {
        "model": llm.name,
        "drafter": llm.engine.name,
        "dtype": str(llm.target.dtype),
        "device": torch.cuda.get_device_name() if gpu else f"{platform.machine()}, {torch.get_num_threads()} threads",
        "versions": {
            "slipstream": slipstream.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "uvicorn": uvicorn.__version__,
        },
    }
