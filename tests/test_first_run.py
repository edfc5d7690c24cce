"""What a newcomer sees: the first run of a fresh installation, with nothing compiled, measured or learnt."""

import os
import re
import subprocess
import sys

from patience import PATIENCE
from slipstream.loading import embedded


def test_the_first_answer_on_a_fresh_machine_is_drafted(tmp_path, smol):  # noqa: ARG001  (the model is there)
    """By tokens per step, since time is the machine's. Compiling was once charged to `auto`, which then rested: 1.0."""
    (tmp_path / "cache" / "models").mkdir(parents=True)
    folder = embedded.folder()
    (tmp_path / "cache" / "models" / folder.name).symlink_to(folder)
    fresh = {"NUMBA_CACHE_DIR": tmp_path / "numba", "SLIPSTREAM_CACHE": tmp_path / "cache"}
    hasty = {"NUMBA_OPT": "0"}  # compiling still takes many times what a step takes
    environment = {**os.environ, **hasty, **{name: str(path) for name, path in fresh.items()}}
    words = [sys.executable, "-m", "slipstream", "demo", "-n", "32"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert any((tmp_path / "numba").rglob("*.nbi"))  # it did compile
    found = re.search(r"slipstream \(auto\).* ([0-9.]+) tokens per step", done.stdout)
    assert found
    assert float(found[1]) > 1.5
    assert "the texts are identical" in done.stdout
