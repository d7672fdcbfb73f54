"""The recipe of the embedded model `tiny`: demonstrations by a fallible solver, a small tokenizer, and training from scratch."""
