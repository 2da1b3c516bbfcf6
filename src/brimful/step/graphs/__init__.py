"""Steps and forward passes as CUDA graphs."""
