"""collect: let the target answer prompts, as training data for heads."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from slipstream.cli import options as o
from slipstream.cli.store import cluster
from slipstream.cli.terminal import busy, check_place, counting_bars, ensure_embedded, err, out, per_second
from slipstream.user_files import check_writable


def collect(
    prompts: Annotated[
        list[str],
        typer.Option("--prompts", "-p", help="A file, folder or glob of JSON lines, JSON or parquet. Repeatable."),
    ],
    out_file: Annotated[Path, typer.Option("--out", help="The file to append the answers to, as JSON lines.")],
    model: o.Model = None,
    dtype: o.Dtype = None,
    device: o.Device = None,
    max_new_tokens: o.MaxNew = 512,
    temperature: o.Temperature = 0.0,
    top_p: o.TopP = 1.0,
    seed: Annotated[int, typer.Option(help="For sampled answers.")] = 0,
    batch: Annotated[int, typer.Option("--batch", "-b", help="How many answers to generate at a time.")] = 16,
    limit: Annotated[int | None, typer.Option(help="Use only the first prompts, this many.")] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Use at most this many turns of a conversation. Default: all.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="The system message of prompts that have none.")] = None,
    memory: o.Memory = 0.9,
    compile: Annotated[bool, typer.Option("--compile", help="On a GPU: compile first, to run faster.")] = False,
    ray: o.Ray = None,
    trust_remote_code: o.Trust = False,
) -> None:
    """Let a model answer prompts, as training data for a head.

    If interrupted, run the same command again to go on.
    """
    from slipstream.training.prompts import read_questions

    check_writable(out_file)
    o.at_least(1, batch=batch, limit=limit, rounds=rounds)
    with busy("loading the model"):
        o.check_decoding(max_new_tokens, temperature=temperature, top_p=top_p)
        check_place(dtype, device)
    with busy("reading the prompts"):
        questions = read_questions(prompts, system, rounds, limit)
    if model is None:
        ensure_embedded()
    with busy("loading the model"):
        from slipstream.training.collect import CollectSettings, collect_shared
        from slipstream.training.collect import collect as answer
    settings = CollectSettings(max_new_tokens, temperature, top_p, seed)
    load = partial(_load, model, dtype, device, batch, memory, compile, trust_remote_code)
    if ray is None:
        with busy("loading the model"):
            llm = load()
    with counting_bars(speed_estimate_period=120) as bars:
        task = bars.add_task("answering", total=len(questions))

        def progress(done: int, of: int, tokens: int) -> None:
            text = f"{tokens:,} tokens, {per_second(bars, task, tokens):,.0f}/s"
            bars.update(task, description=text, completed=done, total=of)

        try:
            if ray is None:
                found = answer(llm, questions, out_file, settings, progress)
            else:
                with cluster(ray, load, float((device or "").startswith("cuda"))) as workers:
                    found = collect_shared(workers, questions, out_file, settings, progress)
        except KeyboardInterrupt:
            err.print(f"stopped: what was answered is in {out_file}; the same command goes on from here", markup=False)
            raise
    summary = f"{found.conversations:,} conversations, {found.tokens:,} tokens written"
    for count, what in ((found.known, "were there already"), (found.too_long, "don't fit the model's context")):
        summary += f"; {count:,} {what}" if count else ""
    out.print(f"{summary}; in {out_file}", markup=False)


def _load(
    model: str | None,
    dtype: str | None,
    device: str | None,
    batch: int,
    memory: float,
    compile: bool,
    trust_remote_code: bool,
) -> Any:
    """Load the target. At module level, so that it can be sent to Ray's workers."""
    from slipstream.llm import load

    return load(
        model,
        drafter="none",
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
        max_batch=batch,
        memory=memory,
        compile=compile,
    )
