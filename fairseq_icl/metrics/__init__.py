"""Metrics: pure functions on the observations of ZSL, ICL and FT. Importing the package registers all of them."""

from fairseq_icl.metrics import attention_maps, attention_outputs, predictions, training_attention, weight_space
from fairseq_icl.metrics.collect import Collector
from fairseq_icl.metrics.registry import Metric, Observation, Ratio, Similarity, get_metric, metric, metric_names
from fairseq_icl.metrics.training_attention import TrainingTokens
from fairseq_icl.metrics.weight_space import Projections, WeightUpdates

__all__ = [
    "Collector",
    "Metric",
    "Observation",
    "Projections",
    "Ratio",
    "Similarity",
    "TrainingTokens",
    "WeightUpdates",
    "attention_maps",
    "attention_outputs",
    "get_metric",
    "metric",
    "metric_names",
    "predictions",
    "training_attention",
    "weight_space",
]
