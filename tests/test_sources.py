"""Sources: what a name finds, each layout's documents, what is refused, and documents as tokens."""

import copy
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from slipstream.datastores.ingest import encoding, records, sources
from slipstream.datastores.ingest.encoding import Encoder, batches, tokenizer_fingerprint
from slipstream.datastores.ingest.records import read_documents
from slipstream.datastores.ingest.sources import SourceFile, find_sources, is_text
from slipstream.errors import StoreError
from slipstream.loading import embedded
from slipstream.text import tokenised

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
CODE = "".join(Path(m.__file__).read_text("utf-8") for m in (sources, records, encoding))
TEXT = CODE + "\n".join(line.strip() for line in CODE.split("\n")) + "Über Bäume;\n/root\n\nund\n  日本語\r\nEnde\n"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(name, content=b"text\n"):
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def paths(*given, **options):
    return [str(source.path) for source in find_sources(given, **options)]


def documents(name, content=None, field=None):
    if content is not None:
        write(name, content)
    [source] = find_sources([name])
    return list(read_documents(source, field))


def refused(call, *arguments, **options):
    with pytest.raises(StoreError) as error:
        call(*arguments, **options)
    return str(error.value)


# Finding


def test_a_source_knows_its_size_and_time(folder):
    path = write("a.txt", b"four")
    os.utime(path, ns=(5, 1_000_000_007))
    assert find_sources(["a.txt"]) == [SourceFile(str(folder / "a.txt"), Path("a.txt"), 4, 1_000_000_007)]


def test_a_file_has_one_name_however_it_is_typed(folder, monkeypatch):
    write("src/a.py")
    for typed in ("src/a.py", "./src/../src", "src/*.py", folder / "src"):
        assert [source.name for source in find_sources([typed])] == [str(folder / "src" / "a.py")]
    monkeypatch.chdir("src")
    assert [source.name for source in find_sources(["."])] == [str(folder / "src" / "a.py")]


def test_a_folder_is_searched_in_order_without_what_is_hidden_cached_or_binary(folder):
    for name in ("src/b.py", "src/a/z.md", "src/a.py", "src/c/data.jsonl", "src/empty.py", "other.py"):
        write(name)
    for name in ("src/.env", "src/.git/config", "src/__pycache__/a.py", "src/a/.hidden/b.py"):
        write(name)
    write("src/picture", b"\x89PNG\0\0")
    write("src/t.parquet", b"PAR1\0")
    found = ["src/a/z.md", "src/a.py", "src/b.py", "src/c/data.jsonl", "src/empty.py", "src/t.parquet"]
    assert paths("src") == paths("src/") == paths(Path("src")) == found
    assert paths("./src/c", "src/b.py") == ["src/c/data.jsonl", "src/b.py"]
    assert paths(str(folder / "src" / "c")) == [(folder / "src/c/data.jsonl").as_posix()]
    assert paths("src/.env", "src/.git") == ["src/.env", "src/.git/config"]  # named by themselves, they are wanted


def test_globs_reach_below_and_meet_folders_as_the_shell_does():
    for name in ("src/a.py", "src/deep/er/b.py", "src/deep/c.md", "src/__pycache__/a.py", "src/.x/d.py", "e[1].py"):
        write(name)
    write("src/deep/d.bin", b"\0")
    assert paths("src/**/*.py") == ["src/a.py", "src/deep/er/b.py"]
    assert paths("src/*") == paths("src/**") == ["src/a.py", "src/deep/c.md", "src/deep/er/b.py"]
    assert paths("src/[ab].py") == ["src/a.py"]
    assert paths("e[1].py") == ["e[1].py"]  # a file of that name comes before the pattern


def test_no_file_comes_twice(folder):
    write("src/a.py")
    Path("src/link.py").symlink_to("a.py")
    Path("src/around").symlink_to(".")
    assert paths("src/a.py", "src", "src/*.py", folder / "src") == ["src/a.py"]


