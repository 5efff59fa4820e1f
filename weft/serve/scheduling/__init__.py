"""What each step computes: requests, their blocks of the cache, grammars, and how many drafts are tried."""
