"""The command line: parses, calls, prints. Heavy imports happen inside the commands, so that --help is instant."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from slipstream.errors import OptionError, SlipstreamError

if TYPE_CHECKING:
    from slipstream.llm import LLM
    from slipstream.stats import Stats

app = typer.Typer(
    help="Lossless speculative decoding: the same answers, sooner.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)

Model = Annotated[
    str | None,
    typer.Option("--model", "-m", help="A hub id, a folder or a .gguf file. Default: the embedded model."),
]
DrafterName = Annotated[str, typer.Option("--drafter", "-d", help="Who drafts: see `slipstream drafters`.")]
DrafterOption = Annotated[
    list[str] | None,
    typer.Option("--option", "-o", metavar="NAME=VALUE", help="An option of the drafter. Repeatable."),
]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16, float16 or auto. Default: float32 on a CPU.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, … Default: a GPU if there is one.")]
MaxNew = Annotated[int, typer.Option("--max-new-tokens", "-n", help="The longest answer.")]
Temperature = Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.")]
TopK = Annotated[int, typer.Option(help="Sample among the k most probable tokens; 0: all.")]
TopP = Annotated[float, typer.Option(help="Sample among the fewest tokens that together have this probability.")]
MinP = Annotated[float, typer.Option(help="Leave out tokens below this share of the best one's probability.")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same text; under match, with any drafter.")]
MaxDraft = Annotated[int, typer.Option(help="Drafted tokens to verify per step at most; 0 turns speculation off.")]
Accept = Annotated[str, typer.Option(help="match and rejection are exact; typical and lenient are LOSSY.")]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")]


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to answer; - reads it from standard input.")],
    model: Model = None,
    drafter: DrafterName = "pld",
    option: DrafterOption = None,
    dtype: Dtype = None,
    device: Device = None,
    max_new_tokens: MaxNew = 256,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    seed: Seed = None,
    max_draft: MaxDraft = 16,
    accept: Accept = "match",
    stop: Annotated[list[str] | None, typer.Option(help="End before this text. Repeatable.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    json_schema: Annotated[str | None, typer.Option(help="A JSON schema, or a file that holds one.")] = None,
    regex: Annotated[str | None, typer.Option(help="A regular expression the answer must match.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON line last.")] = False,
    trust_remote_code: Trust = False,
) -> None:
    """Answer a prompt."""
    llm = _load(model, drafter, option, dtype, device, trust_remote_code)
    stream = llm.stream(
        sys.stdin.read() if prompt == "-" else prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        max_draft=max_draft,
        accept=accept,
        stop=stop or (),
        template=not raw,
        json_schema=_schema(json_schema),
        regex=regex,
    )
    _say(stream)
    if stream.stats is None:
        raise typer.Exit(130)
    err.print(f"[dim]{_status(stream.stats, accept)}[/dim]")
    if as_json:
        print(json.dumps(stream.result.as_dict(), ensure_ascii=False), flush=True)
    if stream.result.finish_reason == "cancelled":
        raise typer.Exit(130)


@app.command()
def chat(
    model: Model = None,
    drafter: DrafterName = "pld",
    option: DrafterOption = None,
    dtype: Dtype = None,
    device: Device = None,
    max_new_tokens: MaxNew = 1024,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    seed: Seed = None,
    max_draft: MaxDraft = 16,
    accept: Accept = "match",
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    trust_remote_code: Trust = False,
) -> None:
    """Talk with a model. An empty line or Ctrl-D ends the conversation, Ctrl-C the answer."""
    llm = _load(model, drafter, option, dtype, device, trust_remote_code)
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
            _say(stream)
        except SlipstreamError as error:  # a turn that can't be answered must not end the conversation
            err.print(f"[red]{escape(str(error))}[/red]")
            continue
        if stream.stats:
            err.print(f"[dim]{_status(stream.stats, accept)}[/dim]")
    out.print()


@app.command()
def trace(
    prompt: Annotated[str | None, typer.Argument(help="What to answer; - reads it from standard input.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the page here. Default: trace.html.")] = None,
    jsonl: Annotated[Path | None, typer.Option(help="Write the trace itself here, line by line.")] = None,
    source: Annotated[Path | None, typer.Option("--from", help="Show a trace that was recorded before.")] = None,
    model: Model = None,
    drafter: DrafterName = "pld",
    option: DrafterOption = None,
    dtype: Dtype = None,
    device: Device = None,
    max_new_tokens: MaxNew = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    max_draft: MaxDraft = 16,
    accept: Accept = "match",
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    trust_remote_code: Trust = False,
) -> None:
    """Answer a prompt and show what happened: one page, each token coloured by who drafted it."""
    from slipstream.trace.page import read, write_page

    if (prompt is None) == (source is None):
        raise OptionError("give a prompt to answer, or --from a trace to show: one of them")
    if source is not None:
        lines = read(source)
    else:
        llm = _load(model, drafter, option, dtype, device, trust_remote_code)
        with _line_writer(jsonl) as write:
            stream = llm.stream(
                sys.stdin.read() if prompt == "-" else prompt or "",
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                top_p=top_p,
                seed=seed,
                max_draft=max_draft,
                accept=accept,
                template=not raw,
                trace=write or True,
            )
            _say(stream)
            if stream.stats is None:
                raise typer.Exit(130)
            err.print(f"[dim]{_status(stream.stats, accept)}[/dim]")
            lines = stream.result.trace or []
    if html is not None or jsonl is None:
        html = html or Path("trace.html")
        write_page(lines, html)
        err.print(f"wrote {html}")


@contextmanager
def _line_writer(path: Path | None) -> Iterator[Any]:
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


@app.command()
def drafters() -> None:
    """What can draft, and its options."""
    from slipstream import drafters as registry

    for name in registry.names():
        kind = registry.find(name)
        out.print(f"[bold]{name}[/bold]  {(kind.__doc__ or '').strip().splitlines()[0]}")
        comments = _comments(kind.Options)
        for field in fields(kind.Options):
            out.print(f"    {field.name}={field.default}  [dim]{escape(comments.get(field.name, ''))}[/dim]")


@app.command()
def models(
    remove: Annotated[bool, typer.Option("--remove", help="Delete the converted embedded model.")] = False,
) -> None:
    """Fetch and convert the embedded model, and say where it lies."""
    from slipstream import embedded

    if remove:
        embedded.remove()
        out.print(f"removed {embedded.folder()}")
        return
    _ensure_embedded()
    size = sum(f.stat().st_size for f in embedded.folder().iterdir())
    out.print(f"{embedded.NAME}  {size / 1e6:.0f} MB  {embedded.folder()}")


@app.command()
def bench(
    prompts: Annotated[Path | None, typer.Option(help="A file of prompts. Default: the built-in ones.")] = None,
    limit: Annotated[int | None, typer.Option(help="Use this many, spread over the categories.")] = None,
    categories: Annotated[str | None, typer.Option(help="Use these alone, separated by commas.")] = None,
    contestants: Annotated[
        str, typer.Option("--contestants", "-c", help="Drafters, and hf, hf-pld, hf-assisted; separated by commas.")
    ] = "none,pld,hf,hf-pld",
    sweep: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=1,2,4", help="Run every drafter that has this option with each value."),
    ] = None,
    draft_model: Annotated[str | None, typer.Option(help="For the contestants model and hf-assisted.")] = None,
    model: Model = None,
    dtype: Dtype = None,
    device: Device = None,
    max_new_tokens: MaxNew = 128,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Annotated[int, typer.Option(help="For sampled runs.")] = 0,
    repeats: Annotated[int, typer.Option(help="How often everything is measured.")] = 3,
    batch: Annotated[int, typer.Option(help="Prompts answered together.")] = 1,
    out_json: Annotated[Path | None, typer.Option("--json", help="Also write the JSON document here.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with charts here.")] = None,
    record: Annotated[Path | None, typer.Option(help="Keep plain runs in this folder, to replay drafters on.")] = None,
    replay: Annotated[Path | None, typer.Option(help="Try drafters on a recording, without the target.")] = None,
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(help="Compare two JSON documents instead of measuring.")
    ] = None,
) -> None:
    """Measure drafters and transformers' own ways on the same prompts, interleaved, in one process."""
    if compare is not None:
        from slipstream.bench.compare import compare_files

        for said in compare_files(*compare):
            out.print(escape(said))
        return
    names, drafter_options = sweep_contestants(contestants.split(","), sweep or [])
    if replay is not None:
        from slipstream.bench.replay import Recording
        from slipstream.bench.run import replay as replayed

        ours = [name for name in names if not name.startswith("hf")]
        with _progress() as progress:
            rows, document = replayed(Recording.load(replay), ours, drafter_options, progress, repeats)
        _tell(rows, document, html, out_json)
        return
    from slipstream.bench import workloads

    chosen = workloads.select(
        workloads.read(prompts) if prompts else workloads.builtin(),
        categories.split(",") if categories else None,
        limit,
    )
    if model is None:
        _ensure_embedded()
    with _busy("loading the model"):
        from slipstream.bench.contestants import Decoding
        from slipstream.bench.run import Plan, benchmark, load_draft, make_recording
        from slipstream.target import load_model

        plan = Plan(chosen, names, drafter_options, Decoding(max_new_tokens, temperature, top_p, seed), repeats, batch)
        loaded, tokenizer = load_model(model, dtype=dtype, device=device)
        draft = load_draft(draft_model, dtype, device)
    options = {
        "prompts": prompts.name if prompts else "built-in",
        "limit": limit,
        "categories": categories,
        "contestants": names,
        "draft_model": draft_model,
        "batch": batch,
    }
    if record is not None:
        with _progress() as progress:
            make_recording(plan, loaded, tokenizer, progress).save(record)
        err.print(f"wrote {record}")
        return
    with _progress() as progress:
        rows, document = benchmark(plan, loaded, tokenizer, progress, draft, options)
    _tell(rows, document, html, out_json)
    if document["missing"]:
        raise typer.Exit(130)