def test_a_name_that_finds_nothing_is_refused_by_name():
    write("full/a.py")
    write("pictures/a.png", b"\0")
    Path("empty").mkdir()
    todo = ": give a file, a folder with text files in it, or a glob such as 'src/**/*.py'"
    for name in ("missing.txt", "empty", "full/*.md"):
        assert refused(find_sources, ["full", name]) == f"{name} names no files{todo}"
    for name in ("pictures", "pictures/*"):
        assert refused(find_sources, [name]) == f"{name} holds 1 files, none of them text{todo}"
    assert refused(find_sources, []).startswith("no sources were given: name files, folders or globs")


@pytest.mark.parametrize(("content", "kind"), [(b"PK\3\4\0", "binary"), ("Bäume".encode("latin-1"), "not UTF-8")])
def test_a_file_named_by_itself_must_be_text(content, kind):
    write("a.zip", content)
    todo = "give UTF-8 text, .jsonl, .json or .parquet; unpack or convert it"
    assert refused(find_sources, ["a.zip"]) == f"a.zip is {kind}: {todo}"
    os.mkfifo("pipe")
    assert refused(find_sources, ["pipe"]) == f"pipe is neither a file nor a folder: {todo}"


def test_files_in_other_encodings_are_left_out_and_counted():
    write("src/a.py")
    for i in range(5):
        write(f"src/old{i}.c", "Bäume".encode("latin-1"))
    with pytest.warns(UserWarning, match=r"left out 5 files .* UTF-8: src/old0.c, src/old1.c, src/old2.c, …"):
        assert paths("src") == ["src/a.py"]


def test_text_is_utf8_to_its_end():
    assert is_text(write("a", "Bäume" * 10_000))
    assert is_text(write("a", b""))
    assert not is_text(write("a", b"a" * 10_000 + b"\xff"))
    assert not is_text(write("a", b"a" * 10_000 + "ä".encode()[:1]))
    assert not is_text(write("a", b"a" * 8191 + b"\0"))
    assert is_text(write("a", "a" * 8191 + "ä"))  # a character across the border


def test_the_standard_library_comes_without_its_tests_and_without_what_was_installed(folder):
    found = find_sources([], stdlib=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    by_name = {source.name: source for source in found}
    assert len(by_name) == len(found) > 400
    assert by_name[f"{version}/json/decoder.py"].path.samefile(json.decoder.__file__)
    for name in by_name:
        assert name.startswith(f"{version}/")
        assert name.endswith(".py")
        assert not {"site-packages", "test", "idle_test"} & set(name.split("/")), name
    write("mine.py")
    both = find_sources(["mine.py"], stdlib=True)
    assert [source.name for source in both] == [str(folder / "mine.py"), *by_name]


# Reading


@pytest.mark.parametrize(
    ("record", "document"),
    [
        ({"id": 1, "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}]}, CHAT),
        (
            {"conversations": [{"from": "system", "value": "Be kind."}, {"from": "tool", "value": None}]},
            [{"role": "system", "content": "Be kind."}, {"role": "tool", "content": ""}],
        ),
        ({"messages": CHAT, "text": "not this"}, CHAT),
        ({"conversations": CHAT}, CHAT),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "image"}]}]},
            CHAT[:1],
        ),
        (CHAT, CHAT),
        ({"instruction": "Hi", "input": "", "output": "Hello!", "text": "not this"}, CHAT),
        (
            {"instruction": "Add.", "input": "1, 2", "output": "3"},
            [{"role": "user", "content": "Add.\n\n1, 2"}, {"role": "assistant", "content": "3"}],
        ),
        ({"instruction": "Hi", "context": None, "response": "Hello!"}, CHAT),
        ({"prompt": "Hi", "completion": "Hello!"}, CHAT),
        ({"prompt": "Hi", "response": "Hello!"}, CHAT),
        ({"prompt": "Hi", "answer": "Hello!"}, CHAT),
        ({"question": "Hi", "answer": "Hello!"}, CHAT),
        ({"prompt": "Hi", "text": "all of it"}, "all of it"),
        ({"text": "all of it", "meta": {"x": 1}}, "all of it"),
        ({"content": "all of it"}, "all of it"),
        ("all of it", "all of it"),
    ],
)
def test_each_layout_is_recognised_in_each_format(record, document):
    line = json.dumps(record)
    assert documents("a.jsonl", f"{line}\n\n{line}") == [document] * 2
    assert documents("a.ndjson", f"\ufeff{line}\r\n{line}\r\n") == [document] * 2
    assert documents("a.json", f"[{line},\n {line}]\n") == [document] * 2
    if isinstance(record, dict):
        assert documents("a.json", json.dumps(record, indent=2)) == [document]
        assert documents("a.JSON", f"{line}\n{line}\n") == [document] * 2  # lines under another name
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record] * 3000), "a.parquet")
        assert documents("a.parquet") == [document] * 3000


