"""Keys and values in pages, and attention to them: plain, in 4 bits, or to chosen tokens (Loki)."""
