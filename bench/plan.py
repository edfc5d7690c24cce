"""A plan against reality: python bench/plan.py --prompts FILE [--store STORE] [--device cuda --live]

Half of the prompts are answered plainly and recorded. Each drafter is replayed on them (with --live: run on them),
which tells its survival and what its drafts take. From that and from the costs of steps, tokens per step and the
speed-up on the other half are forecast, with intervals. Then all answer the other half, in turn. Speed-ups are of
decoding alone: the prompts, which take everybody as long, are left out.

`model` drafts with the target's own layers but for those that its answers miss least.

Prints a table to stderr and one JSON line.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from slipstream import LLM
from slipstream.drafters._capabilities import layers
from slipstream.evaluate.contestants import Answer, Decoding, Ours
from slipstream.evaluate.measure import Item, measure, prepare
from slipstream.evaluate.replay import Recording, record
from slipstream.evaluate.report import provenance
from slipstream.evaluate.workloads import Prompt, read, select
from slipstream.plan.forecast import as_row, forecast, outcome
from slipstream.plan.survival import DEEPEST, Tally, replayed
from slipstream.targets import load_model

# Of the embedded model's layers, those without which most tokens stay what they were (4 MT-Bench prompts, 40 tokens).
MISSED_LEAST = (3, 4, 5, 6, 7, 9, 16, 17)


def main() -> None:
    given = arguments()
    if given.threads:
        torch.set_num_threads(given.threads)
    model, tokenizer = load_model(given.model, dtype=given.dtype, device=given.device)
    options: dict[str, dict[str, Any]] = {name: {} for name in given.drafters.split(",")}
    if "rest" in options:
        options["rest"]["store"] = given.store
    if "model" in options:
        options["model"] |= {"draft_model": draft_of(model, given.draft), "draft_tokenizer": tokenizer}
    decoding = Decoding(given.tokens)
    plain = Ours("none", LLM(model, tokenizer, "none"))
    known, unseen = halves(given.prompts, given.limit)
    items = [list(prepare(plain, half, decoding)) for half in (known, unseen)]
    tell(f"recorded {len(items[0])} known and {len(items[1])} unseen prompts")
    contestants = [plain, *(Ours(name, LLM(model, tokenizer, name, **own)) for name, own in options.items())]
    if given.live:
        trial = lived(contestants, items[0], decoding, 1)
        each = sum(t.seconds for t in trial["none"]) / sum(t.tokens for t in trial["none"])
    else:
        wanted = sorted({layer for one in contestants for layer in layers(one.llm.engine.drafter)})
        recording = record(plain.llm.target, plain.llm.name, items[0], decoding, wanted)
        trial = {name: replay(recording, name, own, model, tokenizer) for name, own in ({"none": {}} | options).items()}
        each = recording.seconds(1) + sum(t.host for t in trial["none"]) / sum(t.steps for t in trial["none"])
    expected = {name: forecast(trial[name], each, len(items[1])) for name in options}
    for name, one in expected.items():
        tell(f"{name}: forecast {one.tokens} tokens per step, {one.speedup} × plain")
    found = lived(contestants, items[1], decoding, given.repeats)
    rows = [as_row(name, one, outcome(found[name], found["none"])) for name, one in expected.items()]
    show(rows)
    about = {**provenance(plain.llm.name, plain.llm.target), "options": {k: str(v) for k, v in vars(given).items()}}
    print(json.dumps({"benchmark": "plan", "provenance": about, "rows": rows}))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, nargs="+", required=True)
    parser.add_argument("--limit", type=int, default=8, help="known prompts, and as many unseen ones, of each file")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--drafters", default="suffix,rest,eagle3,redrafter,model")
    parser.add_argument("--store", help="for rest")
    parser.add_argument("--draft", help="for model: a smaller model")
    parser.add_argument("--model")
    parser.add_argument("--dtype")
    parser.add_argument("--device")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--live", action="store_true", help="run drafters on the known prompts instead of replaying")
    return parser.parse_args()


def halves(files: Sequence[Path], limit: int) -> tuple[list[Prompt], list[Prompt]]:
    """First questions, spread over the categories: of each category every other one is kept unseen."""
    known, unseen = list[Prompt](), list[Prompt]()
    for file in files:
        turns = {prompt.id: prompt.turns[:1] for prompt in read(file)}
        every = [Prompt(p.id, p.category, turns[p.id]) for p in read(file)]
        chosen = select(every, None, 2 * limit)
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


def replay(recording: Recording, name: str, options: dict[str, Any], model: Any, tokenizer: Any) -> list[Tally]:
    tell(f"replaying {name}")
    return replayed(recording, name, options, model, tokenizer)


def lived(
    contestants: Sequence[Ours], items: Sequence[Item], decoding: Decoding, repeats: int
) -> dict[str, list[Tally]]:
    """Everyone's answers to these items, in turn. Ctrl-C ends it with the items that all have answered."""
    found: dict[str, list[Tally]] = {contestant.name: [] for contestant in contestants}
    with suppress(KeyboardInterrupt):
        for run in measure(contestants, items, decoding, repeats):
            found[run.contestant].append(tally(run.category, run.answer))
            if not run.equal:
                tell(f"{run.contestant}: the text of {run.item} differs")
    answered = min(map(len, found.values()))
    tell(f"{answered} of {repeats * len(items)} prompts were answered by all")
    return {name: tallies[:answered] for name, tallies in found.items()}


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