def test_empty_documents_are_left_out():
    empty = [{"text": ""}, {"text": None}, {"conversations": []}, {"messages": [{"role": "user", "content": None}]}]
    assert documents("a.jsonl", "".join(json.dumps(r) + "\n" for r in empty)) == []
    assert documents("a.txt", "") == documents("a.json", "") == documents("a.json", "[]") == []


def test_any_other_file_is_one_text():
    assert documents("a.py", "\ufeffx = 'ä'\r\ny = 2\n") == ["x = 'ä'\ny = 2\n"]
    assert documents("a.py", field="text") == ["x = 'ä'\ny = 2\n"]  # fields are for records
    assert documents("LICENSE", "Free.") == ["Free."]


def test_settings_in_json_are_text_as_they_stand():
    for settings in ('{\n  "name": "app"\n}\n', '{"name": "app"}', '{\n  // a comment\n  "strict": true\n}\n'):
        assert documents("a.json", settings) == [settings]


def test_a_field_can_be_named():
    record = {"title": "T", "body": {"en": "text", "n": 3}, "a.b": "dots", "none": None, "chosen": CHAT}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record]), "a.parquet")
    write("a.jsonl", json.dumps(record) + "\n")
    write("a.json", json.dumps([record]))
    write("b.json", json.dumps(record, indent=1))
    for name in ("a.jsonl", "a.json", "b.json", "a.parquet"):
        for field, found in [
            ("title", ["T"]),
            ("body.en", ["text"]),
            ("none", []),
            ("chosen", [CHAT]),
            ("a.b", ["dots"]),
        ]:
            assert documents(name, field=field) == found, (name, field)


def test_a_missing_field_is_refused_with_its_place_and_the_fields_there_are():
    record = {"title": "T", "body": {"en": "text", "n": 3}}
    fine = {"title": "T", "body": {"en": "text", "n": 3, "de": "Text"}}
    write("a.jsonl", json.dumps(fine) + "\n" + json.dumps(record) + "\n")
    write("a.json", json.dumps([fine, record]))
    found = "found the fields title, body.en, body.n: name a field that holds text"
    assert refused(documents, "a.jsonl", field="body.de") == f"a.jsonl:2: there is no field 'body.de', {found}"
    assert refused(documents, "a.json", field="body.de") == f"a.json, element 2: there is no field 'body.de', {found}"
    write("a.jsonl", json.dumps(record))
    assert refused(documents, "a.jsonl", field="title.x") == f"a.jsonl:1: there is no field 'title.x', {found}"
    assert refused(documents, "a.jsonl", field="body.n") == f"a.jsonl:1: 'body.n' holds int, {found}"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record]), "a.parquet")
    assert refused(documents, "a.parquet", field="de") == (
        "a.parquet, row 1: there is no field 'de', found the fields title, body: name a field that holds text"
    )
    write("b.json", "{broken")
    assert refused(documents, "b.json", field="de").startswith("b.json: not JSON, so it has no field 'de': repair it")


