"""The tensor axes `x` and `y`: layers split over ranks."""
