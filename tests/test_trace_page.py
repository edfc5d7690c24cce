"""The trace page in a real browser: what it draws, what it answers to, and that no text can break out of it."""

import json
import re
from collections import defaultdict
from itertools import accumulate
from pathlib import Path
from random import Random

import pytest

from slipstream.colours import COLOURS, colour
from slipstream.errors import OptionError
from slipstream.evaluate.page import write_page as write_report
from slipstream.trace.page import read, write_page
from test_bench_page import make_document

SCRIPT = '</script><script>document.title="hacked"</script><!-- <script>'
IMAGE = "<img src=x onerror=\"document.title='hacked'\">"
HOSTILE = [SCRIPT, IMAGE, "&lt;", "\u2028", "\u202e", "\0", "\ud800", "\n\n"]
HOSTILE += ["שלום ", "עולם", "مر", "حبا", "e", "\u0301\u0323", "👩", "\u200d", "🚀"]

ANSWER = """A river does not hurry, and yet it arrives. Rain falls on the hills, gathers in small streams, and the \
small streams join into larger ones.

Three rivers worth knowing:

1. The Rhine runs from the Alps to the North Sea.
2. The Danube runs from the Black Forest to the Black Sea.
3. The Nile runs from the Great Lakes to the Mediterranean Sea.

Their lengths, as a small program:

```python
lengths = {"Rhine": 1230, "Danube": 2850, "Nile": 6650}
for name, length in lengths.items():
    print(f"{name} is {length} kilometres long")
```

The Danube passes through ten countries, more than any other river in the world. The Nile is the longest of the three, \
and the Rhine carries the most ships. What they have in common is that each of them made the cities on its banks."""


def make_trace(texts, seed=0, **header):
    """A generation of these token texts by three sources: branching trees, some steps without a draft."""
    rng = Random(seed)
    ids = {text: i for i, text in enumerate(dict.fromkeys(texts))}
    lines = [{"format": "slipstream-trace", "version": 1, "model": "SmolLM2-135M-Instruct", "drafter": "fuse"}]
    lines[0] |= {"accept": "match", "exact": True, "prompt": "Tell me about rivers.", "prompt_tokens": 36} | header

    def node(text, parent, names=()):
        sources = {name: round(rng.random(), 3) for name in names}
        score = max(sources.values()) if sources else None
        return {"token": ids.get(text, 99_999), "text": text, "parent": parent, "score": score, "sources": sources}

    done = 0
    while done < len(texts):
        kept = min(rng.choice([0, 1, 2, 2, 3, 4, 6]) if done else 0, len(texts) - done - 1)
        names = rng.choice([["pld"], ["store"], ["model"], ["model"], ["pld", "store"]])
        nodes, path = [node(texts[done - 1] if done else "\n", -1)], [0]
        for text in texts[done : done + kept]:
            nodes.append(node(text, path[-1], names))
            path.append(len(nodes) - 1)
        for _ in range(rng.choice([0, 2, 4, 7]) if done else 0):  # guesses that weren't right
            parent = rng.randrange(len(nodes))
            right = {texts[done + len(path) - 1], *(n["text"] for n in nodes if n["parent"] == parent)}
            if (text := rng.choice(texts)) not in right:
                nodes.append(node(text, parent, [rng.choice(["pld", "store", "model"])]))
        kept_nodes = [nodes[i] for i in path[1:]]
        emitted = [{"token": n["token"], "text": n["text"], "source": "+".join(n["sources"])} for n in kept_nodes]
        emitted.append({"token": ids[texts[done + kept]], "text": texts[done + kept], "source": None})
        step = {"step": len(lines) - 1, "first": done, "nodes": nodes, "path": path, "emitted": emitted}
        times = {"draft_ms": 4 * rng.random(), "verify_ms": 18 + 4 * rng.random(), "host_ms": rng.random()}
        lines.append(step | times)
        done += len(emitted)
    seconds = sum(s["draft_ms"] + s["verify_ms"] + s["host_ms"] for s in lines[1:]) / 1000
    stats = {"new_tokens": done, "steps": len(lines) - 1, "tokens_per_second": round(done / seconds, 3)}
    return [*lines, {"end": True, "finish": "stop", "text": "".join(texts), "stats": stats}]


