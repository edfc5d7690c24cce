"""Training: the target answers prompts (`collect`), and heads learn from its answers (`train`)."""
