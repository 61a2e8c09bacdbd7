"""Metrics: pure functions on the observations of ZSL, ICL and FT. Importing the package registers all of them."""

from fairseq_icl.metrics import attention_maps, attention_outputs, predictions, training_attention
from fairseq_icl.metrics.registry import Metric, Observation, Ratio, Similarity, get_metric, metric, metric_names

__all__ = [
    "Metric",
    "Observation",
    "Ratio",
    "Similarity",
    "attention_maps",
    "attention_outputs",
    "get_metric",
    "metric",
    "metric_names",
    "predictions",
    "training_attention",
]
