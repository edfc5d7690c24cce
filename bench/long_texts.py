"""Drafts with few keys in long texts: python bench/long_texts.py PART… --text FILE… --contexts N… --batches N…

texts     a file for `slipstream train --any-author`: pieces of --contexts tokens of these files, as if an answer each
accepted  along a real text: how many tokens of each kind of draft a greedy target accepts after every token of the
          text; magicdec by selection and number of keys, and the given heads, all at the same places
speed     tokens per step and per second of these, of plain decoding and of suffix, in turns, greedy; with --auto also
          of auto with suffix, and with suffix and each of them
shape     a Llama of 8B shape with random weights and random keys: ms of a plain step, and of a step with a draft of
          magicdec by number of keys and depth, or of a spire head, by context and batch, host included; and the
          speed-up at 3 and 4 tokens per step

On a CPU `shape` is a small model, to try the script. A text is a file of plain text, or .jsonl with a field `text` or
`turns`. Prints tables, and with --json also JSON lines.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import transformers

from gpu import known_of
from slipstream.budget import Budget
from slipstream.drafters import _capabilities as can
from slipstream.drafters import make
from slipstream.drafters.base import Drafter, DraftSession, Hidden, Seen
from slipstream.drafters.magicdec import SELECTIONS
from slipstream.engine import Engine
from slipstream.errors import CacheFullError
from slipstream.evaluate.report import provenance
from slipstream.heads.spire import Spire
from slipstream.loading.models import load_model, load_tokenizer
from slipstream.request import Request
from slipstream.sampling import Sampler, Sampling
from slipstream.sequence import Kept
from slipstream.stopwatch import Stopwatch
from slipstream.targets import Slot, Want, open_target
from slipstream.text import encode
from slipstream.tree import TokenTree

GREEDY = Sampler(Sampling(), [])
TAUS = (3.0, 4.0)  # tokens per step that `shape` reckons with
WARM = 3  # steps before those that are timed
EVERY = 1 << 30  # keys: all of them

Options = dict[str, Any]


# ---- what is asked, and who drafts


def pieces(given: argparse.Namespace, tokenizer: Any, length: int, count: int) -> list[list[int]]:
    """So many texts of this length, from places of the file that lie equally far apart."""
    raw = "\n".join(read_text(Path(file)) for file in given.text)
    tokens = encode(raw, tokenizer, template=False)
    if len(tokens) < length:
        raise SystemExit(f"--text has {len(tokens)} tokens, a context of {length} needs more: give a longer text")
    far = max(1, (len(tokens) - length) // max(1, count - 1)) if len(tokens) > length else 1
    return [tokens[start : start + length] for start in (i * far % (1 + len(tokens) - length) for i in range(count))]


def cells(given: argparse.Namespace) -> list[tuple[int, int]]:
    """Lengths of texts, and how many there are."""
    if given.cells:
        return [(int(context), int(batch)) for context, _, batch in (cell.partition("x") for cell in given.cells)]
    return [(context, batch) for context in given.contexts for batch in given.batches]


def read_text(file: Path) -> str:
    raw = file.read_text("utf-8")
    if file.suffix != ".jsonl":
        return raw
    lines = [json.loads(line) for line in raw.split("\n") if line.strip()]
    return "\n\n".join(line["text"] if "text" in line else "\n\n".join(line["turns"]) for line in lines)


def magicdecs(given: argparse.Namespace, depths: Sequence[int]) -> dict[str, tuple[str, Options]]:
    """Names, drafters and their options: every selection, number of keys and depth."""
    found: dict[str, tuple[str, Options]] = {}
    for selection in given.selections:
        for keys in given.keys:
            for depth in depths:
                options = {"selection": selection, "keys": keys, "depth": depth, "shortest": 0}
                name = f"magicdec {selection} {keys:g}" + (f" ×{depth}" if len(depths) > 1 else "")
                found[name] = ("magicdec", options)
    for word in given.also:
        selection, keys, depth = word.split(":")
        options = {"selection": selection, "keys": float(keys), "depth": int(depth), "shortest": 0}
        found[f"magicdec {selection} {keys} ×{depth}"] = ("magicdec", options)
    return found


def contestants(given: argparse.Namespace) -> dict[str, tuple[str, Options]]:
    found = magicdecs(given, given.depths[-1:])
    for name, folder in heads(given).items():
        found[name] = (kind_of(name), {"drafter_path": folder, "depth": given.depths[-1]})
        if not given.trees:
            found[name][1]["width"] = 1
    if given.draft:
        found["model"] = ("model", {"draft_model": given.draft, "depth": given.depths[-1]})
    return found


def heads(given: argparse.Namespace) -> dict[str, Any]:
    """Folders by name; none: the head that comes with slipstream."""
    found = (word.partition("=") for word in given.heads)
    return {name: folder or None for name, _, folder in found}


def kind_of(name: str) -> str:
    return name.split(":")[0]


def autos(given: argparse.Namespace) -> dict[str, tuple[str, Options]]:
    """`auto` with suffix, and with suffix and each kind of those above beside it."""
    if not given.auto:
        return {}
    found: dict[str, tuple[str, Options]] = {"auto": ("auto", {"drafters": "suffix"})}
    if given.selections:
        found["auto, magicdec"] = ("auto", {"drafters": "suffix,magicdec"})
    for name, folder in heads(given).items():
        if folder:
            found[f"auto, {name}"] = ("auto", {"drafters": "suffix", "heads": folder})
    return found


def table(rows: list[dict[str, Any]]) -> None:
    rows = [{name: value for name, value in row.items() if not isinstance(value, list)} for row in rows]
    names = list(dict.fromkeys(name for row in rows for name in row))
    widths = [max(len(name), *(len(shown(row.get(name, ""))) for row in rows)) for name in names]
    for cells in (names, *([shown(row.get(name, "")) for name in names] for row in rows)):
        print("  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)), flush=True)


def report(rows: list[dict[str, Any]], given: argparse.Namespace) -> None:
    """What is known so far: a run may be cut off."""
    if rows:
        table(rows)
    if rows and given.json:
        tell(json.dumps({"rows": rows}))


def shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return value if isinstance(value, str) else f"{value:,}"


def tell(text: str) -> None:
    print(text, flush=True)


# ---- accepted


@dataclass
class Followers:
    """A drafter that is shown texts which somebody else wrote."""

    drafter: Drafter
    sessions: list[DraftSession]
    counts: list[int]  # how many drafts had 0, 1, … accepted tokens

    @classmethod
    def begin(cls, drafter: Drafter, slots: Sequence[Slot], depth: int) -> Followers:
        sessions = [drafter.begin(Request([1], 1)) for _ in slots]
        for session, slot in zip(sessions, slots, strict=True):
            can.follow(session, slot)
        return cls(drafter, sessions, [0] * (1 + depth))

    def observe(self, number: int, seen: Seen) -> None:
        """What was read of a text; of its states the drafter's own."""
        states = seen.hidden
        own = Hidden({n: states.tensors[n] for n in can.layers(self.drafter)}, states.rows, states.lasting)
        self.sessions[number].observe(Seen(seen.tokens, seen.position, own))
        can.pause(self.sessions[number])  # other drafts come before its own

    def draft(self, roots: Sequence[int], budget: Budget) -> list[TokenTree]:
        proposals = self.drafter.propose(self.sessions, roots, [budget] * len(roots))
        for session in self.sessions:
            can.pause(session)
        return [proposal.tree for proposal in proposals]

    def close(self) -> None:
        for session in self.sessions:
            session.close()


