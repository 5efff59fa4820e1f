"""Measures links between ranks, matmuls, memory and storage of this machine, and writes a cluster file."""
