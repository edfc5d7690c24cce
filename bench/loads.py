"""Memory after many loads of one model in one process: python bench/loads.py [LOADS] [DEVICE]

Each load answers one prompt and is closed. Prints what the GPU's allocator holds, or on a CPU what the process does.
"""

from __future__ import annotations

import gc
import resource
import sys
from time import perf_counter

import torch

import slipstream


def held(device: str) -> str:
    process = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    if device == "cpu":
        return f"{process:,} MB at most"
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    return f"{allocated:,} bytes allocated, {reserved:,} reserved; {process:,} MB of the host at most"


def main() -> None:
    loads = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    device = sys.argv[2] if len(sys.argv) > 2 else "cuda" if torch.cuda.is_available() else "cpu"
    clock = perf_counter()
    for number in range(1, loads + 1):
        with slipstream.load(drafter="eagle3" if number % 2 else "suffix", device=device, memory=0.1) as llm:
            llm.generate("The sea is", max_new_tokens=24)
        del llm
        gc.collect()
        if number < 5 or number % 10 == 0:
            print(f"{number}: {held(device)}, {perf_counter() - clock:.1f} s", flush=True)


if __name__ == "__main__":
    main()
