"""From what a user names to a model and its tokenizer: hub ids, folders, adapters, GGUF files, the embedded model."""
