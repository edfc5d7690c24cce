r"""Forecasts against measurements: python bench/plan.py --prompts FILE [--store STORE] [--device cuda]

Half of the prompts are answered plainly and recorded. Each drafter is replayed on them, which gives its survival and
the time of its drafts. From these and the costs of steps, tokens per step and the speed-up on the other half are
forecast, with intervals. Then all contestants answer the other half, in turns. Speed-ups are of decoding only, without
the prompts, which take the same time for all.

Drafters that use the target itself (magicdec) are run on the first half instead, in turns with plain decoding. On a GPU
all are, since drafts there are queued after the steps that they follow, and a replay has no steps; --live does so
anywhere.

`model` drafts with the target's own layers, without those that matter least for its answers. `rest` needs --store.

For two idle CPU cores, five minutes and three; on a GPU with --device cuda, --nodes 5 and --limit 72, magicdec with
--nodes 2 and --limit 40:

    python bench/plan.py --prompts HUMANEVAL --store STORE --drafters suffix,rest,eagle3,redrafter,model \
        --limit 32 --nodes 2 --tokens 32
    python bench/plan.py --prompts SPECBENCH --categories rag --drafters magicdec --keys 256 \
        --limit 18 --nodes 2 --tokens 32

Prints a table to stderr and one JSON line.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gpu import settled
from slipstream import LLM
from slipstream.drafters._capabilities import layers
from slipstream.evaluate.contestants import Answer, Decoding, Ours
from slipstream.evaluate.measure import Item, MeasuredRun, measure, prepare
from slipstream.evaluate.replay import record
from slipstream.evaluate.report import finite, provenance
from slipstream.evaluate.workloads import Prompt, read, select
from slipstream.plan.forecast import Forecast, as_row, forecast, outcome
from slipstream.plan.survival import DEEPEST, Tally, replayed
from slipstream.targets import load_model

# Of the embedded model's layers, those without which most tokens stay what they were (4 MT-Bench prompts, 40 tokens).
MISSED_LEAST = (3, 4, 5, 6, 7, 9, 16, 17)


def main() -> None:
    given = arguments()
    if given.threads:
        torch.set_num_threads(given.threads)
    model, tokenizer = load_model(given.model, dtype=given.dtype, device=given.device)
    options = options_of(given, model, tokenizer)
    decoding = Decoding(given.tokens)
    plain = Settled("none", LLM(model, tokenizer, "none"))
    halved = halves(given.prompts, given.categories, given.limit)
    known, unseen = (list(prepare(plain, half, decoding)) for half in halved)
    tell(f"recorded {len(known)} known and {len(unseen)} unseen prompts")
    drafting = [Settled(name, LLM(model, tokenizer, name, **own), given.nodes) for name, own in options.items()]
    forecasts: dict[str, Callable[[int], Forecast]] = {}  # by how many prompts are unseen
    live = [one for one in drafting if given.live or plain.llm.target.device.type == "cuda" or asks_target(one)]
    if live:
        trial = lived([plain, *live], known, decoding, given.repeats)
        each = sum(t.seconds for t in trial["none"]) / sum(t.tokens for t in trial["none"])
        forecasts |= {one.name: partial(forecast, trial[one.name], each) for one in live}
    if replaying := [one for one in drafting if one not in live]:
        wanted = sorted({layer for one in replaying for layer in layers(one.llm.engine.drafter)})
        recording = record(plain.llm.target, plain.llm.name, known, decoding, wanted)
        tell("ms by rows: " + ", ".join(f"{rows}: {1e3 * seconds:.1f}" for rows, seconds in recording.cost.items()))
        alone = replayed(recording, "none", {}, model, tokenizer)
        each = recording.seconds(1) + sum(t.host for t in alone) / sum(t.steps for t in alone)
        for one in replaying:
            tell(f"replaying {one.name}")
            tallies = replayed(recording, one.name, options[one.name], model, tokenizer, given.nodes)
            forecasts[one.name] = partial(forecast, tallies, each, replayed=True)
    for name, of in forecasts.items():
        expected = of(len(unseen))
        tell(f"{name}: forecast {expected.tokens} tokens per step, {expected.speedup} × plain")
    found = lived([plain, *drafting], unseen, decoding, given.repeats)
    asked = len(found["none"])  # fewer than there are if it was interrupted
    rows = [as_row(name, of(asked), outcome(found[name], found["none"])) for name, of in forecasts.items()]
    show(rows)
    about = {**provenance(plain.llm.name, plain.llm.target), "options": {k: str(v) for k, v in vars(given).items()}}
    counted = {"known": len(known), "unseen": asked}
    print(json.dumps(finite({"benchmark": "plan", "provenance": about, "prompts": counted, "rows": rows})))


class Settled(Ours):
    """Answers again if something was captured meanwhile, which happens once for a process."""

    def answers(self, prompts: Sequence[list[int]], decoding: Decoding) -> list[Answer]:
        found: list[Answer] = settled(partial(super().answers, prompts, decoding))[0]
        return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, nargs="+", required=True)
    parser.add_argument("--categories", nargs="*", help="of the prompts; default: all")
    parser.add_argument("--limit", type=int, default=8, help="known prompts, and as many unseen ones, of each file")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--drafters", default="suffix,rest,eagle3,redrafter,model,magicdec")
    parser.add_argument("--nodes", type=int, help="that a step drafts at most; default: as always on this device")
    parser.add_argument("--store", help="for rest")
    parser.add_argument("--draft", help="for model: a smaller model")
    parser.add_argument(
        "--keys", type=float, default=512, help="for magicdec, which drafts in texts of any length here"
    )
    parser.add_argument("--model")
    parser.add_argument("--dtype")
    parser.add_argument("--device")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--live", action="store_true", help="run drafters on the known prompts instead of replaying")
    return parser.parse_args()


def options_of(given: argparse.Namespace, model: Any, tokenizer: Any) -> dict[str, dict[str, Any]]:
    """Of each drafter that was named."""
    options: dict[str, dict[str, Any]] = {name: {} for name in given.drafters.split(",")}
    if "rest" in options:
        options["rest"]["store"] = given.store
    if "model" in options:
        options["model"] |= {"draft_model": draft_of(model, given.draft), "draft_tokenizer": tokenizer}
    if "magicdec" in options:
        options["magicdec"] |= {"keys": given.keys, "shortest": 0}
    return options


def asks_target(one: Ours) -> bool:
    """Whether it drafts by forwards of the target, which a recording can't answer."""
    return one.name in ("magicdec", "lookahead")