WORDS = re.findall(r" ?\w+|\n+| +|[^\w\s]", ANSWER)


def rivers():
    return make_trace(WORDS)


def plain_rivers():
    """The same answer by plain decoding: a step of 20 ms per token."""
    lines = make_trace(WORDS, drafter="none")
    tokens = [token | {"source": None} for step in steps_of(lines) for token in step["emitted"]]
    root = {"token": 0, "text": "\n", "parent": -1, "score": None, "sources": {}}
    times = {"draft_ms": 0.0, "verify_ms": 19.5, "host_ms": 0.5}
    steps = [
        {"step": i, "first": i, "nodes": [root], "path": [0], "emitted": [token]} | times
        for i, token in enumerate(tokens)
    ]
    stats = {"new_tokens": len(tokens), "steps": len(tokens), "tokens_per_second": 50.0}
    return [lines[0], *steps, lines[-1] | {"stats": stats}]


@pytest.fixture
def show(browser, tmp_path):
    """show(lines) -> the browser with their page open. However a test goes, the page may neither complain nor ask for
    anything but itself."""
    page = tmp_path / "page.html"
    browser.complaints.clear()
    browser.requests.clear()

    def show(lines, against=None, **size):
        write_page(lines, page, against)
        browser.open(page, **size)
        return browser

    yield show
    assert browser.complaints == []
    assert set(browser.requests) == {page.as_uri()}


def steps_of(lines):
    return [line for line in lines if "step" in line]


def shown_path(browser):
    """The nodes of the highlighted rows, from top to bottom."""
    return browser.run("[...document.querySelectorAll('#panel tr.kept')].map(row => row.dataset.node)")


def shown_step(browser):
    return browser.run("document.getElementById('panel').dataset.step ?? null")


# ---- what is drawn


def test_the_tokens_drawn_are_the_answer(show):
    lines = rivers()
    browser = show(lines)
    emitted = [token for step in steps_of(lines) for token in step["emitted"]]
    assert browser.run("[...document.querySelectorAll('.token')].map(t => t.textContent)") == [
        t["text"] for t in emitted
    ]
    assert browser.run("document.getElementById('text').textContent") == ANSWER
    assert browser.run("document.getElementById('note').hidden")
    painted = browser.run("[...document.querySelectorAll('.token')].map(t => t.querySelectorAll('.u').length"
                          " + t.classList.contains('u'))")  # fmt: skip
    assert painted == [len(t["source"].split("+")) if t["source"] else 0 for t in emitted]


def test_the_head_says_what_ran_and_how_fast(show):
    lines = rivers()
    tokens, steps = lines[-1]["stats"]["new_tokens"], lines[-1]["stats"]["steps"]
    head = show(lines).run("document.querySelector('header').innerText")
    for text in ("SmolLM2-135M-Instruct", "fuse", "match", "exact", str(tokens), str(steps), f"{tokens / steps:.2f}"):
        assert text in head
    assert f"{lines[-1]['stats']['tokens_per_second']:.1f}" in head
    assert "LOSSY" not in head


def test_lossy_rules_are_marked_and_rounding_is_not_called_lossy(show):
    from slipstream.accept import RULES

    for name, rule in RULES.items():
        verdict = show(make_trace(["a", "b"], accept=name, exact=False)).run(
            "document.getElementById('verdict').innerText"
        )
        assert verdict == ("same rule, rounding may differ" if rule.lossless else "LOSSY")


def test_an_interrupted_run_is_shown_as_far_as_it_got(show):
    lines = rivers()[:9]
    browser = show(lines)
    text = "".join(token["text"] for step in steps_of(lines) for token in step["emitted"])
    assert browser.run("document.getElementById('text').textContent") == text
    assert "interrupted" in browser.run("document.getElementById('note').innerText")
    assert show(lines[:1]).run("document.querySelectorAll('.token').length") == 0
    browser.press("ArrowRight")
    assert shown_step(browser) is None


# ---- what it answers to


