"""What one forward pass lets us see: probes on attention modules, and the shared-prefix decoder pass."""

from fairseq_icl.observe.batches import MAX_TOKENS, plan_batches
from fairseq_icl.observe.layout import Position
from fairseq_icl.observe.observation import Observation, concatenate
from fairseq_icl.observe.prefix import Prefix, run_prefix, supports_prefix
from fairseq_icl.observe.probe import AttentionProbe, AttentionRecord, attention_modules
from fairseq_icl.observe.queries import PrefixCache, observe_queries

__all__ = [
    "MAX_TOKENS",
    "AttentionProbe",
    "AttentionRecord",
    "Observation",
    "Position",
    "Prefix",
    "PrefixCache",
    "attention_modules",
    "concatenate",
    "observe_queries",
    "plan_batches",
    "run_prefix",
    "supports_prefix",
]
