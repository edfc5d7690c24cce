"""Reader of spire heads: a decoder's config.json with a `spire_config`, which is slipstream's own."""

from __future__ import annotations

from slipstream.heads.base import EMBEDDING, OUTPUT
from slipstream.heads.layer_fields import layer_fields, without_frequencies
from slipstream.heads.published import (
    Json,
    Published,
    Tensors,
    absent,
    count,
    count_drafts,
    read_ids,
    state_number,
)
from slipstream.heads.spire import Spire, SpireConfig


def read_spire(config: Json, tensors: Tensors) -> Published:
    own, about = without_frequencies(tensors), config["spire_config"]
    vocabulary, feedback = count(config, "vocab_size"), about["feedback"]
    if type(feedback) is not bool:
        raise ValueError(f"spire_config.feedback must be true or false, not {feedback!r}")
    fields = layer_fields(config, own, "layers.0.") | {"num_hidden_layers": count(config, "num_hidden_layers")}
    if fields["windows"]:
        raise ValueError("some of its layers see a sliding window besides spire_config.window, which we don't run")
    sizes = SpireConfig(
        vocab_size=vocabulary,
        hidden_size=count(config, "hidden_size"),
        aux_layers=tuple(state_number("spire_config.states", number) for number in about["states"]),
        draft_vocab_size=count(config, "draft_vocab_size", count_drafts(own, vocabulary)),
        recent=None if about["window"] is None else count(about, "window"),
        sinks=count(about, "sinks"),
        feedback=feedback,
        **fields,
    )
    read_ids(own, sizes.draft_vocab_size, vocabulary)
    return Published(Spire, sizes, own, absent(EMBEDDING, own) | absent(OUTPUT, own), layout="SPIRe (slipstream)")
