"""The benchmark's page in a real browser: what it draws of the document, and that no name can break out of it."""

import json
import math
import re
from dataclasses import asdict
from random import Random

import pytest

from slipstream.evaluate.drawing import ticks
from slipstream.evaluate.glossary import GLOSSARY
from slipstream.evaluate.metrics import Ratio, Row
from slipstream.evaluate.page import write_page

SCRIPT = "</svg></style><script>document.title='hacked'</script>"
IMAGE = '"><img src=x onerror="document.title=\'hacked\'">'
CATEGORIES = ["writing", "roleplay", "reasoning", "math", "coding", "summarization", "rag", "translation"]
CONTESTANTS = ["none", "pld", "model", "hf", "hf-pld"]
GAINS = {"none": 1.0, "pld": 1.45, "model": 1.25, "hf": 0.93, "hf-pld": 1.12}  # over plain decoding


def make_document(contestants=CONTESTANTS, categories=CATEGORIES, seed=0, **change):
    """A run on a small machine: speculation pays where the answer repeats the question."""
    rng = Random(seed)
    rows = [
        make_row(rng, name, category, share, [b for b in ("none", "hf") if b in contestants])
        for category, share in [("all", 0.5), *((c, rng.random()) for c in categories if len(categories) > 1)]
        for name in contestants
    ]
    return {
        "benchmark": "slipstream",
        "version": 1,
        "provenance": {
            "slipstream": "0.1.0",
            "torch": "2.11.0+cpu",
            "transformers": "5.17.0",
            "python": "3.12.3",
            "model": "SmolLM2-135M-Instruct",
            "dtype": "float32",
            "device": "Intel(R) Xeon(R) Processor @ 2.90GHz",
            "threads": 2,
            "commit": "1a2b3c4",
            "options": {"contestants": list(contestants), "limit": 6, "draft_model": None, "offline": True},
        },
        "decoding": {"max_new_tokens": 128, "temperature": 0.0, "top_p": 1.0, "seed": 0},
        "items": 48,
        "repeats": 3,
        "complete": True,
        "missing": None,
        "peak_memory_mb": 1413.5,
        "rows": [json.loads(json.dumps(asdict(row))) for row in rows],
    } | change


def make_row(rng, name, category, repeats, baselines):
    plain_ms = 27 + 2 * rng.random()
    gain = GAINS.get(name, 1 + rng.random()) * (0.75 + 0.5 * repeats if name not in ("none", "hf") else 1)
    rate = 1e3 / plain_ms * gain
    half = 0.02 + 0.08 * rng.random() if name != "none" else 0.0
    bases = {"none": gain, "hf": gain / GAINS["hf"]}
    engine = {}
    if not name.startswith("hf"):
        drafts = name != "none"
        kept = gain * 1.25 if drafts else 1.0  # tokens per step
        counts = {0: 900} | ({k: int(700 * (1 - 1 / kept) ** k) + 3 for k in range(1, 11)} if drafts else {})
        step = 1e3 * kept / rate
        parts = {"draft": 0.08 * step if drafts else 0.0, "host": 0.05 * step, "unaccounted": 0.03 * step}
        parts = {"draft": parts["draft"], "verify": step - sum(parts.values()), **parts}
        engine = {"tokens_per_step": kept, "accepted_lengths": counts, "ms_per_step": parts, "unaccounted": 0.03}
        engine |= {"acceptance_rate": 0.3, "node_yield": 0.12} if drafts else {}
    return Row(
        contestant=name,
        category=category,
        answers=144 if category == "all" else 18,
        tokens=17011 if category == "all" else 2120,
        tokens_per_second=rate,
        spread=(rate * 0.98, rate * 1.03),
        speedup={b: Ratio(v, v * (1 - half), v * (1 + half)) for b, v in bases.items() if b in baselines},
        first_token_ms=61 + 9 * rng.random(),
        texts_equal=48,
        texts_compared=48,
        **engine,
    )


@pytest.fixture
def show(browser, tmp_path):
    """show(document) -> the browser with its page open. However a test goes, the page may neither complain, nor run a
    script, nor ask for anything but itself."""
    page = tmp_path / "page.html"
    browser.complaints.clear()
    browser.requests.clear()

    def show(document, **size):
        write_page(document, page)
        browser.open(page, **size)
        assert browser.run("document.querySelectorAll('script, img, iframe, link').length") == 0
        return browser

    yield show
    assert browser.complaints == []
    assert set(browser.requests) == {page.as_uri()}


def count(browser, selector):
    return browser.run(
        f"[...document.querySelectorAll({json.dumps(selector)})].filter(e => e.checkVisibility()).length"
    )


def words(browser, selector="body"):
    return browser.run(f"document.querySelector({json.dumps(selector)})?.textContent ?? ''")


