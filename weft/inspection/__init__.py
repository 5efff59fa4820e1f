"""What a model is made of: its blocks, how its layers can be split, and what its operations touch."""
