"""The kinds of word problems the generator writes, by subject; each is a function from chance to a question with its way of solving it."""
