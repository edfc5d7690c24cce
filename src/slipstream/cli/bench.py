"""bench: the command that measures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from slipstream.cli import options as o
from slipstream.cli.terminal import busy, check_place, ensure_embedded, err, out, progress_bars
from slipstream.errors import SlipstreamError
from slipstream.user_files import check_folder, check_writable, write_text


def bench(
    prompts: Annotated[Path | None, typer.Option(help="A file of prompts. Default: the built-in ones.")] = None,
    limit: Annotated[int | None, typer.Option(help="Ask this many questions, spread over the categories.")] = None,
    categories: Annotated[str | None, typer.Option(help="Use these alone, separated by commas.")] = None,
    contestants: Annotated[
        str, typer.Option("--contestants", "-c", help="Drafters, and hf, hf-pld, hf-assisted; separated by commas.")
    ] = "none,auto,pld,hf,hf-pld",
    sweep: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=1,2,4", help="Run every drafter that has this option with each value."),
    ] = None,
    draft_model: Annotated[str | None, typer.Option(help="For the contestants model and hf-assisted.")] = None,
    model: o.Model = None,
    dtype: o.Dtype = None,
    device: o.Device = None,
    max_new_tokens: o.MaxNew = 128,
    temperature: o.Temperature = 0.0,
    top_p: o.TopP = 1.0,
    seed: Annotated[int, typer.Option(help="For sampled runs.")] = 0,
    repeats: Annotated[int, typer.Option(help="How often everything is measured.")] = 3,
    batch: Annotated[int, typer.Option(help="Prompts answered together.")] = 1,
    out_json: Annotated[
        Path | None,
        typer.Option("--json", help="Print the JSON document last, and write it to this file too (-: to none)."),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with charts here.")] = None,
    record: Annotated[Path | None, typer.Option(help="Keep plain runs in this folder, to replay drafters on.")] = None,
    replay: Annotated[Path | None, typer.Option(help="Try drafters on a recording, without the target.")] = None,
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(help="Compare two JSON documents instead of measuring.")
    ] = None,
) -> None:
    """Measure drafters and transformers' own ways on the same prompts, interleaved, in one process."""
    if compare is not None:
        from slipstream.evaluate.compare import compare_files

        for said in compare_files(*compare):
            out.print(escape(said))
        return
    check_writable(html, None if out_json == Path("-") else out_json)
    if record is not None:
        check_folder(record)
    o.at_least(1, repeats=repeats, batch=batch, limit=limit)
    with busy("loading the model"):
        o.check_decoding(max_new_tokens, temperature=temperature, top_p=top_p)
    names, drafter_options = o.sweep_contestants(contestants.split(","), sweep or [])
    if replay is not None:
        from slipstream.evaluate.replay import Recording
        from slipstream.evaluate.run import replay as replayed

        ours = [name for name in names if not name.startswith("hf")]
        with progress_bars() as progress:
            rows, document = replayed(Recording.load(replay), ours, drafter_options, progress, repeats)
        tell(rows, document, html, out_json)
        return
    from slipstream.evaluate import workloads

    chosen = workloads.select(
        workloads.read(prompts) if prompts else workloads.builtin(),
        categories.split(",") if categories else None,
        limit,
    )
    with busy("loading the model"):
        check_place(dtype, device)
    if model is None:
        ensure_embedded()
    with busy("loading the model"):
        from slipstream.evaluate.contestants import Decoding
        from slipstream.evaluate.run import BenchPlan, benchmark, load_draft, make_recording
        from slipstream.targets import load_model

        plan = BenchPlan(
            chosen, names, drafter_options, Decoding(max_new_tokens, temperature, top_p, seed), repeats, batch
        )
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
        with progress_bars() as progress:
            make_recording(plan, loaded, tokenizer, progress).save(record)
        err.print(f"wrote {record}")
        return
    with progress_bars() as progress:
        rows, document = benchmark(plan, loaded, tokenizer, progress, draft, options)
    tell(rows, document, html, out_json)
    if document["missing"]:
        raise typer.Exit(130)


def tell(rows: Any, document: dict[str, Any], html: Path | None, out_json: Path | None) -> None:
    """A benchmark's results: the table, the files asked for, and with --json the JSON line last.

    It is printed as well where a file can't be written: what was measured is not lost.
    """
    from slipstream.evaluate.page import write_page
    from slipstream.evaluate.report import line, stages, table

    wide = out if out.is_terminal else Console(width=140, highlight=False)  # a file has no edge to cut columns at
    wide.print(table(rows))
    for said in stages(rows):
        wide.print(said, markup=False)
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