def _tell(rows: Any, document: dict[str, Any], html: Path | None, out_json: Path | None) -> None:
    """A benchmark's results: the table, the files asked for, and the JSON line last."""
    from slipstream.bench.page import write_page
    from slipstream.bench.report import line, table

    out.print(table(rows))
    if document["missing"]:
        err.print(f"[yellow]{document['missing']}[/yellow]")
    if html is not None:
        write_page(document, html)
        err.print(f"wrote {html}")
    if out_json is not None:
        out_json.write_text(line(document) + "\n", encoding="utf-8")
    print(line(document), flush=True)


def sweep_contestants(names: list[str], sweeps: list[str]) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """Each drafter once per value of the swept options it has; others as they are."""
    from slipstream import drafters as registry

    swept: list[str] = []
    options: dict[str, dict[str, Any]] = {}
    used = set()
    for name in names:
        variants = [""]
        if name in registry.names():
            known = {f.name for f in fields(registry.find(name).Options)}
            for word in sweeps:
                option, _, values = word.partition("=")
                if option in known:
                    used.add(word)
                    variants = [f"{v} {option}={value}".strip() for v in variants for value in values.split(",")]
        for variant in variants:
            full = f"{name} {variant}".strip()
            swept.append(full)
            if variant:
                options[full] = parse_options(registry.find(name).Options, variant.split())
    if unused := set(sweeps) - used:
        raise OptionError(f"--sweep {', '.join(sorted(unused))}: none of {', '.join(names)} has such an option")
    return swept, options


