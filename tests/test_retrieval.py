"""Drafting from text: the live text, earlier answers, a store; and what must never pass between collections."""

import json
import os
import signal
import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from commands import command
from families import tiny_model
from slipstream import LLM, DrafterError, OptionError, Store, StoreError
from slipstream.budget import Budget
from slipstream.datastores.ingest.encoding import Encoder
from slipstream.datastores.ingest.ingest import ingest
from slipstream.datastores.ingest.sources import find_sources
from slipstream.datastores.live import EarlierAnswers, LiveText
from slipstream.datastores.sparse.runs import Run, Runs
from slipstream.datastores.sparse.search import SearchShape, draft
from slipstream.datastores.sparse.sort import sort_positions
from slipstream.drafters.base import Seen
from slipstream.request import Request

NOTHING = Runs(())


def paths(tree):
    """Every path of a tree below its root, as tokens."""
    return {tuple(tree.tokens[tree.path_to(node)[1:]].tolist()) for node in range(1, len(tree))}


# ---- live text


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", [3, 60])
def test_a_text_that_grows_is_sorted_as_if_it_had_been_whole(vocabulary):
    rng = np.random.default_rng(0)
    live = LiveText()
    for size in [1, 1, 40, 700, 1, 3, 1500, *[1] * 1200, 5000, 2, 900]:
        live.extend(rng.integers(0, vocabulary, size).tolist())
        runs = live.runs(NOTHING)
        own = np.concatenate([live.long, live.short[: live.count]])
        whole = sort_positions(live.tokens[: live.end + 1])
        assert sorted(own) == sorted(whole)
    text = live.tokens[live.end - 20 : live.end].astype(np.int32)
    shape = SearchShape(matches=100_000, nodes=20_000, length=2)
    expected = draft(Runs([Run(live.tokens[: live.end + 1], whole)]), text, shape)
    found = draft(runs, text, shape)
    assert found.lengths.tolist() == expected.lengths.tolist()
    assert found.counts.tolist() == expected.counts.tolist()
    assert Counter(paths(found.tree)) == Counter(paths(expected.tree))


def test_counts_are_exact_at_every_length():
    rng = np.random.default_rng(1)
    text = rng.integers(0, 4, 3000)
    live = LiveText()
    for token in text:
        live.extend([int(token)])
    found = draft(live.runs(NOTHING), text[-16:].astype(np.int32), SearchShape(matches=1 << 20))
    end = text[-16:][::-1]
    agreed = []  # of every position, how many tokens before it agree with the text's end
    for p in range(1, len(text)):
        n = 0
        while n < 16 and n < p and text[p - 1 - n] == end[n]:
            n += 1
        agreed.append(n)
    expected = {n: c for n, c in Counter(agreed).items() if n}
    assert dict(zip(found.lengths.tolist(), found.counts.tolist(), strict=True)) == expected


def test_a_longer_match_is_believed_more():
    """It is the only one each time, so its conditional frequency says nothing."""
    believed = []
    for agree in range(1, 9):
        live = LiveText()
        live.extend([*range(100, 120), 7, 8, 9, *range(50, 60)])
        context = [1, 2, 3, *range(120 - agree, 120)]  # the last tokens stood before 7
        found = draft(live.runs(NOTHING), np.array(context, np.int32), SearchShape(length=3))
        assert paths(found.tree) == {(7,), (7, 8), (7, 8, 9)}
        assert found.tree.score.tolist() == [1, 1, 1, 1]
        raw = found.tree.raw[1:, 0]
        assert (np.diff(raw) > 0).all()  # deeper in, more has agreed
        believed.append(float(raw[0]))
    assert believed[0] == pytest.approx(1 / 3)
    assert (np.diff(believed) > 0).all()
    assert believed[-1] > 0.95


def test_scores_are_conditional_frequencies():
    live = LiveText()
    live.extend([1, 2, 5, 1, 2, 5, 1, 2, 6, 9, 1, 2])
    tree = draft(live.runs(NOTHING), np.array([9, 1, 2], np.int32), SearchShape(shortest=2, length=1)).tree
    assert dict(zip(tree.tokens[1:].tolist(), tree.score[1:].tolist(), strict=True)) == pytest.approx(
        {5: 2 / 3, 6: 1 / 3}
    )