def test_an_unknown_layout_is_refused_with_its_fields():
    record = {"id": 1, "label": {"en": "x"}, "prompt": None}
    write("a.jsonl", json.dumps(record))
    end = f"{records.KNOWN}. Name the field with the text: --field NAME"
    assert "ShareGPT (conversations)" in end
    assert refused(documents, "a.jsonl") == f"a.jsonl:1: found the fields id, label.en, prompt; {end}"
    write("a.json", "[1]")
    assert refused(documents, "a.json") == f"a.json, element 1: found int instead of an object; {end}"
    write("a.json", f"{json.dumps(record)}\n" * 2)
    assert refused(documents, "a.json") == f"a.json:1: found the fields id, label.en, prompt; {end}"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record]), "a.parquet")
    assert refused(documents, "a.parquet") == f"a.parquet, row 1: found the fields id, label, prompt; {end}"
    write("a.jsonl", "{}")
    assert refused(documents, "a.jsonl") == f"a.jsonl:1: found the fields of an empty object; {end}"
    write("a.jsonl", '{"messages": [{"user": "Hi"}]}')
    assert refused(documents, "a.jsonl") == f"a.jsonl:1: found the fields messages; {end}"


def test_broken_json_is_refused_with_its_line():
    good = '{"text": "a"}'
    assert refused(documents, "a.jsonl", f"{good}\n\nnot json\n") == (
        "a.jsonl:3: not JSON (Expecting value): repair or remove it"
    )
    for middle in ('{"text" "a"}', f"{good} {good}"):
        reading = read_documents(find_sources([write("a.json", f"[\n{good},\n{middle},\n{good}\n]")])[0])
        assert next(reading) == "a"
        assert refused(list, reading).startswith("a.json:3: not JSON (Expecting ")
    assert refused(documents, "a.json", f"[{good}]\n[{good}]") == (
        "a.json: there is more after the array's end: name it .jsonl, or repair it"
    )


@pytest.mark.parametrize("chunk", [5, *(pytest.param(chunk, marks=pytest.mark.slow) for chunk in (16, 1 << 20))])
def test_a_cut_off_array_gives_every_whole_element_and_a_warning(monkeypatch, chunk):
    monkeypatch.setattr(records, "CHUNK", chunk)
    elements = [{"text": 'a\u00e4\\ "]\u2028' * 9, "n": [-1.5e3, None]}, "b", {"text": "日本", "ok": True}]
    text = json.dumps(elements, ensure_ascii=False, indent=1).encode()
    texts = [elements[0]["text"], "b", "日本"]
    ends = [text.index(mark) + len(mark) for mark in (b"]\n }", b'"b"', b"true\n }")]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert documents("a.json", text) == texts
    for size in range(1, len(text)):
        whole = sum(end <= size for end in ends)
        with pytest.warns(UserWarning, match=f"a.json is cut off: its {whole} whole elements were read"):
            assert documents("a.json", text[:size]) == texts[:whole], text[:size]


@pytest.mark.slow
def test_a_long_array_is_read_in_bounded_memory_and_time():
    import tracemalloc

    element = json.dumps({"text": "x" * 1000})
    write("a.json", "[" + ",\n".join([element] * 20_000) + "]")  # 20 MB
    reading = read_documents(find_sources(["a.json"])[0])
    tracemalloc.start()
    try:
        next(reading)
        assert sum(1 for _ in zip(reading, range(999), strict=False)) == 999
        assert tracemalloc.get_traced_memory()[1] < 10e6
    finally:
        tracemalloc.stop()
    assert sum(1 for _ in reading) == 19_000 - 1  # zip took one more than it paired
    long = "y" * 12_000_000
    assert documents("b.json", json.dumps([long, {"text": "z"}])) == [long, "z"]