def test_clicking_a_token_shows_its_step_and_path(show):
    lines = rivers()
    steps = steps_of(lines)
    browser = show(lines)
    ends = list(accumulate(len(step["emitted"]) for step in steps))
    for index in (0, 5, 31, 90, ends[-1] - 1):
        number = next(i for i, end in enumerate(ends) if index < end)
        step, place = steps[number], index - steps[number]["first"]
        browser.click(".token", index)
        assert shown_step(browser) == str(number)
        assert shown_path(browser) == [*map(str, step["path"]), "bonus"]
        assert browser.run("document.querySelectorAll('#panel tbody tr').length") == len(step["nodes"]) + 1
        chosen = browser.run("document.querySelector('#panel tr.chosen').dataset.node")
        assert chosen == [*map(str, step["path"][1:]), "bonus"][place]
        outlined = browser.run("[...document.querySelectorAll('.step.current .token')].map(t => t.textContent)")
        assert outlined == [token["text"] for token in step["emitted"]]


def test_the_panel_says_what_the_trace_says_of_each_node(show):
    lines = rivers()
    step = max(steps_of(lines), key=lambda step: len(step["nodes"]))
    browser = show(lines)
    browser.click(".token", step["first"])
    for i, node in enumerate(step["nodes"][1:], start=1):
        title, score, sources = browser.run(
            f"(row => [row.querySelector('.word').title, row.cells[1].innerText, row.cells[2].innerText])"
            f"(document.querySelector('#panel tr[data-node=\"{i}\"]'))"
        )
        assert title == f"token {node['token']}: {json.dumps(node['text'], ensure_ascii=False)}"
        assert float(score) == pytest.approx(node["score"], abs=0.0051)
        assert all(name in sources for name in node["sources"])
    times = browser.run("document.querySelector('.spent').innerText")
    assert f"{step['verify_ms']:.1f} ms" in times


def test_keys_walk_through_the_steps(show):
    lines = rivers()
    last = str(len(steps_of(lines)) - 1)
    browser = show(lines, height=420)
    for keys, step in [
        (["ArrowRight"], "0"),
        (["ArrowRight", "j"], "2"),
        (["ArrowLeft"], "1"),
        (["k", "k", "k"], "0"),
        (["End"], last),
        (["ArrowRight"], last),
        (["Home"], "0"),
        (["Escape"], None),
        (["ArrowLeft"], last),
    ]:
        browser.press(*keys)
        assert shown_step(browser) == step, keys
    box = browser.run("document.querySelector('.step.current').getBoundingClientRect().toJSON()")
    assert box["top"] >= 0
    assert box["bottom"] <= 420


def test_the_legend_dims_what_others_wrote(show):
    lines = rivers()
    sources = [token["source"] for step in steps_of(lines) for token in step["emitted"]]
    browser = show(lines)
    labels = browser.run("[...document.querySelectorAll('#legend .chip')].map(b => b.textContent)")
    assert sorted(labels) == ["model", "pld", "store", "target"]

    def dimmed():
        return browser.run("[...document.querySelectorAll('.token')].map(t => t.classList.contains('dim'))")

    def pressed():
        return browser.run("[...document.querySelectorAll('#legend button')].map(b => b.ariaPressed === 'true')")

    browser.click("#legend button", labels.index("pld"))
    assert dimmed() == ["pld" not in (source or "").split("+") for source in sources]
    assert pressed() == [label == "pld" for label in labels]
    browser.click("#legend button", labels.index("target"))
    assert dimmed() == [source is not None and "pld" not in source.split("+") for source in sources]
    browser.press("Escape")
    assert not any(dimmed())
    assert not any(pressed())


# ---- the timeline


def columns(browser, line="#timeline"):
    """Left edge and width of each step's column, as shares of the timeline."""
    return browser.run(
        f"(box => [...document.querySelectorAll('{line} .room')].map(room => room.getBoundingClientRect())"
        ".map(room => [(room.left - box.left) / box.width, room.width / box.width]))"
        f"(document.querySelector('{line}').getBoundingClientRect())"
    )


