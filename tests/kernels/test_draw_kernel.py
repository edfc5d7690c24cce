"""Drawing in Triton: what `Sampler` draws, for every shape of row, however the work is cut up.

Run as a program on a GPU it prints how long a call takes, and how many of thousands of rows differ.
"""

import numpy as np
import pytest
import torch
from device import CUDA, DEVICE, triton

from slipstream.kernels import draw_triton as kernel
from slipstream.kernels.draw import _adjusted, draw_plain
from slipstream.sampling import Sampler, Sampling, gumbel, noise_key
from test_draw import OPTIONS, PENALTIES, Batch, by_sampler, differing, draws, logits

# The interpreter's: both sides of a choice are computed, the one not taken as well.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DTYPES = [torch.bfloat16, torch.float16, torch.float32] if CUDA else [torch.float16, torch.float32]
N, SIZE = (400, 49152) if CUDA else (2, 700)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """In the interpreter, small pieces: small rows then have several."""
    if not CUDA:
        cut(monkeypatch, 256, 128, 8)


def cut(monkeypatch, *sizes):
    for name, size in zip(("CHUNK", "BLOCK", "PEAK"), sizes, strict=True):
        monkeypatch.setattr(kernel, name, size)


def given(options, n, size, seed, dtype=DTYPES[0]):
    """logits (b, n, V), what draws from them, and what Sampler draws."""
    samplings, seeds = [Sampling(**o) for o in options], list(range(seed, seed + len(options)))
    positions = 3 + np.arange(n * len(options)).reshape(-1, n) % 97
    rows = logits(len(options), n, size, seed=seed, dtype=dtype)
    texts = [[([0] * p, []) for p in row] for row in positions.tolist()]
    return rows.to(DEVICE), draws(samplings, seeds, positions, DEVICE), by_sampler(rows, samplings, seeds, texts)


# ---- what Sampler draws


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_it_draws_what_the_sampler_draws(options):
    rows, how, expected = given([options], N, SIZE, seed=len(str(options)))
    tokens, value = kernel.draw_rows(rows, how, None)
    assert differing(tokens, expected) == 0
    assert torch.equal(value, rows.float().gather(2, tokens.long()[..., None])[..., 0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 2, 257] + ([1000, 2048, 50257, 151936, 262144] if CUDA else []))
def test_vocabularies_of_any_size(size, dtype):
    chosen = OPTIONS if CUDA else OPTIONS[3::3]
    rows, how, expected = given(chosen, 2, size, seed=size, dtype=dtype)
    assert differing(kernel.draw_rows(rows, how, None)[0], expected) == 0


def test_full_precision_without_ties():
    rows, how, _ = given(OPTIONS[2:], 20 if CUDA else 1, SIZE, seed=5, dtype=torch.float32)
    rows += torch.rand(rows.shape, generator=torch.Generator().manual_seed(0)).to(DEVICE) * 0.01
    assert torch.equal(kernel.draw_rows(rows, how, None)[0], draw_plain(rows, how, None)[0])


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_penalties_and_biases_follow_the_path(temperature):
    more = {"temperature": temperature, "top_k": 30, "top_p": 0.95}
    n, size = (40, 5000) if CUDA else (3, 300)
    batch = Batch([Sampling(**options, **more) for options in PENALTIES], n, size, 1, DEVICE)
    rows = logits(len(PENALTIES), n, size, seed=1, dtype=DTYPES[0])
    tokens, value = kernel.draw_rows(rows.to(DEVICE), batch.draws, batch.history)
    assert differing(tokens, by_sampler(rows, batch.samplings, batch.seeds, batch.texts)) == 0
    plain, plain_value = draw_plain(rows.to(DEVICE), batch.draws, batch.history)
    assert torch.equal(tokens, plain)
    assert torch.equal(value, plain_value)


def test_padding_may_be_anything():
    batch = Batch([Sampling(repetition_penalty=2.0)] * 2, 4, 300, 1, DEVICE)
    rows = logits(2, 4, 300, seed=3, dtype=DTYPES[0]).to(DEVICE)
    expected, _ = kernel.draw_rows(rows, batch.draws, batch.history)
    batch.history.depths[:, 2:] = -1
    batch.history.paths[:, 2:] = 0
    tokens, _ = kernel.draw_rows(rows, batch.draws, batch.history)
    assert torch.equal(tokens[:, :2], expected[:, :2])
    assert ((tokens >= 0) & (tokens < 300)).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_logit_is_adjusted(dtype):
    batch = Batch([Sampling(**options) for options in PENALTIES], 4, 600, 2, DEVICE)
    rows = logits(len(PENALTIES), 4, 600, seed=2, dtype=dtype).to(DEVICE)
    found = kernel._with_history(rows, batch.draws, batch.history)
    assert torch.equal(found, _adjusted(rows, batch.draws, batch.history))


