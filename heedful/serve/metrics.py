"""Prometheus metrics of a server."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from heedful.infer.scheduling.scheduler import Scheduler
from heedful.serve.middleware import RequestLog
from heedful.tasks.answering import Answer

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
POWERS = tuple(float(2**power) for power in range(15))
PROBABILITIES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
METHODS = ("GET", "HEAD", "POST")


class Metrics:
    """Counts and histograms of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        here = self.registry
        self.requests = Counter(
            "heedful_requests", "Requests by route, method and status", ["route", "method", "status"], registry=here
        )
        self.seconds = Histogram(
            "heedful_request_duration_seconds",
            "Time from a request's headers to its response",
            ["route"],
            buckets=SECONDS,
            registry=here,
        )
        self.tokens = Counter("heedful_tokens", "Tokens of answered requests", registry=here)
        # how far the texts of clients are from those of the training data
        self.input_tokens = Histogram(
            "heedful_input_tokens", "Tokens of a text or pair by model", ["model"], buckets=POWERS, registry=here
        )
        self.unknown_tokens = Counter(
            "heedful_unknown_tokens", "Tokens that the vocabulary lacks, by model", ["model"], registry=here
        )
        self.stages = Counter(
            "heedful_cascade_answers",
            "Texts by the stage of a cascade that classified them",
            ["model", "stage"],
            registry=here,
        )
        self.labels = Counter(
            "heedful_predicted_labels",
            "Texts for which a classifier predicted a label",
            ["model", "label"],
            registry=here,
        )
        self.confidences = Histogram(
            "heedful_label_probability",
            "Probability of the most probable label",
            ["model"],
            buckets=PROBABILITIES,
            registry=here,
        )
        self.batch_sequences = Histogram(
            "heedful_batch_sequences", "Sequences (windows of texts) in a batch", buckets=POWERS, registry=here
        )
        self.batch_tokens = Histogram("heedful_batch_tokens", "Tokens in a batch", buckets=POWERS, registry=here)
        self.batch_seconds = Histogram(
            "heedful_batch_duration_seconds", "Time of the model for a batch", buckets=SECONDS, registry=here
        )

    def saw(self, method: str, record: RequestLog, seconds: float) -> None:
        """A request was answered."""
        route = record.route or "none"  # a path that anybody invents is no label
        method = method if method in METHODS else "other"
        self.requests.labels(route, method, str(record.status)).inc()
        self.seconds.labels(route).observe(seconds)
        self.tokens.inc(record.tokens)

    def read(self, model: str, tokens: Sequence[int], unknown: int) -> None:
        """Inputs were tokenised: the number of tokens of each, and how many of all are unknown."""
        for count in tokens:
            self.input_tokens.labels(model).observe(count)
        self.unknown_tokens.labels(model).inc(unknown)

    def classified(self, model: str, answers: Sequence[Answer]) -> None:
        """Texts were classified, by labels that the model was trained on."""
        for answer in answers:
            for label in answer["labels"] if "labels" in answer else [answer["label"]] if "label" in answer else []:
                self.labels.labels(model, label).inc()
            if "stage" in answer:
                self.stages.labels(model, str(answer["stage"])).inc()
            if "probability" in answer:
                self.confidences.labels(model).observe(answer["probability"])

    def ran(self, sequences: int, tokens: int, seconds: float) -> None:
        """A batch was run."""
        self.batch_sequences.observe(sequences)
        self.batch_tokens.observe(tokens)
        self.batch_seconds.observe(seconds)

    def watch(self, queue: Scheduler) -> None:
        """Show the queue, as it is whenever somebody looks."""
        self.registry.register(_Shown(queue))

    def text(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self.registry)


class _Shown:
    def __init__(self, queue: Scheduler) -> None:
        self.queue = queue

    def collect(self) -> list[GaugeMetricFamily | CounterMetricFamily]:
        queue = self.queue
        gauges = {
            "requests_in_flight": ("Requests that wait or run", queue.active_requests),
            "requests_in_flight_limit": ("limits.max_concurrent_requests", queue.limits.max_concurrent_requests),
            "queued_tokens": ("Tokens of waiting requests", queue.waiting_tokens),
            "queued_tokens_limit": ("limits.max_queued_tokens", queue.limits.max_queued_tokens),
            "queued_characters": ("Characters of long requests not tokenised yet", queue.queued_characters),
            "queued_characters_limit": ("limits.max_queued_characters", queue.limits.max_queued_characters),
            "generation_batches_in_flight": ("Batches of /generate being decoded", queue.decodings),
            "draining": ("1 while the server shuts down, else 0", int(queue.draining)),
        }
        counts = queue.counts
        totals = {
            "batch_retries": ("Batches run again in halves because an input failed", counts.retries),
            "failed_inputs": ("Inputs on which the model failed", counts.failed),
            "rejected_requests": ("Requests rejected because the server was full", counts.full),
            "expired_requests": ("Requests whose deadline passed", counts.expired),
            "cancelled_requests": ("Requests whose client disconnected", counts.cancelled),
        }
        return [
            *(
                GaugeMetricFamily(f"heedful_{name}", help_text, value=value)
                for name, (help_text, value) in gauges.items()
            ),
            *(
                CounterMetricFamily(f"heedful_{name}", help_text, value=value)
                for name, (help_text, value) in totals.items()
            ),
        ]
