"""Axis tile: images in tiles over ranks against the whole, layer by layer and model by model, in float64."""