# ---- the last token that is kept, and the first that is not

EVEN = [0.0] * 12
GRADED = np.linspace(-2, 2, 40).round(1).tolist()
ZEROS = [0.0, -0.0, -1.0, 0.0, -0.0, -3.0]
ENDS = [
    (EVEN, {"top_p": 0.5}),
    (EVEN, {"top_p": 0.75}),
    (EVEN, {"top_k": 5}),
    (ZEROS, {"top_k": 1}),
    (ZEROS, {"top_k": 3, "top_p": 0.5}),
    (GRADED, {"top_k": 7}),
    (GRADED, {"top_k": 23}),
    (GRADED, {"top_p": 0.1}),
    (GRADED, {"top_p": 0.9}),
    (GRADED, {"top_k": 20, "top_p": 0.7}),
    (GRADED, {"min_p": 0.3}),
    (GRADED, {"top_p": 0.8, "min_p": 0.3}),
]


@pytest.mark.parametrize(("row", "options"), ENDS, ids=lambda x: "" if isinstance(x, list) else str(x))
def test_where_top_k_and_nucleus_end(row, options):
    """At positions where noise prefers exactly those two to all others."""
    row, sampling = torch.tensor(row), Sampling(temperature=1.0, **options)
    kept = torch.isfinite(Sampler(sampling, [0]).warped(row))
    order = torch.argsort(row, descending=True, stable=True)
    ends = {int(order[kept[order]][-1]), *order[~kept[order]][:1].tolist()}
    noise = torch.stack([row + gumbel(noise_key(5, 0, position), torch.arange(len(row))) for position in range(4000)])
    first = {int(token): position for position, token in reversed([*enumerate(noise.argmax(1))])}
    positions = np.array([[first[token] for token in ends]])
    rows = row.repeat(1, len(ends), 1)
    found, _ = kernel.draw_rows(rows.to(DEVICE), draws([sampling], [5], positions, DEVICE), None)
    texts = [[([0] * position, []) for position in positions[0].tolist()]]
    assert differing(found, by_sampler(rows, [sampling], [5], texts)) == 0


def test_a_nucleus_of_nothing_does_not_hang():
    how = draws([Sampling(temperature=1.0)], [0], np.arange(4)[None], DEVICE)
    how.top_p[:] = 0.0  # which Sampling refuses
    rows = torch.tensor(GRADED, device=DEVICE).repeat(1, 4, 1)
    assert kernel.draw_rows(rows, how, None)[0].tolist() == [[39] * 4]


# ---- rows unlike a model's

FLAT, TIED, STEEP, MASKED, HALF = range(5)


