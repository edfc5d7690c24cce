"""Steps of fixed shape on a GPU: captured once as CUDA graphs, replayed for every draft of that shape."""
