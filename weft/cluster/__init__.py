"""Describes clusters: devices, links and their rates, from the catalog or from this machine."""
