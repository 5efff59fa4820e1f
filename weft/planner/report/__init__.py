"""The HTML page of `weft plan --report`."""
