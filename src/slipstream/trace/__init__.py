"""Traces of one generation, as a file and as a page. The file is specified in docs/trace-format.md."""
