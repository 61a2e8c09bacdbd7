"""The task `demonstration_prompting` and the datasets it hands to fairseq."""