def unusual(size):
    x = torch.zeros(5, size)
    x[FLAT] = torch.linspace(-0.2, 0.2, size)
    x[TIED, : size // 2] = -1.0
    x[STEEP] = -torch.arange(size) * 7.0
    x[MASKED] = -torch.inf
    x[MASKED, [3, size - 2, size - 1]] = torch.tensor([1.0, 1.0, 0.5])
    x[HALF, ::2] = -torch.inf
    return x


@pytest.mark.parametrize("options", OPTIONS if CUDA else OPTIONS[3::4], ids=str)
def test_rows_of_any_shape(options):
    """Long lists, lists of ties alone, lists that reach to minus infinity."""
    size, n = (20000, 20) if CUDA else (500, 1)
    rows = unusual(size)[:, None].repeat(1, n, 1)
    samplings, positions = [Sampling(**options)] * 5, np.arange(5 * n).reshape(5, n)
    how = draws(samplings, [1] * 5, positions, DEVICE)
    tokens, _ = kernel.draw_rows(rows.to(DEVICE), how, None)
    # Among thousands of equal weights the two sums may end a nucleus one token apart, which only that token notices.
    assert differing(tokens, draw_plain(rows.to(DEVICE), how, None)[0].cpu()) == 0


def test_what_check_choice_refuses_is_reported():
    size, options = 300, OPTIONS if CUDA else OPTIONS[1::5]
    rows = torch.zeros(len(options), 3, size, device=DEVICE)
    rows[:, 0, size - 1], rows[:, 1], rows[:, 2, 4] = torch.nan, -torch.inf, -torch.inf
    how = draws([Sampling(**o) for o in options], range(len(options)), np.zeros((len(options), 3), int), DEVICE)
    tokens, value = kernel.draw_rows(rows, how, None)
    assert value.isnan().tolist() == [[True, False, False]] * len(options)
    assert value.isneginf().tolist() == [[False, True, False]] * len(options)
    assert ((tokens >= 0) & (tokens < size)).all()


# ---- the answer is the row's alone


def test_how_the_work_is_cut_up_does_not_matter(monkeypatch):
    rows, how, expected = given(OPTIONS[2:12] if CUDA else OPTIONS[9:12], 6 if CUDA else 1, 600, seed=9)
    for sizes in [(64, 32, 1), (128, 1024, 16), (512, 256, 512)]:
        cut(monkeypatch, *sizes)
        assert differing(kernel.draw_rows(rows, how, None)[0], expected) == 0


def test_a_row_draws_the_same_alone_and_wherever_it_lies_in_memory():
    rows, how, expected = given(OPTIONS[3::3], 3, 300, seed=4)
    wide = torch.full((2, *rows.shape[:2], 333), torch.nan, dtype=rows.dtype, device=DEVICE)[1, :, :, 7:307]
    wide.copy_(rows)
    assert differing(kernel.draw_rows(wide, how, None)[0], expected) == 0
    for i in range(len(rows)):
        one = [getattr(how, name)[i : i + 1] for name in vars(how)]
        one[-1] = one[-1][:, 2:].contiguous()
        assert kernel.draw_rows(rows[i : i + 1, 2:], type(how)(*one), None)[0].item() == expected[i, 2]


@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_a_captured_graph_follows_the_tensors():
    b, n, size = len(PENALTIES), 8, 3000
    samplings = [Sampling(**p, **o) for p, o in zip(PENALTIES, OPTIONS[2:7], strict=True)]
    one, other = (Batch(samplings, n, size, seed, DEVICE) for seed in (1, 2))
    rows = logits(b, n, size, seed=3).to(DEVICE)
    mine = Batch([Sampling()] * b, n, size, 4, DEVICE)
    kernel.draw_rows(rows, mine.draws, mine.history)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens, value = kernel.draw_rows(rows, mine.draws, mine.history)
    for batch in (one, other, one):
        for part in ("draws", "history"):
            for name, tensor in vars(getattr(mine, part)).items():
                tensor.copy_(getattr(getattr(batch, part), name))
        graph.replay()
        found = kernel.draw_rows(rows, batch.draws, batch.history)
        assert torch.equal(tokens, found[0])
        assert torch.equal(value, found[1])


# ---- speed, on a GPU


def microseconds(call, repeats=20):
    """Of one call, from replays of a graph that makes several, as they follow each other in a step."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()
    times = []
    for _ in range(12):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / repeats)
    return float(np.median(times[2:]))


def speed():
    print(torch.cuda.get_device_name(), torch.__version__, "triton", triton.__version__)
    print("microseconds per call, bfloat16")
    shapes = [(1, 1, 49152), (1, 16, 49152), (4, 16, 49152), (1, 16, 151936)]
    print(" " * 60, *(f"{b}x{n}x{size:<8}" for b, n, size in shapes))
    flat = {"temperature": 5.0, "top_p": 0.95}
    for options in [*OPTIONS, flat]:
        times = []
        for b, n, size in shapes:
            rows = logits(b, n, size, seed=1).to(DEVICE)
            how = draws([Sampling(**options)] * b, range(b), np.arange(b * n).reshape(b, n), DEVICE)
            times.append(microseconds(lambda r=rows, h=how: kernel.draw_rows(r, h, None)))
        print(f"{options!s:<60}", *(f"{t:13.1f}" for t in times), flush=True)
    times = []
    for b, n, size in shapes:
        batch = Batch([Sampling(temperature=0.7, top_p=0.95, repetition_penalty=1.1)] * b, n, size, 1, DEVICE)
        rows = logits(b, n, size, seed=1).to(DEVICE)
        times.append(microseconds(lambda r=rows, x=batch: kernel.draw_rows(r, x.draws, x.history)))
    print(f"{'with a history, temperature 0.7, top p 0.95':<60}", *(f"{t:13.1f}" for t in times), flush=True)


def compare():
    options = OPTIONS * 4
    rows, how, expected = given(options, 100, 49152, seed=77)
    tokens = kernel.draw_rows(rows, how, None)[0]
    print(f"{differing(tokens, expected)} of {expected.numel()} rows of 49,152 logits differ from Sampler on the CPU")


if __name__ == "__main__":
    speed()
    compare()