def test_a_text_is_searched_with_the_latest_answers_and_its_own_runs_are_kept():
    """Under load an answer ends every few steps, and all texts that are being written are joined with it."""
    live, answers = LiveText(), EarlierAnswers(np.uint16, 1000)
    live.extend([1, 2, 3])
    before = live.runs(answers.runs("default"))
    answers.publish("default", [2, 3, 9])
    after = live.runs(answers.runs("default"))
    assert after.runs[-2:] == before.runs[-2:]
    live.extend([4, 2, 3])
    found = draft(live.runs(answers.runs("default")), np.array([2, 3], np.int32), SearchShape(length=1))
    assert {path[0] for path in paths(found.tree)} == {4, 9}


# ---- drafters


def session(llm, prompt, **options):
    drafting = llm.engine.drafter.begin(Request(prompt, 10, **options))
    drafting.observe(Seen(prompt[:-1], 0))
    return drafting


def test_suffix_drafts_from_the_text_itself(tiny):
    llm = LLM(tiny("llama"), drafter="suffix")
    text = [5, 6, 7, 8, 9, 40, 5, 6]
    tree = session(llm, text).propose(text[-1], Budget(8, 4)).tree
    assert (7, 8, 9, 40) in paths(tree)
    assert len(session(llm, text).propose(text[-1], Budget(0, 0)).tree) == 1


def test_earlier_answers_draft_once_they_are_complete_and_for_their_collection_only(tiny):
    llm = LLM(tiny("llama"), drafter="suffix", shared=1000)
    prompt = [50, 51, 52, 53]
    seen = {"a": 0, "b": 0}
    stream = llm.stream(prompt, collection="a", max_new_tokens=12, ignore_eos=True)
    for _ in stream:
        for name in seen:
            seen[name] = max(seen[name], len(llm.engine.answers.runs(name)))
        if stream.stats.new_tokens < 12:
            assert seen == {"a": 0, "b": 0}, "nothing may be read before the request has ended"
    said = stream.result.tokens
    assert len(llm.engine.answers.runs("a")) > 0
    assert len(llm.engine.answers.runs("b")) == 0
    (run,) = llm.engine.answers.runs("a").runs
    assert run.tokens[32:-1].tolist() == said  # what was emitted, and nothing of the prompt
    assert tuple(said[2:6]) in paths(session(llm, said[:2], collection="a").propose(said[1], Budget(16, 8)).tree)
    assert len(session(llm, said[:2], collection="b").propose(said[1], Budget(16, 8)).tree) == 1


def test_what_was_said_is_bounded_and_the_oldest_leaves_first():
    said = EarlierAnswers(np.uint16, limit=100)
    for i in range(50):
        said.publish("a", [i] * 10)
    kept = {int(t) for run in said.runs("a").runs for t in run.tokens if t != 0xFFFF}
    assert kept == set(range(max(kept) - len(kept) + 1, 50))
    assert 10 <= len(kept) <= 12
    assert sum(len(run.positions) for run in said.runs("a").runs) < 125


def test_a_collection_for_every_request_is_forgotten_in_time(tiny, monkeypatch):
    monkeypatch.setattr("slipstream.datastores.live.COLLECTIONS", 3)
    monkeypatch.setattr("slipstream.drafters.suffix.COLLECTIONS", 3)
    with LLM(tiny("llama"), drafter="suffix", shared=100) as llm:
        for i in range(6):
            llm.generate([5, 6, 7] * 4, max_new_tokens=4, collection=f"tenant {i}", ignore_eos=True)
            llm.generate([5, 6, 7] * 4, max_new_tokens=4, collection="often", ignore_eos=True)
        kept = {"tenant 4", "tenant 5", "often"}
        assert set(llm.engine.answers._memory) == set(llm.engine.answers._views) == kept
        assert len(llm.engine.drafter._joined) == 3
        assert len(llm.engine.answers.runs("tenant 0")) == 0


