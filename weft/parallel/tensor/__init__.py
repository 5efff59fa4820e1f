"""The tensor axes `x` and `y`: split linears and convolutions over ranks."""
