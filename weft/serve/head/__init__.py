"""From the last hidden states to tokens: the head by graph search, and sampling."""
