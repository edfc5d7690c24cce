"""The store on disk: segments, a log and a manifest that survive a crash at any instant. See docs/store-format.md."""
