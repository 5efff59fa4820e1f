"""The planner: how long a step takes and what it holds under any plan, and the search for the best one."""