def pieces(browser, line="#timeline"):
    """{where a step begins: [(lower edge, height, colour), …] from the bottom up}, in milliseconds and tokens."""
    found = defaultdict(list)
    for shape, hue in browser.run(
        f"[...document.querySelectorAll('{line} .piece')]"
        ".map(p => [p.getAttribute('d'), p.style.getPropertyValue('--c')])"
    ):
        for x, y, height in re.findall(r"M(\S+) (\S+)v-(\S+?)h", shape):
            found[float(x)].append((-float(y), float(height), hue))
    return {x: sorted(column) for x, column in sorted(found.items())}


def spent(step):
    return step["draft_ms"] + step["verify_ms"] + step["host_ms"]


def ends_of(lines):
    return list(accumulate(map(spent, steps_of(lines))))


def test_the_timeline_has_a_column_per_step_as_wide_as_its_time_and_as_high_as_its_tokens(show):
    lines = rivers()
    steps, ends = steps_of(lines), ends_of(lines)
    browser = show(lines)
    found = columns(browser)
    assert len(found) == len(steps)
    for step, end, (left, width) in zip(steps, ends, found, strict=True):
        assert left == pytest.approx((end - spent(step)) / ends[-1], abs=1e-3)
        assert width == pytest.approx(spent(step) / ends[-1], abs=1e-3)
    drawn = pieces(browser)
    assert list(drawn) == pytest.approx([0, *ends[:-1]])
    for step, column in zip(steps, drawn.values(), strict=True):
        assert sum(height for _, height, _ in column) == pytest.approx(len(step["emitted"]))
        names = [name for token in step["emitted"] for name in (token["source"] or "").split("+")]
        assert [hue for _, _, hue in column] == [name and f"var({colour(name)})" for name in names]
    box, highest = browser.run(
        "(svg => [svg.getBoundingClientRect().height, svg.viewBox.baseVal.height])"
        "(document.querySelector('#timeline svg'))"
    )
    assert highest == max(len(step["emitted"]) for step in steps)
    assert box > 50


@pytest.mark.parametrize("width", [320, 1280])
def test_clicking_a_column_chooses_its_step(show, width):
    lines = rivers()
    browser = show(lines, width=width)
    for index in (0, 7, 30, len(steps_of(lines)) - 1):
        browser.click("#timeline .room", index)
        assert shown_step(browser) == str(index)
        marker, room = browser.run(
            f"[document.querySelector('#timeline .marker'), document.querySelectorAll('#timeline .room')[{index}]]"
            ".map(e => e.getBoundingClientRect().left)"
        )
        assert marker == pytest.approx(room, abs=1)
        said = browser.run(f"document.querySelectorAll('#timeline title')[{index}].textContent")
        assert said.startswith(f"Step {index + 1}: ")


# ---- links


def hash_becomes(browser, wanted):
    """Wait until the address ends so: the page writes it a moment after the choice."""
    look = f"const look = () => location.hash === '{wanted}' ? done() : setTimeout(look, 10);"
    browser.run(f"new Promise(done => {{ {look} look(); }})")
    return True


def test_a_link_leads_to_its_step(show):
    lines = rivers()
    browser = show(lines)
    browser.click(".token", 90)
    number = int(shown_step(browser)) + 1
    assert hash_becomes(browser, f"#step-{number}")
    assert browser.run("document.querySelector('#panel h2 a').getAttribute('href')") == f"#step-{number}"
    browser.run("new Promise(done => { addEventListener('hashchange', done); location.hash = '#step-12'; })")
    assert shown_step(browser) == "11"
    browser.press("Escape")
    assert hash_becomes(browser, "")


@pytest.mark.parametrize(
    ("hash", "step"),
    [
        ("#step-12", "11"),
        ("#step-1", "0"),
        ("#step-0", None),
        ("#step-9999", None),
        ("#second-step-1", None),
        ("#x", None),
    ],
)
def test_a_link_is_restored_on_load(browser, tmp_path, hash, step):
    page = tmp_path / f"{len(hash)}.html"
    write_page(rivers(), page)
    browser.open(Link(page, hash), height=420)
    assert shown_step(browser) == step
    if step:
        box = browser.run("document.querySelector('.step.current').getBoundingClientRect().toJSON()")
        assert box["bottom"] <= 420


class Link:
    """A file's address with something behind it."""

    def __init__(self, path, hash):
        self.address = path.as_uri() + hash

    def as_uri(self):
        return self.address


