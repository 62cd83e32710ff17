"""HiSparse's counters on vLLM's `/metrics`.

vLLM carries the statistics of a KV connector from the workers to the server and lets the connector publish them. This
connector transfers nothing; ``hisparse serve`` configures it::

    --kv-transfer-config '{"kv_connector": "HiSparseMetrics", "kv_role": "kv_both",
                           "kv_connector_module_path": "hisparse.integrations.vllm.metrics"}'
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, NamedTuple

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from hisparse.integrations.vllm.backend import current_runtime

INTERVAL = 1.0
"""Seconds between two readings of the workers' counters, which on a GPU means waiting for it."""


class Metric(NamedTuple):
    """`counter`: it only grows, and ranks add up; else a gauge, of which the last reading of any rank counts."""

    counter: bool
    help: str


METRICS = {
    "packed_tokens": Metric(True, "Tokens packed, once for all layers."),
    "recall_steps": Metric(True, "Layers' attention steps that recalled rows, one for each query."),
    "recalled_rows": Metric(True, "Rows read back, all layers."),
    "recalled_bytes": Metric(True, "Bytes of the rows read back, all layers."),
    "hot_hits": Metric(True, "Recalled rows that lay in a hot buffer on the device, all layers."),
    "hot_misses": Metric(True, "Recalled rows that a hot buffer had to read from host memory, all layers."),
    "anchor_hit_rate": Metric(
        False, "Share of a decode query's attention on dense and kept tokens, since the last reading, one layer."
    ),
    "device_bytes": Metric(False, "Bytes of the KV pool on the device, all layers."),
    "hot_bytes": Metric(False, "Bytes of the hot buffers on the device, all layers."),
    "host_bytes": Metric(False, "Bytes of the pool of rows in host memory, all layers."),
    "capacity_ratio": Metric(False, "Bytes in a dense bfloat16 cache over bytes here, at the longest request allowed."),
    "faulty_blocks": Metric(True, "Blocks of K or V that held inf or NaN: what was packed of them means nothing."),
    "quantisation_error": Metric(False, "Relative error of the keys of the page checked last, mean over layers."),
}
PREFIX = "hisparse:"


@dataclass
class HiSparseStats(KVConnectorStats):  # type: ignore[misc]
    """Readings by name: growth of counters since the last reading, values of gauges."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: Any) -> HiSparseStats:
        for name, value in other.data.items():
            grows = METRICS[name].counter
            self.data[name] = self.data.get(name, 0) + value if grows else value
        return self

    def reduce(self) -> dict[str, int | float]:
        return {f"HiSparse {name}": value for name, value in self.data.items()}

    def is_empty(self) -> bool:
        return not self.data


class _Published(KVConnectorPromMetrics):  # type: ignore[misc]
    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: list[str], values: dict[int, list[Any]]
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, values)
        self.metrics: dict[str, dict[int, Any]] = {}
        for name, metric in METRICS.items():
            kind = metric_types[Counter if metric.counter else Gauge]
            made = kind(name=PREFIX + name, documentation=metric.help, labelnames=labelnames)
            self.metrics[name] = {index: made.labels(*labels) for index, labels in values.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            target = self.metrics[name][engine_idx]
            if METRICS[name].counter:
                target.inc(value)
            else:
                target.set(value)


class HiSparseMetrics(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """A connector that brings no KV from anywhere, and carries statistics."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.worker = role == KVConnectorRole.WORKER
        self.last: dict[str, float] = {}
        self.due = 0.0

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        return False, None

    def get_kv_connector_stats(self) -> HiSparseStats | None:
        """What has changed since the last reading, in a worker and at most once in INTERVAL."""
        now = time.monotonic()
        if not self.worker or now < self.due:
            return None
        self.due = now + INTERVAL
        found = current_runtime().statistics()
        data = {name: found[name] - self.last.get(name, 0) if METRICS[name].counter else found[name] for name in found}
        self.last = found
        return HiSparseStats(data)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> HiSparseStats:
        return HiSparseStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[Any]]
    ) -> _Published:
        return _Published(vllm_config, metric_types, labelnames, per_engine_labelvalues)
