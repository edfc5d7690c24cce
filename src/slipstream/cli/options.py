"""Options that several commands share, and NAME=VALUE words converted to the types of a drafter's options."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from slipstream.errors import OptionError, PromptError

Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        help="The model: a hub id, a folder (a model's or an adapter's) or a .gguf file. Default: the embedded one.",
    ),
]
DrafterName = Annotated[str, typer.Option("--drafter", "-d", help="Who drafts: see `slipstream drafters`.")]
DrafterOption = Annotated[
    list[str] | None,
    typer.Option("--option", "-o", metavar="NAME=VALUE", help="An option of the drafter. Repeatable."),
]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16, float16 or auto. Default: float32 on a CPU.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, … Default: a GPU if there is one.")]
MaxNew = Annotated[int, typer.Option("--max-new-tokens", "-n", help="The most tokens of an answer.")]
Temperature = Annotated[float, typer.Option("--temperature", "-t", help="Sampling temperature; 0: greedy.")]
TopK = Annotated[int, typer.Option(help="Sample among the k most probable tokens; 0: all.")]
TopP = Annotated[float, typer.Option(help="Sample among the most probable tokens that together have this probability.")]
MinP = Annotated[float, typer.Option(help="Leave out tokens with less than this share of the highest probability.")]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(help="Above 1: make tokens of prompt and answer less likely. Default: the model's own, mostly 1."),
]
PresencePenalty = Annotated[
    float, typer.Option(help="Subtract this from the logit of every token that the answer holds.")
]
FrequencyPenalty = Annotated[float, typer.Option(help="The same, once for each time that the answer holds the token.")]
Seed = Annotated[
    int | None, typer.Option(help="Seed of sampling. With --accept match it gives the same text with any drafter.")
]
MaxDraft = Annotated[
    int | None,
    typer.Option(
        help="Verify at most this many drafted tokens per step; 0: no speculation. Default: 16, on a GPU 31, with "
        "--prediction 63."
    ),
]
Prediction = Annotated[
    Path | None, typer.Option(help="A file with roughly the expected answer, such as the text that is edited.")
]
Drafters = Annotated[str | None, typer.Option(help="The drafters that auto may use: names, separated by commas.")]
Accept = Annotated[
    str, typer.Option(help="The accept rule. match and rejection are exact; typical and lenient are LOSSY.")
]
Memory = Annotated[
    float, typer.Option(min=0.01, max=0.99, help="On a GPU: the share of its free memory that texts may take.")
]
Compile = Annotated[bool, typer.Option("--compile", help="On a GPU: compile each shape of step first (seconds).")]
DrafterPath = Annotated[
    str | None, typer.Option("--drafter-path", help="A trained head: a folder or a hub id. Default: the one shipped.")
]
Heads = Annotated[
    list[str] | None,
    typer.Option("--head", metavar="FOLDER", help="A trained head that auto asks too. Repeatable. See `heads add`."),
]
Ray = Annotated[
    str | None,
    typer.Option("--ray", metavar="ADDRESS", help="Share the work with Ray: local, auto, or a cluster's address."),
]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")]

# Sizes of heads, for `train` and `tune`
Block = Annotated[int | None, typer.Option(help="dflash: positions of a block (8). falcon: tokens per pass (2).")]
Bias = Annotated[
    int | None, typer.Option(help="dflash: the rank of a bias from the previous token, as in DSpark, such as 256.")
]
Window = Annotated[
    int | None, typer.Option(help="spire: how many of the latest tokens of the text it attends to (64); 0: all.")
]
Sinks = Annotated[
    int | None, typer.Option(help="spire: how many of the first tokens of the text it attends to as well (1).")
]
Feedback = Annotated[
    bool | None,
    typer.Option(
        "--feedback/--no-feedback",
        help="spire: keys of drafted tokens are made of a mixture of all layers (feedback memory).",
    ),
]
Activations = Annotated[
    bool | None,
    typer.Option("--activations/--no-activations", help="spire: read the target's hidden states, or only embeddings."),
]
Pruned = Annotated[
    bool | None,
    typer.Option("--pruned/--no-pruned", help="spire: start from the target's last layers, or from random layers."),
]
Confidence = Annotated[
    bool | None, typer.Option("--confidence", help="dflash: also learn how probable its guesses are, as in DSpark.")
]


def drafter_options(
    option: list[str] | None, drafter_path: str | None, heads: list[str] | None, learn: bool = False
) -> list[str]:
    """All options of the drafter as NAME=VALUE words: those of --option, and those that have a flag of their own."""
    pairs = list(option or [])
    if drafter_path is not None:
        pairs.append(f"drafter_path={drafter_path}")
    if heads:
        pairs.append(f"heads={','.join(heads)}")
    if learn:
        pairs.append("learn=true")
    return pairs


def parse_options(kind: type, given: list[str]) -> dict[str, Any]:
    """Parse NAME=VALUE words into the types of a drafter's options."""
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


def given_flags(ctx: typer.Context) -> dict[str, str]:
    """The options given on the command line: parameter name → flag."""
    return {
        p.name: p.opts[0]
        for p in ctx.command.params
        if p.name and getattr(ctx.get_parameter_source(p.name), "name", "") == "COMMANDLINE"
    }


def refuse_others(ctx: typer.Context, taken: set[str], where: str) -> None:
    """Refuse options that were given and have no effect where only some are taken."""
    if useless := [flag for name, flag in given_flags(ctx).items() if name not in taken]:
        raise OptionError(f"{', '.join(useless)} has no effect {where}")


def at_least(least: int, **numbers: int | None) -> None:
    """Refuse a number below `least`, naming its option. None means that the option was not given."""
    for name, value in numbers.items():
        if value is not None and value < least:
            option = name.replace("_", "-")
            raise OptionError(f"--{option} {value} is out of range: it must be at least {least}")


def check_decoding(max_new_tokens: int, accept: str = "match", max_draft: int | None = None, **sampling: Any) -> None:
    """Refuse decoding options that are out of range, before a model is loaded."""
    at_least(1, max_new_tokens=max_new_tokens)
    at_least(0, max_draft=max_draft)
    from slipstream.accept import make_rule
    from slipstream.sampling import Sampling

    make_rule(accept)
    Sampling(**{name: value for name, value in sampling.items() if value is not None})


def read_prompt(given: str) -> str:
    """The prompt as given, or standard input for `-`."""
    try:
        if given == "-":
            sys.stdin.reconfigure(encoding="utf-8", errors="strict")  # type: ignore[union-attr]
            given = sys.stdin.read()
        given.encode()  # fails if the argument was not UTF-8: Python passes such bytes on as surrogates
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise PromptError(f"the prompt is not UTF-8 text ({error.reason}): convert it first, as with iconv") from error
    if not given:
        raise PromptError("the prompt is empty: give some text to answer or to continue")
    return given


def prediction_text(file: Path | None) -> str | None:
    try:
        return None if file is None else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"--prediction {str(file)!r} can't be read: {error}") from error


def schema_text(given: str | None) -> str | None:
    """A JSON schema: the argument itself, or the content of the file that it names."""
    if given and not given.lstrip().startswith(("{", "[")):
        try:
            return Path(given).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(f"--json-schema {given!r} is neither JSON nor a readable file: {error}") from error
    return given
