"""The version of weft."""

VERSION = "0.1.0"