def kept_of(tree: TokenTree, said: Sequence[int]) -> int:
    """How many drafted tokens are kept if the target says this."""
    node = count = 0
    for token in said:
        child = next((c for c in tree.children(node) if tree.tokens[c] == token), None)
        if child is None:
            break
        node, count = child, count + 1
    return count


def accepted(given: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """All drafters draft behind each token. What is kept of their drafts is known from the target's own continuation,
    which is a draft with all keys."""
    model, tokenizer = load_model(given.model, dtype=given.dtype, device=given.device)
    target, depth, rows = open_target(model, memory=given.memory), given.depths[-1], list[dict[str, Any]]()
    drafters = {name: make(kind, target, tokenizer, **options) for name, (kind, options) in contestants(given).items()}
    whole = make("magicdec", target, tokenizer, keys=EVERY, depth=depth, shortest=0)
    layers = tuple(sorted({layer for drafter in drafters.values() for layer in can.layers(drafter)}))
    budget = Budget(given.nodes, depth)
    for context in given.contexts:
        clock, texts = perf_counter(), pieces(given, tokenizer, context + given.tokens, given.texts)
        slots = [target.open() for _ in texts]
        everybody = {name: Followers.begin(drafter, slots, depth) for name, drafter in drafters.items()}
        truth = Followers.begin(whole, slots, depth)
        for number, (slot, text) in enumerate(zip(slots, texts, strict=True)):
            while slot.length < context:
                piece = text[slot.length : min(context, slot.length + target.chunk)]
                (score,) = target.read([slot], [piece], Want(layers, samplers=(GREEDY,)))
                for each in everybody.values():
                    each.observe(number, Seen(piece, slot.length - len(piece), Hidden(score.hidden)))
        read = perf_counter() - clock
        for step in range(given.tokens):
            roots = [text[context + step] for text in texts]
            said = [tree.tokens[1:].tolist() for tree in truth.draft(roots, budget)]
            for each in everybody.values():
                for tree, tokens in zip(each.draft(roots, budget), said, strict=True):
                    each.counts[kept_of(tree, tokens)] += 1
            trees = [TokenTree.root(root) for root in roots]
            scores = target.score(slots, trees, Want(layers, samplers=(GREEDY,) * len(slots)))
            for number, (slot, root, score) in enumerate(zip(slots, roots, scores, strict=True)):
                target.commit(slot, [0])
                hidden = Hidden(score.hidden, score.rows([0]), score.replayed)
                for each in everybody.values():
                    each.observe(number, Seen([root], slot.length - 1, hidden))
        for name, each in everybody.items():
            rows.append({"context": context, "drafter": name, **of_counts(each.counts)})
        report(rows[-len(everybody) :], given)
        tell(f"reading {read:.1f} s, drafting {perf_counter() - clock - read:.1f} s")
        for each in (*everybody.values(), truth):
            each.close()
        for slot in slots:
            target.close(slot)
    about = provenance(str(given.model), target)
    target.release()
    return rows, about


def of_counts(counts: list[int]) -> dict[str, Any]:
    made, kept = sum(counts), sum(n * count for n, count in enumerate(counts))
    squares = sum(n * n * count for n, count in enumerate(counts))
    spread = max(0.0, squares / made - (kept / made) ** 2) ** 0.5
    return {
        "first token": 1 - counts[0] / made,
        "tokens per step": 1 + kept / made,
        "±": spread / made**0.5,  # a standard error, as if places were independent
        "drafts": made,
        "counts": counts,
    }


# ---- speed


@dataclass
class Texts:
    """Texts that were read once, from which every run begins."""

    engines: dict[str, Engine]
    prompts: list[list[int]]
    distinct: int  # so many are read, where tokens are all that is observed; the others are copies of their keys
    read: dict[str, list[Kept]] = field(default_factory=dict)  # by drafter; "": those that observe tokens alone

    def of(self, name: str) -> list[Kept]:
        """As a drafter needs them. Those that observe no more than tokens share them."""
        engine = self.engines[name]
        own = name if can.layers(engine.drafter) or name == "model" else ""
        if own not in self.read:
            distinct = self.prompts if own else self.prompts[: self.distinct]
            self.read[own] = [Kept() for _ in distinct]
            for prompt, kept in zip(distinct, self.read[own], strict=True):
                for _ in engine.run([Request(prompt, 1)], kept=kept):
                    pass
                if not own and kept.session is not None:
                    kept.session.close()
                    kept.session = None
            for number in range(len(distinct), len(self.prompts)):
                first = self.read[own][number % len(distinct)].slot
                assert first is not None, "it was read above"
                self.read[own].append(Kept(copy_of(engine.target, first)))
        return self.read[own]

    def close(self) -> None:
        for own, every in self.read.items():
            for kept in every:
                if own:
                    self.engines[own].forget(kept)
                elif kept.slot is not None:
                    next(iter(self.engines.values())).target.close(kept.slot)
        self.read.clear()


@torch.inference_mode()
def copy_of(target: Any, slot: Slot) -> Slot:
    """The same text with keys of its own."""
    if not target.paged:
        return target.fork(slot)
    twin, length = target.open(), slot.length
    target.truncate(slot, length)  # keys are in place
    target.arena.reach(twin, length, 0)
    target.arena.move(target.arena.columns(slot, 0, length), target.arena.columns(twin, 0, length))
    twin.tokens = list(slot.tokens)
    return twin


@dataclass
class Run:
    steps: int = 0  # of all sequences together
    tokens: float = 0.0  # per sequence
    seconds: float = 0.0
    draft: float = 0.0  # seconds
    verify: float = 0.0
    host: float = 0.0

    @property
    def per_step(self) -> float:
        return self.tokens / max(1, self.steps)

    def ms(self, seconds: float) -> float:
        return 1e3 * seconds / max(1, self.steps)


def run(engine: Engine, prompts: list[list[int]], read: list[Kept], tokens: int, nodes: int, steps: int = EVERY) -> Run:
    """All texts go on together until the first has its tokens, or for so many steps. The first steps are not timed."""
    found, own = Run(), list[Any]()
    requests = [Request(prompt, tokens, max_draft=nodes, watch=own.append) for prompt in prompts]
    readings = [engine.read(request, copy_from=kept) for request, kept in zip(requests, read, strict=True)]
    for reading, kept in zip(readings, read, strict=True):
        if kept.session is None and not can.layers(engine.drafter):  # nobody to copy from: it is shown the tokens
            reading.sequence.session.observe(Seen(reading.text[: reading.slot.length], 0))
    while left := [reading for reading in readings if reading.left]:
        engine.read_on(left)
    if errors := [reading.error for reading in readings if reading.error is not None]:
        raise errors[0]
    running, taken, begun = [reading.sequence for reading in readings], Stopwatch(), 0
    while all(s.finish is None for s in running) and found.steps < steps:
        if found.steps == WARM:
            wait(engine.target.device)
            taken, begun = Stopwatch(), sum(len(s.tokens) for s in running)
            own.clear()
        with engine.turn():
            engine.step(running)
        found.steps += 1
    wait(engine.target.device)
    found.seconds, found.steps = taken.seconds(), max(0, found.steps - WARM)
    found.tokens = (sum(len(s.tokens) for s in running) - begun) / len(running)
    found.draft, found.verify, found.host = (
        sum(getattr(step, f"{what}_seconds") for step in own) for what in ("draft", "verify", "host")
    )
    errors = [s.error for s in running if s.error is not None]
    for sequence in running:
        sequence.finish = sequence.finish or "cancelled"
    with engine.turn():
        engine.retire(running)
    if errors:
        raise errors[0]
    return found


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def speed(given: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    model, tokenizer = load_model(given.model, dtype=given.dtype, device=given.device)
    target, rows = open_target(model, memory=given.memory), list[dict[str, Any]]()
    everyone = {"none": ("none", {}), "suffix": ("suffix", {}), **contestants(given), **autos(given)}
    most = max(batch for _, batch in cells(given))
    engines = {
        name: Engine(target, make(kind, target, tokenizer, **options), name, most)
        for name, (kind, options) in everyone.items()
    }
    texts, before = Texts(engines, [], given.distinct), 0
    for context, batch in cells(given):
        clock, begun = perf_counter(), len(rows)
        if context != before or batch > len(texts.prompts):
            texts.close()
            prompts = pieces(given, tokenizer, context, min(batch, given.distinct))
            texts.prompts, before = [prompts[n % len(prompts)] for n in range(batch)], context
        found: dict[str, list[Run]] = {name: [] for name in engines}
        try:
            for name in engines:
                texts.of(name)
            read = perf_counter() - clock
            for _ in range(1 + given.repeats):  # the first time, code is loaded and steps are captured
                for name, engine in engines.items():
                    one = run(engine, texts.prompts[:batch], texts.of(name)[:batch], given.tokens, given.nodes)
                    found[name].append(one)
        except CacheFullError as error:
            tell(f"context {context}, batch {batch}: {str(error).partition('.')[0]}")
            texts.close()
            continue
        rates = {name: [batch * one.tokens / one.seconds for one in each[1:]] for name, each in found.items()}
        for name, each in found.items():
            row = {"context": context, "batch": batch, "drafter": name}
            row |= {"tokens per step": statistics.median(one.per_step for one in each[1:])}
            row |= {"tokens/s": statistics.median(rates[name]), "× plain": times(rates[name], rates["none"])}
            if name.startswith("auto,"):
                row |= {"× auto": times(rates[name], rates["auto"])}
            middle = sorted(each[1:], key=lambda one: one.ms(one.seconds))[len(each) // 2 - 1]
            row |= {f"{what} ms": middle.ms(getattr(middle, what)) for what in ("seconds", "draft", "verify", "host")}
            rows.append({**row, "rates": [round(rate, 1) for rate in rates[name]]})
        report(rows[begun:], given)
        for name, engine in engines.items():
            if name.startswith("auto"):
                tell(f"{name}, batches of {batch}: {'; '.join(known(engine.drafter.pilot, batch))}")
        tell(f"reading {read:.1f} s, all {perf_counter() - clock:.1f} s")
    texts.close()
    about = provenance(str(given.model), target)
    target.release()
    return rows, about


def known(pilot: Any, batch: int) -> Iterator[str]:
    """What `auto` knows after a cell."""
    yield f"a plain step {pilot.costs.seconds(1, batch) * 1e3:.2f} ms"
    for source in pilot.sources(batch).values():
        yield known_of(source)


def times(rates: list[float], others: list[float]) -> float:
    """The median of the ratios of neighbours."""
    return statistics.median(one / max(other, 1e-9) for one, other in zip(rates, others, strict=True))


# ---- shape


def llama(device: str) -> Any:
    """Random weights in the shape of Llama-3.1-8B; on a CPU a small one."""
    large = device != "cpu"
    config = transformers.LlamaConfig(
        hidden_size=4096 if large else 64,
        intermediate_size=14336 if large else 128,
        num_hidden_layers=32 if large else 4,
        num_attention_heads=32 if large else 4,
        num_key_value_heads=8 if large else 2,
        vocab_size=128256 if large else 256,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=False,
    )
    dtype = torch.bfloat16 if large else torch.float32
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return transformers.LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)


@torch.inference_mode()
def pretend(target: Any, text: list[int]) -> Slot:
    """A slot as if it had read a text. Where the cache has pages nothing is read: what its keys are does not change the
    time of steps."""
    slot = target.open()
    if not target.paged:
        for _ in target.prefill(slot, text, Want()):
            pass
        return slot
    try:
        target.arena.reach(slot, len(text), 0)
    except CacheFullError:
        target.close(slot)
        raise
    slot.tokens = list(text)
    return slot


@torch.inference_mode()
def fill_with_noise(target: Any) -> None:
    if target.paged:
        for pair in target.arena.stores():
            for store in pair:
                for layer in store:
                    layer.normal_()


def shape(given: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    clock, device = perf_counter(), given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    model, rows = llama(device), list[dict[str, Any]]()
    target = open_target(model, memory=given.memory)
    everyone: dict[str, tuple[str, Options]] = {"plain": ("none", {}), **magicdecs(given, given.depths)}
    for layers in given.layers:
        head = Spire.fresh(model, dtype=model.dtype, layers=layers)
        options = {"drafter_path": head, "depth": given.depths[-1], "width": 1}
        everyone[f"spire of {layers}"] = ("spire", options)
    engines = {
        name: Engine(target, make(kind, target, None, **options), name, max(batch for _, batch in cells(given)))
        for name, (kind, options) in everyone.items()
    }
    fill_with_noise(target)
    tell(f"{perf_counter() - clock:.1f} s until all was there")
    for context, batch in cells(given):
        clock, begun, base = perf_counter(), len(rows), list[Kept]()
        prompts = [[5 + (batch * i + n) % 200 for i in range(context + 1)] for n in range(batch)]
        try:
            for prompt in prompts:
                base.append(Kept(pretend(target, prompt)))
            rows += shape_rows(engines, prompts, base, given, {"context": context, "batch": batch})
        except CacheFullError as error:
            tell(f"context {context}, batch {batch}: {str(error).partition('.')[0]}")
        for kept in base:
            assert kept.slot is not None, "it was opened above"
            target.close(kept.slot)
        report(rows[begun:], given)
        tell(f"{perf_counter() - clock:.1f} s")
    about = provenance("Llama of random weights", target)
    target.release()
    return rows, about


def shape_rows(
    engines: dict[str, Engine], prompts: list[list[int]], base: list[Kept], given: argparse.Namespace, where: Options
) -> list[dict[str, Any]]:
    rows, plain = list[dict[str, Any]](), 0.0
    for name, engine in engines.items():
        run(engine, prompts, base, 1 << 16, given.nodes, WARM + 2)  # captures
        one = run(engine, prompts, base, 1 << 16, given.nodes, WARM + given.steps)
        times = {"step": one.seconds, "draft": one.draft, "verify": one.verify, "host": one.host}
        rows.append({**where, "drafter": name, **{f"{what} ms": one.ms(spent) for what, spent in times.items()}})
        plain = plain or one.ms(one.seconds)
        if name == "plain":
            continue
        depth = engine.drafter.options.depth
        rows[-1] |= {"depth": depth, "pays from": one.ms(one.seconds) / plain}
        rows[-1] |= {f"× at {tau:g}": tau * plain / one.ms(one.seconds) for tau in TAUS if tau <= 1 + depth}
    return rows


# ---- texts


def texts(given: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """As many tokens in pieces of each length."""
    tokenizer, _ = load_tokenizer(given.model)
    files = [read for file in given.text if (read := read_text(Path(file))).strip()]  # some are empty
    tokens = [token for file in files for token in encode(file, tokenizer, template=False)][: given.most or None]
    begin, rows, share = 0, list[dict[str, Any]](), len(tokens) // len(given.contexts)
    with Path(given.out).open("w", encoding="utf-8") as out:
        for context in given.contexts:
            count = share // context
            for number in range(count):
                piece = tokens[begin + number * context : begin + (number + 1) * context]
                line = {"id": f"{context}-{number}", "model": "texts", "tokens": piece, "answers": [[0, context]]}
                out.write(json.dumps(line) + "\n")
            rows.append({"length": context, "texts": count})
            begin += share
    table(rows)
    return rows, {"tokens": len(tokens)}


PARTS = {"texts": texts, "accepted": accepted, "speed": speed, "shape": shape}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--model", help="default: the embedded one")
    parser.add_argument("--device")
    parser.add_argument("--dtype", default="auto", help="of the model; float32 on a CPU is exact")
    parser.add_argument("--memory", type=float, default=0.9, help="share of a GPU's free memory for texts")
    parser.add_argument("--text", nargs="+", default=[], help="files of real text")
    parser.add_argument("--contexts", nargs="+", type=int, default=[1024, 4096])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--cells", nargs="*", default=[], metavar="CONTEXTxBATCH", help="instead of all combinations")
    parser.add_argument("--selections", nargs="*", default=list(SELECTIONS), choices=SELECTIONS)
    parser.add_argument("--keys", nargs="+", type=float, default=[256, 512], help="of magicdec")
    parser.add_argument("--also", nargs="*", default=[], metavar="SELECTION:KEYS:DEPTH", help="further magicdecs")
    parser.add_argument(
        "--heads", nargs="*", default=[], metavar="KIND=FOLDER", help="spire=…; KIND:NAME=…; eagle3: the shipped one"
    )
    parser.add_argument("--trees", action="store_true", help="heads draft trees; else chains, as magicdec does")
    parser.add_argument("--draft", help="a draft model's folder: the vanilla draft")
    parser.add_argument("--auto", action="store_true", help="speed: also auto, with and without these")
    parser.add_argument("--layers", nargs="*", type=int, default=[], help="shape: of spire heads")
    parser.add_argument(
        "--depths", nargs="+", type=int, default=[4], help="tokens ahead; shape tries all, others the last"
    )
    parser.add_argument("--nodes", type=int, default=31, help="of a draft at most")
    parser.add_argument("--distinct", type=int, default=8, help="speed: texts that are read; others are copies")
    parser.add_argument("--texts", type=int, default=4, help="accepted: places of the text")
    parser.add_argument("--tokens", type=int, default=64, help="of each")
    parser.add_argument("--repeats", type=int, default=5, help="speed")
    parser.add_argument("--steps", type=int, default=12, help="shape: timed ones")
    parser.add_argument("--out", help="texts: the file")
    parser.add_argument("--most", type=int, default=0, help="texts: tokens of all; 0: no limit")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if not given.text and given.parts != ["shape"]:
        parser.error("--text FILE is needed for all but shape")
    for name in given.parts:
        print(f"\n{name}", flush=True)
        rows, about = PARTS[name](given)
        if given.json:
            options = {key: value for key, value in vars(given).items() if key not in ("parts", "json")}
            print(json.dumps({"part": name, "rows": rows, "options": options, "provenance": about}), flush=True)


if __name__ == "__main__":
    main()
