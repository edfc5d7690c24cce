"""From files that a user names to the tokens of a store: sources, records, encoding, resumable ingest."""
