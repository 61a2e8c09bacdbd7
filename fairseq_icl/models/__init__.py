"""Models that the task can build around a pretrained decoder."""
