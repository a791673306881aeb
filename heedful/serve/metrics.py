"""`Metrics`: counters and histograms of a server, in Prometheus' format, for the route /metrics."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from heedful.infer.bundle_engine import BundleEngine
from heedful.infer.scheduling.scheduler import Scheduler
from heedful.serve.middleware import RequestLog
from heedful.serve.vector_drift import VectorDrift
from heedful.tasks.answering import Answer

# upper bounds of the buckets of histograms
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
COUNTS = tuple(float(2**power) for power in range(15))
PROBABILITIES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
METHODS = ("GET", "HEAD", "POST")  # HTTP methods in labels; any other method has the label "other"


class Metrics:
    """The counters and histograms of a server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self.requests = Counter(
            "heedful_requests", "Requests by route, method and status", ["route", "method", "status"], registry=registry
        )
        self.seconds = Histogram(
            "heedful_request_duration_seconds",
            "Time from a request's headers to its response",
            ["route"],
            buckets=SECONDS,
            registry=registry,
        )
        self.tokens = Counter("heedful_tokens", "Tokens of answered requests", registry=registry)
        # the next five metrics, and those of `_VectorCollector`, show whether texts drift away from the training data
        self.input_tokens = Histogram(
            "heedful_input_tokens", "Tokens of a text or pair by model", ["model"], buckets=COUNTS, registry=registry
        )
        self.unknown_tokens = Counter(
            "heedful_unknown_tokens", "Tokens that the vocabulary lacks, by model", ["model"], registry=registry
        )
        self.stages = Counter(
            "heedful_cascade_answers",
            "Texts by the stage of a cascade that classified them",
            ["model", "stage"],
            registry=registry,
        )
        self.labels = Counter(
            "heedful_predicted_labels",
            "Texts for which a classifier predicted a label",
            ["model", "label"],
            registry=registry,
        )
        self.confidences = Histogram(
            "heedful_label_probability",
            "Probability of the most probable label",
            ["model"],
            buckets=PROBABILITIES,
            registry=registry,
        )
        self.batch_sequences = Histogram(
            "heedful_batch_sequences", "Sequences (windows of texts) in a batch", buckets=COUNTS, registry=registry
        )
        self.batch_tokens = Histogram("heedful_batch_tokens", "Tokens in a batch", buckets=COUNTS, registry=registry)
        self.batch_seconds = Histogram(
            "heedful_batch_duration_seconds", "Time of the model for a batch", buckets=SECONDS, registry=registry
        )
        self._drifts: dict[str, VectorDrift] = {}  # by model
        registry.register(_VectorCollector(self._drifts))

    def count_request(self, method: str, record: RequestLog, seconds: float) -> None:
        """Count a request that was answered."""
        route = record.route or "none"  # one label for all unknown paths, since clients can invent any number of them
        method = method if method in METHODS else "other"
        self.requests.labels(route, method, str(record.status)).inc()
        self.seconds.labels(route).observe(seconds)
        self.tokens.inc(record.tokens)

    def count_inputs(self, model: str, tokens: Sequence[int], unknown: int) -> None:
        """Count the tokens of inputs.

        Args:
            model: Name of the model.
            tokens: Number of tokens of each input.
            unknown: Number of unknown tokens in all inputs.
        """
        for count in tokens:
            self.input_tokens.labels(model).observe(count)
        self.unknown_tokens.labels(model).inc(unknown)

    def count_predictions(self, model: str, answers: Sequence[Answer]) -> None:
        """Count the predicted labels of a classifier, their probabilities, and the stages of a cascade."""
        for answer in answers:
            if "labels" in answer:
                labels = answer["labels"]
            elif "label" in answer:
                labels = [answer["label"]]
            else:
                labels = []
            for label in labels:
                self.labels.labels(model, label).inc()
            if "stage" in answer:
                self.stages.labels(model, str(answer["stage"])).inc()
            if "probability" in answer:
                self.confidences.labels(model).observe(answer["probability"])

    def count_batch(self, sequences: int, tokens: int, seconds: float) -> None:
        """Count a batch that has run."""
        self.batch_sequences.observe(sequences)
        self.batch_tokens.observe(tokens)
        self.batch_seconds.observe(seconds)

    def observe_vectors(self, model: str, engine: BundleEngine) -> None:
        """Report the vectors of the texts that an engine reads from now on, instead of those of an earlier engine."""
        self._drifts.pop(model, None)
        if (drift := VectorDrift.of(engine)) is not None:
            self._drifts[model] = drift

    def add_scheduler(self, scheduler: Scheduler) -> None:
        """Add the gauges and counters of a scheduler; their values are read when the metrics are requested."""
        self.registry.register(_SchedulerCollector(scheduler))

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class _SchedulerCollector:
    """A collector of Prometheus metrics that reads the state of a scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler

    def collect(self) -> list[GaugeMetricFamily | CounterMetricFamily]:
        """Return the current values of the gauges and counters."""
        scheduler = self.scheduler
        gauges = {
            "requests_in_flight": ("Requests that wait or run", scheduler.active_requests),
            "requests_in_flight_limit": ("limits.max_concurrent_requests", scheduler.limits.max_concurrent_requests),
            "queued_tokens": ("Tokens of waiting requests", scheduler.waiting_tokens),
            "queued_tokens_limit": ("limits.max_queued_tokens", scheduler.limits.max_queued_tokens),
            "queued_characters": ("Characters of long requests not tokenised yet", scheduler.queued_characters),
            "queued_characters_limit": ("limits.max_queued_characters", scheduler.limits.max_queued_characters),
            "generation_batches_in_flight": ("Batches of /generate being decoded", scheduler.decodings),
            "draining": ("1 while the server shuts down, else 0", int(scheduler.draining)),
        }
        counts = scheduler.counts
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


class _VectorCollector:
    """A collector of Prometheus metrics that computes distances of vectors when the metrics are requested."""

    def __init__(self, drifts: dict[str, VectorDrift]) -> None:
        self.drifts = drifts

    def collect(self) -> list[GaugeMetricFamily]:
        """Return the distance of each model's last texts, and quantiles of the distance of held-out texts."""
        distances = GaugeMetricFamily(
            "heedful_vector_distance",
            "Distance of the mean vector of the last texts from that of the training texts",
            labels=["model"],
        )
        held_out = GaugeMetricFamily(
            "heedful_held_out_vector_distance",
            "Quantiles of heedful_vector_distance for as many held-out texts",
            labels=["model", "quantile"],
        )
        for model, drift in list(self.drifts.items()):
            if (distance := drift.distance) is not None:
                distances.add_metric([model], distance)
            for quantile, value in drift.training.held_out.items():
                held_out.add_metric([model, quantile], value)
        return [distances, held_out]
