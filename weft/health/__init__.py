"""Tracks what each rank does and whether it makes progress: status pages, the watchdog, lost ranks."""
