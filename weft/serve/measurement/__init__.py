"""Measures what a decode takes on this CPU: threads, products, layers and graph searches."""
