"""Flat buffers: parameters, gradients and state in contiguous memory, split over ranks."""
