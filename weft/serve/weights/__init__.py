"""Weights as a server keeps them: in fewer bits, with the products that read them, or in host memory."""