# ---- playing


def written(browser, text="#text"):
    return browser.run(f"[...document.querySelectorAll('{text} .step')].filter(s => !s.matches('.later')).length")


def over_at(lines, time):
    return sum(end <= time for end in ends_of(lines))


# A clock that the test moves: frame(ms) is what the browser calls before it paints.
CLOCK = "window.requestAnimationFrame = f => { window.frame = f; }; window.frame = null;"


def test_space_plays_the_run_in_the_ratio_of_its_times(show):
    lines = rivers()
    whole = ends_of(lines)[-1]
    browser = show(lines)
    browser.run(CLOCK)
    browser.press(" ")
    assert "Pause" in browser.run("document.getElementById('play').textContent")
    assert written(browser) == 0
    browser.run("frame(5000)")
    for seconds in (1, 2.5, 6, 9.9):  # a run of 1.4 s is played for ten
        browser.run(f"frame(5000 + {1000 * seconds})")
        over = over_at(lines, whole * seconds / 10)
        assert written(browser) == over
        assert shown_step(browser) == str(over - 1)
    browser.press(" ")  # it stands still
    browser.run("frame(16000)")
    assert written(browser) == over_at(lines, whole * 0.99)
    browser.press(" ")
    browser.run("frame(20000)")
    browser.run("frame(20200)")
    assert written(browser) == len(steps_of(lines))
    assert "Play" in browser.run("document.getElementById('play').textContent")
    assert hash_becomes(browser, f"#step-{len(steps_of(lines))}")


def test_the_button_plays_from_the_chosen_step_and_choosing_another_ends_it(show):
    lines = rivers()
    browser = show(lines)
    browser.run(CLOCK)
    browser.click("#timeline .room", 20)
    browser.click("#play")
    assert written(browser) == 20
    assert browser.run("getComputedStyle(document.querySelector('.later')).opacity") == "0.1"
    browser.press("ArrowRight")
    assert written(browser) == len(steps_of(lines))
    assert "Play" in browser.run("document.getElementById('play').textContent")
    browser.click("#play")
    browser.click(".token", 3)
    assert written(browser) == len(steps_of(lines))


def test_it_really_plays(show):
    browser = show(rivers())
    browser.press(" ")
    browser.run("new Promise(done => { const look = () => Number(document.getElementById('panel').dataset.step) >= 2"
                " ? done() : setTimeout(look, 20); look(); })")  # fmt: skip
    browser.press("Escape")


# ---- two traces


def test_two_traces_stand_side_by_side_on_one_clock(show):
    lines, plain = rivers(), plain_rivers()
    browser = show(lines, plain, width=1440)
    texts = browser.run("['text', 'text2'].map(id => document.getElementById(id).textContent)")
    assert texts == [ANSWER, ANSWER]
    left, right = browser.run(
        "['text', 'text2'].map(id => document.getElementById(id).getBoundingClientRect().toJSON())"
    )
    assert left["right"] <= right["left"]
    assert left["top"] == right["top"]
    rates = [trace[-1]["stats"]["tokens_per_second"] for trace in (lines, plain)]
    said = browser.run("document.getElementById('compared').innerText")
    assert said == f"fuse wrote {rates[0] / rates[1]:.2f} × as fast as none. Both wrote the same tokens."
    # Equal times are equally long in both timelines.
    widest = ends_of(plain)[-1]
    for line, trace in (("#timeline", lines), ("#timeline2", plain)):
        for step, (_, width) in zip(steps_of(trace), columns(browser, line), strict=True):
            assert width == pytest.approx(spent(step) / widest, abs=1e-3)
    browser.run(CLOCK)
    browser.press(" ")
    browser.run("frame(0)")
    for seconds in (1, 3, 5, 10):
        browser.run(f"frame({1000 * seconds})")
        now = widest * seconds / 10
        assert written(browser, "#text") == over_at(lines, now)
        assert written(browser, "#text2") == pytest.approx(over_at(plain, now), abs=1)  # a step may end on the instant


