"""/metrics: figures for Prometheus, also under the names that gateways of Kubernetes read (vLLM's).

Owns: names and meanings. Refuses: counting inside the engine: it is asked when the page is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from colibri.drawing import Writing
from colibri.server.served import Served

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Metrics:
    """The figures of one server."""

    def __init__(self, served: Sequence[Served]) -> None:
        self.registry = CollectorRegistry()
        labels = ["model_name"]
        self._answered = Counter(
            "colibri_requests",
            "Requests answered, by path and status.",
            ["path", "status"],
            registry=self.registry,
        )
        self._prompt = Counter(
            "colibri_prompt_tokens", "Tokens of prompts, reused ones too.", labels, registry=self.registry
        )
        self._reused = Counter(
            "colibri_reused_tokens",
            "Tokens of prompts that were in the KV cache.",
            labels,
            registry=self.registry,
        )
        self._generated = Counter(
            "colibri_generation_tokens", "Tokens written.", labels, registry=self.registry
        )
        self._first = Histogram(
            "colibri_time_to_first_token_seconds",
            "Evaluation of the prompt.",
            labels,
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._each = Histogram(
            "colibri_time_per_output_token_seconds",
            "Mean over a text's tokens after the first.",
            labels,
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.registry.register(_Engines(served))
        for one in served:
            one.engine.on_end(partial(self._wrote, one.name))

    def answered(self, path: str, status: int) -> None:
        self._answered.labels(path, str(status)).inc()

    def _wrote(self, name: str, writing: Writing) -> None:
        """A text has ended, or its reader has left."""
        work, n = writing.work, len(writing.answer.ids)
        self._prompt.labels(name).inc(writing.n_prompt)
        self._reused.labels(name).inc(work.n_reused)
        self._generated.labels(name).inc(n)
        if n:
            self._first.labels(name).observe(work.prefill_seconds)
        if n > 1:
            self._each.labels(name).observe(work.decode_seconds / (n - 1))


class _Engines(Collector):
    """What the engines are doing when somebody asks."""

    def __init__(self, served: Sequence[Served]) -> None:
        self._served = served

    def collect(self) -> Iterator[Metric]:
        for name, other, text, value in _GAUGES:
            for one in (name, other):
                gauge = GaugeMetricFamily(one, text, labels=["model_name"])
                for served in self._served:
                    gauge.add_metric([served.name], value(served))
                yield gauge
        experts = GaugeMetricFamily(
            "colibri_expert_hit_rate",
            "Of streamed experts' uses, those found in memory.",
            labels=["model_name"],
        )
        for served in self._served:
            if served.model.residency == "streamed":
                experts.add_metric([served.name], served.model.stats.hit_rate)
        yield experts


def _filled(served: Served) -> float:
    load = served.engine.load()
    return load.positions / load.capacity


_GAUGES: tuple[tuple[str, str, str, Callable[[Served], float]], ...] = (
    (
        "colibri_requests_running",
        "vllm:num_requests_running",
        "Texts that are being read or written.",
        lambda served: served.engine.load().running,
    ),
    (
        "colibri_requests_waiting",
        "vllm:num_requests_waiting",
        "Requests that wait for a place.",
        lambda served: served.engine.load().waiting,
    ),
    (
        "colibri_kv_cache_usage",
        "vllm:kv_cache_usage_perc",
        "Share of the KV cache's positions that running requests hold, 0 to 1.",
        _filled,
    ),
)