@contextmanager
def _progress() -> Iterator[Any]:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err, disable=not err.is_terminal) as bars:
        tasks: dict[str, Any] = {}

        def progress(stage: str, done: int, of: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage)
            bars.update(tasks[stage], completed=done, total=of)

        yield progress


@app.command()
def demo(
    model: Model = None,
    drafter: DrafterName = "pld",
    option: DrafterOption = None,
    dtype: Dtype = None,
    device: Device = None,
    max_new_tokens: MaxNew = 160,
) -> None:
    """A race: the same prompt with and without speculation, side by side."""
    from slipstream.demo import PROMPT, race

    llm = _load(model, drafter, option, dtype, device, False)
    race(llm, PROMPT, drafter, max_new_tokens, out)


def _load(
    model: str | None,
    drafter: str,
    option: list[str] | None,
    dtype: str | None,
    device: str | None,
    trust: bool,
) -> LLM:
    from slipstream import drafters as registry

    options = parse_options(registry.find(drafter).Options, option or [])
    if model is None:
        _ensure_embedded()
    with _busy("loading the model"):
        from slipstream.llm import load

        return load(model, drafter=drafter, dtype=dtype, device=device, trust_remote_code=trust, **options)


def parse_options(kind: type, given: list[str]) -> dict[str, Any]:
    """NAME=VALUE words as the types that a drafter's options have."""
    known = {f.name: f for f in fields(kind)}
    options: dict[str, Any] = {}
    for word in given:
        name, equals, value = word.partition("=")
        name = name.replace("-", "_")
        if not equals or name not in known:
            has = ", ".join(known) or "none"
            raise OptionError(f"--option {word!r}: give NAME=VALUE; this drafter's options are {has}")
        default = known[name].default
        try:
            if isinstance(default, bool):
                options[name] = {"true": True, "1": True, "false": False, "0": False}[value.lower()]
            elif isinstance(default, int | float):
                options[name] = type(default)(value)
            else:
                options[name] = value
        except (ValueError, KeyError) as error:
            raise OptionError(f"--option {word!r}: {name} must be a {type(default).__name__}") from error
    return options


