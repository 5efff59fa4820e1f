"""Starts ranks: reads launchers' environments, forks and restarts local processes, allows one job per run folder."""
