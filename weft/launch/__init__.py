"""Starting ranks: launchers' environments, the agent, forked and local processes, one job per run folder."""
