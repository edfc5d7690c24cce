"""bench: measure drafters on prompts, or put a load on a server."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from slipstream import drafters as registry
from slipstream.checks import separated
from slipstream.cli import options as o
from slipstream.cli.terminal import busy, check_place, ensure_embedded, err, out, progress_bars
from slipstream.errors import OptionError, SlipstreamError
from slipstream.user_files import check_folder, check_writable, write_text

if TYPE_CHECKING:
    from rich.table import Table

    from slipstream.evaluate.load import LoadPlan
    from slipstream.evaluate.workloads import Prompt


# By what is done instead of measuring: the options that have an effect then, and the words for it in errors.
INSTEAD: dict[str, tuple[set[str], str]] = {
    "serve": (
        {"rates", "seconds", "prompts", "limit", "categories", "model", "max_new_tokens", "seed", "out_json", "html"},
        "on a server",
    ),
    "compare": (set(), "on documents that are there"),
    "replay": ({"contestants", "sweep", "repeats", "out_json", "html"}, "on a recording that is there"),
    "record": (
        {"prompts", "limit", "categories", "contestants", "model", "dtype", "device", "max_new_tokens"}
        | {"temperature", "top_p", "seed"},
        "on a recording",
    ),
}
SERVE_ONLY = {"rates", "seconds"}


def bench(
    ctx: typer.Context,
    prompts: Annotated[Path | None, typer.Option(help="A file of prompts. Default: the built-in ones.")] = None,
    limit: Annotated[int | None, typer.Option(help="Use this many prompts, spread over the categories.")] = None,
    categories: Annotated[str | None, typer.Option(help="Use only these categories, separated by commas.")] = None,
    contestants: Annotated[
        str,
        typer.Option(
            "--contestants", "-c", help="What to measure: drafters, hf, hf-pld, hf-assisted; separated by commas."
        ),
    ] = "none,auto,pld,hf,hf-pld",
    sweep: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=1,2,4", help="Run every drafter that has this option with each value."),
    ] = None,
    draft_model: Annotated[
        str | None, typer.Option(help="The draft model of the contestants model and hf-assisted.")
    ] = None,
    model: o.Model = None,
    dtype: o.Dtype = None,
    device: o.Device = None,
    max_new_tokens: o.MaxNew = 128,
    temperature: o.Temperature = 0.0,
    top_p: o.TopP = 1.0,
    seed: Annotated[int, typer.Option(help="For sampled runs, and for the arrival times of --serve.")] = 0,
    repeats: Annotated[int, typer.Option(help="How often to measure everything.")] = 3,
    batch: Annotated[int, typer.Option(help="How many prompts to answer at a time.")] = 1,
    out_json: Annotated[
        Path | None,
        typer.Option("--json", help="Print a JSON document last, and write it to this file (-: only print)."),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with charts here.")] = None,
    record: Annotated[Path | None, typer.Option(help="Record plain runs in this folder, for --replay.")] = None,
    replay: Annotated[Path | None, typer.Option(help="Measure drafters on a recording, without the target.")] = None,
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(help="Compare two JSON documents instead of measuring.")
    ] = None,
    serve: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Load-test a server of OpenAI's API instead. API key: the variable SLIPSTREAM_API_KEY."
        ),
    ] = None,
    rates: Annotated[str, typer.Option(help="With --serve: requests per second, separated by commas.")] = "0.5,1,2,4",
    seconds: Annotated[float, typer.Option(help="With --serve: for how long to send requests at each rate.")] = 30.0,
) -> None:
    """Measure drafters and transformers' own methods on the same prompts, interleaved, in one process."""
    check_options(ctx)
    if compare is not None:
        from slipstream.evaluate.compare import compare_files

        for remark in compare_files(*compare):
            out.print(escape(remark))
        return
    check_writable(html, None if out_json == Path("-") else out_json)
    workload = {"prompts": prompts.name if prompts else "built-in", "limit": limit, "categories": categories}
    if serve is not None:
        from slipstream.evaluate.load import LoadPlan

        o.at_least(1, limit=limit, max_new_tokens=max_new_tokens)
        # Only the first turn of a conversation: later turns need the answers in between.
        first = [prompt.turns[0] for prompt in choose(prompts, categories, limit)]
        load_plan = LoadPlan(first, parse_rates(rates), seconds, max_new_tokens, seed)
        load(serve, model, load_plan, workload, html, out_json)
        return
    if record is not None:
        check_folder(record)
    o.at_least(1, repeats=repeats, batch=batch, limit=limit)
    with busy("loading the model"):
        o.check_decoding(max_new_tokens, temperature=temperature, top_p=top_p)
    names = chosen_contestants(contestants, "contestants" in o.given_flags(ctx), replay is not None, batch)
    if "hf-assisted" in names and draft_model is None and record is None and replay is None:
        raise OptionError("hf-assisted needs a draft model: name one with --draft-model")
    names, drafter_options = sweep_contestants(names, sweep or [])
    if replay is not None:
        from slipstream.evaluate.replay import Recording
        from slipstream.evaluate.run import replay as replayed

        with progress_bars() as progress:
            rows, document = replayed(Recording.load(replay), names, drafter_options, progress, repeats)
        report_results(rows, document, html, out_json)
        if document["missing"]:
            raise typer.Exit(130)
        return
    chosen = choose(prompts, categories, limit)
    with busy("loading the model"):
        check_place(dtype, device)
        from slipstream.evaluate.contestants import Decoding
        from slipstream.evaluate.run import BenchPlan, benchmark, load_draft, make_recording
        from slipstream.targets import load_model

        plan = BenchPlan(
            chosen, names, drafter_options, Decoding(max_new_tokens, temperature, top_p, seed), repeats, batch
        )
    if model is None:
        ensure_embedded()
    with busy("loading the model"):
        loaded, tokenizer = load_model(model, dtype=dtype, device=device)
        draft = load_draft(draft_model, dtype, device)
    if record is not None:
        with progress_bars() as progress:
            make_recording(plan, loaded, tokenizer, progress).save(record)
        err.print(f"wrote {record}")
        return
    with progress_bars() as progress:
        options = {**workload, "contestants": names, "draft_model": draft_model, "batch": batch}
        rows, document = benchmark(plan, loaded, tokenizer, progress, draft, options)
    report_results(rows, document, html, out_json)
    if document["missing"]:
        raise typer.Exit(130)