@pytest.mark.slow
def test_ten_thousand_requests_of_two_tenants_never_draft_from_each_other(tiny, tmp_path):
    """Each tenant's tokens are its own half of the vocabulary, so a token of the other's would show."""
    store = Store.create(tmp_path / "s", tiny("llama").config.vocab_size)
    llm = LLM(tiny("llama"), drafter="suffix", shared=2000, store=store)
    rng = np.random.default_rng(0)
    half = {"a": (0, 30), "b": (30, 60)}
    drafted = Counter()
    for i in range(10_000):
        name = "ab"[i % 2]
        text = rng.integers(*half[name], 12).tolist()
        drafting = session(llm, text, collection=name)
        tree = drafting.propose(text[-1], Budget(16, 6)).tree
        assert all(half[name][0] <= t < half[name][1] for t in tree.tokens)
        drafted[name] += len(tree) - 1
        llm.engine.answers.publish(name, text)
        if i % 100 < 2:
            store.append(text, "learned", name)
    assert min(drafted.values()) > 10_000
    store.close()


def test_rest_learns_what_the_model_says_and_drafts_it_the_next_time(tiny, tmp_path):
    options = {"max_new_tokens": 16, "ignore_eos": True}
    first = LLM(tiny("llama"), drafter="rest", store=tmp_path / "s", learn=True)  # made, since it is to learn
    said = first.generate([7, 8], collection="mine", **options)
    again = first.generate([7, 8], collection="mine", **options)
    assert again.tokens == said.tokens
    assert again.stats.steps < said.stats.steps
    assert first.generate([7, 8], collection="other", **options).stats.accepted == 0
    first.engine.drafter.store.close()
    reader = LLM(tiny("llama"), drafter="rest", store=tmp_path / "s")
    assert reader.generate([7, 8], collection="mine", **options).stats.accepted > 0


def test_what_can_not_be_drafted_from_is_refused(tiny, tmp_path):
    with pytest.raises(OptionError, match="rest drafts from a datastore: give its folder as store="):
        LLM(tiny("llama"), drafter="rest")
    with pytest.raises(StoreError, match="is no datastore: no such folder"):
        LLM(tiny("llama"), drafter="rest", store=tmp_path / "none")
    Store.create(tmp_path / "large", 100_000).close()
    with pytest.raises(StoreError, match="holds ids up to 99999, the model knows"):
        LLM(tiny("llama"), drafter="rest", store=tmp_path / "large")
    with Store.create(tmp_path / "narrow", 1000) as narrow:
        for store in (tmp_path / "narrow", narrow):
            with pytest.raises(StoreError, match="ids up to 999 in 16 bits, the model knows 70000 ids"):
                LLM(tiny_model("llama", vocab_size=70_000), drafter="suffix", store=store)
    with pytest.raises(OptionError, match="learn=True needs a store"):
        LLM(tiny("llama"), drafter="suffix", learn=True)
    with pytest.raises(OptionError, match="1 <= shortest <= longest"):
        LLM(tiny("llama"), drafter="suffix", shortest=5, longest=4)


@pytest.mark.parametrize("drafter", ["auto", "suffix", "rest"])
def test_a_store_that_was_opened_by_name_is_closed_with_its_drafter(tiny, tmp_path, drafter):
    for _ in range(2):
        with LLM(tiny("llama"), drafter=drafter, store=tmp_path / "s", learn=True) as llm:
            llm.generate([1, 2, 3], max_new_tokens=2)
    with pytest.raises(DrafterError):
        LLM(tiny("llama"), store=tmp_path / "s", learn=True, heads=str(tmp_path / "none"))
    Store.open(tmp_path / "s", True).close()


# ---- building


class Letters:
    """A tokenizer of single characters."""

    is_fast, chat_template = False, None

    def __call__(self, text, **_):
        return {"input_ids": [ord(c) % 256 for c in text]}


def texts(store, collection="default"):
    return sorted("".join(map(chr, d)) for d in store.documents(collection))


