"""The machine: its devices, links and rates, from the catalog or measured here."""