def test_steps_of_both_traces_can_be_chosen_and_linked_to(show):
    lines, plain = rivers(), plain_rivers()
    browser = show(lines, plain, width=1440)

    def chosen():
        return browser.run("(({step, run}) => [run, step])(document.getElementById('panel').dataset)")

    browser.click("#text .token", 40)
    assert chosen()[0] == "0"
    browser.click("#text2 .token", 40)
    assert chosen() == ["1", "40"]
    assert hash_becomes(browser, "#second-step-41")
    assert browser.run("document.querySelectorAll('.step.current').length") == 1
    browser.press("ArrowRight")
    assert chosen() == ["1", "41"]
    browser.click("#timeline .room", 5)
    assert chosen() == ["0", "5"]
    browser.click("#timeline2 .room", 100)
    assert chosen() == ["1", "100"]
    assert browser.run("document.querySelectorAll('.step.current').length") == 1
    browser.run("document.getElementById('timeline').focus()")
    browser.press("Home")
    assert chosen() == ["0", "0"]
    assert browser.run("document.querySelectorAll('.step.current').length") == 1
    browser.run("document.querySelector('#legend button').click()")
    dim = browser.run("['text', 'text2'].map(id => document.querySelectorAll(`#${id} .dim`).length)")
    assert dim[0] > 0
    assert dim[1] == len(WORDS)


def test_differing_texts_and_prompts_are_said(show):
    def said(against):
        return show(make_trace(["a", "b", "c"]), against).run("document.getElementById('compared').innerText")

    assert "Their texts differ from token 2 on." in said(make_trace(["a", "a", "b"], drafter="pld"))
    assert "One goes on where the other ended, after 3 tokens." in said(make_trace(["a", "b", "c", "d"]))
    assert "They were asked different things." in said(make_trace(["a", "b", "c"], prompt="Else?"))
    assert said(make_trace(["a", "b", "c"])).startswith("fuse (1) wrote 1.00 × as fast as fuse (2).")


@pytest.mark.parametrize("width", [320, 700, 1000, 1440])
def test_no_width_scrolls_sideways_with_two(show, width):
    browser = show(rivers(), plain_rivers(), width=width, height=700)
    browser.click("#text2 .token", 40)
    assert browser.run("document.documentElement.scrollWidth") <= width
    lefts = browser.run("['text', 'text2'].map(id => document.getElementById(id).getBoundingClientRect().left)")
    assert (lefts[0] == lefts[1]) == (width < 900)  # one below the other where there is no room


# ---- what the numbers say


def test_shares_above_a_hundred_percent_say_why(show):
    def shares(sources):
        """The shares shown, and the words below them, where each token has these sources."""
        lines = make_trace(["x"] * 3)
        step = {"nodes": [lines[1]["nodes"][0]], "path": [0], "draft_ms": 1.0, "verify_ms": 1.0, "host_ms": 1.0}
        emitted = [{"token": 0, "text": "x", "source": source} for source in sources]
        steps = [step | {"step": i, "first": i, "emitted": [token]} for i, token in enumerate(emitted)]
        browser = show([lines[0], *steps, lines[-1] | {"text": "x" * len(sources)}])
        found = browser.run("[...document.querySelectorAll('#legend .count')].map(c => c.textContent)")
        assert browser.run("document.getElementById('shares').checkVisibility()") == (
            sum(int(share.split()[-2]) for share in found) > 100
        )
        return browser.run("document.getElementById('shares').innerText")

    several = "2 tokens had been drafted by several, and each of them counts them."
    assert shares(["pld+store", "pld+store", "pld", None]) == f"Together these are 150 %: {several}"
    assert shares(["pld", "pld", None, None]) == ""
    # 2, 2 and 3 of 7 are 28.6, 28.6 and 42.9 %
    assert shares(["pld"] * 2 + ["store"] * 2 + [None] * 3) == "Together these are 101 %: each is rounded."


