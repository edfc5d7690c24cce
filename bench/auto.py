"""The overhead of `auto`, and its speed on real prompts: python bench/auto.py [PART…] --prompts FILE…

overhead  microseconds of the budget per step, for a tree of 64 nodes from two drafters: finishing the last step,
          labelling its draft, fusing and choosing; and the same with judging, which can be done while the step runs
settings  the best node limit of each single drafter on this machine, by replay: drafts are made and timed, steps take
          the target's time for so many rows
live      `none`, `auto` and single drafters answer the same prompts in turns, with --piece also within an answer. For
          each category the ratio of seconds per token to plain decoding's, a mean over each prompt's repeats, with a
          bootstrapped 95% interval over both. Answers during which something was captured, as happens once per process,
          are repeated. After an interruption it reports what it has. --autos adds an `auto` with other heads

fresh     like use on the command line: for each prompt and repeat a new process, in which `auto` answers first, then
          `none` and the single drafters. For comparison, for each repeat a process that answers all of them after eight
          other prompts, so that `auto` is warm

batches   `auto` with 1, 4, 16 and 64 sequences next to plain decoding, and what it decides: which drafters it asked,
          whether it verified anything, expected and actual tokens per sequence, the time of proposing and of steps.
          There are --fill times as many prompts as sequences: when a text ends, the next one takes its place. Texts
          have from half of --tokens to one and a half, so that they end one by one, as they do for anybody's requests

A single drafter is a name, or NAME:NODES for at most so many nodes a step. After `settings`, `live` takes the two that
were best there. Tables go to stderr, one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import cycle
from time import perf_counter
from typing import Any

import numpy as np
import torch
import transformers

import slipstream
from gpu import known_of, settled, tell
from slipstream import LLM
from slipstream.budget.costs import TRIAL, Costs, TypicalTime
from slipstream.budget.pilot import Draft, Pilot, Text
from slipstream.drafters import _capabilities as can
from slipstream.drafters._head import own_head
from slipstream.errors import DrafterError
from slipstream.evaluate.contestants import Decoding, Ours
from slipstream.evaluate.measure import prepare
from slipstream.evaluate.replay import Replayed, record
from slipstream.evaluate.workloads import Prompt, builtin, read, select
from slipstream.stopwatch import Stopwatch
from slipstream.targets import load_model
from slipstream.tree import TokenTree, fuse

RESAMPLES = 2000


# ---- overhead


def overhead(given: argparse.Namespace) -> dict[str, Any]:
    del given
    rng = np.random.default_rng(0)
    costs = Costs({1: 1.1e-3, 8: 1.15e-3, 16: 1.25e-3, 32: 1.3e-3, 64: 1.5e-3}, padded=True)
    pilot = Pilot(costs, ["one", "other"])
    drafts, state = [random_tree(rng, "one"), random_tree(rng, "other")], Text()
    whole, sources = fuse(drafts), list(pilot.sources().values())
    for source in sources:
        source.drafting = TypicalTime(TRIAL, 1e-5)
    texts = cycle([tree.tokens[tree.path_to(len(tree) - 1)[1:]].tolist() for tree in drafts])  # each is right at times
    parts: dict[str, Callable[[], Any]] = {
        "settle": lambda: (costs.observe(8, 1, 1.1e-3), state.see(1.5)),
        "label": lambda: pilot.calibration.learn(whole, next(texts)),
        "choose": lambda: pilot.choose([Draft(state, fuse(drafts), 63)], sources),
        "and judge": lambda: (pilot.choose([Draft(state, fuse(drafts), 63)], sources), pilot.judge()),
    }
    told = {name: round(microseconds(part), 1) for name, part in parts.items()}
    told["all"] = round(sum(told.values()) - told["choose"], 1)  # whose time is in the next
    for name, spent in told.items():
        tell(f"{name:9} {spent:7.1f} µs")
    return {"nodes": len(whole) - 1, "microseconds": told}


def random_tree(rng: np.random.Generator, source: str, nodes: int = 32) -> TokenTree:
    parents = [-1, *(int(rng.integers(max(0, i - 6), i)) for i in range(1, nodes + 1))]
    tokens = rng.integers(1, 1000, nodes + 1, dtype=np.int32)
    tokens[0] = 0
    return TokenTree.build(tokens, parents, source=source, raw=rng.random(nodes + 1).astype(np.float32))


def microseconds(part: Callable[[], Any], repeats: int = 200, together: int = 20) -> float:
    """The median of means, since not every step does everything."""
    times = []
    for _ in range(repeats):
        clock = perf_counter()
        for _ in range(together):
            part()
        times.append(perf_counter() - clock)
    return statistics.median(times[10:]) / together * 1e6


# ---- settings

SIZES = (1, 2, 3, 4, 7, 15, 31)  # nodes of a step at most


def settings(given: argparse.Namespace) -> dict[str, Any]:
    model, tokenizer = load_model(given.model, dtype=given.dtype, device=given.device)
    plain = Ours("none", LLM(model, tokenizer, "none", compile=given.compile))
    tried = ("pld", "suffix", *(name for name in ("eagle3", "redrafter") if has_head(model, name)))
    layers = {layer for name in tried for layer in can.layers(LLM(model, tokenizer, name).engine.drafter)}
    decoding = Decoding(max_new_tokens=given.tokens)
    items = list(prepare(plain, [replace(p, turns=p.turns[:1]) for p in prompts_of(given)], decoding))
    recording = record(plain.llm.target, plain.llm.name, items, decoding, sorted(layers))
    told: dict[str, Any] = {}
    plainly = replayed(Replayed("none", recording, tokenizer), 0)["seconds_per_token"]
    for name in tried:
        contestant = Replayed(name, recording, tokenizer, model)
        for nodes in SIZES:
            found, label = replayed(contestant, nodes), f"{name}:{nodes}"
            told[label] = found | {"times_plain": plainly / found["seconds_per_token"]}
            tell(f"{label:16}" + "  ".join(f"{k} {v:.3g}" for k, v in told[label].items()))
    best = [max((k for k in told if k.split(":")[0] == name), key=lambda k: told[k]["times_plain"]) for name in tried]
    given.singles = ",".join(sorted(best, key=lambda k: -told[k]["times_plain"])[:2])
    tell(f"best: {given.singles}")
    return {"step_ms": {n: round(t * 1e3, 3) for n, t in recording.cost.items()}, "found": told, "best": given.singles}


def replayed(contestant: Replayed, nodes: int) -> dict[str, float]:
    """Every recorded text with drafts of so many nodes at most."""
    contestant.max_draft = nodes
    recording = contestant.recording
    contestant.answer(recording.items[0].tokens, recording.decoding)  # what is compiled, is compiled now
    answers = contestant.answers([item.tokens for item in recording.items], recording.decoding)
    tokens = sum(len(a.tokens) - 1 for a in answers)
    found = [a.stats for a in answers if a.stats is not None]
    steps = sum(s.steps - 1 for s in found)
    return {
        "seconds_per_token": sum(a.seconds - a.first_token_seconds for a in answers) / tokens,
        "tokens_per_step": tokens / steps,
        "nodes": sum(s.nodes_verified for s in found) / steps,
        "draft_ms": sum(s.draft_seconds for s in found) / steps * 1e3,
    }


def has_head(model: Any, name: str) -> bool:
    try:
        own_head(name, model)
    except DrafterError:
        return False
    return True


def prompts_of(given: argparse.Namespace) -> list[Prompt]:
    asked = [p for file in given.prompts for p in select(read(file), None, given.limit)]
    return asked or select(builtin(), None, given.limit)


# ---- live


def live(given: argparse.Namespace) -> dict[str, Any]:
    model, tokenizer = load_model(given.model, dtype=given.dtype, device=given.device)
    asked = prompts_of(given)
    llms, most = {}, dict[str, int | None]()  # by contestant; nodes of a step at most
    folders = dict(word.split("=", 1) for word in given.heads)
    for name in ("none", "auto", *filter(None, given.singles.split(","))):
        drafter, _, nodes = name.partition(":")
        own = {"drafter_path": folders[drafter]} if drafter in folders else {}
        llms[name] = LLM(model, tokenizer, drafter, compile=given.compile, **own)
        most[name] = int(nodes) if nodes else None
    for word in given.autos:
        name, _, listed = word.partition("=")
        llms[name] = LLM(model, tokenizer, "auto", compile=given.compile, heads=listed)
        most[name] = None
    longest = max((p.turns[0] for p in asked), key=len)
    for name, llm in llms.items():  # code is loaded, caches grow, steps are captured
        for prompt in (longest, *(p.turns[0] for p in asked[: given.warm])):
            llm.generate(prompt, max_new_tokens=given.tokens, max_draft=most[name], ignore_eos=True)
    # (prompts, repeats) seconds per token behind the first
    taken = {name: np.zeros((len(asked), given.repeats)) for name in llms}
    same, captures, repeats, answered = dict.fromkeys(llms, 0), 0.0, 0, 0
    with suppress(KeyboardInterrupt):
        while repeats < given.repeats:
            for i, prompt in enumerate(asked):
                said, captured = settled(partial(answers, llms, most, prompt.turns[0], given, repeats + i))
                captures += captured
                for name, answer in said.items():
                    taken[name][i, repeats] = answer.seconds / max(1, len(answer.tokens) - 1)
                    same[name] += answer.tokens == said["none"].tokens
                answered += 1
            repeats += 1
            tell(f"repeat {repeats} of {given.repeats}: " + ratios(taken, repeats))
    if not repeats:
        raise SystemExit("interrupted before everybody had answered everything once: ask fewer --prompts")
    taken = {name: spent[:, :repeats] for name, spent in taken.items()}
    told: dict[str, Any] = {}
    categories = np.array([p.category for p in asked])
    for category in (*dict.fromkeys(categories.tolist()), "all"):
        rows = np.ones(len(asked), np.bool_) if category == "all" else categories == category
        told[category] = {
            name: interval(taken["none"][rows], spent[rows]) for name, spent in taken.items() if name != "none"
        }
        shown = "  ".join(f"{n} {r[0]:.3f} ({r[1]:.3f}-{r[2]:.3f})" for n, r in told[category].items())
        tell(f"{category:24} {rows.sum():3} prompts  {shown}")
    for source in llms["auto"].engine.drafter.pilot.sources().values():
        tell(f"      {known_of(source)}")
    tell(f"captures took {captures:.2f} s")
    slower = [c for c, found in told.items() if found["auto"][2] < 1]
    return {
        "times_plain": told,
        "ms_per_token": {name: (1e3 * spent).round(3).tolist() for name, spent in taken.items()},
        "capture_seconds": round(captures, 3),
        "auto_slower_in": slower,  # categories whose whole interval lies below 1
        "same_text_as_plain": {name: f"{count}/{answered}" for name, count in same.items()},
        "prompts": len(asked),
        "repeats": repeats,
        "tokens": given.tokens,
        "piece": given.piece or given.tokens,
        "dtype": str(model.dtype),
    }


# ---- fresh


def fresh(given: argparse.Namespace) -> dict[str, Any]:
    asked, singles = prompts_of(given), given.singles.split(",")
    names = ("auto", "none", *singles)
    taken = {f"{name}{when}": np.zeros((len(asked), given.repeats)) for name in names for when in ("", " warmed")}
    same, said = 0, in_processes(given, [*(([prompt], 0) for prompt in asked), (asked, WARMING)] * given.repeats)
    for repeat in range(given.repeats):
        for i, prompt in enumerate(asked):
            (found,) = next(said)
            same += found["same"]
            for name in names:
                taken[name][i, repeat] = found[name]
            shown = "  ".join(f"{n} {found['none'] / found[n]:.2f}" for n in ("auto", *singles))
            tell(f"{prompt.category:20} {shown}")
        for i, found in enumerate(next(said)):
            same += found["same"]
            for name in names:
                taken[f"{name} warmed"][i, repeat] = found[name]
        tell(f"repeat {repeat + 1}: " + ratios({n: t for n, t in taken.items() if n in names}, repeat + 1))
    told = {name: interval(taken["none"], taken[name]) for name in ("auto", *singles)}
    told["auto warmed"] = interval(taken["none warmed"], taken["auto warmed"])
    told["auto / warmed"] = interval(taken["auto warmed"] / taken["none warmed"], taken["auto"] / taken["none"])
    for name, (ratio, low, high) in told.items():
        tell(f"{name:20} {ratio:.3f} ({low:.3f}-{high:.3f})")
    return {
        "times_plain": told,
        "ms_per_token": {name: (1e3 * spent).round(3).tolist() for name, spent in taken.items()},
        "same_text_as_plain": f"{same}/{2 * len(asked) * given.repeats}",
        "tokens": given.tokens,
    }


WARMING = 8  # built-in prompts


def in_processes(given: argparse.Namespace, asked: list[tuple[list[Prompt], int]]) -> Iterator[list[dict[str, Any]]]:
    """What new processes say, each to some prompts after so many others. On a GPU the next one begins to load its code
    while one answers, since the host has more cores than that."""
    words = [sys.executable, __file__, "process", "--singles", given.singles, "--tokens", str(given.tokens)]
    for option in ("model", "dtype", "device"):
        if getattr(given, option):
            words += [f"--{option}", getattr(given, option)]
    ahead, begun = 1 + (given.device or "").startswith("cuda"), list[subprocess.Popen[str]]()
    for number, (prompts, _) in enumerate(asked):
        for _, warm in asked[len(begun) : number + ahead]:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            begun.append(subprocess.Popen([*words, "--warm", str(warm)], **pipes))
        out, _ = begun[number].communicate(json.dumps([prompt.turns[0] for prompt in prompts]))
        if begun[number].returncode:
            raise SystemExit("a process failed")
        yield json.loads(out.splitlines()[-1])["process"]


def process(given: argparse.Namespace) -> list[dict[str, Any]]:
    """What one of `fresh` does: answers the prompts on standard input, after so many others."""
    prompts = json.load(sys.stdin)
    auto = slipstream.load(given.model, drafter="auto", dtype=given.dtype, device=given.device)
    llms, most = {"auto": auto}, dict[str, int | None]()
    for name in ("none", *given.singles.split(",")):
        drafter, _, nodes = name.partition(":")
        llms[name] = LLM(auto.model, auto.tokenizer, drafter)
        most[name] = int(nodes) if nodes else None
    for name, llm in llms.items():  # others have nothing to learn
        for prompt in builtin()[: given.warm if name == "auto" else min(1, given.warm)]:
            llm.generate(prompt.turns[0], max_new_tokens=given.tokens)
    found = []
    for prompt in prompts:
        taken, texts = dict[str, Any](), []
        for name, llm in llms.items():
            answer = Answer(llm, prompt, max_new_tokens=given.tokens, max_draft=most.get(name))
            answer.go_on(given.tokens)
            taken[name] = answer.seconds / max(1, len(answer.tokens) - 1)
            texts.append(answer.tokens)
        found.append({**taken, "same": all(text == texts[0] for text in texts)})
    return found


# ---- batches


def batches(given: argparse.Namespace) -> dict[str, Any]:
    model, tokenizer = load_model(given.model, dtype=given.dtype, device=given.device)
    prompts = [p.turns[0] for p in prompts_of(given)]
    told: dict[str, Any] = {}
    for size in (1, 4, 16, 64):
        asked = (prompts * (1 + given.fill * size // len(prompts)))[: given.fill * size]
        llms = {name: LLM(model, tokenizer, name, max_batch=size, compile=given.compile) for name in ("none", "auto")}
        taken = np.zeros((2, 2 + given.repeats))
        for repeat in range(2 + given.repeats):
            if repeat == 1 + given.repeats:  # watching takes time
                log = watched(llms["auto"])
            for i, llm in enumerate(llms.values()):
                requests = [
                    llm.request(prompt, max_new_tokens=length, ignore_eos=True)
                    for prompt, length in zip(asked, lengths(len(asked), given.tokens), strict=True)
                ]
                whole = Stopwatch()  # without captures
                for _ in llm.engine.run(requests):
                    pass
                taken[i, repeat] = whole.seconds()
        counted = taken[:, 1:-1]  # the first time, code is loaded
        told[str(size)] = interval(counted[:1], counted[1:])
        tell(f"{size} sequences: auto {told[str(size)]} × plain; once more:")
        groups: dict[tuple[int, tuple[str, ...], bool], list[tuple[float, ...]]] = {}
        for key, numbers in log:
            groups.setdefault(key, []).append(numbers)
        for (batch, names, verified), lines in sorted(groups.items(), key=lambda item: -len(item[1]))[:8]:
            nodes, expected, got, *_ = np.mean(lines, 0)
            proposing, step, planned, plain = np.median(lines, 0)[3:]  # some steps capture something
            what = f"{nodes:.0f} nodes" if verified else "nothing"
            tell(
                f"  {len(lines):4} steps of {batch}, asked {' '.join(names) or 'nobody'}, verified {what}: expected "
                f"{expected:.2f} tokens, got {got:.2f}; proposing {proposing * 1e3:.3f} ms, all {step * 1e3:.3f}, "
                f"expected {planned * 1e3:.3f}, a plain one {plain * 1e3:.3f}"
            )
        for source in llms["auto"].engine.drafter.pilot.sources(size).values():
            tell(f"      {known_of(source)}")
    return told


def lengths(texts: int, tokens: int) -> list[int]:
    """From half of the tokens to one and a half, spread evenly over any few texts that follow each other."""
    return [round(tokens * (0.5 + i * 0.618034 % 1)) for i in range(texts)]


def watched(llm: LLM) -> list[tuple[tuple[int, tuple[str, ...], bool], tuple[float, ...]]]:
    """A list that each step of it is added to."""
    engine, log = llm.engine, list[tuple[tuple[int, tuple[str, ...], bool], tuple[float, ...]]]()
    drafter, step, propose, spent = engine.drafter, engine.step, engine.drafter.propose, [0.0]

    def proposed(*asked: Any) -> Any:
        clock = perf_counter()
        found = propose(*asked)
        spent[0] = perf_counter() - clock
        return found

    def stepped(running: list[Any], readings: Any = ()) -> None:
        batch, before, clock = len(running), sum(len(s.tokens) for s in running), perf_counter()
        step(running, readings)
        taken, choice = perf_counter() - clock, drafter.choice
        got = sum(len(s.tokens) for s in running) - before
        times = spent[0], taken, choice.tokens / choice.rate, batch / choice.plain
        numbers = choice.nodes / batch, choice.tokens / batch, got / batch, *times
        log.append(((batch, choice.asked, choice.nodes > 0), numbers))

    drafter.propose, engine.step = proposed, stepped
    return log


class Answer:
    """An answer that is given bit by bit."""

    def __init__(self, llm: LLM, prompt: str, **options: Any) -> None:
        self._steps = llm.engine.run([llm.request(prompt, **options)])
        self.tokens = next(self._steps).tokens
        self.seconds = 0.0  # behind the first token

    def go_on(self, tokens: int) -> None:
        """Until it has so many, or is over."""
        if len(self.tokens) >= tokens:
            return
        clock = perf_counter()
        for sequence in self._steps:
            if sequence.finish is None and len(self.tokens) >= tokens:
                break
        self.seconds += perf_counter() - clock


def answers(
    llms: dict[str, LLM], most: dict[str, int | None], prompt: str, given: argparse.Namespace, first: int
) -> dict[str, Answer]:
    """Everybody answers a prompt, in turn, one piece after another."""
    turn = deque(llms)
    turn.rotate(-first)
    going = {name: Answer(llms[name], prompt, max_new_tokens=given.tokens, max_draft=most[name]) for name in turn}
    piece = given.piece or given.tokens
    for tokens in range(piece, given.tokens + piece, piece):
        for name in turn:
            going[name].go_on(tokens)
        turn.rotate(-1)
    return going


def ratios(taken: dict[str, Any], repeats: int) -> str:
    plain = typical(taken["none"][:, :repeats])
    return "  ".join(f"{n} {plain / typical(t[:, :repeats]):.3f}" for n, t in taken.items() if n != "none")


def typical(taken: Any) -> Any:
    """(…, prompts, repeats) → (…): of each prompt the geometric mean of its repeats, which uses all of them, and which
    one that another process took the machine away from does not rule; then all prompts together."""
    return np.exp(np.log(taken).mean(-1)).sum(-1)


def interval(plain: Any, spent: Any) -> list[float]:
    """How many times as fast as plain, of all prompts together, and its 95% interval. Prompts are drawn with all they
    took, then repeats of each, so that what a pair had in common stays together."""
    rng = np.random.default_rng(0)
    prompts, repeats = plain.shape
    rows = rng.integers(0, prompts, (RESAMPLES, prompts, 1))
    columns = rng.integers(0, repeats, (RESAMPLES, prompts, repeats))
    found = typical(plain[rows, columns]) / typical(spent[rows, columns])
    low, high = np.quantile(found, [0.025, 0.975])
    return [round(float(x), 4) for x in (typical(plain) / typical(spent), low, high)]


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "overhead": overhead,
    "settings": settings,
    "live": live,
    "fresh": fresh,
    "batches": batches,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[*PARTS, "process", []], default=[])
    parser.add_argument("--model", help="default: the embedded one")
    parser.add_argument("--prompts", nargs="*", default=[], help="files; default: the built-in ones")
    parser.add_argument("--limit", type=int, default=26, help="prompts of each file, dealt out to its categories")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--device", default=None)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--fill", type=int, default=4, help="of `batches`: prompts for each sequence")
    parser.add_argument("--piece", type=int, help="tokens that each says in its turn; default: a whole answer")
    parser.add_argument(
        "--warm", type=int, default=1, help="prompts that everybody answers beforehand, and the longest"
    )
    parser.add_argument("--singles", default="pld,suffix", help="drafters to compare with, separated by commas")
    parser.add_argument("--heads", nargs="*", default=[], metavar="NAME=FOLDER", help="of singles in `live`")
    parser.add_argument("--autos", nargs="*", default=[], metavar="NAME=FOLDER,…", help="`auto` with these heads")
    given = parser.parse_args()
    report: dict[str, Any] = {"benchmark": "auto"}
    for name in given.parts or PARTS:
        report[name] = process(given) if name == "process" else PARTS[name](given)
    report["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    report["threads"] = torch.get_num_threads()
    report["versions"] = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