def choose(prompts: Path | None, categories: str | None, limit: int | None) -> list[Prompt]:
    from slipstream.evaluate import workloads

    return workloads.select(
        workloads.read(prompts) if prompts else workloads.builtin(),
        categories.split(",") if categories else None,
        limit,
    )


def check_options(ctx: typer.Context) -> None:
    """Refuse options that have no effect: some need --serve, others don't go with what is done instead of measuring."""
    given = o.given_flags(ctx)
    for way, (takes, where) in INSTEAD.items():
        if way in given:
            o.refuse_others(ctx, {way, *takes}, f"{where}: leave it out, or leave out --{way}")
    if "serve" not in given and (useless := [flag for name, flag in given.items() if name in SERVE_ONLY]):
        raise OptionError(f"{', '.join(useless)} is for a load on a server: give --serve URL too")


def chosen_contestants(listed: str, given: bool, replayed: bool, batch: int) -> list[str]:
    """The contestants in the list. If it is the default (not given), those that can't take part are left out."""
    from slipstream.evaluate.contestants import ALONE, PEERS

    left_out = (*(PEERS if replayed else ()), *(ALONE if batch > 1 else ()))
    return [name for name in separated(listed) if given or name not in left_out]


def sweep_contestants(names: list[str], sweeps: list[str]) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """The contestants to run: each drafter once per value of the swept options it has, the others once."""
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
                options[full] = o.parse_options(registry.find(name).Options, variant.split())
    if unused := set(sweeps) - used:
        raise OptionError(f"--sweep {', '.join(sorted(unused))}: none of {', '.join(names)} has such an option")
    return swept, options


def parse_rates(given: str) -> list[float]:
    rates = []
    for word in given.split(","):
        try:
            rates.append(float(word))
        except ValueError as error:
            raise OptionError(
                f"--rates {given!r}: {word!r} is no number; give requests per second, such as 0.5,1,2"
            ) from error
    return rates


def load(
    url: str, model: str | None, plan: LoadPlan, options: dict[str, Any], html: Path | None, out_json: Path | None
) -> None:
    """Put a load on a server and print the measurements."""
    from slipstream.evaluate.load import measure
    from slipstream.evaluate.remote import find

    server = find(url, os.environ.get("SLIPSTREAM_API_KEY"), model)
    with progress_bars() as progress:
        rows, missing = measure(plan, server, progress)
    from slipstream.evaluate.load_report import document, remarks, table, write_page

    results = document(plan, server, rows, options, missing)
    print_and_write(table(rows), remarks(rows), results, write_page, html, out_json)
    if missing:
        raise typer.Exit(130)


def report_results(rows: Any, document: dict[str, Any], html: Path | None, out_json: Path | None) -> None:
    """Print and write the results of a benchmark."""
    from slipstream.evaluate.page import write_page
    from slipstream.evaluate.report import stages, table

    print_and_write(table(rows), stages(rows), document, write_page, html, out_json)


def print_and_write(
    table: Table,
    remarks: list[str],
    document: dict[str, Any],
    write_page: Callable[[dict[str, Any], Path], None],
    html: Path | None,
    out_json: Path | None,
) -> None:
    """Print the table, write the files asked for, and with --json print the JSON line last.

    If a file can't be written, the JSON line is printed too, so that no measurement is lost.
    """
    from slipstream.evaluate.report import line

    wide = (
        out if out.is_terminal else Console(width=140, highlight=False)
    )  # not a terminal: use a fixed width, so that no column is cut
    wide.print(table)
    for remark in remarks:
        wide.print(remark, markup=False)
    if document["missing"]:
        err.print(f"[yellow]{document['missing']}[/yellow]")
    try:
        if out_json is not None and out_json != Path("-"):
            write_text(out_json, line(document) + "\n")
            err.print(f"wrote {out_json}", markup=False)
        if html is not None:
            write_page(document, html)
            err.print(f"wrote {html}", markup=False)
    except SlipstreamError:
        print(line(document), flush=True)
        raise
    if out_json is not None:
        print(line(document), flush=True)