def middles(browser, selector, axis="x"):
    size = {"x": "width", "y": "height"}[axis]
    return browser.run(
        f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.getBoundingClientRect())"
        f".map(box => box.{axis} + box.{size} / 2)"
    )


# ---- what is drawn


@pytest.mark.parametrize("width", [390, 800, 1280])
def test_every_number_has_its_mark_at_every_width(show, width):
    document = make_document()
    browser = show(document, width=width)
    rows, ours = document["rows"], [r for r in document["rows"] if r["tokens_per_step"]]
    compared = [r for r in rows if r["contestant"] != "none"]
    assert count(browser, "#speedups .mark") == count(browser, "#speedups .whisker") == len(compared)
    assert count(browser, "#speedups .one") == 1
    assert count(browser, "#steps .mark") == len(ours)
    assert count(browser, "#steps path.iso") >= 2
    whole = [r for r in ours if r["category"] == "all"]
    drafting = [r for r in whole if r["contestant"] != "none"]
    assert count(browser, "#lengths .bar") == sum(len(r["accepted_lengths"]) for r in drafting)
    assert count(browser, "#times .part") == 4 * len(whole)
    assert count(browser, "tr.row") == len(rows)
    assert browser.run("document.documentElement.scrollWidth") <= width


def test_marks_stand_where_their_numbers_are(show):
    document = make_document()
    browser = show(document)
    values = [r["speedup"]["none"]["value"] for r in document["rows"] if r["contestant"] != "none"]
    places = middles(browser, "#speedups .wide .mark")
    (one,) = middles(browser, "#speedups .wide .one")
    per_unit = (max(places) - one) / (max(values) - 1)
    assert per_unit > 0
    assert places == pytest.approx([one + per_unit * (value - 1) for value in values], abs=0.2)
    parts = browser.run("[...document.querySelectorAll('#times .wide .part')].map(e => e.getBBox().width)")
    spent = [ms for r in document["rows"] if r["category"] == "all" for ms in r["ms_per_step"].values()]
    assert [p / max(parts) for p in parts] == pytest.approx([ms / max(spent) for ms in spent], abs=0.01)


def nearly_equal(document):
    """Everyone as fast as everyone else, but for the third digit."""
    for i, row in enumerate(document["rows"]):
        row["speedup"]["none"] = {"value": 1 + i / 1e4, "low": 0.999, "high": 1.009, "items": 2}
        if row["tokens_per_step"]:
            row["tokens_per_step"] = 1.5 + i / 1e4
            row["ms_per_step"] = {"draft": 1 + i / 1e4, "verify": 20.0, "host": 0.5, "unaccounted": 0.1}
    return document


def in_seconds(document):
    """A slow machine: milliseconds of five digits."""
    for row in document["rows"]:
        row["ms_per_step"] = {stage: 1234.5 * ms for stage, ms in row["ms_per_step"].items()}
        row["speedup"]["none"] = {k: 1000 * v for k, v in row["speedup"]["none"].items()}
    return document


CROWDS = {
    "a sweep": make_document([*CONTESTANTS, *(f"pld length={n}" for n in (2, 4, 8, 16, 32))]),
    "thirty": make_document(["none", *(f"suffix length={n}" for n in range(30))], CATEGORIES[:2]),
    "long names": make_document(["none", *(f"WWW{i} OPTION=MMMMMMMMMMMMMMMM{i}" for i in range(4))], ["W" * 70, "b"]),
    "wide letters": make_document(
        ["none", *(f"下書き器の長い名前{i}の変種" for i in range(5))], ["要約のための質問", "翻訳"]
    ),
    "nearly equal": nearly_equal(make_document([*CONTESTANTS, "suffix", "eagle3", "auto"])),
    "in seconds": in_seconds(make_document()),
}


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("crowd", CROWDS)
def test_no_label_of_a_chart_covers_another_or_leaves_it(show, crowd, width):
    browser = show(CROWDS[crowd], width=width)
    boxes = browser.run(
        "[...document.querySelectorAll('figure svg')].filter(s => s.checkVisibility()).map(s =>"
        " [s.getBoundingClientRect().toJSON(), ...[...s.querySelectorAll('text')].filter(t => t.textContent).map(t =>"
        " Object.assign(t.getBoundingClientRect().toJSON(), {text: t.textContent}))])"
    )
    assert sum(map(len, boxes)) > 60
    for frame, *labels in boxes:
        for i, a in enumerate(labels):
            assert a["left"] >= frame["left"] - 1, a
            assert a["right"] <= frame["right"] + 1, a
            for b in labels[:i]:
                across = min(a["right"], b["right"]) - max(a["left"], b["left"])
                down = min(a["bottom"], b["bottom"]) - max(a["top"], b["top"])
                assert across <= 0 or down < 2, (a, b)


