"""Matmuls in fp8: of linears (`matmuls.py`) and of experts (`experts.py`)."""
