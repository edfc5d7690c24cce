"""Training: the target answers prompts (`collect`), and heads are trained on its answers (`train`)."""