def test_the_head_and_the_table_say_what_the_document_says(show):
    document = make_document()
    browser = show(document)
    best = document["rows"][1]
    assert f"{best['speedup']['none']['value']:.2f}×" in words(browser, "header")
    for text in ("SmolLM2-135M-Instruct", "48 questions", "3 times", "128 new tokens", "greedily"):
        assert text in words(browser, "header")
    for text in ("2.11.0+cpu", "float32", "Intel(R) Xeon(R) Processor @ 2.90GHz", "1a2b3c4", "limit: 6", "1,414 MB"):
        assert text in words(browser, ".provenance")
    row = browser.run("[...document.querySelectorAll('tr.row')[1].cells].map(c => c.innerText)")
    ratios = [best["speedup"][name] for name in ("none", "hf")]
    assert row[0] == "pld"
    assert row[4:6] == [f"{r['value']:.2f} {r['low']:.2f}–{r['high']:.2f}" for r in ratios]
    assert row[-1] == "48/48"
    assert words(browser, ".notes") == ""


def test_an_interval_says_how_many_questions_it_is_from(show):
    document = make_document()
    for row in document["rows"]:
        for over in row["speedup"].values():
            over["items"] = 48 if row["category"] == "all" else 2
    browser = show(document)
    assert "from 48 questions" in words(browser, "header")
    said = browser.run("[...document.querySelectorAll('#speedups .wide text')].map(t => t.textContent)")
    assert said.count("from 2 questions") == len(CATEGORIES)
    assert said.count("from 48 questions") == 1
    cells = browser.run("[...document.querySelectorAll('tr.row')].map(r => r.cells[4].innerText)")
    assert [cell.rpartition(" of ")[2] for cell in cells] == ["48"] * 5 + ["2"] * 5 * len(CATEGORIES)


# ---- the glossary


def shown_tips(browser):
    """The tips that can be seen, with what is wrong with their place."""
    return browser.run(
        "[...document.querySelectorAll('.tip')].filter(t => t.checkVisibility()).map(t => {"
        " const box = t.getBoundingClientRect(), x = box.x + box.width / 2, y = box.y + box.height / 2;"
        " return [t.textContent, box.left >= 0 && box.right <= innerWidth && box.top >= 0 && box.bottom <= innerHeight,"
        " document.elementFromPoint(x, y) === t]; })"
    )


@pytest.mark.parametrize("width", [390, 1280])
def test_every_metric_explains_itself_to_mouse_and_keyboard(show, width):
    browser = show(make_document(), width=width)
    heads = browser.run("[...document.querySelectorAll('thead th')].map(h => h.querySelector('.term') !== null)")
    assert all(heads)
    for figure in ("speedups", "steps", "lengths", "times"):
        assert count(browser, f"#{figure} .term") > 0
    ids = browser.run("[...document.querySelectorAll('.term')].map(t => t.getAttribute('aria-describedby'))")
    assert len(set(ids)) == len(ids)
    assert shown_tips(browser) == []
    for i, name in enumerate(ids):
        said = words(browser, f"[id='{name}']")
        assert said in GLOSSARY.values()
        term = f"document.querySelectorAll('.term')[{i}]"
        browser.run(f"{term}.scrollIntoView({{block: 'center', inline: 'center'}})")
        box = browser.run(f"{term}.getClientRects()[0].toJSON()")
        browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=box["x"] + 5, y=box["y"] + 5)
        assert shown_tips(browser) == [[said, True, True]], name
        browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
        assert shown_tips(browser) == []
        browser.run(f"{term}.focus({{preventScroll: true}})")
        assert shown_tips(browser) == [[said, True, True]], name
        browser.run("document.activeElement.blur()")


def test_the_tab_key_goes_from_term_to_term(show):
    browser = show(make_document())
    reached = []
    for _ in range(3):
        browser.press("Tab")
        reached.append(browser.run("document.activeElement.getAttribute('aria-describedby')"))
    assert reached == ["head-speed-up", "head-95%", "head1-tokens/s"]


# ---- how it is drawn


def test_sampling_is_said(show):
    decoding = {"max_new_tokens": 64, "temperature": 0.8, "top_p": 0.9, "seed": 7}
    browser = show(make_document(decoding=decoding, items=1, repeats=1))
    assert "temperature 0.8, top-p 0.9, seed 7" in words(browser, "header")
    assert "1 question, each answered once" in words(browser, "header")


def test_an_incomplete_run_and_differing_texts_are_said(show):
    document = make_document(complete=False, missing="interrupted after 80 of 720 answers")
    next(r for r in document["rows"] if r["contestant"] == "hf-pld")["texts_equal"] = 45
    browser = show(document)
    assert count(browser, ".warning") == 1
    assert "interrupted after 80 of 720 answers" in words(browser, ".warning")
    assert count(browser, ".differs") == 1
    assert words(browser, ".differs") == "hf-pld: 3 of 48 texts differ from plain decoding."