def _ensure_embedded() -> None:
    """Fetch and convert the embedded model with a progress bar, if it isn't there yet."""
    from slipstream import embedded

    if embedded.is_ready():
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    with Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=err) as bars:
        tasks: dict[str, Any] = {}
        labels = {
            "fetch": "fetching the embedded model (98 MB)",
            "convert": "converting it once (about 30 s)",
        }

        def progress(stage: str, share: float) -> None:
            if stage not in tasks:
                # Conversion tells no share of its own: its bar pulses until it is done.
                tasks[stage] = bars.add_task(labels[stage], total=1.0 if stage == "fetch" else None)
            bars.update(tasks[stage], completed=share, total=1.0 if stage == "fetch" or share == 1 else None)

        embedded.ensure(progress)


def _say(stream: Any) -> None:
    """Print pieces as they come. Ctrl-C ends the generation; what was said stays."""
    try:
        for piece in stream:
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        err.print(" [yellow](stopped)[/yellow]", end="")
    print(flush=True)


def _status(stats: Stats, accept: str) -> str:
    from slipstream.accept import RULES

    exact = "exact" if stats.exact else "same rule, rounding may differ"
    if not RULES[accept].lossless:
        exact = f"LOSSY ({accept})"
    return (
        f"{stats.new_tokens} tokens in {stats.seconds:.2f} s · {stats.tokens_per_second:.1f} tokens/s · "
        f"{stats.tokens_per_step:.2f} tokens/step · {stats.drafter} · {exact}"
    )


def _schema(given: str | None) -> str | None:
    if given and not given.lstrip().startswith(("{", "[")):
        try:
            return Path(given).read_text()
        except OSError as error:
            raise OptionError(f"--json-schema {given!r} is neither JSON nor a readable file: {error}") from error
    return given


def _comments(kind: type) -> dict[str, str]:
    """The comment beside each field: the one place where an option is explained."""
    import inspect
    import re

    lines = inspect.getsource(kind).splitlines()
    found = (re.match(r"\s+(\w+): .*?#\s*(.+)$", line) for line in lines)
    return {m[1]: m[2] for m in found if m}


@contextmanager
def _busy(what: str) -> Iterator[None]:
    if err.is_terminal:
        with err.status(what + " …"):
            yield
    else:
        yield


def main() -> None:
    try:
        app()
    except SlipstreamError as error:
        err.print(f"[red]error:[/red] {escape(str(error))}")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
