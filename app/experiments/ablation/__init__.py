"""The ablation: why tutorials disagree. It applies each silent difference between typical scripts, one at a time."""