def halves(files: Sequence[Path], categories: Sequence[str] | None, limit: int) -> tuple[list[Prompt], list[Prompt]]:
    """First questions, spread over the categories: of each category every other one is kept unseen."""
    known, unseen = list[Prompt](), list[Prompt]()
    for file in files:
        turns = {prompt.id: prompt.turns[:1] for prompt in read(file)}
        every = [Prompt(p.id, p.category, turns[p.id]) for p in read(file)]
        chosen = select(every, categories, 2 * limit)
        for category in dict.fromkeys(p.category for p in chosen):
            mine = [p for p in chosen if p.category == category]
            known += mine[::2]
            unseen += mine[1::2]
    return known, unseen


def draft_of(model: Any, name: str | None) -> Any:
    if name is not None:
        return load_model(name, dtype=model.dtype, device=model.device)[0]
    draft = copy.copy(model)
    draft._modules = dict(model._modules)
    draft.config = copy.deepcopy(model.config)
    draft.model = copy.copy(model.model)
    draft.model._modules = dict(model.model._modules)
    kept = [copy.copy(layer) for i, layer in enumerate(model.model.layers) if i not in MISSED_LEAST]
    for i, layer in enumerate(kept):
        layer._modules = {**layer._modules, "self_attn": copy.copy(layer.self_attn)}
        layer.self_attn.layer_idx = i
    draft.model.layers = torch.nn.ModuleList(kept)
    draft.config.num_hidden_layers = len(kept)
    draft.model.config = draft.config
    return draft


def lived(
    contestants: Sequence[Ours], items: Sequence[Item], decoding: Decoding, repeats: int
) -> dict[str, list[Tally]]:
    """Everyone's answers to these items, in turn. Ctrl-C ends it with the items that all have answered."""
    runs: dict[str, list[MeasuredRun]] = {contestant.name: [] for contestant in contestants}
    with suppress(KeyboardInterrupt):
        for run in measure(contestants, items, decoding, repeats):
            runs[run.contestant].append(run)
            if not run.equal:
                tell(f"{run.contestant}: the text of {run.item} differs")
    answered = min(map(len, runs.values()))
    tell(f"{answered} of {repeats * len(items)} prompts were answered by all")
    return {name: by_item(of[:answered]) for name, of in runs.items()}


def by_item(runs: Sequence[MeasuredRun]) -> list[Tally]:
    """One of each item, the repeats added up: they say the same text, so they are one case."""
    found: dict[str, list[Tally]] = {}
    for run in runs:
        found.setdefault(run.item, []).append(tally(run.category, run.answer))
    return [
        replace(
            of[0],
            steps=sum(t.steps for t in of),
            kept=[sum(counts) for counts in zip(*(t.kept for t in of), strict=True)],
            drafting=sum(t.drafting for t in of),
            verifying=sum(t.verifying for t in of),
            host=sum(t.host for t in of),
        )
        for of in found.values()
    ]


def tally(category: str, answer: Answer) -> Tally:
    """From an answer's statistics, without the prompt's own step and time."""
    stats = answer.stats
    assert stats is not None
    kept = [0] * DEEPEST
    for length, steps in stats.accepted_lengths.items():
        for depth in range(min(length, DEEPEST)):
            kept[depth] += steps
    verifying = stats.verify_seconds - stats.first_token_seconds
    host = answer.seconds - stats.draft_seconds - stats.verify_seconds  # whatever no other clock covers is the host's
    return Tally(category, stats.steps - 1, kept, drafting=stats.draft_seconds, verifying=verifying, host=host)


def show(rows: Sequence[dict[str, Any]]) -> None:
    for row in rows:
        tell(f"{row['drafter']}:")
        for what in ("tokens", "speedup"):
            one = row[what]
            error = one["value"] / one["measured"] - 1
            tell(
                f"  {what:8} forecast {one['value']:.2f} ({one['low']:.2f}-{one['high']:.2f}), measured "
                f"{one['measured']:.2f}: {error:+.0%}, {'within' if one['held'] else 'OUTSIDE'}"
            )
        for reason in row["why"]:
            tell(f"  {reason}")


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
