"""Load models and tokenizers: from hub ids, folders, adapters, GGUF files, and the embedded model."""
