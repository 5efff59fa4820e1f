"""Where each rank is and whether it makes progress: status pages, the watchdog, lost ranks."""
