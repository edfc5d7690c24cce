"""generate, chat, trace: the commands that answer."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from slipstream.cli import options as o
from slipstream.cli.terminal import err, open_llm, out, say, status
from slipstream.errors import OptionError, SlipstreamError


def generate(
    prompt: Annotated[str, typer.Argument(help="What to answer; - reads it from standard input.")],
    model: o.Model = None,
    drafter: o.DrafterName = "auto",
    option: o.DrafterOption = None,
    drafter_path: o.DrafterPath = None,
    dtype: o.Dtype = None,
    device: o.Device = None,
    max_new_tokens: o.MaxNew = 256,
    temperature: o.Temperature = 0.0,
    top_k: o.TopK = 0,
    top_p: o.TopP = 1.0,
    min_p: o.MinP = 0.0,
    seed: o.Seed = None,
    max_draft: o.MaxDraft = None,
    prediction: o.Prediction = None,
    drafters: o.Drafters = None,
    accept: o.Accept = "match",
    stop: Annotated[list[str] | None, typer.Option(help="End before this text. Repeatable.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    json_schema: Annotated[str | None, typer.Option(help="A JSON schema, or a file that holds one.")] = None,
    regex: Annotated[str | None, typer.Option(help="A regular expression the answer must match.")] = None,
    learn: Annotated[bool, typer.Option("--learn", help="Append the answer to the drafter's store.")] = False,
    collection: Annotated[str, typer.Option(help="Whose text may draft, and whose the answer becomes.")] = "default",
    explain: Annotated[bool, typer.Option("--explain", help="Say what was decided at each step, and why.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON line last.")] = False,
    compile: o.Compile = False,
    trust_remote_code: o.Trust = False,
) -> None:
    """Answer a prompt."""
    if learn:
        option = [*(option or []), "learn=true"]
    llm = open_llm(model, drafter, o.with_path(option, drafter_path), dtype, device, trust_remote_code, compile)
    stream = llm.stream(
        sys.stdin.read() if prompt == "-" else prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        collection=collection,
        max_draft=max_draft,
        prediction=o.read_text(prediction),
        drafters=drafters,
        accept=accept,
        stop=stop or (),
        template=not raw,
        json_schema=o.schema_text(json_schema),
        regex=regex,
        trace=explain,
    )
    say(stream)
    if stream.stats is None:
        raise typer.Exit(130)
    if explain:
        from slipstream.trace.explain import explain as in_words

        if parts := getattr(llm.engine.drafter, "parts", None):
            err.print(f"{drafter} can ask {', '.join(parts)}", markup=False)
        for sentence in in_words(stream.result.trace or []):
            err.print(sentence, markup=False)
    err.print(f"[dim]{status(stream.stats, accept)}[/dim]")
    if as_json:
        print(json.dumps(stream.result.as_dict(), ensure_ascii=False), flush=True)
    if stream.result.finish_reason == "cancelled":
        raise typer.Exit(130)


def chat(
    model: o.Model = None,
    drafter: o.DrafterName = "auto",
    option: o.DrafterOption = None,
    drafter_path: o.DrafterPath = None,
    dtype: o.Dtype = None,
    device: o.Device = None,
    max_new_tokens: o.MaxNew = 1024,
    temperature: o.Temperature = 0.0,
    top_k: o.TopK = 0,
    top_p: o.TopP = 1.0,
    min_p: o.MinP = 0.0,
    seed: o.Seed = None,
    max_draft: o.MaxDraft = None,
    accept: o.Accept = "match",
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    compile: o.Compile = False,
    trust_remote_code: o.Trust = False,
) -> None:
    """Talk with a model. An empty line or Ctrl-D ends the conversation, Ctrl-C the answer."""
    llm = open_llm(model, drafter, o.with_path(option, drafter_path), dtype, device, trust_remote_code, compile)
    conversation = llm.chat(system)
    while True:
        try:
            said = out.input("[bold]> [/bold]")
        except (EOFError, KeyboardInterrupt):
            break
        if not said.strip():
            break
        try:
            stream = conversation.stream(
                said,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                seed=seed,
                max_draft=max_draft,
                accept=accept,
            )
            say(stream)
        except SlipstreamError as error:  # a turn that can't be answered must not end the conversation
            err.print(f"[red]{escape(str(error))}[/red]")
            continue
        if stream.stats:
            err.print(f"[dim]{status(stream.stats, accept)}[/dim]")
    out.print()


def trace(
    prompt: Annotated[str | None, typer.Argument(help="What to answer; - reads it from standard input.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the page here. Default: trace.html.")] = None,
    jsonl: Annotated[Path | None, typer.Option(help="Write the trace itself here, line by line.")] = None,
    source: Annotated[Path | None, typer.Option("--from", help="Show a trace that was recorded before.")] = None,
    model: o.Model = None,
    drafter: o.DrafterName = "auto",
    option: o.DrafterOption = None,
    drafter_path: o.DrafterPath = None,
    dtype: o.Dtype = None,
    device: o.Device = None,
    max_new_tokens: o.MaxNew = 256,
    temperature: o.Temperature = 0.0,
    top_p: o.TopP = 1.0,
    seed: o.Seed = None,
    max_draft: o.MaxDraft = None,
    prediction: o.Prediction = None,
    drafters: o.Drafters = None,
    accept: o.Accept = "match",
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    compile: o.Compile = False,
    trust_remote_code: o.Trust = False,
) -> None:
    """Answer a prompt and show what happened: one page, each token coloured by who drafted it."""
    from slipstream.trace.page import read, write_page

    if (prompt is None) == (source is None):
        raise OptionError("give a prompt to answer, or --from a trace to show: one of them")
    if source is not None:
        lines = read(source)
    else:
        llm = open_llm(model, drafter, o.with_path(option, drafter_path), dtype, device, trust_remote_code, compile)
        with line_writer(jsonl) as write:
            stream = llm.stream(
                sys.stdin.read() if prompt == "-" else prompt or "",
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                top_p=top_p,
                seed=seed,
                max_draft=max_draft,
                prediction=o.read_text(prediction),
                drafters=drafters,
                accept=accept,
                template=not raw,
                trace=write or True,
            )
            say(stream)
            if stream.stats is None:
                raise typer.Exit(130)
            err.print(f"[dim]{status(stream.stats, accept)}[/dim]")
            lines = stream.result.trace or []
    if html is not None or jsonl is None:
        html = html or Path("trace.html")
        write_page(lines, html)
        err.print(f"wrote {html}")


@contextmanager
def line_writer(path: Path | None) -> Iterator[Any]:
    """A function that appends JSON lines to a new file, each on the disk before the next; None without a path."""
    if path is None:
        yield None
        return
    with path.open("w", encoding="utf-8") as file:

        def write(line: dict[str, Any]) -> None:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
            file.flush()

        yield write
    err.print(f"wrote {path}")
