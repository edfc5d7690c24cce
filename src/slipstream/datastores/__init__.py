"""Datastores: token sequences on disk that a drafter looks continuations up in."""
