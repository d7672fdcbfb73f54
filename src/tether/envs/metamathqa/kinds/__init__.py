"""The kinds of word problems the generator writes, by subject; each is a function from random draws to a question with its solution."""