def test_a_drafter_has_the_same_colour_on_both_pages_by_day_and_night(browser, tmp_path):
    names = [*COLOURS, "echo"]
    texts = [f" {name}" for name in names]
    lines = make_trace(["x", *texts, "y"])
    step = {"nodes": [lines[1]["nodes"][0]], "path": [0], "draft_ms": 1.0, "verify_ms": 1.0, "host_ms": 1.0}
    emitted = [{"token": 0, "text": text, "source": name} for text, name in zip(texts, names, strict=True)]
    steps = [step | {"step": i, "first": i, "emitted": [token]} for i, token in enumerate(emitted)]
    write_page([lines[0], *steps], tmp_path / "trace.html")
    write_report(make_document(names, ["coding"]), tmp_path / "report.html")
    chips = (
        "Object.fromEntries([...document.querySelectorAll('#legend .chip')].map(c => [c.textContent,"
        " getComputedStyle(c).textDecorationColor]))"
    )
    shapes = "[...document.querySelectorAll('#timeline .piece:not(.own)')].map(p => getComputedStyle(p).fill)"
    whiskers = "[...document.querySelectorAll('#speedups .wide .whisker')].map(w => getComputedStyle(w).stroke)"
    try:
        for dark in (False, True):
            browser.media("", dark)
            browser.open(tmp_path / "trace.html")
            traced, timeline = browser.run(chips), browser.run(shapes)
            assert [traced[name] for name in names] == timeline
            browser.open(tmp_path / "report.html")
            drawn = dict(zip([name for name in names if name != "none"], browser.run(whiskers), strict=True))
            assert drawn == {name: traced[name] for name in drawn}
            assert len(set(drawn.values())) == len(drawn)
    finally:
        browser.media()


# ---- what can't break it


def test_hostile_text_stays_text(show):
    texts = ["x", *HOSTILE, *(a + b for a in HOSTILE for b in HOSTILE)]
    lines = make_trace(texts, model=SCRIPT, drafter=IMAGE, accept=SCRIPT, prompt=SCRIPT + IMAGE)
    step = next(step for step in steps_of(lines) if len(step["nodes"]) > 4)
    for node in step["nodes"][1:]:
        node["sources"] = {SCRIPT: 0.5, IMAGE: None, "__proto__": 1}
    browser = show(lines)
    # UTF-16 units, because the half surrogate can't travel back as it is.
    shown = browser.run("[...document.getElementById('text').textContent].map(c => c.codePointAt(0))")
    assert "".join(map(chr, shown)) == "".join(texts)
    for index in range(0, 60, 7):
        browser.press("ArrowRight")
        browser.click(".token", index)
    browser.click(".token", step["first"])
    browser.click("#legend button", 1)
    assert browser.run("document.title") == f"{SCRIPT} · slipstream trace"
    assert browser.run("document.querySelectorAll('img, iframe').length") == 0
    assert browser.run("document.scripts.length") == 2
    assert SCRIPT in browser.run("document.getElementById('legend').textContent")
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")


def test_a_text_cut_into_tokens_is_drawn_as_if_it_were_whole(show):
    """Joined letters, accents, emoji sequences and right-to-left words: every character stands where it would stand."""
    places = """(() => {
        const text = document.getElementById("text"), whole = text.cloneNode(), range = document.createRange();
        whole.textContent = text.textContent;
        text.after(whole);
        return [text, whole].map((element) => {
            const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT), found = [];
            for (let node = walker.nextNode(); node; node = walker.nextNode()) {
                for (let i = 0; i < node.length; i++) {
                    range.setStart(node, i);
                    range.setEnd(node, i + 1);
                    found.push(range.getBoundingClientRect().right);
                }
            }
            return found;
        });
    })()"""
    for word in ("مرحبا بالعالم", "e\u0301\u0323a\u0308", "👩\u200d🚀👨\u200d👩\u200d👧", "see שלום עולם now"):
        cut, whole = show(make_trace(list(word))).run(places)
        assert cut == pytest.approx(whole, abs=1), word


