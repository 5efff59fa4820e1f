"""What is found on a text before serving: Loki's axes, the vocabulary's graph, corrected codes."""
