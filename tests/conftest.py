import gc
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest

gc.disable()  # until all is imported and collected: it would go through what stays, again and again

# Nothing heavy is imported here: the process that only hands out tests would wait for it before the others begin.

REAL = {"smol", "shallow", "babble", "small", "forked", "browser", "forker"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Whoever asks for a real model, a process or a browser is slow; other tests say so themselves."""
    for item in items:
        if REAL & set(item.fixturenames):
            item.add_marker("slow")


def pytest_ignore_collect(collection_path, config):
    """`make test-fast` need not import files that are slow as a whole, and what only they import."""
    if config.option.markexpr == "not slow" and collection_path.suffix == ".py":
        return "\npytestmark = pytest.mark.slow\n" in collection_path.read_text("utf-8") or None
    return None


def pytest_collection_finish():
    """What imports made stays: the collector need not go through that later either."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def tiny():
    """tiny(family) -> a random model, made once."""
    from families import tiny_model

    made = {}

    def make(family):
        if family not in made:
            made[family] = tiny_model(family)
        return made[family]

    return make


@pytest.fixture(scope="session", autouse=True)
def quiet():
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@pytest.fixture(scope="session", autouse=True)
def nothing_learnt():
    """`auto` begins every test knowing nothing of the others; those about what it keeps undo this."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("slipstream.drafters.auto.recall", lambda *_: None)
        patch.setattr("slipstream.drafters.auto.remember", lambda *_: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def no_power_failures():
    """Files outlive a process that is killed, so nobody waits for the disk: that was half of the time of many tests of
    stores. Those about power failures watch the calls."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "fdatasync"):
            patch.setattr(os, name, os.fstat)  # which refuses a file that is closed too
        yield


@pytest.fixture(autouse=True)
def small_products(request, monkeypatch):
    """Without oneDNN, which on Arm takes 0.1 ms to begin a product of tiny matrices. Real models keep it."""
    if not REAL & set(request.fixturenames):
        import torch

        monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)


@pytest.fixture(scope="session")
def smol():
    """The embedded model in float32 behind `pld`."""
    import slipstream

    return slipstream.load(drafter="pld", dtype="float32")


@pytest.fixture(scope="session")
def shallow(smol):
    """Its first and last three layers alone: for tests that compare texts and don't care what they say. They wander."""
    import copy

    import slipstream

    model = copy.deepcopy(smol.model, {id(weight): weight for weight in smol.model.parameters()})  # weights are shared
    model.model.layers = model.model.layers[:3] + model.model.layers[-3:]
    model.config.num_hidden_layers = len(model.model.layers)
    for i, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = i
    return slipstream.LLM(model, smol.tokenizer, "pld")


@pytest.fixture(scope="session")
def babble():
    """A tiny model with the embedded one's tokenizer: for servers, which don't care what is said. Even of three layers
    the embedded model takes most of a step for its vocabulary."""
    from transformers import AutoTokenizer

    import slipstream
    from families import tiny_model
    from slipstream.loading import embedded

    tokenizer = AutoTokenizer.from_pretrained(embedded.ensure())
    model = tiny_model("llama", vocab_size=len(tokenizer), max_position_embeddings=8192)
    return slipstream.LLM(model, tokenizer, "pld")


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """The folder of a tiny model with the embedded one's tokenizer: for commands whose answers may be nonsense."""
    from test_chat import save_model

    return save_model(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="session")
def forked():
    """forked.run("generate", …) -> what a command in a process of its own printed, and its exit code."""
    from forked import Forker

    forker = Forker()
    yield forker
    forker.close()


@pytest.fixture(scope="session")
def forker():
    """forker.start("write", …) -> a job on a store, in a process of its own that can be killed."""
    from store_jobs import Forker

    forker = Forker()
    yield forker
    forker.close()


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    """A real chromium."""
    from browser import CHROMIUM, Browser

    if CHROMIUM is None:
        pytest.skip("NO BROWSER: pages are not tested; install chromium")

    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()
