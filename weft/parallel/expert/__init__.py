"""Axis `expert`: the experts of each layer split over ranks."""