def test_ingest_goes_on_where_it_stopped_and_replaces_what_changed(tmp_path):
    for i in range(6):
        (tmp_path / f"{i}.txt").write_text(f"document {i}")
    (tmp_path / "many.jsonl").write_text("\n".join(f'{{"text": "line {i}"}}' for i in range(20)))
    sources, encoder = find_sources([tmp_path]), Encoder(Letters())

    class Interrupted(Exception):
        pass

    def stop_after(n):
        calls = iter(range(n))

        def progress(*_):
            if next(calls, None) is None:
                raise Interrupted

        return progress

    expected = sorted([f"document {i}" for i in range(6)] + [f"line {i}" for i in range(20)])
    for stop in range(3):
        store = Store.create(tmp_path / f"store{stop}", 256)
        original = store.extend
        given = 0

        def extend(documents, collection, *, bulk, original=original, stop=stop):
            """As if the process ended in the middle of a batch."""
            nonlocal given
            documents = list(documents)
            cut = documents[: 5 + 7 * stop]
            original(cut, collection, bulk=bulk)
            given += len(cut)
            if len(cut) < len(documents):
                raise Interrupted

        store.extend = extend
        with pytest.raises(Interrupted):
            ingest(store, sources, encoder)
        store.close()
        with Store.open(tmp_path / f"store{stop}", write=True) as store:
            ingest(store, sources, encoder)
            assert texts(store) == expected
            again = ingest(store, sources, encoder)
            assert (again.known, again.documents) == (7, 0)
            (tmp_path / "3.txt").write_text("document 3, changed")
            changed = ingest(store, find_sources([tmp_path / "3.txt"]), encoder)
            assert (changed.replaced, changed.documents) == (1, 1)
            assert "document 3, changed" in texts(store)
            assert "document 3" not in texts(store)
        (tmp_path / "3.txt").write_text("document 3")


def test_duplicates_are_left_out_on_request_also_of_what_is_there(tmp_path):
    for name, text in {"a": "same", "b": "same", "c": "other"}.items():
        (tmp_path / f"{name}.txt").write_text(text)
    with Store.create(tmp_path / "s", 256) as store:
        counts = ingest(
            store, find_sources([tmp_path / "a.txt", tmp_path / "b.txt"]), Encoder(Letters()), deduplicate=True
        )
        assert (counts.documents, counts.duplicates) == (1, 1)
        counts = ingest(store, find_sources(sorted(tmp_path.glob("*.txt"))), Encoder(Letters()), deduplicate=True)
        assert texts(store) == ["other", "same"]


def test_a_changed_source_is_no_duplicate_of_itself(tmp_path, monkeypatch):
    """Though a new one is so large that it fills the first batch."""
    monkeypatch.setattr("slipstream.datastores.ingest.ingest.BATCH", 50)
    lines = tmp_path / "b.jsonl"
    lines.write_text("".join(json.dumps({"text": f"line {i}"}) + "\n" for i in range(3)))
    with Store.create(tmp_path / "s", 256) as store:
        ingest(store, find_sources([lines]), Encoder(Letters()), deduplicate=True)
        with lines.open("a") as file:
            file.write(json.dumps({"text": "one more"}) + "\n")
        (tmp_path / "a.txt").write_text("x" * 200)
        ingest(store, find_sources([tmp_path / "a.txt", lines]), Encoder(Letters()), deduplicate=True)
        assert texts(store) == sorted(["x" * 200, "line 0", "line 1", "line 2", "one more"])


def test_files_of_one_name_in_two_folders_are_two_sources(tmp_path, monkeypatch):
    with Store.create(tmp_path / "s", 256) as store:
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "notes.txt").write_text(f"notes of {name}")
            monkeypatch.chdir(tmp_path / name)
            assert ingest(store, find_sources(["."]), Encoder(Letters())).replaced == 0
        assert texts(store) == ["notes of one", "notes of two"]
        assert ingest(store, find_sources([tmp_path / "one"]), Encoder(Letters())).known == 1


def test_a_file_of_an_older_store_is_not_read_again_until_it_changes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("as it was")
    with Store.create(tmp_path / "s", 256) as store:
        ingest(store, [replace(s, name="notes.txt") for s in find_sources(["notes.txt"])], Encoder(Letters()))
        assert ingest(store, find_sources(["notes.txt"]), Encoder(Letters())).known == 1
        assert texts(store) == ["as it was"]
        (tmp_path / "notes.txt").write_text("as it is now")
        ingest(store, find_sources(["notes.txt"]), Encoder(Letters()))
        assert texts(store) == ["as it is now", "as it was"]  # which may be of another folder