def test_parquet_needs_pyarrow_and_says_so(monkeypatch):
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), "a.parquet")
    assert documents("a.parquet") == ["a"]
    assert refused(documents, "b.parquet", b"PAR1 but no more").startswith("b.parquet can't be read as parquet (")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert refused(documents, "a.parquet") == (
        "a.parquet needs pyarrow, which is missing: `pip install pyarrow`, or slipstream-llm[parquet]"
    )


def test_a_file_that_changed_since_is_refused_by_name():
    [source] = find_sources([write("a.txt")])
    write("a.txt", b"\xff")
    assert refused(list, read_documents(source)).startswith("a.txt is not UTF-8 text (invalid start byte)")
    source.path.unlink()
    assert refused(list, read_documents(source)).startswith("a.txt can't be read (No such file or directory)")


def test_batches_hold_at_most_so_many_characters():
    assert list(batches(["aaaa", "bb", "c", "dddddddd", CHAT[:1], "e"], 6)) == [
        ["aaaa", "bb"],
        ["c"],
        ["dddddddd"],
        [CHAT[:1], "e"],
    ]
    assert list(batches(iter(()), 6)) == []
    assert list(batches([(1, "aa"), (2, "bb")], 3, size=lambda pair: len(pair[1]))) == [[(1, "aa")], [(2, "bb")]]


# Encoding


@pytest.fixture(scope="module")
def smol_tokenizer():
    return AutoTokenizer.from_pretrained(embedded.ensure())