# ---- what can't break it


def test_hostile_names_stay_text(show):
    document = make_document([SCRIPT, IMAGE, "none", "\ud800\0"], [SCRIPT, IMAGE, "a" * 300])
    document["provenance"] |= {"model": SCRIPT, IMAGE: {SCRIPT: [IMAGE]}}
    document |= {"missing": IMAGE, "complete": False, "items": IMAGE}
    for row in document["rows"]:
        row |= {"texts_equal": 1}
        row["speedup"] |= {SCRIPT: {"value": 1.0, "low": 1.0, "high": 1.0}}
    browser = show(document, width=390)
    assert browser.run("document.title") == f"{SCRIPT} · slipstream benchmark"
    for place in ("table", ".provenance", ".notes", "#steps .legend"):
        assert IMAGE in words(browser, place)
    assert browser.run("document.documentElement.scrollWidth") <= 390
    assert count(browser, "#speedups .mark") == 12


@pytest.mark.parametrize("unknown", [None, math.nan])
def test_what_is_not_known_is_a_dash(show, unknown):
    document = make_document()
    rows = document["rows"]
    rows[1]["speedup"]["none"] = dict.fromkeys(("value", "low", "high"), unknown)
    rows[2]["speedup"] = {}
    rows[3]["speedup"]["none"] |= {"low": unknown, "high": unknown}
    rows[1] |= {"tokens_per_step": unknown, "node_yield": unknown, "tokens_per_second": unknown}
    rows[2] |= {"ms_per_step": dict.fromkeys(rows[2]["ms_per_step"], unknown), "spread": [unknown, unknown]}
    browser = show(document)
    compared, ours = sum(r["contestant"] != "none" for r in rows), sum(bool(r["accepted_lengths"]) for r in rows)
    assert count(browser, "#speedups .mark") == compared - 2
    assert count(browser, "#speedups .whisker") == compared - 3
    assert count(browser, "#steps .mark") == ours - 2
    assert not re.search(r"nan|None|null|inf\b", words(browser, "main"))


@pytest.mark.parametrize("name", ["none", "pld", "hf"])
def test_one_contestant_and_one_category(show, name):
    browser = show(make_document([name], ["coding"]))
    assert count(browser, "tr.row") == 1
    # Only what was measured is drawn: nothing to compare with, nothing drafted, no steps of transformers.
    assert count(browser, "#speedups") == 0
    assert ("Plain decoding was not measured" in words(browser, ".notes")) == (name != "none")
    assert count(browser, "#lengths .bar") == (11 if name == "pld" else 0)
    assert count(browser, "#steps .mark") == (name != "hf")
    assert count(browser, "#times .part") == (0 if name == "hf" else 4)


def test_a_run_stopped_before_it_measured_anything(show):
    browser = show(make_document(rows=[], items=0, complete=False, missing="interrupted after 0 of 720 answers"))
    assert "Nothing was measured" in words(browser, ".notes")
    assert count(browser, "figure, table") == 0


def test_the_page_forbids_itself_script_and_network(tmp_path):
    write_page(make_document(), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    assert f'<meta http-equiv="Content-Security-Policy" content="{policy}">' in page
    assert not re.search(r"https?:|@import|<script|\son\w+=", page)


# ---- how it is read


def test_dark_is_dark_and_paper_is_white(show):
    browser = show(make_document())
    try:
        for media, dark in [("", False), ("", True), ("print", True)]:
            browser.media(media, dark)
            paper, ink = browser.run(
                "['backgroundColor', 'color'].map(k => getComputedStyle(document.body)[k].match(/\\d+/g).map(Number))"
            )
            assert (sum(paper) < sum(ink)) == (dark and media != "print")
            label = browser.run(
                "getComputedStyle(document.querySelector('text.strong')).fill.match(/\\d+/g).map(Number)"
            )
            assert label == ink
    finally:
        browser.media()


def test_the_table_fits_on_paper(show):
    browser = show(make_document(), width=688)  # A4 without its margins
    browser.media("print")
    wide = browser.run("document.documentElement.scrollWidth")
    browser.media()
    assert wide <= 688


def test_ticks_are_round_and_within():
    assert ticks(0.9, 2.1, 6) == [1.0, 1.2, 1.4, 1.6, 1.8, 2.0]
    assert ticks(0.93, 1.71, 6, around=True) == [0.8, 1.0, 1.2, 1.4, 1.6, 1.8]
    assert ticks(1.0, 1.0, 6, around=True) == [1.0, 1.2]
    assert ticks(0, 10, 5) == [0, 2, 4, 6, 8, 10]
