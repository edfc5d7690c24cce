"""Datastores: token sequences on disk, in which drafters search for continuations."""
