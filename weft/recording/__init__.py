"""What ranks recorded of their communication: files of a run, sums over ranks, stragglers, a page and a trace."""
