"""What one forward pass lets us see: option scores and the activations of one token of each query."""

from fairseq_icl.observing.observation import Observation
from fairseq_icl.observing.observer import Observer, observe, observe_all

__all__ = ["Observation", "Observer", "observe", "observe_all"]
