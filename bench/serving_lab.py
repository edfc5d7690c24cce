"""Shared by the parts of bench/serving.py: a model that is served in this process, and callers in another one."""

from __future__ import annotations

import argparse
import platform
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import sleep
from typing import Any

import torch
import transformers
import uvicorn

import slipstream
from callers import Callers
from slipstream.server.app import Server
from slipstream.server.run import listening
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
    """A server on this model as `slipstream serve` runs it, in a thread of this process, and those who ask it. So
    whoever asks the model without the server has the same one, with the same captures and the same measured costs."""
    sock = listening("127.0.0.1", 0)
    config = uvicorn.Config(Server(llm, "model").app, log_level="warning", access_log=False)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([sock],))
    thread.start()
    while not server.started:
        sleep(0.01)
    callers = Callers(sock.getsockname()[1])
    try:
        yield callers
    finally:
        callers.close()
        server.should_exit = True
        thread.join()


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
