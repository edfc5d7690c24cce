"""Read a GGUF file as a float32 model and its tokenizer, with transformers, whose slow parts are replaced.

transformers goes through the file's metadata three times with the gguf package's reader, which makes several numpy
objects of every token and every merge of a vocabulary: most of the time, ahead of dequantising.
"""

from __future__ import annotations

import functools
import logging
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf import GGUFValueType

from slipstream.loading.dequantize import dequantize

log = logging.getLogger("slipstream")
_lock = threading.Lock()


def read_model(path: Path) -> Any:
    """The model in float32. Newer versions of transformers can keep weights quantised, which is switched off."""
    options: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    with quick_gguf():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32, **options
        )
    model.hf_quantizer, model.is_quantized = None, False  # the weights are plain float32 now
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model


def read_tokenizer(path: Path) -> Any:
    with quick_gguf():
        return transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


class QuickReader(gguf.GGUFReader):
    """Like its base class, but strings of arrays are bytes, and numbers are views of one array."""

    @property
    def data(self) -> Any:
        return self._data

    @data.setter
    def data(self, mapped: Any) -> None:
        self._data = mapped.view(np.ndarray)  # slices of a memmap are memmaps, which take much longer to make

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type != GGUFValueType.ARRAY or self.byte_order != "I":
            return super()._get_field_parts(orig_offs, raw_type)
        inner, count = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
        kind, start = GGUFValueType(inner[0]), orig_offs + 12
        if kind == GGUFValueType.STRING:
            values, end = self._strings(start, int(count[0]))
        elif kind in self.gguf_scalar_to_np:
            whole = self._get(start, self.gguf_scalar_to_np[kind], count[0])
            values, end = list(whole.reshape(-1, 1)), start + whole.nbytes
        else:
            return super()._get_field_parts(orig_offs, raw_type)
        types = [GGUFValueType.ARRAY, *([kind] if values else [])]
        return end - orig_offs, [inner, count, *values], list(range(2, 2 + len(values))), types

    def _strings(self, start: int, count: int) -> tuple[list[Any], int]:
        """So many strings, each stored after its length, and the end of the last one."""
        raw, found = memoryview(self._data), []
        for _ in range(count):
            (length,) = struct.unpack_from("=Q", raw, start)
            found.append(bytes(raw[start + 8 : start + 8 + length]))
            start += 8 + length
        return found, start


@contextmanager
def quick_gguf() -> Iterator[None]:
    """A block in which the gguf package reads quickly. The table of tensor names, which transformers makes for each
    module of a model, is cached."""
    quick = {
        "GGUFReader": QuickReader,
        "dequantize": dequantize,
        "get_tensor_name_map": functools.cache(gguf.get_tensor_name_map),
    }
    with _lock:
        before = {name: getattr(gguf, name) for name in quick}
        vars(gguf).update(quick)
        try:
            yield
        finally:
            vars(gguf).update(before)
