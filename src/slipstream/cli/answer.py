"""generate, trace: the commands that answer a prompt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import randbits
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream import drafters as registry
from slipstream.cli import options as o
from slipstream.cli.terminal import busy, err, open_llm, print_status, print_stream
from slipstream.drafters._capabilities import takes
from slipstream.errors import OptionError
from slipstream.user_files import check_writable, told

if TYPE_CHECKING:
    from slipstream.answers import Result
    from slipstream.llm import LLM


def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    model: o.Model = None,
    drafter: o.DrafterName = "auto",
    option: o.DrafterOption = None,
    drafter_path: o.DrafterPath = None,
    head: o.Heads = None,
    dtype: o.Dtype = None,
    device: o.Device = None,
    max_new_tokens: o.MaxNew = 256,
    temperature: o.Temperature = 0.0,
    top_k: o.TopK = 0,
    top_p: o.TopP = 1.0,
    min_p: o.MinP = 0.0,
    repetition_penalty: o.RepetitionPenalty = None,
    presence_penalty: o.PresencePenalty = 0.0,
    frequency_penalty: o.FrequencyPenalty = 0.0,
    seed: o.Seed = None,
    answers: Annotated[
        int, typer.Option("--answers", "-N", help="How many answers to generate, one after the other.")
    ] = 1,
    logprobs: Annotated[
        int | None, typer.Option(metavar="K", help="Show each token's log probability, and the K most likely tokens.")
    ] = None,
    max_draft: o.MaxDraft = None,
    prediction: o.Prediction = None,
    drafters: o.Drafters = None,
    accept: o.Accept = "match",
    stop: Annotated[list[str] | None, typer.Option(help="Stop before this text. Repeatable.")] = None,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    json_schema: Annotated[str | None, typer.Option(help="A JSON schema, or a file that holds one.")] = None,
    regex: Annotated[str | None, typer.Option(help="A regular expression the answer must match.")] = None,
    learn: Annotated[bool, typer.Option("--learn", help="Append the answer to the drafter's store.")] = False,
    collection: Annotated[str, typer.Option(help="The store's collection to draft from and append to.")] = "default",
    explain: Annotated[
        bool, typer.Option("--explain", help="Explain what was drafted and verified at each step.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON line for each answer at the end.")] = False,
    compile: o.Compile = False,
    trust_remote_code: o.Trust = False,
) -> None:
    """Answer a prompt."""
    if raw and system is not None:
        raise OptionError("--system needs the chat template, which --raw does without: leave one of them out")
    request: Any = o.read_prompt(prompt)
    if system is not None:
        request = [{"role": "system", "content": system}, {"role": "user", "content": request}]
    sampling: dict[str, Any] = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        **({} if repetition_penalty is None else {"repetition_penalty": repetition_penalty}),
    }
    o.at_least(1, answers=answers)
    o.at_least(0, logprobs=logprobs)
    with busy("loading the model"):
        o.check_decoding(max_new_tokens, accept, max_draft, **sampling)
    expected, schema = o.prediction_text(prediction), o.schema_text(json_schema)
    pairs = o.drafter_options(option, drafter_path, head, learn)
    llm = open_llm(model, drafter, pairs, dtype, device, trust_remote_code, compile)
    results, interrupted = [], False
    for sample in range(answers):
        stream = llm.stream(
            request,
            **sampling,
            prediction=expected,
            json_schema=schema,
            regex=regex,
            stop=stop or (),
            max_new_tokens=max_new_tokens,
            seed=seed,
            sample=sample,
            collection=collection,
            max_draft=max_draft,
            drafters=drafters,
            accept=accept,
            logprobs=logprobs,
            template=not raw,
            trace=explain,
        )
        try:
            result = print_answer(stream)
        except typer.Exit:  # the answers before it are complete
            interrupted = True
            break
        results.append(result)
        seed = result.seed  # one for all: the answers differ by their sample index
        if explain:
            print_steps(llm, drafter, result)
        if logprobs is not None and not as_json:
            print_logprobs(llm, result)
        print_status(result, accept)
        if result.finish_reason == "cancelled":
            break
    if as_json:
        for result in results:
            print(json.dumps(result.as_dict(), ensure_ascii=False), flush=True)
    if interrupted or results[-1].finish_reason == "cancelled":
        raise typer.Exit(130)


def print_answer(stream: Any) -> Result:
    """Print an answer as it is generated. If Ctrl-C left no token of it, the command exits with 130."""
    print_stream(stream)
    if stream.stats is None:
        raise typer.Exit(130)
    return stream.result


def print_steps(llm: LLM, drafter: str, result: Result) -> None:
    """Print a sentence about each step: what was drafted and verified, and why."""
    from slipstream.trace.explain import explain as sentences

    if parts := getattr(llm.engine.drafter, "parts", None):
        err.print(f"{drafter} can ask {', '.join(parts)}", markup=False)
    for sentence in sentences(result.trace or []):
        err.print(sentence, markup=False)


def print_logprobs(llm: LLM, result: Result) -> None:
    """Print a line for each token: its log probability, and the most likely tokens at its position."""
    from slipstream.trace.record import readable

    for entry in result.logprobs or []:
        likeliest = "  ".join(f"{readable(llm.tokenizer, token)!r} {value:.2f}" for token, value in entry.top.items())
        line = f"{readable(llm.tokenizer, entry.token)!r:16} {entry.logprob:8.2f}"
        err.print(f"{line}   likeliest: {likeliest}" if likeliest else line, markup=False)


def trace(
    ctx: typer.Context,
    prompt: Annotated[str | None, typer.Argument(help="The prompt; - reads it from standard input.")] = None,
    html: Annotated[Path | None, typer.Option(help="Where to write the page. Default: trace.html.")] = None,
    jsonl: Annotated[Path | None, typer.Option(help="Where to write the trace itself, as JSON lines.")] = None,
    source: Annotated[
        list[Path] | None,
        typer.Option("--from", help="Show a recorded trace instead; give it twice to compare two."),
    ] = None,
    against: Annotated[
        str | None, typer.Option(metavar="DRAFTER", help="Answer with this drafter too, and show both side by side.")
    ] = None,
    model: o.Model = None,
    drafter: o.DrafterName = "auto",
    option: o.DrafterOption = None,
    drafter_path: o.DrafterPath = None,
    head: o.Heads = None,
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
    """Answer a prompt and write a page that shows each step, with tokens coloured by their drafter."""
    from slipstream.trace.page import read

    if (prompt is None) == (not source):
        raise OptionError("give a prompt to answer, or --from a trace to show: one of them")
    if source and (len(source) > 2 or against is not None):
        raise OptionError("a page shows one trace or two: give --from twice at most, and --against with a prompt")
    if source:
        o.refuse_others(ctx, {"source", "html"}, "on a trace that is there: leave it out, or leave out --from")
    if html is None and jsonl is None:
        html = Path("trace.html")
    jsonl_against = jsonl.with_suffix(f".{against}{jsonl.suffix}") if jsonl and against else None
    check_writable(html, jsonl, jsonl_against)
    if source:
        write_trace([read(file) for file in source], html)
        return
    if against is not None:
        registry.find(against)  # a misspelt name is refused before a model is loaded
        seed = randbits(32) if seed is None else seed  # both runs sample with one seed
    request = {
        "prompt": o.read_prompt(prompt or ""),
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "seed": seed,
        "max_draft": max_draft,
        "accept": accept,
        "template": not raw,
    }
    # Not every drafter takes these: they are left out below for one that does not.
    optional = {"prediction": o.prediction_text(prediction), "drafters": drafters}
    with busy("loading the model"):
        o.check_decoding(max_new_tokens, accept, max_draft, temperature=temperature, top_p=top_p)
    pairs = o.drafter_options(option, drafter_path, head)
    llm = open_llm(model, drafter, pairs, dtype, device, trust_remote_code, compile)
    other = None
    if against is not None:
        other = type(llm)(llm.model, llm.tokenizer, against, compile=compile)
        other.generate("Hello!", max_new_tokens=2)  # warm up: a model's first steps are slow with any drafter
    with line_writer(jsonl) as write, line_writer(jsonl_against) as write_other:
        traces = [run_traced(llm, write, request | optional)]
        if other is not None:
            supported = {name: value for name, value in optional.items() if name in takes(other.engine.drafter)}
            traces.append(run_traced(other, write_other, request | supported))
        write_trace(traces, html)


def write_trace(traces: list[list[dict[str, Any]]], html: Path | None) -> None:
    """Write the page that shows one trace or two."""
    from slipstream.trace.page import write_page

    if html is not None:
        write_page(traces[0], html, traces[1] if len(traces) > 1 else None)
        err.print(f"wrote {html}", markup=False)


def run_traced(llm: LLM, write: Any, request: dict[str, Any]) -> list[dict[str, Any]]:
    """Print an answer and return the lines of its trace. If `write` is given, it gets each line as the step ends."""
    result = print_answer(llm.stream(**request, trace=write or True))
    print_status(result, request["accept"])
    return result.trace or []


@contextmanager
def line_writer(path: Path | None) -> Iterator[Any]:
    """A function that writes JSON lines to a new file and flushes each; None without a path.

    If a line can't be written, the lines after it are dropped and the answer goes on; the error is raised at the end.
    """
    if path is None:
        yield None
        return
    file: Any = None  # opened with the first line: until then an existing file is left as it is
    failed: OSError | None = None

    def write(line: dict[str, Any]) -> None:
        nonlocal file, failed
        if failed is None:
            try:
                file = file or path.open("w", encoding="utf-8")
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
                file.flush()
            except OSError as error:
                failed = error

    try:
        yield write
    finally:
        if file is not None:
            with suppress(OSError):  # buffered text of a failed write fails again on close
                file.close()
    if failed is not None:
        with told(path):
            raise failed
    err.print(f"wrote {path}", markup=False)
