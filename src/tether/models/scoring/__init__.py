"""Scorers: log p(reasoning | prompt), by a model here, by a server, or by a model with another tokenizer."""