# ---- the commands


def cli(*words, folder, code=0):
    found, out, err = command("store", *words, folder=folder)
    assert found == code, err
    return out + err


def test_a_source_is_removed_by_its_path_or_its_name(tmp_path):
    names = ["here.txt", "there.txt", "python3.11/json.py"]
    with Store.create(tmp_path / "s", 256) as store:
        for name in (str(tmp_path / names[0]), str(tmp_path / names[1]), names[2]):
            store.append([1, 2], name)
    for typed in (names[0], tmp_path / names[1], names[2]):
        assert "removed 1 documents" in cli("remove", "s", typed, folder=tmp_path)


def test_names_that_are_not_utf8_are_listed(tmp_path, capsys):
    name = os.fsdecode(b"caf\xe9.txt")
    with Store.create(tmp_path / "s", 256) as store:
        store.append([1, 2], name)
    assert r"caf\udce9.txt: 1" in cli("info", "s", "--sources", folder=tmp_path).encode().decode()
    cli("info", "s", "--sources", "--json", folder=tmp_path)
    assert json.loads(capsys.readouterr().out)["sources"] == {"default": {name: 1}}


@pytest.mark.slow
def test_a_store_from_the_command_line(tmp_path):
    (tmp_path / "fruit.txt").write_text("apples and pears and plums. " * 5)
    (tmp_path / "talk.jsonl").write_text(
        '{"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}]}'
    )
    said = cli("build", "fruit.txt", "talk.jsonl", "--out", "s", folder=tmp_path)
    assert "2 sources, 2 documents" in said
    assert "already holds a datastore" in cli("build", "fruit.txt", "--out", "s", folder=tmp_path, code=2)
    (tmp_path / "more.txt").write_text("apples and oranges")
    assert "1 sources, 1 documents" in cli("add", "s", "more.txt", folder=tmp_path)
    found = cli("search", "s", "apples and", folder=tmp_path)
    assert "pears" in found
    assert "oranges" in found
    assert "removed 1 documents" in cli("remove", "s", "more.txt", folder=tmp_path)
    assert "oranges" not in cli("search", "s", "apples and", folder=tmp_path)
    assert "no source 'more.txt'" in cli("remove", "s", "more.txt", folder=tmp_path, code=2)
    assert "now" in cli("compact", "s", folder=tmp_path)
    assert "talk.jsonl: 1" in cli("info", "s", "--sources", folder=tmp_path)
    assert "sound: 2 documents" in cli("verify", "s", folder=tmp_path)
    (segment,) = (tmp_path / "s").glob("*.seg")
    data = bytearray(segment.read_bytes())
    data[-6000] ^= 1
    segment.write_bytes(data)
    assert "damaged" in cli("verify", "s", folder=tmp_path, code=1)
    cli("repair", "s", folder=tmp_path)
    assert "sound: 2 documents" in cli("verify", "s", folder=tmp_path)


def test_an_interrupted_build_goes_on(forked, tmp_path):
    """A real Ctrl-C while the command reads a large file."""
    (tmp_path / "big.jsonl").write_text(
        "\n".join(f'{{"text": "{"some words and more " * 150} {i}"}}' for i in range(400))
    )
    program = forked.start("store", "build", "big.jsonl", "--out", "s", folder=tmp_path)
    while not (logs := list((tmp_path / "s").glob("*.log"))) or logs[0].stat().st_size < 100_000:
        time.sleep(0.02)
        os.kill(program.pid, 0)  # it runs
    os.kill(program.pid, signal.SIGINT)
    done = program.wait()
    assert done.returncode == 130
    assert "the same command goes on from here" in done.stderr
    with Store.open(tmp_path / "s") as store:
        before = len(list(store.documents()))
    assert 0 < before < 400
    assert f"{400 - before:,} documents" in cli("build", "big.jsonl", "--out", "s", folder=tmp_path)
    with Store.open(tmp_path / "s") as store:
        assert len(list(store.documents())) == 400
