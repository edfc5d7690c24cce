"""The service's counts as Prometheus metrics, under the names that are usual in the field."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from slipstream.counts import Spread
from slipstream.server.backend import State


class Collector:
    def __init__(self, state: State) -> None:
        self.state = state

    def collect(self) -> Iterator[Metric]:
        state, counts = self.state, self.state.counts
        running = len(state.running)
        yield GaugeMetricFamily(
            "slipstream_num_requests_running", "Answers being written or prompts being read", running
        )
        yield GaugeMetricFamily("slipstream_num_requests_waiting", "Requests that wait", state.waiting)
        yield GaugeMetricFamily(
            "slipstream_kv_cache_usage_perc", "Share of the pages, or of the sequences", state.filled
        )
        for name, meaning, value in (
            ("prompt_tokens", "Tokens of prompts", counts.prompt_tokens),
            ("generation_tokens", "Tokens of answers", counts.new_tokens),
            ("forward_steps", "Forwards of the model, counted once for each answer in them", counts.steps),
            ("requests_refused", "Requests refused because too many waited", counts.refused),
            ("num_preemptions", "Answers that were put back because pages had run out", counts.put_back),
            (
                "prefix_cache_queries",
                "Prompt tokens looked for among texts that were read before",
                counts.prompt_tokens,
            ),
            ("prefix_cache_hits", "Prompt tokens found there", counts.found_tokens),
            ("spec_decode_num_drafts", "Steps that verified a draft", counts.drafts),
            ("spec_decode_num_draft_tokens", "Drafted tokens that were verified", counts.nodes),
            ("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted", counts.accepted),
        ):
            yield CounterMetricFamily(f"slipstream_{name}", meaning, value)
        depths = CounterMetricFamily(
            "slipstream_spec_decode_num_accepted_tokens_per_pos", "Accepted tokens by depth", labels=["position"]
        )
        for depth, times in enumerate(counts.by_depth):
            depths.add_metric([str(depth)], times)
        yield depths
        drafters = CounterMetricFamily(
            "slipstream_spec_decode_num_accepted_tokens_by_drafter", "Accepted tokens by drafter", labels=["drafter"]
        )
        for name, counted in counts.by_source.items():
            drafters.add_metric([name], counted["accepted"])
        yield drafters
        ended = CounterMetricFamily(
            "slipstream_request_success", "Answers by why they ended", labels=["finished_reason"]
        )
        for reason, times in counts.ended.items():
            ended.add_metric([reason], times)
        yield ended
        yield histogram(
            "slipstream_time_to_first_token_seconds", "From a request to its first token", counts.first_token
        )
        yield histogram("slipstream_inter_token_latency_seconds", "Per token after the first", counts.per_token)


def histogram(name: str, meaning: str, spread: Spread) -> HistogramMetricFamily:
    below, buckets = 0, []
    for bound, times in zip((*map(str, spread.bounds), "+Inf"), spread.counts, strict=True):
        below += times
        buckets.append((bound, float(below)))
    return HistogramMetricFamily(name, meaning, buckets=buckets, sum_value=spread.sum)


def exposition(state: State) -> bytes:
    registry = CollectorRegistry()
    registry.register(Collector(state))
    return generate_latest(registry)
