"""serve: a model behind OpenAI's API."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli import options as o
from slipstream.cli.terminal import err, open_llm
from slipstream.errors import OptionError


def serve(
    model: Annotated[
        str | None, typer.Argument(help="A hub id, a folder or a .gguf file. Default: the embedded model.")
    ] = None,
    host: Annotated[str, typer.Option(help="Where to listen. 0.0.0.0: for other machines too.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8000,
    drafter: o.DrafterName = "auto",
    option: o.DrafterOption = None,
    drafter_path: o.DrafterPath = None,
    head: o.Heads = None,
    dtype: o.Dtype = None,
    device: o.Device = None,
    name: Annotated[str | None, typer.Option(help="What clients call the model. Default: its own name.")] = None,
    max_batch: Annotated[int, typer.Option(min=1, help="Answers written at a time at most.")] = 16,
    max_waiting: Annotated[int, typer.Option(min=1, help="Requests that may wait; more are told to try later.")] = 256,
    max_tokens: Annotated[int, typer.Option(min=1, help="The longest answer.")] = 4096,
    max_prompt: Annotated[int | None, typer.Option(min=1, help="The longest prompt. Default: the context.")] = None,
    max_seconds: Annotated[float, typer.Option(min=0.1, help="For an answer, waiting included.")] = 600.0,
    max_body: Annotated[int, typer.Option(min=1024, help="Bytes of a request.")] = 4 << 20,
    grace: Annotated[float, typer.Option(min=0, help="Seconds for running answers to end in, when stopped.")] = 30.0,
    api_key: Annotated[
        str | None, typer.Option(help="What clients must send. Better: the variable SLIPSTREAM_API_KEY.")
    ] = None,
    learn: Annotated[bool, typer.Option("--learn", help="Append the answers to the drafter's store.")] = False,
    log_requests: Annotated[bool, typer.Option("--log-requests", help="A line for each; never what it says.")] = False,
    memory: o.Memory = 0.9,
    compile: o.Compile = False,
    trust_remote_code: o.Trust = False,
) -> None:
    """Serve a model over OpenAI's API, with a page that shows what it does."""
    from slipstream.server.run import NEEDED, Front, listening, until_signals

    if missing := [module for module in NEEDED if find_spec(module) is None]:
        raise OptionError(f"{missing[0]} is missing: pip install 'slipstream-llm[serve]'")
    if api_key is not None and not api_key.strip():
        raise OptionError("--api-key is empty: give a key, or leave the option out")
    sock = listening(host, port)  # before the model is loaded, so that a port in use is reported at once
    where = f"http://{f'[{host}]' if ':' in host else host}:{sock.getsockname()[1]}"
    with Front(sock) as front:
        words = o.drafter_options(option, drafter_path, head, learn)
        with open_llm(
            model, drafter, words, dtype, device, trust_remote_code, compile, max_batch=max_batch, memory=memory
        ) as llm:
            from slipstream.server.backend import Limits
            from slipstream.server.local import Local

            called = name or (Path(llm.name).name if model is not None else llm.name.rpartition("/")[2])
            local = Local(llm, called, Limits(max_body, max_prompt, max_tokens, max_waiting, max_seconds))
            key = api_key or os.environ.get("SLIPSTREAM_API_KEY") or None
            try:
                front.start(local, key, grace, log_requests)  # it listens before the address is printed
                with until_signals(front):
                    err.print(f"{called} is served at {where}/v1, its page at {where}/; Ctrl-C stops", markup=False)
                    front.wait()
            finally:
                local.shut()