def test_the_page_forbids_itself_the_network(tmp_path):
    write_page(rivers(), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    assert f'<meta http-equiv="Content-Security-Policy" content="{policy}">' in page
    without_data = re.sub(r'<script type="application/json".*?</script>', "", page, flags=re.DOTALL)
    # The one address is the name of SVG's namespace, which nothing fetches.
    assert re.findall(r"https?://[^\"]*", without_data) == ["http://www.w3.org/2000/svg"]
    assert "innerHTML" not in page
    assert "@import" not in page


def test_two_thousand_tokens_answer_at_once(show):
    browser = show(make_trace((WORDS * 12)[:2000]))
    assert browser.run("document.querySelectorAll('.token').length") == 2000
    for action in (
        "document.querySelectorAll('.token')[1990].click()",
        "document.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowLeft'}))",
        "document.querySelector('#legend button').click()",
    ):
        took = browser.run(
            f"(() => {{ const start = performance.now(); {action};"
            "document.getElementById('panel').getBoundingClientRect(); return performance.now() - start })()"
        )
        assert took < 3000, action  # generous: the machine may be busy


@pytest.mark.parametrize("width", [320, 700, 1280])
def test_no_width_scrolls_sideways(show, width):
    browser = show(rivers(), width=width, height=700)
    browser.click(".token", 40)
    assert browser.run("document.documentElement.scrollWidth") <= width


def test_on_paper_stand_the_legend_the_text_and_the_figures(show):
    browser = show(rivers())
    browser.click(".token", 40)
    browser.media("print")
    hidden = browser.run(
        "['panel', 'legend', 'text', 'figures'].map(id => document.getElementById(id).offsetHeight === 0)"
    )
    browser.media()
    assert hidden == [True, False, False, False]


# ---- the file


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_reading_gives_the_lines_written(tmp_path):
    lines = rivers()
    assert read(write(tmp_path / "a.jsonl", lines)) == lines


def test_the_example_in_the_format_is_a_trace(tmp_path):
    guide = (Path(__file__).parent.parent / "docs" / "trace-format.md").read_text()
    path = tmp_path / "example.jsonl"
    path.write_text("".join(re.findall(r"```json\n(.*?)```", guide, re.DOTALL)))
    *_, end = lines = read(path)
    assert "".join(token["text"] for step in steps_of(lines) for token in step["emitted"]) == end["text"]


@pytest.mark.slow
def test_a_cut_last_line_is_left_out_wherever_it_was_cut(tmp_path):
    lines = make_trace(["é", "b", "c", "👩"])
    whole = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode()
    ends = [i for i, byte in enumerate(whole) if byte == ord("\n")]
    path = tmp_path / "cut.jsonl"
    for size in range(ends[0], len(whole) + 1):
        path.write_bytes(whole[:size])
        assert read(path) == lines[: sum(end <= size for end in ends)]


def test_broken_and_foreign_files_are_refused_by_line(tmp_path):
    def broken(at, **change):
        lines = json.loads(json.dumps(rivers()))
        lines[at] |= change
        return lines

    good = rivers()
    node = {"token": 1, "text": "a", "parent": 0, "score": None, "sources": {}}
    cases = [
        ([], 1, "no whole header"),
        ([{"some": "json"}], 1, "not a trace"),
        (broken(0, version=2), 1, "version 2"),
        (broken(0, exact="yes"), 1, '"exact"'),
        ([*good[:3], *good[4:]], 4, "missing or out of order"),
        (broken(2, first=0), 3, "emitted before"),
        (broken(2, path=[0, 999]), 3, "node 999"),
        (broken(2, path=[]), 3, "start at node 0"),
        (broken(2, nodes=[node]), 3, "parent 0"),
        (broken(2, nodes=[7]), 3, "needed an object"),
        (broken(2, emitted=[]), 3, "0 tokens emitted"),
        (broken(2, draft_ms=True), 3, '"draft_ms"'),
        (broken(2, draft_ms=float("nan")), 3, "NaN"),
        ([*good, *good], len(good) + 1, "one trace per file"),
    ]
    for lines, number, says in cases:
        path = write(tmp_path / "bad.jsonl", lines)
        with pytest.raises(OptionError, match=re.escape(f"{path}, line {number}: ")) as caught:
            read(path)
        assert says in str(caught.value)
    for data in (b"\x89PNG\r\n\x1a\n", b"[" * 100_000 + b"\n", b"[1]\n"):
        path.write_bytes(data)
        with pytest.raises(OptionError, match="line 1"):
            read(path)
    with pytest.raises(OptionError, match="can't read"):
        read(tmp_path / "none.jsonl")
