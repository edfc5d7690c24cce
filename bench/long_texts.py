"""Drafts with few keys in long texts: python bench/long_texts.py [PART…] --text FILE --contexts N… --batches N…

accepted  along a real text: how many tokens of each kind of draft a greedy target accepts after every token of the
          text; magicdec by selection and number of keys, and the given heads
speed     tokens per step and per second of these, of plain decoding and of suffix, in turns, greedy
shape     a Llama of 8B shape with random weights: ms of a plain step, of a verification, of a drafting step on part of
          the keys and of a draft by a spire head, by context and batch; and the speed-up at 3 and 4 tokens per step

On a CPU `shape` is a small model, to try the script. A text is a file of plain text, or .jsonl with a field `text`.
Prints tables; with --json also one JSON line for each part.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import transformers

from slipstream.budget import Budget
from slipstream.drafters import _capabilities as can
from slipstream.drafters import make
from slipstream.drafters.base import Drafter, DraftSession, Hidden, Seen
from slipstream.drafters.magicdec import SELECTIONS, chosen_blocks
from slipstream.engine import Engine
from slipstream.evaluate.report import provenance
from slipstream.heads.spire import Spire
from slipstream.loading.models import load_model
from slipstream.request import Request, Step
from slipstream.sampling import Sampler, Sampling
from slipstream.targets import Slot, Target, Want, open_target
from slipstream.text import encode
from slipstream.tree import TokenTree

GREEDY = Sampler(Sampling(), [])
TAUS = (3.0, 4.0)  # tokens per step that `shape` reckons with


# ---- what is asked, and who drafts


def pieces(given: argparse.Namespace, tokenizer: Any, length: int, count: int) -> list[list[int]]:
    """So many texts of this length, from places of the file that lie equally far apart."""
    raw = "\n".join(read_text(Path(file)) for file in given.text)
    tokens = encode(raw, tokenizer, template=False)
    if len(tokens) < length:
        raise SystemExit(f"--text has {len(tokens)} tokens, a context of {length} needs more: give a longer text")
    far = max(1, (len(tokens) - length) // max(1, count - 1)) if len(tokens) > length else 1
    return [tokens[start : start + length] for start in (i * far % (1 + len(tokens) - length) for i in range(count))]


def read_text(file: Path) -> str:
    raw = file.read_text("utf-8")
    return "\n".join(json.loads(line)["text"] for line in raw.splitlines()) if file.suffix == ".jsonl" else raw


def contestants(given: argparse.Namespace) -> dict[str, tuple[str, dict[str, Any]]]:
    """Names, drafters and their options."""
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for selection in given.selections:
        for keys in given.keys:
            options = {"selection": selection, "keys": keys, "depth": given.depth, "shortest": 0}
            found[f"magicdec {selection} {keys:g}"] = ("magicdec", options)
    for name, folder in (word.split("=", 1) for word in given.heads):
        found[name] = (name.split(":")[0], {"drafter_path": folder, "depth": given.depth})
        if not given.trees:
            found[name][1]["width"] = 1
    if given.draft:
        found["model"] = ("model", {"draft_model": given.draft, "depth": given.depth})
    return found


def table(rows: list[dict[str, Any]]) -> None:
    names = list(rows[0])
    widths = [max(len(name), *(len(shown(row[name])) for row in rows)) for name in names]
    for cells in (names, *([shown(row[name]) for name in names] for row in rows)):
        print("  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)), flush=True)


def shown(value: Any) -> str:
    return (
        f"{value:,.3g}" if isinstance(value, float) and value < 1000 else f"{value:,}" if value != str(value) else value
    )


# ---- accepted


@dataclass
class Follower:
    """A drafter that is shown a text which somebody else wrote."""

    target: Target
    drafter: Drafter
    session: DraftSession
    slot: Slot

    @classmethod
    def begin(cls, target: Target, drafter: Drafter, text: list[int]) -> Follower:
        slot, session = target.open(), drafter.begin(Request(text, 1))
        can.follow(session, slot)
        while slot.length < len(text):
            start = slot.length
            piece = text[start : start + target.chunk]
            (score,) = target.read([slot], [piece], Want(can.layers(drafter), samplers=(GREEDY,)))
            session.observe(Seen(piece, start, Hidden(score.hidden)))
        return cls(target, drafter, session, slot)

    def draft(self, root: int, budget: Budget) -> TokenTree:
        tree = self.drafter.propose([self.session], [root], [budget])[0].tree
        can.keep(self.session)
        return tree

    def accepted(self, root: int, budget: Budget) -> int:
        """How many drafted tokens a greedy target takes behind the root, which is text from then on."""
        tree = self.draft(root, budget)
        want = Want(can.layers(self.drafter), len(tree), (GREEDY,))
        (score,) = self.target.score([self.slot], [tree], want)
        said, node, count = score.chosen(range(len(tree))), 0, 0
        while (child := next((c for c in tree.children(node) if tree.tokens[c] == said[node]), None)) is not None:
            node, count = child, count + 1
        position = self.slot.length
        self.target.commit(self.slot, [0])
        self.session.observe(Seen([root], position, Hidden(score.hidden, score.rows([0]), score.replayed)))
        return count

    def close(self) -> None:
        self.session.close()
        self.target.close(self.slot)


def accepted(given: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    model, tokenizer = load_model(given.model, dtype=given.dtype, device=given.device)
    target = open_target(model)
    budget, rows = Budget(given.nodes, given.depth), []
    for context in given.contexts:
        texts = pieces(given, tokenizer, context + given.tokens, given.texts)
        for name, (kind, options) in contestants(given).items():
            drafter = make(kind, target, tokenizer, **options)
            counts = [0] * (1 + given.depth)
            for text in texts:
                follower = Follower.begin(target, drafter, text[:context])
                for root in text[context:]:
                    counts[follower.accepted(root, budget)] += 1
                follower.close()
            can.release(drafter)
            made = sum(counts)
            first = 1 - counts[0] / made
            tokens = 1 + sum(n * count for n, count in enumerate(counts)) / made
            rows.append({"context": context, "drafter": name, "first token": first, "tokens per step": tokens})
            rows[-1]["drafts"] = made
    about = provenance(str(given.model), target)
    target.release()
    return rows, about


# ---- speed


def run(engine: Engine, prompts: list[list[int]], tokens: int, nodes: int) -> tuple[float, float]:
    """Tokens per step, and per second of all together, both behind the first token of each."""
    steps: list[list[Step]] = [[] for _ in prompts]
    requests = [Request(p, tokens, max_draft=nodes, watch=own.append) for p, own in zip(prompts, steps, strict=True)]
    written = sum(len(s.tokens) - 1 for s in engine.run(requests) if s.finish is not None)
    later = [step for own in steps for step in own[1:]]
    seconds = sum(step.draft_seconds + step.verify_seconds + step.host_seconds for step in later)
    return written / max(1, len(later)), written / max(seconds, 1e-9)


def speed(given: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    model, tokenizer = load_model(given.model, dtype=given.dtype, device=given.device)
    target, rows = open_target(model), []
    everyone = {"none": ("none", {}), "suffix": ("suffix", {}), **contestants(given)}
    most = max(given.batches)
    engines = {
        name: Engine(target, make(kind, target, tokenizer, **options), name, most)
        for name, (kind, options) in everyone.items()
    }
    for context in given.contexts:
        for batch in given.batches:
            prompts = pieces(given, tokenizer, context, batch)
            found: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
            for _ in range(1 + given.repeats):  # the first time, code is loaded and steps are captured
                for name, engine in engines.items():
                    found[name].append(run(engine, prompts, given.tokens, given.nodes))
            plain = statistics.median(rate for _, rate in found["none"][1:])
            for name, each in found.items():
                per_step, rate = (statistics.median(x) for x in zip(*each[1:], strict=True))
                where = {"context": context, "batch": batch, "drafter": name}
                rows.append({**where, "tokens per step": per_step, "tokens/s": rate, "× plain": rate / plain})
    about = provenance(str(given.model), target)
    target.release()
    return rows, about


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


def milliseconds(work: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """The median; the first few times code is loaded and steps are captured."""
    taken = []
    for repeat in range(repeats + 3):
        wait(device)
        clock = perf_counter()
        work()
        wait(device)
        if repeat >= 3:
            taken.append(perf_counter() - clock)
    return statistics.median(taken) * 1e3


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def shape(given: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = llama(device)
    head = Spire.fresh(model, dtype=model.dtype, **({"layers": given.layers} if given.layers else {}))
    rows = []
    target = open_target(model)
    for context in given.contexts:
        for batch in given.batches:
            drafter = make("spire", target, None, drafter_path=head, depth=given.depth, width=1)
            try:
                followers = [Follower.begin(target, drafter, text) for text in random_texts(context, batch, model)]
            except Exception as error:  # too large for this device: that is a row too
                print(f"context {context}, batch {batch}: {error}", flush=True)
                continue
            times = shape_times(target, followers, given)
            for follower in followers:
                follower.close()
            can.release(drafter)
            where = {"context": context, "batch": batch, **times}
            for tau in TAUS:
                for name in (*(f"part {keys:g}" for keys in given.keys), "spire"):
                    draft = times[name] * (1 if name == "spire" else given.depth)
                    where[f"{name} × at {tau:g}"] = tau * times["plain"] / (draft + times["verify"])
            rows.append(where)
    about = provenance("Llama of random weights", target)
    target.release()
    return rows, about


def random_texts(context: int, batch: int, model: Any) -> Iterator[list[int]]:
    random = torch.Generator().manual_seed(0)
    for _ in range(batch):
        yield torch.randint(3, model.config.vocab_size, (context,), generator=random).tolist()


def shape_times(target: Target, followers: list[Follower], given: argparse.Namespace) -> dict[str, float]:
    """Milliseconds for all sequences together: `plain` and `part` of one token each, `spire` of a whole draft."""
    slots, batch = [f.slot for f in followers], len(followers)
    samplers, repeats = (GREEDY,) * batch, given.repeats

    def score(rows: int) -> Callable[[], Any]:
        trees = [TokenTree.chain(5, list(range(6, 5 + rows)))] * batch
        return lambda: target.score(slots, trees, Want(rows=rows, samplers=samplers))

    def part(keys: float) -> Callable[[], Any]:
        def once() -> None:
            blocks = [chosen_blocks(slot.length, target.block, keys, 16, 32) for slot in slots]
            parts = [target.select(slot, some) for slot, some in zip(slots, blocks, strict=True)]
            target.extend(parts, [TokenTree.root(5)] * batch, [0] * batch, Want())
            for one in parts:
                target.close(one)

        return once

    drafter, sessions = followers[0].drafter, [f.session for f in followers]
    budgets = [Budget(given.depth, given.depth)] * batch
    work = {
        "plain": score(1),
        "verify": score(1 + given.depth),
        **{f"part {keys:g}": part(keys) for keys in given.keys},
        "spire": lambda: drafter.propose(sessions, [5] * batch, budgets),
    }
    return {name: milliseconds(once, target.device, repeats) for name, once in work.items()}


PARTS = {"accepted": accepted, "speed": speed, "shape": shape}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[])
    parser.add_argument("--model", help="default: the embedded one")
    parser.add_argument("--device")
    parser.add_argument("--dtype", default="auto", help="of the model; float32 on a CPU is exact")
    parser.add_argument("--text", nargs="+", default=[], help="files of real text")
    parser.add_argument("--contexts", nargs="+", type=int, default=[1024, 4096])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--selections", nargs="*", default=list(SELECTIONS), choices=SELECTIONS)
    parser.add_argument("--keys", nargs="+", type=float, default=[256, 512], help="of magicdec")
    parser.add_argument("--heads", nargs="*", default=[], metavar="KIND=FOLDER", help="spire=…, eagle3=…; KIND:NAME=…")
    parser.add_argument("--trees", action="store_true", help="heads draft trees; else chains, as magicdec does")
    parser.add_argument("--draft", help="a draft model's folder: the vanilla draft")
    parser.add_argument("--layers", type=int, help="of the spire head of `shape`; default: a quarter")
    parser.add_argument("--depth", type=int, default=4, help="tokens ahead")
    parser.add_argument("--nodes", type=int, default=31, help="of a draft at most")
    parser.add_argument("--texts", type=int, default=4, help="accepted: places of the text")
    parser.add_argument("--tokens", type=int, default=64, help="of each")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    chosen = given.parts or list(PARTS)
    if not given.text and chosen != ["shape"]:
        parser.error("--text FILE is needed for accepted and speed")
    for name in chosen:
        print(f"\n{name}", flush=True)
        rows, about = PARTS[name](given)
        if rows:
            table(rows)
        if given.json:
            options = {key: value for key, value in vars(given).items() if key not in ("parts", "json")}
            print(json.dumps({"part": name, "rows": rows, "options": options, "provenance": about}), flush=True)


if __name__ == "__main__":
    main()