def trained(model, trainer, **parts):
    backend = Tokenizer(model)
    for name, part in parts.items():
        setattr(backend, name, part)
    backend.train_from_iterator(TEXT.split("\n"), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.fixture(scope="module")
def tokenizers(smol_tokenizer):
    """Kinds that treat spaces and beginnings each in their own way."""
    return {
        "byte-level": smol_tokenizer,
        "sentencepiece": trained(  # as Llama 2's: a space before the text, and no words
            models.BPE(unk_token="<unk>"),
            trainers.BpeTrainer(special_tokens=["<unk>"], initial_alphabet=["\n"], vocab_size=400),
            normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
            decoder=decoders.Replace("▁", " "),
        ),
        "unigram": trained(
            models.Unigram(),
            trainers.UnigramTrainer(special_tokens=["<unk>"], unk_token="<unk>", vocab_size=400),
            normalizer=normalizers.NFKC(),
            pre_tokenizer=pre_tokenizers.Metaspace(),
        ),
        "slow": ByT5Tokenizer(),
    }


KINDS = ["byte-level", "sentencepiece", "unigram", "slow"]


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_the_tokenizers_own(tokenizers, kind):
    texts = [TEXT, "", "One line."]
    encoded = Encoder(tokenizers[kind]).encode(texts)
    for text, ids in zip(texts, encoded, strict=True):
        assert ids.dtype == np.int32
        assert ids.tolist() == tokenizers[kind](text, add_special_tokens=False)["input_ids"]
    assert len(encoded[0]) > 1000


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_prompts_tokens_are_the_tokenizers_own(tokenizers, kind, special):
    """After a call that cuts and pads, too, which the tokenizer remembers."""
    tokenizer = tokenizers[kind]
    for text in (TEXT, "", "One line.", "<|im_start|>user\n<unk></s> Ünïcödé 🏳"):
        expected = tokenizer(text, add_special_tokens=special)["input_ids"]
        assert tokenised(text, tokenizer, special=special) == expected
        tokenizer(text, truncation=True, max_length=3)
        assert tokenised(text, tokenizer, special=special) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_text_has_the_same_tokens_in_pieces(tokenizers, kind, monkeypatch):
    texts = [TEXT, TEXT.replace("\n", "\r\n"), "no end of line " * 100]
    expected = Encoder(tokenizers[kind]).encode(texts)
    monkeypatch.setattr(encoding, "_PIECE", 300)
    assert [len(list(encoding._pieces(text))) > 20 for text in texts] == [True, False, False]
    for one, other in zip(Encoder(tokenizers[kind]).encode(texts), expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_truncation_left_on_by_an_earlier_call_is_no_matter(tokenizers):
    tokenizer = copy.deepcopy(tokenizers["sentencepiece"])
    tokenizer.pad_token = "<unk>"
    before = tokenizer_fingerprint(tokenizer)
    expected = Encoder(tokenizer).encode(["a b c d e f"])[0].tolist()
    tokenizer("a b c d", truncation=True, max_length=2, padding="max_length")
    assert tokenizer.backend_tokenizer.truncation
    assert Encoder(tokenizer).encode(["a b c d e f"])[0].tolist() == expected
    assert tokenizer.backend_tokenizer.truncation  # and it isn't ours to switch off
    assert tokenizer_fingerprint(tokenizer) == before


def test_half_a_character_is_replaced(tokenizers):
    for tokenizer in tokenizers.values():
        half, mark = Encoder(tokenizer).encode(["a\ud83d b", "a\ufffd b"])
        assert half.tolist() == mark.tolist()


def test_messages_are_written_with_the_chat_template(smol_tokenizer):
    [ids] = Encoder(smol_tokenizer).encode([CHAT])
    assert smol_tokenizer.decode(ids).endswith(
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n"
    )
    assert smol_tokenizer.convert_tokens_to_ids("<|im_start|>") in ids


def test_messages_are_joined_where_there_is_no_template_or_it_refuses(tokenizers):
    tokenizer = copy.deepcopy(tokenizers["sentencepiece"])
    for template in (None, "{{ raise_exception('roles must alternate') }}"):
        tokenizer.chat_template = template
        one, other = Encoder(tokenizer).encode([CHAT, "Hi\n\nHello!"])
        assert one.tolist() == other.tolist()


@pytest.mark.slow
def test_the_fingerprint_is_the_tokenizers_own_in_every_process(tokenizers, smol_tokenizer, tmp_path):
    prints = [tokenizer_fingerprint(t) for t in tokenizers.values()]
    assert len(set(prints)) == len(prints)
    assert all(len(p) == 16 and int(p, 16) >= 0 for p in prints)
    smol_tokenizer.save_pretrained(tmp_path)
    assert tokenizer_fingerprint(AutoTokenizer.from_pretrained(tmp_path)) == prints[0]
    code = (  # without transformers, whose import takes seconds
        "from types import SimpleNamespace; from tokenizers import Tokenizer;"
        "from slipstream.datastores.ingest.encoding import tokenizer_fingerprint;"
        f"t = Tokenizer.from_file({str(tmp_path / 'tokenizer.json')!r});"
        "t = SimpleNamespace(is_fast=True, backend_tokenizer=t, get_vocab=t.get_vocab);"
        "print(tokenizer_fingerprint(t))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == prints[0]


def test_the_fingerprint_changes_with_the_ids_only(tokenizers):
    tokenizer = copy.deepcopy(tokenizers["sentencepiece"])
    rules = copy.deepcopy(tokenizer)
    before = tokenizer_fingerprint(tokenizer)
    tokenizer.chat_template = "{{ messages }}"
    assert tokenizer_fingerprint(tokenizer) == before
    tokenizer.add_tokens(["<new>"])
    assert tokenizer_fingerprint(tokenizer) != before
    rules.backend_tokenizer.normalizer = normalizers.Lowercase()
    assert tokenizer_fingerprint(rules) != before


def test_importing_sources_loads_nothing_heavy():
    code = (
        "import sys, slipstream.datastores.ingest.sources;"
        "print([m for m in ('torch', 'transformers', 'tokenizers', 'pyarrow', 'numba') if m in sys.modules])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"
